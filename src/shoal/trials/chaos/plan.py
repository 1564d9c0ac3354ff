"""When what is done: a scenario's actions as single injections, and the random ones of a soak. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.trials.chaos.actions import (
    Action,
    AnyAction,
    Cut,
    FillDisk,
    Flap,
    FreeDisk,
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


@dataclass(frozen=True)
class FaultDraw:
    """What a fault kind may use to draw one fault: the random source, the victim and the time that is left."""

    random: random.Random
    node: str
    # Another node than `node`, for faults with two victims.
    other_node: str
    # A fault lasts no longer than half of the time to the next one, so that every fault meets a whole cluster.
    most_s: float


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault that a soak draws. To add one, add an entry to `SOAK_KINDS`.

    Its actions leave the cluster whole, and at least one node keeps the training's state: training must go on.
    """

    # How often it is drawn, relative to the others.
    weight: int
    make: Callable[[FaultDraw], tuple[AnyAction, ...]]
    # It fills the checkpoints' own small disk, which only root can mount.
    needs_disk: bool = False


def _kill_node(d: FaultDraw) -> tuple[AnyAction, ...]:
    silent = d.random.random() < 0.5
    return (KillNode(node=d.node, silent=silent), PowerOn(node=d.node, after_s=min(5.0, d.most_s)))


def _kill_two(d: FaultDraw) -> tuple[AnyAction, ...]:
    """The second rank dies while the others detect the first loss, regroup or copy the state."""
    return (KillRank(node=d.node), KillRank(node=d.other_node, after_s=round(d.random.uniform(0.0, 1.5), 2)))


def _slow_link(d: FaultDraw) -> tuple[AnyAction, ...]:
    return (SetLink(node=d.node, rate="10mbit"), SetLink(node=d.node, rate="1gbit", after_s=min(5.0, d.most_s)))


SOAK_KINDS: dict[str, FaultKind] = {
    "kill-rank": FaultKind(4, lambda d: (KillRank(node=d.node),)),
    "kill-node": FaultKind(3, _kill_node),
    "kill-two": FaultKind(2, _kill_two),
    "freeze-short": FaultKind(3, lambda d: (Freeze(node=d.node, for_s=min(1.5, d.most_s)),)),
    "freeze-long": FaultKind(2, lambda d: (Freeze(node=d.node, for_s=min(8.0, d.most_s)),)),
    "cut": FaultKind(2, lambda d: (Cut(between=(d.node,)), Heal(after_s=min(6.0, d.most_s)))),
    "flap": FaultKind(3, lambda d: (Flap(node=d.node, for_s=0.5),)),
    "slow-link": FaultKind(2, _slow_link),
    "disk-full": FaultKind(1, lambda d: (FillDisk(), FreeDisk(after_s=min(3.0, d.most_s))), needs_disk=True),
}


@dataclass(frozen=True)
class SoakFault:
    """`at_s` since the soak of its sync mode began; its actions follow each other by their `after_s`."""

    at_s: float
    kind: str
    steps: tuple[AnyAction, ...]


@dataclass(frozen=True)
class SoakBlock:
    """The faults of one sync mode, which are injected into one training."""

    sync: str
    faults: tuple[SoakFault, ...]


def plan_blocks(
    minutes: float, every_s: float, seed: int, nodes: int, modes: Sequence[str], kinds: Sequence[str]
) -> list[SoakBlock]:
    """Divides the faults among the sync modes: one block each, in the given order, at least one fault each."""
    count = max(len(modes), int(60 * minutes / every_s))
    shares = [count // len(modes) + (number < count % len(modes)) for number in range(len(modes))]
    return [
        SoakBlock(mode, tuple(plan_soak(share, every_s, seed, nodes, mode, kinds)))
        for mode, share in zip(modes, shares, strict=True)
    ]


def plan_soak(
    count: int, every_s: float, seed: int, nodes: int, mode: str = "ddp", kinds: Sequence[str] = tuple(SOAK_KINDS)
) -> list[SoakFault]:
    """Draws without putting back, until each kind came as often as its weight says: a block of 22 has every kind.

    The draws depend on seed and mode only. One mode alone meets the same faults as in a soak of all of them.
    """
    draw = random.Random(f"soak/{seed}/{mode}")
    bag: list[str] = []
    faults = []
    for number in range(1, count + 1):
        if not bag:
            bag = [kind for kind in kinds for _ in range(SOAK_KINDS[kind].weight)]
            draw.shuffle(bag)
        kind = bag.pop()
        node, other = draw.sample([f"node{n}" for n in range(1, nodes + 1)], 2)
        steps = SOAK_KINDS[kind].make(FaultDraw(draw, node, other, every_s / 2))
        faults.append(SoakFault(number * every_s, kind, steps))
    return faults
