"""Checks that the threads of a run fit the processors of each machine, before they slow each other down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shoal.cluster.node import Node
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
        fair = max(1, int(cpus / ranks))
        is_fault = threads > cpus and threads > ranks
        more = f", and {pluralize(others, 'rank')} of other runs compute there now" if others else ""
        yield Finding(
            "speed.threads",
            # More ranks than cores, and another run, are what was asked for; several threads a rank are a setting.
            Severity.WARNING if is_fault else Severity.INFO,
            nodes[0].name,
            f"{pluralize(ranks, 'rank')} with {pluralize(threads, 'thread')} in all share "
            f"{pluralize(cpus, 'processor')}{more}",
            "threads that wait for a processor hold up those that they compute with"
            + (f": train with --threads {fair}, and take OMP_NUM_THREADS and `threads` out" if is_fault else ""),
            "unset OMP_NUM_THREADS" if is_fault and _omp_threads(facts) else "",
            doctor_command(cluster),
        )


def _processors(machine: Facts) -> int:
    """Return the hardware threads that a run may use, fewer with a quota: a part of one counts as one."""
    cores = machine["cores"]
    return int(cores["threads"] if cores["quota"] is None else min(cores["threads"], max(1, cores["quota"])))


def _threads(node: Node, facts: Facts) -> int:
    """Return the threads of each rank, as a script gets them: a session of shoal train chooses its own."""
    cores = node.cores or facts["machine"]["cores"]["physical"]
    return node.threads or _omp_threads(facts) or max(1, cores // node.slots)


def _omp_threads(facts: Facts) -> int:
    value = str(facts["machine"].get("omp_num_threads") or "")
    return int(value) if value.isdigit() else 0
