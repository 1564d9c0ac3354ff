"""Faults 1, 2, 3 and 6 of the list that shoal is measured by, done to one node of a lab."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rivals.jobs import LEADER, Job

_OTHER = "node3"
FROZEN_S = 30.0
CUT_S = 30.0


@dataclass(frozen=True)
class Fault:
    """`strike` begins it. `node` is the one that it hits: everybody else is a survivor. A node that lives on is watched
    for `lasting_s`; after that `lift` lets it come back, where there is one."""

    title: str
    node: str
    strike: Callable[[Job], None]
    lasting_s: float | None = None
    lift: Callable[[Job], None] | None = None

    def begin(self, job: Job) -> float:
        """The moment just before it."""
        began = time.time()
        self.strike(job)
        return began


def _kill_rank(job: Job) -> None:
    os.kill(job.rank(_OTHER), signal.SIGKILL)


def _kill_leader(job: Job) -> None:
    os.kill(job.leader(), signal.SIGKILL)


def _kill_node(job: Job) -> None:
    job.lab.node(_OTHER).kill()


def _cut_node(job: Job) -> None:
    job.lab.node(_OTHER).cut()


def _freeze(job: Job) -> None:
    job.lab.node(_OTHER).freeze()


def _thaw(job: Job) -> None:
    job.lab.node(_OTHER).thaw()


FAULTS = {
    "1": Fault("kill -9 of one rank", _OTHER, _kill_rank),
    "2": Fault("kill -9 of the process that leads", LEADER, _kill_leader),
    "3": Fault("every process of a node killed", _OTHER, _kill_node),
    "3s": Fault("a node's cable pulled", _OTHER, _cut_node, CUT_S),
    "6": Fault(f"a node frozen for {FROZEN_S:.0f} s", _OTHER, _freeze, FROZEN_S, _thaw),
}
