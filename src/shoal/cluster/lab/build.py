"""Builds a lab: looks at the machine, writes down what is about to be made, and makes it; all of it or nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from shoal.cluster.lab import registry, ssh, topology
from shoal.cluster.lab.apply import apply
from shoal.cluster.lab.kernel import Features, lacks, observe, possible, substitutes
from shoal.cluster.lab.lab import Lab, why_stale
from shoal.cluster.lab.processes import started
from shoal.cluster.lab.removal import remove_locked
from shoal.cluster.lab.spec import LabSpec
from shoal.cluster.lab.state import LabState, Owner
from shoal.cluster.lab.steps import Step
from shoal.cluster.lab.topology import Site
from shoal.errors import LabError, UsageError


def up(spec: LabSpec, owner: int | None = None) -> Lab:
    """`owner` is a process: when it ends, however, the lab is removed. Such a lab is as it was asked for or not at all:
    what the process measures in it is recorded as measured on that lab."""
    features = observe()
    if owner is not None and (missing := lacks(spec, features)):
        raise LabError(
            f"this machine cannot build that lab: {'; '.join(missing)}",
            why="a run in a lab without it would be recorded as one with it",
            fix="leave that setting out of --on, or build the lab yourself and see what it lacks: shoal lab up",
        )
    state = plan_state(spec, features, owner)
    with registry.locked():
        _make_room(spec.name)
        registry.make_folder(spec.name)
        try:
            registry.write_state(state)
            _start_watcher(state)
            apply(build_steps(state))
            registry.write_state(state.model_copy(update={"ready": True}))
        except BaseException:
            remove_locked(spec.name)
            raise
    return Lab(spec.name)


def plan_state(spec: LabSpec, features: Features, owner: int | None = None) -> LabState:
    return LabState(
        spec=possible(spec, features),
        rootless=features.rootless,
        netem=features.netem,
        delay_line=features.delay_line,
        groups=features.groups,
        notes=(*substitutes(spec, features), *lacks(spec, features)),
        owner=_owner(owner),
    )


def build_steps(state: LabState) -> list[Step]:
    site = state.site(registry.lab_folder(state.spec.name))
    filtered = [node for node in state.spec.nodes if state.filtered(node)]
    rules = [step for node in filtered for step in topology.rules(node, site, state.rules(node))]
    return [*topology.up(state.spec, site), *rules, *_servers(state, site)]


def _servers(state: LabState, site: Site) -> list[Step]:
    if not state.spec.sshd:
        return []
    servers = [step for node in state.spec.nodes for step in ssh.start_server(node, site)]
    return [*ssh.make_keys(state.spec, site), *servers]


def _owner(pid: int | None) -> Owner | None:
    if pid is None:
        return None
    began = started(pid)
    if began is None:
        raise UsageError(f"no process {pid} can own a lab", why="it has ended")
    return Owner(pid=pid, started=began)


def _make_room(name: str) -> None:
    """What an interrupted `up`, a reboot or a dead owner left is cleared away; a lab that stands is not."""
    folder = registry.lab_folder(name)
    if not folder.exists():
        return
    if not why_stale(folder, registry.read_state(name)):
        raise UsageError(
            f"lab {name!r} is already up",
            why="every lab needs a name of its own",
            fix=f"shoal lab down --name {name}, or give the new one another --name",
        )
    remove_locked(name)


def _start_watcher(state: LabState) -> None:
    """Before anything else is made: from here on the owner's end is noticed."""
    if state.owner is None:
        return
    name = state.spec.name
    marks = state.site(registry.lab_folder(name)).environment("watcher")
    owner = (str(state.owner.pid), str(state.owner.started))
    watch = (sys.executable, "-P", "-m", "shoal.cluster.lab.watch", name, *owner)
    subprocess.run(
        ("env", *marks, "setsid", "--fork", *watch),  # noqa: S607
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=os.sep,
    )
