"""One agent's life: what ends it, what does not, what its ranks may ask of it, and what goes with it."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import psutil
import pytest

from shoal.control.orders import END, STOP, GoOrder
from shoal.control.processes import find_processes
from tests.support.agents import Agent, agents, go, python, roster, shell, sleeper
from tests.support.runs import wait_until

# Says when it is ready to be asked, and ends well when it is.
WILLING = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print("ready")
time.sleep(300)
"""
STUBBORN = WILLING.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


def log_of(agent: Agent, rank: int) -> str:
    path = agent.run.log(agent.node, rank)
    return path.read_text() if path.exists() else ""


def await_ready(agent: Agent, *ranks: int) -> None:
    wait_until(lambda: all(log_of(agent, rank) for rank in ranks), why=agent.everything)


def test_stop_asks_everybody_and_end_kills(tmp_path: Path) -> None:
    """Told to one agent, it reaches the ranks of both."""
    with agents(tmp_path, tmp_path) as team:
        go(team, [python(0, WILLING), python(1, STUBBORN)], [python(2, WILLING), python(3, STUBBORN)])
        await_ready(team[0], 0, 1)
        await_ready(team[1], 2, 3)
        team[1].tell(STOP)
        wait_until(lambda: "rank-0" in team[0].ended() and "rank-2" in team[1].ended(), within_s=5)
        time.sleep(0.3)
        assert {found.part for found in find_processes(tmp_path)} == {"rank-1", "rank-3"}
        team[1].tell(END)
        assert [agent.code(within_s=3) for agent in team] == [0, 0]
        assert find_processes(tmp_path) == []
    assert team[0].ended() == {"rank-0": (0, False), "rank-1": (-signal.SIGKILL, True)}
    assert team[1].ended() == {"rank-2": (0, False), "rank-3": (-signal.SIGKILL, True)}


def test_a_signal_to_the_agent_asks_and_a_second_one_ends(tmp_path: Path) -> None:
    with agents(tmp_path) as (agent,):
        go([agent], [python(0, WILLING), python(1, STUBBORN)])
        await_ready(agent, 0, 1)
        agent.process.send_signal(signal.SIGHUP)
        agent.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "rank-0" in agent.ended(), within_s=5)
        assert agent.process.poll() is None
        agent.process.send_signal(signal.SIGTERM)
        assert agent.code(within_s=3) == 0
    assert agent.ended() == {"rank-0": (0, False), "rank-1": (-signal.SIGKILL, True)}


@pytest.mark.parametrize("how", ["closed", END])
def test_a_launcher_that_leaves_before_the_start_leaves_nothing(how: str, tmp_path: Path) -> None:
    with agents(tmp_path) as (agent,):
        agent.first("ready")
        if how == "closed":
            agent.leave_alone()
        else:
            agent.tell(how)
        assert agent.code() == 130
    assert agent.first("note")["text"] == "the launcher left before the run began"
    assert [len(agent.said(kind)) for kind in ("started", "done")] == [0, 1]


def test_a_wish_while_the_agents_meet_is_not_forgotten(tmp_path: Path) -> None:
    """Both have met and still wait for the third; one of them is asked."""
    with agents(*(tmp_path,) * 3) as team:
        members = roster(team)
        for agent in team[:2]:
            agent.tell(GoOrder(members, (sleeper(0),)))
        first = psutil.Process(team[0].process.pid)
        wait_until(lambda: len(first.net_connections("inet")) > 1, why=team[0].everything)
        time.sleep(0.3)
        team[1].tell(STOP)
        assert {agent.code(within_s=3) for agent in team[:2]} <= {3, 130}
        assert find_processes(tmp_path) == []
    assert all(agent.said("started") == [] for agent in team)


def test_a_launcher_that_leaves_later_changes_nothing(tmp_path: Path) -> None:
    program = "import time; print('here'); time.sleep(1.5); print('still here')"
    with agents(tmp_path, tmp_path) as team:
        go(team, [python(0, program)], [python(1, program)])
        for rank, agent in enumerate(team):
            await_ready(agent, rank)
            agent.leave_alone()
        assert [agent.code() for agent in team] == [0, 0]
    assert [log_of(agent, rank) for rank, agent in enumerate(team)] == ["here\nstill here\n"] * 2


def test_what_a_rank_started_does_not_survive_it(tmp_path: Path) -> None:
    with agents(tmp_path) as (agent,):
        go([agent], [shell(0, "trap '' HUP; sleep 300 & echo $!; sleep 0.5")])
        assert agent.code() == 0
        child = int(log_of(agent, 0))
        wait_until(lambda: not psutil.pid_exists(child) or is_dead(child), within_s=2)
    assert agent.ended() == {"rank-0": (0, False)}


def is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


# The rank's end of the agents' store without torch: as `shoal.sync.kv_store_client` does.
ASK = """
import json, os, socket, time
agent = socket.socket(fileno=int(os.environ["SHOAL_AGENT_FD"]))
def ask(**request):
    text = json.dumps(request).encode()
    agent.sendall(len(text).to_bytes(4, "big") + text)
    size = int.from_bytes(agent.recv(4, socket.MSG_WAITALL), "big")
    return json.loads(agent.recv(size, socket.MSG_WAITALL))
"""


def test_the_first_agent_keeps_the_keys_until_all_ranks_have_ended(tmp_path: Path) -> None:
    sets = ASK + "print(ask(op='set', key='a', value='Yg=='))"
    later = ASK + "time.sleep(1.5)\nprint(ask(op='get', key='a'), ask(op='add', key='b', amount=2))"
    with agents(tmp_path, tmp_path) as team:
        go(team, [python(0, sets, store=True)], [python(1, later, store=True)])
        team[0].first("ended")
        assert team[1].ended() == {}
        assert [agent.code() for agent in team] == [0, 0]
    assert log_of(team[1], 1) == "{'value': 'Yg=='} {'total': 2}\n"


def test_a_rank_that_waits_for_a_key_hears_that_its_supervisor_is_gone(tmp_path: Path) -> None:
    waits = ASK + "print('asking')\nwhile 'error' not in (said := ask(op='get', key='a', wait_s=9)): pass\nprint(said)"
    with agents(tmp_path, tmp_path) as team:
        go(team, [sleeper(0)], [python(1, waits, store=True)])
        await_ready(team[1], 1)
        team[0].process.kill()
        assert team[1].code() == 0
    assert "the agent that keeps the keys is gone" in log_of(team[1], 1)
    assert team[1].ended() == {"rank-1": (0, False)}, "it had the time to say so"
    assert team[1].first("lost")["node"] == "node1"


INHIBIT = """#!/bin/sh
# Stands for systemd's tool: takes the options away, and becomes the command that holds the lock.
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
        assert not record.exists(), "nothing trains yet"
        go([agent], [shell(0, "sleep 1") if how == "ends" else sleeper(0)])
        agent.first("started")
        pid, *words = wait_until(lambda: record.read_text().split(maxsplit=4) if record.exists() else [])
        assert words[:3] == ["--what=idle:sleep", "--who=shoal", "--mode=block"]
        assert words[3] == "--why=training my run cat\n"
        wait_until(lambda: psutil.Process(int(pid)).cmdline() == ["cat"], within_s=2)
        if how == "killed":
            agent.process.kill()
        else:
            assert agent.code() == 0
        wait_until(lambda: is_dead(int(pid)), within_s=2)
