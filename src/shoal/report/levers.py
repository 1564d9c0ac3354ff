"""An experiment with levers: the same training with one after another, as rows of a table. Pure.

Speed is held against one node (what is a second machine worth?), against stock DDP (what is the lever worth?) and
against the ceiling: the same nodes computing beside each other without any exchange. What a lever costs is the
validation loss, after as many tokens as all others, and after as much time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from shoal.errors import DataError
from shoal.report.summary import RankSummary, Summary

ONE_NODE, CEILING, STOCK = "one node", "no exchange", "stock"
# A curve that ends a little before the others has been as far as they.
_AS_FAR = 0.98
# So far above the ceiling a figure can be by chance.
_CHANCE = 0.05


class Evaluation(BaseModel):
    """The validation loss after so much training; `seconds` are those of steps alone."""

    model_config = ConfigDict(frozen=True)

    tokens: float
    seconds: float
    loss: float


class LeverPoint(BaseModel):
    """One measured run. Bytes, times and phases are a step's; `exposed_s` is what a rank waited for the network;
    `other_load` is how many cores other programs kept busy meanwhile."""

    model_config = ConfigDict(frozen=True)

    name: str
    nodes: int = Field(ge=1)
    tokens_per_s: float = Field(gt=0)
    tokens_per_step: float = Field(gt=0)
    step_s: float = Field(gt=0)
    exposed_s: float = 0.0
    wait_s: float = 0.0
    wire_bytes: float | None = None
    theory_bytes: float | None = None
    peak_memory_bytes: float | None = None
    other_load: float | None = None
    evaluations: tuple[Evaluation, ...] = ()

    def loss_at(self, *, tokens: float | None = None, seconds: float | None = None) -> float | None:
        """Between two evaluations along a straight line; None before the first and behind the last."""
        name, at = ("tokens", tokens) if tokens is not None else ("seconds", seconds)
        places = [float(getattr(each, name)) for each in self.evaluations]
        if at is None or not places or not places[0] <= at <= places[-1] / _AS_FAR:
            return None
        return float(np.interp(at, places, [each.loss for each in self.evaluations]))


class LeverRow(BaseModel):
    """A point beside the others. None is what was not measured in this experiment, or has no meaning for this row.
    `larger_batch`: a step of it has more tokens than one of the ceiling."""

    point: LeverPoint
    of_one_node: float | None
    of_stock: float | None
    of_ceiling: float | None
    larger_batch: bool
    loss_at_tokens: float | None
    loss_at_time: float | None

    @property
    def is_above_ceiling(self) -> bool:
        return self.of_ceiling is not None and self.of_ceiling > 1 + _CHANCE

    @property
    def is_plausible(self) -> bool:
        """No exchange is faster than none. A larger batch may be: it updates the weights less often."""
        return not self.is_above_ceiling or self.larger_batch


class LeverTable(BaseModel):
    """`tokens` and `seconds` are where losses are compared: how far all came, and when the first of them was there."""

    rows: tuple[LeverRow, ...]
    tokens: float | None
    seconds: float | None


_POINTS = TypeAdapter(list[LeverPoint])


def lever_point(name: str, summary: Summary) -> LeverPoint:
    if summary.step_s is None or summary.tokens_per_step is None:
        raise DataError(
            f"the run with {name} recorded no finished step",
            why=f"its status is {summary.status}",
            fix="look at it (shoal report RUN), or measure again with more steps: --steps 40",
        )
    step_s = _without_exchange_s(summary) if name == CEILING else summary.step_s.median
    return LeverPoint(
        name=name,
        nodes=summary.world_size,
        tokens_per_s=summary.tokens_per_step / step_s,
        tokens_per_step=summary.tokens_per_step,
        step_s=step_s,
        exposed_s=0.0 if name == CEILING else summary.phases.get("exposed", 0.0),
        wait_s=summary.phases.get("wait", 0.0),
        wire_bytes=None if name == CEILING else summary.wire_bytes_per_step,
        theory_bytes=None if name == CEILING else summary.theoretical_bytes_per_step,
        peak_memory_bytes=summary.peak_memory_bytes,
        other_load=summary.other_load,
        # Replicas that never met have learned a part each: their average is nobody's training.
        evaluations=() if name == CEILING else tuple(_evaluations(summary)),
    )


def median_point(tries: Sequence[LeverPoint]) -> LeverPoint:
    return sorted(tries, key=lambda point: point.tokens_per_s)[len(tries) // 2]


def compare(points: Sequence[LeverPoint]) -> LeverTable:
    by_name = {point.name: point for point in points}
    together = [point for point in points if point.evaluations and point.name != ONE_NODE]
    tokens = min((point.evaluations[-1].tokens for point in together), default=None)
    seconds = min((point.evaluations[-1].seconds for point in together), default=None)
    rows = tuple(
        LeverRow(
            point=point,
            of_one_node=_ratio(point, by_name.get(ONE_NODE)),
            of_stock=_ratio(point, by_name.get(STOCK)) if point.name not in (ONE_NODE, CEILING) else None,
            of_ceiling=_ratio(point, by_name.get(CEILING)) if point.name != ONE_NODE else None,
            larger_batch=CEILING in by_name and point.tokens_per_step > by_name[CEILING].tokens_per_step,
            loss_at_tokens=point.loss_at(tokens=tokens) if tokens is not None else None,
            loss_at_time=point.loss_at(seconds=seconds) if seconds is not None else None,
        )
        for point in points
    )
    return LeverTable(rows=rows, tokens=tokens, seconds=seconds)


def to_json(points: Iterable[LeverPoint]) -> str:
    return _POINTS.dump_json(list(points), indent=2).decode() + "\n"


def _ratio(point: LeverPoint, base: LeverPoint | None) -> float | None:
    return point.tokens_per_s / base.tokens_per_s if base is not None else None


def _without_exchange_s(summary: Summary) -> float:
    """Without the last step: a training ends with the average of all replicas, whatever its lever."""
    times = [_second_half(rank) for rank in summary.ranks.values()]
    return float(np.median(np.concatenate(times)))


def _second_half(rank: RankSummary) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = rank.series["step_s"][len(rank.steps) // 2 : -1]
    return times[np.isfinite(times)]


def _evaluations(summary: Summary) -> Iterable[Evaluation]:
    """By the clock of the slowest rank. A resumed run's steps before the last start count as any other."""
    elapsed = [np.cumsum(np.nan_to_num(rank.series["step_s"])) for rank in summary.ranks.values()]
    first = next(iter(summary.ranks.values()))
    for step, loss in sorted(summary.val_loss.items()):
        row = int(np.searchsorted(first.steps, step))
        if row < min(len(times) for times in elapsed) and first.steps[row] == step:
            seconds = max(float(times[row]) for times in elapsed)
            yield Evaluation(tokens=step * float(summary.tokens_per_step or 0), seconds=seconds, loss=loss)
