"""Find ranks that never joined a process group, from texts of /proc and with real ranks.

Exercises agent.unjoined_ranks, launch.launcher.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from shoal.agent.agent import Agent
from shoal.agent.unjoined_ranks import JoinWatch, is_at, observe, who_is_alone
from shoal.cluster.agent_link import AgentLink
from shoal.cluster.cluster import LocalCluster
from shoal.cluster.lab import as_nodes
from shoal.cluster.node import LOOPBACK, Node, Rendezvous, listen_at, local_node, start_process
from shoal.config.schema import RunConfig
from shoal.control.orders import MeetOrder
from shoal.control.rank_env import script_store_command
from shoal.events import EventLog, EventTail, read_events
from shoal.host.proc import TcpSocket, parse_tcp_table
from shoal.launch.launcher import AgentHandle, Launch
from shoal.launch.notes import no_rank_joined
from shoal.launch.plan import RankCommand, plan_script
from shoal.run_folder import RunFolder
from tests.support.labs import running_lab
from tests.support.programs import shoal
from tests.support.waiting import wait_until

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
REST = "00000000:00000000 00:00000000 00000000     0        0"
# A store on port 45125 as rank 0 (node 10.77.0.1) and rank 1 (10.77.0.2) show it: torch opens IPv6 sockets.
LISTENS = f"   0: {'0' * 32}:B045 {'0' * 32}:0000 0A {REST} 101 1 0 100 0 0 10 0\n"
ACCEPTED = f"   1: {'0' * 16}FFFF000001004D0A:B045 {'0' * 16}FFFF000002004D0A:A312 01 {REST} 102 1 0 20 4 15 18 -1\n"
CONNECTED = f"   2: {'0' * 16}FFFF000002004D0A:A312 {'0' * 16}FFFF000001004D0A:B045 01 {REST} 103 1 0 20 4 16 18 -1\n"
CONNECTING = f"   3: 02004D0A:A314 01004D0A:B045 02 {REST} 104 1 0 20 4 16 18 -1\n"
LEFT = f"   4: 02004D0A:A312 01004D0A:B045 06 {REST} 0 3 0\n"
IPV6 = f"   5: 000000FD000000000000000002000000:A312 000000FD000000000000000001000000:B045 01 {REST} 105 1 0 20 4\n"
OTHER_PORT = f"   6: 02004D0A:A316 01004D0A:1F90 01 {REST} 106 1 0 20 4 16 18 -1\n"

# Listens in the namespace of a node, and becomes the program that gets the socket.
_LISTEN = """
import os, socket, sys
address, port, fd, *program = sys.argv[1:]
server = socket.create_server((address, int(port)))
os.dup2(server.fileno(), int(fd))
print("listening", flush=True)
os.execvp(program[0], program)
"""
_STORE_PORT, _STORE_FD = 29500, 9

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
# Rank 2 joins no process group.
ONE_DOES_NOT = """
import os, time
if os.environ["RANK"] == "2":
    time.sleep(60)
import torch.distributed as dist
dist.init_process_group("gloo")
"""


def sockets(text: str) -> list[TcpSocket]:
    """Return the sockets of the table that a process holds."""
    return [entry for entry in parse_tcp_table(HEAD + text) if entry.inode]


def test_a_tcp_table_is_parsed() -> None:
    assert sockets(LISTENS + CONNECTED + LEFT) == [
        TcpSocket(ip_address("::"), 45125, ip_address("::"), 0, True, 0, 101),
        TcpSocket(ip_address("10.77.0.2"), 41746, ip_address("10.77.0.1"), 45125, False, 0, 103),
    ]
    assert parse_tcp_table(HEAD) == parse_tcp_table("") == []


def test_an_ipv6_address_is_parsed() -> None:
    assert sockets(IPV6) == [TcpSocket(ip_address("fd00::2"), 41746, ip_address("fd00::1"), 45125, False, 0, 105)]


@pytest.mark.parametrize("text", [LISTENS, LISTENS + ACCEPTED, CONNECTED, CONNECTING, OTHER_PORT + CONNECTING])
def test_a_rank_that_serves_the_store_or_connects_to_it_has_joined(text: str) -> None:
    assert is_at(sockets(text), "10.77.0.1", 45125)


@pytest.mark.parametrize("text", ["", LEFT, OTHER_PORT, ACCEPTED, IPV6])
def test_other_sockets_do_not_count_as_joined(text: str) -> None:
    assert not is_at(sockets(text), "10.77.0.1", 45125)


def test_the_store_may_have_an_ipv6_address() -> None:
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


def test_the_warning_names_ranks_and_address() -> None:
    assert (
        no_rank_joined([2], "10.77.0.1", 45125, 60).seen == "rank 2 has not met the others at 10.77.0.1:45125 in 60 s"
    )
    assert no_rank_joined([1, 2], "10.77.0.1", 45125, 60).seen.startswith("ranks 1 and 2 have not met")


class StubLink(AgentLink):
    """Stand for an agent that runs and reports only through its journal."""

    def send(self, line: bytes) -> None: ...
    def ended(self) -> str | None:
        return None

    def is_reachable(self) -> bool:
        return True

    def kill(self) -> None: ...
    def close(self) -> None: ...


class WatchedLaunch:
    """Hold the launcher's state of a script with one rank on each of several nodes."""

    def __init__(self, folder: Path, ranks: int) -> None:
        run = RunFolder.create(folder / "run")
        nodes = [Node(f"node{rank + 1}", "10.77.0.1", None, 1, 1) for rank in range(ranks)]
        self.journals = [EventLog(run.journal(node.name), 0) for node in nodes]
        self.log_path = run.path / "launcher.jsonl"
        self.world = Launch(run, LocalCluster(1), EventLog(self.log_path, 0), launch_id="L", grace_s=30.0)
        self.world.agents = [AgentHandle(node, StubLink(), EventTail(run.journal(node.name))) for node in nodes]
        self.world.ranks.commands = [
            RankCommand(f"rank-{rank}", node, (rank,), ("python",), {}) for rank, node in enumerate(nodes)
        ]
        self.world.notes.rendezvous = Rendezvous("10.77.0.1", 4711)

    def write_event(self, node: int, event: str, **fields: Any) -> None:
        self.journals[node].write(event, launch="L", **fields)

    def ended(self, rank: int, code: int = 0) -> None:
        self.write_event(rank, "ended", name=f"rank-{rank}", code=code, by_agent=False, out_of_memory=False)

    def notes(self) -> list[str]:
        self.world._poll()
        self.world.notes.note_still_running(self.world.ranks.ends, self.world.ranks.running())
        return [event["text"] for event in read_events(self.log_path)] if self.log_path.exists() else []


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    """Each agent sees only its own ranks: the launcher combines what they report."""
    watched = WatchedLaunch(tmp_path, 3)
    watched.write_event(1, "joined-group", met=[], missing=[1], after_s=61.0)
    watched.write_event(0, "joined-group", met=[0], missing=[], after_s=60.2)
    assert watched.notes() == []
    watched.write_event(2, "joined-group", met=[2], missing=[], after_s=60.2)
    (note,) = watched.notes()
    assert note.startswith("rank 0, 2 wait for rank 1, not seen at 10.77.0.1:4711 in 61 s: rank 1 hangs or is busy")
    assert f"shoal logs {tmp_path / 'run'} --rank 1" in note
    assert "makes no process group trains once" not in note


def test_ranks_of_which_none_joined_get_the_note_about_process_groups(tmp_path: Path) -> None:
    watched = WatchedLaunch(tmp_path, 2)
    for rank in (0, 1):
        watched.write_event(rank, "joined-group", met=[], missing=[rank], after_s=60.2)
    (note,) = watched.notes()
    assert note.startswith("ranks 0 and 1 have not met the others at 10.77.0.1:4711 in 60 s")


def test_no_note_is_written_where_all_ranks_joined(tmp_path: Path) -> None:
    watched = WatchedLaunch(tmp_path, 2)
    for rank in (0, 1):
        watched.write_event(rank, "joined-group", met=[rank], missing=[], after_s=60.2)
    assert watched.notes() == []


def test_a_store_without_a_token_is_noted_once_when_a_rank_uses_it(tmp_path: Path) -> None:
    """The ranks of a session meet through the agents, and leave no key in it."""
    watched = WatchedLaunch(tmp_path, 2)
    watched.write_event(0, "script-store-keys", keys=0)
    assert watched.notes() == []
    watched.write_event(1, "script-store-used")
    watched.write_event(0, "script-store-keys", keys=7)
    (note,) = watched.notes()
    assert "asks for no token: any program that reaches 10.77.0.1 port 4711 can write into it" in note


def test_the_ranks_of_a_session_are_not_expected_at_the_store(tmp_path: Path) -> None:
    """A session that was made, and whose loop has not begun: it reads its data for minutes, for example."""
    run = RunFolder.create(tmp_path / "run")
    meet = MeetOrder(str(run.path), "node1", 0, LOOPBACK, None, "token", "L", 0.0, "config", "data")
    agent = Agent(meet)
    agent._report_joined([], [0, 1], 61.0)
    run.config.write_text("")
    agent._report_joined([], [0, 1], 61.0)
    agent._report_joined([0], [1], 61.0)
    events = [event for event in read_events(run.journal("node1")) if event["event"] == "joined-group"]
    assert [(event["met"], event["missing"]) for event in events] == [([], [0, 1]), ([0], [1])]


def test_a_rank_that_runs_long_after_another_has_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = WatchedLaunch(tmp_path, 2)
    assert watched.notes() == []
    watched.ended(1)
    assert watched.notes() == []
    monkeypatch.setattr("shoal.launch.notes.NOTE_RUNNING_AFTER_S", 0.0)
    (note,) = watched.notes()
    assert note.startswith("rank 1 ended 0 s ago with exit code 0, and rank 0 still runs: if it waits")
    assert note.endswith(f"shoal stop {tmp_path / 'run'}")
    assert watched.notes() == [note], "the note is written once"


@pytest.mark.parametrize("codes", [[], [0, 0], [1]])
def test_no_rank_is_noted_where_none_or_all_have_ended_or_one_failed(
    codes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launch.notes.NOTE_RUNNING_AFTER_S", -1.0)
    watched = WatchedLaunch(tmp_path, 2)
    for rank, code in enumerate(codes):
        watched.ended(rank, code)
    assert watched.notes() == []


JOINS_BRIEFLY = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()\n"


@pytest.mark.parametrize(
    ("text", "is_noted"),
    [("print('trained')\n", True), pytest.param(JOINS_BRIEFLY, False, marks=pytest.mark.long)],
)
def test_a_script_whose_ranks_never_joined_is_noted_at_its_end(text: str, is_noted: bool, tmp_path: Path) -> None:
    """The keys in the store show it, however short the script is."""
    script = tmp_path / "script.py"
    script.write_text(text)
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", script)
    assert done.returncode == 0, done.stderr
    assert ("note: no rank joined a process group: each of the 2 ranks ran" in done.stderr) is is_noted


def test_a_process_that_is_gone_cannot_be_inspected() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert observe(gone.pid) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_sockets_of_a_rank_s_child_process_count(address: str) -> None:
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
            entries = observe(rank.pid) or []
        assert is_at(entries, *listener.getsockname()[:2])
        assert not any(entry.is_listening for entry in entries), "the listener is this test's, not the rank's"


StartRank = Callable[[RankCommand, Path], subprocess.Popen[bytes]]


@contextlib.contextmanager
def running_ranks(
    nodes: list[Node], meeting: Rendezvous, start: StartRank, folder: Path, text: str, *words: str
) -> Iterator[tuple[JoinWatch, dict[int, int]]]:
    (folder / "script.py").write_text(text)
    commands = plan_script(RunConfig(), [str(folder / "script.py"), *words], nodes, meeting)
    started = [start(command, folder / f"{command.name}.log") for command in commands]
    try:
        yield JoinWatch(meeting.address, meeting.port), {rank: process.pid for rank, process in enumerate(started)}
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
def two_local_ranks(folder: Path, text: str, *words: str) -> Iterator[tuple[JoinWatch, dict[int, int]]]:
    listener = listen_at(LOOPBACK, 0)
    port = listener.getsockname()[1]
    store_command = script_store_command(LOOPBACK, port, listener.fileno())
    store = start_process(store_command, {}, folder / "store.log", (listener.fileno(),))
    listener.close()
    with (
        ended(store),
        running_ranks(
            [local_node(2)],
            Rendezvous(LOOPBACK, port),
            lambda command, log: start_process(command.argv, command.env, log),
            folder,
            text,
            *words,
        ) as watch_and_pids,
    ):
        yield watch_and_pids


@contextlib.contextmanager
def three_lab_ranks(folder: Path, text: str) -> Iterator[tuple[JoinWatch, dict[int, int]]]:
    with running_lab(3) as lab:
        meeting = Rendezvous(lab.node("node1").address, _STORE_PORT)
        words = script_store_command(meeting.address, meeting.port, _STORE_FD)
        listen = (sys.executable, "-c", _LISTEN, meeting.address, str(meeting.port), str(_STORE_FD))
        store = lab.start("node1", (*listen, *words), {}, folder / "store.log")
        wait_for(lambda: "listening" in (folder / "store.log").read_text(), folder)

        def start(command: RankCommand, log: Path) -> subprocess.Popen[bytes]:
            return lab.start(command.node.name, command.argv, command.env, log)

        with ended(store), running_ranks(as_nodes(lab.state.spec), meeting, start, folder, text) as watch_and_pids:
            yield watch_and_pids


def wait_for(is_met: Callable[[], bool], folder: Path) -> None:
    wait_until(is_met, why=lambda: [log.read_text() for log in folder.glob("*.log")])


def test_ranks_that_joined_are_remembered_when_their_group_is_gone(tmp_path: Path) -> None:
    with two_local_ranks(tmp_path, JOINS, str(tmp_path / "end")) as (watch, pids):

        def all_met() -> bool:
            watch.look(pids)
            return who_is_alone(watch.met, 2) == []

        watch.look(pids)
        assert who_is_alone(watch.met, 2) == [0, 1], "no rank can have imported torch yet"
        wait_for(all_met, tmp_path)
        (tmp_path / "end").touch()
        wait_for(lambda: len(list(tmp_path.glob("end-*"))) == 2, tmp_path)
        assert all_met()
        assert not any(is_at(observe(pid) or [], watch.address, watch.port) for pid in pids.values())
        watch.look({1: pids[1]})
        assert watch.met == {1: True}, "a rank that ended is no longer inspected"


@pytest.mark.long
def test_a_rank_on_another_node_that_never_joins_is_named(tmp_path: Path) -> None:
    with three_lab_ranks(tmp_path, ONE_DOES_NOT) as (watch, pids):

        def two_met() -> bool:
            watch.look(pids)
            return watch.met[0] is True and watch.met[1] is True

        wait_for(two_met, tmp_path)
        assert who_is_alone(watch.met, 3) == [2]
        assert watch.address == "10.77.0.1"
