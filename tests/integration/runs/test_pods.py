"""The life of the pods of a Kubernetes Job, on the nodes of a lab: lost, drained, deleted, and applied again.

Exercises launch.emit_k8s, runs.pod, cluster.pods.server, cluster.pods.enter, cluster.pods.cluster.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cluster.pods.spec import RUN_FAILED
from shoal_lab.lab import Lab
from tests.support.labs import running_lab
from tests.support.needs import HEAVY
from tests.support.pods import job_on, training_job
from tests.support.programs import shoal
from tests.support.scripts_text import PLAIN_DDP, SESSION

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), HEAVY[1]]
MANY = 100_000


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_lab(3, link=None) as lab:
        yield lab


def test_lost_pods_leave_the_others_training_and_rejoin(lab: Lab, tmp_path: Path) -> None:
    with training_job(lab, tmp_path, 3, MANY) as job:
        job.start(1, 2)
        job.start(0)
        job.await_steps(20)
        os.kill(job.agent(1).pid, signal.SIGKILL)
        job.await_members(0, 2)
        job.await_members(0, 1, 2)
        job.kill(2)
        job.await_members(0, 1)
        job.start(2)
        job.await_members(0, 1, 2)
        # The first pod, with the supervisor of the run.
        job.kill(0)
        job.await_members(1, 2)
        job.await_steps(20)
        job.start(0)
        job.await_members(0, 1, 2)
        job.await_steps(10)
        verified = shoal("verify", job.run.path)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_run_ends_well_after_its_first_pod_was_lost(lab: Lab, tmp_path: Path) -> None:
    with training_job(lab, tmp_path, 2, 600) as job:
        job.start()
        job.await_steps(20)
        job.kill(0)
        job.await_members(1)
        job.start(0)
        assert [job.wait(index, 120) for index in (0, 1)] == [0, 0], job.logs()
        manifest = json.loads(job.run.manifest.read_text())
        assert manifest["status"] == "finished"
        assert shoal("verify", job.run.path).returncode == 0
        # A pod that comes back after the end has nothing to do.
        job.start(1)
        assert job.wait(1) == 0
        # The same manifest, applied again.
        job.again()
        job.start()
        assert [job.wait(index) for index in (0, 1)] == [0, 0], job.logs()


def test_a_drained_pod_leaves_and_a_deleted_job_saves_and_resumes(lab: Lab, tmp_path: Path) -> None:
    with training_job(lab, tmp_path, 3, MANY) as job:
        job.start()
        job.await_steps(10)
        job.terminate(1)
        job.await_members(0, 2)
        assert job.wait(1) == 143
        assert "pod-1 leaves; the others continue" in job.log(1).read_text()
        job.start(1)
        job.await_members(0, 1, 2)
        # First all pods of a Job are drained, and its next pods resume the run; then the Job is deleted.
        for is_deleted in (False, True):
            before = job.steps()
            job.terminate(0, 1, 2)
            assert [job.wait(index) for index in range(3)] == [143] * 3, job.logs()
            assert job.run.newest_checkpoint() >= before, job.logs()
            if is_deleted:
                job.again()
            job.start()
            job.await_steps(10)
        # The launcher sees the agent of its own pod in two ways after that, and must ask it to stop in one.
        os.kill(job.agent(0).pid, signal.SIGKILL)
        job.await_members(1, 2)
        job.await_members(0, 1, 2)
        before = job.steps()
        stopped = job.call(0, "stop", "runs/pods")
        assert stopped.returncode == 0, stopped.stderr
        assert job.run.newest_checkpoint() >= before, job.logs()
        assert [job.wait(index) for index in range(3)] == [RUN_FAILED, 0, 0], job.logs()
        verified = shoal("verify", job.run.path)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_scripts_and_checks_run_in_pods(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_DDP)
    with job_on(lab, tmp_path, "--on", "lab:2", "plain.py") as job:
        job.start()
        assert [job.wait(index) for index in (0, 1)] == [0, 0], job.logs()
        assert job.log(0).read_text().count("equal True") == 2
    (tmp_path / "session.py").write_text(SESSION)
    with job_on(lab, tmp_path, "--on", "lab:2", "--out", "runs/session", "session.py") as job:
        job.start()
        job.await_steps(20)
        job.kill(1)
        job.await_members(0)
        job.start(1)
        job.await_members(0, 1)
        checked = job.call(0, "doctor", "--on", "pods:2", "--json")
        found = json.loads(checked.stdout)
        assert found["nodes"] == ["pod-0", "pod-1"], checked.stdout + checked.stderr
        # It checks with agents of its own, beside those that train.
        assert [one for one in found["findings"] if one["severity"] == "error"] == []
        assert job.members() == ["pod-0", "pod-1"]
        job.call(0, "stop", "runs/session")
        assert [job.wait(index) for index in (0, 1)] == [RUN_FAILED, 0], job.logs()


def test_a_run_that_fails_ends_all_pods(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("raise ValueError('this script is wrong')\n")
    with job_on(lab, tmp_path, "--on", "lab:2", "wrong.py") as job:
        job.start()
        assert [job.wait(index) for index in (0, 1)] == [RUN_FAILED, 0]
        assert "this script is wrong" in job.log(0).read_text()
        assert "ended with exit code 1" in job.log(1).read_text()
