"""Readers of a run folder, for the training of a user's script: samples instead of tokens, and values of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shoal.cli.output import make_console, print_run
from shoal.cli.progress import PlainDisplay
from shoal.cli.report import sample
from shoal.config.load import load_settings
from shoal.config.schema import Config
from shoal.engine.console import Console, summary_lines
from shoal.errors import Interrupted, RunFailed, ShoalError, UsageError
from shoal.events import Event, read_events
from shoal.records.explain_run import explain_step_time
from shoal.records.manifest import main as write_manifest
from shoal.records.manifest import write_derived_files
from shoal.records.summary import summarize
from shoal.runs.manage import attach_training, describe
from shoal.runs.start import resume_training
from shoal.runs.supervisor import RunJob
from shoal.step_line import StepLine
from shoal.units import SAMPLES, TOKENS
from tests.support.run_samples import all_events, make_run, make_session_run, session_events, start, step
from tests.unit.tools.report.test_page import EVIL, Page


def page_of(folder: Path, events: list[Event] | None = None) -> Page:
    from shoal.tools.report.page import write_report

    return Page(write_report(make_session_run(folder / "run", events)).read_text(encoding="utf-8"))


def test_the_unit_of_a_run_comes_from_its_events() -> None:
    summary = summarize(session_events())
    assert summary.unit is SAMPLES
    assert summary.step_s is not None
    assert (summary.tokens_per_s, summary.samples_per_step) == (None, 48)
    assert summary.speed == summary.samples_per_s == pytest.approx(48 / summary.step_s.median)
    gpt = summarize(all_events())
    assert gpt.unit is TOKENS
    assert gpt.speed == gpt.tokens_per_s
    # Steps of older versions have only their tokens: the start event has the samples.
    assert gpt.samples_per_step == 24


def test_events_without_tokens_are_read(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    kinds = [event["event"] for event in read_events(run.events(0))]
    assert (kinds.count("start"), kinds.count("step"), kinds.count("log")) == (1, 20, 2)


def test_logged_values_are_those_of_the_lowest_rank() -> None:
    summary = summarize(session_events())
    assert summary.logged == {"accuracy": {10: 0.1, 20: 0.2}, "spread": {10: 0.5, 20: 0.5}}


def test_foreign_log_events_are_ignored() -> None:
    odd = {"event": "log", "rank": 0, "time": 1.0}
    values = [{**odd, "step": "x", "accuracy": 1.0}, {**odd, "step": 3, "accuracy": "high", "flag": True, "fine": 2}]
    assert summarize([start(), step(1), *values]).logged == {"fine": {3: 2.0}}


def test_the_manifest_of_a_session_has_samples_and_no_settings_of_the_gpt(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    manifest = write_derived_files(run)
    assert (manifest.trains, manifest.preset, manifest.unit, manifest.launcher) == (
        "script",
        "images",
        "samples",
        "torchrun",
    )
    assert (manifest.data_source, manifest.data_digest, manifest.val_loss) == ("", None, None)
    assert (manifest.tokens_per_sec, manifest.tokens_per_sec_1proc, manifest.tokens_per_sec_2proc) == ({}, None, None)
    assert manifest.speed == manifest.samples_per_sec[2]
    assert manifest.logged == {"accuracy": 0.2, "spread": 0.5}
    assert "samples/s" in manifest.lesson_notes
    assert len(run.timings.read_text().splitlines()) == 40


def test_the_manifest_of_the_gpt_keeps_its_keys(tmp_path: Path) -> None:
    manifest = write_derived_files(make_run(tmp_path / "run"))
    assert (manifest.trains, manifest.unit, manifest.logged) == ("gpt", "tokens", {})
    assert manifest.speed == manifest.tokens_per_sec[2] == manifest.tokens_per_sec_2proc
    assert manifest.samples_per_sec.keys() == {2}


def test_settings_of_a_session_are_not_those_of_a_gpt(tmp_path: Path) -> None:
    assert not isinstance(load_settings(make_session_run(tmp_path / "a").config), Config)
    assert isinstance(load_settings(make_run(tmp_path / "b").config), Config)


def test_the_explanation_names_samples() -> None:
    assert "samples/s (median of steps 11–20)" in explain_step_time(summarize(session_events()))


def test_the_page_shows_samples_and_logged_values(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "samples per second" in page.text
    assert "script images" in page.text
    assert "Recorded values" in page.text
    for word in ("token", "built-in text", "first text of its shard", "validation"):
        assert word not in page.text
    assert page.figures["loss"]["y"] == "loss (mean per sample, or per count)"
    assert page.figures["logged-0"]["series"][0]["points"] == [[10, 0.1], [20, 0.2]]


def test_the_page_of_the_gpt_has_no_recorded_values(tmp_path: Path) -> None:
    from shoal.tools.report.page import write_report

    page = Page(write_report(make_run(tmp_path / "run")).read_text(encoding="utf-8"))
    assert "Recorded values" not in page.text
    assert page.figures["loss"]["y"] == "loss (nats per token)"


def test_a_logged_name_cannot_inject_scripts_and_nan_is_a_gap(tmp_path: Path) -> None:
    log = {"event": "log", "rank": 0, "time": 1.0}
    values = [{**log, "step": 10, EVIL: math.nan}, {**log, "step": 20, EVIL: 1.5}]
    page = page_of(tmp_path, [*session_events(), *values])
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 2
    assert "img" not in [tag for tag, _ in page.tags]
    assert [y for _, y in page.figures["logged-2"]["series"][0]["points"]] == [None, 1.5]


def test_many_logged_names_get_a_table_and_few_curves(tmp_path: Path) -> None:
    log = {"event": "log", "rank": 0, "time": 1.0, **{f"value{number}": number for number in range(30)}}
    page = page_of(tmp_path, [*session_events(), {**log, "step": 10}, {**log, "step": 20}])
    assert "value29" in page.text
    assert "The curves of 8 more names are not drawn." in page.text
    assert len([name for name in page.figures if name.startswith("logged-")]) == 24


def test_a_progress_line_counts_samples() -> None:
    event = {**session_events(steps=5)[2], "step_s": 0.1, "loss": 1.53, "exposed_s": 0.002, "wait_s": 0.001}
    line = StepLine(60)
    assert line.update({**event, "step": 19}) == "loss 1.530  480 samples/s  waiting 3%"
    assert line.update({**event, "step": 20}) == "loss 1.530  480 samples/s  waiting 3%  4 s left"
    assert StepLine(60).update({**event, "step": 60}) == "loss 1.530  480 samples/s  waiting 3%"
    assert "1,000 tokens/s" in StepLine(60).update({**event, "step": 20, "tokens": 100})


@pytest.mark.parametrize(
    ("loss", "shown"), [(1e-6, "1e-06"), (0.0, "0.000"), (-3.25, "-3.250"), (2e7, "2e+07"), (math.nan, "nan")]
)
def test_any_loss_can_be_shown(loss: float, shown: str) -> None:
    assert StepLine(2).update({**step(1), "loss": loss}).startswith(f"loss {shown}  ")


def test_the_display_announces_a_session_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(make_console(stderr=True), 20, "images")
    events = [json.loads(json.dumps(event)) for event in session_events(1)]
    display([{**events[0], "tokens_per_step": None}, *events[1:]])
    shown = " ".join(capsys.readouterr().err.split())
    assert "images: 1.35M parameters (1,350,000) on 1 rank" in shown
    assert "48 samples a step in micro-batches of 24" in shown
    assert "step 10: accuracy 0.1, spread 0.5" in shown


def test_the_summary_of_a_command_names_samples_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_session_run(tmp_path / "run")
    print_run(run, write_derived_files(run))
    shown = capsys.readouterr().out
    assert "(mean per sample, or per count)" in shown
    assert "samples/s" in shown
    assert "accuracy" in shown
    assert "validation" not in shown
    assert f"verify {run.path}" in shown
    assert f"sample {run.path}" not in shown


def test_ps_names_the_script_and_its_steps(tmp_path: Path) -> None:
    state = describe(make_session_run(tmp_path / "run").path, [])
    assert (state.what, state.on, state.step, state.steps) == ("images", "local:2", 20, 20)


def test_ps_names_the_script_that_shoal_run_started(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    job = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(RunJob()).items()}
    run.job.write_text(json.dumps({**job, "script": ["/a/images.py", "--fast"], "on": "lab:3"}))
    state = describe(run.path, [])
    assert (state.what, state.on, state.step, state.steps) == ("images.py", "lab:3", 20, 20)


def test_text_is_not_sampled_from_a_users_model(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    with pytest.raises(UsageError, match="has no GPT of shoal: the script images") as refused:
        sample(run.path)
    assert "cannot build another model" in refused.value.why
    assert refused.value.fix.endswith(f"export {run.path} --format state-dict")


def test_a_users_training_is_not_resumed_as_a_gpt(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    with pytest.raises(UsageError, match="is the training of a script, images") as refused:
        resume_training(run.path, lambda config: pytest.fail("it was started"))
    assert f'out="{run.path}"' in refused.value.fix


class Shown:
    """A display that keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, events: list[Event]) -> None:
        self.events += events

    def close(self) -> None:
        pass


def test_attaching_to_a_finished_run_of_torchrun_says_that_it_finished(tmp_path: Path) -> None:
    display = Shown()
    attach_training(make_session_run(tmp_path / "run"), lambda config: display)
    assert [event["event"] for event in display.events] == ["start", "step", "start", "step"]


@pytest.mark.parametrize(
    ("events", "kind", "seen"),
    [
        (session_events(status="interrupted"), Interrupted, "was stopped after step 20 of 20"),
        ([event for event in session_events() if event["event"] != "end"], RunFailed, "without an end"),
        (
            [
                *session_events()[:-1],
                {"event": "fault", "rank": 1, "time": 2.0, "error": "RunFailed", "seen": "it broke"},
            ],
            RunFailed,
            "it broke",
        ),
    ],
    ids=["interrupted", "killed", "failed"],
)
def test_attaching_to_a_run_of_torchrun_says_how_it_ended(
    tmp_path: Path, events: list[Event], kind: type[ShoalError], seen: str
) -> None:
    with pytest.raises(kind, match=seen):
        attach_training(make_session_run(tmp_path / "run", events), lambda config: Shown())


def test_attaching_follows_a_run_of_torchrun_while_its_folder_is_locked(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run", session_events()[:-1])
    held = run.held()
    held.__enter__()

    class Follower(Shown):
        def __call__(self, events: list[Event]) -> None:
            super().__call__(events)
            if run.is_held():
                with run.events(1).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(session_events()[-1]) + "\n")
                held.__exit__(None, None, None)

    display = Follower()
    attach_training(run, lambda config: display)
    assert display.events[-1]["event"] == "end"


def test_a_session_prints_progress_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_session_run(tmp_path / "run")
    console = Console(run, 20, "start it again")
    for event in session_events(1):
        console.show(event)
    console.show({"event": "warning", "seen": "a disk is full", "fix": "shoal verify RUN"})
    shown = capsys.readouterr().err.splitlines()
    # The first step and the last one; those between came within two seconds.
    assert [line.split("  ")[0] for line in shown[:2]] == ["step 1/20", "step 20/20"]
    assert shown[2] == f"warning: a disk is full (shoal verify {run.path})"

    assert write_manifest([str(run.path)]) == 0
    lines = summary_lines(write_derived_files(run), run.path, "start it again")
    assert lines[0].startswith("images: finished 20 steps on 2 ranks in ")
    assert [line.split(":")[0] for line in lines[1:]] == ["speed", "replicas", "run folder", "next"]
    assert "samples/s" in lines[1]
    assert lines[-1].endswith(f"report {run.path}")


def test_the_summary_of_an_interrupted_session_says_how_to_continue(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run", session_events(1, 7, "interrupted"))
    lines = summary_lines(write_derived_files(run), run.path, "start it again")
    assert lines[0].startswith("images: stopped after step 7 of 20 on 1 rank")
    assert lines[-1] == "next:       start it again"
