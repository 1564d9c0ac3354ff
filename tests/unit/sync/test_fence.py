"""The generation fence: which updates a rank may apply, and which position it reports."""

from __future__ import annotations

import pytest

from shoal.control.membership.types import Ballot, State
from shoal.host.facts import boot_clock
from shoal.sync.fence import GenerationEnded, GenerationFence

FIRST, SECOND = Ballot(1, 0), Ballot(2, 0)


def entered(step: int, committed: int) -> GenerationFence:
    fence = GenerationFence()
    fence.enter(FIRST, has_state=True, min_step=0)
    fence.set_step(step)
    fence.committed(committed)
    return fence


def test_redone_steps_are_not_committed_until_committed_again() -> None:
    """After loading a checkpoint, a rank reports no step as committed that the others have yet to do."""
    fence = entered(step=10, committed=9)
    fence.set_step(4)
    for step in range(5, 9):
        with fence.apply_step(step):
            pass
    assert fence.position() == State(step=8, committed=4)


def test_no_update_is_applied_in_an_ended_generation() -> None:
    fence = entered(step=3, committed=2)
    assert fence.end(FIRST) == State(step=3, committed=2)
    with pytest.raises(GenerationEnded), fence.apply_step(4):
        pytest.fail("it was applied")
    assert fence.position() == State(step=3, committed=2)


def test_an_update_that_fails_midway_leaves_no_state() -> None:
    fence = entered(step=3, committed=2)
    with pytest.raises(ZeroDivisionError), fence.apply_step(4):
        raise ZeroDivisionError
    assert fence.position() is None


def test_a_lease_is_valid_only_for_its_own_generation() -> None:
    fence = entered(step=3, committed=2)
    fence.end(FIRST)
    fence.enter(SECOND, has_state=True, min_step=2)
    fence.lease(FIRST, boot_clock() + 100)
    fence.end(SECOND)
    with pytest.raises(GenerationEnded):
        fence.await_lease()
    fence.enter(Ballot(3, 0), has_state=True, min_step=2)
    fence.lease(Ballot(3, 0), boot_clock())
    fence.await_lease()


def test_ending_another_generation_does_not_stop_the_rank() -> None:
    fence = entered(step=3, committed=2)
    fence.end(SECOND)
    with fence.apply_step(4):
        pass
    assert fence.position() == State(step=4, committed=2)
