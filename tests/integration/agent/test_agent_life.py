"""The life of one agent: what ends it, which requests its ranks may send, and what ends with it.

Exercises agent.agent, agent.local_ranks.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from shoal.control.membership.settings import MEET_TIMEOUT_S
from shoal.control.orders import END, STOP, GoOrder
from shoal.control.processes import find_processes
from tests.support.agents import Agent, agents, go, python, roster, shell, sleeper
from tests.support.waiting import wait_until

# Prints when it can be interrupted, and exits with 0 when it is.
ENDS_ON_SIGINT = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print("ready")
time.sleep(300)
"""
IGNORES_SIGINT = ENDS_ON_SIGINT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


def log_of(agent: Agent, rank: int) -> str:
    path = agent.run.log(agent.node, rank)
    return path.read_text() if path.exists() else ""


def await_ready(agent: Agent, *ranks: int) -> None:
    wait_until(lambda: all(log_of(agent, rank) for rank in ranks), why=agent.everything)


def test_stop_interrupts_the_ranks_of_all_agents_and_end_kills_them(tmp_path: Path) -> None:
    """An order to one agent reaches the ranks of both."""
    with agents(tmp_path, tmp_path) as team:
        go(
            team,
            [python(0, ENDS_ON_SIGINT), python(1, IGNORES_SIGINT)],
            [python(2, ENDS_ON_SIGINT), python(3, IGNORES_SIGINT)],
        )
        await_ready(team[0], 0, 1)
        await_ready(team[1], 2, 3)
        team[1].tell(STOP)
        wait_until(lambda: "rank-0" in team[0].ended() and "rank-2" in team[1].ended())
        time.sleep(0.3)
        assert {process.part for process in find_processes(tmp_path)} == {"rank-1", "rank-3"}
        team[1].tell(END)
        assert [agent.code() for agent in team] == [0, 0]
        assert find_processes(tmp_path) == []
    assert team[0].ended() == {"rank-0": (0, False), "rank-1": (-signal.SIGKILL, True)}
    assert team[1].ended() == {"rank-2": (0, False), "rank-3": (-signal.SIGKILL, True)}


def test_the_first_sigterm_to_an_agent_interrupts_its_ranks_and_the_second_kills_them(tmp_path: Path) -> None:
    with agents(tmp_path) as (agent,):
        go([agent], [python(0, ENDS_ON_SIGINT), python(1, IGNORES_SIGINT)])
        await_ready(agent, 0, 1)
        agent.process.send_signal(signal.SIGHUP)
        agent.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "rank-0" in agent.ended())
        assert agent.process.poll() is None
        agent.process.send_signal(signal.SIGTERM)
        assert agent.code() == 0
    assert agent.ended() == {"rank-0": (0, False), "rank-1": (-signal.SIGKILL, True)}


@pytest.mark.parametrize("how", ["closed", END])
def test_an_agent_ends_when_the_launcher_leaves_before_the_start(how: str, tmp_path: Path) -> None:
    with agents(tmp_path) as (agent,):
        agent.first("ready")
        if how == "closed":
            agent.close_stdin()
        else:
            agent.tell(how)
        assert agent.code() == 130
    assert agent.first("note")["text"] == "the launcher left before the run began"
    assert [len(agent.said(kind)) for kind in ("started", "done")] == [0, 1]


def test_a_stop_order_while_the_agents_connect_is_obeyed(tmp_path: Path) -> None:
    """Two agents are connected and wait for the third when one of them gets the order."""
    with agents(*(tmp_path,) * 3) as team:
        members = roster(team)
        for agent in team[:2]:
            agent.tell(GoOrder(members, (sleeper(0),)))
        first = psutil.Process(team[0].process.pid)
        wait_until(lambda: len(first.net_connections("inet")) > 1, why=team[0].everything)
        time.sleep(0.3)
        team[1].tell(STOP)
        # Before they give up waiting for the third.
        assert {agent.code(within_s=MEET_TIMEOUT_S - 5) for agent in team[:2]} <= {3, 130}
        assert find_processes(tmp_path) == []
    assert all(agent.said("started") == [] for agent in team)


def test_ranks_keep_running_when_the_launcher_leaves_after_the_start(tmp_path: Path) -> None:
    program = "import time; print('here'); time.sleep(1.5); print('still here')"
    with agents(tmp_path, tmp_path) as team:
        go(team, [python(0, program)], [python(1, program)])
        for rank, agent in enumerate(team):
            await_ready(agent, rank)
            agent.close_stdin()
        assert [agent.code() for agent in team] == [0, 0]
    assert [log_of(agent, rank) for rank, agent in enumerate(team)] == ["here\nstill here\n"] * 2


def test_child_processes_of_a_rank_end_with_it(tmp_path: Path) -> None:
    with agents(tmp_path) as (agent,):
        go([agent], [shell(0, "trap '' HUP; sleep 300 & echo $!; sleep 0.5")])
        assert agent.code() == 0
        child = int(log_of(agent, 0))
        wait_until(lambda: not psutil.pid_exists(child) or is_dead(child))
    assert agent.ended() == {"rank-0": (0, False)}


def is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


# The rank's end of the agents' store without torch, as in `shoal.sync.kv_store_client`.
ASK = """
import json, os, socket, time
agent = socket.socket(fileno=int(os.environ["SHOAL_AGENT_FD"]))
def ask(**request):
    text = json.dumps(request).encode()
    agent.sendall(len(text).to_bytes(4, "big") + text)
    size = int.from_bytes(agent.recv(4, socket.MSG_WAITALL), "big")
    return json.loads(agent.recv(size, socket.MSG_WAITALL))
"""


def test_the_first_agent_serves_the_store_until_all_ranks_have_ended(tmp_path: Path) -> None:
    sets = ASK + "print(ask(op='set', key='a', value='Yg=='))"
    later = ASK + "time.sleep(1.5)\nprint(ask(op='get', key='a'), ask(op='add', key='b', amount=2))"
    with agents(tmp_path, tmp_path) as team:
        go(team, [python(0, sets, store=True)], [python(1, later, store=True)])
        team[0].first("ended")
        assert team[1].ended() == {}
        assert [agent.code() for agent in team] == [0, 0]
    assert log_of(team[1], 1) == "{'value': 'Yg=='} {'total': 2}\n"


def test_a_rank_that_waits_for_a_key_gets_an_error_when_the_first_agent_is_killed(tmp_path: Path) -> None:
    waits = (
        ASK + "print('asking')\nwhile 'error' not in (reply := ask(op='get', key='a', wait_s=9)): pass\nprint(reply)"
    )
    with agents(tmp_path, tmp_path) as team:
        go(team, [sleeper(0)], [python(1, waits, store=True)])
        await_ready(team[1], 1)
        team[0].process.kill()
        assert team[1].code() == 0
    assert "the agent that keeps the keys is gone" in log_of(team[1], 1)
    assert team[1].ended() == {"rank-1": (0, False)}, "the rank had time to log the error"
    assert team[1].first("lost")["node"] == "node1"


INHIBIT = """#!/bin/sh
# Replaces systemd's tool: removes the options and executes the command that holds the lock.
echo "$$ $*" >> "$RECORD"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_the_machine_is_kept_awake_while_ranks_run(how: str, tmp_path: Path) -> None:
    tool, record, run = tmp_path / "bin" / "systemd-inhibit", tmp_path / "record", tmp_path / "my run"
    tool.parent.mkdir()
    tool.write_text(INHIBIT)
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    with agents(run, RECORD=str(record), PATH=f"{tool.parent}:{os.environ['PATH']}") as (agent,):
        agent.first("ready")
        assert not record.exists(), "no rank runs yet"
        go([agent], [shell(0, "sleep 1") if how == "ends" else sleeper(0)])
        agent.first("started")
        pid, *words = wait_until(lambda: record.read_text().split(maxsplit=4) if record.exists() else [])
        assert words[:3] == ["--what=idle:sleep", "--who=shoal", "--mode=block"]
        assert words[3] == "--why=training my run cat\n"
        wait_until(lambda: psutil.Process(int(pid)).cmdline() == ["cat"])
        if how == "killed":
            agent.process.kill()
        else:
            assert agent.code() == 0
        wait_until(lambda: is_dead(int(pid)))
