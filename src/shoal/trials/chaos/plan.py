"""When what is done: a scenario's actions as single injections, and the random ones of a soak. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.trials.chaos.actions import (
    Action,
    AnyAction,
    Cut,
    Flap,
    Freeze,
    FreezeRank,
    Heal,
    KillNode,
    KillRank,
    PowerOn,
    SetLink,
    Thaw,
    ThawRank,
)


@dataclass(frozen=True)
class Injection:
    """One thing to do, at a moment that is fixed: `extra_s` is the part of it that was drawn."""

    action: Action
    extra_s: float = 0.0


def plan_injections(steps: Sequence[Action], seed: int, number: int) -> list[Injection]:
    """The same seed and number of a run give the same moments again."""
    draw = random.Random(f"{seed}/{number}")
    return [Injection(step, draw.uniform(0, step.random_s)) for step in expand(steps)]


def expand(steps: Iterable[Action]) -> Iterator[Action]:
    """What lasts is two injections: the run is watched in between like at any other time."""
    for step in steps:
        match step:
            case Freeze(node=node, for_s=float(for_s)):
                yield from (step, Thaw(node=node, after_s=for_s))
            case FreezeRank(rank=rank, for_s=for_s):
                yield from (step, ThawRank(rank=rank, after_s=for_s))
            case Flap(node=node, for_s=for_s):
                moment = {"at_step": step.at_step, "after_s": step.after_s, "random_s": step.random_s}
                yield from (Cut(between=(node,), **moment), Heal(after_s=for_s))
            case _:
                yield step


def is_due(injection: Injection, step: int, step_since_s: float | None, since_last_s: float) -> bool:
    """`step` is the furthest that a rank has done, `step_since_s` for how long the awaited one has been behind us."""
    if injection.action.at_step is None:
        return since_last_s >= (injection.action.after_s or 0.0) + injection.extra_s
    return step >= injection.action.at_step and (step_since_s or 0.0) >= injection.extra_s


# A soak's faults and how often each is drawn. All leave a majority of three nodes, so training must go on.
_WEIGHTS = {
    "kill-rank": 4,
    "kill-node": 3,
    "freeze-short": 3,
    "freeze-long": 2,
    "cut": 2,
    "flap": 3,
    "slow-link": 2,
}


@dataclass(frozen=True)
class SoakFault:
    """`at_s` since the soak began; its actions follow each other by their `after_s` and leave the cluster whole."""

    at_s: float
    kind: str
    steps: tuple[AnyAction, ...]


def plan_soak(minutes: float, every_s: float, seed: int, nodes: int) -> list[SoakFault]:
    draw = random.Random(f"soak/{seed}")
    count = max(1, int(60 * minutes / every_s))
    kinds = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    return [SoakFault(i * every_s, kind, _fault(kind, draw, nodes, every_s)) for i, kind in enumerate(kinds, start=1)]


def _fault(kind: str, draw: random.Random, nodes: int, every_s: float) -> tuple[AnyAction, ...]:
    number = draw.randint(1, nodes)
    node = f"node{number}"
    # Nothing lasts longer than half of the time to the next one, so that every fault meets a cluster that is whole.
    most_s = every_s / 2
    match kind:
        case "kill-rank":
            return (KillRank(node=node),)
        case "kill-node":
            silent = draw.random() < 0.5
            return (KillNode(node=node, silent=silent), PowerOn(node=node, after_s=min(5.0, most_s)))
        case "freeze-short":
            return (Freeze(node=node, for_s=min(1.5, most_s)),)
        case "freeze-long":
            return (Freeze(node=node, for_s=min(8.0, most_s)),)
        case "cut":
            return (Cut(between=(node,)), Heal(after_s=min(6.0, most_s)))
        case "flap":
            return (Flap(node=node, for_s=0.5),)
        case _:
            return (SetLink(node=node, rate="10mbit"), SetLink(node=node, rate="1gbit", after_s=min(5.0, most_s)))
