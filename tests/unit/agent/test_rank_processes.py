"""What an agent notes of its ranks, and finds in its own journal when it is started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from shoal.agent.kv_store import KvStoreClient
from shoal.agent.mesh import AgentAddresses
from shoal.agent.rank_processes import RankEnvironment, RankExit, RankProcesses, pending_abandon
from shoal.control.membership.types import Ballot
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import AbandonCommits
from shoal.run_folder import RunFolder

READY: dict[str, Any] = {"event": "ready"}


def abandon(lineage: str) -> dict[str, Any]:
    return {"event": "abandon", "lineage": lineage, "surviving": "2-1", "shared_step": 7}


def given_up(lineage: str) -> dict[str, Any]:
    return {"event": "given-up", "lineage": lineage}


def test_a_lineage_that_was_given_up_is_not_forgotten_over_a_restart() -> None:
    """Its ranks died before they had written it into the ledger, and their agent with them."""
    expected = AbandonCommits(lineage=Ballot(2, 0), surviving=Ballot(2, 1), shared_step=7)
    assert pending_abandon([READY, abandon("2-0"), READY]) == expected


def test_what_is_in_the_ledger_is_not_said_again() -> None:
    assert pending_abandon([READY, abandon("2-0"), given_up("2-0"), READY]) is None
    assert pending_abandon([READY]) is None


def test_only_the_last_one_counts() -> None:
    again = pending_abandon([abandon("2-0"), given_up("2-0"), abandon("4-0")])
    assert again is not None
    assert again.lineage == Ballot(4, 0)


def test_a_rank_that_the_kernel_killed_for_memory_is_named_while_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    nobody = cast(RankProcesses, None), cast(KvStoreClient, None), cast(AgentAddresses, None)
    place = RankEnvironment(
        RunFolder(tmp_path), "attic", *nobody, write=lambda kind, text: said.append(f"{kind}: {text}")
    )
    start = StartProcess("rank-2", (2,), ("true",), {})
    assert place.ran_out_of_memory(RankExit(start, -9, by_agent=False, out_of_memory=True))
    [note] = said
    assert note.startswith("note: rank 2 was killed, and the machine ran out of memory while it ran")
    assert "--micro-batch" in note
    assert not place.ran_out_of_memory(RankExit(start, -9, by_agent=False, out_of_memory=False))
