"""The first machine of a cluster as a cluster of its own: what the others are measured against."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.join.spec import JoinSpec
from shoal.cluster.lab.lab import Lab
from shoal.cluster.lab.spec import LabNode
from shoal.cluster.spec import LocalSpec, On, StandingLab


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
