"""Nodes leave and rejoin: real agents, real sockets, ranks that count steps together.

Exercises agent.membership, agent.mesh, control.membership.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from shoal.control.membership.settings import MembershipSettings
from shoal.control.orders import END, STOP
from shoal.control.processes import find_processes
from tests.support.agents import Agent, agents
from tests.support.members import Team, start_again
from tests.support.programs import shoal
from tests.support.waiting import wait_until


def test_a_run_commits_every_step_to_its_end(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 2, 1), steps=20)
        team.go(above=6)
        assert [agent.code() for agent in members] == [0, 0, 0]
    for rank in range(4):
        assert team.commits(rank) == [(step, "7-0") for step in range(1, 20)]
        (entered,) = team.notes(rank, "enter")
        assert (entered["ids"], entered["rank"]) == ([0, 1, 2, 3], rank)
    for agent in members:
        assert agent.said("done")[-1]["finished"] is True
        (generation,) = agent.said("generation")
        assert (generation["id"], generation["ranks"]) == ("7-0", 4)
        assert generation["members"] == ["node1", "node2", "node3"]
        assert not agent.run.orders(agent.node).exists(), "a finished run keeps no orders to rejoin with"


def test_a_killed_rank_is_restarted_while_the_others_train_on(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 2))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(1), signal.SIGKILL)
        team.await_size(0, 2)
        entered = team.await_size(1, 3)
        assert entered["ids"] == [0, 1, 2]
        assert entered["has_state"] is False
        assert len(team.notes(1, "copied")) == 1
        (restart,) = members[1].said("restart")
        assert (restart["name"], restart["attempt"]) == ("rank-1", 1)
        team.check_ledgers(0, 1, 2)
        members[0].tell(STOP)
        assert [agent.code() for agent in members] == [0, 0]
    assert [code for agent in members for code, _ in agent.ended().values()] == [130, 130, 130]


@pytest.mark.long
def test_the_only_rank_of_a_node_rejoins_after_a_kill(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(0), signal.SIGKILL)
        team.await_size(1, 2)
        team.await_size(0, 3)
        team.check_ledgers(0, 1, 2)


@pytest.mark.long
def test_a_killed_agent_is_removed_and_rejoins(tmp_path: Path) -> None:
    """The killed agent is the one that serves the store and proposes first."""
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(1)
        orders = members[0].run.orders("node1")
        assert stat.S_IMODE(orders.stat().st_mode) == 0o600
        members[0].process.kill()
        entered = team.await_size(1, 2)
        assert (entered["ids"], entered["rank"]) == ([1, 2], 0)
        start_again(members[0])
        entered = team.await_size(0, 3)
        assert (entered["ids"], entered["has_state"]) == ([0, 1, 2], False)
        team.await_size(1, 3)
        team.check_ledgers(0, 1, 2)
        members[1].process.send_signal(signal.SIGINT)
        assert [agent.code() for agent in members] == [0, 0, 0]


@pytest.mark.long
def test_a_node_that_shuts_down_leaves_and_rejoins(tmp_path: Path) -> None:
    """A machine sends SIGTERM to its processes before it shuts down; the other nodes must not stop for that."""
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(1)
        members[0].process.send_signal(signal.SIGTERM)
        # A second SIGTERM, from a `shoal join` that got the same signal.
        time.sleep(0.02)
        members[0].process.send_signal(signal.SIGTERM)
        team.await_size(1, 2)
        members[0].process.wait(20)
        assert members[0].run.orders("node1").exists()
        team.await_commits(1)
        start_again(members[0])
        team.await_size(0, 3)
        team.check_ledgers(0, 1, 2)
        members[1].process.send_signal(signal.SIGINT)
        assert [agent.code() for agent in members] == [0, 0, 0]


@pytest.mark.long
def test_a_rejoining_node_whose_rank_fails_does_not_end_the_others(tmp_path: Path) -> None:
    """For example without a GPU, or with another Python: the other nodes train on."""
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(1)
        members[0].process.kill()
        team.await_size(1, 2)
        orders = members[0].run.orders("node1")
        meet, go = orders.read_bytes().splitlines(keepends=True)
        broken = json.loads(go)
        broken["GoOrder"]["starts"][0]["argv"] = [sys.executable, "-c", "raise SystemExit(3)"]
        orders.write_bytes(meet + json.dumps(broken).encode() + b"\n")
        start_again(members[0])
        members[0].process.wait(30)
        team.await_commits(1, more=100)
        team.check_ledgers(1, 2)
        assert [agent.process.poll() for agent in members[1:]] == [None, None]


@pytest.mark.long
def test_the_last_of_three_agents_trains_on_alone(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(2)
        for agent in members[:2]:
            agent.process.kill()
        team.await_size(2, 1)
        announcement = wait_until(lambda: members[2].said("announce"))[-1]
        assert "node1" in announcement["text"]
        start_again(members[1])
        team.await_size(1, 2)
        team.check_ledgers(1, 2)


@pytest.mark.long
@pytest.mark.parametrize("port", ["free", "taken"])
def test_agents_that_were_all_restarted_in_turn_reconnect(tmp_path: Path, port: str) -> None:
    """No agent has its first address any more when the last one restarts. Where its own port is taken meanwhile, the
    others cannot reach it: it has to connect to them."""
    with agents(tmp_path, tmp_path, tmp_path) as members, contextlib.ExitStack() as taken:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(0)
        for round_ in range(2):
            for number, agent in enumerate(members):
                old_port = agent.said("ready")[-1]["port"]
                agent.process.kill()
                agent.process.wait()
                team.await_size((number + 1) % 3, 2)
                if port == "taken":
                    taken.enter_context(socket.create_server((agent.orders.address, old_port)))
                start_again(agent)
                new_port = wait_until(partial(port_after_restart, agent, round_ + 2))
                assert (new_port == old_port) == (port == "free")
        team.check_ledgers(0, 1, 2)


def port_after_restart(agent: Agent, start_count: int) -> int | None:
    """Return the port that the agent listens on after its restart, once it trains with all others."""
    ready = agent.said("ready")
    entered = [event for event in agent.said("generation") if event["time"] > ready[-1]["time"]]
    is_back = len(ready) == start_count and any(len(event["members"]) == 3 for event in entered)
    return int(ready[-1]["port"]) if is_back else None


@pytest.mark.long
def test_a_frozen_node_is_removed_and_admitted_again(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go(settings=MembershipSettings(silent_after_s=1.5))
        team.await_commits(2)
        machine = (team.pid(2), members[2].process.pid)
        signal_all(machine, signal.SIGSTOP)
        try:
            entered = team.await_size(0, 2)
            assert entered["ids"] == [0, 1]
            asleep = team.commits(2)
        finally:
            signal_all(machine, signal.SIGCONT)
        team.await_size(2, 3)
        later = team.commits(2)[len(asleep) :]
        assert {generation for _, generation in later}.isdisjoint({"1-0"}), "a stale rank commits nothing"
        team.check_ledgers(0, 1, 2)
        assert members[2].said("ended") == [], "the rank kept its process"


def signal_all(pids: tuple[int, ...], signum: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, signum)


@pytest.mark.long
def test_a_short_freeze_changes_nothing(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 1))
        team.go(settings=MembershipSettings(silent_after_s=5.0))
        team.await_commits(0)
        signal_all((members[1].process.pid,), signal.SIGSTOP)
        time.sleep(1.5)
        signal_all((members[1].process.pid,), signal.SIGCONT)
        team.await_commits(0, more=20)
        assert [len(agent.said("generation")) for agent in members] == [1, 1]


@pytest.mark.long
def test_a_rank_that_dies_before_its_group_has_formed_is_restarted(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 1), step_s=30)
        team.go()
        team.await_notes(0, "enter")
        os.kill(team.pid(0), signal.SIGKILL)
        wait_until(lambda: members[0].said("restart"))
        # The other one begins without it; or it alone, since a rank of this kind does not listen while it computes.
        wait_until(lambda: any(len(event["members"]) == 1 for agent in members for event in agent.said("generation")))


def test_a_rank_that_raises_ends_the_run(tmp_path: Path) -> None:
    """A restarted rank would only raise again."""
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 1))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(1), signal.SIGUSR1)
        assert [agent.code() for agent in members] == [0, 0]
        assert find_processes(tmp_path) == []
    assert members[1].ended() == {"rank-1": (7, False)}
    assert members[0].ended() == {"rank-0": (-signal.SIGKILL, True)}


@pytest.mark.long
def test_a_node_whose_rank_exceeds_its_restarts_leaves(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 1))
        team.go(restarts=1)
        team.await_commits(0)
        os.kill(team.pid(1), signal.SIGKILL)
        team.await_size(1, 2)
        os.kill(team.pid(1), signal.SIGKILL)
        assert members[1].code() == 0
        assert members[1].said("done")[-1]["finished"] is False
        team.await_size(0, 1, entries=4)
        members[0].tell(STOP)
        assert members[0].code() == 0
    assert len(members[1].said("restart")) == 1


@pytest.mark.long
def test_a_rank_is_not_restarted_while_the_run_ends(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 1))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(1), signal.SIGKILL)
        members[1].first("restart")
        members[0].tell(END)
        assert [agent.code() for agent in members] == [0, 0]
        assert find_processes(tmp_path) == []


@pytest.mark.long
def test_shoal_join_restarts_a_dead_agent(tmp_path: Path) -> None:
    """`shoal join RUN` returns once the others have admitted the restarted agent."""
    with agents(tmp_path, tmp_path) as members:
        (tmp_path / "job.json").write_text("{}")
        team = Team(members, (1, 1))
        team.go()
        team.await_commits(0)
        members[1].process.kill()
        members[1].process.wait()
        team.await_size(0, 1)
        done = shoal("join", tmp_path, "--node", "node2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("node2 takes part again: node1, node2 train on from step ")
        team.await_size(1, 2)
        again = shoal("join", tmp_path, "--node", "node2")
        assert again.returncode == 2
        assert f"error: node2 takes part in {tmp_path} already" in again.stderr
        unknown = shoal("join", tmp_path, "--node", "node7")
        assert "knows no node node7 that could come back" in unknown.stderr
        members[0].tell(STOP)
        assert members[0].code() == 0
        wait_until(lambda: find_processes(tmp_path) == [])
    left = shoal("join", tmp_path)
    assert left.returncode == 2
    assert f"error: nothing of {tmp_path} can come back on this machine" in left.stderr


@pytest.mark.long
def test_a_single_node_trains_on_with_its_remaining_ranks(tmp_path: Path) -> None:
    """A single node needs no other vote. Its run ends when no rank is left."""
    with agents(tmp_path) as members:
        team = Team(members, (3,))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(0), signal.SIGKILL)
        team.await_size(1, 2)
        team.await_size(0, 3)
        signal_all(tuple(map(team.pid, range(3))), signal.SIGKILL)
        assert members[0].code() == 0
        assert find_processes(tmp_path) == []
    assert members[0].said("done")[-1]["finished"] is False
    assert [event["code"] for event in members[0].said("ended")] == [-signal.SIGKILL] * 4


@pytest.mark.long
def test_a_rank_that_waits_for_admission_is_ended_when_the_others_finish(tmp_path: Path) -> None:
    with agents(tmp_path) as members:
        team = Team(members, (2,), steps=250, step_s=0.01)
        team.go()
        team.await_commits(0)
        os.kill(team.pid(1), signal.SIGKILL)
        members[0].first("restart")
        waiting = wait_until(lambda: team.pids(1))[0]
        os.kill(waiting, signal.SIGSTOP)
        assert members[0].code() == 0
        assert find_processes(tmp_path) == []
    assert members[0].said("done")[-1]["finished"] is True
