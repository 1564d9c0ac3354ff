"""What earlier runs left behind, ours and other people's, and what a run will want and cannot have."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shoal.net.checks.commands import again, sudo
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Facts, Scene
from shoal.units import format_duration

_FILES = 1024
_ENOUGH_FILES = 4096
_KEEPING = ("keeper", "messenger")
_NAMED = 4

Process = dict[str, Any]


def port(scene: Scene) -> Iterator[Finding]:
    for node in scene.nodes:
        seen = scene.facts.get(node.name, {}).get("processes", {})
        if holders := seen.get("port", {}).get("holders"):
            # Rank 0 serves the store, and it is on the first node.
            is_first = node is scene.nodes[0]
            yield _taken(scene, node.name, seen, holders, Severity.ERROR if is_first else Severity.INFO)


def _taken(scene: Scene, node: str, seen: Facts, holders: list[Process], severity: Severity) -> Finding:
    number, ours = seen["port"]["number"], [holder for holder in holders if "run" in holder]
    meaning = (
        "the ranks cannot meet at this port"
        if severity is Severity.ERROR
        else f"it does no harm: ranks meet on the first machine, {scene.nodes[0].name}"
    )
    if not ours:
        meaning += "; what holds it is not shoal's, so end it yourself if you know it, or leave --port out"
    return Finding(
        "port.taken",
        severity,
        node,
        f"port {number} is taken: " + "; ".join(dict.fromkeys(_holder(holder) for holder in holders)),
        meaning,
        _end(ours, seen) if ours and severity is Severity.ERROR else "",
        f"ss -ltnp 'sport = :{number}'; {again(scene)} --port {number}",
    )


def _holder(holder: Process) -> str:
    if not holder["pid"]:
        return f"by a process of {holder['user']} that we may not look at"
    run = f", of shoal's run {holder['run']}" if "run" in holder else f", of {holder['user']}"
    return f"by {_shown(holder)}{run}"


def workers(scene: Scene) -> Iterator[Finding]:
    for node, facts in scene.facts.items():
        seen = facts.get("processes", {})
        for run, processes in _by(seen.get("marked", []), "run"):
            yield _left(scene, node, run, processes, seen) if is_left(processes) else _going_on(node, run, processes)
        for master, processes in _by(seen.get("strays", []), "master_addr"):
            yield _stray(scene, node, master, processes)


def is_left(processes: list[Process]) -> bool:
    """Parents are gone, and nobody looks after the rest: no keeper, no messenger of one elsewhere, no launcher."""
    kept = any(each["part"] in _KEEPING or (each["part"] == "agent" and not each["orphan"]) for each in processes)
    return not kept and any(each["orphan"] for each in processes)


def _going_on(node: str, run: str, processes: list[Process]) -> Finding:
    return Finding(
        "speed.run",
        Severity.INFO,
        node,
        f"shoal's run {run} is going on, for {format_duration(max(each['age_s'] for each in processes))}",
        "two runs share the cores and the network, and both are slower",
    )


def _left(scene: Scene, node: str, run: str, processes: list[Process], seen: Facts) -> Finding:
    return Finding(
        "leftover.worker",
        Severity.WARNING,
        node,
        f"shoal's run {run} has no keeper any more, and there are still {_listed(processes)}",
        "they take cores and memory from the next run; stop them if you do not want that run to go on",
        _end(processes, seen),
        again(scene),
    )


def _stray(scene: Scene, node: str, master: str, processes: list[Process]) -> Finding:
    return Finding(
        "leftover.worker",
        Severity.WARNING,
        node,
        f"ranks of somebody's torch job around {master} have lost whoever started them: {_listed(processes)}",
        "they are not shoal's; they wait for peers that may never come and take cores, memory and ports meanwhile",
        _kill(processes),
        again(scene),
    )


def _end(processes: list[Process], seen: Facts) -> str:
    """By the run's name where it is still known there; otherwise exactly these processes."""
    if seen.get("has_command") and processes[0]["has_folder"]:
        return f"shoal stop {shlex.quote(processes[0]['run'])}"
    return _kill(processes)


def _kill(processes: list[Process]) -> str:
    """What stands still, by Ctrl-Z or a debugger, hears nothing but -KILL."""
    loud = " -KILL" if any(each["stopped"] for each in processes) else ""
    return f"kill{loud} " + " ".join(dict.fromkeys(str(each["pid"]) for each in processes))


def _listed(processes: list[Process]) -> str:
    more = [f"and {len(processes) - _NAMED} more"] if len(processes) > _NAMED else []
    return "; ".join([*(_shown(each) for each in processes[:_NAMED]), *more])


def _shown(process: Process) -> str:
    return f"process {process['pid']} ({process['command']}), {format_duration(process['age_s'])} old"


def _by(processes: list[Process], key: str) -> Iterator[tuple[str, list[Process]]]:
    ordered = sorted(processes, key=lambda process: (str(process[key]), int(process["pid"])))
    return ((name, list(group)) for name, group in groupby(ordered, key=lambda process: str(process[key])))


def files(scene: Scene) -> Iterator[Finding]:
    for node, facts in scene.facts.items():
        seen = facts.get("processes", {})
        soft, hard = seen.get("files", {}).get("soft"), seen.get("files", {}).get("hard")
        if soft is not None and soft < _FILES:
            yield Finding(
                "limits.files",
                Severity.WARNING,
                node,
                f"a process may open {soft} files (soft limit; hard limit {'none' if hard is None else hard})",
                "every connection counts as an open file: a run can stop with 'too many open files'",
                _more_files(seen, hard, facts),
                f"ulimit -n; {again(scene)}",
            )


def _more_files(seen: Facts, hard: int | None, facts: Facts) -> str:
    raised = hard is None or hard >= _ENOUGH_FILES
    if raised and not seen.get("over_ssh"):
        return f"ulimit -n {_ENOUGH_FILES}"
    # For the next login: what is typed in one SSH session says nothing to another.
    line = f"{seen['user']} {'soft' if raised else '-'} nofile {_ENOUGH_FILES}"
    return f"echo {shlex.quote(line)} | {sudo(facts)}tee /etc/security/limits.d/90-shoal.conf"
