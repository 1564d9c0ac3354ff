"""When an agent may leave, must give in, or has lost hope."""

from __future__ import annotations

from shoal.agent.membership import ShutdownTracker
from shoal.control.membership.messages import Heartbeat
from shoal.control.membership.types import Ballot, MemberRanks, first_generation

THREE = first_generation(tuple(MemberRanks(member=member, ranks=(0,)) for member in range(3)))


def beat(has_state: bool, votes: bool = True) -> Heartbeat:
    return Heartbeat(
        generation=Ballot(1, 0), lineage=Ballot(1, 0), committed=4, reachable=(), can_vote=votes, has_state=has_state
    )


def tracker(connected: set[int], finished: bool = False) -> ShutdownTracker:
    return ShutdownTracker(me=0, launch_size=3, silent_after_s=2.5, finished=finished, connected=connected)


def test_whoever_trained_with_us_and_still_works_is_awaited() -> None:
    end = tracker({1, 2}, finished=True)
    for member in (1, 2):
        end.record_message(member, beat(has_state=True), 10.0)
    assert end.awaits(THREE, 11.0)
    end.record_done(1, True, 11.0)
    assert end.awaits(THREE, 11.0)
    assert not end.awaits(THREE, 13.0), "the other one has fallen silent"
    assert end.absent() == [2]
    end.record_done(2, True, 13.0)
    assert not end.awaits(THREE, 13.0)
    assert end.absent() == []


def test_who_has_not_finished_waits_for_nobody_and_misses_nobody() -> None:
    end = tracker({1, 2})
    end.record_message(1, beat(has_state=True), 10.0)
    assert not end.awaits(THREE, 10.0)
    assert end.absent() == []


def test_a_guest_gives_in_when_the_others_have_finished() -> None:
    end = tracker({1, 2})
    assert not end.is_late(is_outside=True, now=10.0)
    end.record_done(1, False, 10.0)
    assert not end.is_late(is_outside=True, now=10.0), "that one was lost, not finished"
    end.record_done(2, True, 10.0)
    assert end.is_late(is_outside=True, now=10.0)
    assert not end.is_late(is_outside=False, now=20.0), "a member may still finish by itself"
    assert end.is_late(is_outside=False, now=26.0)


def test_without_anybody_who_has_the_state_there_is_no_hope() -> None:
    end = tracker({1})
    end.record_message(1, beat(has_state=False), 10.0)
    end.record_message(2, beat(has_state=True), 10.0)
    assert not end.is_stateless(False, True, 10.0)
    assert not end.is_stateless(False, True, 65.0)
    assert not end.is_stateless(True, True, 66.0)
    assert not end.is_stateless(False, True, 70.0), "it had the state meanwhile"
    assert end.is_stateless(False, True, 131.0), "the one that has it is not connected"
    assert not end.is_stateless(False, False, 131.5), "a member with a vote may be loading a checkpoint"
    assert not end.is_stateless(False, True, 131.5)
    end.record_message(1, beat(has_state=False), 132.0)
    assert end.is_stateless(False, True, 200.0)
    assert not end.is_stateless(False, True, 200.0, is_starting=True), "its ranks go back to a checkpoint"
    assert end.is_stateless(False, True, 800.0, is_starting=True)
    end.record_message(1, beat(has_state=True), 132.0)
    assert not end.is_stateless(False, True, 132.0)
