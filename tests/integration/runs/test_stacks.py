"""`shoal stacks`: what every rank of a running run is doing, without disturbing it.

Exercises runs.manage, control.rank_stacks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.control.processes import PART_MARK, RUN_MARK
from shoal.control.rank_stacks import STACKS_SIGNAL, ask_for_stacks, read_stacks
from shoal.host.proc import catches_signal
from shoal.run_folder import RunFolder
from tests.support.programs import TINY, set_flags, shoal, steps_of
from tests.support.runs import ended_afterwards, parts_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not STACKS_SIGNAL, reason="needs Linux")


def test_a_process_without_the_handler_is_not_signalled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            assert not ask_for_stacks(RunFolder(tmp_path), "rank-0", process.pid)
            assert process.poll() is None
        finally:
            process.kill()


def test_a_rank_that_sleeps_in_c_writes_its_stacks_again_and_again(tmp_path: Path) -> None:
    script = "from shoal.control.rank_stacks import register_stacks\nregister_stacks()\nimport time\ntime.sleep(60)\n"
    (tmp_path / "hang.py").write_text(script)
    run = RunFolder(tmp_path)
    env = {**os.environ, RUN_MARK: str(tmp_path), PART_MARK: "rank-0"}
    with subprocess.Popen([sys.executable, str(tmp_path / "hang.py")], env=env) as process:
        try:
            wait_until(lambda: catches_signal(process.pid, STACKS_SIGNAL))
            sizes = set()
            for _ in range(3):
                assert ask_for_stacks(run, "rank-0", process.pid)
                wait_until(lambda: str(getattr(read_stacks(run, "rank-0"), "place", "")).endswith("time.sleep(60)"))
                sizes.add((run.stacks / "rank-0.txt").stat().st_size)
            assert len(sizes) == 1, "the file has only the last answer"
            assert process.poll() is None
        finally:
            process.kill()


def start(run: Path, on: str, *words: str) -> None:
    settings = set_flags(*TINY, "train.steps=1000000", "train.checkpoint_every=1000000", "train.compile=off")
    done = shoal("train", "--on", on, "--out", run, "--detach", *settings, *words)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        wait_until(lambda rank=rank: len(steps_of(run, rank)) > 3)  # type: ignore[misc]


@pytest.mark.parametrize("on", ["local:2", pytest.param("lab:2", marks=pytest.mark.long)])
def test_all_ranks_of_a_training_are_printed_and_continue(on: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run):
        start(run, on)
        before = {part: process.pid for part, process in parts_of(run).items()}
        for _ in range(3):
            done = shoal("stacks", run)
            assert done.returncode == 0, done.stderr
            assert [f"rank {rank} on" in done.stdout for rank in (0, 1)] == [True, True]
        assert "in main" in done.stdout
        one = shoal("stacks", "--rank", "1", "--json", run)
        [answer] = json.loads(one.stdout)["ranks"]
        assert (answer["rank"], answer["pid"], answer["missing"]) == (1, before["rank-1"], "")
        assert {"file", "line", "function"} <= answer["threads"][0][0].keys()
        reached = steps_of(run)[-1]["step"]
        wait_until(lambda: steps_of(run)[-1]["step"] > reached + 3)
        assert {part: process.pid for part, process in parts_of(run).items()} == before
        assert not [line for line in (run / "supervisor.jsonl").read_text().splitlines() if "exchange failed" in line]


def test_a_rank_that_does_not_answer_is_named_with_exit_code_1(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run):
        start(run, "local:2", "--set", "members.on_loss=end")
        pid = parts_of(run)["rank-1"].pid
        os.kill(pid, signal.SIGSTOP)
        done = shoal("stacks", run)
        os.kill(pid, signal.SIGCONT)
        assert done.returncode == 1, done.stderr
        assert "rank 0 on local" in done.stdout
        assert (
            f"rank 1: it did not answer within 5 s: it is stopped, or its machine is very busy; see it with: "
            f"py-spy dump --pid {pid}" in done.stdout
        )
        absent = shoal("stacks", "--rank", "7", run)
        assert absent.returncode == 2
        assert "has no rank 7 here or on its hosts" in absent.stderr
        assert "shoal ps --all" in absent.stderr


def test_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert shoal("train", "--on", "local:1", "--out", run, *set_flags(*TINY, "train.steps=2")).returncode == 0
    done = shoal("stacks", run)
    assert done.returncode == 2
    assert "is not running here" in done.stderr
    assert f"shoal logs {run}" in done.stderr
    assert shoal("stacks", tmp_path / "none").returncode == 2


def test_a_script_without_a_session_is_not_killed_by_the_question(tmp_path: Path) -> None:
    run, script = tmp_path / "run", tmp_path / "plain.py"
    script.write_text("import time\nprint('began', flush=True)\ntime.sleep(100)\n")
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:2", "--out", run, "--detach", script)
        assert done.returncode == 0, done.stderr
        wait_until(
            lambda: (
                all("began" in path.read_text() for path in run.glob("logs/*/*.log"))
                and len(list(run.glob("logs/*/rank-?.log"))) == 2
            )
        )
        before = parts_of(run)
        done = shoal("stacks", run)
        assert done.returncode == 1
        assert "its script has not made its shoal.Session" in done.stdout
        time.sleep(0.5)
        assert parts_of(run).keys() == before.keys()
