"""Which setups of a machine's ranks are tried, in which steps, and which one is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.machine_setup import (
    RankSetup,
    TrialSchedule,
    describe_fewer_ranks,
    explain_choice,
    is_worth_trying,
    list_candidates,
    trial_steps,
)

HERE = 7
FIRST = RankSetup("shared", True, 8)


def run_trial(seconds: list[list[float]], machine: int = HERE) -> TrialSchedule:
    """Try candidates whose n-th step takes `seconds[candidate][n]`, the last of them for all further steps."""
    schedule = TrialSchedule(len(seconds))
    done = [0] * len(seconds)
    while (candidate := schedule.current) is not None:
        steps = seconds[candidate]
        schedule.observe({machine: steps[min(done[candidate], len(steps) - 1)]})
        done[candidate] += 1
    return schedule


def test_every_candidate_differs_from_the_first_in_one_respect() -> None:
    assert list_candidates(FIRST, can_pin=True, can_change_threads=True) == [
        FIRST,
        RankSetup("gloo", True, 8),
        RankSetup("shared", False, 8),
        RankSetup("shared", True, 4),
        RankSetup("shared", True, 2),
    ]


def test_what_the_user_has_set_is_not_tried() -> None:
    assert list_candidates(RankSetup("", False, 8), can_pin=False, can_change_threads=False) == [
        RankSetup("", False, 8)
    ]


def test_one_thread_is_not_divided() -> None:
    assert list_candidates(RankSetup("", False, 1), can_pin=False, can_change_threads=True) == [RankSetup("", False, 1)]


def test_a_trial_takes_a_fifth_of_the_steps_at_most() -> None:
    assert trial_steps(3) == 24
    assert is_worth_trying(3, 120)
    assert not is_worth_trying(3, 119)


def test_the_first_step_of_a_block_does_not_count() -> None:
    schedule = run_trial([[9.0, 1.0, 1.0, 1.0, 9.0, 1.0], [9.0, 2.0]])
    assert schedule.times[HERE][0] == [1.0] * 6


def test_a_much_slower_candidate_is_tried_once() -> None:
    schedule = run_trial([[1.0], [1.5], [1.1]])
    assert [len(times) for times in schedule.times[HERE]] == [6, 3, 6]


def test_the_first_candidate_is_tried_twice_even_if_it_is_slow() -> None:
    schedule = run_trial([[5.0], [1.0]])
    assert [len(times) for times in schedule.times[HERE]] == [6, 6]
    assert schedule.best(HERE) == 1


@pytest.mark.parametrize(("other_s", "best"), [(0.96, 1), (0.98, 0), (1.1, 0)])
def test_another_setup_must_be_clearly_faster(other_s: float, best: int) -> None:
    assert run_trial([[1.0], [other_s]]).best(HERE) == best


def test_a_busy_moment_does_not_decide() -> None:
    schedule = run_trial([[1.0], [0.9, 0.9, 3.0, 0.9]])
    assert schedule.best(HERE) == 1


def test_machines_keep_their_own_best_and_try_in_step() -> None:
    schedule = TrialSchedule(2)
    while (candidate := schedule.current) is not None:
        schedule.observe({1: (1.0, 0.5)[candidate], 2: (1.0, 2.0)[candidate]})
    # The second candidate is hopeless on machine 2, and goes on because machine 1 wants it.
    assert [len(times) for times in schedule.times[2]] == [6, 6]
    assert (schedule.best(1), schedule.best(2)) == (1, 0)


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=5))
def test_what_is_kept_is_never_slower_than_what_it_began_with(seconds: list[float]) -> None:
    schedule = run_trial([[taken_s] for taken_s in seconds])
    assert schedule.seconds(HERE, schedule.best(HERE)) <= schedule.seconds(HERE, 0)
    assert schedule.seconds(HERE, schedule.best(HERE)) <= 1.03 * min(seconds)


def test_the_reason_names_every_setup_with_its_time() -> None:
    candidates = list_candidates(RankSetup("shared", True, 1), can_pin=True, can_change_threads=False)
    assert explain_choice(candidates, run_trial([[0.030], [0.040], [0.020]]), HERE, chosen=2) == (
        "continues with 1 thread, not pinned, shared memory; a step took 30 ms with 1 thread, pinned, shared memory; "
        "40 ms with 1 thread, pinned, gloo between the ranks; 20 ms with 1 thread, not pinned, shared memory"
    )


def test_fewer_ranks_are_named_with_the_option_to_type() -> None:
    assert describe_fewer_ranks(ranks=4, step_s=0.040, fewer=1, fewer_s=0.025) == (
        "on this machine one process would be faster: 25 ms a step, and 40 ms with 4 ranks; type the same command "
        "with --on local:1"
    )
    assert describe_fewer_ranks(ranks=4, step_s=0.040, fewer=2, fewer_s=0.0395) is None
