"""When an agent may leave, must stop as late, or finds that no member has the state."""

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


def test_members_of_the_generation_that_still_train_are_awaited() -> None:
    end = tracker({1, 2}, finished=True)
    for member in (1, 2):
        end.record_message(member, beat(has_state=True), 10.0)
    assert end.awaits(THREE, 11.0)
    end.record_done(1, True, 11.0)
    assert end.awaits(THREE, 11.0)
    assert not end.awaits(THREE, 13.0), "member 2 is silent"
    assert end.absent() == [2]
    end.record_done(2, True, 13.0)
    assert not end.awaits(THREE, 13.0)
    assert end.absent() == []


def test_an_unfinished_member_waits_for_no_other_and_reports_no_absence() -> None:
    end = tracker({1, 2})
    end.record_message(1, beat(has_state=True), 10.0)
    assert not end.awaits(THREE, 10.0)
    assert end.absent() == []


def test_a_member_outside_the_generation_is_late_when_another_has_finished() -> None:
    end = tracker({1, 2})
    assert not end.is_late(is_outside=True, now=10.0)
    end.record_done(1, False, 10.0)
    assert not end.is_late(is_outside=True, now=10.0), "member 1 was lost, it has not finished"
    end.record_done(2, True, 10.0)
    assert end.is_late(is_outside=True, now=10.0)
    assert not end.is_late(is_outside=False, now=20.0), "a member may still finish by itself"
    assert end.is_late(is_outside=False, now=26.0)


def test_without_a_member_that_has_the_state_the_run_is_stateless() -> None:
    end = tracker({1})
    end.record_message(1, beat(has_state=False), 10.0)
    end.record_message(2, beat(has_state=True), 10.0)
    assert not end.is_stateless(False, True, 10.0)
    assert not end.is_stateless(False, True, 65.0)
    assert not end.is_stateless(True, True, 66.0)
    assert not end.is_stateless(False, True, 70.0), "this member had the state in between"
    assert end.is_stateless(False, True, 131.0), "the member that has it is not connected"
    assert not end.is_stateless(False, False, 131.5), "a member with a vote may be loading a checkpoint"
    assert not end.is_stateless(False, True, 131.5)
    end.record_message(1, beat(has_state=False), 132.0)
    assert end.is_stateless(False, True, 200.0)
    assert not end.is_stateless(False, True, 200.0, is_starting=True), "its ranks go back to a checkpoint"
    assert end.is_stateless(False, True, 800.0, is_starting=True)
    end.record_message(1, beat(has_state=True), 132.0)
    assert not end.is_stateless(False, True, 132.0)
