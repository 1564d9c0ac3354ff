"""What a rank may still do in its generation, and where it says that it stands."""

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


def test_what_is_done_again_has_to_be_committed_again() -> None:
    """After going back to a checkpoint, a rank claims no step that the others have still to do."""
    fence = entered(step=10, committed=9)
    fence.set_step(4)
    for step in range(5, 9):
        with fence.apply_step(step):
            pass
    assert fence.position() == State(step=8, committed=4)


def test_nothing_is_applied_in_a_generation_that_is_over() -> None:
    fence = entered(step=3, committed=2)
    assert fence.end(FIRST) == State(step=3, committed=2)
    with pytest.raises(GenerationEnded), fence.apply_step(4):
        pytest.fail("it was applied")
    assert fence.position() == State(step=3, committed=2)


def test_an_update_that_fails_in_the_middle_leaves_no_state() -> None:
    fence = entered(step=3, committed=2)
    with pytest.raises(ZeroDivisionError), fence.apply_step(4):
        raise ZeroDivisionError
    assert fence.position() is None


def test_a_lease_counts_for_its_own_generation() -> None:
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


def test_whoever_is_told_to_end_somebody_elses_generation_goes_on() -> None:
    fence = entered(step=3, committed=2)
    fence.end(SECOND)
    with fence.apply_step(4):
        pass
    assert fence.position() == State(step=4, committed=2)
