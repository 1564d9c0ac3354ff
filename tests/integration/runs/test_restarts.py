"""`shoal run --restarts`: all ranks of an unmodified script are started again, on the machines that are left.

Exercises `shoal run`, launch.launcher.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.runs.test_run_script import script
from tests.support.labs import running_lab
from tests.support.programs import shoal, shoal_command
from tests.support.runs import ended_afterwards, front

# A training in miniature: a step a time, with a checkpoint of its own.
COUNTING = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
attempt, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
saved = Path(sys.argv[1])
step = int(saved.read_text()) if saved.exists() else 0
print(f"attempt {attempt} of {most}: rank {rank} of {size} begins at {step}", flush=True)
while step < 6:
    dist.all_reduce(torch.ones(1))
    step += 1
    if rank == 0:
        saved.write_text(str(step))
    dist.barrier()
    FAULT
print(f"rank {rank} has done {step}", flush=True)
dist.destroy_process_group()
"""


def counting(folder: Path, fault: str) -> Path:
    return script(folder, COUNTING.replace("FAULT", fault))


def test_a_script_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    fault = "if rank == 1 and step == 3 and attempt == 0: os.kill(os.getpid(), signal.SIGKILL)"
    done = shoal("run", "--restarts", "2", "--out", tmp_path / "run", counting(tmp_path, fault), tmp_path / "saved")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}] attempt 0 of 2: rank {rank} of 2 begins at 0" in done.stdout
        assert f"[{rank}] attempt 1 of 2: rank {rank} of 2 begins at 3" in done.stdout
        assert f"[{rank}] rank {rank} has done 6" in done.stdout
        log = (tmp_path / "run/logs/local" / f"rank-{rank}.log").read_text()
        assert "attempt 0" in log, "the log of the first attempt is kept"
        assert "attempt 1" in log
    notes = " ".join(done.stderr.split())
    assert "rank 1 on local was killed (SIGKILL)" in notes
    assert "all ranks are started again, restart 1 of 2" in notes
    assert "restart 2 of 2" not in notes


@pytest.mark.long
def test_after_the_last_restart_the_exit_code_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    fault = "if rank == 1: raise ValueError('bad news') if attempt == 0 else SystemExit(7)"
    done = shoal("run", "--restarts", "1", "--out", tmp_path / "run", counting(tmp_path, fault), tmp_path / "saved")
    assert done.returncode == 7
    notes = " ".join(done.stderr.split())
    assert "ValueError: bad news" in notes.partition("error: ")[0], "the note about the first attempt names its cause"
    assert "error: rank 1 on local ended with exit code 7" in done.stderr
    assert "bad news" not in notes.partition("error: ")[2], "an earlier exception does not explain the last failure"


@pytest.mark.long
def test_a_script_without_restarts_is_started_once(tmp_path: Path) -> None:
    fault = "if rank == 1: sys.exit(7)"
    done = shoal("run", "--out", tmp_path / "run", counting(tmp_path, fault), tmp_path / "saved")
    assert done.returncode == 7
    assert "attempt 0 of 0" in done.stdout
    assert "started again" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_script_goes_on_without_a_machine_that_was_lost(tmp_path: Path) -> None:
    with running_lab(3) as lab, ended_afterwards(tmp_path / "run"):
        slow = "time.sleep(2 if attempt == 0 else 0)"
        words = ("--restarts", "1", "--on", f"lab:{lab.name}", "--out", tmp_path / "run")
        with front(tmp_path, "run", *words, counting(tmp_path, slow), tmp_path / "saved") as script_run:
            script_run.await_words("attempt 0 of 1: rank 2 of 3 begins at 0", 120)
            subprocess.run(shoal_command("lab", "kill", "node2", "--name", lab.name), check=True, capture_output=True)
            assert script_run.code(120) == 0, script_run.err
        assert "attempt 1 of 1: rank 1 of 2 begins at" in script_run.out
        assert "rank 1 has done 6" in script_run.out
        assert "restart 1 of 1, without node2" in " ".join(script_run.err.split())


def test_machines_that_join_by_a_code_cannot_be_started_again(tmp_path: Path) -> None:
    done = shoal("run", "--restarts", "1", "--on", "join:2", script(tmp_path, "pass"), cwd=tmp_path)
    assert done.returncode == 2
    assert "--restarts does not go with --on join:2" in done.stderr
