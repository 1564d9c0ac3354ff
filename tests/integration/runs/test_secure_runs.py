"""Ports and secrets of a run as others see them, and a flood of connections at its ports.

Exercises control.connection_guard, control.handshake, control.processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.control.processes import find_processes
from shoal.run_folder import RunFolder
from tests.support.labs import need_lab
from tests.support.programs import TINY, set_flags, steps_of
from tests.support.runs import Front, ended_afterwards, front
from tests.support.sockets import Listening, listening, open_files
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LONG = (
    "--steps",
    "1000000",
    "--set",
    "train.compile=off",
    "--set",
    "train.checkpoint_every=1000000",
    "--set",
    "train.eval_every=1000000",
)
GARBAGE, IDLE = 1000, 200


@contextlib.contextmanager
def training(folder: Path, on: str) -> Iterator[Path]:
    """Start a run of two ranks and wait for its first steps."""
    run = folder / "run"
    words = ("--on", on, *LONG, *set_flags(*TINY))
    with ended_afterwards(run), front(folder, "train", "--out", run, *words) as started:
        wait_for_steps(run, started, 20)
        yield run
        assert started.process.poll() is None, started.err


def wait_for_steps(run: Path, started: Front, count: int) -> None:
    wait_until(lambda: has_steps(run, count), 180, why=lambda: started.out + started.err)


def has_steps(run: Path, count: int) -> bool:
    return all(len(steps_of(run, rank)) >= count for rank in (0, 1))


def pids_of(run: Path) -> dict[int, str]:
    """Return the part of every process of the run and of their children, by pid."""
    return {process.pid: process.part for process in find_processes(run)}


def ports_of(run: Path) -> dict[Listening, str]:
    return {address: part for pid, part in pids_of(run).items() for address in listening(pid)}


@pytest.mark.parametrize("on", ["local:2", "lab:2,link=1gbit"])
def test_no_process_listens_on_every_address(tmp_path: Path, on: str) -> None:
    """This includes Gloo's ports, which each rank opens at the address of its interface."""
    if on.startswith("lab"):
        need_lab()
    with training(tmp_path, on) as run:
        ports = ports_of(run)
        parts = set(pids_of(run).values())
    assert {"agent", "supervisor"} <= {part.partition("-")[0] for part in parts}
    assert {part for address, part in ports.items() if address.kind == "tcp"} >= {"agent", "rank-0", "rank-1"}
    assert [f"{part}: {address}" for address, part in ports.items() if address.is_everywhere] == []


def test_the_token_is_only_in_private_files_of_the_run(tmp_path: Path) -> None:
    """Only the token file and the orders with which an agent can be restarted contain it."""
    with training(tmp_path, "local:2") as run:
        secret = RunFolder(run).token.read_text()
        assert len(secret) == 64
        expected = {RunFolder(run).token, RunFolder(run).orders("local")}
        assert {stat.S_IMODE(path.stat().st_mode) for path in expected} == {0o600}
        with_it = [path for path in run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        proc_folders = [Path(f"/proc/{pid}") for pid in psutil.pids()]
        leaks = [str(path) for process in proc_folders for path in files_with(process, secret.encode())]
    assert set(with_it) == expected
    assert leaks == []


def files_with(process: Path, secret: bytes) -> Iterator[Path]:
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            if secret in (process / name).read_bytes():
                yield process / name


def quiet_step_s(run: Path) -> float:
    """Return the best of some medians over the next steps: other work on this machine only makes steps slower."""
    return min(median_step_s(run, 60) for _ in range(5))


def median_step_s(run: Path, count: int) -> float:
    before = len(steps_of(run))
    wait_until(lambda: has_steps(run, before + count), 120)
    return float(statistics.median(step["step_s"] for step in steps_of(run)[before:]))


def test_a_flood_at_every_port_neither_slows_steps_nor_leaves_open_files(tmp_path: Path) -> None:
    """Steps are timed after the flood, which would take the ranks' cores on one machine; its idle connections stay
    open. Gloo's ports are closed by then (`shoal.sync.interruptible`), so no connection is accepted there."""
    with training(tmp_path, "local:2") as run:
        ports = ports_of(run)
        files = {pid: open_files(pid) for pid in pids_of(run)}
        before_s = quiet_step_s(run)
        idle = {address: [connect(address) for _ in range(IDLE)] for address in ports if is_open(address)}
        for address in idle:
            for _ in range(GARBAGE):
                with contextlib.suppress(OSError), connect(address) as connection:
                    connection.sendall(os.urandom(200))
        during_s = quiet_step_s(run)
        agents = [address for address, part in ports.items() if part == "agent"]
        assert agents
        for address in agents:
            assert all(is_closed(connection, 10.0) for connection in idle[address]), "an idle connection was kept"
        for connection in (connection for connections in idle.values() for connection in connections):
            connection.close()
        after_s = quiet_step_s(run)
        wait_until(
            lambda: not grown(files), 20, why=lambda: {pids_of(run)[pid]: more for pid, more in grown(files).items()}
        )
        journals = "".join(path.read_text() for path in (run / "agents").glob("*.jsonl"))
    assert during_s <= 3 * before_s + 0.01
    assert after_s <= 3 * before_s + 0.01
    assert 1 <= journals.count("refused") <= 10, "the journal was filled"


def grown(files: dict[int, int]) -> dict[int, int]:
    """Return how many more files each process has open; up to two may be temporary."""
    now = {pid: open_files(pid) - count for pid, count in files.items()}
    return {pid: more for pid, more in now.items() if more > 2}


def is_open(at: Listening) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((at.address, at.port)) == 0


def connect(at: Listening) -> socket.socket:
    return socket.create_connection((at.address, at.port), timeout=10)


def is_closed(connection: socket.socket, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            if not connection.recv(4096):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False
