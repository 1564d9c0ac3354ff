"""Parse `--on`.

local:4                      four ranks as processes on this machine
lab:3,link=1gbit,cpu=1/1/0.5 three emulated nodes, made for the run and removed with it
lab:2,slots=2                two ranks on each node
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
from shoal.cluster.lab.spec import LabNode, LabSpec, parse_lab
from shoal.errors import UsageError

_LOCAL = re.compile(r"local(?::(-?\d{1,9}))?")
_STANDING = re.compile(r"lab(?::([a-z][a-z0-9-]*))?")
_JOIN = re.compile(r"join:(?P<machines>\d{1,9})(?:,address=(?P<address>[^,]+))?(?:,port=(?P<port>\d{1,5}))?")
_HOSTS_FILES = (".toml", ".hosts", ".txt")


@dataclass(frozen=True)
class LocalSpec:
    """Ranks as processes on this machine."""

    ranks: int


@dataclass(frozen=True)
class ExistingLab:
    """A lab that was made with `shoal lab up`, and that stays when the run ends."""

    name: str | None


@dataclass(frozen=True)
class JoinSpec:
    """This machine and others that join it, with one rank each."""

    machines: int
    address: str | None = None  # ours, by which the others reach us; None: it is found
    port: int = 0


On = LocalSpec | LabSpec | ExistingLab | HostsSpec | JoinSpec


def parse_on(text: str) -> On:
    text = text.strip()
    if match := _LOCAL.fullmatch(text):
        ranks = int(match[1] or 1)
        if ranks < 1:
            raise UsageError(
                f"--on {text}: a world needs at least one rank", fix="write for example: --on local:2 for two ranks"
            )
        return LocalSpec(ranks)
    if match := _STANDING.fullmatch(text):
        return ExistingLab(match[1])
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


def parse_join(text: str) -> JoinSpec:
    match = _JOIN.fullmatch(text)
    if match is None or int(match["machines"]) < 2:
        raise UsageError(
            f"--on {text!r} names no cluster",
            why="join:N is this machine and N - 1 others that join it, so N is at least 2",
            fix="write for example: --on join:2, or --on join:2,address=192.168.1.5",
        )
    return JoinSpec(int(match["machines"]), match["address"], int(match["port"] or 0))


def absolute_on(on: str) -> str:
    """Return `on` such that it names the same cluster from every folder."""
    spec = parse_on(on)
    return str(spec.path.absolute()) if isinstance(spec, HostsSpec) else on


def weights_of(on: On) -> str | None:
    """Return one weight a rank, where a hosts file gives its machines different ones."""
    if not isinstance(on, HostsSpec) or len({host.weight for host in on.hosts}) == 1:
        return None
    return "/".join(f"{host.weight:g}" for host in on.hosts for _ in range(host.slots))


def rank_count(on: On) -> int:
    """Count ranks: as many as there are slots on the nodes of a lab or of a hosts file."""
    from shoal.cluster.lab.lab import Lab

    match on:
        case LocalSpec():
            return on.ranks
        case ExistingLab():
            return sum(node.slots for node in Lab.open(on.name).nodes)
        case LabSpec():
            return sum(node.slots for node in on.nodes)
        case HostsSpec():
            return sum(host.slots for host in on.hosts)
        case JoinSpec():
            return on.machines


def first_node(on: On, folder: Path) -> str | None:
    """Return the first machine of a cluster as an `--on` of its own: the others are measured against it.

    A file that this needs is written into `folder`. None for `join`, whose machines are not known beforehand.
    """
    from shoal.cluster.lab.lab import Lab

    match on:
        case LocalSpec():
            return "local:1"
        case ExistingLab():
            return _single_node_lab(Lab.open(on.name).state.spec.nodes[0])
        case HostsSpec():
            return str(_write_first_host(on, folder / "first-host.toml"))
        case JoinSpec():
            return None
        case _:
            return _single_node_lab(on.nodes[0])


def _single_node_lab(node: LabNode) -> str:
    """Keep the node's CPU share and slots. Its link does not matter: nothing is sent over it."""
    cpu = "" if node.cpu is None else f",cpu={node.cpu:g}"
    return f"lab:1{cpu}" + (f",slots={node.slots}" if node.slots > 1 else "")


def _write_first_host(hosts: HostsSpec, path: Path) -> Path:
    settings = hosts.hosts[0].model_dump(exclude_defaults=True, exclude_none=True)
    lines = [f"ssh_config = {json.dumps(str(hosts.ssh_config))}"] if hosts.ssh_config else []
    # Strings and numbers of JSON are those of TOML.
    lines += ["[[host]]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
