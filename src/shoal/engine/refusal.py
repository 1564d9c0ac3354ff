"""A step whose loss or gradient is not finite: no rank applies or commits it, and the error names the rank at fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import RunFailed
from shoal.sync.replicas import gather_integers
from shoal.sync.world import World

# Ranks exchange whole numbers: the index of a value in these.
_FINITE = "finite"
_VALUE_KINDS = (_FINITE, "nan", "inf", "-inf")


@dataclass(frozen=True)
class StepResult:
    """One rank's part of a step."""

    step: int
    loss: float
    norm: float
    samples: tuple[int, int]  # Positions of its samples in the global order, `[first, end)`.

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class RefusedStep:
    """One rank's first result that was not finite, as sent to all ranks. `loss` and `norm` are value kinds."""

    id: int
    step: int
    loss: str
    norm: str
    samples: tuple[int, int]
    has_bad_weights: bool = False


def explain_refusal(
    world: World, own: StepResult | None, weights: Iterable[Tensor], lower_rate: str
) -> RunFailed | None:
    """Gather the first non-finite result of every rank; return the same error on all, or None if no rank has any."""
    has_bad_weights = not all(bool(weight.isfinite().all()) for weight in weights)
    numbers = [0] * 6
    if own is not None:
        kinds = [0 if math.isfinite(value) else _VALUE_KINDS.index(str(value)) for value in (own.loss, own.norm)]
        numbers = [own.step, *kinds, *own.samples, has_bad_weights]
    refused = [
        RefusedStep(world.ids[rank], step, _VALUE_KINDS[loss], _VALUE_KINDS[norm], (first, end), bool(is_bad))
        for rank, (step, loss, norm, first, end, is_bad) in enumerate(gather_integers(world, numbers))
        if step
    ]
    return explain(refused, world.size, lower_rate) if refused else None


def explain(refused: Sequence[RefusedStep], ranks: int, lower_rate: str) -> RunFailed:
    """Explain the first refused step. `lower_rate` is the advice how to train with a lower learning rate.

    Look at norms only if every loss was finite: one bad loss spoils the sum of all gradients.
    """
    step = min(rank.step for rank in refused)
    first = [rank for rank in refused if rank.step == step]
    what, culprits = "loss", [(rank, rank.loss) for rank in first if rank.loss != _FINITE]
    if not culprits:
        what, culprits = "gradient norm", [(rank, rank.norm) for rank in first]
        lower_rate += ", or use --wire fp32 if a shorter format was used"
        # A sum of gradients does not tell which rank spoiled it; weights that differ do.
        bad_weights = [str(rank.id) for rank in refused if rank.has_bad_weights]
        if 0 < len(bad_weights) < ranks:
            return RunFailed(
                f"the gradient norm was not finite in step {step}: weights of rank {' and '.join(bad_weights)} are not "
                "finite either, and those of the others are; no rank has applied or committed the step",
                why="the memory or the processor of that machine is at fault",
                fix="test its memory (memtester 1G 1), then resume from the last checkpoint: shoal train --resume RUN",
            )
    if len(culprits) == ranks:
        return RunFailed(
            f"the {what} became {culprits[0][1]} in step {step}{' on every rank' if ranks > 1 else ''}",
            why="the training diverged, most often because the learning rate is too high",
            fix=lower_rate,
        )
    named = " and ".join(
        f"that of rank {rank.id} on samples {rank.samples[0]} to {rank.samples[1] - 1} became {value}"
        for rank, value in culprits
    )
    return RunFailed(
        f"a {what} was not finite in step {step}: {named}; no rank has applied or committed the step",
        why="the values of all other ranks were finite: these samples, or that machine's computation, are at fault",
        fix=f"resume from the last checkpoint: shoal train --resume RUN. If the same samples fail again, {lower_rate}",
    )
