"""Agents whose orders come from a test; they start quick programs without torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.control.orders import GoOrder, MeetOrder, RosterEntry, StartProcess, to_line
from shoal.control.processes import find_processes
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder
from shoal.runs.manage import end_processes
from tests.support.waiting import wait_until

TOKEN = "t" * 64


class Agent:
    """Member `number` on 127.0.0.<number + 1>, without a process mark: several agents share this machine and folder."""

    def __init__(self, folder: Path, number: int, variables: dict[str, str], **changes: Any) -> None:
        self.run = RunFolder(folder)
        self.node = f"node{number + 1}"
        orders = {
            "folder": str(folder),
            "node": self.node,
            "member": number,
            "address": f"127.0.0.{number + 1}",
            "interface": "lo",
            "token": TOKEN,
            "launch": "this",
            "launched_at": time.time(),
            "config": "c",
            "data": "d",
        }
        self.orders = MeetOrder(**{**orders, **changes})
        self.log = folder / "agents" / f"{self.node}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                (sys.executable, "-P", "-m", "shoal.agent.agent"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **variables},
            )
        self.tell(self.orders)

    def tell(self, order: MeetOrder | GoOrder | str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(to_line(order))
            self.process.stdin.flush()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def said(self, kind: str) -> list[Event]:
        path = self.run.journal(self.node)
        return [event for event in read_events(path) if event["event"] == kind] if path.exists() else []

    def first(self, kind: str, within_s: float = 30.0) -> Event:
        return wait_until(lambda: self.said(kind), within_s, why=self.everything)[0]

    def everything(self) -> str:
        journal = self.run.journal(self.node)
        return f"{self.log.read_text()}\n{journal.read_text() if journal.exists() else ''}"

    def ended(self) -> dict[str, tuple[int, bool]]:
        """Return the exit code of every process, and whether the agent killed it."""
        return {event["name"]: (event["code"], event["by_agent"]) for event in self.said("ended")}

    def code(self, within_s: float = 30.0) -> int:
        """Wait for the agent's exit code and check that its log has no traceback."""
        code = self.process.wait(within_s)
        assert "Traceback" not in self.log.read_text(), self.log.read_text()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.close_stdin()
        end_processes(find_processes(self.run.path))


@contextlib.contextmanager
def agents(*folders: Path, changes: Sequence[dict[str, Any]] = (), **variables: str) -> Iterator[list[Agent]]:
    """Start one agent per folder; they are ready for orders or have refused them."""
    extra = [*changes, *({} for _ in folders)]
    started = [Agent(folder, number, variables, **extra[number]) for number, folder in enumerate(folders)]
    try:
        yield started
    finally:
        for agent in started:
            agent.close()


def roster(team: Sequence[Agent]) -> tuple[RosterEntry, ...]:
    ready = [agent.first("ready") for agent in team]
    return tuple(
        RosterEntry(agent.node, agent.orders.address, event["port"], event["agent_mark"])
        for agent, event in zip(team, ready, strict=True)
    )


def go(team: Sequence[Agent], *programs: Sequence[StartProcess], grace_s: float | None = None) -> None:
    """Send every agent the roster and its processes to start."""
    members = roster(team)
    for agent, starts in zip(team, programs, strict=True):
        agent.tell(GoOrder(members, tuple(starts), grace_s=grace_s))


def python(rank: int, program: str, store: bool = False, env: Mapping[str, str] | None = None) -> StartProcess:
    argv = (sys.executable, "-I", "-u", "-c", program)
    return StartProcess(f"rank-{rank}", (rank,), argv, {"SHOAL_KEEPS_FILES": "1", **(env or {})}, store)


def shell(rank: int, program: str) -> StartProcess:
    return StartProcess(f"rank-{rank}", (rank,), ("sh", "-c", program), {})


def sleeper(rank: int) -> StartProcess:
    return StartProcess(f"rank-{rank}", (rank,), ("sleep", "300"), {})
