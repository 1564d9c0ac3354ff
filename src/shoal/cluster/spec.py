"""What `--on` says.

local:4                      four ranks as processes on this machine
lab:3,link=1gbit,cpu=1/1/0.5 three emulated nodes, made for the run and removed with it
lab                          the lab that is up already; with a name: lab:NAME
hosts.toml                   machines over SSH: a cluster file, or an MPI or DeepSpeed hostfile
join:3                       this machine and two that join it by themselves, see shoal host
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.hosts.spec import HostsSpec, is_file, read_hosts
from shoal.cluster.join.spec import JoinSpec, parse_join
from shoal.cluster.lab.lab import Lab
from shoal.cluster.lab.spec import LabSpec, parse_lab
from shoal.errors import UsageError

_LOCAL = re.compile(r"local(?::(-?\d{1,9}))?")
_STANDING = re.compile(r"lab(?::([a-z][a-z0-9-]*))?")


@dataclass(frozen=True)
class LocalSpec:
    """Ranks as processes on this machine."""

    ranks: int


@dataclass(frozen=True)
class StandingLab:
    """A lab that somebody made with `shoal lab up`, and that stays when the run ends."""

    name: str | None


On = LocalSpec | LabSpec | StandingLab | HostsSpec | JoinSpec

_HOSTS_FILES = (".toml", ".hosts", ".txt")


def parse_on(text: str) -> On:
    text = text.strip()
    if match := _LOCAL.fullmatch(text):
        return _local(text, int(match[1] or 1))
    if match := _STANDING.fullmatch(text):
        return StandingLab(match[1])
    if text.startswith("lab:"):
        return parse_lab(text)
    if text.startswith("join:"):
        return parse_join(text)
    if "/" in text or text.endswith(_HOSTS_FILES) or is_file(Path(text)):
        return read_hosts(Path(text))
    raise UsageError(
        f"--on {text!r} names no cluster",
        why="ranks run on this machine (local:N), on the nodes of a lab (lab:N) or on the machines of a hosts file",
        fix="write for example: --on local:2, --on lab:3,link=1gbit or --on hosts.toml",
    )


def settled(on: str) -> str:
    """The same cluster from wherever the run is looked at or resumed later."""
    found = parse_on(on)
    return str(found.path.absolute()) if isinstance(found, HostsSpec) else on


def weights_of(on: On) -> str | None:
    """One number a rank, where a hosts file says that its machines are not alike."""
    if not isinstance(on, HostsSpec) or len({host.weight for host in on.hosts}) == 1:
        return None
    return "/".join(f"{host.weight:g}" for host in on.hosts for _ in range(host.slots))


def rank_count(on: On) -> int:
    """A lab's nodes take one rank each, a host as many as it has slots."""
    match on:
        case LocalSpec():
            return on.ranks
        case StandingLab():
            return len(Lab.open(on.name).nodes)
        case LabSpec():
            return len(on.nodes)
        case HostsSpec():
            return sum(host.slots for host in on.hosts)
        case JoinSpec():
            return on.machines


def _local(text: str, ranks: int) -> LocalSpec:
    if ranks < 1:
        raise UsageError(
            f"--on {text}: a world needs at least one rank", fix="write for example: --on local:2 for two ranks"
        )
    return LocalSpec(ranks)
