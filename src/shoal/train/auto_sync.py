"""`--sync auto`: the first steps exchange gradients and are measured; then all ranks choose how to go on, once a run.

A run that is resumed goes on with the choice it made, by its own events: at the same step as before, so that it is the
same training to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
import torch

from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import CHOICE_MODES, WIRE_FORMATS, SyncChoice, choice_in, parse_choice
from shoal.cost.select_sync import (
    WARM_UP_STEPS,
    FirstSteps,
    MeasuredExchange,
    RankStep,
    SyncDecision,
    SyncLimits,
    allowed_wires,
    decide,
    is_enough,
    typical_step,
)
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder
from shoal.sync.replicas import gather
from shoal.sync.world import World, barrier
from shoal.train.trainer import Trainer, change_exchanges, describe_exchanges, shapes_of

# Ranks tell each other whole numbers.
_PER_S = 1e9


@dataclass(frozen=True)
class PastChoice:
    """A choice of an earlier life of this run, and the step after which it was made; `said` is what this rank wrote of
    it then, if it did."""

    choice: SyncChoice
    step: int
    said: Event


class SyncChooser:
    """`asked` are the settings of the run; of other modes than `auto` there is nothing to choose."""

    def __init__(self, trainer: Trainer, asked: SyncConfig, made: PastChoice | None = None) -> None:
        self._trainer = trainer
        self._asked = asked
        self._made = made
        self._is_open = asked.mode == "auto"
        self._chosen: SyncChoice | None = None
        self._look_anew()

    def begin_anew(self) -> None:
        """As in a run that has just begun: its state is lost."""
        self._is_open, self._chosen, self._made = self._asked.mode == "auto", None, None
        self._look_anew()

    @property
    def begun(self) -> SyncConfig:
        """How the first steps exchange."""
        return self._asked.begun

    def _look_anew(self) -> None:
        self._to_come = WARM_UP_STEPS
        self._seen: list[list[RankStep]] = []

    def tell(self) -> tuple[int, ...]:
        """For a rank that comes later: whether a choice was made, and which."""
        return (0, 0, 0, 0) if self._chosen is None else (1, *_as_numbers(self._chosen))

    def foresee(self, told: Sequence[int]) -> SyncConfig:
        """The settings that `follow` would return; changes nothing."""
        return self._asked.settled(_as_choice(told[1:])) if told[0] else self._asked.begun

    def follow(self, told: Sequence[int]) -> SyncConfig:
        """In a new world: what the others have chosen; or all look again, since its steps take another time."""
        if told[0]:
            self._is_open, self._chosen = False, _as_choice(told[1:])
        else:
            self._is_open, self._chosen, self._made = self._asked.mode == "auto", None, None
            self._look_anew()
        return self.foresee(told)

    def recall(self, run: RunFolder) -> None:
        """What an earlier life of this run has chosen; asked of all ranks."""
        if self._is_open:
            self._made = find_made(run, self._trainer.world)

    def resume_at(self, step: int, parted: bool) -> None:
        """Before the state of that step is loaded; `parted`: it is one of replicas that have moments of their own."""
        made = self._made
        if self._is_open and made is not None and (parted or (step >= made.step and not made.choice.is_outer)):
            self._go_over(made.choice)

    def after_step(self) -> None:
        """On every rank, between two steps of which the second is still to come."""
        if not self._is_open:
            return
        if self._made is None:
            self._look()
        elif self._trainer.progress.step >= self._made.step:
            self._go_over(self._made.choice)
            trainer = self._trainer
            self._say({**self._made.said, **describe_exchanges(trainer), "step": trainer.progress.step})

    def _look(self) -> None:
        if self._to_come:
            self._to_come -= 1
            return
        self._seen.append(_everybodys(self._trainer))
        if is_enough(self._seen):
            self._choose(typical_step(self._seen))

    def _choose(self, measured: FirstSteps) -> None:
        trainer = self._trainer
        # Machines differ in what they have, and all must choose alike.
        threads, spare_bytes = map(min, zip(*gather(trainer.world, _resources(trainer.world)), strict=True))
        begun, shapes = trainer.config.sync.foreseen, shapes_of(trainer.model)
        exchanged = MeasuredExchange(begun, shapes, threads, trainer.sync.extra_bytes)
        open_to = SyncLimits(_wires(trainer.world, trainer.sync.inside.way), trainer.config.train.steps, spare_bytes)
        decision = decide(measured, exchanged, self._asked, open_to)
        self._go_over(decision.choice)
        self._say(_describe(trainer, decision, measured, self._asked))

    def _say(self, fields: Event) -> None:
        self._trainer.recorder.event("choice", **fields)

    def _go_over(self, choice: SyncChoice) -> None:
        self._is_open, self._chosen = False, choice
        # Everybody has done the last step then, and nobody needs its exchange any more.
        barrier(self._trainer.world)
        self._trainer.recorder.commit()
        if (sync := self._asked.settled(choice)) != self._trainer.config.sync:
            change_exchanges(self._trainer, sync)


def find_made(run: RunFolder, world: World) -> PastChoice | None:
    """By the events of the first rank that has any of it: every rank writes the choice down."""
    mine = _last_choice(run.events(world.rank))
    choice = choice_in(mine)
    numbers = [0] * 5 if choice is None else [1, int(mine.get("step", 0)), *_as_numbers(choice)]
    found = [rest for known, *rest in gather(world, numbers) if known]
    if not found:
        return None
    step, chosen = found[0][0], _as_choice(found[0][1:])
    said = {name: value for name, value in mine.items() if name not in ("event", "rank", "time")}
    return PastChoice(chosen, step, {"why": f"{chosen}: as before", **said})


def _everybodys(trainer: Trainer) -> list[RankStep]:
    times = trainer.times
    mine = RankStep(times["step"], times.get("exposed", 0.0), times.get("wait", 0.0), times.get("allreduce", 0.0))
    told = gather(trainer.world, [round(_PER_S * seconds) for seconds in astuple(mine)])
    return [RankStep(*(number / _PER_S for number in numbers)) for numbers in told]


def _resources(world: World) -> list[int]:
    """Threads and bytes of memory that a rank of this machine has."""
    return [torch.get_num_threads(), psutil.virtual_memory().available // world.local_size]


def _wires(world: World, inside: str) -> Sequence[str]:
    return allowed_wires(inside != "gloo" and world.local_size == world.size, world.device.type == "cpu")


def _describe(trainer: Trainer, decision: SyncDecision, measured: FirstSteps, asked: SyncConfig) -> dict[str, object]:
    return {
        "step": trainer.progress.step,
        **describe_exchanges(trainer),
        "why": decision.why,
        "planned": str(parse_choice(asked.planned)) if asked.planned else None,
        "agrees": decision.agrees,
        "expected_step_s": round(decision.step_s, 7),
        "measured_step_s": round(measured.step_s, 7),
        "measured_exposed_s": round(measured.exposed_s, 7),
        "measured_own_s": round(measured.own_s, 7),
        "measured_allreduce_s": round(measured.allreduce_s, 7),
    }


def _last_choice(events: Path) -> Event:
    try:
        made = [event for event in read_events(events) if event["event"] == "choice"]
    except OSError:
        return {}
    return made[-1] if made else {}


def _as_numbers(choice: SyncChoice) -> list[int]:
    return [CHOICE_MODES.index(choice.mode), list(WIRE_FORMATS).index(choice.wire), choice.every]


def _as_choice(numbers: Sequence[int]) -> SyncChoice:
    mode, wire, every = numbers
    return SyncChoice(CHOICE_MODES[mode], list(WIRE_FORMATS)[wire], every)
