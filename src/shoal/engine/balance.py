"""Shares that follow speed: from the measured times of all ranks to whole micro-batches for each. Pure: no exchange.

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
from math import sqrt
from statistics import fmean, median

from shoal.config.defaults import SIMILAR_SPEED
from shoal.cost.batch_plan import BatchPlan, divisors
from shoal.engine.stragglers import SlowRank

# The first steps of a world warm up caches, allocators and data workers.
_WARM_UP_STEPS = 3
# The steps of a window, and the certain gain that it needs: the shorter, the more steps look different by chance.
_WINDOWS = ((6, 0.10), (12, 0.06), (24, 0.04), (48, 0.03))
# A mean is taken for certain to within so many standard errors.
_ERRORS = 2.0
# Wait for the end of a change: both halves of a window must agree to within this part.
_STEADY = 0.25
# Micro-batches are small enough when the step is within this part of the best one.
_MATCH = 0.03
# What starting a micro-batch costs, in samples, until it was measured. With less, micro-batches are made much
# smaller at once for a closer match (64 to 8, seen on a CPU: a sample cost 1.6 times as much).
_FIRST_OVERHEAD = 2.0
_LEAST_OVERHEAD, _MOST_OVERHEAD = 0.25, 16.0
# A machine is judged by so many steps with the same shares, every few steps.
_MACHINE_STEPS = 12
_JUDGE_MACHINES_EVERY = 4
# `static` measures so many steps, then keeps what it has.
_STATIC_STEPS = 24


@dataclass(frozen=True)
class RankTime:
    """One rank's own part of a step."""

    work_s: float  # All its micro-batches.
    other_s: float  # What does not depend on their number: the optimizer.


@dataclass(frozen=True)
class RankSpeed:
    """What is known of a rank, from some steps."""

    micro_batch_s: float
    error_s: float  # The standard error of `micro_batch_s`.
    other_s: float

    def bounded(self, errors: float) -> RankSpeed:
        """Return the speed if the mean is wrong by so many standard errors."""
        return RankSpeed(max(0.1 * self.micro_batch_s, self.micro_batch_s + errors * self.error_s), 0.0, self.other_s)


@dataclass(frozen=True)
class ShareChange:
    """A better division of the global batch."""

    before: BatchPlan
    plan: BatchPlan
    speeds: tuple[float, ...]  # By rank, relative to the fastest.
    before_s: float  # The slowest rank's part of a step.
    after_s: float
    overhead: float  # What starting a micro-batch costs, in samples.

    @property
    def cost(self) -> float:
        """What a sample costs now, relative to before: more in smaller micro-batches."""
        before, after = self.before.micro_batch, self.plan.micro_batch
        return (after + self.overhead) / after / ((before + self.overhead) / before)


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


def measure_speeds(steps: Sequence[Sequence[RankTime]], micro_batches: Sequence[int]) -> tuple[RankSpeed, ...]:
    """Return each rank's speed in these steps, of which it did so many micro-batches each."""

    def speed(rank: int) -> RankSpeed:
        times = [step[rank].work_s / micro_batches[rank] for step in steps]
        mean = fmean(times)
        # `statistics.stdev` is exact, and a hundred times slower: this runs in every step.
        variance = sum((seconds - mean) ** 2 for seconds in times) / max(1, len(times) - 1)
        error_s = sqrt(variance / len(times))
        # Between steps all ranks save checkpoints and evaluate: only the usual rest counts.
        return RankSpeed(max(1e-9, mean), error_s, max(0.0, median(step[rank].other_s for step in steps)))

    return tuple(speed(rank) for rank in range(len(micro_batches)))


def slowest_s(micro_batches: Sequence[int], speeds: Sequence[RankSpeed]) -> float:
    """Return how long the slowest rank takes for its part of a step."""
    return max(speed.other_s + count * speed.micro_batch_s for count, speed in zip(micro_batches, speeds, strict=True))


def even_s(count: int, speeds: Sequence[RankSpeed]) -> float:
    """Return how long a step would take if `count` micro-batches could be divided at will: no division is faster."""
    rate = sum(1 / speed.micro_batch_s for speed in speeds)
    return (count + sum(speed.other_s / speed.micro_batch_s for speed in speeds)) / rate


def divide_by_speed(count: int, speeds: Sequence[RankSpeed]) -> tuple[int, ...]:
    """Divide `count` micro-batches such that the slowest rank ends as early as possible; each rank gets at least one.

    Each micro-batch goes to the rank that would finish it first, and of several such to the lowest one.
    """
    parts = [1] * len(speeds)
    queue = [(speed.other_s + 2 * speed.micro_batch_s, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(queue)
    for _ in range(count - len(speeds)):
        end_s, rank = queue[0]
        parts[rank] += 1
        heapq.heapreplace(queue, (end_s + speeds[rank].micro_batch_s, rank))
    return tuple(parts)


def best_plan(plan: BatchPlan, speeds: Sequence[RankSpeed], sizes: Sequence[int], overhead: float) -> BatchPlan:
    """Return the best division into micro-batches of one of these sizes; `speeds` are those with the present size.

    Smaller ones can follow the speeds more closely, but cost more for each sample, and how much more is not certain. So
    take the largest with which the step is about as short as with the best (see `_MATCH`).
    """
    candidates: list[tuple[float, BatchPlan]] = []
    for size in sizes:
        count = plan.global_batch // size
        if count < len(speeds):
            continue
        scaled = _at_size(speeds, plan.micro_batch, size, overhead)
        parts = divide_by_speed(count, scaled)
        candidates.append((slowest_s(parts, scaled), BatchPlan(size, parts)))
    if not candidates:
        return plan
    best_s = min(end_s for end_s, _ in candidates)
    return max((one for end_s, one in candidates if end_s <= (1 + _MATCH) * best_s), key=lambda one: one.micro_batch)


def find_change(
    steps: Sequence[Sequence[RankTime]],
    plan: BatchPlan,
    sizes: Sequence[int],
    min_gain: float,
    overhead: float = _FIRST_OVERHEAD,
) -> ShareChange | None:
    """Return better shares than those of `plan`, with which these steps were done, if the gain is certain."""
    speeds = measure_speeds(steps, plan.micro_batches)
    before_s = slowest_s(plan.micro_batches, speeds)
    cheapest = max(sizes, default=plan.micro_batch)
    ideal_s = even_s(plan.global_batch // cheapest, _at_size(speeds, plan.micro_batch, cheapest, overhead))
    most_gain = 1 - ideal_s / before_s
    if most_gain < min_gain or not _is_steady(steps, plan.micro_batches):
        return None
    better = best_plan(plan, speeds, sizes, overhead)
    # What a rank does for each sample decides whether it gains or loses, whatever the size of micro-batches is.
    doubtful = [
        speed.bounded(_ERRORS if after > before else -_ERRORS if after < before else 0.0)
        for speed, before, after in zip(speeds, _samples(plan), _samples(better), strict=True)
    ]
    scaled = _at_size(doubtful, plan.micro_batch, better.micro_batch, overhead)
    if slowest_s(better.micro_batches, scaled) > (1 - min_gain) * slowest_s(plan.micro_batches, doubtful):
        return None
    expected = _at_size(speeds, plan.micro_batch, better.micro_batch, overhead)
    fastest_s = min(speed.micro_batch_s for speed in speeds)
    relative = tuple(round(fastest_s / speed.micro_batch_s, 3) for speed in speeds)
    after_s = slowest_s(better.micro_batches, expected)
    return ShareChange(plan, better, relative, before_s, after_s, overhead)


def find_slow_machine(
    steps: Sequence[Sequence[RankTime]], plan: BatchPlan, machines: Sequence[str]
) -> SlowMachine | None:
    """Return the slowest machine; None if there is only one. `machines` are the names of the ranks' machines."""
    if len(set(machines)) < 2 or not _is_steady(steps, plan.micro_batches):
        return None
    speeds = measure_speeds(steps, plan.micro_batches)

    def rate(machine: str, errors: float = 0.0) -> float:
        own = [speed for speed, name in zip(speeds, machines, strict=True) if name == machine]
        return sum(1 / speed.bounded(errors).micro_batch_s for speed in own)

    names = sorted(set(machines))
    slowest, fastest = min(names, key=rate), max(names, key=rate)

    def without_s(errors: float) -> float:
        others = [speed.bounded(errors) for speed, name in zip(speeds, machines, strict=True) if name != slowest]
        return slowest_s(divide_by_speed(sum(plan.micro_batches), others), others)

    least_s = slowest_s(plan.micro_batches, [speed.bounded(-_ERRORS) for speed in speeds])
    return SlowMachine(
        name=slowest,
        ranks=tuple(rank for rank, name in enumerate(machines) if name == slowest),
        fastest=fastest,
        speed=rate(slowest) / rate(fastest),
        most_speed=rate(slowest, -_ERRORS) / rate(fastest, _ERRORS),
        with_s=slowest_s(plan.micro_batches, speeds),
        without_s=without_s(0.0),
        is_useless=without_s(_ERRORS) <= least_s,
    )


def measure_overhead(before: BatchPlan, before_s: Sequence[float], after: BatchPlan, after_s: Sequence[float]) -> float:
    """Return what starting a micro-batch costs, in samples, from the ranks' times for one of two different sizes."""
    small, large = sorted((before.micro_batch, after.micro_batch))
    ratio = median(new / old for old, new in zip(before_s, after_s, strict=True))
    if after.micro_batch > before.micro_batch:
        ratio = 1 / ratio
    # A large one takes (large + overhead) / (small + overhead) times as long as a small one.
    return min(max(_LEAST_OVERHEAD, (ratio * large - small) / max(1e-6, 1 - ratio)), _MOST_OVERHEAD)


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
        # The ranks' times for a micro-batch before its size changed, until they are compared with those after it.
        self._earlier: tuple[BatchPlan, list[float]] | None = None
        self._has_overhead = False

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

    def judge(
        self, plan: BatchPlan, sizes: Sequence[int], ids: Sequence[int], lag_steps: int = 0
    ) -> ShareChange | None:
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
            change = find_change(steps, plan, sizes, min_gain, self._overhead)
            if change is not None and (self._mode is not None or self.speeds or differ(change.speeds)):
                # A machine that is a spare now may come back.
                self.speeds |= zip(ids, change.speeds, strict=True)
                self._has_changed = True
                if change.plan.micro_batch != plan.micro_batch and not self._has_overhead:
                    self._earlier = plan, [speed.micro_batch_s for speed in measure_speeds(steps, plan.micro_batches)]
                self._steps.clear()
                # The first step with other shares may start data workers anew.
                self._skip = 1 + lag_steps
                return change
        return None

    def _learn_overhead(self, steps: Sequence[Sequence[RankTime]], plan: BatchPlan) -> None:
        """Learn what smaller micro-batches cost, once in a world: by chance it would be another each time."""
        if self._earlier is None:
            return
        earlier, earlier_s = self._earlier
        if earlier.micro_batch != plan.micro_batch:
            now_s = [speed.micro_batch_s for speed in measure_speeds(steps, plan.micro_batches)]
            self._overhead, self._has_overhead = measure_overhead(earlier, earlier_s, plan, now_s), True
        self._earlier = None

    def slow_machine(self, plan: BatchPlan, machines: Sequence[str]) -> SlowMachine | None:
        """Return the slowest machine, once it has been measured with the present shares. See `find_slow_machine`."""
        if len(self._steps) < _MACHINE_STEPS or self._observed < self._machines_due:
            return None
        self._machines_due = self._observed + _JUDGE_MACHINES_EVERY
        return find_slow_machine(list(self._steps)[-_MACHINE_STEPS:], plan, machines)

    def leave_out(self, ids: Sequence[int], machines: int) -> bool:
        """Return whether the machine with these ranks, one of so many, shall be left out now; decide it only once.

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


def possible_sizes(plan: BatchPlan, most: int, is_fixed: bool) -> list[int]:
    """Return the micro-batches to choose from: none larger than `most`, for which there is memory."""
    return [plan.micro_batch] if is_fixed else divisors(plan.global_batch, max(most, plan.micro_batch))


def describe_change(change: ShareChange, names: Sequence[str]) -> str:
    """Return a sentence about what changes and why."""
    before, plan = change.before, change.plan
    order = sorted(range(len(names)), key=lambda rank: change.speeds[rank])
    slowest, fastest = order[0], order[-1]
    if differ(change.speeds):
        why = f"{names[slowest]} computes at {change.speeds[slowest]:.2f} of the speed of {names[fastest]}"
    else:
        why = "all ranks compute about equally fast now"
    sizes = ""
    if plan.micro_batch != before.micro_batch:
        more = change.cost - 1
        cost = f", which cost about {more:.0%} more for each sample" if more > 0 else ""
        sizes = f" micro-batches of {plan.micro_batch} instead of {_parts(before)} of {before.micro_batch}{cost}"
    times = f"{1e3 * change.after_s:,.0f} ms a step instead of {1e3 * change.before_s:,.0f}"
    return f"shares now {_parts(plan)}{sizes}, because {why}; computing takes about {times}"


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
    how = f"leave it out: --drop-slower-than {limit:.2g}, also with --resume" if can_leave_out else "train without it"
    return SlowRank(
        f"{slow.name} is too slow to help: {_times_without(slow)}",
        why=f"it computes at {slow.speed:.2f} of the speed of {slow.fastest}, and has at least one micro-batch of each "
        f"step, of {plan.micro_batch} samples",
        fix=f"{how}; or give it less: a smaller --micro-batch, a larger --global-batch",
    )


def _times_without(slow: SlowMachine) -> str:
    return f"computing takes about {1e3 * slow.with_s:.0f} ms a step with it, and {1e3 * slow.without_s:.0f} without it"


def _parts(plan: BatchPlan) -> str:
    return ":".join(map(str, plan.micro_batches))


def _samples(plan: BatchPlan) -> list[int]:
    return [plan.micro_batch * count for count in plan.micro_batches]


def _at_size(speeds: Sequence[RankSpeed], present: int, size: int, overhead: float) -> list[RankSpeed]:
    """Return the speeds with micro-batches of another size."""
    factor = (size + overhead) / (present + overhead)
    return [RankSpeed(speed.micro_batch_s * factor, speed.error_s * factor, speed.other_s) for speed in speeds]


def _is_steady(steps: Sequence[Sequence[RankTime]], micro_batches: Sequence[int]) -> bool:
    half = len(steps) // 2
    for rank in range(len(micro_batches)):
        first, second = (fmean(step[rank].work_s for step in part) for part in (steps[:half], steps[half:]))
        if abs(second - first) > _STEADY * max(first, second):
            return False
    return True
