"""Shares that follow speed: what they always keep, what noise does, and how soon they follow a change."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cost.batch_plan import BatchPlan, divide_batch
from shoal.engine.balance import (
    Balance,
    RankSpeed,
    RankTime,
    ShareChange,
    best_plan,
    describe_change,
    describe_first_shares,
    divide_by_speed,
    even_s,
    find_change,
    find_slow_machine,
    measure_overhead,
    possible_sizes,
    slowest_s,
    useless_warning,
)

SECONDS = st.floats(1e-4, 10.0)
QUICK = settings(max_examples=40, deadline=None)
SPEEDS = st.lists(st.builds(RankSpeed, SECONDS, st.just(0.0), st.floats(0.0, 1.0)), min_size=1, max_size=6)


@QUICK
@given(SPEEDS, st.integers(0, 60))
def test_every_micro_batch_is_given_once_and_every_rank_has_one(speeds: list[RankSpeed], more: int) -> None:
    parts = divide_by_speed(len(speeds) + more, speeds)
    assert sum(parts) == len(speeds) + more
    assert min(parts) >= 1


@QUICK
@given(SPEEDS, st.integers(0, 30))
def test_no_other_division_ends_earlier(speeds: list[RankSpeed], more: int) -> None:
    parts = divide_by_speed(len(speeds) + more, speeds)
    end_s = slowest_s(parts, speeds)
    for source in range(len(speeds)):
        for target in range(len(speeds)):
            if source != target and parts[source] > 1:
                moved = [*parts]
                moved[source] -= 1
                moved[target] += 1
                assert slowest_s(moved, speeds) >= end_s * (1 - 1e-9)


@QUICK
@given(SPEEDS, st.sampled_from((8, 24, 64, 96)), st.integers(1, 32), st.booleans())
def test_the_batch_stays_and_micro_batches_fit_into_memory(
    speeds: list[RankSpeed], batch: int, most: int, is_fixed: bool
) -> None:
    size = max(size for size in range(1, most + 1) if batch % size == 0 and batch // size >= len(speeds))
    plan = divide_batch(batch, size, [1.0] * len(speeds))
    better = best_plan(plan, speeds, possible_sizes(plan, most, is_fixed), overhead=2.0)
    assert better.global_batch == batch
    assert better.micro_batch <= most
    assert min(better.micro_batches) >= 1
    if is_fixed:
        assert better.micro_batch == size


def test_micro_batches_become_small_enough_to_match_the_speeds() -> None:
    # Two micro-batches of 32 cannot be shared 3 : 1, and 8 : 8 : 8 not 5 : 2 : 1.
    for batch, size, seconds in ((64, 32, (1.0, 3.0)), (96, 32, (1.0, 2.5, 5.0)), (256, 64, (1.0, 2.2))):
        speeds = [RankSpeed(second, 0.0, 0.0) for second in seconds]
        plan = divide_batch(batch, size, [1.0] * len(speeds))
        better = best_plan(plan, speeds, possible_sizes(plan, size, is_fixed=False), overhead=0.25)
        count = sum(better.micro_batches)
        assert better.micro_batch < size
        assert slowest_s(better.micro_batches, speeds) <= 1.05 * even_s(count, speeds)


def test_micro_batches_stay_large_where_smaller_ones_gain_little() -> None:
    plan = BatchPlan(64, (2, 2))
    slow = RankSpeed(1 / 0.31, 0.0, 0.0)
    sizes = possible_sizes(plan, 64, is_fixed=False)
    # Micro-batches of 8 would match the speeds more closely, if they cost nothing.
    assert best_plan(plan, [RankSpeed(1.0, 0.0, 0.0), slow], sizes, overhead=2.0) == BatchPlan(64, (3, 1))
    steps = [[RankTime(2.0, 0.0), RankTime(2 / 0.31, 0.0)]] * 6
    change = find_change(steps, plan, sizes, min_gain=0.1)
    assert change is not None
    assert change.plan == BatchPlan(64, (3, 1))


def train(
    speeds_at: Callable[[int], Sequence[float]],
    steps: int,
    jitter: float = 0.1,
    seed: int = 0,
    mode: str | None = None,
    size: int = 8,
    overhead: float = 2.0,
) -> tuple[list[tuple[int, ShareChange]], list[float]]:
    """Train with ranks of these speeds; return the changes, and each step's speed as part of the sum of all ranks'."""
    noise = random.Random(seed)
    ranks = len(speeds_at(1))
    balance, plan = Balance(mode), divide_batch(96, size, [1.0] * ranks)
    changes: list[tuple[int, ShareChange]] = []
    parts: list[float] = []
    for step in range(1, steps + 1):
        speeds = speeds_at(step)
        cost = (plan.micro_batch + overhead) / plan.micro_batch
        work = [
            cost * plan.micro_batch * count / speed * max(0.3, noise.gauss(1.0, jitter))
            for count, speed in zip(plan.micro_batches, speeds, strict=True)
        ]
        ideal = max(part / speed for part, speed in zip(plan.micro_batches, speeds, strict=True))
        parts.append(sum(plan.micro_batches) / ideal / sum(speeds))
        balance.observe([RankTime(seconds, 0.5) for seconds in work])
        change = balance.judge(plan, possible_sizes(plan, size, is_fixed=False), range(ranks))
        if change is not None:
            changes.append((step, change))
            plan = change.plan
    return changes, parts


def test_noise_of_equal_machines_moves_nothing() -> None:
    for jitter in (0.1, 0.2):
        for ranks, seed in ((2, 1), (2, 2), (3, 3), (6, 4)):
            assert not train(lambda _, count=ranks: [1.0] * count, 200, jitter, seed, mode="live")[0]  # type: ignore[misc]


def test_unequal_machines_are_found_in_the_first_steps() -> None:
    for speeds in ((1.0, 0.33), (1.0, 0.66, 0.33)):
        changes, parts = train(lambda _, now=speeds: now, 40)  # type: ignore[misc]
        assert changes[0][0] <= 12
        assert min(parts[24:]) >= 0.9


def test_a_machine_that_slows_down_and_recovers_is_followed_within_20_steps() -> None:
    for jitter, seed in ((0.02, 0), (0.1, 1), (0.15, 2)):
        changes, parts = train(lambda step: (1.0, 0.33 if 40 < step <= 100 else 1.0), 140, jitter, seed)
        assert min(parts[60:100]) >= 0.9, changes
        assert min(parts[120:]) >= 0.9, changes


def test_machines_that_differ_little_are_left_alone_unless_asked() -> None:
    assert not train(lambda _: (1.0, 0.92), 60, 0.002, size=1)[0]
    assert train(lambda _: (1.0, 0.92), 60, 0.002, size=1, mode="live")[0]


def test_static_shares_are_measured_once() -> None:
    changes, _ = train(lambda step: (1.0, 0.33 if step < 40 else 1.0), 100, mode="static")
    assert [step < 40 for step, _ in changes] == [True]
    assert not train(lambda step: (1.0, 1.0 if step < 60 else 0.33), 120, mode="static")[0]
    assert not train(lambda _: (1.0, 0.33), 60, mode="off")[0]


def test_the_cost_of_smaller_micro_batches_is_measured() -> None:
    large, small = BatchPlan(8, (1, 1)), BatchPlan(2, (4, 4))
    assert measure_overhead(large, [10.0, 20.0], small, [4.0, 8.0]) == pytest.approx(2.0)
    assert measure_overhead(small, [4.0, 8.0], large, [10.0, 20.0]) == pytest.approx(2.0)
    # By chance no cost is seen; that some is there is certain.
    assert measure_overhead(large, [10.0, 20.0], small, [2.0, 4.0]) == 0.25
    assert measure_overhead(large, [10.0, 20.0], small, [11.0, 21.0]) > 10


def test_micro_batches_that_became_too_small_become_larger_again() -> None:
    # With two machines of 1 : 0.55 and a batch of 6 micro-batches, smaller ones match better, but cost too much here.
    changes, _ = train(lambda _: (1.0, 0.55), 80, 0.02, size=16, overhead=12.0)
    sizes = [change.plan.micro_batch for _, change in changes]
    assert sizes[-1] == max(sizes), sizes
    assert len(sizes) <= 4


def steps_of(micro_batch_s: Sequence[float], plan: BatchPlan, jitter: float = 0.02) -> list[list[RankTime]]:
    noise = random.Random(5)
    return [
        [
            RankTime(count * seconds * noise.gauss(1.0, jitter), 0.001)
            for count, seconds in zip(plan.micro_batches, micro_batch_s, strict=True)
        ]
        for _ in range(12)
    ]


def test_a_machine_that_is_too_slow_to_help_is_named_with_the_step_without_it() -> None:
    plan, machines = BatchPlan(4, (12, 11, 1)), ("pond1", "pond2", "pond3")
    slow = find_slow_machine(steps_of((0.01, 0.01, 0.5), plan), plan, machines)
    assert slow is not None
    assert (slow.name, slow.ranks, slow.is_useless) == ("pond3", (2,), True)
    warning = useless_warning(slow, plan, can_leave_out=True)
    assert re.fullmatch(
        r"pond3 is too slow to help: computing takes about 50\d ms a step with it, and 12\d without it", warning.seen
    )
    assert "--drop-slower-than 0.024" in warning.fix
    assert useless_warning(slow, plan, can_leave_out=False).fix.startswith("train without it")
    # One that is slow and does its part in time helps.
    helpful = find_slow_machine(steps_of((0.01, 0.01, 0.11), plan), plan, machines)
    assert helpful is not None
    assert not helpful.is_useless
    # Two ranks that cannot have less than a micro-batch each.
    pair = BatchPlan(8, (1, 1))
    stuck = find_slow_machine(steps_of((0.01, 0.2), pair), pair, ("pond1", "pond2"))
    assert stuck is not None
    assert stuck.is_useless


def test_the_speed_of_a_machine_is_that_of_all_its_ranks() -> None:
    plan = BatchPlan(4, (2, 2, 4))
    slow = find_slow_machine(steps_of((0.02, 0.02, 0.01), plan), plan, ("pond1", "pond1", "pond2"))
    assert slow is not None
    assert slow.speed == pytest.approx(1.0, abs=0.05)
    assert find_slow_machine(steps_of((0.02, 0.02, 0.01), plan), plan, ("pond1",) * 3) is None


def test_noise_leaves_no_machine_out() -> None:
    plan = BatchPlan(4, (4, 1))
    certain = find_slow_machine(steps_of((0.01, 0.06), plan), plan, ("pond1", "pond2"))
    noisy = find_slow_machine(steps_of((0.01, 0.06), plan, jitter=0.3), plan, ("pond1", "pond2"))
    assert certain is not None
    assert certain.most_speed < 0.2
    assert noisy is None or noisy.most_speed >= 0.2


def test_a_machine_is_left_out_once_and_stays_when_it_replaces_another() -> None:
    balance = Balance("live")
    assert balance.leave_out([2], machines=3)
    assert not balance.leave_out([2], machines=3)
    left_out = balance.left_out
    assert left_out == {2: 3}
    after = Balance("live")
    after.adopt({0: 1.0}, left_out)
    # Another machine was lost, and this one came back for it.
    assert not after.leave_out([2], machines=2)
    assert after.leave_out([2], machines=3)
    assert [after.is_news("pond3"), after.is_news("pond3")] == [True, False]


def test_time_that_does_not_depend_on_the_share_is_no_reason_for_another_one() -> None:
    plan = BatchPlan(4, (4, 4))
    steps = [[RankTime(1.0, 0.1), RankTime(1.0, 0.12)]] * 12
    assert find_change(steps, plan, [1, 2, 4], 0.06) is None


def test_speeds_divide_the_batch_of_the_next_world() -> None:
    balance = Balance("live")
    assert balance.weights((0, 1)) is None
    balance.adopt({0: 1.0, 2: 0.5})
    assert balance.weights((2, 0, 7)) == (0.5, 1.0, 0.75)
    assert Balance("off").weights((0,)) is None


def test_a_change_is_explained() -> None:
    names = ("rank 0 on pond0", "rank 1 on pond1")
    change = ShareChange(BatchPlan(16, (2, 2)), BatchPlan(8, (6, 2)), (1.0, 0.33), 0.3, 0.15, overhead=2.0)
    assert describe_change(change, names) == (
        "shares now 6:2 micro-batches of 8 instead of 2:2 of 16, which cost about 11% more for each sample, because "
        "rank 1 on pond1 computes at 0.33 of the speed of rank 0 on pond0; computing takes about 150 ms a step instead "
        "of 300"
    )
    back = ShareChange(BatchPlan(8, (6, 2)), BatchPlan(8, (4, 4)), (1.0, 0.98), 0.3, 0.2, overhead=2.0)
    assert describe_change(back, names) == (
        "shares now 4:4, because all ranks compute about equally fast now; computing takes about 200 ms a step instead "
        "of 300"
    )


def test_the_first_shares_are_explained() -> None:
    assert describe_first_shares(BatchPlan(8, (6, 2)), "as run.weights sets them", False) == (
        "shares 6:2, as run.weights sets them"
    )
    assert describe_first_shares(BatchPlan(8, (4, 4)), "", True).startswith("equal shares until")
    assert describe_first_shares(BatchPlan(8, (4, 4)), "", False) == ""
