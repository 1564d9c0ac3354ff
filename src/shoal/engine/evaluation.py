"""Evaluate a model on all ranks: every sample once, with the same result on any number of ranks.

The dataset is cut into batches that do not depend on the ranks, and whole batches are divided over the ranks by their
shares of the training batch. The sums of all batches are added in the order of the batches. So a batch gives the same
numbers wherever it is computed, and the result has the same bits on one rank and on three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain, count
from operator import add
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.cost.batch_plan import MICRO_BATCH_CAP
from shoal.engine.agreement import check_same_data
from shoal.engine.batches import Drawn, MapSource, StreamSource, TensorSource, move, open_source
from shoal.engine.replica import Replica
from shoal.engine.saving import WRITE_TIMEOUT_S
from shoal.engine.state_transfer import gather_json
from shoal.errors import UsageError
from shoal.sync.world import barrier

# What a function returns for a batch: by name a sum over samples, or a sum of terms with their number.
Sums = dict[str, tuple[float, float]]
# A sum over a batch is that of its two halves. A mean is half of that, or near it where the halves have other weights.
_MEAN_OF_HALVES = (0.25, 0.75)


def evaluate(replica: Replica, data: Any, function: Callable[[Any], Any], batch: int | None) -> Any:
    """Return the mean of each sum that the function returns; the same on all ranks, which all call this."""
    require_task(replica, "session.evaluate")
    train, world = replica.config.train, replica.world
    size = batch or train.micro_batch or min(MICRO_BATCH_CAP, replica.global_batch)
    source = open_source(data)
    if isinstance(data, Drawn):
        raise UsageError(
            "session.evaluate got a dataset whose samples are drawn with replacement",
            why="it evaluates every sample once, without weights",
            fix="pass the dataset itself",
        )
    check_same_data(world, source)
    # Only the first time: it takes as long as another batch.
    checks_sums = replica.periodic.running not in replica.periodic.tasks_done
    rows: list[tuple[int, int, Sums]] = []
    problem: dict[str, Any] | None = None
    with _evaluating(replica.model):
        try:
            for number, samples, make_batch in _own_batches(source, size, replica.plan.shares, world.rank):
                inputs = move(make_batch(), world.device)
                rows.append((number, samples, read_sums(function(inputs), samples)))
                if checks_sums and not number and samples > 1 and not isinstance(source, StreamSource):
                    halves = source.read(np.split(np.arange(samples // 2 * 2), 2))
                    parts = [read_sums(function(move(half, world.device)), samples // 2) for half in halves]
                    _check_sums(rows[0][2], *parts)
        except UsageError as error:
            # Raised on all ranks below: the others would wait for this one.
            problem = {"seen": error.seen, "why": error.why, "fix": error.fix}
    # A rank that is slower is not lost: the others wait here, with a longer timeout, and not in an exchange.
    barrier(world, timeout_s=WRITE_TIMEOUT_S)
    documents = gather_json(world, {"rows": rows, "problem": problem})
    if problems := [document["problem"] for document in documents if document["problem"]]:
        raise UsageError(**problems[0])
    return _means(sorted(chain.from_iterable(document["rows"] for document in documents), key=lambda row: row[0]))


def require_task(replica: Replica, method: str) -> None:
    """Refuse a call that would not be repeated when a peer is lost, and that a joining rank would leave out."""
    if not replica.periodic.running:
        raise UsageError(
            f"{method} was called outside of a function of session.every",
            why="all ranks must call it after the same step, and again when one of them is lost meanwhile",
            fix="put it into a function: @session.every(100), then def check(): … with the call",
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Compute without gradients and with all modules in evaluation mode; put their modes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def owners(shares: Sequence[int]) -> Iterator[int]:
    """Yield the rank of each batch: the one that has finished first, if ranks are as fast as their shares are large."""
    given = [0] * len(shares)
    while True:
        rank = min(range(len(shares)), key=lambda rank: ((given[rank] + 1) / shares[rank], rank))
        given[rank] += 1
        yield rank


def _own_batches(
    source: TensorSource | MapSource | StreamSource, size: int, shares: Sequence[int], rank: int
) -> Iterator[tuple[int, int, Callable[[], Any]]]:
    """Yield number and samples of this rank's batches, and what makes each of them."""
    if isinstance(source, StreamSource):
        for number, (samples, make_batch), owner in zip(count(), source.read_once(size), owners(shares), strict=False):
            if owner == rank:
                yield number, samples, make_batch
        return
    samples = source.count or 0
    every_batch = zip(range(math.ceil(samples / size)), owners(shares), strict=False)
    numbers = [number for number, owner in every_batch if owner == rank]
    indices = [np.arange(number * size, min(samples, (number + 1) * size)) for number in numbers]
    batches = source.read(indices)
    for number, rows in zip(numbers, indices, strict=True):
        yield number, len(rows), lambda: next(batches)


def read_sums(result: Any, samples: int) -> Sums:
    """Return what a function of the program has returned as sums with the number of their terms."""
    named = result if isinstance(result, Mapping) else {"": result}
    sums: Sums = {}
    for name, value in named.items():
        pair = value if isinstance(value, tuple) and isinstance(result, Mapping) else (value, samples)
        try:
            total, terms = (float(number) for number in pair)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"session.evaluate got {_shown(value)} of a batch" + (f" for {name}" if name else ""),
                why="its function returns a sum over the samples of the batch, or a dictionary of sums by name; a sum "
                "of other terms, such as tokens, stands in it with their number",
                fix='return {"loss": loss.sum(), "token_loss": (token_loss.sum(), tokens)}',
            ) from None
        sums[str(name)] = total, terms
    return sums


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__qualname__}" + ("" if shape is None else f" of shape {tuple(shape)}")


def _check_sums(whole: Sums, *halves: Sums) -> None:
    """Refuse a mean over a batch, which would be divided by the samples again."""
    for name, (total, _) in whole.items():
        one, other = (half.get(name, (math.nan, 0.0))[0] for half in halves)
        least, most = (part * (one + other) for part in _MEAN_OF_HALVES)
        if one * other >= 0 and (least < total < most or most < total < least):
            raise UsageError(
                f"session.evaluate got a mean{f' for {name}' if name else ''}: {total:.4g} of a batch whose halves "
                f"have {one:.4g} and {other:.4g}",
                why="the function returns sums over the batch, which session.evaluate divides by the samples of all "
                "ranks; a mean would be divided twice",
                fix='make it a sum: reduction="sum", .sum() in place of .mean(), or (mean * terms, terms)',
            )


def _means(rows: Sequence[tuple[int, int, Sums]]) -> Any:
    """Return the means over all batches, in the shape in which the function returns its sums."""
    numbers, names = [row[0] for row in rows], {tuple(row[2]) for row in rows}
    if not rows or numbers != list(range(len(rows))) or len(names) > 1:
        seen = "the dataset has no samples" if not rows else "ranks have read other samples than the others"
        if len(names) > 1:
            seen = f"some batches have {' and others '.join(sorted(map(', '.join, names))[:2])}"
        raise UsageError(
            f"session.evaluate cannot form a mean: {seen}",
            why="every rank has the whole dataset, one rank evaluates each batch, and all batches have the same values",
            fix="give every rank the same dataset with samples, and return the same names for every batch",
        )
    means = {
        # Not `sum`: from Python 3.12 on it rounds otherwise.
        name: _divide(*(reduce(add, column) for column in zip(*(row[2][name] for row in rows), strict=True)))
        for name in rows[0][2]
    }
    return means[""] if names == {("",)} else means


def _divide(total: float, terms: float) -> float:
    return total / terms if terms else math.nan
