"""Shares that follow speed: what they always keep, what noise does, and how soon they follow a change."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.cost.batch_plan import BatchPlan, divide_batch
from shoal.engine.balance import (
    Balance,
    Division,
    RankSpeed,
    RankTime,
    ShareChange,
    WorkTime,
    describe_change,
    describe_first_shares,
    divide_by_speed,
    even_s,
    find_change,
    find_slow_machine,
    measure_overhead,
    slowest_s,
    useless_warning,
    work_of,
)

SECONDS = st.floats(1e-4, 10.0)
QUICK = settings(max_examples=40, deadline=None)
SPEEDS = st.lists(st.builds(RankSpeed, SECONDS, st.just(0.0), st.floats(0.0, 1.0)), min_size=1, max_size=6)


DIVISIONS = st.builds(Division, st.just(1), st.integers(1, 32))


def divide(batch: int, speeds: Sequence[RankSpeed], division: Division, overhead: float = 2.0) -> BatchPlan:
    return divide_by_speed(batch, division, speeds, overhead)


@QUICK
@given(SPEEDS, st.integers(0, 60), st.sampled_from((Division(1, 8), Division(1, 64), Division(4, 4))))
def test_every_sample_is_given_once_and_every_rank_has_some(
    speeds: list[RankSpeed], more: int, division: Division
) -> None:
    batch = division.unit * (len(speeds) + more)
    plan = divide(batch, speeds, division)
    assert plan.global_batch == batch
    assert plan.micro_batch == division.micro_batch
    assert min(plan.shares) >= division.unit
    assert all(share % division.unit == 0 for share in plan.shares)


@QUICK
@given(SPEEDS, st.integers(0, 30), DIVISIONS)
def test_no_other_division_ends_earlier(speeds: list[RankSpeed], more: int, division: Division) -> None:
    plan = divide(len(speeds) + more, speeds, division)
    end_s = slowest_s(plan, speeds, 2.0)
    for source in range(len(speeds)):
        for target in range(len(speeds)):
            if source != target and plan.shares[source] > 1:
                moved = [*plan.shares]
                moved[source] -= 1
                moved[target] += 1
                assert slowest_s(BatchPlan(plan.micro_batch, tuple(moved)), speeds, 2.0) >= end_s * (1 - 1e-9)


@QUICK
@given(SPEEDS, st.integers(1, 5000), DIVISIONS)
def test_a_large_batch_is_divided_quickly_and_closely(speeds: list[RankSpeed], batch: int, division: Division) -> None:
    assume(batch >= 64 * len(speeds))
    plan = divide(batch, speeds, division, overhead=0.0)
    assert plan.global_batch == batch
    # No rank ends later than the ideal by more than one piece, or than the least that it can have.
    piece = max(1, batch // (64 * len(speeds)))
    least_s = max(speed.end_s(1, division.micro_batch, 0.0) for speed in speeds)
    ideal_s = max(least_s, even_s(batch, division.micro_batch, speeds, 0.0))
    assert slowest_s(plan, speeds, 0.0) <= ideal_s + piece * max(speed.sample_s for speed in speeds) + least_s


def test_shares_match_the_speeds_in_one_micro_batch_each() -> None:
    for batch, size, seconds in ((64, 64, (1.0, 3.0)), (96, 64, (1.0, 2.5, 5.0)), (64, 64, (1.0, 3.6))):
        speeds = [RankSpeed(second, 0.0, 0.0) for second in seconds]
        plan = divide(batch, speeds, Division(1, size))
        assert plan.counts == (1,) * len(speeds)
        assert slowest_s(plan, speeds, 2.0) <= 1.05 * even_s(batch, size, speeds, 2.0)


def test_micro_batches_that_must_keep_their_size_are_given_whole() -> None:
    steps = [[RankTime(2.0, 0.0), RankTime(2 / 0.31, 0.0)]] * 6
    change = find_change(steps, BatchPlan(64, (128, 128)), Division(64, 64), min_gain=0.1)
    assert change is not None
    assert change.plan == BatchPlan(64, (192, 64))
    assert change.plan.sizes(0) == (64, 64, 64)
    finer = find_change(steps, BatchPlan(64, (128, 128)), Division(1, 64), min_gain=0.1)
    assert finer is not None
    assert finer.plan.shares[1] == pytest.approx(256 * 0.31 / 1.31, abs=4)
    assert finer.after_s < change.after_s


def train(
    speeds_at: Callable[[int], Sequence[float]],
    steps: int,
    jitter: float = 0.1,
    seed: int = 0,
    mode: str | None = None,
    size: int = 64,
    overhead: float = 2.0,
) -> tuple[list[tuple[int, ShareChange]], list[float]]:
    """Train with ranks of these speeds; return the changes, and each step's speed as part of the sum of all ranks'."""
    noise = random.Random(seed)
    ranks = len(speeds_at(1))
    balance, plan = Balance(mode), divide_batch(96, 96 // ranks, [1.0] * ranks)
    changes: list[tuple[int, ShareChange]] = []
    parts: list[float] = []
    for step in range(1, steps + 1):
        speeds = speeds_at(step)
        work = [
            load / speed * max(0.3, noise.gauss(1.0, jitter))
            for load, speed in zip(work_of(plan, overhead), speeds, strict=True)
        ]
        ideal = max(share / speed for share, speed in zip(plan.shares, speeds, strict=True))
        parts.append(plan.global_batch / ideal / sum(speeds))
        balance.observe([RankTime(seconds, 0.5) for seconds in work])
        change = balance.judge(plan, Division(1, size), range(ranks))
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
    assert not train(lambda _: (1.0, 0.92), 60, 0.002)[0]
    assert train(lambda _: (1.0, 0.92), 60, 0.002, mode="live")[0]


def test_static_shares_are_measured_once() -> None:
    changes, _ = train(lambda step: (1.0, 0.33 if step < 40 else 1.0), 100, mode="static")
    assert [step < 40 for step, _ in changes] == [True]
    assert not train(lambda step: (1.0, 1.0 if step < 60 else 0.33), 120, mode="static")[0]
    assert not train(lambda _: (1.0, 0.33), 60, mode="off")[0]


def overhead_of(
    before: BatchPlan, before_s: Sequence[float], after: BatchPlan, after_s: Sequence[float], error: float = 1e-4
) -> float | None:
    old, new = ([WorkTime(seconds, error) for seconds in times] for times in (before_s, after_s))
    return measure_overhead(before, old, after, new)


def test_the_cost_of_small_micro_batches_is_measured() -> None:
    large, small = BatchPlan(8, (8, 8)), BatchPlan(2, (8, 8))
    # Each micro-batch takes 4 samples' time more.
    assert overhead_of(large, [12.0, 24.0], small, [24.0, 48.0]) == pytest.approx(4.0, abs=0.05)
    assert overhead_of(small, [24.0, 48.0], large, [12.0, 24.0]) == pytest.approx(4.0, abs=0.05)
    # Other shares show it, too: 4 + 4 and 12 + 4 samples' time instead of 8 + 4.
    assert overhead_of(large, [12.0, 36.0], BatchPlan(12, (12, 4)), [16.0, 24.0]) == pytest.approx(4.0, abs=0.05)
    # By chance no cost is seen; that some is there is certain.
    assert overhead_of(large, [10.0, 20.0], small, [8.0, 16.0]) == 0.25
    # What noise shows changes little.
    assert overhead_of(large, [12.0, 24.0], small, [24.0, 48.0], error=0.3) == pytest.approx(2.5, abs=0.1)
    assert overhead_of(large, [10.0, 20.0], small, [44.0, 84.0]) is None
    assert overhead_of(large, [10.0, 20.0], large, [11.0, 19.0]) is None


def test_shares_of_a_model_with_costly_starts_settle() -> None:
    for overhead in (0.0, 2.0, 12.0):
        changes, _ = train(lambda _: (1.0, 0.55), 120, 0.02, overhead=overhead)
        assert len(changes) <= 3, (overhead, [change.plan.shares for _, change in changes])
        load, other = (
            work / speed for work, speed in zip(work_of(changes[-1][1].plan, overhead), (1.0, 0.55), strict=True)
        )
        assert load == pytest.approx(other, rel=0.1)


def steps_of(sample_s: Sequence[float], plan: BatchPlan, jitter: float = 0.02) -> list[list[RankTime]]:
    noise = random.Random(5)
    return [
        [
            RankTime(work * seconds * noise.gauss(1.0, jitter), 0.001)
            for work, seconds in zip(work_of(plan, 2.0), sample_s, strict=True)
        ]
        for _ in range(12)
    ]


ANY = Division(1, 64)


def test_a_machine_that_is_too_slow_to_help_is_named_with_the_step_without_it() -> None:
    plan, machines = BatchPlan(64, (48, 47, 1)), ("pond1", "pond2", "pond3")
    slow = find_slow_machine(steps_of((0.0025, 0.0025, 0.168), plan), plan, ANY, machines)
    assert slow is not None
    assert (slow.name, slow.ranks, slow.is_useless) == ("pond3", (2,), True)
    warning = useless_warning(slow, plan, can_leave_out=True)
    assert re.fullmatch(
        r"pond3 is too slow to help: computing takes about 5\d\d ms a step with it, and 12\d without it", warning.seen
    )
    assert warning.why.endswith("and has 1 of the 96 samples of a step")
    assert "--drop-slower-than 0.018" in warning.fix
    assert useless_warning(slow, plan, can_leave_out=False).fix.startswith("train without it")
    # One that is slow and does its part in time helps.
    helpful = find_slow_machine(steps_of((0.0025, 0.0025, 0.03), plan), plan, ANY, machines)
    assert helpful is not None
    assert not helpful.is_useless
    # Two ranks that cannot have less than a micro-batch each.
    pair = BatchPlan(8, (8, 8))
    stuck = find_slow_machine(steps_of((0.001, 0.02), pair), pair, Division(8, 8), ("pond1", "pond2"))
    assert stuck is not None
    assert stuck.is_useless


def test_the_speed_of_a_machine_is_that_of_all_its_ranks() -> None:
    plan = BatchPlan(16, (8, 8, 16))
    slow = find_slow_machine(steps_of((0.02, 0.02, 0.01), plan), plan, ANY, ("pond1", "pond1", "pond2"))
    assert slow is not None
    assert slow.speed == pytest.approx(1.0, abs=0.05)
    assert find_slow_machine(steps_of((0.02, 0.02, 0.01), plan), plan, ANY, ("pond1",) * 3) is None


def test_noise_leaves_no_machine_out() -> None:
    plan = BatchPlan(16, (16, 4))
    certain = find_slow_machine(steps_of((0.01, 0.06), plan), plan, ANY, ("pond1", "pond2"))
    noisy = find_slow_machine(steps_of((0.01, 0.06), plan, jitter=0.3), plan, ANY, ("pond1", "pond2"))
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
    plan = BatchPlan(16, (16, 16))
    steps = [[RankTime(1.0, 0.1), RankTime(1.0, 0.12)]] * 12
    assert find_change(steps, plan, ANY, 0.06) is None


def test_speeds_divide_the_batch_of_the_next_world() -> None:
    balance = Balance("live")
    assert balance.weights((0, 1)) is None
    balance.adopt({0: 1.0, 2: 0.5})
    assert balance.weights((2, 0, 7)) == (0.5, 1.0, 0.75)
    assert Balance("off").weights((0,)) is None


def test_a_change_is_explained() -> None:
    names = ("rank 0 on pond0", "rank 1 on pond1")
    change = ShareChange(BatchPlan(16, (16, 16)), BatchPlan(16, (24, 8)), (1.0, 0.33), 0.3, 0.15)
    assert describe_change(change, names) == (
        "shares now 24:8 samples instead of 16:16, because rank 1 on pond1 computes at 0.33 of the speed of rank 0 on "
        "pond0; computing takes about 150 ms a step instead of 300"
    )
    back = ShareChange(BatchPlan(16, (24, 8)), BatchPlan(16, (16, 16)), (1.0, 0.98), 0.3, 0.2)
    assert describe_change(back, names) == (
        "shares now 16:16 samples instead of 24:8, because all ranks compute about equally fast now; computing takes "
        "about 200 ms a step instead of 300"
    )


def test_the_first_shares_are_explained() -> None:
    assert describe_first_shares(BatchPlan(8, (6, 2)), "as run.weights sets them", False) == (
        "shares 6:2, as run.weights sets them"
    )
    assert describe_first_shares(BatchPlan(8, (4, 4)), "", True).startswith("equal shares until")
    assert describe_first_shares(BatchPlan(8, (4, 4)), "", False) == ""
