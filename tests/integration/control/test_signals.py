"""Processes of a run start with default signals, even if the shell that started shoal ignores or blocks some.

Exercises control.processes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cluster.node import start_process
from shoal.control.processes import find_processes, restore_signals
from shoal.runs.manage import end_processes
from shoal_lab.processes import start_in_node
from tests.support.programs import read_jsonl, shoal_command

# The signal table of a starting program, read from the kernel before Python changes anything. Without signals 32 and
# 33, which glibc keeps for itself: no program can set them, and some container runtimes start with 32 ignored.
_OURS = sum(1 << (signum - 1) for signum in signal.valid_signals())
_STATUS = (
    f"print([f'{{int(line.split()[1], 16) & {_OURS}:016x}}' for line in open('/proc/self/status')"
    " if line[:6] in ('SigBlk', 'SigIgn')])"
)
# Python ignores SIGPIPE (13) and SIGXFSZ (25) by itself.
_PYTHONS_OWN = f"{1 << 12 | 1 << 24:016x}"
_NONE = f"{0:016x}"
_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status")


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore and block signals in this process, as in a background job of a shell."""
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _IGNORED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.parametrize("start", [start_process, start_in_node])
def test_a_rank_begins_with_default_signals(start: object, tmp_path: Path) -> None:
    assert callable(start)
    with signals_ignored():
        process = start([sys.executable, "-I", "-c", _STATUS], {}, tmp_path / "log")
    assert process.wait(20) == 0
    assert (tmp_path / "log").read_text() == f"{[_NONE, _PYTHONS_OWN]}\n"


def test_a_program_of_shoal_restores_the_signals_it_inherited() -> None:
    with signals_ignored():
        code = f"from shoal.control.processes import restore_signals\nrestore_signals()\n{_STATUS}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{[_NONE, _PYTHONS_OWN]}\n"


def test_restoring_keeps_handlers_that_are_set() -> None:
    before = signal.getsignal(signal.SIGINT)
    restore_signals((signal.SIGINT,))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_run_in_the_background_of_a_shell_can_be_stopped(signum: signal.Signals, tmp_path: Path) -> None:
    """`shoal run … &` in a script: the shell makes it ignore SIGINT."""
    script = tmp_path / "loop.py"
    script.write_text("import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)\n")
    command = shoal_command("run", "--on", "local:2", "--out", tmp_path / "run", script)
    with signals_ignored():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        assert sorted(lines) == ["[0] begun\n", "[1] begun\n"]
        process.send_signal(signum)
        _, stderr = process.communicate(timeout=20)
    finally:
        end_processes(find_processes(tmp_path / "run"))
        process.kill()
        process.communicate()
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "error:" not in stderr
    ends = [event for event in read_jsonl(tmp_path / "run/agents/local.jsonl") if event["event"] == "ended"]
    # The ranks ended by the requested signal and were not killed.
    assert [event["code"] for event in ends] == [-signal.SIGINT, -signal.SIGINT]


def test_shoal_itself_can_be_interrupted_before_it_starts_anything(tmp_path: Path) -> None:
    """While it prepares, for example reads a text from a pipe, no process of the run exists yet."""
    code = (
        "import os, signal, sys, time\nimport shoal.cli.main as cli\n"
        "def wait(arguments, debug):\n    print('waits', flush=True)\n    time.sleep(30)\n"
        "cli.run = wait\n"
        "cli.main()"
    )
    with signals_ignored():
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == b"waits\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == -signal.SIGINT
        finally:
            process.kill()
            process.wait()
