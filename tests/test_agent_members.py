"""Machines come and go: real agents, real sockets, ranks that count steps together."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

from shoal.launch.orders import STOP
from tests.agent_checks import agents
from tests.member_checks import Team, start_again
from tests.runs_checks import wait_until


def test_a_training_is_counted_to_its_end(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 2, 1), steps=20)
        team.go(above=6)
        assert [agent.code(within_s=30) for agent in members] == [0, 0, 0]
    for rank in range(4):
        assert team.commits(rank) == [(step, "7-0") for step in range(1, 20)]
        (entered,) = team.notes(rank, "enter")
        assert (entered["ids"], entered["rank"]) == ([0, 1, 2, 3], rank)
    for agent in members:
        assert agent.said("done")[-1]["finished"] is True
        (generation,) = agent.said("generation")
        assert (generation["id"], generation["ranks"]) == ("7-0", 4)
        assert generation["members"] == ["node1", "node2", "node3"]
        assert not agent.run.orders(agent.node).exists(), "there is nothing to come back to"


def test_a_killed_rank_is_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as members:
        team = Team(members, (1, 2))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(1), signal.SIGKILL)
        team.await_size(0, 2)
        entered = team.await_size(1, 3)
        assert entered["ids"] == [0, 1, 2]
        assert entered["holds"] is False
        assert len(team.notes(1, "copied")) == 1
        (restart,) = members[1].said("restart")
        assert (restart["name"], restart["attempt"]) == ("rank-1", 1)
        team.check_ledgers(0, 1, 2)
        members[0].tell(STOP)
        assert [agent.code(within_s=10) for agent in members] == [0, 0]
    assert [code for agent in members for code, _ in agent.ended().values()] == [130, 130, 130]


def test_the_only_rank_of_a_machine_comes_back_as_a_guest(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(0)
        os.kill(team.pid(0), signal.SIGKILL)
        team.await_size(1, 2)
        team.await_size(0, 3)
        team.check_ledgers(0, 1, 2)


def test_a_killed_agent_is_done_without_and_comes_back(tmp_path: Path) -> None:
    """The one that keeps the keys, and proposes first."""
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
        assert (entered["ids"], entered["holds"]) == ([0, 1, 2], False)
        team.await_size(1, 3)
        team.check_ledgers(0, 1, 2)
        members[1].process.send_signal(signal.SIGINT)
        assert [agent.code(within_s=10) for agent in members] == [0, 0, 0]


def test_two_of_three_agents_die_and_the_last_goes_on(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, tmp_path) as members:
        team = Team(members, (1, 1, 1))
        team.go()
        team.await_commits(2)
        for agent in members[:2]:
            agent.process.kill()
        team.await_size(2, 1)
        told = wait_until(lambda: members[2].said("tell"))[-1]
        assert "node1" in told["text"]
        start_again(members[1])
        team.await_size(1, 2)
        team.check_ledgers(1, 2)
