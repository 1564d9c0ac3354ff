"""Votes on disk, and the messages about membership changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.membership import sentences
from shoal.control.membership.sentences import GenerationChange
from shoal.control.membership.types import NEVER, Ballot, MemberRanks, State, first_generation
from shoal.control.membership.vote_store import DurableVoter, VoteFile, VoteRecord
from shoal.errors import ControlError
from tests.support.runs import file_size_limit


def member_ranks(*members: int) -> tuple[MemberRanks, ...]:
    return tuple(MemberRanks(member=member, ranks=(0,)) for member in members)


FIRST = first_generation(member_ranks(0, 1, 2))
SECOND = FIRST.model_copy(
    update={"id": Ballot(2, 0), "member_ranks": member_ranks(0, 1), "state": State(step=120, committed=119)}
)


def name(member: int) -> str:
    return ("anna", "ben", "cleo")[member]


def test_votes_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "votes.json"
    voter = DurableVoter(VoteFile(path))
    assert voter.record == VoteRecord()
    voter.enter(FIRST)
    assert voter.promise(Ballot(4, 2))
    assert DurableVoter(VoteFile(path)).record == voter.record
    assert [entry.name for entry in tmp_path.iterdir()] == ["votes.json"]


@pytest.mark.parametrize("size", [0, 1, 30])
def test_a_partly_written_vote_is_not_cast(tmp_path: Path, size: int) -> None:
    """A full disk may accept a part of a write without an error."""
    path = tmp_path / "votes.json"
    voter = DurableVoter(VoteFile(path))
    voter.enter(FIRST)
    before = path.read_bytes()
    with file_size_limit(size), pytest.raises(OSError, match="File too large"):
        voter.promise(Ballot(4, 2))
    assert path.read_bytes() == before
    assert DurableVoter(VoteFile(path)).record.promised == voter.record.promised == NEVER


@pytest.mark.parametrize("text", ["", "{", '{"highest": -1}', '{"unknown": 1}', "[]"])
def test_a_broken_vote_record_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "votes.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ControlError, match="which votes this machine has cast") as caught:
        VoteFile(path).load()
    assert str(path) in caught.value.fix


def test_a_vote_without_a_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        VoteFile(tmp_path / "missing" / "votes.json").save(VoteRecord())


def test_a_loss_is_described_in_one_sentence() -> None:
    change = GenerationChange(FIRST, SECOND, {2: "silent"}, since_s=2.71)
    assert sentences.regrouped(change, name) == (
        "cleo is silent. anna and ben go on, as generation 2, with step 121; that was agreed after 2.7 s, and no "
        "committed step is lost."
    )


def test_a_lost_part_is_looked_for_before_a_step_counts_as_kept() -> None:
    change = GenerationChange(FIRST, SECOND, {2: "silent"}, since_s=0.0, can_lose_parts=True)
    assert sentences.regrouped(change, name).endswith("at once, and a lost part of the model is looked for.")
    returned = GenerationChange(SECOND, FIRST, {}, since_s=0.0, can_lose_parts=True)
    assert sentences.regrouped(returned, name).endswith("and no committed step is lost.")


def test_no_time_is_written_where_it_would_be_zero() -> None:
    sentence = sentences.regrouped(GenerationChange(FIRST, SECOND, {2: "silent"}, since_s=0.04), name)
    assert "; that was agreed at once, and no committed step is lost." in sentence


def test_a_fork_of_the_lineage_is_described() -> None:
    alone = SECOND.model_copy(
        update={
            "member_ranks": member_ranks(1),
            "lineage": FIRST.lineage.branch(Ballot(2, 1), FIRST.id, 119),
            "id": Ballot(2, 1),
        }
    )
    text = sentences.regrouped(GenerationChange(FIRST, alone, {0: "closed", 2: "silent"}, 0.4), name)
    assert text.startswith("anna is gone: its connection closed; cleo is silent. ben goes on as a lineage of its own")


def test_a_joining_member_is_named() -> None:
    assert sentences.regrouped(GenerationChange(SECOND, FIRST, {}, 0.3), name).startswith(
        "cleo joined. anna, ben and cleo go on"
    )
    assert sentences.admitted(SECOND, 1, name) == (
        "ben joins generation 2, copies the state of anna and continues with step 121."
    )


def test_a_lost_rank_of_several_is_described() -> None:
    more = FIRST.model_copy(update={"member_ranks": (MemberRanks(member=0, ranks=(0, 1)), *member_ranks(1, 2))})
    assert sentences.regrouped(GenerationChange(more, FIRST, {}, 0.3), name).startswith(
        "anna lost 1 of its 2 ranks (number 1 there). anna, ben"
    )
    assert sentences.regrouped(GenerationChange(FIRST, more, {}, 0.3), name).startswith(
        "anna has 2 ranks again (number 1 came back). anna, ben"
    )


def test_a_failed_exchange_without_a_loss_is_described() -> None:
    assert sentences.regrouped(GenerationChange(FIRST, FIRST, {}, 0.1), name).startswith(
        "An exchange failed. anna, ben and cleo"
    )


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("minority", "cleo has paused: anna and ben cannot be reached and may go on without us"),
        ("min_nodes", "cleo has paused: fewer than the 2 machines asked for are left"),
        ("no state", "no machine that answers has the training's state; anna and ben may have it"),
    ],
)
def test_a_pause_states_its_reason(why: str, words: str) -> None:
    assert words in sentences.paused(why, [2], FIRST, name, min_nodes=2)


def test_abandoned_steps_are_counted() -> None:
    standing = SECOND.model_copy(
        update={"member_ranks": member_ranks(0, 1, 2), "state": State(step=141, committed=140)}
    )
    assert sentences.abandoned(2, standing, committed=130, shared=119, name=name) == (
        "cleo has trained apart from anna and ben since step 119. The lineage of anna and ben stays, with 140 "
        "committed steps against 130: cleo goes back, and up to 11 steps are marked abandoned."
    )
