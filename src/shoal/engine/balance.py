"""Shares that follow speed: from the measured times of all ranks to the samples of each. Pure: no exchange.

A step ends when the slowest rank has done its part, so the best shares let all ranks finish together. Every rank sees
the same gathered times in the same step and comes to the same shares.

Times are noisy. Shares change only if the step would surely be shorter: with the slower ranks as fast, and the faster
ranks as slow, as their measurements allow. A short window of steps finds a machine that slowed down, a long one a small
difference that lasts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, hypot, sqrt
from statistics import fmean, median
from typing import NamedTuple

from shoal.config.defaults import SIMILAR_SPEED
from shoal.cost.batch_plan import BatchPlan
from shoal.engine.stragglers import SlowRank

# The first steps of a world warm up caches, allocators and data workers.
_WARM_UP_STEPS = 3
# The steps of a window, and the certain gain that it needs: the shorter, the more steps look different by chance.
_WINDOWS = ((6, 0.10), (12, 0.06), (24, 0.04), (48, 0.03))
# A mean is taken for certain to within this many standard errors.
_ERRORS = 2.0
# Wait for the end of a change: both halves of a window must agree to within this part.
_STEADY = 0.25
# Shares are matched to the speeds to within this part of an average one; finer steps would only take time to find.
_FINEST = 1 / 64
# What starting a micro-batch costs, in samples, until it was measured, and how wrong that may be.
_FIRST_OVERHEAD, _FIRST_OVERHEAD_ERROR = 2.0, 2.0
_LEAST_OVERHEAD, _MOST_OVERHEAD = 0.25, 16.0
# A rank's times show that cost only if its share or its micro-batches have changed by more than this part.
_LEAST_DIFFERENCE = 0.1
# A machine is judged by this many steps with the same shares, every few steps.
_MACHINE_STEPS = 12
_JUDGE_MACHINES_EVERY = 4
# `static` measures this many steps, then keeps what it has.
_STATIC_STEPS = 24


@dataclass(frozen=True)
class Division:
    """How a batch may be divided."""

    unit: int  # Shares are multiples of this many samples.
    micro_batch: int  # The most samples that a rank computes at once: there is memory for no more.


@dataclass(frozen=True)
class RankTime:
    """One rank's own part of a step."""

    work_s: float  # All its micro-batches.
    other_s: float  # What does not depend on its share: the optimizer.


class WorkTime(NamedTuple):
    """How long a rank took for its share, from some steps."""

    mean_s: float
    error: float  # The standard error of the mean, as a part of it.


@dataclass(frozen=True)
class RankSpeed:
    """What is known of a rank, from some steps. The start of a micro-batch counts as `overhead` samples."""

    sample_s: float
    error_s: float  # The standard error of `sample_s`.
    other_s: float

    def bounded(self, errors: float) -> RankSpeed:
        """Return the speed if the mean is wrong by `errors` standard errors."""
        return RankSpeed(max(0.1 * self.sample_s, self.sample_s + errors * self.error_s), 0.0, self.other_s)

    def end_s(self, share: int, micro_batch: int, overhead: float) -> float:
        """Return how long the rank takes for a share in micro-batches of at most this size."""
        return self.other_s + self.sample_s * (share + ceil(share / micro_batch) * overhead)


@dataclass(frozen=True)
class ShareChange:
    """A better division of the global batch."""

    before: BatchPlan
    plan: BatchPlan
    speeds: tuple[float, ...]  # By rank, relative to the fastest.
    before_s: float  # The slowest rank's part of a step.
    after_s: float


@dataclass(frozen=True)
class SlowMachine:
    """The slowest machine of a world."""

    name: str
    ranks: tuple[int, ...]
    fastest: str  # The fastest machine.
    speed: float  # Relative to the fastest machine.
    most_speed: float  # The same, if the measurements are as wrong as they may be.
    with_s: float  # The computing of a step with it, and without it.
    without_s: float
    is_useless: bool  # The others are certainly no slower without it.


def work_of(plan: BatchPlan, overhead: float) -> list[float]:
    """Return how much each rank computes in a step, in samples: the start of a micro-batch counts as `overhead`."""
    return [share + count * overhead for share, count in zip(plan.shares, plan.counts, strict=True)]


def measure_speeds(
    steps: Sequence[Sequence[RankTime]], plan: BatchPlan, overhead: float = _FIRST_OVERHEAD
) -> tuple[RankSpeed, ...]:
    """Return each rank's speed in these steps, which were divided in this way."""

    def speed(rank: int, work: float) -> RankSpeed:
        sample_s = max(1e-9, times[rank].mean_s / work)
        # Between steps all ranks save checkpoints and evaluate: only the usual rest counts.
        other_s = max(0.0, median(step[rank].other_s for step in steps))
        return RankSpeed(sample_s, sample_s * times[rank].error, other_s)

    times = _work_times(steps)
    return tuple(speed(rank, work) for rank, work in enumerate(work_of(plan, overhead)))


def slowest_s(plan: BatchPlan, speeds: Sequence[RankSpeed], overhead: float) -> float:
    """Return how long the slowest rank takes for its part of a step."""
    return max(speed.end_s(share, plan.micro_batch, overhead) for share, speed in zip(plan.shares, speeds, strict=True))


def even_s(batch: int, micro_batch: int, speeds: Sequence[RankSpeed], overhead: float) -> float:
    """Return how long a step would take if the batch could be divided at will: no division is faster."""
    rate = sum(1 / speed.sample_s for speed in speeds)
    work = batch + overhead * max(len(speeds), ceil(batch / micro_batch))
    return (work + sum(speed.other_s / speed.sample_s for speed in speeds)) / rate


def divide_by_speed(batch: int, division: Division, speeds: Sequence[RankSpeed], overhead: float) -> BatchPlan:
    """Divide a batch such that the slowest rank ends as early as possible; each rank gets at least one unit.

    Each next piece goes to the rank that would finish it first, and of several such to the lowest one.
    """
    unit, size = division.unit, division.micro_batch
    piece = max(unit, int(_FINEST * batch / len(speeds)) // unit * unit)
    parts = [unit] * len(speeds)

    def end_s(rank: int, more: int) -> float:
        return speeds[rank].end_s(parts[rank] + more, size, overhead)

    left = batch - sum(parts)
    queue = [(end_s(rank, piece), rank) for rank in range(len(speeds))]
    heapq.heapify(queue)
    while left > 0:
        rank = queue[0][1]
        given = min(piece, left)
        parts[rank] += given
        left -= given
        heapq.heapreplace(queue, (end_s(rank, piece), rank))
    return BatchPlan(size, tuple(parts))


def find_change(
    steps: Sequence[Sequence[RankTime]],
    plan: BatchPlan,
    division: Division,
    min_gain: float,
    overhead: float = _FIRST_OVERHEAD,
) -> ShareChange | None:
    """Return better shares than those of `plan`, with which these steps were done, if the gain is certain."""
    speeds = measure_speeds(steps, plan, overhead)
    before_s = slowest_s(plan, speeds, overhead)
    most_gain = 1 - even_s(plan.global_batch, division.micro_batch, speeds, overhead) / before_s
    if most_gain < min_gain or not _is_steady(steps):
        return None
    better = divide_by_speed(plan.global_batch, division, speeds, overhead)
    # What a rank does for each sample decides whether it gains or loses, whatever the size of micro-batches is.
    doubtful = [
        speed.bounded(_ERRORS if after > before else -_ERRORS if after < before else 0.0)
        for speed, before, after in zip(speeds, plan.shares, better.shares, strict=True)
    ]
    if slowest_s(better, doubtful, overhead) > (1 - min_gain) * slowest_s(plan, doubtful, overhead):
        return None
    fastest_s = min(speed.sample_s for speed in speeds)
    relative = tuple(round(fastest_s / speed.sample_s, 3) for speed in speeds)
    return ShareChange(plan, better, relative, before_s, slowest_s(better, speeds, overhead))


def find_slow_machine(
    steps: Sequence[Sequence[RankTime]],
    plan: BatchPlan,
    division: Division,
    machines: Sequence[str],
    overhead: float = _FIRST_OVERHEAD,
) -> SlowMachine | None:
    """Return the slowest machine; None if there is only one. `machines` are the names of the ranks' machines."""
    if len(set(machines)) < 2 or not _is_steady(steps):
        return None
    speeds = measure_speeds(steps, plan, overhead)

    def rate(machine: str, errors: float = 0.0) -> float:
        own = [speed for speed, name in zip(speeds, machines, strict=True) if name == machine]
        return sum(1 / speed.bounded(errors).sample_s for speed in own)

    names = sorted(set(machines))
    slowest, fastest = min(names, key=rate), max(names, key=rate)

    def without_s(errors: float) -> float:
        others = [speed.bounded(errors) for speed, name in zip(speeds, machines, strict=True) if name != slowest]
        return slowest_s(divide_by_speed(plan.global_batch, division, others, overhead), others, overhead)

    least_s = slowest_s(plan, [speed.bounded(-_ERRORS) for speed in speeds], overhead)
    return SlowMachine(
        name=slowest,
        ranks=tuple(rank for rank, name in enumerate(machines) if name == slowest),
        fastest=fastest,
        speed=rate(slowest) / rate(fastest),
        most_speed=rate(slowest, -_ERRORS) / rate(fastest, _ERRORS),
        with_s=slowest_s(plan, speeds, overhead),
        without_s=without_s(0.0),
        is_useless=without_s(_ERRORS) <= least_s,
    )


def measure_overhead(
    before: BatchPlan, before_s: Sequence[WorkTime], after: BatchPlan, after_s: Sequence[WorkTime]
) -> float | None:
    """Return what starting a micro-batch costs, in samples, from the ranks' times with two different divisions.

    A micro-batch takes (size + overhead) samples' time. The estimates of all ranks, and what is assumed without them,
    count by their certainty. None if the divisions are too similar to tell.
    """
    weights, estimates = [_FIRST_OVERHEAD_ERROR**-2], [_FIRST_OVERHEAD]
    for rank, (old_s, new_s) in enumerate(zip(before_s, after_s, strict=True)):
        old, new = before.shares[rank] / before.counts[rank], after.shares[rank] / after.counts[rank]
        ratio = new_s.mean_s / after.counts[rank] / (old_s.mean_s / before.counts[rank])
        # A larger micro-batch that took less time than a smaller one shows nothing.
        if abs(new - old) > _LEAST_DIFFERENCE * old and (ratio - 1) * (new - old) > 0:
            error = ratio * hypot(old_s.error, new_s.error) * abs(old - new) / (ratio - 1) ** 2
            weights.append(max(_LEAST_OVERHEAD, error) ** -2)
            estimates.append((new - ratio * old) / (ratio - 1))
    if len(estimates) == 1:
        return None
    likely = sum(weight * estimate for weight, estimate in zip(weights, estimates, strict=True)) / sum(weights)
    return min(max(_LEAST_OVERHEAD, likely), _MOST_OVERHEAD)


def differ(speeds: Sequence[float]) -> bool:
    """Return whether machines of these relative speeds differ by so much that their shares should."""
    return max(speeds) > SIMILAR_SPEED * min(speeds)


class Balance:
    """Decides when the shares of a world change. All its ranks have equal ones: they get the same times."""

    def __init__(self, mode: str | None = "off") -> None:
        self._mode = mode
        self._steps: deque[Sequence[RankTime]] = deque(maxlen=_WINDOWS[-1][0])
        # The measured speeds by rank id, as soon as shares have followed them: they divide the batch of the next world.
        self.speeds: dict[int, float] = {}
        # The ids of ranks whose machine was left out as too slow, and how many machines there were with it.
        self.left_out: dict[int, int] = {}
        self._named: set[str] = set()  # Machines that were named as too slow to help.
        self.reset()

    @property
    def is_on(self) -> bool:
        return self._mode != "off"

    def reset(self) -> None:
        """Measure anew in another world. Its ranks have only the speeds in common."""
        self._skip = _WARM_UP_STEPS
        self._observed = self._machines_due = 0
        self._has_changed = self._leaves_out = False
        self._steps.clear()
        self._overhead = _FIRST_OVERHEAD
        # The ranks' times before their shares changed, until they are compared with those after it.
        self._earlier: tuple[BatchPlan, list[WorkTime]] | None = None
        self._has_overhead = False

    def work_of(self, plan: BatchPlan) -> list[float]:
        """Return how much each rank computes in a step, in samples, with what starting a micro-batch costs."""
        return work_of(plan, self._overhead)

    def observe(self, step: Sequence[RankTime]) -> None:
        """Take the times of all ranks in one step."""
        if self._skip:
            self._skip -= 1
        else:
            self._steps.append(step)
            self._observed += 1

    @property
    def _is_done(self) -> bool:
        return self._mode == "static" and (self._has_changed or self._observed > _STATIC_STEPS)

    def judge(self, plan: BatchPlan, division: Division, ids: Sequence[int], lag_steps: int = 0) -> ShareChange | None:
        """Return better shares for the ranks with these ids, if there are any; the next steps must have them.

        `lag_steps` is how many steps with the present shares will be observed later.
        """
        if not self.is_on or len(ids) < 2 or self._is_done:
            return None
        for length, min_gain in _WINDOWS:
            if len(self._steps) < length:
                return None
            # A long window changes slowly. This runs in every step: longer windows cost no more than the first.
            if self._observed % (length // _WINDOWS[0][0]):
                continue
            steps = list(self._steps)[-length:]
            self._learn_overhead(steps, plan)
            change = find_change(steps, plan, division, min_gain, self._overhead)
            if change is not None and (self._mode is not None or self.speeds or differ(change.speeds)):
                # A machine that is a spare now may come back.
                self.speeds |= zip(ids, change.speeds, strict=True)
                self._has_changed = True
                if not self._has_overhead:
                    self._earlier = plan, _work_times(steps)
                self._steps.clear()
                # The first step with other shares may start data workers anew.
                self._skip = 1 + lag_steps
                return change
        return None

    def _learn_overhead(self, steps: Sequence[Sequence[RankTime]], plan: BatchPlan) -> None:
        """Learn what small micro-batches cost, once in a world: by chance it would be another each time."""
        if self._earlier is None:
            return
        measured = measure_overhead(*self._earlier, plan, _work_times(steps))
        if measured is not None:
            self._overhead, self._has_overhead = measured, True
        self._earlier = None

    def slow_machine(self, plan: BatchPlan, division: Division, machines: Sequence[str]) -> SlowMachine | None:
        """Return the slowest machine, once it has been measured with the present shares. See `find_slow_machine`."""
        if len(self._steps) < _MACHINE_STEPS or self._observed < self._machines_due:
            return None
        self._machines_due = self._observed + _JUDGE_MACHINES_EVERY
        return find_slow_machine(list(self._steps)[-_MACHINE_STEPS:], plan, division, machines, self._overhead)

    def leave_out(self, ids: Sequence[int], machines: int) -> bool:
        """Return whether the machine with these ranks, one of `machines`, shall be left out now; decide it only once.

        One that came back in the place of another is not left out again, until there are as many machines as before.
        """
        is_replacement = any(machines < self.left_out.get(id, 0) for id in ids)
        if is_replacement or self._leaves_out:
            return False
        self._leaves_out = True
        self.left_out |= dict.fromkeys(ids, machines)
        return True

    def is_news(self, machine: str) -> bool:
        """Return, once for each machine, that it was not named before."""
        is_news = machine not in self._named
        self._named.add(machine)
        return is_news

    def adopt(self, speeds: Mapping[int, float], left_out: Mapping[int, int] | None = None) -> None:
        """Take over what the ranks of another world know."""
        self.speeds, self.left_out = dict(speeds), dict(left_out or {})

    def weights(self, ids: Sequence[int]) -> tuple[float, ...] | None:
        """Return the speeds of these ranks, that of an unknown one as the average; None if nothing was measured."""
        if not self.is_on or not self.speeds:
            return None
        average = fmean(self.speeds.values())
        return tuple(self.speeds.get(id, average) for id in ids)


def describe_change(change: ShareChange, names: Sequence[str]) -> str:
    """Return a sentence about what changes and why."""
    before, plan = change.before, change.plan
    order = sorted(range(len(names)), key=lambda rank: change.speeds[rank])
    slowest, fastest = order[0], order[-1]
    if differ(change.speeds):
        why = f"{names[slowest]} computes at {change.speeds[slowest]:.2f} of the speed of {names[fastest]}"
    else:
        why = "all ranks compute about equally fast now"
    times = f"{1e3 * change.after_s:,.0f} ms a step instead of {1e3 * change.before_s:,.0f}"
    return (
        f"shares now {_parts(plan)} samples instead of {_parts(before)}, because {why}; computing takes about {times}"
    )


def describe_first_shares(plan: BatchPlan, source: str, follows_speed: bool) -> str:
    """Return how the first batches are divided, and why; nothing where all ranks are equal and stay so.

    `source` is where the shares come from.
    """
    if source:
        return f"shares {_parts(plan)}, {source}"
    return "equal shares until the speeds of the machines are measured" if follows_speed else ""


def describe_left_out(slow: SlowMachine, limit: float) -> str:
    """Return why a machine does not train any more."""
    return (
        f"{slow.name} is left out: it computes at {slow.speed:.2f} of the speed of {slow.fastest}, which is less than "
        f"{limit:g} (--drop-slower-than); {_times_without(slow)}. It stays a spare, and comes back when another "
        "machine is lost"
    )


def useless_warning(slow: SlowMachine, plan: BatchPlan, can_leave_out: bool) -> SlowRank:
    """Return a warning that a machine is too slow to help."""
    limit = max(0.01, min(0.99, 1.2 * slow.speed))
    own = sum(plan.shares[rank] for rank in slow.ranks)
    how = f"leave it out: --drop-slower-than {limit:.2g}, also with --resume" if can_leave_out else "train without it"
    return SlowRank(
        f"{slow.name} is too slow to help: {_times_without(slow)}",
        why=f"it computes at {slow.speed:.2f} of the speed of {slow.fastest}, and has {own} of the "
        f"{plan.global_batch} samples of a step",
        fix=f"{how}; or divide more samples: a larger --global-batch",
    )


def _times_without(slow: SlowMachine) -> str:
    return f"computing takes about {1e3 * slow.with_s:.0f} ms a step with it, and {1e3 * slow.without_s:.0f} without it"


def _parts(plan: BatchPlan) -> str:
    return ":".join(map(str, plan.shares))


def _work_times(steps: Sequence[Sequence[RankTime]]) -> list[WorkTime]:
    """Return each rank's time in these steps."""
    return [_work_time([step[rank].work_s for step in steps]) for rank in range(len(steps[0]))]


def _work_time(seconds: Sequence[float]) -> WorkTime:
    mean_s = max(1e-9, fmean(seconds))
    # `statistics.stdev` is exact, and a hundred times slower: this runs in every step.
    variance = sum((second - mean_s) ** 2 for second in seconds) / max(1, len(seconds) - 1)
    return WorkTime(mean_s, sqrt(variance / len(seconds)) / mean_s)


def _is_steady(steps: Sequence[Sequence[RankTime]]) -> bool:
    half = len(steps) // 2
    halves = zip(_work_times(steps[:half]), _work_times(steps[half:]), strict=True)
    return all(abs(second - first) <= _STEADY * max(first, second) for (first, _), (second, _) in halves)
