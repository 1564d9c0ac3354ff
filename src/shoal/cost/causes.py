"""Why a rank is late: from what every rank measured of its steps and its machine to one likely cause. Pure.

Each possible cause explains some seconds of a step: how much more of the step the late rank spent in it than the
others did. A cause counts if it explains a good part of the lateness. Of those, the more specific one wins: a rank
whose quota is used up also waits for a processor. Where nothing explains enough, the cause is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal.host.node_stats import NodeStats
from shoal.units import format_ms, format_percent, name_ranks, pluralize

# A cause counts if it explains such a part of the lateness, and such a part of what the best one explains.
_MIN_EXPLAINED = 0.35
_OF_BEST = 0.5
# A major page fault waits for a disk or for swap: 0.1 ms on an SSD, 10 ms on a hard disk.
_FAULT_S = 0.5e-3
_MIN_FAULTS = 20.0
# Another clock frequency is worth naming below this part of what the others have.
_SLOW_CLOCK = 0.9
_MIN_OTHER_CORES = 0.25
# Threads have too few processors if they want this many times as many as there are, and wait such a part of their time.
# (Beside eight busy programs, a rank of one thread wanted 1.05 to 1.2 processors. Two ranks of two threads each on two
# cores wanted 1.35 times what there was, and a rank with eight threads too many 4.7 times.)
_MIN_WANTED, _MIN_WAITED = 1.3, 0.2
# Other programs lengthen the waits of short-lived work too. They explain what is lost from such a part on of what is
# wanted too much. (Three ranks on two cores beside eight busy programs wanted 4.0, and not 3.1.)
_DISTURBING = 0.25
# More threads than torch computes with want a processor: by such a factor.
_BESIDE = 1.4

UNKNOWN, STARVED, GARBAGE, CROWDED = "unknown", "processor time", "garbage collection", "oversubscription"
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
class Demand:
    """The processors that the threads of some ranks want, and those that they may use. Means over some time."""

    wanted: float  # threads that computed, spun, or waited for a processor
    waited: float  # those of them that waited for one
    cpus: float  # processors that the ranks may use
    ranks: int = 1
    threads: int = 0  # that torch computes with, of each rank; 0 where it is not known

    @property
    def waited_part(self) -> float:
        return self.waited / self.wanted if self.wanted > 0 else 0.0

    @property
    def is_too_high(self) -> bool:
        """Whether these threads alone want more processors than there are, and lose time by that."""
        return self.wanted >= _MIN_WANTED * self.cpus > 0 and self.waited_part >= _MIN_WAITED

    def is_cause(self, other_cores: float) -> bool:
        """Whether that costs time while programs outside the run use this many cores."""
        return self.is_too_high and other_cores < _DISTURBING * (self.wanted - self.cpus)

    @property
    def _has_others(self) -> bool:
        """Whether threads that torch does not compute with take a good part."""
        return 0 < _BESIDE * self.threads * self.ranks < self.wanted

    def describe(self, whose: str) -> str:
        """Return `its threads want 15.6 processors and may use 8: they wait for one 48% of the time`."""
        team = ""
        if self._has_others:
            per_rank = " of each rank" if self.ranks > 1 else ""
            team = f"; torch computes with {self.threads}{per_rank}, so other threads take the rest"
        return (
            f"{whose} want {self.wanted:.1f} processors and may use {self.cpus:g}: they wait for one "
            f"{format_percent(self.waited_part)} of the time{team}"
        )

    @property
    def fix(self) -> str:
        fair = max(1, int(self.cpus / self.ranks))
        if self.threads > fair and not self._has_others:
            return (
                f"give each rank {pluralize(fair, 'thread')}: --threads {fair}, or OMP_NUM_THREADS={fair} for a script"
            )
        if self.ranks > self.cpus and not self._has_others:
            return f"start at most {name_ranks(max(1, int(self.cpus)))} there"
        return (
            "find the other threads: top -H; a second team of OpenMP threads spins while it has no work "
            f"(OMP_WAIT_POLICY=passive), and data workers compute too: OMP_NUM_THREADS={fair}, a smaller num_workers"
        )


def rank_demand(node: NodeStats) -> Demand:
    return Demand(node.wanted, node.waited, node.cpus, threads=int(node.threads))


def machine_demands(nodes: Sequence[NodeStats]) -> dict[float, Demand]:
    """Return the demand on each machine, from what all ranks measured: that of its ranks together.

    Of ranks that are pinned, the one that lacks most of its own processors counts, if that is worse.
    """
    groups: defaultdict[float, list[NodeStats]] = defaultdict(list)
    for node in nodes:
        groups[node.machine].append(node)
    return {machine: _worst_demand(group) for machine, group in groups.items()}


def other_cores_beside(nodes: Sequence[NodeStats]) -> float:
    """Return the cores that other programs use beside these ranks of one machine, as far as any of them knows.

    A container does not show the programs outside it, but its processors are busy.
    """
    own = sum(node.wanted - node.waited for node in nodes)
    return max(0.0, max(node.busy for node in nodes) - own, max(node.other_cores for node in nodes))


def _worst_demand(nodes: Sequence[NodeStats]) -> Demand:
    together = Demand(
        sum(node.wanted for node in nodes),
        sum(node.waited for node in nodes),
        max(node.run_cpus for node in nodes),
        len(nodes),
        max(int(node.threads) for node in nodes),
    )
    worst = max(map(rank_demand, nodes), key=lambda demand: demand.wanted / max(1.0, demand.cpus))
    return worst if worst.is_too_high and not together.is_too_high else together


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
    usual = _median_node(others)
    starved_s = step_s * max(0.0, late.starved - median(other.starved for other in others))
    return [
        _data(late, others),
        _garbage(late, others),
        *_stops(late.node, usual, step_s),
        _other_programs(late, usual, starved_s, top_process),
        _crowding(late, others, step_s, starved_s),
        _slow_clock(late, usual),
        _Candidate(
            starved_s,
            Cause(
                STARVED,
                f"it waits for a processor {format_percent(late.starved)} of the time",
                "see which programs compute there: top; and whether its CPU share is limited",
            ),
        ),
    ]


def _data(late: RankTimes, others: Sequence[RankTimes]) -> _Candidate:
    return _Candidate(
        late.data_s - median(other.data_s for other in others),
        Cause(
            "data",
            f"loading data takes {format_ms(late.data_s)} of each of its steps",
            "see what slows it down there: its disk, or the dataset's own code; copy the data to a local disk",
        ),
    )


def _garbage(late: RankTimes, others: Sequence[RankTimes]) -> _Candidate:
    return _Candidate(
        late.gc_s - median(other.gc_s for other in others),
        Cause(
            GARBAGE,
            f"Python collects garbage for {format_ms(late.gc_s)} in each of its steps",
            "keep fewer objects, or call gc.freeze() after loading; session training collects every train.gc_every",
        ),
    )


def _stops(node: NodeStats, usual: NodeStats, step_s: float) -> Iterator[_Candidate]:
    """Yield what makes the kernel or the hypervisor stop a process."""
    faults = node.major_faults - usual.major_faults
    stall_s = step_s * max(0.0, node.memory_stall - usual.memory_stall)
    yield _Candidate(
        step_s * (node.throttled - usual.throttled),
        Cause(
            "CPU quota",
            f"a CPU limit stops its control group for {format_percent(node.throttled)} of the time",
            "raise the limit of its container or slice: cpu.max, docker --cpus, a Kubernetes cpu limit",
        ),
    )
    yield _Candidate(
        step_s * (node.frozen - usual.frozen),
        Cause(
            "freezes",
            f"its process stands still for {format_percent(node.frozen)} of the time without waiting for anything",
            "see what stops it: a suspended virtual machine, a snapshot or backup, SIGSTOP, a debugger",
        ),
    )
    yield _Candidate(
        max(stall_s, step_s * faults * _FAULT_S) if faults >= _MIN_FAULTS else 0.0,
        Cause(
            "memory",
            f"its memory is short: {node.major_faults:,.0f} pages a second are read back from disk",
            "free memory there (free -h), or give this rank less: a smaller --micro-batch",
        ),
    )
    yield _Candidate(
        step_s * (node.steal - usual.steal),
        Cause(
            "steal",
            f"the hypervisor gives its processors to others for {format_percent(node.steal)} of the time",
            "use a machine that is not overbooked",
        ),
    )


def _other_programs(late: RankTimes, usual: NodeStats, starved_s: float, top_process: str) -> _Candidate:
    node = late.node
    other_cores = node.other_cores - usual.other_cores
    is_disturbed = other_cores >= max(_MIN_OTHER_CORES, _DISTURBING * (node.wanted - node.cpus))
    return _Candidate(
        starved_s if is_disturbed else 0.0,
        Cause(
            "other programs",
            f"{top_process or 'other programs'} and the like keep {node.other_cores:.1f} cores busy, and the rank "
            f"waits for a processor {format_percent(late.starved)} of the time",
            "end that program, or give it other cores: taskset, nice",
        ),
    )


def _crowding(late: RankTimes, others: Sequence[RankTimes], step_s: float, starved_s: float) -> _Candidate:
    """Return threads of the run itself that want more processors than there are.

    Where all ranks want too much alike, that is not why one of them is late.
    """
    node = late.node
    local = [node, *(other.node for other in others if other.node.machine == node.machine)]
    demand = _worst_demand(local)
    is_crowded = demand.is_cause(other_cores_beside(local)) and _load(node) >= _MIN_WANTED * median(
        _load(other.node) for other in others
    )
    waited = rank_demand(node).waited_part - median(rank_demand(other.node).waited_part for other in others)
    seconds = max(starved_s, step_s * waited) if is_crowded else 0.0
    return _Candidate(seconds, Cause(CROWDED, demand.describe(_whose(demand)), demand.fix))


def _slow_clock(late: RankTimes, usual: NodeStats) -> _Candidate:
    node = late.node
    is_slow = 0 < node.clock < _SLOW_CLOCK * usual.clock
    hot = f"; it throttled because of heat {node.heat:.1f} times a second" if node.heat > usual.heat else ""
    battery = "; its power cable is out" if node.on_battery else ""
    return _Candidate(
        late.ready_s * (1 - node.clock / usual.clock) if is_slow else 0.0,
        Cause(
            "clock",
            f"its processor runs at {format_percent(node.clock)} of its highest clock, the others at "
            f"{format_percent(usual.clock)}{hot}{battery}",
            "plug in its power cable" if battery else "cool it, or choose another power profile: powerprofilesctl",
        ),
    )


def _load(node: NodeStats) -> float:
    return node.wanted / max(1.0, node.cpus)


def _whose(demand: Demand) -> str:
    return "its threads" if demand.ranks == 1 else f"the threads of {name_ranks(demand.ranks)} on its machine"


def _median_node(others: Sequence[RankTimes]) -> NodeStats:
    return NodeStats(*(median(column) for column in zip(*(other.node.numbers for other in others), strict=True)))
