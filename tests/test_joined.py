"""Told from outside which ranks never came to the meeting: by texts of /proc, and by real ranks."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from shoal.cluster.node import LOOPBACK, Meeting, Node, listen_at, local_node, start_process
from shoal.config.schema import RunConfig
from shoal.launch.joined import RollCall, Socket, is_at, lonely, observe, read_table, who_is_alone
from shoal.launch.plan import Command, plan_script, script_store_command
from tests.lab_checks import standing_lab

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0"
# A store on port 45125 as rank 0 (node 10.77.0.1) and rank 1 (10.77.0.2) show it: torch opens IPv6 sockets.
LISTENS = f"   0: {'0' * 32}:B045 {'0' * 32}:0000 0A {REST} 101 1 0 100 0 0 10 0\n"
ACCEPTED = f"   1: {'0' * 16}FFFF000001004D0A:B045 {'0' * 16}FFFF000002004D0A:A312 01 {REST} 102 1 0 20 4 15 18 -1\n"
CONNECTED = f"   2: {'0' * 16}FFFF000002004D0A:A312 {'0' * 16}FFFF000001004D0A:B045 01 {REST} 103 1 0 20 4 16 18 -1\n"
ASKING = f"   3: 02004D0A:A314 01004D0A:B045 02 {REST} 104 1 0 20 4 16 18 -1\n"
LEFT = f"   4: 02004D0A:A312 01004D0A:B045 06 {REST} 0 3 0\n"
IPV6 = f"   5: 000000FD000000000000000002000000:A312 000000FD000000000000000001000000:B045 01 {REST} 105 1 0 20 4\n"
ELSEWHERE = f"   6: 02004D0A:A316 01004D0A:1F90 01 {REST} 106 1 0 20 4 16 18 -1\n"

JOINS = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
dist.destroy_process_group()
Path(f"{sys.argv[1]}-{os.environ['RANK']}").touch()
time.sleep(60)
"""
# Rank 2 is the script that thinks it is alone.
ONE_DOES_NOT = """
import os, time
if os.environ["RANK"] == "2":
    time.sleep(60)
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def sockets(text: str) -> list[Socket]:
    return list(read_table(HEAD + text).values())


def test_a_table_is_read() -> None:
    assert read_table(HEAD + LISTENS + CONNECTED + LEFT) == {
        101: Socket(True, 45125, ip_address("::"), 0),
        103: Socket(False, 41746, ip_address("10.77.0.1"), 45125),
    }
    assert read_table(HEAD) == read_table("") == {}


def test_an_ipv6_address_is_read() -> None:
    assert sockets(IPV6) == [Socket(False, 41746, ip_address("fd00::1"), 45125)]


@pytest.mark.parametrize("text", [LISTENS, LISTENS + ACCEPTED, CONNECTED, ASKING, ELSEWHERE + ASKING])
def test_who_serves_the_meeting_or_holds_on_to_it_is_there(text: str) -> None:
    assert is_at(sockets(text), "10.77.0.1", 45125)


@pytest.mark.parametrize("text", ["", LEFT, ELSEWHERE, ACCEPTED, IPV6])
def test_other_sockets_say_nothing(text: str) -> None:
    assert not is_at(sockets(text), "10.77.0.1", 45125)


def test_a_meeting_may_have_an_ipv6_address() -> None:
    assert is_at(sockets(IPV6), "fd00::1", 45125)
    assert not is_at(sockets(IPV6), "fd00::2", 45125)


@pytest.mark.parametrize(
    ("met", "world_size", "alone"),
    [
        ({0: True, 1: True}, 2, []),
        ({0: True, 2: False, 1: False}, 3, [1, 2]),
        ({0: False, 1: None}, 2, [0]),
        ({0: False}, 1, []),
        # This node's own ranks of a larger world.
        ({4: False}, 8, [4]),
    ],
)
def test_who_is_alone(met: dict[int, bool | None], world_size: int, alone: list[int]) -> None:
    assert who_is_alone(met, world_size) == alone


def test_the_warning_names_ranks_and_place() -> None:
    assert lonely([2], "10.77.0.1", 45125, 60).seen == "rank 2 has not met the others at 10.77.0.1:45125 in 60 s"
    assert lonely([1, 2], "10.77.0.1", 45125, 60).seen.startswith("ranks 1, 2 have not met")


def test_a_process_that_is_gone_cannot_be_told() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert observe(gone.pid) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_what_a_child_of_the_rank_holds_counts(address: str) -> None:
    """The rank may be a shell script around Python."""
    try:
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError:
        pytest.skip(f"cannot listen on {address} here")
    connect = f"import socket; s = socket.create_connection(('{address}', {listener.getsockname()[1]})); s.recv(1)"
    shell = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", connect]
    with listener, subprocess.Popen(shell) as rank:
        peer, _ = listener.accept()
        with peer:
            found = observe(rank.pid) or []
        assert is_at(found, *listener.getsockname()[:2])
        assert not any(each.listens for each in found), "the listener is ours, not the rank's"


Starts = Callable[[Command, Path], subprocess.Popen[bytes]]


@contextlib.contextmanager
def running(
    nodes: list[Node], meeting: Meeting, start: Starts, folder: Path, text: str, *words: str
) -> Iterator[tuple[RollCall, dict[int, int]]]:
    (folder / "script.py").write_text(text)
    commands = plan_script(RunConfig(), [str(folder / "script.py"), *words], nodes, meeting)
    started = [start(command, folder / f"{command.name}.log") for command in commands]
    try:
        yield RollCall(meeting.address, meeting.port), {rank: process.pid for rank, process in enumerate(started)}
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def two_here(folder: Path, text: str, *words: str) -> Iterator[tuple[RollCall, dict[int, int]]]:
    listener = listen_at(LOOPBACK, 0)
    port = listener.getsockname()[1]
    words_of_store = script_store_command(LOOPBACK, port, listener.fileno())
    store = start_process(words_of_store, {}, folder / "store.log", (listener.fileno(),))
    listener.close()
    with (
        ended(store),
        running(
            [local_node(2)],
            Meeting(LOOPBACK, port),
            lambda command, log: start_process(command.argv, command.env, log),
            folder,
            text,
            *words,
        ) as found,
    ):
        yield found


@contextlib.contextmanager
def three_in_a_lab(folder: Path, text: str) -> Iterator[tuple[RollCall, dict[int, int]]]:
    with standing_lab(3) as lab:
        with lab.listen("node1") as listener:
            meeting = Meeting(*listener.getsockname())
            words = script_store_command(meeting.address, meeting.port, listener.fileno())
            store = lab.start("node1", words, {}, folder / "store.log", (listener.fileno(),))

        def start(command: Command, log: Path) -> subprocess.Popen[bytes]:
            return lab.start(command.node.name, command.argv, command.env, log)

        with ended(store), running(lab.nodes, meeting, start, folder, text) as found:
            yield found


def wait_for(is_so: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        logs = [log.read_text() for log in folder.glob("*.log")]
        assert time.monotonic() < deadline, logs
        time.sleep(0.1)


def test_ranks_that_joined_are_remembered_when_their_group_is_gone(tmp_path: Path) -> None:
    with two_here(tmp_path, JOINS, str(tmp_path / "end")) as (roll, pids):

        def all_met() -> bool:
            roll.look(pids)
            return who_is_alone(roll.met, 2) == []

        roll.look(pids)
        assert who_is_alone(roll.met, 2) == [0, 1], "nobody can have imported torch yet"
        wait_for(all_met, tmp_path)
        (tmp_path / "end").touch()
        wait_for(lambda: len(list(tmp_path.glob("end-*"))) == 2, tmp_path)
        assert all_met()
        assert not any(is_at(observe(pid) or [], roll.address, roll.port) for pid in pids.values())
        roll.look({1: pids[1]})
        assert roll.met == {1: True}, "a rank that ended is no longer asked after"


@pytest.mark.long
def test_a_rank_on_another_node_that_never_joins_is_named(tmp_path: Path) -> None:
    with three_in_a_lab(tmp_path, ONE_DOES_NOT) as (roll, pids):

        def two_met() -> bool:
            roll.look(pids)
            return roll.met[0] is True and roll.met[1] is True

        wait_for(two_met, tmp_path)
        assert who_is_alone(roll.met, 3) == [2]
        assert roll.address == "10.77.0.1"
