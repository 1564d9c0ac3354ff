"""Ranks that raise, are killed or interrupted: the cause is named, and no process is left.

Exercises launch.failure, launch.launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.control.processes import AGENT, find_processes, is_running
from shoal.launch.failure import ProcessEnd, diagnose
from shoal.runs.manage import end_processes
from tests.support.programs import TINY, events_of, read_jsonl, set_flags, shoal, shoal_command, steps_of, train_tiny
from tests.support.runs import Front, ended_afterwards, front
from tests.support.waiting import wait_until

TINY_FLAGS = set_flags(*TINY)
# With so many steps `auto` would compile.
LONG = ("--steps", "1000000", *set_flags("train.compile=off"))


@pytest.mark.long
def test_a_run_that_diverges_reports_it_once(tmp_path: Path) -> None:
    done = shoal("train", "--out", tmp_path / "run", "--steps", "20", *TINY_FLAGS, *set_flags("train.lr=1e30"))
    error = done.stderr[done.stderr.index("error: ") :]
    assert done.returncode == 3
    assert error.count(" became nan in step") == 1
    assert "why:  the training diverged" in error
    assert "start a new run with a lower rate: --set train.lr=3.3e+29" in error
    assert error.count("all 2 ranks failed in the same way") == 1
    assert "Traceback" not in error


@pytest.mark.exhaustive
def test_the_error_of_a_rank_that_raises_is_printed_by_the_launcher(tmp_path: Path) -> None:
    """Only the ranks read the tokenizer of a run folder."""
    run = tmp_path / "run"
    train_tiny(run, "--steps", "1")
    os.truncate(run / "tokenizer.json", 100)
    done = shoal("train", "--resume", run, "--steps", "2")
    assert done.returncode == 2
    assert f"error: {run / 'tokenizer.json'} is not a tokenizer: " in done.stderr
    assert "why:  the file is damaged, or something else wrote it" in done.stderr
    faults = [read_jsonl(run / "events" / f"rank-{rank}.jsonl")[-1] for rank in (0, 1)]
    assert any(fault["event"] == "fault" and fault["error"] == "DataError" for fault in faults)


def ending(rank: int, code: int, order: int, **more: Any) -> ProcessEnd:
    return ProcessEnd(f"rank-{rank}", "here", (rank,), code, order, **more)


def fault(rank: int, kind: str, why: str = "") -> dict[str, Any]:
    return {"rank": rank, "error": kind, "seen": f"rank {rank} broke", "why": why, "fix": "", "time": 10.0 - rank}


def test_the_cause_is_named_even_when_its_consequence_was_seen_first() -> None:
    faults = {0: fault(0, "PeerLost"), 1: fault(1, "RunFailed")}
    error = diagnose([ending(0, 3, order=0), ending(1, 3, order=1)], faults, {"rank-1": "its last line"})
    assert error is not None
    assert error.seen == "rank 1 broke"
    assert error.why == "rank 0 then ended because a peer was gone\nthe end of its log:\nits last line"


def test_the_fault_of_one_rank_explains_the_exit_of_its_torchrun_process() -> None:
    faults = {0: fault(0, "PeerLost"), 1: fault(1, "DataError", why="cut short"), 2: fault(2, "PeerLost")}
    error = diagnose([ProcessEnd("torchrun", "here", (0, 1, 2), 1, 0)], faults, {"torchrun": "a long log"})
    assert error is not None
    assert (error.exit_code, error.seen, error.why) == (2, "rank 1 broke", "cut short")


def test_ranks_that_shoal_ended_are_no_failure() -> None:
    assert diagnose([ending(0, 0, order=0), ending(1, -9, order=1, by_agent=True)], {}, {}) is None


@pytest.mark.parametrize(
    ("code", "how"), [(7, "exit code 7"), (-11, "killed by SIGSEGV"), (-40, "killed by signal 40")]
)
def test_the_error_names_the_exit_code_or_the_signal(code: int, how: str) -> None:
    error = diagnose([ending(0, code, order=0, log="/a b/rank-0.log")], {}, {})
    assert error is not None
    assert error.seen.startswith("rank 0 on here")
    assert error.seen.endswith(how)
    assert error.fix == "read its log: less '/a b/rank-0.log'"


class Training:
    """Run `shoal train`: wait for events of its ranks, send signals, read its exit code and errors."""

    def __init__(self, out: Path, command: Front) -> None:
        self.out = out
        self.command = command
        self.process = command.process

    def wait_until(self, happened: Callable[[], Any], within_s: float = 90.0) -> Any:
        def happened_while_it_runs() -> Any:
            value = happened()
            assert value or self.process.poll() is None, f"ended early: {self.command.err}"
            return value

        return wait_until(happened_while_it_runs, within_s, why=lambda: self.command.err)

    def starting(self) -> list[int]:
        """Return the pids of the ranks as soon as there are two, before they have imported torch."""
        ranks: list[int] = self.wait_until(lambda: len(started := self._started()) == 2 and started)
        return ranks

    def _started(self) -> list[int]:
        return [process.pid for process in find_processes(self.out) if process.part.startswith("rank-")]

    def pids(self) -> list[int]:
        """Return the pids of the ranks, once all of them train."""
        self.wait_until(lambda: all(steps_of(self.out, rank) for rank in (0, 1)))
        return [events_of(self.out, "start", rank)[0]["pid"] for rank in (0, 1)]

    def end(self, within_s: float = 30.0) -> int:
        return self.process.wait(within_s)

    def error(self) -> str:
        """Return how the run ended: an error, or an interrupt, which is none."""
        begin = re.search(r"^(error: |interrupted)", self.command.err, re.MULTILINE)
        assert begin is not None, self.command.err
        return self.command.err[begin.start() :]


@contextlib.contextmanager
def training(out: Path, *words: str) -> Iterator[Training]:
    with ended_afterwards(out), front(out.parent, "train", "--out", out, *TINY_FLAGS, *words) as command:
        yield Training(out, command)


def wait_gone(pids: list[int], within_s: float = 5.0) -> None:
    try:
        wait_until(lambda: not any(map(is_running, pids)), within_s, why=lambda: f"of {pids}")
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_is_named_first_and_its_peer_in_the_reason(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG, *set_flags("members.on_loss=end")) as run:
        pids = run.pids()
        os.kill(pids[1], signal.SIGKILL)
        assert run.end() == 3
        wait_gone(pids)
    assert run.error().startswith("error: rank 1 on local was killed (SIGKILL)")
    assert "why:  rank 0 then ended because a peer was gone" in run.error()
    assert "rank 1 of 2: " in run.error(), "the end of its log"
    assert f"less {tmp_path / 'run' / 'logs' / 'local' / 'rank-1.log'}" in run.error()


@pytest.mark.long
def test_an_interrupted_run_saves_and_can_be_resumed(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG) as run:
        pids = run.pids()
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        wait_gone(pids)
    done_steps = len(steps_of(run.out))
    assert run.error().startswith("interrupted: saved what was done, up to step ")
    assert f"next: go on from the last checkpoint: shoal train --resume {run.out}" in run.error()
    assert (run.out / "checkpoints" / f"step-{done_steps:08d}").is_dir()
    again = shoal("train", "--resume", run.out, "--steps", str(done_steps + 2), "--json")
    assert again.returncode == 0, again.stderr
    assert f"continues after step {done_steps}" in again.stderr
    assert [step["step"] for step in steps_of(run.out)] == list(range(1, done_steps + 3))
    assert json.loads(again.stdout)["byte_equivalent"] is True


@pytest.mark.long
def test_a_second_interrupt_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """The ranks are stopped, so that none can finish its step: only the second interrupt can end them."""
    with training(tmp_path / "run", *LONG, *set_flags("train.checkpoint_every=1000000")) as run:
        pids = run.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        run.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            run.end(within_s=1)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        wait_gone(pids)
    assert run.error().startswith("interrupted before the first checkpoint\n")


def test_an_interrupt_while_the_ranks_start_ends_them(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG) as run:
        ranks = run.starting()
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        wait_gone(ranks)
    # Forked ranks may have done a step by now.
    starts = ("interrupted before the first checkpoint\n", "interrupted: saved what was done, up to step ")
    assert run.error().startswith(starts)


@pytest.mark.long
def test_the_ranks_of_a_killed_agent_end(tmp_path: Path) -> None:
    """The agent dies while its ranks still import torch, before they have seen their parent."""
    with training(tmp_path / "run", *LONG) as run:
        ranks = run.starting()
        agent = next(process for process in find_processes(run.out) if process.part == AGENT)
        os.kill(agent.pid, signal.SIGKILL)
        assert run.end() == 3
        wait_gone(ranks)
    assert run.error().startswith("error: local is gone, and rank 0 with it")
    assert "its agent was killed (SIGKILL)" in run.error()


@pytest.mark.exhaustive
def test_a_kill_right_after_a_checkpoint_leaves_no_gap_in_the_ledger(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG, *set_flags("train.checkpoint_every=1", "train.eval_every=100000")) as run:
        run.wait_until(lambda: any((run.out / "checkpoints").glob("step-*")))
        end_processes(find_processes(run.out))
        assert run.end() == 3
    newest = max(int(path.name[5:13]) for path in (run.out / "checkpoints").glob("step-*"))
    assert max(commit["step"] for commit in read_jsonl(run.out / "commits.jsonl")) >= newest
    done = shoal("train", "--resume", run.out, "--steps", str(newest + 2))
    assert done.returncode == 0, done.stderr
    assert shoal("verify", run.out).returncode == 0


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_of_them_in_order(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG) as run:
        os.kill(run.pids()[1], signal.SIGINT)
        assert run.end() == 130
    assert "interrupted: saved what was done" in run.error()
    assert len(steps_of(run.out, 0)) == len(steps_of(run.out, 1))


@pytest.mark.exhaustive
def test_a_run_that_trains_cannot_be_resumed(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG) as run:
        run.pids()
        beside = shoal("train", "--resume", run.out)
        assert beside.returncode == 2
        assert "is being trained in right now" in beside.stderr
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130


@pytest.mark.exhaustive
def test_states_of_an_earlier_end_are_never_compared(tmp_path: Path) -> None:
    """After a resume that was interrupted, the states saved at the first end are out of date."""
    run = tmp_path / "run"
    train_tiny(run, "--steps", "2")
    command = shoal_command("train", "--resume", run, "--steps", "1000000")
    resumed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(steps_of(run)) >= 5, 40)
    resumed.send_signal(signal.SIGINT)
    assert resumed.wait(30) == 130
    done = shoal("verify", run)
    # An interrupted run is verified up to its last step.
    assert done.returncode == 0, done.stdout
    assert "identical" not in done.stdout
