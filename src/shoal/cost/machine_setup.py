"""How the ranks of one machine share it: which setups are tried in the first steps, and which one is kept. Pure.

Threads, pins and shared memory win on some machines and lose on others. Every candidate differs from the first one in
one respect, and the best of those that were measured is kept, so that a default never costs more than the plain way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from shoal.units import format_ms, pluralize

# A block of steps with one setup: the first one makes buffers and moves threads, and does not count.
_WARM_UP_STEPS = 1
_MEASURED_STEPS = 3
# Every setup is tried twice, so that a busy moment of the machine does not decide; a much slower one only once.
_PASSES = 2
_HOPELESS = 1.15
# Another setup than the first must be better by this factor.
_LEAST_GAIN = 1.03
# A trial may take this part of the steps that are left.
_MAX_PART = 0.2
_FEWEST_THREADS = 2


@dataclass(frozen=True)
class RankSetup:
    inside: str  # how the ranks of a machine exchange gradients: "shared" or "gloo"; empty where there is no choice
    is_pinned: bool
    threads: int

    def __str__(self) -> str:
        parts = [pluralize(self.threads, "thread"), "pinned" if self.is_pinned else "not pinned"]
        names = {"shared": "shared memory", "gloo": "gloo between the ranks"}
        return ", ".join([*parts, *([names[self.inside]] if self.inside else [])])


def list_candidates(first: RankSetup, can_pin: bool, can_change_threads: bool) -> list[RankSetup]:
    """Return the setups to try, the one in use first."""
    others = []
    if first.inside == "shared":
        others.append(replace(first, inside="gloo"))
    if can_pin:
        others.append(replace(first, is_pinned=not first.is_pinned))
    if can_change_threads:
        halves = (first.threads // 2, first.threads // 4)
        others += [replace(first, threads=threads) for threads in halves if threads >= _FEWEST_THREADS]
    return [first, *others]


def trial_steps(candidates: int) -> int:
    return candidates * _PASSES * (_WARM_UP_STEPS + _MEASURED_STEPS)


def is_worth_trying(candidates: int, steps_left: int) -> bool:
    return trial_steps(candidates) <= _MAX_PART * steps_left


@dataclass
class TrialSchedule:
    """Which candidate the next step uses, on all machines at once, and how long the steps took by machine."""

    candidates: int
    times: dict[int, list[list[float]]] = field(default_factory=dict)  # by machine and candidate
    _queue: list[int] = field(init=False)
    _passes_left: int = _PASSES
    _steps_of_block: int = 0

    def __post_init__(self) -> None:
        self._queue = list(range(self.candidates))

    @property
    def current(self) -> int | None:
        """The candidate of the next step; None when the trial is over."""
        return self._queue[0] if self._queue else None

    def observe(self, seconds: Mapping[int, float]) -> None:
        """Add a step of the current candidate: the time of the slowest rank of each machine."""
        self._steps_of_block += 1
        if self._steps_of_block > _WARM_UP_STEPS:
            for machine, taken_s in seconds.items():
                self.times.setdefault(machine, [[] for _ in range(self.candidates)])[self._queue[0]].append(taken_s)
        if self._steps_of_block < _WARM_UP_STEPS + _MEASURED_STEPS:
            return
        self._steps_of_block = 0
        self._queue.pop(0)
        if not self._queue:
            self._passes_left -= 1
            if self._passes_left:
                self._queue = [number for number in range(self.candidates) if self._has_hope(number)]

    def _has_hope(self, number: int) -> bool:
        return number == 0 or any(
            median(by_candidate[number]) < _HOPELESS * min(map(median, by_candidate))
            for by_candidate in self.times.values()
        )

    def best(self, machine: int) -> int:
        """Return the candidate to keep: the first one, unless another is clearly faster."""
        medians = [median(times) for times in self.times[machine]]
        fastest = min(range(self.candidates), key=medians.__getitem__)
        return fastest if medians[fastest] * _LEAST_GAIN < medians[0] else 0

    def seconds(self, machine: int, candidate: int) -> float:
        return median(self.times[machine][candidate])


def explain_choice(candidates: list[RankSetup], schedule: TrialSchedule, machine: int, chosen: int) -> str:
    tried = [f"{format_ms(schedule.seconds(machine, number))} with {setup}" for number, setup in enumerate(candidates)]
    verdict = "stays with" if chosen == 0 else "continues with"
    return f"{verdict} {candidates[chosen]}; a step took {'; '.join(tried)}"


def describe_fewer_ranks(ranks: int, step_s: float, fewer: int, fewer_s: float) -> str | None:
    """Return what to say of a run on one machine that is faster with fewer ranks; None if it is not."""
    if fewer_s * _LEAST_GAIN >= step_s:
        return None
    name = "one process" if fewer == 1 else f"{fewer} ranks"
    return (
        f"on this machine {name} would be faster: {format_ms(fewer_s)} a step, and {format_ms(step_s)} with "
        f"{ranks} ranks; type the same command with --on local:{fewer}"
    )
