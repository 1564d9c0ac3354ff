"""The incremental reader behind the live page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.control.processes import RunProcess
from shoal.events import Event
from shoal.records import run_tails
from shoal.run_folder import RunFolder
from shoal.tools.watch import run_state
from shoal.tools.watch.figures import snapshot, summarize, update
from shoal.tools.watch.run_state import LiveState
from shoal.tools.watch.step_series import ROW_FIELDS, StepSeries
from tests.support.run_samples import all_events, make_run, make_session_run, start, step


def read(run: RunFolder) -> LiveState:
    state = LiveState(run)
    state.poll()
    return state


def append(path: Path, *events: Event) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def agent_event(name: str, node: str, **fields: Any) -> Event:
    return {"event": name, "rank": 0, "time": 1_790_000_050.0, "launch": "L", "node": node, **fields}


def ready(node: str, address: str) -> Event:
    facts = {"agent_mark": "m", "port": 1, "script_port": None, "interface": "eth0", "cores": 2, "cpu_only": True}
    return agent_event("ready", node, address=address, incarnation=0, highest_generation=0, **facts)


def apply_update(shown: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Do what the page does with an update."""

    def merge(rows: list[Any], fresh: list[Any]) -> list[Any]:
        kept = [row for row in rows if row[0] < fresh[0][0]]
        return kept + [row for row in fresh if row[1] is not None]

    for kind in ("rows", "values"):
        for name, fresh in changes[kind].items():
            shown[kind][name] = merge(shown[kind].get(name, []), fresh)
    return shown


def test_a_finished_run_is_summarized(tmp_path: Path) -> None:
    state = read(make_run(tmp_path / "run", all_events(2, 100)))
    summary = summarize(state)
    assert (summary["step"], summary["status"], summary["what"]) == (100, "finished", "grammar")
    assert summary["step_s"] == pytest.approx(0.098, rel=0.1)
    assert summary["speed"] == pytest.approx(1536 / summary["step_s"])
    assert summary["val_loss"] == pytest.approx(1.0549, abs=1e-3)
    first, second = summary["ranks"]
    assert second["wait_s"] == pytest.approx(first["wait_s"] + 0.004)
    assert first["compute_s"] + first["exposed_s"] + first["wait_s"] == pytest.approx(first["step_s"])
    json.dumps(snapshot(state), allow_nan=False)


def test_updates_lead_to_the_same_state_as_a_snapshot(tmp_path: Path) -> None:
    """Also where steps are repeated after a recovery."""
    run = make_run(tmp_path / "run", [start(0), start(1)])
    state = read(run)
    assert update(state) is None, "the first viewer needs everything"
    shown = snapshot(state)
    for steps in (range(1, 8), range(5, 12), range(12, 20)):
        append(run.events(0), *(step(number, 0, tokens=number) for number in steps))
        append(run.events(1), *(step(number, 1) for number in steps))
        state.poll()
        changes = update(state)
        assert changes is not None
        assert [record[0] for record in changes["recent"][0]] == list(steps)
        apply_update(shown, changes)
    assert shown["rows"] == snapshot(state)["rows"]
    assert [row[0] for row in shown["rows"][0]] == list(range(1, 20)), "a repeated step replaces the earlier one"
    assert update(state) is not None


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    """The state has a bounded size, whatever the number of steps."""
    run = make_run(tmp_path / "run", [start(0, 1)])
    state = read(run)
    sizes = []
    for first in (1, 3001):
        for number in range(first, first + 3000):
            state._add_rank_event(state.series.rank(0), step(number, extra=number / 2))
        state.series.limit_ranges()
        sizes.append(len(json.dumps(snapshot(state))))
    assert state.series.stride == 8
    rows = snapshot(state)["rows"][0]
    assert 500 <= len(rows) <= 1000
    assert rows[-1][2] == pytest.approx(0.097, rel=0.1), "merged ranges are still means"
    assert sizes[1] < 1.2 * sizes[0]
    assert snapshot(state)["values"]["extra"][-1][1] == pytest.approx(3000, rel=0.01)
    assert len(snapshot(state)["recent"][0]) == 400


def test_a_series_is_merged_and_cut_by_ranges() -> None:
    series = StepSeries(1)
    for bucket in range(8):
        series.add(bucket, (float(bucket),))
    series.merge_pairs()
    assert series.means() == [[0, 0.5], [1, 2.5], [2, 4.5], [3, 6.5]]
    series.take()
    series.cut(2)
    assert series.take() == [[2, None]], "a reader must cut off its ranges too"
    series.add(2, (1.0,))
    series.add(3, (2.0,))
    assert series.take() == [[2, 1.0], [3, 2.0]]
    assert series.take() is None


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", all_events(2, 3))
    line = json.dumps(step(4)).encode() + b"\n"
    half, rest = line[:20], line[20:]
    with run.events(0).open("ab") as file:
        file.write(b'{"event":"step"}\nnoise\n\xff\xfe\n{"event":"note","rank":7,"text":"of another rank"}\n' + half)
    state = read(run)
    summary = summarize(state)
    assert (summary["unreadable"], summary["unfinished"]) == (4, 1)
    assert summary["step"] == 3
    with run.events(0).open("ab") as file:
        file.write(rest)
    state.poll()
    summary = summarize(state)
    assert (summary["unreadable"], summary["unfinished"], summary["step"]) == (4, 0, 4)


def test_a_lost_node_is_away_and_marked(tmp_path: Path) -> None:
    events = [start(0, 2, node="node1"), start(1, 2, node="node2"), step(1, 0), step(1, 1)]
    run = make_run(tmp_path / "run", events)
    for node, address in (("node1", "10.0.0.1"), ("node2", "10.0.0.2")):
        members = {"id": "1-0", "members": ["node1", "node2"], "step": 0}
        append(run.journal(node), ready(node, address), agent_event("generation", node, **members))
    state = read(run)
    assert [(node["address"], node["is_present"]) for node in summarize(state)["nodes"]] == [
        ("10.0.0.1", True),
        ("10.0.0.2", True),
    ]
    text = "node2 is silent. node1 goes on, as generation 2, with step 2"
    append(
        run.journal("node1"),
        agent_event("announce", "node1", generation="2-0", text=text),
        agent_event("generation", "node1", id="2-0", members=["node1"], step=1),
    )
    append(run.supervisor, {"event": "note", "rank": 0, "time": 1.0, "text": text})
    state.poll()
    summary = summarize(state)
    assert [node["is_present"] for node in summary["nodes"]] == [True, False]
    assert [rank["is_present"] for rank in summary["ranks"]] == [True, False]
    assert summary["generation"] == "2-0"
    marks = [(mark["kind"], mark["step"], mark["text"]) for mark in snapshot(state)["marks"]]
    assert marks == [("members", 1, text)], "the supervisor's note repeats it"


def test_a_straggler_is_the_rank_with_more_work_of_its_own(tmp_path: Path) -> None:
    events = [start(0, 3), start(1, 3), start(2, 3)]
    for number in range(1, 30):
        events += [step(number, 0), step(number, 1), step(number, 2, forward_s=0.075, wait_s=0.0, step_s=0.145)]
    slow = [rank["slow"] for rank in summarize(read(make_run(tmp_path / "run", events)))["ranks"]]
    assert slow[:2] == [None, None]
    assert slow[2] == pytest.approx(1.6, abs=0.1)


def test_the_world_loss_replaces_a_ranks_own(tmp_path: Path) -> None:
    events = [start(0, 1), step(1, 0, loss=5.0), {"event": "loss", "rank": 0, "time": 1.0, "step": 1, "loss": 4.0}]
    state = read(make_run(tmp_path / "run", events))
    assert summarize(state)["loss"] == 4.0
    assert snapshot(state)["rows"][0][0][-1] == 4.0


def test_values_of_a_users_program_are_those_of_the_lowest_rank(tmp_path: Path) -> None:
    state = read(make_session_run(tmp_path / "run"))
    assert snapshot(state)["values"]["accuracy"] == [[10, 0.1], [20, 0.2]]
    summary = summarize(state)
    assert (summary["unit"], summary["values"]["spread"]) == ("samples", 0.5)


def test_speed_against_one_rank_is_estimated_from_compute_times(tmp_path: Path) -> None:
    summary = summarize(read(make_run(tmp_path / "run", all_events(2, 30))))
    # Two ranks compute 74 ms each; 9 ms of optimizer and rest do not divide.
    assert (summary["speedup"]["is_estimate"], summary["speedup"]["than"]) == (True, "one rank")
    assert summary["speedup"]["ratio"] == pytest.approx((2 * 0.074 + 0.009) / 0.098, rel=0.05)


def test_speed_against_the_fastest_of_unequal_ranks_counts_their_shares(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", all_events(2, 30))
    append(run.commits, {"step": 30, "members": [0, 1], "shares": [14, 2]})
    with run.commits.open("a") as file:
        file.write('damaged\n{"step": 31, "members": [0, 1], "shares": [1')
    speedup = summarize(read(run))["speedup"]
    # The first computes 14 samples in 74 ms, and would compute 16 in 85.
    assert speedup["than"] == "the fastest rank"
    assert speedup["ratio"] == pytest.approx((0.074 * 16 / 14 + 0.009) / 0.098, rel=0.05)


def test_a_prediction_is_shown_beside_the_measurement(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.prediction.write_text('{"step_s": 0.08, "compute_s": 0.06, "profile": "x"}')
    assert summarize(read(run))["predicted"] == {"step_s": 0.08, "compute_s": 0.06}


def test_a_loss_that_is_no_number_is_a_warning(tmp_path: Path) -> None:
    state = read(make_run(tmp_path / "run", [start(0, 1), step(1, 0, loss=float("nan"))]))
    assert [mark["text"] for mark in snapshot(state)["marks"]] == ["the loss is nan since step 1"]
    json.dumps(snapshot(state), allow_nan=False)


def test_the_wait_in_a_measured_script_is_known_when_all_ranks_have_recorded_the_step(tmp_path: Path) -> None:
    events = [start(rank, 2, measured=True) for rank in range(2)]
    for rank, ready_s in enumerate((0.05, 0.08)):
        times = {"ready_s": ready_s, "tail_s": 0.1 - ready_s, "step_s": 0.1, "wait_s": None, "exposed_s": None}
        events.append(step(1, rank, **times))
    ranks = summarize(read(make_run(tmp_path / "run", events)))["ranks"]
    assert [rank["wait_s"] for rank in ranks] == [pytest.approx(0.03), 0.0]
    assert [rank["exposed_s"] for rank in ranks] == [pytest.approx(0.02), pytest.approx(0.02)]


def test_a_run_in_parts_is_read_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tails, "_RANK_TURN_BYTES", 1000)
    monkeypatch.setattr(run_tails, "_TURN_S", 0.0)
    monkeypatch.setattr("shoal.events._BLOCK_BYTES", 500)
    state = read(make_run(tmp_path / "run", all_events(2, 100)))
    shown = snapshot(state)
    assert 0 < shown["summary"]["loaded"] < 1
    assert not shown["recent"], "the newest steps are not known yet"
    update(state)
    while state.is_behind:
        steps = [rank.last_step for rank in state.series.ranks.values()]
        assert max(steps) - min(steps) <= 4, "the ranks are read at about the same step"
        state.poll()
    changes = update(state)
    assert changes is not None
    assert changes["summary"]["step"] == 100
    assert {rank: len(records) for rank, records in changes["recent"].items()} == {0: 100, 1: 100}


def test_the_waits_of_a_long_measured_script_are_known(tmp_path: Path) -> None:
    events = [start(rank, 2, measured=True) for rank in range(2)]
    times = {"step_s": 0.1, "wait_s": None, "exposed_s": None}
    for rank, ready_s in enumerate((0.05, 0.08)):
        events += [step(n, rank, ready_s=ready_s, tail_s=0.1 - ready_s, **times) for n in range(1, 1001)]
    state = read(make_run(tmp_path / "run", events))
    while state.is_behind:
        state.poll()
    rows = state.series.ranks[0].series.means()
    assert min(row[ROW_FIELDS.index("wait_s")] or 0 for row in rows) == pytest.approx(0.03)


def test_a_supervisor_that_is_gone_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1, 0)], "run.on=local:1")
    append(run.supervisor, {"event": "supervising", "rank": 0, "time": 1.0, "pid": 2**22 + 5})
    assert summarize(read(run))["status_text"] == "all of its processes have ended"
    (run.checkpoints / "step-00000001").mkdir(parents=True)
    dead = summarize(read(run))
    assert dead["status"] == "unfinished"
    assert dead["status_text"].endswith(f"continue it: shoal train --resume {run.path}")
    assert [node["is_present"] for node in dead["nodes"]] == [False]
    with monkeypatch.context() as patch:
        rank = RunProcess(4321, run.path, "rank-0", "here", "", 0.0)
        patch.setattr(run_state, "find_processes", lambda path: [rank])
        alive = summarize(read(run))
        assert (alive["status"], alive["nodes"][0]["is_present"]) == ("lost", True)
    append(run.supervisor, {"event": "ended", "rank": 0, "time": 2.0, "code": 3, "seen": "rank 0 failed"})
    summary = summarize(read(run))
    assert (summary["status"], summary["status_text"]) == ("failed", "rank 0 failed")


def test_an_empty_folder_has_a_state_too(tmp_path: Path) -> None:
    """--watch opens the page before the run has written anything."""
    state = read(RunFolder.create(tmp_path / "run"))
    assert summarize(state)["status"] == "starting"
    json.dumps(snapshot(state), allow_nan=False)
