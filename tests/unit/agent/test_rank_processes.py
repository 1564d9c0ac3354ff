"""What an agent records about its ranks, and restores from its events after a restart."""

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


def test_an_abandoned_lineage_is_remembered_over_a_restart() -> None:
    """Its ranks and their agent died before the ledger had the record."""
    expected = AbandonCommits(lineage=Ballot(2, 0), surviving=Ballot(2, 1), shared_step=7)
    assert pending_abandon([READY, abandon("2-0"), READY]) == expected


def test_an_abandon_recorded_in_the_ledger_is_not_pending() -> None:
    assert pending_abandon([READY, abandon("2-0"), given_up("2-0"), READY]) is None
    assert pending_abandon([READY]) is None


def test_only_the_last_abandon_is_pending() -> None:
    pending = pending_abandon([abandon("2-0"), given_up("2-0"), abandon("4-0")])
    assert pending is not None
    assert pending.lineage == Ballot(4, 0)


def test_a_rank_killed_by_the_oom_killer_is_named(tmp_path: Path) -> None:
    notes: list[str] = []
    unused = cast(RankProcesses, None), cast(KvStoreClient, None), cast(AgentAddresses, None)
    environment = RankEnvironment(
        RunFolder(tmp_path),
        "attic",
        *unused,
        write=lambda event: notes.append(f"{event.kind}: {event.to_fields()['text']}"),
    )
    start = StartProcess("rank-2", (2,), ("true",), {})
    assert environment.ran_out_of_memory(RankExit(start, -9, by_agent=False, out_of_memory=True))
    [note] = notes
    assert note.startswith("note: rank 2 was killed, and the machine ran out of memory while it ran")
    assert "--micro-batch" in note
    assert environment.ran_out_of_memory(RankExit(start, -9, False, out_of_memory=True, memory_limit_bytes=2 * 10**9))
    assert notes[1].startswith("note: rank 2 was killed, and attic had reached its memory limit of 2 GB (use a smaller")
    assert not environment.ran_out_of_memory(RankExit(start, -9, by_agent=False, out_of_memory=False))
