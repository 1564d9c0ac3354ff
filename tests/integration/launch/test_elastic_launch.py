"""The launcher of a run whose nodes leave and rejoin: what it logs, and what it reports as a failure.

Exercises launch.launcher, launch.failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from shoal.cluster.agent_link import AgentLink, PipeLink
from shoal.cluster.cluster import Cluster
from shoal.cluster.node import Node, Rendezvous
from shoal.config.schema import MembersConfig
from shoal.control.orders import make_membership_order
from shoal.control.processes import find_processes
from shoal.events import EventLog, read_events
from shoal.launch.failure import ProcessEnd, diagnose, drop_survived
from shoal.launch.launcher import Launch, LaunchRequest
from shoal.launch.plan import RankCommand
from shoal.run_folder import RunFolder
from tests.support.members import SCRIPT
from tests.support.waiting import wait_until


class TwoNodes:
    """Use two addresses of this machine. The agents have no marks: each would report the other as an earlier launch."""

    def __init__(self) -> None:
        self.nodes = [Node(f"node{number}", f"127.0.0.{number}", "lo", 1, 1) for number in (1, 2)]

    def start_agent(self, node: Node, run: Path) -> AgentLink:
        return PipeLink((sys.executable, "-P", "-m", "shoal.agent.agent"), run, node.name)

    def folder(self, node: Node, run: Path) -> str:
        return str(run)


class RunningLaunch:
    """Run a launcher in its own thread, while the test kills processes."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.run = RunFolder.create(folder)
        cluster: Cluster = TwoNodes()
        self.world = Launch(self.run, cluster, EventLog(self.run.supervisor, 0))
        self._steps = steps
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        with self.world:
            self.world.launch(
                LaunchRequest(
                    self._plan,
                    config="c",
                    data="d",
                    members=lambda ranks, above: make_membership_order(MembersConfig(), above, 16),
                )
            )
            self.world.wait()

    def _plan(self, nodes: list[Node], meeting: Rendezvous) -> list[RankCommand]:
        return [
            RankCommand(
                f"rank-{rank}",
                node,
                (rank,),
                (sys.executable, "-u", str(SCRIPT), str(self.ledger(rank)), str(self._steps), "0.01"),
                {"SHOAL_NODE": node.name},
                uses_agent_store=True,
            )
            for rank, node in enumerate(nodes)
        ]

    def ledger(self, rank: int) -> Path:
        return self.run.path / f"ledger-{rank}.jsonl"

    def await_commits(self, rank: int) -> None:
        path = self.ledger(rank)
        wait_until(lambda: path.exists() and any(event["event"] == "commit" for event in read_events(path)))

    def agent(self, node: str) -> int:
        return next(int(event["pid"]) for event in read_events(self.run.journal(node)) if event["event"] == "ready")

    def notes(self) -> list[str]:
        return [event["text"] for event in read_events(self.run.supervisor) if event["event"] == "note"]

    def end(self) -> list[ProcessEnd]:
        self._thread.join(60)
        assert not self._thread.is_alive(), self.notes()
        assert find_processes(self.run.path) == []
        return self.world.ranks.ends


@pytest.mark.long
def test_a_lost_agent_is_no_failure_when_the_others_finish(tmp_path: Path) -> None:
    launch = RunningLaunch(tmp_path / "run", steps=300)
    launch.await_commits(1)
    os.kill(launch.agent("node2"), signal.SIGKILL)
    endings = launch.end()
    assert {ending.name: ending.code for ending in endings} == {"rank-0": 0, "rank-1": -signal.SIGKILL}
    assert diagnose(endings, {}, {}) is not None
    assert diagnose(drop_survived(endings), {}, {}) is None
    assert len([note for note in launch.notes() if note.startswith("node2 is gone")]) == 1


@pytest.mark.long
def test_a_killed_rank_that_was_restarted_is_no_failure(tmp_path: Path) -> None:
    launch = RunningLaunch(tmp_path / "run", steps=1000)
    launch.await_commits(0)
    os.kill(
        next(process.pid for process in find_processes(launch.run.path) if process.part == "rank-0"), signal.SIGKILL
    )
    assert {ending.name: ending.code for ending in launch.end()} == {"rank-0": 0, "rank-1": 0}
    notes = launch.notes()
    assert len(notes) == len(set(notes)) >= 2, "each note is logged once, although two agents report it"


def ending(rank: int, code: int, lost: str = "", by_agent: bool = False) -> ProcessEnd:
    return ProcessEnd(f"rank-{rank}", f"node{rank + 1}", (rank,), code, rank, by_agent, lost=lost)


def test_lost_and_killed_ranks_are_dropped_when_others_ended_well() -> None:
    good, stopped = ending(0, 0), ending(0, 130)
    killed, gone, guest = ending(1, -9), ending(1, -9, lost="its agent was killed"), ending(1, -9, by_agent=True)
    raised = ending(1, 3)
    for lost in (killed, gone, guest):
        assert drop_survived([good, lost]) == [good]
        assert drop_survived([stopped, lost]) == [stopped]
    assert drop_survived([good, raised]) == [good, raised], "a rank that raised is a failure"
    assert drop_survived([killed, gone]) == [killed, gone], "no rank finished"
