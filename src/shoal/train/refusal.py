"""A step whose loss or gradient is no number: nobody applies it, nobody commits it, and all say whose it was."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import RunFailed
from shoal.sync.replicas import gather
from shoal.sync.world import World

# Ranks tell each other whole numbers: which of these a loss or a norm is.
_FINITE = "finite"
_KINDS = (_FINITE, "nan", "inf", "-inf")


@dataclass(frozen=True)
class Outcome:
    """What one rank's part of a step came to. `samples` are its positions in the order of the data, `[first, end)`."""

    step: int
    loss: float
    norm: float
    samples: tuple[int, int]

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Told:
    """One rank's first outcome that was no number, as everybody knows it. `broken`: its weights are none either."""

    id: int
    step: int
    loss: str
    norm: str
    samples: tuple[int, int]
    broken: bool = False


def refuse(world: World, own: Outcome | None, weights: Iterable[Tensor], lr: float) -> RunFailed | None:
    """On all ranks, once all know that somebody's outcome was no number; the same error everywhere. `own` is this
    rank's first that was none, if any. None when nobody has any."""
    broken = not all(bool(weight.isfinite().all()) for weight in weights)
    numbers = [own.step, _kind(own.loss), _kind(own.norm), *own.samples, broken] if own is not None else [0] * 6
    told = [
        Told(world.ids[rank], step, _KINDS[loss], _KINDS[norm], (first, end), bool(broken))
        for rank, (step, loss, norm, first, end, broken) in enumerate(gather(world, numbers))
        if step
    ]
    return explain(told, world.size, lr) if told else None


def explain(told: Sequence[Told], ranks: int, lr: float) -> RunFailed:
    """By the first step that had such an outcome; a norm is only looked at where every loss was a number, since one bad
    loss spoils the sum of all gradients."""
    step = min(rank.step for rank in told)
    bad = [rank for rank in told if rank.step == step]
    lower = f"start a new run with a lower rate: --set train.lr={lr / 3:.2g}"
    what, culprits = "loss", [(rank, rank.loss) for rank in bad if rank.loss != _FINITE]
    if not culprits:
        what, culprits = "gradient norm", [(rank, rank.norm) for rank in bad]
        lower += ", or use --wire fp32 if a shorter format was used"
        if 0 < len(broken := [rank.id for rank in told if rank.broken]) < ranks:
            return _broken(broken, step)
    if len(culprits) == ranks:
        return RunFailed(
            f"the {what} became {culprits[0][1]} in step {step}{' on every rank' if ranks > 1 else ''}",
            why="the training diverged, most often because the learning rate is too high",
            fix=lower,
        )
    named = " and ".join(f"that of rank {rank.id} on {_span(rank)} became {value}" for rank, value in culprits)
    return RunFailed(
        f"a {what} was no number in step {step}: {named}; no rank has applied or committed the step",
        why="all other ranks had numbers: these samples, or what that machine computes, are at fault",
        fix=f"go on from the last checkpoint: shoal train --resume RUN. If the same samples do it again, {lower}",
    )


def _broken(ids: Sequence[int], step: int) -> RunFailed:
    """A sum of gradients does not say whose was none; weights that differ do."""
    named = " and ".join(map(str, ids))
    return RunFailed(
        f"the gradient norm was no number in step {step}: weights of rank {named} are none either, and those of the "
        "others are; no rank has applied or committed the step",
        why="what that machine keeps in memory, or computes, is at fault",
        fix="test its memory (memtester 1G 1), then go on from the last checkpoint: shoal train --resume RUN",
    )


def _span(rank: Told) -> str:
    first, end = rank.samples
    return f"samples {first} to {end - 1}"


def _kind(value: float) -> int:
    return 0 if math.isfinite(value) else _KINDS.index(str(value))
