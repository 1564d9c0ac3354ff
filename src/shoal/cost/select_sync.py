"""Select a sync method and wire format from the step times of all candidates.

A plan predicts these times from a profile, a run from its own first steps; both use the same candidates and the same
rule. Candidates are ordered from the plainest on, and one that costs accuracy must be worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import AUTO_WIRES, SYNC_METHODS, WIRE_FORMATS, SyncChoice, parse_choice
from shoal.cost.memory import copied_bytes
from shoal.cost.model_size import grad_bytes
from shoal.cost.strategy import cpu_encode_s, strategy_of_choice
from shoal.units import format_duration

# How many times as fast an option must be than a plainer one: below this a gain cannot be told from noise.
LEAST_GAIN = 1.03
# The same for an option that changes what is learned, such as outer steps instead of gradients in every step.
LEAST_GAIN_OTHER_TRAINING = 1.1

# DDP rebuilds its buckets after the first step, and caches fill in the second.
WARM_UP_STEPS = 2
_MEASURED_STEPS = 4
# Over a slow link a single step may take a minute, and is enough.
_BUDGET_S = 30.0
# Outer steps learn from the difference between rounds, so fewer than two rounds are useless.
LEAST_ROUNDS = 2


# What the first steps measured


@dataclass(frozen=True)
class RankStep:
    """One step of DDP on one rank."""

    step_s: float
    exposed_s: float  # for which it waited for the exchange
    wait_s: float  # for which it waited for a later rank
    allreduce_s: float  # of the whole exchange, hidden or not

    @property
    def own_s(self) -> float:
        return self.step_s - self.exposed_s - self.wait_s


@dataclass(frozen=True)
class FirstSteps:
    """A typical step, on the slowest rank."""

    step_s: float
    exposed_s: float
    allreduce_s: float
    own_s: float  # of the slowest rank without any waiting: its fast and slow steps even out


def is_enough(steps: Sequence[Sequence[RankStep]]) -> bool:
    """Return whether these steps of all ranks, after the warm-up, are enough to decide."""
    return len(steps) >= _MEASURED_STEPS or sum(slowest(ranks).step_s for ranks in steps) > _BUDGET_S


def slowest(ranks: Sequence[RankStep]) -> RankStep:
    """Return the step of the rank that waited least: the others waited for it."""
    return min(ranks, key=lambda rank: rank.wait_s)


def typical_step(steps: Sequence[Sequence[RankStep]]) -> FirstSteps:
    def middle(value: Callable[[RankStep], float]) -> float:
        return median(value(slowest(ranks)) for ranks in steps)

    step_s, exposed_s = middle(lambda rank: rank.step_s), middle(lambda rank: rank.exposed_s)
    own_s = max(median(step.own_s for step in rank) for rank in zip(*steps, strict=True))
    return FirstSteps(step_s, exposed_s, middle(lambda rank: rank.allreduce_s), min(own_s, step_s - exposed_s))


@dataclass(frozen=True)
class MeasuredExchange:
    """What was exchanged in the measured steps."""

    choice: SyncChoice
    shapes: tuple[tuple[int, ...], ...]  # of the gradients
    threads: int = 1
    last_bytes: int = 0  # sent behind all gradients, where the embedding's gradient was sent in two parts

    @property
    def last(self) -> float:
        """The fraction that nothing hides, because it is ready only when backward ends: the embedding, which is the
        first of the shapes, or its rows."""
        if self.last_bytes:
            return self.last_bytes / grad_bytes(self.shapes, self.choice.wire)
        return math.prod(self.shapes[0]) / self.parameters

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    def bytes_as(self, choice: SyncChoice) -> float:
        """Return the bytes of a choice relative to those that were sent."""
        return grad_bytes(self.shapes, choice.wire) / grad_bytes(self.shapes, self.choice.wire)

    def encode_s(self, choice: SyncChoice) -> float:
        return cpu_encode_s(strategy_of_choice(choice), self.parameters, self.threads)

    def extra_bytes(self, choice: SyncChoice) -> int:
        """Return the memory that a choice needs in addition to exact DDP."""
        return copied_bytes(strategy_of_choice(choice)) * self.parameters


# The decision


@dataclass(frozen=True)
class SyncOption:
    choice: SyncChoice
    step_s: float


@dataclass(frozen=True)
class SyncLimits:
    wires: Sequence[str]  # that can be chosen
    steps: int  # of the training
    spare_bytes: float = math.inf  # memory left on every rank


@dataclass(frozen=True)
class SyncDecision:
    choice: SyncChoice
    step_s: float  # expected from now on
    why: str
    agrees: bool | None  # with the plan; None without one


def decide(measured: FirstSteps, exchanged: MeasuredExchange, sync: SyncConfig, limits: SyncLimits) -> SyncDecision:
    """Choose by the measured steps; `sync` are the configured settings."""
    choices = candidates(sync, limits.wires, limits.steps)
    fitting = [choice for choice in choices if exchanged.extra_bytes(choice) <= limits.spare_bytes]
    options = [expected_option(measured, exchanged, sync, choice) for choice in fitting or [exchanged.choice]]
    best = pick(options)
    why = explain_choice(best, options, SyncOption(exchanged.choice, measured.step_s), measured.exposed_s)
    if sync.planned is None:
        return SyncDecision(best.choice, best.step_s, why, None)
    planned = parse_choice(sync.planned)
    if planned == best.choice:
        return SyncDecision(best.choice, best.step_s, f"{why}; as planned", True)
    step = "" if sync.planned_step_s is None else f" with {format_duration(sync.planned_step_s)} a step"
    why += f"; the plan had chosen {planned}{step}: measurement disagrees"
    return SyncDecision(best.choice, best.step_s, why, False)


def allowed_wires(is_in_memory: bool, is_gloo: bool) -> Sequence[str]:
    """Return the wire formats that `--sync auto` may choose. Everything exchanged through the memory of one machine is
    fp32. Some formats need gloo: between GPUs that NCCL connects, they would leave the faster way."""
    if is_in_memory:
        return ("fp32",)
    return [name for name in AUTO_WIRES if is_gloo or not WIRE_FORMATS[name].needs_gloo]


def candidates(sync: SyncConfig, wires: Sequence[str], steps: int) -> Iterator[SyncChoice]:
    """Yield the choices from the plainest on. A configured wire format is the only one. Parameters are sent in fp16
    where that is allowed: an outer step is no more exact than that."""
    allowed = wires if sync.wire == "fp32" else [sync.wire]
    yield from (SyncChoice("ddp", wire) for wire in allowed)
    wire = next((wire for wire in allowed if wire != "fp32"), "fp32")
    for mode, method in SYNC_METHODS.items():
        every = sync.every_in(mode)
        if method.in_auto and (mode != "streaming" or sync.can_stream) and steps >= LEAST_ROUNDS * every:
            yield SyncChoice(mode, wire, every)


def pick(options: Sequence[SyncOption]) -> SyncOption:
    """Return the plainest option that no later one beats by enough; options are ordered from the plainest on."""
    best = options[0]
    for option in options[1:]:
        is_other_training = option.choice.is_outer and not best.choice.is_outer
        if option.step_s * (LEAST_GAIN_OTHER_TRAINING if is_other_training else LEAST_GAIN) < best.step_s:
            best = option
    return best


def expected_option(
    measured: FirstSteps, exchanged: MeasuredExchange, sync: SyncConfig, choice: SyncChoice
) -> SyncOption:
    """Return the measured step with another exchange, whose time is in proportion to its bytes."""
    exchange_s = exchanged.bytes_as(choice) * measured.allreduce_s
    encode_s = exchanged.encode_s(choice)
    encoded_s = exchanged.encode_s(exchanged.choice)
    if not choice.is_outer:
        together_s = measured.step_s - measured.exposed_s - encoded_s
        return SyncOption(choice, together_s + encode_s + _exposed_s(measured, exchanged.last, exchange_s))
    alone_s, chosen = measured.own_s - encoded_s, sync.with_choice(choice)
    hidden_s = chosen.fragments * chosen.overlap_steps * alone_s if choice.mode == "streaming" else 0.0
    return SyncOption(choice, alone_s + (encode_s + max(0.0, exchange_s - hidden_s)) / choice.every)


def _exposed_s(measured: FirstSteps, last: float, exchange_s: float) -> float:
    """Backward hides as many seconds of a shorter exchange as of the measured one, but never the last fraction."""
    shown_s = measured.exposed_s + exchange_s - measured.allreduce_s
    if exchange_s >= measured.allreduce_s:
        return shown_s
    in_proportion_s = measured.exposed_s * exchange_s / measured.allreduce_s
    return min(in_proportion_s, max(shown_s, last * exchange_s))


def explain_choice(
    best: SyncOption, options: Sequence[SyncOption], base: SyncOption, exposed_s: float | None = None
) -> str:
    """Return one sentence: what was chosen, and by which times. `base` is what others are compared with."""
    shows = "" if exposed_s is None else f", {format_duration(exposed_s)} of it the exchange"
    takes = f"a step takes {format_duration(base.step_s)}"
    if best.choice == base.choice:
        others = [option for option in options if option.choice != best.choice]
        if not others:
            return f"{best.choice}: {takes}{shows}, and nothing else can be chosen here"
        other = min(others, key=lambda option: option.step_s)
        slower = f"no other way gains enough: {other.choice} would take {format_duration(other.step_s)}"
        return f"{best.choice}: {takes}{shows}, and {slower}"
    gain = f"{format_duration(best.step_s)} is expected, {base.step_s / best.step_s:.2g}× as fast"
    sentence = f"{best.choice}: {takes} with {base.choice}{shows}; {gain}"
    exact = pick([option for option in options if not option.choice.is_outer])
    if not best.choice.is_outer or exact.choice == base.choice:
        return sentence
    return f"{sentence} (with {exact.choice} {format_duration(exact.step_s)})"
