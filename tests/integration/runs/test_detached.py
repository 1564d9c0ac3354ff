"""Runs without a terminal, through the commands of their user: detach, ps, logs, attach, stop.

Exercises runs.manage, runs.supervisor, runs.follow.
"""

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
from tests.support.runs import ended_afterwards, front, parts_of
from tests.support.waiting import wait_until

LONG = ("--steps", "1000000", *set_flags(*TINY, "train.compile=off"))
LINES = 2000
# Both ranks write to both streams at once, and at the end a line without a newline.
PRINTS_MUCH = f"""
import os, sys, time
for number in range({LINES}):
    print("out", number, "x" * (number % 90))
    print("err", number, "\\t[bold]", file=sys.stderr)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.stdout.write("last line of " + os.environ["RANK"])
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "mine.py"
    file.write_text(text)
    return file


def state_of(run: Path) -> dict[str, Any] | None:
    """Return what `shoal ps` prints about one run; other runs may exist on this machine."""
    done = shoal("ps", "--json")
    assert done.returncode == 0, done.stderr
    return next((state for state in json.loads(done.stdout)["runs"] if state["run"] == str(run)), None)


def lines_of(rank: int) -> list[str]:
    pairs = ((f"out {number} {'x' * (number % 90)}", f"err {number} \t[bold]") for number in range(LINES))
    return [f"[{rank}] {line}" for pair in pairs for line in pair] + [f"[{rank}] last line of {rank}"]


def check_whole(text: str) -> None:
    """Check that every line of every rank is there, in the order of its rank, and none is cut or mixed."""
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
def test_a_run_whose_folder_is_removed_ends_with_an_error(
    words: tuple[str, ...], shown: tuple[str, str], tmp_path: Path
) -> None:
    """Such a run never ended, created the folder again for its checkpoints, and `shoal stop` refused to end it."""
    run = tmp_path / "run"
    script(tmp_path, "import time\nprint('I am here', flush=True)\ntime.sleep(600)\n")
    arguments = [str(tmp_path / word) if word == "mine.py" else word for word in words]
    with ended_afterwards(run), front(tmp_path, arguments[0], "--out", run, *arguments[1:]) as started:
        started.await_words(shown[0], 200)
        with front(tmp_path, "attach", run) as attached, front(tmp_path, "logs", "-f", run) as followed:
            attached.await_words(shown[0], 60)
            followed.await_words(shown[1], 60)
            pids = [parts_of(run)[part].pid for part in (SUPERVISOR, "agent")]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            # The rank may write a file meanwhile.
            while run.exists():
                shutil.rmtree(run, ignore_errors=True)
            state = state_of(run)
            assert state is not None
            assert state["state"] == "folder removed"
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            for command in (started, attached, followed):
                assert (command.code(60), REMOVED in command.err) == (3, True), command.err
        assert find_processes(run) == []


def test_a_run_without_a_folder_can_be_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run):
        done = shoal("run", "--detach", "--out", run, script(tmp_path, "import time\ntime.sleep(600)\n"))
        assert done.returncode == 0, done.stderr
        agent = parts_of(run)["agent"].pid
        # A stopped agent does not notice the removal.
        os.kill(agent, signal.SIGSTOP)
        os.kill(parts_of(run)[SUPERVISOR].pid, signal.SIGKILL)
        shutil.rmtree(run)
        stopped = shoal("stop", "--now", run)
        assert (stopped.returncode, "was removed" in stopped.stdout) == (0, True), stopped.stdout + stopped.stderr
        assert find_processes(run) == []
        again = shoal("stop", run)
        assert (again.returncode, "is not a run folder" in again.stderr) == (2, True)


@pytest.mark.long
def test_a_detached_script_runs_on_and_all_its_output_is_kept(tmp_path: Path) -> None:
    run, end_file = tmp_path / "run", tmp_path / "end_file"
    with ended_afterwards(run):
        done = shoal("run", "--detach", "--out", run, script(tmp_path, PRINTS_MUCH), end_file)
        assert done.returncode == 0, done.stderr
        assert [f"shoal {verb} {run}" in done.stdout for verb in ("attach", "logs -f", "stop")] == [True] * 3
        state = state_of(run)
        assert state is not None
        assert (state["what"], state["on"], state["state"], state["step"]) == ("mine.py", "local:2", "running", None)
        assert {process["part"] for process in state["processes"]} == {
            "supervisor",
            "agent",
            "store",
            "rank-0",
            "rank-1",
        }
        assert all(psutil.pid_exists(process["pid"]) for process in state["processes"])
        listing = shoal("ps", "--all").stdout
        assert any(line.split()[:4] == [str(run), "mine.py", "local:2", "running"] for line in listing.splitlines())
        assert str(find_processes(run)[0].pid) in listing
        with front(tmp_path, "logs", "-f", run) as follower, front(tmp_path, "attach", run) as watcher:
            for command in (follower, watcher):
                command.await_words(f"[1] err {LINES - 1}")
            watcher.process.send_signal(signal.SIGINT)
            assert watcher.code() == 0
            assert f"shoal stop {run}\n" in watcher.err
            assert follower.process.poll() is None
            end_file.touch()
            assert follower.code() == 0
            check_whole(follower.out)
        wait_until(lambda: not find_processes(run))
    check_whole(shoal("logs", run).stdout)
    assert shoal("logs", run, "--rank", "1").stdout.splitlines() == lines_of(1)
    attached = shoal("attach", run)
    assert attached.returncode == 0, attached.stderr
    check_whole(attached.stdout)
    stopped = shoal("stop", run)
    assert (stopped.returncode, stopped.stdout) == (0, f"{run} was not running\n")
    unknown = shoal("logs", run, "--rank", "9")
    assert unknown.returncode == 2
    assert "logs there are: rank-0.log, rank-1.log" in unknown.stderr


@pytest.mark.long
def test_attach_ends_with_the_exit_code_of_the_run(tmp_path: Path) -> None:
    run, end_file = tmp_path / "run", tmp_path / "end_file"
    text = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nsys.exit(7)\n"
    seen = "error: rank 0 on local ended with exit code 7\n"
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:1", "--detach", "--out", run, script(tmp_path, text), end_file)
        assert done.returncode == 0, done.stderr
        with front(tmp_path, "attach", run) as watcher:
            time.sleep(1)
            end_file.touch()
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
        """Return everything that was printed so far."""
        with contextlib.suppress(OSError):
            while select.select([self._fd], [], [], 0)[0]:
                self._text += os.read(self._fd, 65536).decode(errors="replace")
        return self._text


@contextlib.contextmanager
def terminal(*words: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """Run a command in its own terminal, which is closed afterwards."""
    terminal_fd, command_fd = pty.openpty()
    argv = [need_tool("setsid"), "--ctty", *shoal_command(*words)]
    process = subprocess.Popen(argv, stdin=command_fd, stdout=command_fd, stderr=command_fd)
    os.close(command_fd)
    try:
        yield process, Screen(terminal_fd)
    finally:
        os.close(terminal_fd)
        process.wait(30)


@pytest.mark.long
def test_a_run_continues_when_its_terminal_is_closed(tmp_path: Path) -> None:
    """Close the real terminal of `shoal train`: the run continues until it is stopped."""
    run = tmp_path / "run"
    with ended_afterwards(run):
        with terminal("train", "--out", run, *LONG) as (process, screen):
            wait_until(lambda: "tokens/s" in screen.read(), within_s=60, why=screen.read)
        # The latter where the tests were started with SIGHUP ignored, as nohup does.
        assert process.wait(30) in (-signal.SIGHUP, 128 + signal.SIGHUP)
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
            assert process.wait(30) == 130
            wait_until(lambda: "interrupted: saved what was done, up to step " in screen.read(), why=screen.read)
            assert screen.read().count("2 ranks") == 1
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith(f"{run} finished its step and stopped\nnext: ")
    assert stopped.stdout.endswith(f"shoal train --resume {run}\n")
    assert (run / "checkpoints" / f"step-{len(steps_of(run)):08d}").is_dir()


@pytest.mark.long
def test_attach_shows_the_end_of_a_run_live_and_afterwards(tmp_path: Path) -> None:
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
    again = shoal("attach", run)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count(" on 2 ranks × ") == 1, "only the newest launch is shown"
    assert "continues after step 3\n" in again.stderr
    assert "all 2 identical to the bit" in again.stdout


IGNORES_SIGINT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready")
time.sleep(300)
"""


@pytest.mark.long
def test_a_run_survives_its_killed_command_and_is_ended_when_it_ignores_the_stop(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run), front(tmp_path, "run", "--out", run, script(tmp_path, IGNORES_SIGINT)) as first:
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
            assert watcher.code() == 130


@pytest.mark.long
def test_a_run_whose_supervisor_was_killed_can_still_be_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ends_on_sigint = "import time\nprint('ready')\ntry: time.sleep(300)\nexcept KeyboardInterrupt: print('stopped')\n"
    with ended_afterwards(run), front(tmp_path, "run", "--out", run, script(tmp_path, ends_on_sigint)) as first:
        first.await_words("[1] ready")
        os.kill(parts_of(run)[SUPERVISOR].pid, signal.SIGKILL)
        assert first.code() == 3
        assert f"error: the supervisor of the run {run} was killed" in first.err
        state = state_of(run)
        assert state is not None
        assert state["state"] == "unsupervised"
        assert shoal("attach", run).returncode == 3
        stopped = shoal("stop", run)
        assert (stopped.returncode, stopped.stdout) == (0, f"{run} stopped when it was asked to\n")
        assert find_processes(run) == []
    assert shoal("logs", run).stdout.count("stopped\n") == 2


@pytest.mark.long
def test_a_script_that_ignores_ctrl_c_is_ended_and_stop_reports_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(300)\n"
    with (
        ended_afterwards(run),
        front(tmp_path, "run", "--grace", "1", "--out", run, script(tmp_path, text)) as first,
    ):
        first.await_words("[0] ready")
        first.await_words("[1] ready")
        stopped = shoal("stop", run)
        assert (stopped.returncode, stopped.stdout) == (0, f"{run} was ended\n")
        assert first.code() == 130
    words = "those that still run in 1 s are ended (--grace); shoal stop --now ends them at once"
    assert f"note: the ranks were asked to stop; {words}" in first.err
    assert "note: local: rank 0, rank 1 did not stop within 1 s: ended now" in first.err
    assert "\ninterrupted\n  why:  rank 0, 1 had to be ended\n" in f"\n{first.err}"


@pytest.mark.exhaustive
def test_the_lab_of_a_stopped_run_is_removed(tmp_path: Path) -> None:
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


def test_an_interrupt_before_the_ranks_start_is_reported(tmp_path: Path) -> None:
    """The supervisor is still importing its modules."""
    run = tmp_path / "run"
    with ended_afterwards(run), front(tmp_path, "run", "--out", run, script(tmp_path, IGNORES_SIGINT)) as first:
        wait_until(lambda: find_supervisor(run))
        first.process.send_signal(signal.SIGINT)
        assert first.code() == 130
        assert "\ninterrupted before the ranks were started\n" in f"\n{first.err}"
        assert first.err.endswith(f"delete this folder first: shoal runs --delete {run}\n")
        assert find_processes(run) == []


def test_a_detached_run_that_cannot_start_is_an_error_of_the_command(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = str(owner.getsockname()[1])
        done = shoal("run", "--detach", "--port", port, "--out", tmp_path / "run", script(tmp_path, IGNORES_SIGINT))
    assert done.returncode == 3
    assert f"error: port {port} of 127.0.0.1 cannot be used: Address already in use" in done.stderr
    assert f"why:  process {os.getpid()} has it, for " in done.stderr
    assert find_processes(tmp_path / "run") == []


def test_exit_code_130_of_a_rank_counts_as_an_interrupt(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", script(tmp_path, "raise SystemExit(130)"))
    assert done.returncode == 130
    assert "a rank reports that it was interrupted" in done.stderr
    assert "error:" not in done.stderr


@pytest.mark.parametrize("verb", ["attach", "logs", "stop"])
def test_a_folder_that_is_no_run_is_refused(verb: str, tmp_path: Path) -> None:
    done = shoal(verb, tmp_path)
    assert done.returncode == 2
    assert f"error: {tmp_path} is not a run folder" in done.stderr
