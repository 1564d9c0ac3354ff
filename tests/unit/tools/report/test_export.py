"""Metrics of a run as CSV and JSON lines: which rows stand, their columns, and bounded memory."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run as run_command
from shoal.errors import DataError, ShoalError
from shoal.events import Event
from shoal.run_folder import RunFolder
from shoal.tools.report.export import COLUMNS, RunMetrics, export_metrics, replay, write_csv, write_jsonl
from shoal.tools.report.trace import write_trace
from tests.support.run_samples import end, make_run, make_session_run, session_events, start, step


def rows_of(run: RunFolder) -> list[dict[str, str]]:
    file = io.StringIO()
    write_csv(RunMetrics(run), file)
    return list(csv.DictReader(io.StringIO(file.getvalue())))


def places(run: RunFolder) -> list[tuple[int, int]]:
    return [(int(row["step"]), int(row["rank"])) for row in rows_of(run)]


def entered(rank: int, generation: str, ids: list[int], at: int, how: str = "changed", **more: Any) -> Event:
    fields = {"generation": generation, "lineage": "1-0", "ids": ids, "step": at, "how": how}
    return {"event": "membership", "rank": rank, "time": 1_790_000_000.0 + at, **fields, **more}


def test_a_training_has_one_row_per_step_and_rank(tmp_path: Path) -> None:
    rows = rows_of(make_run(tmp_path / "run"))
    assert [(row["step"], row["rank"]) for row in rows[:3]] == [("1", "0"), ("1", "1"), ("2", "0")]
    assert len(rows) == 200
    assert tuple(rows[0]) == COLUMNS
    recorded = step(1, 0)
    for name in ("loss", "tokens", "lr", "grad_norm", "step_s", "forward_s", "allreduce_s", "wire_bytes"):
        assert float(rows[0][name]) == recorded[name]
    assert (rows[0]["node"], rows[0]["world_size"], rows[0]["val_loss"], rows[1]["wire_bytes"]) == ("here", "2", "", "")
    assert float(next(row for row in rows if row["step"] == "50")["val_loss"]) == 1 + 3 * math.exp(-2)


def test_values_of_a_users_program_are_columns(tmp_path: Path) -> None:
    events = session_events(steps=20)
    events[3] |= {"margin": 7, "loss": math.nan}
    events.insert(5, {"event": "log", "rank": 0, "time": 1.0, "step": 3, "val_loss": 0.25, "name": "text"})
    run = make_session_run(tmp_path / "run", events)
    rows = rows_of(run)
    # A name that shoal uses itself gets a prefix, so that no column ever has two meanings.
    assert tuple(rows[0]) == (*COLUMNS, "accuracy", "margin", "spread", "user.val_loss")
    by_place = {(row["step"], row["rank"]): row for row in rows}
    assert (by_place["10", "0"]["accuracy"], by_place["10", "1"]["accuracy"]) == ("0.1", "1.1")
    assert (by_place["3", "0"]["margin"], by_place["3", "0"]["user.val_loss"]) == ("7", "0.25")
    assert (by_place["3", "0"]["tokens"], by_place["3", "0"]["samples"]) == ("", "48")
    assert (by_place["3", "0"]["loss"], by_place["3", "0"]["val_loss"]) == ("nan", "")


def test_json_lines_leave_out_what_was_not_recorded(tmp_path: Path) -> None:
    events = session_events(world_size=1, steps=3)
    events[1]["loss"], events[2]["loss"], events[3]["loss"] = math.nan, math.inf, -math.inf
    file = io.StringIO()
    assert write_jsonl(RunMetrics(make_session_run(tmp_path / "run", events)), file) == 3
    lines = [json.loads(line, parse_constant=pytest.fail) for line in file.getvalue().splitlines()]
    assert [line["loss"] for line in lines] == ["NaN", "Infinity", "-Infinity"]
    assert not {"tokens", "lr", "val_loss"} & lines[0].keys()
    assert set(lines[0]) <= set(COLUMNS)


def test_the_loss_of_all_ranks_replaces_a_ranks_own(tmp_path: Path) -> None:
    events = [start(0, 1), step(1, loss=5.0), step(2, loss=6.0), {"event": "loss", "rank": 0, "step": 1, "loss": 4.0}]
    assert [row["loss"] for row in rows_of(make_run(tmp_path / "run", events))] == ["4.0", "6.0"]


def test_a_step_that_was_done_again_is_there_once(tmp_path: Path) -> None:
    log = {"event": "log", "rank": 0, "time": 1.0, "accuracy": 0.5}
    events = [
        start(0, 1), step(1, loss=1.0), step(2, loss=2.0), {**log, "step": 2}, step(3, loss=3.0), {**log, "step": 3},
        start(0, 1, resumed_from=1), step(2, loss=20.0), step(3, loss=30.0), start(0, 1, resumed_from=2),
        step(3, loss=300.0), {**log, "step": 3, "accuracy": 0.75},
    ]  # fmt: skip
    rows = rows_of(make_run(tmp_path / "run", events))
    assert [(row["step"], row["loss"], row["accuracy"]) for row in rows] == [
        ("1", "1.0", ""), ("2", "20.0", ""), ("3", "300.0", "0.75"),
    ]  # fmt: skip


def test_only_the_generation_that_did_a_step_last_counts(tmp_path: Path) -> None:
    """Rank 1 has finished step 3 and is lost; rank 0 does it again alone."""
    first = [[start(rank), entered(rank, "1-0", [0, 1], 0, "first"), step(1, rank), step(2, rank)] for rank in (0, 1)]
    events = [*first[0], entered(0, "2-0", [0], 2), step(3, 0), *first[1], step(3, 1)]
    rows = rows_of(make_run(tmp_path / "run", events))
    assert [(row["step"], row["rank"], row["generation"], row["world_size"]) for row in rows] == [
        ("1", "0", "1-0", "2"), ("1", "1", "1-0", "2"), ("2", "0", "1-0", "2"), ("2", "1", "1-0", "2"),
        ("3", "0", "2-0", "1"),
    ]  # fmt: skip


def test_steps_of_an_abandoned_lineage_do_not_count(tmp_path: Path) -> None:
    both = [[start(rank), entered(rank, "1-0", [0, 1], 0, "first"), step(1, rank)] for rank in (0, 1)]
    alone = [entered(1, "2-1", [1], 1, lineage="2-1"), step(2, 1), step(3, 1)]
    rest = [entered(0, "3-0", [0], 1, lineage="3-0"), step(2, 0)]
    back = [entered(1, "4-0", [0, 1], 2, "joined", lineage="3-0"), step(4, 1)]
    again = [entered(0, "4-0", [0, 1], 2, lineage="3-0"), step(3, 0), step(4, 0)]
    run = make_run(tmp_path / "run", [*both[0], *rest, *again, *both[1], *alone, *back])
    assert places(run) == [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1)]


def test_ranks_of_an_earlier_larger_launch_do_not_count(tmp_path: Path) -> None:
    first = [[start(rank), step(1, rank), step(2, rank), step(3, rank)] for rank in (0, 1)]
    again = [start(0, 1, resumed_from=1, time=1_790_000_500.0), step(2, 0), step(3, 0)]
    run = make_run(tmp_path / "run", [*first[0], *again, *first[1]])
    assert places(run) == [(1, 0), (1, 1), (2, 0), (3, 0)]


def test_the_wait_of_a_measured_script_is_computed(tmp_path: Path) -> None:
    events: list[Event] = []
    for rank, ready_s in ((0, 0.08), (1, 0.05)):
        times = {"step_s": 0.1, "ready_s": ready_s, "tail_s": 0.1 - ready_s}
        measured = {"event": "step", "rank": rank, "time": 1.0, "step": 1, **times}
        events += [start(rank, measured=True), measured]
    rows = rows_of(make_run(tmp_path / "run", events))
    assert [float(row["wait_s"]) for row in rows] == pytest.approx([0.0, 0.03])
    assert [float(row["exposed_s"]) for row in rows] == pytest.approx([0.02, 0.02])
    assert rows[0]["loss"] == ""


def test_broken_lines_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1), step(2)])
    with run.events(0).open("ab") as file:
        file.write(b'{"event":"step","rank":0,"st\n\xff\xfe\n' + json.dumps(step(3)).encode() + b"\n" + b'{"event":"st')
    assert run_command(["export", str(run.path), "--format", "csv", "-o", "-"], debug=False) == 0
    printed = capsys.readouterr()
    assert [line.split(",")[0] for line in printed.out.splitlines()] == ["step", "1", "2", "3"]
    assert "2 lines of its event files could not be read" in printed.err


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has recorded a step") as caught:
        export_metrics(make_run(tmp_path / "run", [start(0, 1), end(0)]), "csv")
    assert caught.value.fix == f"see why: shoal logs {tmp_path / 'run'}"
    with pytest.raises(DataError, match="has recorded a step") as caught:
        export_metrics(make_session_run(tmp_path / "script", [start(0, 1), end(0)]), "csv")
    assert caught.value.fix == "record them: shoal run --measure SCRIPT"


@pytest.mark.parametrize("write", [partial(export_metrics, kind="csv"), write_trace])
def test_a_place_that_cannot_be_written_is_named_and_not_its_temporary_file(tmp_path: Path, write: Any) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "file").touch()
    out = tmp_path / "file/metrics.csv"
    with pytest.raises(ShoalError, match=f"cannot write {out}: "):
        write(run, out=out)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1)])
    with pytest.raises(ShoalError, match="cannot write") as caught:
        export_metrics(run, "csv", tmp_path)
    assert "--out" in caught.value.fix
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_the_command_writes_into_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_session_run(tmp_path / "run")
    assert run_command(["export", str(run.path), "--format", "jsonl", "--json"], debug=False) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(run.path / "metrics.jsonl"), "steps": 20, "unreadable": 0,
    }  # fmt: skip
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 40


def test_the_folder_of_the_file_is_made(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    assert export_metrics(run, "csv", tmp_path / "new/folder/run.csv").steps
    assert (tmp_path / "new/folder/run.csv").is_file()


@pytest.mark.parametrize("form", ["tensorboard", "hf", "state-dict"])
def test_only_text_goes_to_stdout(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder = make_session_run(tmp_path / "run")
    assert run_command(["export", str(run_folder.path), "--format", form, "-o", "-"], debug=False) == 2
    assert f"--format {form} cannot be written to stdout" in capsys.readouterr().err
    assert not (tmp_path / "-").exists()


def test_an_unknown_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_session_run(tmp_path / "run")
    assert run_command(["export", str(run.path), "--format", "jsnl"], debug=False) == 2
    assert "did you mean 'jsonl'?" in capsys.readouterr().err


class RecordingWandb:
    """Stands for the module wandb: keeps what it is called with."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.is_finished = False

    def init(self, **settings: Any) -> None:
        self.settings = settings

    def log(self, data: dict[str, Any], *, step: int) -> None:
        # wandb drops what comes for an earlier step.
        assert not self.rows or step > self.rows[-1][0]
        self.rows.append((step, data))

    def finish(self) -> None:
        self.is_finished = True


def test_a_run_is_replayed_into_wandb(tmp_path: Path) -> None:
    wandb, run = RecordingWandb(), make_session_run(tmp_path / "run")
    assert replay(RunMetrics(run), wandb, tmp_path / "files") == 20
    assert (wandb.settings["name"], wandb.settings["dir"]) == ("run", str(tmp_path / "files"))
    assert wandb.settings["config"]["train"]["global_batch"] == 48
    at, values = wandb.rows[9]
    recorded = [step(10, rank) for rank in (0, 1)]
    assert (at, values["accuracy"], values["loss"], values["time"]) == (
        10, 0.1, recorded[0]["loss"], recorded[0]["time"],
    )  # fmt: skip
    assert [values[f"rank-{rank}/wait_s"] for rank in (0, 1)] == [event["wait_s"] for event in recorded]
    assert values["samples_per_s"] == 48 / max(event["step_s"] for event in recorded)
    assert wandb.is_finished


def test_a_failed_replay_is_finished_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(RecordingWandb):
        def log(self, data: dict[str, Any], *, step: int) -> None:
            raise ConnectionError("no network")

    wandb, run = Failing(), make_session_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert run_command(["export", str(run.path), "--format", "wandb"], debug=False) == 3
    assert wandb.is_finished
    printed = capsys.readouterr().err
    assert "wandb failed: ConnectionError: no network" in printed
    assert "next: keep it on this disk, for wandb sync: WANDB_MODE=offline shoal export" in printed


def test_the_command_imports_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, wandb = make_session_run(tmp_path / "run"), RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert run_command(["export", str(run.path), "--format", "wandb"], debug=False) == 0
    assert (len(wandb.rows), capsys.readouterr().out) == (20, "20 steps sent to wandb\n")


def test_an_absent_wandb_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = make_session_run(tmp_path / "run")
    assert run_command(["export", str(run.path), "--format", "wandb"], debug=False) == 2
    printed = capsys.readouterr().err
    assert "wandb cannot be imported" in printed
    assert f"next: pip install 'shoal[wandb]' && shoal export {run.path} --format wandb\n" in printed


class Counter(io.TextIOBase):
    """Counts what is written and keeps nothing."""

    count = 0

    def write(self, text: str) -> int:
        self.count += text.count("\n")
        return len(text)


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    peaks = []
    for steps in (1800, 3000):
        run = make_run(tmp_path / f"run{steps}", [start(0, 1)])
        with run.events(0).open("a") as file:
            file.writelines(json.dumps(step(number)) + "\n" for number in range(1, steps + 1))
        tracemalloc.start()
        counter = Counter()
        write_jsonl(RunMetrics(run), counter)  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert counter.count == steps
    assert peaks[1] < 1.2 * peaks[0]
