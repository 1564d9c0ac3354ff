"""`session.on_step`: functions of the program that follow a training while it runs.

They are called on the main rank, once for each step and in order, when the step is committed: then all ranks have done
it, its loss is that of all ranks, and no recovery repeats it. A step is committed in the next one, between the exchange
of gradients and that of statistics. So a rank that has the statistics knows that the main rank has reported the step;
until then it keeps what it knows of the step, to report it if it becomes the main rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.control.membership.types import Ballot
from shoal.engine.replica import Replica
from shoal.event_schema import LOG_FIELDS, STEP_FIELDS
from shoal.events import Event


@dataclass(frozen=True)
class StepRecord:
    """A step that all ranks have done. What only the lost main rank knew of it is None."""

    step: int
    loss: float  # The mean over all ranks.
    samples: int  # Of all ranks.
    seconds: float | None
    grad_norm: float | None
    lr: float | None  # Of the first group of the first optimizer, unless the program has recorded its own.
    values: Mapping[str, float]  # Of step.update(name=value), and of session.log after this step.
    run: Path  # The run folder.

    @property
    def samples_per_s(self) -> float | None:
        """The samples of all ranks by the seconds of the step."""
        return self.samples / self.seconds if self.seconds else None

    def scalars(self) -> dict[str, float]:
        """Return all that is known as numbers by the names that `shoal export` uses."""
        known = {"loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm, "step_s": self.seconds}
        known |= {"samples_per_s": self.samples_per_s, **self.values}
        return {name: value for name, value in known.items() if value is not None}


class StepCallbacks:
    """The functions of the program, and the steps that they have not been called for as far as this rank knows."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.functions: list[Callable[[StepRecord], object]] = []
        self._events: dict[int, Event] = {}  # What this rank recorded of its steps, with the values logged after them.
        self._committed: deque[Event] = deque()  # The main rank may be lost before it reports them.
        self._committed_step = 0  # Values that are logged for it later reach the report, and no function.
        self._generation: Ballot | None = None

    def watch(self, replica: Replica) -> None:
        """Receive what this rank records from now on."""
        show = replica.recorder.on_event

        def on_event(event: Event) -> None:
            show(event)
            self._note(event, replica)

        replica.recorder.on_event = on_event

    def begin_step(self, replica: Replica) -> None:
        """Report what a lost main rank has not reported; forget what the present one has reported.

        That was before an exchange that has succeeded since; only the first step of a generation comes without one.
        """
        if replica.world.is_main:
            self._report(replica)
        elif self._generation == replica.world.generation:
            while self._committed:
                replica.periodic.reported_step = max(replica.periodic.reported_step, self._committed.popleft()["step"])
        self._generation = replica.world.generation

    def _note(self, event: Event, replica: Replica) -> None:
        match event["event"]:
            case "step":
                self._events[event["step"]] = dict(event)
            case "log" if event["step"] > self._committed_step:
                values = {name: value for name, value in event.items() if name not in LOG_FIELDS}
                self._events.setdefault(event["step"], {}).update(values)
            case "commit":
                self._committed_step = event["step"]
                self._committed.append({**event, "known": self._events.pop(event["step"], {})})
                if replica.world.is_main:
                    self._report(replica)

    def _report(self, replica: Replica) -> None:
        while self._committed:
            record = self._committed.popleft()
            if record["step"] > replica.periodic.reported_step:
                replica.periodic.reported_step = record["step"]
                for function in self.functions:
                    function(self._describe(record, record["known"]))

    def _describe(self, record: Event, event: Event) -> StepRecord:
        first, end = record["samples"]
        known: dict[str, Any] = {name: event.get(name) for name in ("grad_norm", "lr")}
        values = {name: value for name, value in event.items() if name not in STEP_FIELDS and name != "lr"}
        seconds = event.get("step_s")
        return StepRecord(record["step"], record["loss"], end - first, seconds, **known, values=values, run=self._run)
