"""Runs that go on without a terminal, as their user meets them: detach, ps, logs, attach, stop."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.control.processes import SUPERVISOR, find_processes, find_supervisor
from tests.support.labs import Traces, assert_gone, need_lab
from tests.support.needs import need_tool
from tests.support.programs import TINY, set_flags, shoal, shoal_command, steps_of
from tests.support.runs import ended_afterwards, front, parts_of, wait_until

LONG = ("--steps", "1000000", *set_flags(*TINY, "train.compile=off"))
LINES = 2000
# Both streams of both ranks at once, and at the end words without a line's end.
TALKATIVE = f"""
import os, sys, time
for number in range({LINES}):
    print("out", number, "x" * (number % 90))
    print("err", number, "\\t[bold]", file=sys.stderr)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.stdout.write("last words of " + os.environ["RANK"])
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def state_of(run: Path) -> dict[str, Any] | None:
    """What `shoal ps` says of one run; others may go on beside it."""
    done = shoal("ps", "--json")
    assert done.returncode == 0, done.stderr
    return next((state for state in json.loads(done.stdout)["runs"] if state["run"] == str(run)), None)


def lines_of(rank: int) -> list[str]:
    pairs = ((f"out {number} {'x' * (number % 90)}", f"err {number} \t[bold]") for number in range(LINES))
    return [f"[{rank}] {line}" for pair in pairs for line in pair] + [f"[{rank}] last words of {rank}"]


def check_whole(text: str) -> None:
    """Every line of every rank, in its rank's order, none cut or mixed with another."""
    lines = text.splitlines()
    assert len(lines) == 2 * (2 * LINES + 1)
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == lines_of(rank)


REMOVED = "was removed while the run was writing to it"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        pytest.param(("run", "mine.py"), ("I am here", "I am here"), id="script"),
        pytest.param(("train", *LONG), ("parameters", "samples"), id="training", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(300)
def test_a_run_whose_folder_is_removed_ends_and_says_why(
    words: tuple[str, ...], shown: tuple[str, str], tmp_path: Path
) -> None:
    """It went on for ever, made the folder anew for its checkpoints, and `shoal stop` refused to end it."""
    run = tmp_path / "run"
    script(tmp_path, "import time\nprint('I am here', flush=True)\ntime.sleep(600)\n")
    place = [str(tmp_path / word) if word == "mine.py" else word for word in words]
    with ended_afterwards(run), front(tmp_path, place[0], "--out", run, *place[1:]) as started:
        started.await_words(shown[0], 200)
        with front(tmp_path, "attach", run) as attached, front(tmp_path, "logs", "-f", run) as followed:
            attached.await_words(shown[0], 60)
            followed.await_words(shown[1], 60)
            heads = [parts_of(run)[part].pid for part in (SUPERVISOR, "agent")]
            for pid in heads:
                os.kill(pid, signal.SIGSTOP)
            shutil.rmtree(run)
            state = state_of(run)
            assert state is not None
            assert state["state"] == "folder removed"
            for pid in heads:
                os.kill(pid, signal.SIGCONT)
            for each in (started, attached, followed):
                assert (each.code(60), REMOVED in each.err) == (3, True), each.err
        assert find_processes(run) == []


def test_a_run_without_a_folder_can_be_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run):
        done = shoal("run", "--detach", "--out", run, script(tmp_path, "import time\ntime.sleep(600)\n"))
        assert done.returncode == 0, done.stderr
        agent = parts_of(run)["agent"].pid
        # It does not notice by itself.
        os.kill(agent, signal.SIGSTOP)
        os.kill(parts_of(run)[SUPERVISOR].pid, signal.SIGKILL)
        shutil.rmtree(run)
        stopped = shoal("stop", "--now", run)
        assert (stopped.returncode, "was removed" in stopped.stdout) == (0, True), stopped.stdout + stopped.stderr
        assert find_processes(run) == []
        again = shoal("stop", run)
        assert (again.returncode, "is not a run folder" in again.stderr) == (2, True)


@pytest.mark.long
def test_a_script_goes_on_by_itself_and_nothing_it_prints_is_lost(tmp_path: Path) -> None:
    run, enough = tmp_path / "run", tmp_path / "enough"
    with ended_afterwards(run):
        done = shoal("run", "--detach", "--out", run, script(tmp_path, TALKATIVE), enough)
        assert done.returncode == 0, done.stderr
        assert [f"shoal {verb} {run}" in done.stdout for verb in ("attach", "logs -f", "stop")] == [True] * 3
        state = state_of(run)
        assert state is not None
        assert (state["what"], state["on"], state["state"], state["step"]) == ("mine.py", "local:2", "running", None)
        assert {each["part"] for each in state["processes"]} == {"supervisor", "agent", "store", "rank-0", "rank-1"}
        assert all(psutil.pid_exists(each["pid"]) for each in state["processes"])
        listing = shoal("ps", "--all").stdout
        assert any(line.split()[:4] == [str(run), "mine.py", "local:2", "running"] for line in listing.splitlines())
        assert str(find_processes(run)[0].pid) in listing
        with front(tmp_path, "logs", "-f", run) as follower, front(tmp_path, "attach", run) as watcher:
            for each in (follower, watcher):
                each.await_words(f"[1] err {LINES - 1}")
            watcher.process.send_signal(signal.SIGINT)
            assert watcher.code() == 0
            assert f"shoal stop {run}\n" in watcher.err
            assert follower.process.poll() is None
            enough.touch()
            assert follower.code() == 0
            check_whole(follower.out)
        wait_until(lambda: not find_processes(run), within_s=5)
    check_whole(shoal("logs", run).stdout)
    assert shoal("logs", run, "--rank", "1").stdout.splitlines() == lines_of(1)
    attached = shoal("attach", run)
    assert attached.returncode == 0, attached.stderr
    check_whole(attached.stdout)
    stopped = shoal("stop", run)
    assert (stopped.returncode, stopped.stdout) == (0, f"{run} was not running\n")
    nobody = shoal("logs", run, "--rank", "9")
    assert nobody.returncode == 2
    assert "logs there are: rank-0.log, rank-1.log" in nobody.stderr


@pytest.mark.long
def test_attach_ends_as_the_run_does(tmp_path: Path) -> None:
    run, enough = tmp_path / "run", tmp_path / "enough"
    text = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nsys.exit(7)\n"
    seen = "error: rank 0 on local ended with exit code 7\n"
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:1", "--detach", "--out", run, script(tmp_path, text), enough)
        assert done.returncode == 0, done.stderr
        with front(tmp_path, "attach", run) as watcher:
            time.sleep(1)
            enough.touch()
            assert watcher.code() == 7
            assert watcher.err.startswith(seen)
        again = shoal("attach", run)
        assert again.returncode == 7
        assert again.stderr.startswith(seen)


class Screen:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = ""

    def read(self) -> str:
        """Everything that has been shown so far."""
        with contextlib.suppress(OSError):
            while select.select([self._fd], [], [], 0)[0]:
                self._text += os.read(self._fd, 65536).decode(errors="replace")
        return self._text


@contextlib.contextmanager
def terminal(*words: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """A command in front of a terminal of its own, which is closed afterwards."""
    ours, theirs = pty.openpty()
    argv = [need_tool("setsid"), "--ctty", *shoal_command(*words)]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield process, Screen(ours)
    finally:
        os.close(ours)
        process.wait(10)


@pytest.mark.long
def test_a_lost_terminal_loses_nothing(tmp_path: Path) -> None:
    """A real terminal, and a training in front of it: the window is closed, and the run goes on until it is stopped."""
    run = tmp_path / "run"
    with ended_afterwards(run):
        with terminal("train", "--out", run, *LONG) as (process, screen):
            wait_until(lambda: "tokens/s" in screen.read(), within_s=60, why=screen.read)
        assert process.wait(5) == -signal.SIGHUP
        steps = len(steps_of(run))
        wait_until(lambda: len(steps_of(run)) > steps + 5)
        state = state_of(run)
        assert state is not None
        assert (state["state"], state["what"], state["steps"]) == ("running", "grammar", 1_000_000)
        assert state["step"] > steps
        assert "is being trained in right now" in shoal("train", "--resume", run).stderr
        with terminal("attach", run) as (process, screen):
            wait_until(lambda: "tokens/s" in screen.read(), why=screen.read)
            stopped = shoal("stop", run)
            assert find_processes(run) == []
            assert process.wait(5) == 130
            wait_until(lambda: "error: interrupted: saved what was done" in screen.read(), why=screen.read)
            assert screen.read().count("2 ranks") == 1
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith(f"{run} finished its step and stopped\nnext: ")
    assert stopped.stdout.endswith(f"shoal train --resume {run}\n")
    assert (run / "checkpoints" / f"step-{len(steps_of(run)):08d}").is_dir()


@pytest.mark.long
def test_attach_shows_the_end_of_a_training_while_it_comes_and_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run):
        done = shoal("train", "--detach", "--out", run, "--steps", "3", *set_flags(*TINY))
        assert done.returncode == 0, done.stderr
        attached = shoal("attach", run, "--json")
    assert attached.returncode == 0, attached.stderr
    assert attached.stderr.count(" on 2 ranks × ") == 1
    assert "step 3/3" in attached.stderr
    assert json.loads(attached.stdout)["byte_equivalent"] is True
    events = run / "events" / "rank-0.jsonl"
    start = json.loads(events.read_text().splitlines()[0])
    with events.open("a") as file:
        file.write(json.dumps({**start, "resumed_from": 3}, separators=(",", ":")) + "\n")
    over = shoal("attach", run)
    assert over.returncode == 0, over.stderr
    assert over.stderr.count(" on 2 ranks × ") == 1, "the newest launch alone"
    assert "going on after step 3\n" in over.stderr
    assert "all 2 identical to the bit" in over.stdout


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready")
time.sleep(300)
"""


@pytest.mark.long
def test_a_killed_front_is_no_loss_and_a_stubborn_run_is_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run), front(tmp_path, "run", "--out", run, script(tmp_path, STUBBORN)) as first:
        first.await_words("[0] ready")
        first.await_words("[1] ready")
        first.process.kill()
        first.process.wait()
        time.sleep(0.5)
        assert set(parts_of(run)) == {"supervisor", "agent", "store", "rank-0", "rank-1"}
        with front(tmp_path, "attach", run) as watcher:
            watcher.await_words("[1] ready")
            stopped = shoal("stop", run, "--wait", "1", "--json")
            assert json.loads(stopped.stdout) == {"run": str(run), "outcome": "ended"}
            assert find_processes(run) == []
            assert watcher.code(within_s=2) == 130


@pytest.mark.long
def test_a_run_whose_supervisor_was_killed_can_still_be_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    willing = "import time\nprint('ready')\ntry: time.sleep(300)\nexcept KeyboardInterrupt: print('good night')\n"
    with ended_afterwards(run), front(tmp_path, "run", "--out", run, script(tmp_path, willing)) as first:
        first.await_words("[1] ready")
        os.kill(parts_of(run)[SUPERVISOR].pid, signal.SIGKILL)
        assert first.code(within_s=5) == 3
        assert f"error: the supervisor of the run {run} was killed" in first.err
        state = state_of(run)
        assert state is not None
        assert state["state"] == "unsupervised"
        assert shoal("attach", run).returncode == 3
        stopped = shoal("stop", run)
        assert (stopped.returncode, stopped.stdout) == (0, f"{run} stopped when it was asked to\n")
        assert find_processes(run) == []
    assert shoal("logs", run).stdout.count("good night\n") == 2


@pytest.mark.long
def test_a_script_that_ignores_ctrl_c_is_ended_and_stop_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf')\ntime.sleep(300)\n"
    with ended_afterwards(run), front(tmp_path, "run", "--grace", "1", "--out", run, script(tmp_path, deaf)) as first:
        first.await_words("[0] deaf")
        first.await_words("[1] deaf")
        stopped = shoal("stop", run)
        assert (stopped.returncode, stopped.stdout) == (0, f"{run} was ended\n")
        assert first.code() == 130
    words = "those that still run in 1 s are ended (--grace); a second Ctrl-C where the run was started"
    assert f"note: the ranks were asked to stop; {words}" in first.err
    assert "note: local: rank 0, rank 1 did not stop within 1 s: ended now" in first.err
    assert "error: interrupted\n  why:  rank 0, 1 had to be ended\n" in first.err


@pytest.mark.exhaustive
def test_a_stopped_run_takes_its_lab_along(tmp_path: Path) -> None:
    need_lab()
    run = tmp_path / "run"
    with ended_afterwards(run):
        done = shoal("train", "--detach", "--json", "--on", "lab:2", "--out", run, *LONG)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"run": str(run)}
        supervisor = find_supervisor(run)
        assert supervisor is not None
        lab = Traces(f"run-{supervisor.pid}")
        lab.note()
        assert lab.found()
        wait_until(lambda: (run / "commits.jsonl").exists(), within_s=60)
        stopped = shoal("stop", run)
        assert "finished its step and stopped" in stopped.stdout
        assert find_processes(run) == []
        assert_gone(lab)


def test_an_interrupt_at_the_very_beginning_is_answered_in_words(tmp_path: Path) -> None:
    """The supervisor is still importing what it needs."""
    run = tmp_path / "run"
    with ended_afterwards(run), front(tmp_path, "run", "--out", run, script(tmp_path, STUBBORN)) as first:
        wait_until(lambda: find_supervisor(run))
        first.process.send_signal(signal.SIGINT)
        assert first.code() == 130
        assert first.err.endswith("error: interrupted before the ranks were started\n  next: start anew\n")
        assert find_processes(run) == []


def test_what_keeps_a_run_from_starting_is_said_before_it_is_let_go(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = str(owner.getsockname()[1])
        done = shoal("run", "--detach", "--port", port, "--out", tmp_path / "run", script(tmp_path, STUBBORN))
    assert done.returncode == 3
    assert f"error: port {port} of 127.0.0.1 cannot be used: Address already in use" in done.stderr
    assert f"why:  process {os.getpid()} has it, for " in done.stderr
    assert find_processes(tmp_path / "run") == []


def test_a_rank_that_says_it_was_interrupted_is_believed(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", script(tmp_path, "raise SystemExit(130)"))
    assert done.returncode == 130
    assert "error: a rank reports that it was interrupted" in done.stderr


@pytest.mark.parametrize("verb", ["attach", "logs", "stop"])
def test_what_is_no_run_is_refused(verb: str, tmp_path: Path) -> None:
    done = shoal(verb, tmp_path)
    assert done.returncode == 2
    assert f"error: {tmp_path} is not a run folder" in done.stderr
