"""When an agent may leave, must give in, or has lost hope."""

from __future__ import annotations

from shoal.agent.membership import ShutdownTracker
from shoal.control.membership.messages import Heartbeat
from shoal.control.membership.types import Ballot, MemberRanks, founding

THREE = founding(tuple(MemberRanks(member=member, ranks=(0,)) for member in range(3)))


def beat(holds: bool, votes: bool = True) -> Heartbeat:
    return Heartbeat(generation=Ballot(1, 0), lineage=Ballot(1, 0), committed=4, hears=(), votes=votes, holds=holds)


def farewell(linked: set[int], finished: bool = False) -> ShutdownTracker:
    return ShutdownTracker(me=0, founders=3, silent_after_s=2.5, finished=finished, linked=linked)


def test_whoever_trained_with_us_and_still_works_is_awaited() -> None:
    end = farewell({1, 2}, finished=True)
    for member in (1, 2):
        end.heard(member, beat(holds=True), 10.0)
    assert end.awaits(THREE, 11.0)
    end.is_done(1, True, 11.0)
    assert end.awaits(THREE, 11.0)
    assert not end.awaits(THREE, 13.0), "the other one has fallen silent"
    assert end.absent() == [2]
    end.is_done(2, True, 13.0)
    assert not end.awaits(THREE, 13.0)
    assert end.absent() == []


def test_who_has_not_finished_waits_for_nobody_and_misses_nobody() -> None:
    end = farewell({1, 2})
    end.heard(1, beat(holds=True), 10.0)
    assert not end.awaits(THREE, 10.0)
    assert end.absent() == []


def test_a_guest_gives_in_when_the_others_have_finished() -> None:
    end = farewell({1, 2})
    assert not end.is_late(outside=True, now=10.0)
    end.is_done(1, False, 10.0)
    assert not end.is_late(outside=True, now=10.0), "that one was lost, not finished"
    end.is_done(2, True, 10.0)
    assert end.is_late(outside=True, now=10.0)
    assert not end.is_late(outside=False, now=20.0), "a member may still finish by itself"
    assert end.is_late(outside=False, now=26.0)


def test_without_anybody_who_has_the_state_there_is_no_hope() -> None:
    end = farewell({1})
    end.heard(1, beat(holds=False), 10.0)
    end.heard(2, beat(holds=True), 10.0)
    assert not end.is_hopeless(False, True, 10.0)
    assert not end.is_hopeless(False, True, 65.0)
    assert not end.is_hopeless(True, True, 66.0)
    assert not end.is_hopeless(False, True, 70.0), "it had hope meanwhile"
    assert end.is_hopeless(False, True, 131.0), "the one that has it is not connected"
    assert not end.is_hopeless(False, False, 131.5), "a member with a vote may be loading a checkpoint"
    assert not end.is_hopeless(False, True, 131.5)
    end.heard(1, beat(holds=False), 132.0)
    assert end.is_hopeless(False, True, 200.0)
    assert not end.is_hopeless(False, True, 200.0, is_starting=True), "its ranks go back to a checkpoint"
    assert end.is_hopeless(False, True, 800.0, is_starting=True)
    end.heard(1, beat(holds=True), 132.0)
    assert not end.is_hopeless(False, True, 132.0)
