"""Which rank the others waited for, and what its agent does about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest

from shoal.agent.hung_ranks import HungRanks
from shoal.agent.local_ranks import LocalRank, LocalRanks, RankConnection
from shoal.control.agent_events import AgentEvent, RankHung
from shoal.control.membership.settings import STACKS_S, STUCK_AFTER_S
from shoal.control.membership.types import Ballot, State
from shoal.control.orders import StartProcess
from shoal.control.rank_messages import LeftGeneration, RankReady, RankWaits, StepCommitted
from shoal.control.rank_stacks import RankStacks, StackFrame

STACKS = RankStacks(((StackFrame("/home/me/train.py", 12, "slow"),),))


@dataclass
class RecordingControl:
    """Record what is done to the ranks, instead of doing it."""

    node: str = "node2"
    notes: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    events: list[AgentEvent] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def ask_for_stacks(self, name: str) -> None:
        self.asked.append(name)

    def read_stacks(self, name: str) -> RankStacks | None:
        return STACKS if name in self.asked else None

    def kill(self, name: str) -> None:
        self.killed.append(name)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def write(self, event: AgentEvent) -> None:
        self.events.append(event)


class Node:
    """Two ranks of a node in a run, of which rank 1 hangs."""

    def __init__(self, tries: int = 2, restarts: int = 3) -> None:
        self.ranks = [LocalRank(StartProcess(f"rank-{number}", (number,), ("true",), {})) for number in (0, 1)]
        self.control = RecordingControl()
        self.hung = HungRanks(LocalRanks(self.ranks, restarts), self.control, tries, now=0.0)
        self.generation = 0
        self.now = 0.0
        for rank in self.ranks:
            self.start(rank)
        self.enter()
        self.step(1)
        self.step(2)

    def start(self, rank: LocalRank) -> None:
        rank.begin(cast(RankConnection, object()))
        rank.is_ready = True
        self.hung.record_message(rank, RankReady(committed=0), self.now)

    def enter(self) -> None:
        self.generation += 1
        for rank in self.ranks:
            rank.generation, rank.has_left = Ballot(self.generation, 0), False

    def step(self, number: int) -> None:
        for rank in self.ranks:
            self.hung.record_message(rank, StepCommitted(step=number), self.now)

    def time_out(self, *returning: int, step: int = 2, after_s: float = 60.0) -> bool:
        """Let an exchange time out, and only these ranks return from it; return whether the run has to end."""
        generation = Ballot(self.generation, 0)
        self.now += after_s
        self.hung.record_timeout(generation, is_launching=False, now=self.now)
        for number, rank in enumerate(self.ranks):
            rank.has_left = True
            self.hung.record_message(rank, LeftGeneration(generation=generation, state=State(step=step)), self.now)
            if number in returning:
                self.hung.record_message(rank, RankWaits(generation=generation), self.now)
        self.enter()
        self.now += STUCK_AFTER_S
        assert not self.hung.tick(self.now)
        self.now += STACKS_S
        return self.hung.tick(self.now)


def test_the_rank_that_does_not_return_is_named_and_then_killed() -> None:
    node = Node()
    assert not node.time_out(0)
    [note] = node.control.notes
    assert note == (
        "rank 1 keeps the others waiting: it has done nothing for 1 min 02 s, since step 2. It is at "
        "/home/me/train.py:12, in slow. If it causes 1 more timeout, it is killed and started again "
        "(members.hung_tries). The stacks of all ranks: shoal stacks RUN"
    )
    assert not node.control.killed
    assert not node.time_out(0)
    assert "for 2 min 05 s, since step 2" in node.control.notes[1]
    assert "It has caused 2 timeouts and is killed and started again" in node.control.notes[1]
    assert node.control.killed == ["rank-1"]
    assert set(node.control.asked) == {"rank-1"}


def test_a_rank_that_hangs_again_after_its_restart_ends_the_run() -> None:
    node = Node(tries=1)
    node.time_out(0)
    node.start(node.ranks[1])
    node.enter()
    # The rank commits the step of the state that it has copied.
    node.step(40)
    assert node.time_out(0, step=40)
    [event] = node.control.events
    assert isinstance(event, RankHung)
    assert event.error.seen == "rank 1 on node2 hangs after step 40, at /home/me/train.py:12, in slow"
    assert "shoal train --resume RUN" in event.error.fix
    assert node.control.killed == ["rank-1"]


def test_a_rank_that_did_a_step_since_its_restart_is_restarted_again() -> None:
    node = Node(tries=1)
    node.time_out(0)
    node.start(node.ranks[1])
    node.enter()
    for number in (40, 41, 42):
        node.step(number)
    assert not node.time_out(0, step=43)
    assert node.control.killed == ["rank-1", "rank-1"]


def test_a_step_between_two_timeouts_forgives_the_first() -> None:
    node = Node()
    node.time_out(0)
    node.hung.record_message(node.ranks[1], RankWaits(generation=Ballot(1, 0)), node.now)
    for number in (3, 4, 5):
        node.step(number)
    node.time_out(0, step=5)
    assert len(node.control.notes) == 2
    assert not node.control.killed


def test_a_rank_that_returns_late_but_before_it_is_judged_is_only_slow() -> None:
    node = Node()
    assert not node.time_out(0, 1)
    assert not node.control.notes
    assert not node.control.asked


@pytest.mark.parametrize("times", [1, 5])
def test_with_zero_tries_a_rank_is_only_named(times: int) -> None:
    node = Node(tries=0)
    for _ in range(times):
        assert not node.time_out(0)
    assert len(node.control.notes) == times
    assert not node.control.killed
    assert "members.hung_tries" not in node.control.notes[-1]


def test_a_timeout_is_counted_once_although_several_ranks_report_it() -> None:
    node = Node()
    node.hung.record_timeout(Ballot(1, 0), is_launching=False, now=node.now)
    node.time_out(0)
    node.hung.record_timeout(Ballot(1, 0), is_launching=False, now=node.now)
    assert not node.hung.tick(node.now + 10)
    assert len(node.control.notes) == 1


def test_a_generation_that_no_rank_here_was_in_is_ignored() -> None:
    """As all that another machine sends, it may be anything."""
    node = Node()
    node.hung.record_timeout(Ballot(10**9, 0), is_launching=False, now=node.now)
    node.time_out(0)
    assert len(node.control.notes) == 1


def test_a_rank_that_still_imports_is_not_killed() -> None:
    node = Node(tries=1)
    node.ranks[1].is_ready = False
    for _ in range(3):
        assert not node.time_out(0)
    assert len(node.control.notes) == 3
    assert not node.control.killed


def test_while_the_first_group_forms_a_rank_that_is_not_ready_is_named() -> None:
    node = Node()
    node.ranks[1].is_ready = False
    node.hung.record_timeout(Ballot(1, 0), is_launching=True, now=60.0)
    node.hung.tick(60.0 + STUCK_AFTER_S)
    assert not node.hung.tick(60.0 + STUCK_AFTER_S + STACKS_S)
    [note] = node.control.notes
    assert note.startswith("rank 1 keeps the others waiting")
    assert not node.control.killed


def test_a_rank_without_a_handler_is_named_without_its_line() -> None:
    node = Node()
    node.control.asked = cast(list[str], _Forgetful())
    node.time_out(0)
    assert "It is at an unknown line: it has written no stacks" in node.control.notes[0]


class _Forgetful(list[str]):
    def append(self, name: str) -> None:
        pass
