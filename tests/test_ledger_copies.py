"""A machine's copy of the ledger, when a rank comes back or another one takes it over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.control.membership.generation import Ballot
from shoal.control.rankline import GiveUp
from shoal.report.ledger import check_ledger
from shoal.train import ledger
from tests.programs import read_jsonl

APART = GiveUp(lineage=Ballot(2, 0), standing=Ballot(2, 1), shared_step=2)


def record(step: int, generation: str = "1-0", lineage: str = "1-0") -> dict[str, Any]:
    samples = [12 * (step - 1), 12 * step]
    return {"step": step, "samples": samples, "members": [0], "generation": generation, "lineage": lineage, "loss": 1.0}


def written(path: Path, *records: dict[str, Any]) -> Path:
    ledger.amend(path, 0, [], records)
    return path


def test_only_what_is_missing_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "commits.jsonl", record(1), record(2))
    assert ledger.missing(path, [record(1), record(2), record(3)]) == [record(3)]
    assert ledger.missing(path, [record(2, "2-0")]) == [record(2, "2-0")]
    assert ledger.missing(tmp_path / "none", [record(1)]) == [record(1)]


def test_of_a_long_ledger_the_end_is_enough(tmp_path: Path) -> None:
    path = written(tmp_path / "commits.jsonl", *map(record, range(1, 12_000)))
    assert path.stat().st_size > 1 << 20
    assert ledger.missing(path, [record(11_998), record(11_999), record(12_000)]) == [record(12_000)]


def test_two_lineages_in_one_folder_are_told_apart_when_they_meet(tmp_path: Path) -> None:
    """Nodes of a lab share a disk: both sides of a cut have written into the one ledger."""
    ours, theirs = ("2-0", "2-0"), ("2-1", "2-1")
    both = [record(3, *ours), record(3, *theirs), record(4, *theirs), record(4, *ours), record(5, *theirs)]
    path = written(tmp_path / "commits.jsonl", record(1), record(2), *both)
    assert not check_ledger(read_jsonl(path)).ok
    ledger.amend(path, 0, [APART], [])
    report = check_ledger(read_jsonl(path))
    assert report.ok
    assert (report.steps, report.abandoned) == (5, 2)


def test_a_copy_that_has_nothing_of_a_lineage_gives_nothing_up(tmp_path: Path) -> None:
    path = written(tmp_path / "commits.jsonl", record(1), record(2), record(3, "2-1", "2-1"))
    ledger.amend(path, 0, [APART], [])
    assert len(read_jsonl(path)) == 3
