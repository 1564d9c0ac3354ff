"""Machines that joined and left in the manifest, the report and `shoal verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shoal.cli.output import run_rows
from shoal.errors import DataError
from shoal.events import Event
from shoal.records.final_states import judge_replicas
from shoal.records.history import describe_changes
from shoal.records.manifest import current_manifest, read_manifest, write_derived_files
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder
from shoal.tools.report.page import write_report
from tests.support.member_samples import BEGAN, commit_records, entered, killed_and_rejoined, parted, steps, time_of
from tests.support.run_samples import end, make_run, start
from tests.unit.tools.report.test_page import EVIL, Page

LEFT = "box-3 lost all of its ranks. box-1 and box-2 go on, as generation 2, with step 40."
APART = "box-2 had trained apart from box-1 since step 20; up to 6 steps are marked abandoned."
KILLED = [*commit_records(1, 39, "1-0"), *commit_records(40, 50, "2-0"), *commit_records(51, 100, "4-0")]
ABANDONED = {"abandoned": "3-1", "standing": "3-0", "after": 20, "time": BEGAN}


def both_sides() -> list[Event]:
    """Interleave the ledger lines of both sides, as in a shared folder."""
    first, second = commit_records(21, 40, "3-0", "3-0"), commit_records(21, 26, "3-1", "3-1")
    return [line for place, line in enumerate(first) for line in (line, *second[place : place + 1])]


def agent_event(generation: str | None, text: str, event: str = "announce", at: float = 1.0) -> Event:
    return {"event": event, "generation": generation, "text": text, "time": at}


def write(path: Path, records: list[Event]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_with(folder: Path, events: list[Event], commits: list[Event], **journals: list[Event]) -> RunFolder:
    run = make_run(folder, events)
    write(run.commits, commits)
    for node, events_of_node in journals.items():
        write(run.journal(node), events_of_node)
    return run


def parted_run(folder: Path, *marks: Event) -> RunFolder:
    commits = [*commit_records(1, 20, "1-0"), *both_sides(), *marks, *commit_records(41, 60, "5-0", "3-0")]
    return run_with(folder, parted(), commits, b=[agent_event(None, APART, "abandon", 2.0)])


def test_every_change_is_in_the_manifest(tmp_path: Path) -> None:
    announcements = [agent_event("2-0", LEFT)]
    run = run_with(
        tmp_path / "run",
        killed_and_rejoined(),
        KILLED,
        a=announcements,
        b=announcements,
        c=[agent_event("4-0", "box-3 is let in.")],
    )
    write_derived_files(run)
    manifest = read_manifest(run)
    assert manifest is not None
    assert (manifest.generations, manifest.lineage, manifest.members) == (3, "1-0", [0, 1, 2])
    first, second = manifest.recoveries
    assert (first.generation, first.step, first.members, first.stands) == ("2-0", 39, [0, 1], True)
    assert first.text == LEFT
    # Training stopped 0.75 s before the two ranks had regrouped, and step 40 was done 0.25 s later.
    assert first.seconds == pytest.approx(time_of(40) - time_of(39))
    assert (second.members, second.text) == ([0, 1, 2], "box-3 is let in.")
    assert dict(run_rows(manifest))["members"] == "changed 2×, 3 at the end; at most 1.0 s to the next commit"


def test_a_change_without_an_announcement_gets_a_generated_sentence() -> None:
    changes = describe_changes(summarize(parted()).history, [], [])
    assert [(change.text, change.seconds) for change in changes.recoveries] == [
        ("Rank 1 left; rank 0 goes on with step 21.", None),
        ("Rank 0 left; rank 1 goes on with step 21.", None),
        ("Rank 1 joined; ranks 0 and 1 go on with step 41.", None),
    ]
    assert changes.lineage == "3-0"


def test_the_most_frequent_announcement_is_the_sentence() -> None:
    history = summarize(killed_and_rejoined()).history
    announcements = [
        agent_event("4-0", "a longer sentence of the one that was let in"),
        agent_event("4-0", "short"),
        agent_event("4-0", "short"),
    ]
    pauses = [
        agent_event(None, "later", "pause", 9.0),
        agent_event(None, "earlier", "pause", 3.0),
        agent_event(None, "later", "pause", 9.5),
    ]
    changes = describe_changes(history, [], [*announcements, *pauses, {"event": "announce", "generation": "x"}])
    assert changes.recoveries[1].text == "short"
    assert changes.notes == ["earlier", "later"]


def test_a_run_without_changes_has_no_recoveries(tmp_path: Path) -> None:
    manifest = current_manifest(make_run(tmp_path / "run"))
    assert (manifest.generations, manifest.lineage, manifest.recoveries) == (1, None, [])
    assert (manifest.members, manifest.membership_notes) == ([0, 1], [])
    assert "members" not in dict(run_rows(manifest))


def test_an_older_manifest_is_read_without_the_new_fields(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_derived_files(run)
    stored = json.loads(run.manifest.read_text())
    for name in ("members", "generations", "lineage", "recoveries", "membership_notes"):
        del stored[name]
    run.manifest.write_text(json.dumps(stored))
    assert (manifest := read_manifest(run)) is not None
    assert manifest.generations == 1


def test_the_page_shows_the_members_over_time(tmp_path: Path) -> None:
    page = Page(write_report(parted_run(tmp_path / "run", ABANDONED)).read_text(encoding="utf-8"))
    for text in ("Who took part", APART, "6 steps of abandoned lineages do not count", "Abandoned later."):
        assert text in page.text
    assert "These figures are of steps that two ranks did together" in page.text
    members = page.figures["members"]
    bars = {one["name"]: one for one in members["series"]}
    assert bars.keys() == {"lineage 1-0", "lineage 3-0", "lineage 3-1, abandoned"}
    abandoned: dict[str, Any] = bars["lineage 3-1, abandoned"]
    assert members["names"] == ["rank 0 (here)", "rank 1 (here)"]
    assert [span[:3] for span in abandoned["spans"]] == [[1, 20, 26]]
    assert abandoned["hatched"]
    standing = bars["lineage 3-0"]
    assert [span[:3] for span in standing["spans"]] == [[0, 20, 40], [0, 40, 60], [1, 40, 60]]
    assert [mark["x"] for mark in members["marks"]] == [20, 20, 40]


def test_the_page_of_a_run_without_changes_has_no_members_section(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8"))
    assert "members" not in page.figures
    assert "Who took part" not in page.text


def test_announcements_cannot_inject_scripts(tmp_path: Path) -> None:
    announcements = [agent_event("2-0", EVIL), agent_event(None, EVIL, "abandon")]
    page = Page(write_report(run_with(tmp_path / "run", killed_and_rejoined(), KILLED, a=announcements)).read_text())
    assert len(page.scripts) == 2
    assert page.text.count(EVIL) == 2


def with_equal_states(run: RunFolder, *ranks: int) -> RunFolder:
    for rank in ranks:
        save_file({"w": np.zeros(4, np.float32)}, run.state(rank))
    return run


def joined_later() -> list[Event]:
    """Make events of two ranks, and of a third that joins from a new machine after step 50."""
    events: list[Event] = []
    for rank in (0, 1):
        events += [start(rank, 2), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, 50)]
        events += [entered(rank, "2-0", (0, 1, 66), 50), *steps(rank, 51, 100), digest(rank), end(rank)]
    joining = [start(66, 3, time=time_of(50)), entered(66, "2-0", (0, 1, 66), 50, how="joined")]
    return [*events, *joining, *steps(66, 51, 100), digest(66), end(66)]


def digest(rank: int) -> Event:
    return {"event": "digest", "rank": rank, "time": time_of(100), "step": 100, "sha256": "ab" * 32}


@pytest.mark.parametrize(("here", "away"), [((0, 1), [66]), ((66,), [0, 1]), ((0, 1, 66), [])])
def test_each_machine_compares_the_states_it_has(tmp_path: Path, here: tuple[int, ...], away: list[int]) -> None:
    run = make_run(tmp_path / "run", [event for event in joined_later() if event["rank"] in here])
    if not away:
        for rank in here:
            save_file({"w": np.ones(3, np.float32)}, run.state(rank))
    verdict = judge_replicas(run)
    assert (verdict.byte_equivalent, verdict.ranks, verdict.elsewhere) == (True, len(here), away)
    assert current_manifest(run).status == "finished"


def test_a_machine_that_joined_and_did_not_send_its_state_is_named(tmp_path: Path) -> None:
    """Its `shoal join` was killed, and its agent and rank trained on to the end."""
    events = [event for event in joined_later() if event["rank"] == 0]
    run = make_run(tmp_path / "run", events, "run.on=join:2")
    save_file({"w": np.ones(3, np.float32)}, run.state(0))
    with pytest.raises(DataError, match=r"state-rank-1\.safetensors did not arrive here") as caught:
        judge_replicas(run)
    assert "its shoal join ended" in caught.value.why


def test_a_launch_rank_without_events_is_missed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [event for event in joined_later() if event["rank"] == 0])
    save_file({"w": np.ones(3, np.float32)}, run.state(0))
    with pytest.raises(DataError, match="rank 1 wrote no state"):
        judge_replicas(run)
    assert current_manifest(run).status == "unfinished"
