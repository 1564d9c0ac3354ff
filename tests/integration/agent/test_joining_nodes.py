"""A machine that was never part of a run joins it while it trains.

Exercises agent.invite_server, agent.membership, runs.invite.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.agent.invite_server import ID, WHO, InviteReply, InviteServer, ask_agent
from shoal.agent.mesh import AgentAddresses
from shoal.cluster.transfer import FileSender
from shoal.control.channel import make_token
from shoal.control.membership.settings import MembershipSettings
from shoal.control.membership.types import next_member
from shoal.control.orders import STOP, GoOrder, MeetOrder, RosterEntry, read_orders, save_orders
from shoal.errors import RunFailed, UsageError
from shoal.run_folder import RunFolder
from tests.support.agents import Agent, agents
from tests.support.members import Team, start_again
from tests.support.programs import shoal
from tests.support.waiting import wait_until


@contextlib.contextmanager
def joining_agent(folder: Path, number: int) -> Iterator[Agent]:
    """Start an agent in its own folder."""
    guest = Agent(folder, number, {})
    try:
        yield guest
    finally:
        guest.close()


def test_a_new_node_joins_and_trains_to_the_end(tmp_path: Path) -> None:
    number = next_member(2, 1, 0)
    with agents(tmp_path, tmp_path) as members, joining_agent(tmp_path / "guest", number) as guest:
        team = Team(members, (1, 1))
        team.go()
        team.await_commits(0)
        assert stat.S_IMODE(members[1].run.invite_socket("node2").stat().st_mode) == 0o600
        rank = team.admit(guest, members[1])
        entered = team.await_size(rank, 3, entries=1)
        assert (entered["ids"], entered["has_state"]) == ([0, 1, rank], False)
        team.await_size(0, 3)
        assert members[0].said("generation")[-1]["members"] == ["node1", "node2", guest.node]
        assert guest.said("generation")[-1]["members"] == ["node1", "node2", guest.node]
        team.check_ledgers(0, 1, rank)
        members[0].tell(STOP)
        assert [agent.code() for agent in (*members, guest)] == [0, 0, 0]
        assert not members[1].run.invite_socket("node2").exists()


# Runs as another user: connects to the socket named first, reads the files after it, prints the names that worked.
TRY_AS_OTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
door, *files = sys.argv[1:]
os.chdir(os.path.dirname(door))
with socket.socket(socket.AF_UNIX) as trying:
    try:
        trying.connect(os.path.basename(door))
        print(os.path.basename(door))
    except PermissionError:
        pass
for file in files:
    try:
        with open(file, "rb") as opened:
            opened.read()
        print(os.path.basename(file))
    except PermissionError:
        pass
"""


def try_as_other_user(*paths: Path) -> list[str]:
    words = [sys.executable, "-I", "-c", TRY_AS_OTHER_USER, *map(str, paths)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_another_user_cannot_open_the_socket_or_read_the_secrets_of_an_agent() -> None:
    """Use a folder that this user can enter. The journal and a socket with mode 0666 show that the check can fail."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        token = make_token(RunFolder(folder).token)
        with agents(folder, folder, changes=[{"token": token}] * 2) as members:
            team = Team(members, (1, 1))
            team.go()
            team.await_commits(0)
            run, node = members[1].run, members[1].node
            secrets = (run.token, run.orders(node), run.votes(node))
            wait_until(lambda: all(path.exists() for path in secrets))
            assert token in run.orders(node).read_text()
            assert try_as_other_user(run.invite_socket(node), *secrets, run.journal(node)) == [run.journal(node).name]
            run.invite_socket(node).chmod(0o666)
            assert try_as_other_user(run.invite_socket(node)) == [run.invite_socket(node).name]


def test_ids_are_never_given_twice(tmp_path: Path) -> None:
    """Neither by two agents, nor by an agent that was restarted."""
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 1))
        team.go()
        team.await_commits(0)
        doors = [agent.run.invite_socket(agent.node) for agent in members]
        given = [ask_agent(door, ID).member for door in doors for _ in range(2)]
        who = ask_agent(doors[0], WHO)
        assert who.member is None
        assert {place.node for place in who.places.values()} == {"node1", "node2"}
        members[1].process.kill()
        start_again(members[1])
        wait_until(lambda: len(members[1].said("ready")) == 2 and doors[1].exists())
        given.append(wait_until(lambda: try_to_get_id(doors[1])))
    assert len(set(given)) == 5
    assert min(member for member in given if member is not None) >= 2


def try_to_get_id(door: Path) -> int | None:
    with contextlib.suppress(OSError, UsageError):
        return ask_agent(door, ID).member
    return None


@pytest.mark.long
def test_no_node_is_admitted_beyond_max_nodes(tmp_path: Path) -> None:
    number = next_member(2, 0, 0)
    with agents(tmp_path, tmp_path) as members, joining_agent(tmp_path / "guest", number) as guest:
        team = Team(members, (1, 1))
        team.go(settings=MembershipSettings(max_nodes=2))
        team.await_commits(0)
        assert ask_agent(members[0].run.invite_socket("node1"), WHO).full
        rank = team.admit(guest, members[0])
        team.await_notes(rank, "ready")
        team.await_commits(0, more=200)
        assert team.notes(rank, "enter") == []
        members[1].process.kill()
        team.await_size(rank, 2, entries=1)
        assert members[0].said("generation")[-1]["members"] == ["node1", guest.node]


def test_a_joining_node_that_leaves_before_admission_ends_no_other(tmp_path: Path) -> None:
    """Its machine shuts down: the nodes that train must not stop for that."""
    number = next_member(2, 0, 0)
    with agents(tmp_path, tmp_path) as members, joining_agent(tmp_path / "guest", number) as guest:
        team = Team(members, (1, 1))
        team.go(settings=MembershipSettings(max_nodes=2))
        team.await_commits(0)
        rank = team.admit(guest, members[0])
        team.await_notes(rank, "ready")
        guest.process.terminate()
        guest.process.wait(20)
        team.await_commits(0, more=50)
        assert guest.said("left")
        assert [agent.process.poll() for agent in members] == [None, None]


@pytest.mark.long
def test_a_joined_node_that_was_killed_rejoins_and_invites_another(tmp_path: Path) -> None:
    """Its inviter is gone by then: the next node gets the addresses of all others from the node that joined first."""
    first = next_member(2, 1, 0)
    second = next_member(2, first, 0)
    with (
        agents(tmp_path, tmp_path) as members,
        joining_agent(tmp_path / "first", first) as guest,
        joining_agent(tmp_path / "second", second) as other,
    ):
        team = Team(members, (1, 1))
        team.go()
        team.await_commits(0)
        rank = team.admit(guest, members[1])
        team.await_size(rank, 3, entries=1)
        guest.process.kill()
        team.await_size(0, 2, entries=3)
        start_again(guest)
        team.await_size(rank, 3)
        members[1].process.kill()
        team.await_size(0, 2, entries=5)
        last = team.admit(other, guest)
        entered = team.await_size(last, 3, entries=1)
        assert entered["ids"] == [0, rank, last]
        team.check_ledgers(0, rank, last)


def test_saved_orders_hold_the_nodes_that_joined_later(tmp_path: Path) -> None:
    run, place = RunFolder(tmp_path), RosterEntry("node9", "10.0.0.9", 4000, "m", (), 2)
    (tmp_path / "agents").mkdir()
    meet = MeetOrder(str(tmp_path), "node1", 0, "10.0.0.1", None, "t" * 64, "l", 1.0, "c", "d")
    save_orders(run, meet, GoOrder((place,), (), None, {66: place}))
    _, go = read_orders(run, "node1")
    assert go.places() == {0: place, 66: place}


@dataclass
class Host:
    """Replace an agent's membership with fixed answers."""

    why: str = ""
    broken: bool = False

    def why_closed(self) -> str:
        return self.why

    def is_full(self) -> bool:
        return False

    def invite(self) -> int:
        if self.broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 7


def ask_server(path: Path, host: Host, question: str) -> InviteReply:
    async def serve_and_ask() -> InviteReply:
        server = InviteServer(path, host, AgentAddresses())
        await server.open()
        try:
            return await asyncio.to_thread(ask_agent, path, question)
        finally:
            server.close()

    return asyncio.run(serve_and_ask())


def test_an_invite_server_answers_refuses_and_removes_its_socket(tmp_path: Path) -> None:
    """Use a folder whose path is longer than that of a socket may be."""
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    door = folder / "node1.sock"
    assert ask_server(door, Host(), ID).member == 7
    assert ask_server(door, Host(broken=True), WHO).member is None
    with pytest.raises(UsageError, match="no machine can join the run"):
        ask_server(door, Host(why="it is about to end"), ID)
    with pytest.raises(RunFailed, match="No space left"):
        ask_server(door, Host(broken=True), ID)
    assert not door.exists()


def test_an_unreadable_request_is_refused(tmp_path: Path) -> None:
    async def serve_and_ask() -> list[bytes]:
        server = InviteServer(tmp_path / "invite.sock", Host(), AgentAddresses())
        await server.open()
        answers = []
        for line in (b"\n", b"[]\n", b"nonsense\n", b'{"ask": [1]}\n'):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "invite.sock"))
            writer.write(line)
            answers.append(await asyncio.wait_for(reader.readline(), 10))
            writer.close()
        server.close()
        return answers

    *others, last = asyncio.run(serve_and_ask())
    assert all(b"cannot read" in answer for answer in others)
    assert b'"member": null' in last


def test_shoal_host_is_refused_for_a_run_that_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    done = shoal("host", tmp_path)
    assert done.returncode == 2
    assert f"error: no agent of {tmp_path} runs on this machine" in done.stderr
    assert f"shoal train --resume {tmp_path}" in done.stderr
    given = shoal("host", tmp_path, "--steps", "5")
    assert "error: a running run keeps its settings" in given.stderr
    (tmp_path / "empty").mkdir()
    assert "is not a run folder" in shoal("host", tmp_path / "empty").stderr


def test_votes_and_orders_are_not_sent_to_the_host(tmp_path: Path) -> None:
    """The host would refuse such a file, and with it every other file from this machine."""
    for name in ("node2.jsonl", "node2.log", "node2.orders", "node2.votes"):
        (tmp_path / "agents").mkdir(exist_ok=True)
        (tmp_path / "agents" / name).write_text("words\n")
    sent: list[str] = []
    FileSender(RunFolder(tmp_path), "node2", (), {}, False, lambda name, offset, piece: sent.append(name)).send_new()
    assert sorted(sent) == ["agents/node2.jsonl", "agents/node2.log"]
