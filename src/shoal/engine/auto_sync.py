"""`--sync auto`: measure the first steps, which exchange gradients; then all ranks choose a sync mode, once per run.

A resumed run repeats the choice of its own events at the same step, so that it is the same training to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import CHOICE_MODES, WIRE_FORMATS, SyncChoice, choice_of_event, parse_choice
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
from shoal.engine.exchanges import describe_exchanges, shapes_of
from shoal.engine.recorder import last_event
from shoal.engine.replica import Replica
from shoal.engine.step import DoneStep
from shoal.events import Event
from shoal.host.memory import available_bytes
from shoal.run_folder import RunFolder
from shoal.sync.replicas import gather_integers
from shoal.sync.world import World, barrier

# Ranks exchange whole numbers: times in nanoseconds.
_NS_PER_S = 1e9
# Fields of `FirstSteps` in the `choice` event.
_MEASURED = ("step_s", "exposed_s", "own_s", "allreduce_s")


@dataclass(frozen=True)
class PastChoice:
    """The choice of an earlier launch of this run."""

    choice: SyncChoice
    step: int  # The step after which it was made.
    fields: Event  # The fields of this rank's `choice` event, if it wrote one.


class SyncChooser:
    """Chooses the sync mode, if the run's setting is `auto`."""

    def __init__(self, replica: Replica, requested: SyncConfig) -> None:
        self._replica = replica
        self._requested = requested
        self.reset()

    def reset(self) -> None:
        """Start as in a new run, and measure again."""
        self.is_open = self._requested.mode == "auto"  # no choice was made yet
        self._choice: SyncChoice | None = None
        self._past: PastChoice | None = None
        self._warm_up_left = WARM_UP_STEPS
        self._measured: list[list[RankStep]] = []

    @property
    def initial_sync(self) -> SyncConfig:
        """The sync mode of the first steps."""
        return self._requested.first_settings

    def as_numbers(self) -> tuple[int, ...]:
        """Return for a joining rank whether a choice was made, and which."""
        return (0, 0, 0, 0) if self._choice is None else (1, *_as_numbers(self._choice))

    def preview(self, numbers: Sequence[int]) -> SyncConfig:
        """Return the settings that `adopt` would return; change nothing."""
        return self._requested.with_choice(_as_choice(numbers[1:])) if numbers[0] else self._requested.first_settings

    def adopt(self, numbers: Sequence[int]) -> SyncConfig:
        """Take over the choice of a new world's ranks. Without one measure again, since step times change."""
        if numbers[0]:
            self.is_open, self._choice = False, _as_choice(numbers[1:])
        else:
            self.reset()
        return self.preview(numbers)

    def recall(self, run: RunFolder) -> None:
        """Read the choice of an earlier launch. All ranks must call it."""
        if self.is_open:
            self._past = _find_past_choice(run, self._replica.world)

    def resume_at(self, step: int, has_own_moments: bool) -> None:
        """Repeat a past choice, if needed, before the state of `step` is loaded.

        `has_own_moments`: the checkpoint is of replicas with moments of their own.
        """
        past = self._past
        if self.is_open and past is not None and (has_own_moments or (step >= past.step and not past.choice.is_outer)):
            self._switch_to(past.choice)

    def after_step(self, done: DoneStep) -> None:
        """Measure the last step, and choose after enough of them."""
        if not self.is_open:
            return
        replica = self._replica
        if self._past is not None:
            if replica.progress.step >= self._past.step:
                self._switch_to(self._past.choice)
                fields = {
                    **self._past.fields,
                    **describe_exchanges(replica.config.sync, replica.exchanges, replica.state),
                    "step": replica.progress.step,
                }
                replica.recorder.event("choice", **fields)
        elif self._warm_up_left:
            self._warm_up_left -= 1
        else:
            self._measured.append(_gather_times(replica.world, done.times))
            if is_enough(self._measured):
                self._choose(typical_step(self._measured))

    def _choose(self, measured: FirstSteps) -> None:
        replica = self._replica
        # The resources of machines differ, and all must choose the same.
        threads, spare_bytes = map(min, zip(*gather_integers(replica.world, _resources(replica.world)), strict=True))
        begun, shapes = replica.config.sync.expected_choice, shapes_of(replica.state)
        exchanged = MeasuredExchange(begun, shapes, threads, replica.sync.extra_bytes)
        limits = SyncLimits(_wires(replica.world, replica.sync.inside.way), replica.config.train.steps, spare_bytes)
        decision = decide(measured, exchanged, self._requested, limits)
        self._switch_to(decision.choice)
        replica.recorder.event("choice", **_describe(replica, decision, measured, self._requested))

    def _switch_to(self, choice: SyncChoice) -> None:
        self.is_open, self._choice = False, choice
        # After the barrier all ranks have done the last step, and none needs its exchange any more.
        barrier(self._replica.world)
        self._replica.recorder.commit()
        if (sync := self._requested.with_choice(choice)) != self._replica.config.sync:
            self._replica.change_sync(sync)


def _find_past_choice(run: RunFolder, world: World) -> PastChoice | None:
    """Return the choice in the events of the first rank that has one: every rank records it."""
    event = last_event(run.events(world.rank), "choice")
    choice = choice_of_event(event)
    numbers = [0] * 5 if choice is None else [1, int(event.get("step", 0)), *_as_numbers(choice)]
    choices = [rest for has_choice, *rest in gather_integers(world, numbers) if has_choice]
    if not choices:
        return None
    step, chosen = choices[0][0], _as_choice(choices[0][1:])
    fields = {name: value for name, value in event.items() if name not in ("event", "rank", "time")}
    return PastChoice(chosen, step, {"why": f"{chosen}: as before", **fields})


def _gather_times(world: World, times: dict[str, float]) -> list[RankStep]:
    own = RankStep(times["step"], times.get("exposed", 0.0), times.get("wait", 0.0), times.get("allreduce", 0.0))
    rows = gather_integers(world, [round(_NS_PER_S * seconds) for seconds in astuple(own)])
    return [RankStep(*(number / _NS_PER_S for number in row)) for row in rows]


def _resources(world: World) -> list[int]:
    """Return the threads and the bytes of free memory of a rank of this machine."""
    return [torch.get_num_threads(), available_bytes() // world.local_size]


def _wires(world: World, inside: str) -> Sequence[str]:
    """Return the formats to choose from: fp32 alone through shared memory, and some formats not with NCCL."""
    return allowed_wires(inside != "gloo" and world.local_size == world.size, world.gpu_group is None)


def _describe(
    replica: Replica, decision: SyncDecision, measured: FirstSteps, requested: SyncConfig
) -> dict[str, object]:
    return {
        "step": replica.progress.step,
        **describe_exchanges(replica.config.sync, replica.exchanges, replica.state),
        "why": decision.why,
        "planned": str(parse_choice(requested.planned)) if requested.planned else None,
        "agrees": decision.agrees,
        "expected_step_s": round(decision.step_s, 7),
        **{f"measured_{name}": round(getattr(measured, name), 7) for name in _MEASURED},
    }


def _as_numbers(choice: SyncChoice) -> list[int]:
    return [CHOICE_MODES.index(choice.mode), list(WIRE_FORMATS).index(choice.wire), choice.every]


def _as_choice(numbers: Sequence[int]) -> SyncChoice:
    mode, wire, every = numbers
    return SyncChoice(CHOICE_MODES[mode], list(WIRE_FORMATS)[wire], every)
