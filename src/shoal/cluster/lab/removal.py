"""Takes a lab down, whatever is left of it: a whole one, one whose building was killed half-way, or only its traces."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.cluster.lab import registry, topology
from shoal.cluster.lab.apply import apply
from shoal.cluster.lab.cgroup import freeze, node_groups_on_disk, read_groups
from shoal.cluster.lab.processes import end_all
from shoal.cluster.lab.steps import Step
from shoal.cluster.lab.topology import Site


def remove(name: str) -> None:
    with registry.locked():
        remove_locked(name)


def remove_locked(name: str) -> None:
    """Idempotent. Processes are found by the mark they carry, not by the pid files: a killed `up` left no whole set."""
    site, nodes = _what_is_left(name)
    apply(step for node in nodes for step in freeze(site.groups, name, node, frozen=False))
    end_all(site.folder)
    apply(topology.down(nodes, site))


def removal_steps(name: str) -> list[Step]:
    site, nodes = _what_is_left(name)
    return topology.down(nodes, site)


def _what_is_left(name: str) -> tuple[Site, list[str]]:
    folder = registry.lab_folder(name)
    site = _site(name, folder)
    return site, node_groups_on_disk(site.groups, name)


def _site(name: str, folder: Path) -> Site:
    state = registry.read_state(name)
    if state:
        return state.site(folder)
    return Site(name, folder, rootless=os.geteuid() != 0, netem=False, groups=read_groups())
