"""Judge a script that `shoal run --measure` recorded: its replicas, its exchanges, its slowest rank.

Equal parameters at the end do not prove that the ranks trained together: two independent trainings with one seed and
the same data end equal too. So the number of all-reduces counts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from statistics import median

import numpy as np

from shoal.config.defaults import MIN_WAIT_PART, SLOW_RATIO
from shoal.cost.causes import CROWDED, UNKNOWN, RankTimes, find_cause, machine_demands, other_cores_beside
from shoal.events import Event
from shoal.host.node_stats import NodeStats
from shoal.records.history import Logs, logs_of_last_launch
from shoal.records.rank_log import Calls, RankLog, as_float, is_number
from shoal.units import format_ms, name_ranks, rank_list

# Where a script has none that `--measure` sees: not the same as an exchange that takes no time.
NO_EXCHANGE = "no exchange between the ranks was seen"
_MIN_STEPS = 12
# What a session records of `NodeStats` at its end.
_DEMAND = ("wanted", "waited", "cpus", "run_cpus", "threads")


def is_measured(logs: Logs) -> bool:
    """Return whether these are the events of a script that uses no session."""
    return any(log.start.get("measured") for log in logs.values())


def has_own_exchanges(start: Event) -> bool:
    """Return whether this is the `start` event of a measured script without DistributedDataParallel."""
    return bool(start.get("measured")) and start.get("sync") != "ddp"


def name_collectives(collectives: Mapping[str, Calls]) -> str:
    """Name the collectives of a step with the time that a rank was in them, such as "all-gather 1.2 ms"."""
    longest = sorted(collectives.items(), key=lambda entry: -entry[1].waited_s)
    return ", ".join(f"{kind} {format_ms(calls.waited_s)}" for kind, calls in longest)


def exchange_findings(logs: Logs) -> Iterator[tuple[str, bool]]:
    """Yield what is wrong with the exchanges of the ranks, or unknown; with whether it is wrong."""
    logs = logs_of_last_launch(logs)
    ends = {rank: log.end for rank, log in logs.items() if log.end}
    if any(end.get("is_sharded") for end in ends.values()):
        yield "each rank holds a shard of the parameters (FSDP), so there are no replicas to compare", False
    if len(logs) < 2 or not ends:
        return
    counts = {rank: end.get("exchanges") for rank, end in ends.items()}
    if all(count is None for count in counts.values()):
        yield (
            f"{NO_EXCHANGE}: the script does not use DistributedDataParallel and called no "
            "collective from Python; equal parameters alone do not prove that the ranks trained together",
            False,
        )
    elif alone := [rank for rank, count in counts.items() if not count]:
        what = "exchange" if has_own_exchanges(logs[alone[0]].start) else "all-reduce of DDP"
        yield f"{rank_list(alone)} took part in no {what}, and so trained alone", True
    # Ranks may have collectives of their own in groups of their own.
    elif not any(has_own_exchanges(log.start) for log in logs.values()) and len(set(counts.values())) > 1:
        by_rank = ", ".join(f"rank {rank} in {count}" for rank, count in sorted(counts.items()))
        yield f"the ranks took part in different numbers of all-reduces: {by_rank}", True


def find_stragglers(logs: Logs) -> Iterator[Event]:
    """Yield warnings about the rank that the others wait for, or about machines whose ranks are all slow alike."""
    late = list(_find_late_rank(logs))
    yield from late
    if all(warning["cause"] != CROWDED for warning in late):
        yield from _find_crowded_machines(logs)


def _find_crowded_machines(logs: Logs) -> Iterator[Event]:
    """Yield a warning about each machine whose processors are too few for the threads of its ranks."""
    nodes = {rank: node_stats(log) for rank, log in logs.items() if log.start.get("measured")}
    for machine, demand in machine_demands(list(nodes.values())).items():
        local = [rank for rank, node in nodes.items() if node.machine == machine]
        if demand.is_cause(other_cores_beside([nodes[rank] for rank in local])):
            whose = f"the threads of {name_ranks(demand.ranks)} on {logs[local[0]].start.get('node')}"
            why = "a thread that waits for a processor holds up those it computes with"
            yield _warning(local[0], demand.describe(whose), CROWDED, why, demand.fix)


def _warning(rank: int, seen: str, cause: str, why: str, fix: str) -> Event:
    return {"event": "warning", "rank": rank, "time": None, "seen": seen, "cause": cause, "why": why, "fix": fix}


def _find_late_rank(logs: Logs) -> Iterator[Event]:
    """Yield a warning about the rank that the others wait for, by the median of its own part of a step."""
    parts_s, steps_s = {}, []
    for rank, log in logs.items():
        measured = log.steps.measured()
        own_s = log.steps.column("ready_s")[measured]
        own_s = own_s[np.isfinite(own_s)]
        if log.start.get("measured") and len(own_s) >= _MIN_STEPS:
            parts_s[rank] = float(np.median(own_s))
            steps_s.append(float(np.median(log.steps.column("step_s")[measured])))
    if len(parts_s) < 2:
        return
    slowest = max(parts_s, key=lambda rank: parts_s[rank])
    others_s = median(seconds for rank, seconds in parts_s.items() if rank != slowest)
    slow_s = parts_s[slowest]
    if slow_s < SLOW_RATIO * others_s or slow_s - others_s < MIN_WAIT_PART * median(steps_s):
        return
    node = logs[slowest].start.get("node")
    others = [_rank_times(logs[rank], seconds) for rank, seconds in parts_s.items() if rank != slowest]
    late, top = _rank_times(logs[slowest], slow_s), logs[slowest].end.get("top_process")
    cause = find_cause(late, others, slow_s - others_s, median(steps_s), str(top or ""))
    is_known = cause.kind != UNKNOWN
    yield _warning(
        slowest,
        f"all ranks wait for rank {slowest} on {node}: it takes {slow_s / max(1e-6, others_s):.1f} times as "
        f"long as the others for its part of a step ({format_ms(slow_s)}, and not {format_ms(others_s)})"
        + (f"; likely cause: {cause.evidence}" if is_known else ""),
        cause.kind,
        "a step ends when the slowest rank has done its part",
        cause.fix
        if is_known
        else "see which programs compute there: top; give that rank less to do, or leave its machine out",
    )


def _rank_times(log: RankLog, ready_s: float) -> RankTimes:
    """Return what a rank recorded at its end of its machine and its own work."""
    return RankTimes(
        ready_s,
        gc_s=as_float(log.end.get("gc_s"), 0.0),
        starved=as_float(log.end.get("starved"), 0.0),
        node=node_stats(log),
    )


def node_stats(log: RankLog) -> NodeStats:
    """Return what a rank recorded of its machine: all that `--measure` samples, or only its demand for processors.

    Runs of earlier versions recorded less.
    """
    machine = log.end.get("machine")
    if isinstance(machine, list) and len(machine) <= len(fields(NodeStats)) and all(map(_is_amount, machine)):
        return NodeStats(*machine)
    recorded = log.end | {"threads": log.start.get("threads")}
    return NodeStats(**{name: recorded[name] for name in _DEMAND if _is_amount(recorded.get(name))})


def _is_amount(value: object) -> bool:
    return is_number(value) and 0 <= value < math.inf
