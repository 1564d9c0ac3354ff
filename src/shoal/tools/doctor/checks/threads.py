"""Checks that the threads of a run fit the processors of each machine, before they slow each other down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shoal.cluster.node import Node
from shoal.tools.doctor.checks.machine import rank_threads
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, doctor_command
from shoal.units import pluralize


def check_threads(cluster: ClusterFacts) -> Iterator[Finding]:
    """Compare the threads of all ranks on a machine with its processors. Emulated nodes share those of one machine."""
    machines: defaultdict[str, list[Node]] = defaultdict(list)
    for node in cluster.nodes:
        if facts := cluster.facts.get(node.name, {}).get("machine"):
            machines[str(facts.get("boot_id") or node.name)].append(node)
    for nodes in machines.values():
        facts = cluster.facts[nodes[0].name]
        cpus = _processors(facts["machine"])
        ranks, threads = sum(node.slots for node in nodes), sum(node.slots * _threads(node, facts) for node in nodes)
        others = sum(process["part"].startswith("rank-") for process in facts.get("processes", {}).get("marked", []))
        if threads + others <= cpus:
            continue
        is_set = threads > cpus and any(node.threads for node in nodes)
        more = f", and {pluralize(others, 'rank')} of other runs compute there now" if others else ""
        yield Finding(
            "speed.threads",
            # A number in the hosts file is a mistake. More ranks than cores, and another run, are what was asked for.
            Severity.WARNING if is_set else Severity.INFO,
            nodes[0].name,
            f"{pluralize(ranks, 'rank')} with {pluralize(threads, 'thread')} in all share "
            f"{pluralize(cpus, 'processor')}{more}",
            "threads that wait for a processor hold up those that they compute with"
            + _describe_setting(is_set, _omp_threads(facts), max(1, int(cpus / ranks))),
            "unset OMP_NUM_THREADS" if _omp_threads(facts) and not is_set else "",
            doctor_command(cluster),
        )


def _describe_setting(is_set: bool, omp_threads: int, fair: int) -> str:
    if is_set:
        return f": write threads = {fair} in the hosts file, or start with --threads {fair}"
    return f"; a script under shoal run gets OMP_NUM_THREADS={omp_threads} of the environment" if omp_threads else ""


def _processors(machine: Facts) -> int:
    """Return the hardware threads that a run may use, fewer with a quota: a part of one counts as one."""
    cores = machine["cores"]
    return int(cores["threads"] if cores["quota"] is None else min(cores["threads"], max(1, cores["quota"])))


def _threads(node: Node, facts: Facts) -> int:
    """Return the threads of each rank of a script. `shoal train` does not use the variable."""
    return node.threads or _omp_threads(facts) or rank_threads(node, facts["machine"]["cores"])


def _omp_threads(facts: Facts) -> int:
    value = str(facts["machine"].get("omp_num_threads") or "")
    return int(value) if value.isdigit() else 0
