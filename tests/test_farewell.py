"""When an agent may leave, must give in, or has lost hope."""

from __future__ import annotations

from shoal.control.membership.generation import Ballot, Seat, founding
from shoal.control.membership.messages import Beat
from shoal.launch.farewell import Farewell

THREE = founding(tuple(Seat(member=member, ranks=(0,)) for member in range(3)))


def beat(holds: bool, votes: bool = True) -> Beat:
    return Beat(generation=Ballot(1, 0), lineage=Ballot(1, 0), committed=4, hears=(), votes=votes, holds=holds)


def farewell(linked: set[int], finished: bool = False) -> Farewell:
    return Farewell(me=0, founders=3, silent_after_s=2.5, finished=finished, linked=linked)


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
    assert not end.is_hopeless(False, 10.0)
    assert not end.is_hopeless(False, 65.0)
    assert not end.is_hopeless(True, 66.0)
    assert not end.is_hopeless(False, 70.0), "it had hope meanwhile"
    assert end.is_hopeless(False, 131.0), "the one that has it is not connected"
    end.heard(1, beat(holds=True), 132.0)
    assert not end.is_hopeless(False, 132.0)


def test_when_every_member_says_that_it_has_no_state_nothing_is_waited_for() -> None:
    """All ranks were killed at once: the agents waited 60 s although each of them knew."""
    end = Farewell(me=0, founders=3, silent_after_s=2.5, linked={1, 2})
    assert not end.is_hopeless(False, 10.0, others=(1, 2))
    for member in (1, 2):
        end.heard(member, beat(holds=False), 10.5)
    assert not end.is_hopeless(False, 12.0, others=(1, 2)), "a beat may be on its way"
    assert end.is_hopeless(False, 12.6, others=(1, 2))
    assert not end.is_hopeless(False, 12.6, others=(1, 2, 3)), "the fourth may come back with the state"
    end.linked.discard(2)
    assert not end.is_hopeless(False, 13.0, others=(1, 2)), "so may one that is out of reach"
    end.linked.add(2)
    end.heard(2, beat(holds=True), 13.0)
    assert not end.is_hopeless(False, 13.1, others=(1, 2))
