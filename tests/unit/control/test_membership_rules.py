"""The pure rules of membership: failure detection, quorum, votes, Paxos rounds, lineages and messages."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shoal.control.membership.failure_detector import FailureDetector, PeerStatus
from shoal.control.membership.messages import Announce, Heartbeat, Message, Promise, Resign, Vote, decode, encode
from shoal.control.membership.paxos import PaxosRound
from shoal.control.membership.quorum import (
    JoinCandidate,
    Quorum,
    QuorumVerdict,
    decide_successor,
    judge,
    mutually_reachable,
)
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import (
    NEVER,
    Ballot,
    Generation,
    Lineage,
    LineageFork,
    MemberRanks,
    State,
    choose_lineage,
    first_generation,
    next_member,
    shared_step,
)
from shoal.control.membership.vote_store import DurableVoter, VoteRecord
from shoal.errors import ControlError
from tests.support.membership_sim import Disk

RULES = MembershipSettings()


def member_ranks(*members: int) -> tuple[MemberRanks, ...]:
    return tuple(MemberRanks(member=member, ranks=(0,)) for member in members)


# Failure detection.


def detector_of(member: int) -> FailureDetector:
    detector = FailureDetector(RULES, now=0.0)
    detector.record_message(member)
    return detector


def advance_to(detector: FailureDetector, until: float, since: float = 0.0) -> None:
    """Advance in steps of 0.1 s, without a sleep."""
    for tick in range(round(since * 10) + 1, round(until * 10) + 1):
        detector.advance(tick / 10)


def test_a_member_is_silent_after_two_and_a_half_seconds() -> None:
    detector = detector_of(1)
    advance_to(detector, 2.5)
    assert detector.status(1) is PeerStatus.ALIVE
    advance_to(detector, 2.6, 2.5)
    assert detector.status(1) is PeerStatus.SILENT
    detector.record_message(1)
    assert detector.status(1) is PeerStatus.ALIVE


def test_a_member_may_be_silent_for_longer_while_the_ranks_of_a_launch_start() -> None:
    detector = detector_of(1)
    detector.set_starting(True)
    advance_to(detector, 20.0)
    assert detector.status(1) is PeerStatus.ALIVE
    detector.set_starting(False)
    assert detector.status(1) is PeerStatus.SILENT
    detector.set_starting(True)
    advance_to(detector, 20.1, 20.0)
    assert detector.status(1) is PeerStatus.SILENT


@pytest.mark.parametrize(("after_s", "expected_status"), [(0.4, PeerStatus.GONE), (0.6, PeerStatus.ALIVE)])
def test_a_connection_that_closes_right_after_a_heartbeat_means_gone(
    after_s: float, expected_status: PeerStatus
) -> None:
    detector = detector_of(1)
    advance_to(detector, after_s)
    detector.record_close(1)
    assert detector.status(1) is expected_status


def test_a_detector_that_slept_does_not_count_its_own_gap_as_silence() -> None:
    detector = detector_of(1)
    assert detector.advance(30.0)
    assert detector.status(1) is PeerStatus.ALIVE
    detector.record_close(1)
    assert detector.status(1) is PeerStatus.ALIVE
    advance_to(detector, 32.6, 30.0)
    assert detector.status(1) is PeerStatus.SILENT


def test_a_short_gap_is_not_sleep() -> None:
    detector = detector_of(1)
    assert not detector.advance(0.9)


# Quorum.


def quorum(members: int, resigned: int = 0, away: int = 0) -> Quorum:
    """Make a quorum whose last members have resigned; those before them are away."""
    last = range(members - resigned, members)
    return Quorum(
        frozenset(range(members)), frozenset(last), frozenset(range(members - resigned - away, members - resigned))
    )


@pytest.mark.parametrize(
    ("last", "votes", "expected"),
    [
        (quorum(3), 2, QuorumVerdict.CONTINUE),
        (quorum(3), 1, QuorumVerdict.PAUSE),
        (quorum(4), 2, QuorumVerdict.FORK),
        (quorum(5), 2, QuorumVerdict.PAUSE),
        (quorum(2, resigned=1), 1, QuorumVerdict.CONTINUE),
        (quorum(3, away=2), 1, QuorumVerdict.FORK),
        (quorum(3, resigned=1, away=1), 1, QuorumVerdict.FORK),
        (quorum(3, away=1), 1, QuorumVerdict.FORK),
        (quorum(1), 1, QuorumVerdict.CONTINUE),
        (quorum(3), 0, QuorumVerdict.PAUSE),
    ],
)
def test_the_verdict_depends_on_the_votes_of_the_last_generation(
    last: Quorum, votes: int, expected: QuorumVerdict
) -> None:
    assert judge(last, frozenset(range(votes)), "continue") is expected


def test_a_tie_pauses_with_on_silent_tie_pause() -> None:
    assert judge(quorum(2), frozenset({0}), "pause") is QuorumVerdict.PAUSE
    # Not a tie: the other member is gone.
    assert judge(quorum(2, away=1), frozenset({0}), "pause") is QuorumVerdict.FORK


members = st.frozensets(st.integers(0, 6), min_size=1)


@given(members, members, members, members, members, members, st.sampled_from(["continue", "pause"]))
def test_no_two_sides_continue_one_lineage(
    last: frozenset[int],
    one: frozenset[int],
    other: frozenset[int],
    resigned: frozenset[int],
    away_to_one: frozenset[int],
    away_to_other: frozenset[int],
    tie: str,
) -> None:
    """For any two views of which members are away: without a common voter, at most one side continues."""
    first, second = one - other, other - one
    verdicts = [
        judge(Quorum(last, resigned & last, away_to_one & last), first, tie),
        judge(Quorum(last, resigned & last, away_to_other & last), second, tie),
    ]
    assert verdicts.count(QuorumVerdict.CONTINUE) <= 1


@given(st.dictionaries(st.integers(0, 6), st.frozensets(st.integers(0, 6)), max_size=6))
def test_members_of_one_group_all_reach_each_other(reachable: dict[int, frozenset[int]]) -> None:
    group = mutually_reachable(reachable)
    assert all(other in reachable[one] for one in group for other in group - {one})
    assert bool(group) == bool(reachable)


def promise(base: Generation, ballot: Ballot, step: int, reachable: tuple[int, ...]) -> Promise:
    state = State(step=step, committed=max(step - 1, 0))
    return Promise(generation=base.id, ballot=ballot, state=state, ranks=(0,), reachable=reachable)


def test_a_successor_starts_from_the_most_advanced_replica() -> None:
    base, ballot = first_generation(member_ranks(0, 1, 2)), Ballot(2, 0)
    promises = {0: promise(base, ballot, 6, (1, 2)), 1: promise(base, ballot, 7, (0, 2))}
    outcome = decide_successor(base, ballot, quorum(3), promises, {}, RULES)
    assert outcome.verdict is QuorumVerdict.CONTINUE
    assert outcome.successor is not None
    assert (outcome.successor.members, outcome.successor.source) == ((0, 1), 1)
    assert outcome.successor.state == State(step=7, committed=6)
    assert outcome.successor.lineage == base.lineage


def test_of_several_replicas_at_the_same_step_the_lowest_member_is_the_source() -> None:
    base, ballot = first_generation(member_ranks(0, 1, 2)), Ballot(2, 0)
    promises = {m: promise(base, ballot, 7 if m else 6, (0, 1, 2)) for m in (2, 1, 0)}
    outcome = decide_successor(base, ballot, quorum(3), promises, {}, RULES)
    assert outcome.successor
    assert outcome.successor.source == 1


@pytest.mark.parametrize("has_old_state", [False, True])
def test_without_a_state_members_await_a_silent_one_and_then_load_a_checkpoint(has_old_state: bool) -> None:
    ballot = Ballot(2, 0)
    base = first_generation(member_ranks(0, 1, 2), State(step=90, committed=90))
    early = promise(base, ballot, 50, (0, 1))
    promises = dict.fromkeys((0, 1), early if has_old_state else early.model_copy(update={"state": None}))
    silent = decide_successor(base, ballot, quorum(3), promises, {}, RULES)
    assert (silent.verdict, silent.why) == (QuorumVerdict.PAUSE, "no state")
    for outcome in (
        decide_successor(base, ballot, quorum(3, resigned=1), promises, {}, RULES),
        decide_successor(base, ballot, quorum(3, away=1), promises, {}, RULES),
        decide_successor(base, ballot, quorum(3), promises, {}, RULES, gives_up_state=True),
    ):
        successor = outcome.successor
        assert successor
        assert successor.recovers
        # Committed steps are redone, so it must not be the same lineage, nor claim to share any of them.
        assert successor.lineage.name == ballot
        assert [fork.step for fork in successor.lineage.forks] == [0]
        assert (sorted(outcome.voters), outcome.majority) == ([0, 1], 2)


def test_fewer_than_min_nodes_or_a_minority_load_no_checkpoint() -> None:
    ballot = Ballot(2, 0)
    base = first_generation(member_ranks(0, 1, 2))
    promises = {0: promise(base, ballot, 0, (1,)).model_copy(update={"state": None})}
    few = decide_successor(base, ballot, quorum(3, resigned=2), promises, {}, replace(RULES, min_nodes=2))
    assert (few.verdict, few.why, few.gives_up_vote) == (QuorumVerdict.PAUSE, "min_nodes", True)
    silent = decide_successor(base, ballot, quorum(3, resigned=1), promises, {}, replace(RULES, min_nodes=2))
    assert (silent.verdict, silent.why, silent.gives_up_vote) == (QuorumVerdict.PAUSE, "no state", False)
    minority = decide_successor(base, ballot, quorum(3), promises, {}, RULES, gives_up_state=True)
    assert (minority.verdict, minority.why) == (QuorumVerdict.PAUSE, "minority")


def test_a_joining_member_is_admitted_when_every_member_reaches_it() -> None:
    base, ballot = first_generation(member_ranks(0, 1)), Ballot(2, 0)
    promises = {0: promise(base, ballot, 7, (1, 5, 6)), 1: promise(base, ballot, 7, (0, 5))}
    candidates = {5: JoinCandidate((0, 1), (0, 1)), 6: JoinCandidate((0,), (0, 1))}
    outcome = decide_successor(base, ballot, quorum(2), promises, candidates, RULES)
    assert outcome.successor
    assert outcome.successor.members == (0, 1, 5)
    assert (outcome.successor.world_size, outcome.successor.first_rank(5)) == (4, 2)
    # A joining member has no vote on its own admission.
    assert outcome.voters == {0, 1}


# A vote.


def test_a_vote_is_cast_once_and_survives_a_restart() -> None:
    disk, generation = Disk(), first_generation(member_ranks(0, 1))
    voter = DurableVoter(disk)
    voter.enter(generation)
    assert voter.promise(Ballot(2, 1))
    assert not voter.promise(Ballot(2, 0))
    assert voter.promise(Ballot(2, 1))
    successor = generation.model_copy(update={"id": Ballot(2, 1), "parent": generation.id})
    assert not voter.accept(Vote(ballot=Ballot(2, 0), successor=successor))
    assert voter.accept(Vote(ballot=Ballot(2, 1), successor=successor))
    restarted = DurableVoter(disk)
    assert restarted.record == voter.record
    assert not restarted.promise(Ballot(2, 0))
    restarted.resign("restart")
    resignation = restarted.resignation()
    assert resignation is not None
    assert resignation.accepted == Vote(ballot=Ballot(2, 1), successor=successor)


def test_a_vote_that_cannot_be_written_is_not_cast() -> None:
    disk = Disk()
    voter = DurableVoter(disk)
    voter.enter(first_generation(member_ranks(0, 1)))
    disk.full = True
    with pytest.raises(OSError, match="No space"):
        voter.promise(Ballot(2, 1))
    assert voter.record.promised == NEVER


# A round.


def test_a_successor_that_may_be_decided_is_proposed_again() -> None:
    base, ballot = first_generation(member_ranks(0, 1, 2)), Ballot(5, 2)
    successor = base.model_copy(update={"id": Ballot(2, 0), "parent": base.id, "member_ranks": member_ranks(0, 1)})
    older = successor.model_copy(update={"id": Ballot(2, 1)})
    round = PaxosRound(base, ballot, after_step=False, began_at=0.0)
    round.promises = {member: promise(base, ballot, 7, (0, 1, 2)) for member in (1, 2)}
    assert round.bound_to(quorum(3), {}) is None
    accepted = [Vote(ballot=Ballot(4, 0), successor=successor), Vote(ballot=Ballot(3, 1), successor=older)]
    for member, vote in zip((1, 2), accepted, strict=True):
        round.promises[member] = round.promises[member].model_copy(update={"accepted": vote})
    bound = round.bound_to(quorum(3), {})
    assert bound is not None
    assert (bound.verdict, bound.successor, bound.majority) == (QuorumVerdict.CONTINUE, successor, 2)
    del round.promises[2]
    assert round.bound_to(quorum(3), {}) is None


def test_the_vote_of_a_resigned_member_counts() -> None:
    base, ballot = first_generation(member_ranks(0, 1, 2)), Ballot(5, 0)
    successor = base.model_copy(update={"id": Ballot(2, 0), "parent": base.id})
    resignation = Resign(
        generation=base.id,
        why="restart",
        promised=Ballot(2, 0),
        accepted=Vote(ballot=Ballot(2, 0), successor=successor),
    )
    round = PaxosRound(base, ballot, after_step=False, began_at=0.0)
    round.promises = {member: promise(base, ballot, 7, (0, 1)) for member in (0, 1)}
    bound = round.bound_to(quorum(3, resigned=1), {2: resignation})
    assert bound is not None
    assert bound.successor == successor
    assert round.outbid_by([resignation]) is None
    assert round.outbid_by([resignation.model_copy(update={"promised": Ballot(5, 1)})]) == Ballot(5, 1)


# Which lineage stays.

ROOT = Lineage(name=Ballot(1, 0))


def test_the_lineage_with_more_committed_steps_stays() -> None:
    assert choose_lineage({Ballot(1, 0): 50, Ballot(7, 2): 51}) == Ballot(7, 2)
    assert choose_lineage({Ballot(1, 0): 50, Ballot(7, 2): 50}) == Ballot(7, 2)
    assert choose_lineage({Ballot(7, 1): 50, Ballot(7, 2): 50}) == Ballot(7, 1)


def test_two_lineages_share_the_steps_committed_before_the_fork() -> None:
    one = ROOT.branch(Ballot(5, 0), Ballot(4, 0), 40)
    other = ROOT.branch(Ballot(5, 1), Ballot(4, 0), 41)
    later = one.branch(Ballot(9, 0), Ballot(8, 0), 90)
    assert shared_step(one, other) == shared_step(other, one) == 40
    assert shared_step(later, other) == 40
    assert shared_step(later, one) == 90
    assert shared_step(ROOT, other) == 41
    assert shared_step(one, Lineage(name=Ballot(3, 3))) == 0


def test_only_the_newest_forks_are_kept() -> None:
    lineage = ROOT
    for number in range(2, 102):
        lineage = lineage.branch(Ballot(number, 0), Ballot(number - 1, 0), number)
    assert len(lineage.forks) == 64
    assert lineage.forks[-1] == LineageFork(lineage=Ballot(100, 0), generation=Ballot(100, 0), step=101)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), unique=True, max_size=30))
def test_joining_members_get_unique_ids(launch_size: int, invitations: list[tuple[int, int]]) -> None:
    ids = [next_member(launch_size, inviter, invited) for inviter, invited in invitations]
    assert len({*ids, *range(launch_size)}) == len(ids) + launch_size


def test_a_resumed_run_continues_the_generation_numbers() -> None:
    first = first_generation(member_ranks(0, 1))
    resumed = first_generation(member_ranks(1, 2), State(step=40, committed=40), after=first, above=12)
    assert resumed.id == Ballot(13, 1)
    assert shared_step(resumed.lineage, first.lineage) == 40


# Messages.


def samples() -> list[Message]:
    generation = first_generation(member_ranks(0, 1))
    vote = Vote(ballot=Ballot(3, 1), successor=generation)
    return [
        Heartbeat(
            generation=Ballot(1, 0), lineage=Ballot(1, 0), committed=7, reachable=(1, 2), can_vote=True, has_state=True
        ),
        Heartbeat(
            generation=None,
            lineage=None,
            committed=0,
            reachable=(),
            can_vote=False,
            has_state=False,
            joins=Ballot(1, 0),
        ),
        Announce(generation=generation),
        promise(generation, Ballot(2, 0), 7, (1,)).model_copy(update={"accepted": vote}),
        Resign(generation=Ballot(1, 0), why="leave", promised=NEVER, accepted=vote),
    ]


@pytest.mark.parametrize("message", samples(), ids=lambda message: message.type)
def test_a_message_survives_encoding(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [
        {"type": "member-unknown"},
        {"extra": 1},
        {"committed": -1},
        {"committed": "7"},
        {"committed": True},
        {"committed": 7.5},
        {"generation": [1]},
        {"generation": [1, 2, 3]},
        {"generation": [1, 2**40]},
        {"reachable": list(range(1000))},
        {"reachable": None},
        {"can_vote": 1},
        {"joins": "1-0"},
        {"ranks": "x" * 300_000},
    ],
)
def test_an_invalid_message_is_refused(change: dict[str, object]) -> None:
    document = encode(samples()[0]) | change
    with pytest.raises(ControlError, match="cannot be read"):
        decode(document)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.integers(0, 4), st.data())
def test_a_changed_field_is_refused_or_kept(which: int, data: st.DataObject) -> None:
    document = encode(samples()[which])
    field = data.draw(st.sampled_from(sorted(document)))
    document[field] = data.draw(json_values)
    try:
        message = decode(document)
    except ControlError:
        return
    assert encode(message) == document


def test_a_vote_record_refuses_unknown_fields() -> None:
    assert VoteRecord.model_validate_json(VoteRecord().model_dump_json()) == VoteRecord()
    with pytest.raises(ValueError, match="extra"):
        VoteRecord.model_validate_json('{"more": 1}')
