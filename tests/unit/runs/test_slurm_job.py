"""What the process that submitted a job of Slurm believes of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shoal.cluster.slurm.job import JobState
from shoal.errors import RunFailed
from shoal.events import EventLog
from shoal.run_folder import RunFolder
from shoal.runs import slurm_job
from shoal.runs.slurm_job import JobFollower, still_trains


def test_a_job_is_not_taken_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's controller is often busy when a node was lost, and may not answer about the next job."""
    answers = iter([JobState("NODE_FAIL"), None, JobState("RUNNING"), JobState("COMPLETED")])

    def look_at(job: str) -> JobState:
        if (state := next(answers)) is None:
            raise RunFailed("scontrol gave no answer")
        return state

    monkeypatch.setattr(slurm_job, "look_at", look_at)
    monkeypatch.setattr(slurm_job, "POLL_S", 0.01)
    run = RunFolder(tmp_path)
    follower = JobFollower(run, EventLog(run.supervisor, 0))
    assert follower.wait("1").state == "NODE_FAIL"
    assert follower.wait("2").state == "COMPLETED"


def test_ranks_that_write_still_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_QUIET_S", 0.5)
    run = RunFolder(tmp_path)
    (tmp_path / "events").mkdir()
    events = tmp_path / "events/rank-1.jsonl"
    events.write_text("{}\n")
    assert not still_trains(run)
    writing = threading.Timer(0.2, events.write_text, ["{}\n{}\n"])
    writing.start()
    assert still_trains(run)
    writing.join()
