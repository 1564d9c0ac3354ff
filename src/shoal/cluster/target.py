"""What `--on` says.

local:4                      four ranks as processes on this machine
lab:3,link=1gbit,cpu=1/1/0.5 three emulated nodes, made for the run and removed with it
lab                          the lab that is up already; with a name: lab:NAME
hosts.toml                   machines over SSH: a cluster file, or an MPI or DeepSpeed hostfile
join:3                       this machine and two that join it by themselves, see shoal host
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.hosts.spec import HostsSpec, is_file, read_hosts
from shoal.cluster.lab.lab import Lab
from shoal.cluster.lab.spec import LabNode, LabSpec, parse_lab
from shoal.errors import UsageError

# SECTION cluster/join/spec
# `--on join:3`: this machine, and two that will come by themselves.


_JOIN = re.compile(r"join:(?P<machines>\d{1,9})(?:,address=(?P<address>[^,]+))?(?:,port=(?P<port>\d{1,5}))?")


@dataclass(frozen=True)
class JoinSpec:
    """One rank a machine. `address` is ours, by which the others reach us; left out, it is found."""

    machines: int
    address: str | None = None
    port: int = 0


def parse_join(text: str) -> JoinSpec:
    match = _JOIN.fullmatch(text)
    if match is None or int(match["machines"]) < 2:
        raise UsageError(
            f"--on {text!r} names no cluster",
            why="join:N is this machine and N - 1 others that join it, so N is at least 2",
            fix="write for example: --on join:2, or --on join:2,address=192.168.1.5",
        )
    return JoinSpec(int(match["machines"]), match["address"], int(match["port"] or 0))


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


# SECTION cluster/first_node
# The first machine of a cluster as a cluster of its own: what the others are measured against.


def first_node(on: On, folder: Path) -> str | None:
    """As `--on` has it, with whatever file that needs in `folder`. None where the first machine is not ours alone to
    name: guests of `join` come as they come."""
    match on:
        case LocalSpec():
            return "local:1"
        case StandingLab():
            return _lab_of(Lab.open(on.name).state.spec.nodes[0])
        case HostsSpec():
            return str(_write_hosts(on, folder / "first-host.toml"))
        case JoinSpec():
            return None
        case _:
            return _lab_of(on.nodes[0])


def _lab_of(node: LabNode) -> str:
    """Nothing travels on one node, so its link does not matter; its share of a core does."""
    return "lab:1" if node.cpu is None else f"lab:1,cpu={node.cpu:g}"


def _write_hosts(hosts: HostsSpec, path: Path) -> Path:
    """One rank on it, as on every other: what more of them gain is a question of its own."""
    said = hosts.hosts[0].model_dump(exclude_defaults=True, exclude_none=True)
    lines = [f"ssh_config = {json.dumps(str(hosts.ssh_config))}"] if hosts.ssh_config else []
    # Strings and numbers of JSON are those of TOML.
    lines += ["[[host]]", *(f"{key} = {json.dumps(value)}" for key, value in said.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
