"""Resuming a run: what is refused before anything is started, and the notes about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest

from shoal.cli import lab, runs
from shoal.cli.report import refuse_without_checkpoint
from shoal.cli.runs import print_resume
from shoal.cluster.agent_link import AgentLink
from shoal.cluster.cluster import LocalCluster
from shoal.cluster.node import Node
from shoal.config.load import build_config
from shoal.config.presets import Overrides
from shoal.control.agent_events import StopAsked
from shoal.control.orders import STOP
from shoal.errors import DataError, ShoalError, UsageError
from shoal.events import Event, EventLog, EventTail
from shoal.launch.launcher import AgentHandle, Launch, asked_by, interrupted_early, resume_script_advice
from shoal.run_folder import RunFolder
from shoal.runs import start, supervisor
from shoal.runs.manage import StopResult
from shoal.runs.start import alone_note, rate_note, refuse_finished, refuse_unwritable, resume_script, resume_training
from shoal.runs.supervisor import RunJob, find_unused_options
from shoal.step_line import StepLine
from tests.support.programs import read_jsonl
from tests.support.run_samples import all_events, make_run, make_session_run, session_events, step


def never(*args: object) -> NoReturn:
    raise AssertionError("nothing may be displayed or started")


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of 100 steps that has done them all, on a cluster that is gone."""
    monkeypatch.setattr(start, "verify_run", lambda run: SimpleNamespace(ok=True))
    return make_run(tmp_path / "run", None, "train.steps=100", "run.on=/gone/hosts.toml")


# Refusals


def test_the_error_for_a_read_only_folder_names_chmod_or_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    # Root may write everywhere.
    monkeypatch.setattr("shoal.runs.start.is_accessible", lambda path, mode: path != run.path)
    with pytest.raises(UsageError) as caught:
        refuse_unwritable(run)
    assert caught.value.why.startswith("its permissions forbid it")
    assert f"chmod u+w {run.path} && shoal train --resume {run.path}" in caught.value.fix
    assert "as that user" not in caught.value.fix
    monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
    with pytest.raises(UsageError) as caught:
        refuse_unwritable(run)
    assert "go on as that user: sudo -u " in caught.value.fix


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    monkeypatch.setattr("shoal.runs.start.is_accessible", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(UsageError) as caught:
        refuse_unwritable(run)
    assert caught.value.why.startswith("its file system is read-only")
    assert "findmnt -T" in caught.value.fix


def test_a_finished_run_is_refused_before_its_cluster_is_read(finished: RunFolder) -> None:
    with pytest.raises(UsageError, match="is finished: it has done its 100 steps"):
        resume_training(finished.path, never)


def test_another_lineage_of_a_finished_run_may_be_resumed(
    tmp_path: Path, finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check refuses it until the run is reopened."""
    run = make_run(tmp_path / "here", None, "train.steps=100", "run.on=local:2")
    monkeypatch.setattr(start, "reopen_run", never)
    with pytest.raises(UsageError, match="is finished"):
        resume_training(run.path, never)
    with pytest.raises(AssertionError, match="nothing may be"):
        resume_training(run.path, never, lineage="1-0")


@pytest.mark.parametrize(
    ("on", "events", "is_resumed"),
    [
        ("local:2", [], False),
        ("local:2", [*all_events(steps=0)[:1], step(1)], True),
        # The events of hosts may not have arrived here.
        ("hosts.toml", [], True),
    ],
)
def test_a_run_without_a_step_is_started_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, events: list[Event], is_resumed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.toml").write_text('[[host]]\nhost = "node1"\n[[host]]\nhost = "node2"\n')
    run = make_run(tmp_path / "run", events, "train.steps=40", f"run.on={on}")
    run.supervisor.write_text('{"event": "running", "time": 1.0}\n')
    jobs: list[RunJob] = []
    monkeypatch.setattr(start, "_train", lambda run, watch, job, detach, prepare, template: jobs.append(job))
    resume_training(run.path, never)
    assert [job.resume for job in jobs] == [is_resumed]


def test_the_learning_rate_is_named_for_the_step_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run has done more steps than its newest checkpoint has."""
    run = make_run(tmp_path / "run", [event for event in all_events() if event["event"] != "end"], "train.steps=200")
    (run.checkpoints / "step-00000050").mkdir(parents=True)
    monkeypatch.setattr(start, "reopen_run", lambda *args: None)
    notes: list[str] = []
    monkeypatch.setattr(start, "_train", lambda run, watch, job, detach, prepare, template: notes.extend(prepare()))
    resume_training(run.path, never, {"train": {"steps": 400}})
    assert "at step 51 it is" in notes[-1]


def test_a_run_interrupted_before_its_ranks_started_names_a_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    assert interrupted_early(run, is_script=False).fix == f"start it again: shoal train --resume {run.path}"
    run.job.write_text("{}")
    assert interrupted_early(run, is_script=True).fix.endswith(f"shoal runs --delete {run.path}")


def test_an_interrupted_session_names_the_command_that_continues_it(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    assert resume_script_advice(run) == f"what the ranks printed is in {run.path / 'logs'}"
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    assert resume_script_advice(run) == f"go on from the last checkpoint: shoal run --resume {run.path}"


def test_the_host_names_the_machine_that_asked_to_stop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    launch = Launch(run, LocalCluster(1), EventLog(run.supervisor, 0))
    agent = cast(AgentHandle, SimpleNamespace(node=SimpleNamespace(name="node2")))
    assert asked_by(launch) == ""
    launch._handle(agent, StopAsked(at_once=False))
    assert asked_by(launch) == "node2 asked all machines to stop: Ctrl-C or a signal there"
    # An agent that passes on the launcher's own request has not asked.
    other = Launch(run, LocalCluster(1), EventLog(run.supervisor, 0), interrupts=1)
    other._handle(agent, StopAsked(at_once=False))
    assert asked_by(other) == ""


@pytest.mark.parametrize(("link_ended", "asked"), [(None, ["link"]), ("its agent was killed", ["link", "signal"])])
def test_an_agent_that_was_started_again_is_asked_to_stop_once(
    link_ended: str | None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link to a pod outlives an agent, and a second request would end the ranks without saving."""
    requests: list[str] = []
    link = SimpleNamespace(ended=lambda: link_ended, send=lambda line: requests.append("link"))
    agent = AgentHandle(cast(Node, None), cast(AgentLink, link), cast(EventTail, None))
    agent.follow_restarted(os.getpid())
    monkeypatch.setattr(os, "kill", lambda pid, signum: requests.append("signal"))
    agent.send(STOP)
    assert requests == asked


def test_a_long_check_is_announced(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished.checkpoints.mkdir(exist_ok=True)
    (finished.checkpoints / "weights").write_bytes(b"x" * 2000)
    for limit, is_announced in ((3000, False), (1000, True)):
        monkeypatch.setattr(start, "_LONG_CHECK_BYTES", limit)
        with pytest.raises(UsageError, match="is finished"):
            refuse_finished(finished, 100)
        assert ("checking that its 2 kB are undamaged" in capsys.readouterr().err) == is_announced


# Notes


def test_a_machine_that_joined_is_warned_that_it_goes_on_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", all_events())
    (run.checkpoints / "step-00000100").mkdir(parents=True)
    assert alone_note(run) == []
    print_resume(run)
    assert "train --resume" in capsys.readouterr().out
    run.joined.write_text('{"host": "192.0.2.7", "node": "node1"}')
    [note] = alone_note(run)
    assert "it now goes on alone, apart from that run" in note
    print_resume(run)
    assert capsys.readouterr().out == f"next: {run.rejoin_advice()}\n"


def test_no_learning_rate_is_named_for_a_step_beyond_the_last() -> None:
    forty, one, eighty = (build_config(sets=[f"train.steps={steps}"]) for steps in (40, 1, 80))
    assert rate_note(eighty, forty, 2, 40) == []
    [note] = rate_note(eighty, forty, 2, 30)
    assert "over 40 steps from here on: at step 31 it is" in note
    # In the warm-up both schedules may have one rate: it is not named.
    [note] = rate_note(forty, eighty, 2, 0)
    assert note == "the learning rate follows one schedule over 80 steps from here on"
    [note] = rate_note(one, forty, 2, 1)
    assert note.endswith(" as with 1 step")
    assert rate_note(forty, eighty, 2, None) == ["the learning rate follows one schedule over 80 steps from here on"]


@pytest.mark.parametrize(
    ("every", "announced"), [(1000, "after step 400 (its last)"), (100, "after step 100 (train.checkpoint_every)")]
)
def test_the_announced_first_checkpoint_is_within_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, announced: str
) -> None:
    run = make_run(tmp_path / "run", all_events(), "train.steps=400", f"train.checkpoint_every={every}")
    monkeypatch.setattr("shoal.cli.report.find_processes", lambda path: ["a running process"])
    with pytest.raises(DataError) as caught:
        refuse_without_checkpoint(run)
    assert caught.value.why.endswith(announced)


def test_progress_shows_waiting_only_where_it_was_measured() -> None:
    bare: Event = {"event": "step", "step": 1, "step_s": 0.1, "loss": 2.0, "tokens": 1000}
    assert StepLine(11).update(bare) == "loss 2.000  10,000 tokens/s"
    line = StepLine(11)
    timed = {**bare, "exposed_s": 0.02, "wait_s": 0.01}
    assert line.update(timed) == "loss 2.000  10,000 tokens/s  waiting 30%"
    assert "waiting 27%" in line.update({**timed, "exposed_s": 0.0, "wait_s": 0.0, "step": 2})
    # A field that was not measured is null.
    assert "waiting" not in StepLine(11).update({**timed, "exposed_s": None, "wait_s": None})


def test_the_first_step_which_may_compile_predicts_no_other() -> None:
    event: Event = {"event": "step", "step": 1, "step_s": 40.0, "loss": 2.0, "tokens": 1000}
    line = StepLine(22)
    assert line.update(event) == "loss 2.000  25 tokens/s"
    assert line.update({**event, "step": 2, "step_s": 0.1}) == "loss 2.000  10,000 tokens/s  2 s left"
    assert line.update({**event, "step": 3, "step_s": 0.2}) == "loss 2.000  9,091 tokens/s  2.09 s left"


def test_a_process_that_has_ended_has_no_command() -> None:
    assert lab._command_of(os.getpid()).startswith(" (")
    assert lab._command_of(2**31 - 2) == ""


# Scripts


@pytest.fixture
def script_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A script of `shoal run` whose session has done its 20 steps."""
    monkeypatch.setattr(start, "verify_run", lambda run: SimpleNamespace(ok=True))
    monkeypatch.setattr(start, "start_script", never)
    run = make_session_run(tmp_path / "run")
    run.job.write_text(json.dumps({"script": ["/a/images.py"], "on": "local:2", "session": '{"run":{"on":"local:2"}}'}))
    (run.checkpoints / "step-00000020").mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("changes", "seen", "next_step"),
    [
        (
            {},
            "is finished: it has done its 20 steps",
            "shoal run --resume {run} --steps 40\nor look at it: shoal report {run}",
        ),
        ({"train": {"steps": 9}}, "has done 20 steps already, more than 9", "shoal run --resume {run} --steps 40"),
        ({"sync": {"mode": "local"}}, "sync.mode cannot be changed when a run is resumed", "train.steps, "),
        ({"train": {"seed": 3}}, "train.seed cannot be changed when a run is resumed", "train.steps, "),
        ({"train": {"lr": 3}}, "unknown setting train.lr", "the settings of train are steps, "),
        ({"train": {"steps": 40}}, "nothing may be displayed or started", ""),
    ],
)
def test_a_resumed_script_changes_only_settings_that_no_finished_step_depends_on(
    script_run: RunFolder, changes: Overrides, seen: str, next_step: str
) -> None:
    with pytest.raises((AssertionError, ShoalError), match=seen) as caught:
        resume_script(script_run.path, changes, False, never, never)  # type: ignore[arg-type]
    if isinstance(caught.value, ShoalError):
        assert next_step.format(run=script_run.path) in caught.value.fix
        assert "eval_every" not in caught.value.fix, "a session has no such setting"


def test_a_running_script_is_not_called_ended(script_run: RunFolder) -> None:
    (script_run.checkpoints / "step-00000020").rmdir()
    with script_run.held(), pytest.raises(UsageError, match="is being trained in right now"):
        resume_script(script_run.path, {}, False, never, never)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no checkpoint to continue from"):
        resume_script(script_run.path, {}, False, never, never)  # type: ignore[arg-type]


def test_only_a_session_is_said_to_have_finished_its_step(script_run: RunFolder, tmp_path: Path) -> None:
    """Under --measure a script without a session has a configuration too."""
    measured = make_session_run(tmp_path / "measured", [{**session_events(1, 2)[0], "measured": True}])
    measured.job.write_text(script_run.job.read_text())
    assert runs._outcome_text(StopResult.STOPPED, script_run) == "finished its step and stopped"
    assert runs._outcome_text(StopResult.STOPPED, measured) == "stopped when it was asked to"


def test_shoal_train_names_the_command_that_resumes_a_script(script_run: RunFolder) -> None:
    with pytest.raises(UsageError) as caught:
        resume_training(script_run.path, never)
    assert caught.value.fix == f"shoal run --resume {script_run.path}"


def test_options_that_had_no_effect_on_a_script_are_named(script_run: RunFolder, tmp_path: Path) -> None:
    """Whether the script has a session is known at its end."""
    plain = RunFolder.create(tmp_path / "plain", is_training=False)
    given = RunJob(session='{"run": {"on": "local:2"}, "train": {"steps": 5}, "sync": {"mode": "local"}}')
    restarted, silent = (
        RunJob(session='{"run": {"on": "local:2"}}', restarts=2),
        RunJob(session='{"run": {"on": "x", "threads": 1}}'),
    )
    assert list(find_unused_options(plain, given)) == [
        "without effect: train.steps, sync.mode; the script has not used shoal.Session"
    ]
    [note] = find_unused_options(script_run, restarted)
    assert note.startswith("without effect: --restarts; ")
    for run, job in ((script_run, given), (plain, restarted), (plain, silent), (script_run, silent)):
        assert list(find_unused_options(run, job)) == []


def test_a_session_under_measure_is_summed_up_as_a_session(script_run: RunFolder) -> None:
    log = EventLog(script_run.supervisor, 0)
    with supervisor._measured(script_run, RunJob(script=("/a/images.py",), on="local:2"), log):
        pass
    assert [event for event in read_jsonl(script_run.supervisor) if event["event"] == "note"] == []
    assert script_run.manifest.is_file()
