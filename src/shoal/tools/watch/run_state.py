"""Read a run folder piece by piece into a small state that can be shown at any moment.

A run may have 100,000 steps on 8 ranks and more. So steps are averaged over ranges (`StepSeries`), whose length doubles
whenever there are too many, and only the newest steps are kept one by one. Every byte of the folder is read once.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.control.membership.types import NEVER, Ballot
from shoal.control.processes import SUPERVISOR, find_processes
from shoal.events import Event
from shoal.records.documents import Documents
from shoal.records.rank_log import Entered, as_float, is_step, logged_values, read_ballot, read_entered
from shoal.records.run_tails import EventFile, RunTails
from shoal.run_folder import RunFolder
from shoal.tools.watch.step_series import MOST_VALUES, RankState, RunSeries, clean_name, finite
from shoal.tools.watch.time_line import TimeLine
from shoal.units import rank_names

_MOST_RANKS = 512
_LONGEST_NAME = 80
_FIND_FILES_S = 2.0
_LOOK_EVERY_S = 5.0
# A run without processes and without events for so long stands still.
_SILENT_S = 10.0


@dataclass
class NodeState:
    """What is known of one machine."""

    name: str
    address: str = ""
    interface: str = ""
    cores: int | None = None
    launch: str = ""
    has_left: bool = False
    sample: dict[str, float] = field(default_factory=dict)  # its load; see `LiveState._add_sample`


class Members:
    """Who takes part. Agents decide on a generation a moment before their ranks enter it."""

    def __init__(self) -> None:
        self.nodes: tuple[str, ...] = ()  # of the newest generation that an agent has announced
        self.ids: tuple[int, ...] = ()  # of the newest generation that a rank has entered
        self.changes: set[Ballot] = set()  # generations that began while a launch continued
        self._decided = NEVER
        self._entered = NEVER
        self._steps: dict[Ballot, int] = {}

    @property
    def generation(self) -> Ballot:
        return max(self._decided, self._entered)

    @property
    def are_decided(self) -> bool:
        """Whether the agents' list of nodes is at least as new as the ranks' own list."""
        return bool(self.nodes) and self._decided >= self._entered

    def add_decision(self, generation: Ballot, nodes: tuple[str, ...], step: int | None) -> None:
        if generation >= self._decided:
            self._decided, self.nodes = generation, nodes
        if step is not None:
            self._steps[generation] = step

    def add_entered(self, entered: Entered) -> None:
        if entered.generation >= self._entered:
            self._entered, self.ids = entered.generation, entered.ids
        self._steps.setdefault(entered.generation, entered.step)
        if not entered.is_first:
            self.changes.add(entered.generation)

    def step_at(self, generation: Ballot | None) -> int | None:
        return self._steps.get(generation) if generation is not None else None


class Supervision:
    """Whether the run is supervised, how its last launch ended, and whether any of its processes exists."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.started: Event = {}
        self.ended: Event | None = None
        self._pid: int | None = None  # the supervisor's number here, if it runs inside a node of a lab
        self._looked_at = -math.inf
        self.has_processes = True

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor's process exists on this machine."""
        if any(map(_is_shoal, (self.started.get("pid"), self._pid))):
            return True
        # Inside a node of a lab processes have other numbers than here. All processes are looked at, so not often.
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = time.monotonic()
            processes = find_processes(self._run.path)
            self.has_processes = bool(processes) or not _sees_processes_of(self._run)
            self._pid = next((one.pid for one in processes if one.part == SUPERVISOR), None)
        return self._pid is not None


class LiveState:
    """The state of a run, brought up to date by `poll`.

    `take_changes` returns what changed since the last call, `everything` the whole run.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.nodes: dict[str, NodeState] = {}
        self.members = Members()
        self.supervision = Supervision(run)
        self.time_line = TimeLine()
        self.series = RunSeries(self.time_line)
        self.files = RunTails(
            run, "agent", "rank", "samples", "supervisor", most_ranks=_MOST_RANKS, find_every_s=_FIND_FILES_S
        )
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.newest_launch: tuple[float, str] = (0.0, "")
        self.has_news = False  # since the last update
        self._documents = Documents()

    @property
    def is_dead(self) -> bool:
        """Whether a run of this machine stands still, because none of its processes exists any more."""
        supervision = self.supervision
        if supervision.ended is not None or not supervision.started:
            return False
        if supervision.is_alive or supervision.has_processes:
            return False
        settings = self.document(self.run.config).get("run")
        on = settings.get("on") if isinstance(settings, dict) else self.document(self.run.job).get("on")
        is_silent = self.last_time is not None and time.time() - self.last_time > _SILENT_S
        return str(on).startswith(("local", "lab")) and is_silent

    @property
    def is_behind(self) -> bool:
        """Whether a long run has not been read to its end yet."""
        return self.files.unread_bytes > 0

    def poll(self) -> None:
        """Read what was appended; a part of it, if that is long."""
        for file, events in self.files.poll_in_turns(self.series.last_step):
            self._add(file, events)
        self.series.limit_ranges()

    def document(self, path: Path) -> dict[str, Any]:
        """Return a small file of the folder; empty if it cannot be read."""
        return self._documents.read(path)

    def take_changes(self) -> dict[str, Any] | None:
        """Return what changed since the last call; None if a viewer needs everything."""
        changes, marks = self.series.take(self.is_behind), self.time_line.take()
        self.has_news = False
        return None if changes is None else {**changes, "marks": marks}

    def everything(self) -> dict[str, Any]:
        """Return what `take_changes` does for the whole run, for a viewer that connects; it takes nothing."""
        return {**self.series.everything(self.is_behind), "marks": self.time_line.everything()}

    def _add(self, file: EventFile, events: list[Event]) -> None:
        if not events:
            return
        self.has_news = True
        if file.kind == "samples":
            self._add_sample(self._node(file.node), events[-1])
            return
        for event in events:
            at = as_float(event.get("time"))
            if math.isfinite(at):
                self.first_time = at if self.first_time is None else min(at, self.first_time)
                self.last_time = at if self.last_time is None else max(at, self.last_time)
        if file.kind == "rank":
            rank = self.series.rank(file.rank)
            for event in events:
                self._add_rank_event(rank, event)
        elif file.kind == "agent":
            for event in events:
                self._add_agent_event(self._node(file.node), event)
        else:
            for event in events:
                self._add_supervisor_event(event)

    def _node(self, name: str) -> NodeState:
        return self.nodes.setdefault(name, NodeState(name))

    def _add_rank_event(self, rank: RankState, event: Event) -> None:
        match event["event"]:
            case "step":
                self.series.add_step(rank, event, self.is_behind)
            case "loss":
                self.series.add_world_loss(rank, event)
            case "start":
                rank.restart(event)
                if step := event["resumed_from"]:
                    self.time_line.add("start", ("resumed", step), event, f"the run goes on after step {step}", step)
            case "membership":
                self._add_membership(rank, event)
            case "lost":
                rank.is_lost = True
            case "eval":
                self.series.add_val_loss(rank, event)
            case "log":
                self.series.add_values(rank.rank, event["step"], logged_values(event))
            case "checkpoint" if is_step(step := event.get("step")):
                self.time_line.add("checkpoint", step, event, f"checkpoint of step {step}", step)
            case "choice":
                self.time_line.add("verdict", event["step"], event, f"from here on {event['why']}", event["step"])
            case "divergence":
                self._add_divergence(event)
            case "warning":
                text = f"{event['seen']} ({self.run.name_in(event['fix'])})"
                self.time_line.add("warning", event["seen"], event, text, _step(event))
            case "fault":
                self.time_line.add("fault", event["seen"], event, event["seen"], _step(event))
            case "doing":
                rank.doing = event["text"]
            case "end":
                rank.ended, rank.doing = str(event.get("status"))[:_LONGEST_NAME], ""

    def _add_membership(self, rank: RankState, event: Event) -> None:
        entered = read_entered(event)
        if entered is None:
            return
        rank.generation, rank.is_lost = entered.generation, False
        self.members.add_entered(entered)
        if not entered.is_first:
            text = f"generation {entered.generation}: {rank_names(sorted(entered.ids))}"
            self.time_line.add("members", entered.generation, event, text, entered.step, keep=True)

    def _add_divergence(self, event: Event) -> None:
        ids = event.get("ranks")
        names = rank_names([rank for rank in ids if is_step(rank)]) if isinstance(ids, list) and ids else "a rank"
        text = f"the replica of {names} differs"
        self.time_line.add("fault", ("divergence", event.get("step")), event, text, _step(event))

    def _add_agent_event(self, node: NodeState, event: Event) -> None:
        generation = read_ballot(event.get("generation") or event.get("id"))
        match event["event"]:
            case "ready":
                node.address, node.interface = clean_name(event.get("address")), clean_name(event["interface"])
                node.cores, node.launch, node.has_left = event["cores"], clean_name(event.get("launch")), False
                self.newest_launch = max(self.newest_launch, (as_float(event["time"], 0.0), node.launch))
            case "generation" if generation is not None:
                step = _step(event)
                self.members.add_decision(generation, tuple(event["members"]), step)
                if step is not None:
                    self.time_line.place("members", generation, step)
            case "announce":
                step = self.members.step_at(generation)
                self.time_line.add("members", generation or event["text"], event, event["text"], step)
            case "pause" | "abandon":
                self.time_line.add("members", event["text"], event, event["text"], None)
            case "ended" if event["code"] and not event["by_agent"]:
                how = "ran out of memory" if event["out_of_memory"] else f"ended with code {event['code']}"
                if event["code"] < 0 and not event["out_of_memory"]:
                    how = f"was killed by signal {-event['code']}"
                text = f"{event['name']} on {node.name} {how}"
                self.time_line.add("fault", (node.name, event["time"]), event, text, None)
            case "refused" | "state-lost":
                self.time_line.add("fault", event["seen"], event, event["seen"], None)
            case "left":
                node.has_left = True

    def _add_supervisor_event(self, event: Event) -> None:
        match event["event"]:
            case "supervising":
                self.supervision.started, self.supervision.ended = event, None
            case "ended":
                self.supervision.ended = event
                seen = str(event.get("seen") or "the run has failed")
                text = self.run.name_in(seen) if event["code"] else "the run has ended well"
                self.time_line.add("fault" if event["code"] else "end", ("end", event["time"]), event, text, None)
            case "note" if not self.time_line.has_text(event["text"]):
                self.time_line.add("note", event["text"], event, event["text"], None)

    def _add_sample(self, node: NodeState, event: Event) -> None:
        """Keep the newest numbers that were sampled of a node, under the names that they have there."""
        numbers = {clean_name(name): number for name, value in event.items() if (number := finite(value)) is not None}
        node.sample = dict(list(numbers.items())[:MOST_VALUES])


def _step(event: Event) -> int | None:
    step = event.get("step")
    return step if is_step(step) else None


def _sees_processes_of(run: RunFolder) -> bool:
    """Return whether this user would see the processes of the run: others' are seen by root only."""
    try:
        return os.geteuid() in (0, run.path.stat().st_uid)
    except OSError:
        return False


def _is_shoal(pid: Any) -> bool:
    """Return whether the process exists; a number that another program has got since does not count."""
    try:
        return is_step(pid) and b"shoal" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
