"""Agents with changing membership and ranks that only count; see tests/support/scripts/counting_rank.py."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.agent.invite_server import ID, ask_agent
from shoal.agent.membership import RankNumbering
from shoal.control.membership.settings import MembershipSettings
from shoal.control.orders import GoOrder, MembershipOrder, StartProcess, read_orders
from shoal.control.processes import find_processes
from shoal.events import Event, read_events
from tests.support.agents import Agent, roster
from tests.support.waiting import wait_until

SCRIPT = Path(__file__).parent / "scripts" / "counting_rank.py"


class Team:
    """Agents with `slots` ranks each, which count to `steps`."""

    def __init__(self, team: Sequence[Agent], slots: Sequence[int], steps: int = 100000, step_s: float = 0.005) -> None:
        self.agents = list(team)
        self.out = team[0].run.path / "ledgers"
        self.out.mkdir()
        ranks = iter(range(sum(slots)))
        self.ranks = [tuple(next(ranks) for _ in range(count)) for count in slots]
        self._words = (str(steps), str(step_s))

    def go(self, settings: MembershipSettings | None = None, restarts: int = 3, above: int = 0) -> None:
        places = [replace(place, ranks=ranks) for place, ranks in zip(roster(self.agents), self.ranks, strict=True)]
        members = MembershipOrder(settings or MembershipSettings(), restarts, above)
        for agent, ranks in zip(self.agents, self.ranks, strict=True):
            agent.tell(GoOrder(tuple(places), tuple(self.start(agent.node, rank) for rank in ranks), members))

    def admit(self, guest: Agent, contact: Agent) -> int:
        """Admit a guest with an id from a member, as `shoal host RUN` does; return the number of its rank."""
        answer = ask_agent(contact.run.invite_socket(contact.node), ID)
        assert answer.member == guest.orders.member
        _, go = read_orders(contact.run, contact.node)
        rank = RankNumbering(answer.member, go.roster).number(answer.member, 0)
        self.agents.append(guest)
        self.ranks.append((rank,))
        later = {member: place for member, place in answer.places.items() if member >= len(go.roster)}
        guest.tell(replace(go, starts=(self.start(guest.node, rank),), guests=later))
        return rank

    def start(self, node: str, rank: int) -> StartProcess:
        argv = (sys.executable, "-u", str(SCRIPT), str(self.ledger(rank)), *self._words)
        return StartProcess(f"rank-{rank}", (rank,), argv, {"SHOAL_NODE": node}, store=True)

    def ledger(self, rank: int) -> Path:
        return self.out / f"rank-{rank}.jsonl"

    def notes(self, rank: int, kind: str) -> list[Event]:
        path = self.ledger(rank)
        return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []

    def commits(self, rank: int) -> list[tuple[int, str]]:
        return [(event["step"], event["generation"]) for event in self.notes(rank, "commit")]

    def pid(self, rank: int) -> int:
        """Return the pid of its newest process."""
        node = next(agent for agent, ranks in zip(self.agents, self.ranks, strict=True) if rank in ranks)
        return find_part(node, f"rank-{rank}")

    def pids(self, rank: int) -> list[int]:
        return [process.pid for process in find_processes(self.out.parent) if process.part == f"rank-{rank}"]

    def await_commits(self, rank: int, more: int = 5, within_s: float = 20.0) -> None:
        enough = len(self.notes(rank, "commit")) + more
        wait_until(lambda: len(self.notes(rank, "commit")) >= enough, within_s, why=self.everything)

    def await_notes(self, rank: int, kind: str) -> list[Event]:
        return wait_until(lambda: self.notes(rank, kind), why=self.everything)

    def await_size(self, rank: int, size: int, entries: int = 2, within_s: float = 20.0) -> Event:
        """Wait until the rank has committed in a generation of `size` ranks, at least its second one."""

        def trains() -> Event | None:
            entered = self.notes(rank, "enter")
            if len(entered) < entries or len(entered[-1]["ids"]) != size:
                return None
            name = entered[-1]["generation"]
            return entered[-1] if any(generation == name for _, generation in self.commits(rank)) else None

        entry = wait_until(trains, within_s, why=self.everything)
        assert entry is not None
        return entry

    def everything(self) -> str:
        return "\n".join(agent.everything()[-4000:] for agent in self.agents)

    def check_ledgers(self, *ranks: int) -> None:
        """Check that no rank committed a step twice and that ranks agree on the history of every step of a lineage. Two
        ranks may write a step in different generations: one that did not see the committing exchange succeed writes it
        in the next."""
        seen: dict[tuple[int, str], str] = {}
        for rank in ranks:
            events = self.notes(rank, "commit")
            for before, after in itertools.pairwise(events):
                assert after["step"] > before["step"], (rank, before, after)
            for event in events:
                key = (event["step"], event["lineage"])
                assert seen.setdefault(key, event["digest"]) == event["digest"], (rank, event)


def find_part(agent: Agent, part: str) -> int:
    return next(process.pid for process in find_processes(agent.run.path) if process.part == part)


def start_again(agent: Agent) -> None:
    """Restart a dead agent as `shoal join RUN` does."""
    agent.process.wait()
    agent.close_stdin()
    with agent.log.open("ab") as output:
        agent.process = subprocess.Popen(
            (sys.executable, "-P", "-m", "shoal.agent.agent", "--again", str(agent.run.path), agent.node),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=dict(os.environ),
        )
