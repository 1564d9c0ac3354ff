"""A training as the rest of the network and the machine see it: its ports, its secrets, and a flood at its doors."""

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
from tests.support.runs import Front, ended_afterwards, front, wait_until
from tests.support.sockets import Listening, listening, open_files

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
    """A run of two ranks that has done some steps and goes on."""
    run = folder / "run"
    words = ("--on", on, *LONG, *set_flags(*TINY))
    with ended_afterwards(run), front(folder, "train", "--out", run, *words) as started:
        wait_for_steps(run, started, 20)
        yield run
        assert started.process.poll() is None, started.err


def wait_for_steps(run: Path, started: Front, count: int) -> None:
    wait_until(lambda: has_steps(run, count), 180, why=lambda: started.out + started.err)


def has_steps(run: Path, count: int) -> bool:
    files = [run / "events" / f"rank-{rank}.jsonl" for rank in (0, 1)]
    return all(file.exists() and file.read_text().count('"event":"step"') >= count for file in files)


def pids_of(run: Path) -> dict[int, str]:
    """Every process of the run and their children, with its part."""
    return {found.pid: found.part for found in find_processes(run)}


def ports_of(run: Path) -> dict[Listening, str]:
    return {each: part for pid, part in pids_of(run).items() for each in listening(pid)}


@pytest.mark.parametrize("on", ["local:2", "lab:2,link=1gbit"])
def test_nothing_listens_on_every_address(tmp_path: Path, on: str) -> None:
    """Gloo's own ports included, which each rank opens at its interface's address."""
    if on.startswith("lab"):
        need_lab()
    with training(tmp_path, on) as run:
        ports = ports_of(run)
        parts = set(pids_of(run).values())
    assert {"agent", "supervisor"} <= {part.partition("-")[0] for part in parts}
    assert {part for each, part in ports.items() if each.kind == "tcp"} >= {"agent", "rank-0", "rank-1"}
    assert [f"{part}: {each}" for each, part in ports.items() if each.is_everywhere] == []


def test_the_token_is_in_files_of_our_own_and_nowhere_else(tmp_path: Path) -> None:
    """Its own file, and the orders by which an agent can be started again."""
    with training(tmp_path, "local:2") as run:
        secret = RunFolder(run).token.read_text()
        assert len(secret) == 64
        expected = {RunFolder(run).token, RunFolder(run).orders("local")}
        assert {stat.S_IMODE(path.stat().st_mode) for path in expected} == {0o600}
        with_it = [path for path in run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        everybody = [Path(f"/proc/{pid}") for pid in psutil.pids()]
        told = [str(path) for process in everybody for path in knows(process, secret.encode())]
    assert set(with_it) == expected
    assert told == []


def knows(process: Path, secret: bytes) -> Iterator[Path]:
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            if secret in (process / name).read_bytes():
                yield process / name


def quiet_step_s(run: Path) -> float:
    """The best of some medians over the next steps: whatever else this machine does can only make one slower."""
    return min(median_step_s(run, 60) for _ in range(5))


def median_step_s(run: Path, count: int) -> float:
    before = len(steps_of(run))
    wait_until(lambda: has_steps(run, before + count), 120)
    return float(statistics.median(step["step_s"] for step in steps_of(run)[before:]))


def test_a_flood_at_every_port_slows_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """The flood itself is over when steps are timed: on one machine it would take the ranks' own cores. Its idle
    connections are not. Gloo's own ports are shut by then (`shoal.sync.interruptible`), so nothing comes in there."""
    with training(tmp_path, "local:2") as run:
        ports = ports_of(run)
        files = {pid: open_files(pid) for pid in pids_of(run)}
        before_s = quiet_step_s(run)
        idle = {each: [knock(each) for _ in range(IDLE)] for each in ports if is_open(each)}
        for each in idle:
            for _ in range(GARBAGE):
                with contextlib.suppress(OSError), knock(each) as connection:
                    connection.sendall(os.urandom(200))
        during_s = quiet_step_s(run)
        agents = [each for each, part in ports.items() if part == "agent"]
        assert agents
        for each in agents:
            assert all(is_closed(connection, 10.0) for connection in idle[each]), "an idle connection was kept"
        for connection in (connection for some in idle.values() for connection in some):
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
    """By how many files each process has more open; two may be a moment's business."""
    now = {pid: open_files(pid) - count for pid, count in files.items()}
    return {pid: more for pid, more in now.items() if more > 2}


def is_open(at: Listening) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((at.address, at.port)) == 0


def knock(at: Listening) -> socket.socket:
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
