"""Draw the random faults of a soak."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.tools.chaos.actions import (
    AnyAction,
    Cut,
    FillDisk,
    Flap,
    FreeDisk,
    Freeze,
    Heal,
    KillNode,
    KillRank,
    PowerOn,
    SetLink,
)


@dataclass(frozen=True)
class FaultDraw:
    """What a kind of fault may use to draw one fault."""

    random: random.Random
    node: str
    other_node: str  # for faults with two victims
    most_s: float  # half of the time to the next fault, so that every fault meets a complete cluster


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault that a soak draws. To add one, add an entry to `SOAK_KINDS`.

    Its actions leave the cluster complete, and at least one node keeps the training's state: training must continue.
    """

    weight: int  # how often it is drawn, relative to the others
    make: Callable[[FaultDraw], tuple[AnyAction, ...]]
    rejoins: bool = False  # the node is started again and joins by `shoal join`
    needs_disk: bool = False  # it fills the checkpoints' own small disk, which only root can mount


def _kill_node(d: FaultDraw) -> tuple[AnyAction, ...]:
    silent = d.random.random() < 0.5
    return (KillNode(node=d.node, silent=silent), PowerOn(node=d.node, after_s=min(5.0, d.most_s)))


def _kill_two(d: FaultDraw) -> tuple[AnyAction, ...]:
    """Kill a second rank while the others detect the first loss, regroup or copy the state."""
    return (KillRank(node=d.node), KillRank(node=d.other_node, after_s=round(d.random.uniform(0.0, 1.5), 2)))


def _slow_link(d: FaultDraw) -> tuple[AnyAction, ...]:
    return (SetLink(node=d.node, rate="10mbit"), SetLink(node=d.node, rate="1gbit", after_s=min(5.0, d.most_s)))


SOAK_KINDS: dict[str, FaultKind] = {
    "kill-rank": FaultKind(4, lambda d: (KillRank(node=d.node),)),
    "kill-node": FaultKind(3, _kill_node, rejoins=True),
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
    at_s: float  # since the soak of its sync mode began
    kind: str
    steps: tuple[AnyAction, ...]  # they follow each other by their `after_s`


@dataclass(frozen=True)
class SoakBlock:
    """The faults of one sync mode, all injected into one training."""

    sync: str
    faults: tuple[SoakFault, ...]


def plan_blocks(
    minutes: float, every_s: float, seed: int, nodes: int, modes: Sequence[str], kinds: Sequence[str]
) -> list[SoakBlock]:
    """Divide the faults among the sync modes: one block each, in the given order, at least one fault each."""
    count = max(len(modes), int(60 * minutes / every_s))
    shares = [count // len(modes) + (number < count % len(modes)) for number in range(len(modes))]
    return [
        SoakBlock(mode, tuple(plan_soak(share, every_s, seed, nodes, mode, kinds)))
        for mode, share in zip(modes, shares, strict=True)
    ]


def plan_soak(
    count: int, every_s: float, seed: int, nodes: int, mode: str = "ddp", kinds: Sequence[str] = tuple(SOAK_KINDS)
) -> list[SoakFault]:
    """Draw without replacement until each kind came as often as its weight: a block of 22 has every kind.

    The draws depend only on seed and mode, so one mode alone meets the same faults as in a soak of all modes.
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
