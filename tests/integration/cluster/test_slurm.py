"""Runs on the nodes of a real Slurm: in an allocation and as jobs, with ranks, agents, steps and nodes lost on the way.

Exercises `shoal train`, cluster.slurm.cluster, cluster.slurm.job, runs.slurm_job.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.control.processes import find_processes
from tests.support.labs import mounted
from tests.support.needs import HEAVY
from tests.support.runs import ended_afterwards
from tests.support.scripts_text import PLAIN_DDP, SESSION
from tests.support.slurm import Slurm, SlurmRun, running_slurm, training
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), HEAVY[0]]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm"), nodes=4) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(slurm: Slurm, tmp_path: Path) -> Iterator[None]:
    yield
    # Slurm asks a node every 60 s whether its part of a job has ended.
    wait_until(lambda: not slurm.jobs(), 150, why=lambda: slurm.run("squeue"))
    runs = [path for path in tmp_path.iterdir() if path.is_dir()]
    wait_until(lambda: not [process for run in runs for process in find_processes(run)], 10)


def check(run: SlurmRun) -> None:
    """The ledger is complete, and the replicas agree."""
    code, output = run.slurm.shoal("verify", run.path)
    assert code == 0, output


def restore(slurm: Slurm, node: str) -> None:
    """Wait until Slurm uses a node again, as it does by itself when the node answers; otherwise have it do so.

    The end of the job that it had may take Slurm a minute more. Until then other jobs have other nodes.
    """

    def is_up() -> bool:
        state = slurm.run("sinfo", "--noheader", "--nodes", node, "--format=%t")
        if "down" in state:
            slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
        return "down" not in state

    wait_until(is_up, why=lambda: slurm.run("scontrol", "show", "node", node) + slurm.run("squeue"))


def test_an_allocation_shows_no_token_and_saves_when_it_is_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path / "run", inside=True) as run:
        run.await_steps(20)
        token = (run.path / "token").read_text().strip()
        [job] = slurm.jobs()
        shown = slurm.run("scontrol", "show", "job", "--details", job) + slurm.run("scontrol", "show", "step")
        for pid in psutil.pids():
            try:
                shown += Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
            except (OSError, UnicodeDecodeError):
                continue
        assert job in shown
        assert token not in shown
        slurm.run("scancel", job)
        code, output = run.end()
    assert code != 0
    assert run.saved() >= 20, output
    check(run)


def test_a_job_continues_after_a_logout_and_is_stopped_and_resumed(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path / "run") as run:
        run.await_steps(5)
        assert "running" in slurm.shoal("ps")[1]
        supervisors = [process.pid for process in find_processes(run.path) if process.part == "supervisor"]
        [submitted] = [pid for pid in supervisors if "SLURM_JOB_ID" not in psutil.Process(pid).environ()]
        os.kill(submitted, signal.SIGTERM)
        run.await_steps(20)
        code, output = slurm.shoal("train", "--resume", run.path)
        assert code == 2, output
        assert "is being trained in: Slurm job" in output
        code, output = slurm.shoal("stop", run.path)
        assert code == 0, output
        assert "finished its step and stopped" in output
    check(run)
    code, output = slurm.shoal("train", "--resume", run.path, "--steps", str(run.steps() + 5))
    assert code == 0, output
    assert "runs on node[2-3]" in output
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["byte_equivalent"] is True
    assert [node["name"] for node in manifest["nodes"]] == ["node2", "node3"]


def test_the_others_go_on_when_a_rank_an_agent_a_step_and_a_node_are_lost(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path / "run", "--on", "slurm:4") as run:
        run.await_steps(20)
        os.kill(run.part("rank-1").pid, signal.SIGKILL)
        run.await_steps(20)
        os.kill(run.part("agent", node="node3").pid, signal.SIGKILL)
        run.await_steps(20)
        above = psutil.Process(run.part("agent", node="node4").pid).parents()
        [step] = [process for process in above if process.name().startswith("slurmstepd")]
        step.kill()
        run.await_steps(20)
        slurm.run("scontrol", "update", "nodename=node5", "state=down", "reason=test")
        run.await_steps(50)
        code, output = run.stop()
    restore(slurm, "node5")
    assert code == 130, output
    assert "saved what was done" in output
    check(run)


def test_the_rest_of_a_job_that_lost_its_first_node_is_submitted(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path / "run", "--set", "train.checkpoint_every=10") as run:
        run.await_steps(30)
        slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
        wait_until(lambda: "has lost its first node" in (run.path / "supervisor.jsonl").read_text(), 60)
        run.await_steps(10)
        code, output = run.stop()
    restore(slurm, "node2")
    assert code == 130, output
    assert "the run continues from the checkpoint of step" in output
    check(run)


def test_a_requeued_job_resumes_and_a_cancelled_one_saves(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path / "run") as run:
        run.await_steps(20)
        [job] = slurm.jobs()
        before = run.steps()
        slurm.run("scontrol", "requeue", job)
        # Slurm lets it begin two minutes later.
        wait_until(lambda: slurm.state_of(job) == "PENDING", 60)
        assert run.saved() >= 20
        slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")
        wait_until(lambda: run.steps() > before + 20, 120, why=run.output_so_far)
        slurm.run("scancel", job)
        code, output = run.end()
    assert code == 130, output
    assert f"Slurm has started job {job} again" in output
    assert run.saved() > before
    check(run)


def test_the_time_limit_saves(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path / "run", "--on", "slurm:2,time=2") as run:
        run.await_steps(5)
        code, output = run.end(200)
    assert code == 130, output
    assert "saved what was done" in output
    check(run)


def test_two_jobs_at_once(slurm: Slurm, tmp_path: Path) -> None:
    with (
        training(slurm, tmp_path / "one", "--on", "slurm:1", steps=30) as one,
        training(slurm, tmp_path / "two", "--on", "slurm:1", steps=30) as two,
    ):
        assert [run.end()[0] for run in (one, two)] == [0, 0]
    manifests = [json.loads((run.path / "manifest.json").read_text()) for run in (one, two)]
    assert len({node["name"] for manifest in manifests for node in manifest["nodes"]}) == 2


def test_a_node_without_shoal_is_named(slurm: Slurm, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    all_nodes = f"slurm:{len(slurm.nodes)}"
    hidden = mounted(slurm.lab, "node3", "--bind", str(empty), sys.prefix)
    with hidden, training(slurm, tmp_path / "run", "--on", all_nodes) as run:
        code, output = run.end()
    assert code == 3, output
    assert "node3 cannot run shoal" in output


def test_a_plain_ddp_script_runs_unchanged(slurm: Slurm, tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(PLAIN_DDP)
    code, output = slurm.shoal("run", "--on", "slurm:2", "--out", tmp_path / "plain", plain)
    assert code == 0, output
    assert "rank 0 equal True" in output
    assert "rank 1 equal True" in output


def test_an_emitted_script_checks_the_nodes_and_trains_a_session(slurm: Slurm, tmp_path: Path) -> None:
    script, run, batch = tmp_path / "session.py", tmp_path / "run", tmp_path / "job.sbatch"
    script.write_text(SESSION)
    code, text = slurm.shoal("emit", "slurm", "--on", "slurm:2", "--out", run, script)
    assert code == 0, text
    batch.write_text(text)
    job = slurm.run("sbatch", "--parsable", f"--chdir={tmp_path}", str(batch)).strip()
    with ended_afterwards(run), slurm.start("true") as nothing:
        trained = SlurmRun(slurm, run, nothing)
        trained.await_steps(20, within_s=240)
        slurm.run("scancel", job)
        wait_until(lambda: not slurm.jobs(), 90)
    log = (tmp_path / f"shoal-session-{job}.log").read_text()
    assert re.search(r"^ready: node\d, node\d;", log, re.MULTILINE)
    assert (tmp_path / f"shoal-probe-{job}.toml").is_file()
    assert trained.saved() >= 20, log
    check(trained)
