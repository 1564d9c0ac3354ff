"""Ranks that an agent forks from its template: real agents, real templates, ranks that wait for a peer."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil

from shoal.control.orders import StartProcess
from shoal.control.processes import RunProcess, find_processes, is_running
from tests.support.agents import Agent, agents, go
from tests.support.runs import wait_until

WORKER = (sys.executable, "-P", "-m", "shoal.train.worker")
START_S = 60.0


def waiting_rank(folder: Path, rank: int = 1) -> StartProcess:
    """Return a rank that lives: it waits for a store that is never served."""
    env = {"RANK": str(rank), "WORLD_SIZE": "9", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "9", "OMP_NUM_THREADS": "1", "SHOAL_NODE": "node1"}
    return StartProcess(f"rank-{rank}", (rank,), (*WORKER, "--out", str(folder / "out")), env, store=True)


def part(run: Path, name: str) -> RunProcess:
    return wait_until(lambda: [one for one in find_processes(run) if one.part == name], START_S)[0]


def started(agent: Agent, name: str) -> int:
    return int(agent.first("started", START_S)["processes"][name])


def test_a_forked_rank_has_its_own_session_marks_log_and_exit_code(tmp_path: Path) -> None:
    failing = StartProcess("rank-0", (0,), (*WORKER, "--folder", str(tmp_path / "missing")), {}, store=True)
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        pid, template = started(agent, "rank-1"), part(tmp_path, "template")
        rank = part(tmp_path, "rank-1")
        process = psutil.Process(pid)
        assert (rank.pid, rank.node) == (pid, "node1")
        assert rank.command == " ".join(waiting_rank(tmp_path).argv)
        assert process.ppid() == agent.process.pid
        assert process.create_time() > psutil.Process(template.pid).create_time()
        assert process.environ()["RANK"] == "1"
        assert "OPENBLAS_NUM_THREADS" not in process.environ()
        assert os.getsid(pid) == pid
        log = agent.run.log("node1", "rank-1")
        assert [Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in (0, 1, 2)] == [Path(os.devnull), log, log]
        # It ends neither with the template nor by a signal for the template's group.
        os.kill(template.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(template.pid))
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)
        assert agent.code() == 0
        assert agent.ended() == {"rank-1": (-signal.SIGKILL, False)}
        assert find_processes(tmp_path) == []
    second = tmp_path / "second"
    with agents(second) as [agent]:
        go([agent], [failing])
        assert agent.code(START_S) == 0
        assert agent.ended() == {"rank-0": (2, False)}
        assert "missing" in agent.run.log("node1", "rank-0").read_text()
        assert agent.said("note") == []
        assert find_processes(second) == []


def test_forked_ranks_and_the_template_end_with_a_killed_agent(tmp_path: Path) -> None:
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        pids = [started(agent, "rank-1"), part(tmp_path, "template").pid]
        agent.process.kill()
        wait_until(lambda: not any(map(is_running, pids)))


def test_a_template_that_dies_is_replaced_by_a_plain_start(tmp_path: Path) -> None:
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        # It still imports torch: the rank is not forked yet.
        os.kill(part(tmp_path, "template").pid, signal.SIGKILL)
        pid = started(agent, "rank-1")
        assert psutil.Process(pid).ppid() == agent.process.pid
        assert psutil.Process(pid).environ()["RANK"] == "1"
        (note,) = agent.said("note")
        assert note["text"].startswith("ranks are started one by one, without a template: it has ended")
        assert find_processes(tmp_path)[0].part == "rank-1"


def test_a_rank_that_is_not_forked_yet_can_be_ended(tmp_path: Path) -> None:
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        part(tmp_path, "template")
        agent.tell("end")
        assert agent.code() == 0
        assert agent.ended() == {"rank-1": (-signal.SIGKILL, True)}
        assert find_processes(tmp_path) == []
