"""Checks of processes: who has the store's port, what earlier runs left behind, how many files may be open."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, sudo
from shoal.units import format_duration

_FEW_FILES = 1024
_ENOUGH_FILES = 4096
# Parts of a run that look after its ranks; a messenger belongs to a supervisor on another machine.
_SUPERVISING_PARTS = ("supervisor", "messenger")
_LISTED_PROCESSES = 4

Process = dict[str, Any]


def check_port(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that the port is free. It matters on the first node, where rank 0 serves the store."""
    first = cluster.nodes[0].name
    for node, _, facts in cluster.topic("processes"):
        holders = facts.get("port", {}).get("holders")
        if not holders:
            continue
        is_first = node.name == first
        number, of_shoal = facts["port"]["number"], [holder for holder in holders if "run" in holder]
        meaning = (
            "the ranks cannot meet at this port"
            if is_first
            else f"it does no harm: ranks meet on the first machine, {first}"
        )
        if not of_shoal:
            meaning += "; the process that has it is not shoal's, so end it if you know it, or leave --port out"
        yield Finding(
            "port.taken",
            Severity.ERROR if is_first else Severity.INFO,
            node.name,
            f"port {number} is taken: " + "; ".join(dict.fromkeys(_describe_holder(holder) for holder in holders)),
            meaning,
            _stop_command(of_shoal, facts) if of_shoal and is_first else "",
            f"ss -ltnp 'sport = :{number}'",
        )


def _describe_holder(holder: Process) -> str:
    if not holder["pid"]:
        return f"by a process of {holder['user']} that this user may not look at"
    run = f", of shoal's run {holder['run']}" if "run" in holder else f", of {holder['user']}"
    return f"by {_describe(holder)}{run}"


def check_workers(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, facts in cluster.topic("processes"):
        for run, processes in _group_by(facts.get("marked", []), "run"):
            if is_left_over(processes):
                yield Finding(
                    "leftover.worker",
                    Severity.WARNING,
                    node.name,
                    f"shoal's run {run} has no supervisor any more, and there are still {_list(processes)}",
                    "they take cores and memory from the next run; stop them if you do not want that run to continue",
                    _stop_command(processes, facts),
                )
            else:
                age = format_duration(max(process["age_s"] for process in processes))
                yield Finding(
                    "speed.run",
                    Severity.INFO,
                    node.name,
                    f"shoal's run {run} has been running for {age}",
                    "two runs share the cores and the network, and both are slower",
                )
        for master, processes in _group_by(facts.get("strays", []), "master_addr"):
            yield Finding(
                "leftover.worker",
                Severity.WARNING,
                node.name,
                f"ranks of another torch job around {master} have lost their parent process: {_list(processes)}",
                "they are not shoal's; they wait for peers that may never connect, and take cores, memory and ports",
                _kill_command(processes),
            )


def is_left_over(processes: list[Process]) -> bool:
    """Tell whether parents have ended and no supervisor, messenger or launcher looks after the rest."""
    is_supervised = any(
        process["part"] in _SUPERVISING_PARTS or (process["part"] == "agent" and not process["orphan"])
        for process in processes
    )
    return not is_supervised and any(process["orphan"] for process in processes)


def _stop_command(processes: list[Process], facts: Facts) -> str:
    """Stop the run by its name where that is still known there; otherwise exactly these processes."""
    if facts.get("has_command") and processes[0]["has_folder"]:
        return f"shoal stop {shlex.quote(processes[0]['run'])}"
    return _kill_command(processes)


def _kill_command(processes: list[Process]) -> str:
    """Return the command that ends them; only SIGKILL ends one that is stopped by Ctrl-Z or a debugger."""
    signal = " -KILL" if any(process["stopped"] for process in processes) else ""
    return f"kill{signal} " + " ".join(dict.fromkeys(str(process["pid"]) for process in processes))


def _list(processes: list[Process]) -> str:
    more = [f"and {len(processes) - _LISTED_PROCESSES} more"] if len(processes) > _LISTED_PROCESSES else []
    return "; ".join([*map(_describe, processes[:_LISTED_PROCESSES]), *more])


def _describe(process: Process) -> str:
    return f"process {process['pid']} ({process['command']}), {format_duration(process['age_s'])} old"


def _group_by(processes: list[Process], key: str) -> Iterator[tuple[str, list[Process]]]:
    ordered = sorted(processes, key=lambda process: (str(process[key]), int(process["pid"])))
    return ((name, list(group)) for name, group in groupby(ordered, key=lambda process: str(process[key])))


def check_files(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, node_facts, facts in cluster.topic("processes"):
        soft, hard = facts.get("files", {}).get("soft"), facts.get("files", {}).get("hard")
        if soft is None or soft >= _FEW_FILES:
            continue
        can_raise = hard is None or hard >= _ENOUGH_FILES
        # Over SSH, `ulimit` in one session does not affect the next: set the limit for the next login.
        line = f"{facts['user']} {'soft' if can_raise else '-'} nofile {_ENOUGH_FILES}"
        yield Finding(
            "limits.files",
            Severity.WARNING,
            node.name,
            f"a process may open {soft} files (soft limit; hard limit {'none' if hard is None else hard})",
            "every connection counts as an open file: a run can stop with 'too many open files'",
            f"ulimit -n {_ENOUGH_FILES}"
            if can_raise and not facts.get("over_ssh")
            else f"echo {shlex.quote(line)} | {sudo(node_facts)}tee /etc/security/limits.d/90-shoal.conf",
            "ulimit -n",
        )
