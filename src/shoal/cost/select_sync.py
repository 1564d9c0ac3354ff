"""Which way to synchronise: from the time that a step takes, or would take, in each of them.

A plan knows these times by a profile, and a run by its own first steps; both choose among the same ways, by the same
rule. Ways are tried from the plainest on, and one that costs accuracy must be worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import SyncChoice, parse_choice, parse_wire
from shoal.cost.buckets import Lever
from shoal.cost.machines import cpu_encode_s
from shoal.cost.memory import copied_bytes
from shoal.cost.model_size import grad_bytes
from shoal.units import format_duration

# SECTION cost/first_steps
# What the first steps of a run say of all others: how long one takes, and how much of that is the exchange.


# DDP arranges its buckets after the first step, and caches fill in the second.
WARM_UP_STEPS = 2
_MEASURED_STEPS = 4
# Over a slow link a single step may take a minute, and tells enough.
_BUDGET_S = 30.0


@dataclass(frozen=True)
class RankStep:
    """One step of DDP on one rank. For `exposed_s` it stood still for the exchange, which was under way for
    `allreduce_s` in all, for `wait_s` because another rank was late."""

    step_s: float
    exposed_s: float
    wait_s: float
    allreduce_s: float

    @property
    def own_s(self) -> float:
        return self.step_s - self.exposed_s - self.wait_s


@dataclass(frozen=True)
class FirstSteps:
    """A typical one of them, on the rank that everybody waits for. `own_s` is what a rank takes at most that waits
    for nobody: its good steps and its bad ones even out."""

    step_s: float
    exposed_s: float
    allreduce_s: float
    own_s: float


def is_enough(steps: Sequence[Sequence[RankStep]]) -> bool:
    """Whether these steps of all ranks, warm-up aside, tell what one takes."""
    return len(steps) >= _MEASURED_STEPS or sum(slowest(ranks).step_s for ranks in steps) > _BUDGET_S


def slowest(ranks: Sequence[RankStep]) -> RankStep:
    """Whoever waited least was waited for, and saw nothing but the exchange."""
    return min(ranks, key=lambda rank: rank.wait_s)


def typical(steps: Sequence[Sequence[RankStep]]) -> FirstSteps:
    def middle(of: Callable[[RankStep], float]) -> float:
        return median(of(slowest(ranks)) for ranks in steps)

    step_s, exposed_s = middle(lambda rank: rank.step_s), middle(lambda rank: rank.exposed_s)
    own_s = max(median(step.own_s for step in rank) for rank in zip(*steps, strict=True))
    return FirstSteps(step_s, exposed_s, middle(lambda rank: rank.allreduce_s), min(own_s, step_s - exposed_s))


# What a coarser wire format must gain over a finer one, and outer steps over gradients in every step.
FORMAT_GAIN, OUTER_GAIN = 1.03, 1.10
# Outer steps learn from the difference between rounds; less than two of them are no such training.
LEAST_ROUNDS = 2
WIRES = ("fp32", "fp16", "int8")


@dataclass(frozen=True)
class SyncOption:
    choice: SyncChoice
    step_s: float


@dataclass(frozen=True)
class MeasuredExchange:
    """What was exchanged in the measured steps: gradients of these `shapes`, by `choice`. `last_bytes` is what was sent
    behind them, where the two parts of the embedding's gradient went apart (`sync/tied.py`)."""

    choice: SyncChoice
    shapes: tuple[tuple[int, ...], ...]
    threads: int = 1
    last_bytes: int = 0

    @property
    def last(self) -> float:
        """The part that nothing hides, because it is ready only when backward ends: the embedding, which is the first
        of the shapes, or its rows."""
        if self.last_bytes:
            return self.last_bytes / grad_bytes(self.shapes, self.choice.wire)
        return math.prod(self.shapes[0]) / self.parameters

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    def bytes_as(self, choice: SyncChoice) -> float:
        """Against what was sent."""
        return grad_bytes(self.shapes, choice.wire) / grad_bytes(self.shapes, self.choice.wire)

    def encode_s(self, choice: SyncChoice) -> float:
        return cpu_encode_s(as_lever(choice), self.parameters, self.threads)

    def extra_bytes(self, choice: SyncChoice) -> int:
        """Of memory, beside what exact DDP needs."""
        return copied_bytes(as_lever(choice)) * self.parameters


@dataclass(frozen=True)
class SyncLimits:
    """What can be chosen: these formats, in a training of so many `steps`, with so much memory left on every rank."""

    wires: Sequence[str]
    steps: int
    spare_bytes: float = math.inf


@dataclass(frozen=True)
class SyncDecision:
    """`step_s` is what is expected of a step from now on; `agrees` with the plan, where there was one."""

    choice: SyncChoice
    step_s: float
    why: str
    agrees: bool | None


def decide(measured: FirstSteps, exchanged: MeasuredExchange, sync: SyncConfig, limits: SyncLimits) -> SyncDecision:
    """`sync` is what was asked for."""
    choices = candidates(sync, limits.wires, limits.steps)
    fitting = [each for each in choices if exchanged.extra_bytes(each) <= limits.spare_bytes]
    options = [expected(measured, exchanged, sync, choice) for choice in fitting or [exchanged.choice]]
    best = pick(options)
    why = say_why(best, options, SyncOption(exchanged.choice, measured.step_s), measured.exposed_s)
    if sync.planned is None:
        return SyncDecision(best.choice, best.step_s, why, None)
    planned = parse_choice(sync.planned)
    agrees = planned == best.choice
    said = "as planned" if agrees else f"the plan had chosen {planned}{_at(sync.planned_step_s)}: measurement disagrees"
    return SyncDecision(best.choice, best.step_s, f"{why}; {said}", agrees)


def candidates(sync: SyncConfig, wires: Sequence[str], steps: int) -> Iterator[SyncChoice]:
    """From the plainest on. A wire format that somebody asked for is the only one. Parameters travel in fp16 where that
    is open: an outer step is no more exact than that."""
    allowed = wires if sync.wire == "fp32" else [sync.wire]
    yield from (SyncChoice("ddp", wire) for wire in allowed)
    wire = next((wire for wire in allowed if wire != "fp32"), "fp32")
    outer = [SyncChoice("diloco", wire, sync.every_in("diloco"))]
    outer += [SyncChoice("streaming", wire, sync.every_in("streaming"))] if sync.can_stream else []
    yield from (choice for choice in outer if steps >= LEAST_ROUNDS * choice.every)


def as_lever(choice: SyncChoice) -> Lever:
    wire = parse_wire(choice.wire)
    return Lever(sync=choice.mode, wire=wire.name, rank=wire.rank, every=choice.every)


def pick(options: Sequence[SyncOption]) -> SyncOption:
    """Options come from the plainest on; the first one needs no reason."""
    best = options[0]
    for option in options[1:]:
        gain = OUTER_GAIN if option.choice.is_outer and not best.choice.is_outer else FORMAT_GAIN
        if option.step_s * gain < best.step_s:
            best = option
    return best


def expected(measured: FirstSteps, exchanged: MeasuredExchange, sync: SyncConfig, choice: SyncChoice) -> SyncOption:
    """The measured step with another exchange. How long that is under way is in proportion to its bytes."""
    under_way_s = exchanged.bytes_as(choice) * measured.allreduce_s
    encode_s = exchanged.encode_s(choice)
    encoded_s = exchanged.encode_s(exchanged.choice)
    if not choice.is_outer:
        together_s = measured.step_s - measured.exposed_s - encoded_s
        return SyncOption(choice, together_s + encode_s + _shown_s(measured, exchanged.last, under_way_s))
    alone_s, chosen = measured.own_s - encoded_s, sync.settled(choice)
    in_time_s = chosen.fragments * chosen.overlap_steps * alone_s if choice.mode == "streaming" else 0.0
    return SyncOption(choice, alone_s + (encode_s + max(0.0, under_way_s - in_time_s)) / choice.every)


def say_why(best: SyncOption, options: Sequence[SyncOption], base: SyncOption, exposed_s: float | None = None) -> str:
    """One sentence: what was chosen, and by which times. `base` is what others are compared with."""
    shows = "" if exposed_s is None else f", {format_duration(exposed_s)} of it the exchange"
    takes = f"a step takes {format_duration(base.step_s)}"
    if best.choice == base.choice:
        return f"{best.choice}: {takes}{shows}, and {_next_best(best, options)}"
    gain = f"{format_duration(best.step_s)} is expected, {base.step_s / best.step_s:.2g}× as fast"
    said = f"{best.choice}: {takes} with {base.choice}{shows}; {gain}"
    exact = pick([option for option in options if not option.choice.is_outer])
    if not best.choice.is_outer or exact.choice == base.choice:
        return said
    return f"{said} (with {exact.choice} {format_duration(exact.step_s)})"


def _shown_s(measured: FirstSteps, last: float, under_way_s: float) -> float:
    """Backward hides as many seconds of a shorter exchange as of the measured one, but never what is ready last."""
    shown_s = measured.exposed_s + under_way_s - measured.allreduce_s
    if under_way_s >= measured.allreduce_s:
        return shown_s
    in_proportion_s = measured.exposed_s * under_way_s / measured.allreduce_s
    return min(in_proportion_s, max(shown_s, last * under_way_s))


def _next_best(best: SyncOption, options: Sequence[SyncOption]) -> str:
    others = [option for option in options if option.choice != best.choice]
    if not others:
        return "nothing else can be chosen here"
    other = min(others, key=lambda option: option.step_s)
    return f"no other way gains enough: {other.choice} would take {format_duration(other.step_s)}"


def _at(step_s: float | None) -> str:
    return "" if step_s is None else f" with {format_duration(step_s)} a step"
