"""Why a rank is late: from what every rank measured of its steps and its machine to one likely cause. Pure.

Each possible cause explains some seconds of a step: how much more of the step the late rank spent in it than the
others did. A cause counts if it explains a good part of the lateness. Of those, the more specific one wins: a rank
whose quota is used up also waits for a processor. Where nothing explains enough, the cause is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal.host.node_stats import NodeStats
from shoal.units import format_ms, format_percent

# A cause counts if it explains such a part of the lateness, and such a part of what the best one explains.
_MIN_EXPLAINED = 0.35
_OF_BEST = 0.5
# A major page fault waits for a disk or for swap: 0.1 ms on an SSD, 10 ms on a hard disk.
_FAULT_S = 0.5e-3
_MIN_FAULTS = 20.0
# Another clock frequency is worth naming below this part of what the others have.
_SLOW_CLOCK = 0.9
_MIN_OTHER_CORES = 0.25

UNKNOWN, STARVED, GARBAGE = "unknown", "processor time", "garbage collection"
# Not reported after a more exact cause of the same rank.
VAGUE = (UNKNOWN, STARVED)


@dataclass(frozen=True)
class RankTimes:
    """One rank in the judged steps: means per step, and its machine."""

    ready_s: float  # its own part of a step
    data_s: float = 0.0
    gc_s: float = 0.0
    starved: float = 0.0  # the part of the time in which its thread wanted a processor and had none
    node: NodeStats = field(default_factory=NodeStats)


@dataclass(frozen=True)
class Cause:
    kind: str
    evidence: str
    fix: str


@dataclass(frozen=True)
class _Candidate:
    explains_s: float
    cause: Cause


def find_cause(late: RankTimes, others: Sequence[RankTimes], late_s: float, step_s: float, top_process: str) -> Cause:
    """Return the likely cause for a rank that is `late_s` later in a step of `step_s` than the others.

    `top_process` is the busiest program outside the run on its machine.
    """
    candidates = _candidates(late, others, step_s, top_process)
    best_s = max(candidate.explains_s for candidate in candidates)
    for candidate in candidates:
        if candidate.explains_s >= max(_MIN_EXPLAINED * late_s, _OF_BEST * best_s, 1e-6):
            return candidate.cause
    return Cause(UNKNOWN, "nothing that is measured explains it", "compare the machines: shoal doctor; shoal probe")


def _candidates(late: RankTimes, others: Sequence[RankTimes], step_s: float, top_process: str) -> list[_Candidate]:
    """Return all causes with the seconds of a step that each explains; the most specific first."""
    node, usual = late.node, _median_node(others)
    data_s = late.data_s - median(other.data_s for other in others)
    gc_s = late.gc_s - median(other.gc_s for other in others)
    starved_s = step_s * max(0.0, late.starved - median(other.starved for other in others))
    faults = node.major_faults - usual.major_faults
    stall_s = step_s * max(0.0, node.memory_stall - usual.memory_stall)
    memory_s = max(stall_s, step_s * faults * _FAULT_S) if faults >= _MIN_FAULTS else 0.0
    is_disturbed = node.other_cores - usual.other_cores >= _MIN_OTHER_CORES
    has_slow_clock = 0 < node.clock < _SLOW_CLOCK * usual.clock
    clock_s = late.ready_s * (1 - node.clock / usual.clock) if has_slow_clock else 0.0
    hot = f"; it throttled because of heat {node.heat:.1f} times a second" if node.heat > usual.heat else ""
    battery = "; its power cable is out" if node.on_battery else ""
    return [
        _Candidate(
            data_s,
            Cause(
                "data",
                f"loading data takes {format_ms(late.data_s)} of each of its steps",
                "see what slows it down there: its disk, or the dataset's own code; copy the data to a local disk",
            ),
        ),
        _Candidate(
            gc_s,
            Cause(
                GARBAGE,
                f"Python collects garbage for {format_ms(late.gc_s)} in each of its steps",
                "keep fewer objects, or call gc.freeze() after loading; session training collects every train.gc_every",
            ),
        ),
        _Candidate(
            step_s * (node.throttled - usual.throttled),
            Cause(
                "CPU quota",
                f"a CPU limit stops its control group for {format_percent(node.throttled)} of the time",
                "raise the limit of its container or slice: cpu.max, docker --cpus, a Kubernetes cpu limit",
            ),
        ),
        _Candidate(
            step_s * (node.frozen - usual.frozen),
            Cause(
                "freezes",
                f"its process stands still for {format_percent(node.frozen)} of the time without waiting for anything",
                "see what stops it: a suspended virtual machine, a snapshot or backup, SIGSTOP, a debugger",
            ),
        ),
        _Candidate(
            memory_s,
            Cause(
                "memory",
                f"its memory is short: {node.major_faults:,.0f} pages a second are read back from disk",
                "free memory there (free -h), or give this rank less: a smaller --micro-batch",
            ),
        ),
        _Candidate(
            step_s * (node.steal - usual.steal),
            Cause(
                "steal",
                f"the hypervisor gives its processors to others for {format_percent(node.steal)} of the time",
                "use a machine that is not overbooked",
            ),
        ),
        _Candidate(
            starved_s if is_disturbed else 0.0,
            Cause(
                "other programs",
                f"{top_process or 'other programs'} and the like keep {node.other_cores:.1f} cores busy, and the rank "
                f"waits for a processor {format_percent(late.starved)} of the time",
                "end that program, or give it other cores: taskset, nice",
            ),
        ),
        _Candidate(
            clock_s,
            Cause(
                "clock",
                f"its processor runs at {format_percent(node.clock)} of its highest clock, the others at "
                f"{format_percent(usual.clock)}{hot}{battery}",
                "plug in its power cable" if battery else "cool it, or choose another power profile: powerprofilesctl",
            ),
        ),
        _Candidate(
            starved_s,
            Cause(
                STARVED,
                f"it waits for a processor {format_percent(late.starved)} of the time",
                "see which programs compute there: top; and whether its CPU share is limited",
            ),
        ),
    ]


def _median_node(others: Sequence[RankTimes]) -> NodeStats:
    return NodeStats(*(median(column) for column in zip(*(other.node.numbers() for other in others), strict=True)))
