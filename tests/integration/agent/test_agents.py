"""Real agents with orders from a test: they connect, start processes, watch them, and end together.

Exercises agent.agent, agent.mesh, control.orders.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from shoal.control.membership.settings import FAILURE_GRACE_S
from shoal.control.orders import END, STOP, GoOrder, StartProcess
from shoal.control.processes import find_processes, is_alive, make_marks
from tests.support.agents import Agent, agents, go, python, roster, shell, sleeper
from tests.support.waiting import wait_until

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def log_of(agent: Agent, rank: int) -> str:
    """Return what a rank has printed; the agent may not have started it yet."""
    log = agent.run.log(agent.node, rank)
    return log.read_text() if log.exists() else ""


def test_agents_connect_start_their_ranks_and_report(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    # Longer than asyncio's limit for a line.
    long = {f"LONG_{number}": "x" * 50_000 for number in range(3)}
    with agents(shared, shared, own) as team:
        members = roster(team)
        for agent, member in zip(team, members, strict=True):
            listening = [
                connection.laddr[:2]
                for connection in psutil.Process(agent.process.pid).net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert listening == [(agent.orders.address, member.port)], "an agent listens on the chosen address only"
        go(
            team,
            [python(0, PRINT_ENVIRONMENT, env=long), python(1, "raise SystemExit(0)")],
            [python(2, PRINT_ENVIRONMENT)],
            [python(3, PRINT_ENVIRONMENT)],
        )
        assert [agent.code() for agent in team] == [0, 0, 0]
    assert [agent.ended() for agent in team] == [
        {"rank-0": (0, False), "rank-1": (0, False)},
        {"rank-2": (0, False)},
        {"rank-3": (0, False)},
    ]
    assert all(event["launch"] == "this" for agent in team for event in agent.said("ready") + agent.said("done"))
    environments = [json.loads(log_of(team[node], rank)) for node, rank in ((0, 0), (1, 2), (2, 3))]
    assert all(environments[0][name] == value for name, value in long.items())
    assert environments[0].items() >= make_marks(shared, "rank-0").items()
    assert environments[2].items() >= make_marks(own, "rank-3").items()
    # Of the agents that share a folder, the first writes its files.
    assert [environment["SHOAL_KEEPS_FILES"] for environment in environments] == ["1", "0", "1"]


def test_a_failed_rank_ends_all_ranks(tmp_path: Path) -> None:
    stubborn = shell(2, "trap '' INT TERM HUP; sleep 300 & wait; wait")
    failing = python(1, "import sys, time; time.sleep(0.5); sys.exit(7)")
    with agents(*(tmp_path,) * 3) as team:
        go(team, [sleeper(0)], [failing], [stubborn])
        began = [agent.first("started")["processes"] for agent in team]
        assert [list(processes) for processes in began] == [["rank-0"], ["rank-1"], ["rank-2"]]
        team[1].first("ended")
        assert [agent.code() for agent in team] == [0, 0, 0]
        assert find_processes(tmp_path) == []
    assert [agent.ended() for agent in team] == [
        {"rank-0": (-signal.SIGKILL, True)},
        {"rank-1": (7, False)},
        {"rank-2": (-signal.SIGKILL, True)},
    ]


def test_a_rank_that_saves_is_not_ended_because_another_has_stopped(tmp_path: Path) -> None:
    """One rank ends by the signal, which is no failure. The other saves for longer than the grace after a failure."""
    saves = (
        "import time\nprint('begun')\n"
        "try:\n    time.sleep(300)\n"
        f"except KeyboardInterrupt:\n    time.sleep({FAILURE_GRACE_S + 1})\n    print('saved')\n"
    )
    with agents(tmp_path, tmp_path) as team:
        go(team, [python(0, saves)], [python(1, "import time\nprint('begun')\ntime.sleep(300)")], grace_s=30.0)
        for rank, agent in enumerate(team):
            agent.first("started")
            wait_until(lambda agent=agent, rank=rank: "begun" in log_of(agent, rank))  # type: ignore[misc]
        team[0].tell(STOP)
        assert [agent.code() for agent in team] == [0, 0]
    assert [agent.ended() for agent in team] == [{"rank-0": (0, False)}, {"rank-1": (-signal.SIGINT, False)}]
    assert log_of(team[0], 0) == "begun\nsaved\n"


def test_a_rank_that_ignores_the_stop_signal_is_killed_after_the_grace(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path) as team:
        go(team, [shell(0, "trap '' INT TERM; echo ready; sleep 300 & wait; wait")], [sleeper(1)], grace_s=0.5)
        team[1].first("started")
        wait_until(lambda: "ready" in log_of(team[0], 0))
        team[1].tell(STOP)
        assert [agent.code() for agent in team] == [0, 0]
        assert find_processes(tmp_path) == []
    assert [agent.ended() for agent in team] == [
        {"rank-0": (-signal.SIGKILL, True)},
        {"rank-1": (-signal.SIGINT, False)},
    ]
    assert [note["text"] for note in team[0].said("note")] == ["rank 0 did not stop within 500 ms: ended now"]
    assert team[1].said("note") == []


@pytest.mark.long
def test_a_killed_agent_is_reported_lost_and_its_ranks_end(tmp_path: Path) -> None:
    victim = 1
    with agents(*(tmp_path,) * 3) as team:
        go(team, *([sleeper(rank)] for rank in range(3)))
        pids = [agent.first("started")["processes"][f"rank-{rank}"] for rank, agent in enumerate(team)]
        team[victim].process.kill()
        wait_until(lambda: pids[victim] not in {process.pid for process in find_processes(tmp_path)})
        others = [agent for agent in team if agent is not team[victim]]
        assert [agent.code() for agent in others] == [0, 0]
        assert find_processes(tmp_path) == []
    for agent in others:
        (lost,) = agent.said("lost")
        assert (lost["member"], lost["node"]) == (victim, f"node{victim + 1}")
        assert lost["how"] == "its agent's connection closed"
        assert list(agent.ended().values()) == [(-signal.SIGKILL, True)]


def test_agents_of_different_runs_do_not_train_together(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, changes=[{}, {"config": "another"}]) as team:
        go(team, [sleeper(0)], [sleeper(1)])
        assert [agent.code() for agent in team] == [3, 3]
    for agent in team:
        seen = agent.first("refused")["seen"]
        assert "cannot train together: configuration " in seen
        assert " c on node1" in seen
        assert " another on node2" in seen
        assert agent.said("started") == []


def test_an_agent_with_another_token_is_refused_at_once(tmp_path: Path) -> None:
    with agents(tmp_path, tmp_path, changes=[{}, {"token": "another"}]) as team:
        members = roster(team)
        go(team, [sleeper(0)], [sleeper(1)])
        assert team[1].code() == 3
        assert team[1].first("refused")["seen"].startswith(f"127.0.0.1:{members[0].port} refused us")
        assert "refused a connection from 127.0.0.1: an unknown process" in team[0].first("note")["text"]
        assert len(team[0].said("note")) == 1
        # The launcher reads that and ends the other agent.
        team[0].tell(END)
        assert team[0].code() == 130
        assert all(agent.said("started") == [] for agent in team)


def test_an_agent_that_dies_while_the_others_connect_is_not_waited_for(tmp_path: Path) -> None:
    """The third agent has not received its orders yet."""
    with agents(*(tmp_path,) * 3) as team:
        members = roster(team)
        for agent in team[:2]:
            agent.tell(GoOrder(members, (sleeper(0),)))
        first = psutil.Process(team[0].process.pid)
        wait_until(lambda: len(first.net_connections("inet")) > 1, why=team[0].everything)
        time.sleep(0.3)
        team[1].process.kill()
        assert team[0].code() == 3
    assert team[0].first("refused")["seen"] == "node2 left before the ranks were started"


@pytest.mark.parametrize(
    ("change", "seen", "why"),
    [
        ({"interface": "eth77"}, "node1 has no interface 'eth77'", "lo (127.0.0.1)"),
        ({"address": "192.0.2.7"}, "the address 192.0.2.7 is not one of node1's", "lo (127.0.0.1)"),
    ],
)
def test_an_unknown_interface_or_address_is_refused_before_the_start(
    change: dict[str, Any], seen: str, why: str, tmp_path: Path
) -> None:
    with agents(tmp_path, changes=[change]) as (agent,):
        assert agent.code() == 2
    (refused,) = agent.said("refused")
    assert (refused["seen"], refused["error"]) == (seen, "UsageError")
    assert why in refused["why"]
    assert agent.said("ready") == []


def test_a_port_in_use_is_named_with_its_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        with agents(tmp_path, changes=[{"script_port": port}]) as (agent,):
            assert agent.code() == 3
    (refused,) = agent.said("refused")
    assert refused["seen"] == f"port {port} of 127.0.0.1 cannot be used: Address already in use"
    assert refused["why"].startswith(f"process {os.getpid()} has it, for ")
    assert Path(sys.executable).name in refused["why"]


_SET_AND_GET = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
store.set("key", "value")
print(store.get("key").decode())
"""


def test_an_agent_serves_the_store_of_a_script_and_ends_it(tmp_path: Path) -> None:
    with agents(tmp_path, changes=[{"script_port": 0}]) as (agent,):
        port = agent.first("ready")["script_port"]
        (store,) = [process for process in find_processes(tmp_path) if process.part == "store"]
        go([agent], [StartProcess("rank-0", (0,), (sys.executable, "-I", "-c", _SET_AND_GET, str(port)), {})])
        assert agent.code(60) == 0
    assert log_of(agent, 0) == "value\n"
    assert agent.first("script-store-keys")["keys"] == (1 if hasattr(TCPStore, "list_keys") else None)
    assert not is_alive(store)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_store_that_ends_before_the_ranks_is_noted_once(tmp_path: Path) -> None:
    """torch's clients retry for minutes and log nothing."""
    with agents(tmp_path, changes=[{"script_port": 0}]) as (agent,):
        agent.first("ready")
        (store,) = [process for process in find_processes(tmp_path) if process.part == "store"]
        go([agent], [sleeper(0)])
        agent.first("started")
        os.kill(store.pid, signal.SIGKILL)
        text = agent.first("note")["text"]
    assert text.startswith("the store of the script's ranks ended with -9: it printed nothing (")
    assert len(agent.said("note")) == 1


def test_a_second_launch_beside_a_running_one_is_refused(tmp_path: Path) -> None:
    with agents(tmp_path) as (old,):
        go([old], [sleeper(0)])
        pid = old.first("started")["processes"]["rank-0"]
        with agents(tmp_path, changes=[{"launch": "later"}]) as (new,):
            assert new.code() == 3
        (refused,) = new.said("refused")
        assert refused["seen"] == f"an earlier launch of {tmp_path} still works on node1: process {pid}"
        assert refused["fix"] == f"end it first: shoal stop {tmp_path}"
        assert old.process.poll() is None


def test_a_rank_that_cannot_be_started_is_named_and_ends_the_others(tmp_path: Path) -> None:
    missing = StartProcess("rank-2", (2,), ("/no/such/program",), {})
    with agents(tmp_path, tmp_path) as team:
        go(team, [sleeper(0)], [sleeper(1), missing])
        assert team[1].code() == 3
        assert team[0].code() == 0
        assert find_processes(tmp_path) == []
    assert team[1].first("refused")["seen"] == "cannot start rank-2 on node2: No such file or directory"
    assert team[0].first("lost")["node"] == "node2"
