"""Compare levers (sync modes, intervals and wire formats): the same training with one after another, as a table.

Speed is compared with one node (what does a second machine gain?), with stock DDP (what does the lever gain?) and with
the ceiling: the same nodes computing without any exchange. The cost of a lever is the validation loss, after the same
number of tokens and after the same time.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shoal.cluster.target import first_nodes, on_first_ranks, parse_on, rank_count
from shoal.config.presets import did_you_mean
from shoal.config.schema import Config, SyncConfig
from shoal.config.sync_choice import SYNC_METHODS, TRAINED_METHODS, WIRE_FORMATS
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.errors import DataError, Interrupted, UsageError
from shoal.records.manifest import explain_write_errors
from shoal.records.summary import RunSummary, summarize
from shoal.run_folder import RunFolder
from shoal.runs.start import TrainDisplay, start_training
from shoal.tools.draw.palette import IDEAL, MEASURED, PHASE_COLOURS, SERIES
from shoal.tools.draw.pictures import legend_below, legend_beside, new_figure, save_figure, set_title
from shoal.units import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONE_NODE, CEILING, STOCK = "one node", "no exchange", "stock"
# A loss curve may end this much before the others and still count.
_AS_FAR = 0.98
# A figure can be this much above the ceiling by chance.
_CHANCE = 0.05
_COUNT = re.compile(r"\d{1,9}")
_WORDS = (*TRAINED_METHODS, *WIRE_FORMATS)
_NEVER = 10**9


class Evaluation(BaseModel):
    """The validation loss after an amount of training."""

    model_config = ConfigDict(frozen=True)

    tokens: float
    seconds: float  # of steps alone
    loss: float


class LeverPoint(BaseModel):
    """One measured run. Bytes, times and phases are per step."""

    model_config = ConfigDict(frozen=True)

    name: str
    nodes: int = Field(ge=1)
    tokens_per_s: float = Field(gt=0)
    tokens_per_step: float = Field(gt=0)
    step_s: float = Field(gt=0)
    exposed_s: float = 0.0  # waited for the network
    wait_s: float = 0.0
    wire_bytes: float | None = None
    theory_bytes: float | None = None
    peak_memory_bytes: float | None = None
    other_load: float | None = None  # cores that other programs kept busy
    evaluations: tuple[Evaluation, ...] = ()

    def loss_at(self, *, tokens: float | None = None, seconds: float | None = None) -> float | None:
        """Interpolate between two evaluations; return None before the first and after the last."""
        name, at = ("tokens", tokens) if tokens is not None else ("seconds", seconds)
        places = [float(getattr(evaluation, name)) for evaluation in self.evaluations]
        if at is None or not places or not places[0] <= at <= places[-1] / _AS_FAR:
            return None
        return float(np.interp(at, places, [evaluation.loss for evaluation in self.evaluations]))


class LeverRow(BaseModel):
    """A point compared with the others. None: not measured, or without meaning for this row."""

    point: LeverPoint
    of_one_node: float | None
    of_stock: float | None
    of_ceiling: float | None
    larger_batch: bool  # its step has more tokens than that of the ceiling
    loss_at_tokens: float | None
    loss_at_time: float | None

    @property
    def is_above_ceiling(self) -> bool:
        return self.of_ceiling is not None and self.of_ceiling > 1 + _CHANCE

    @property
    def is_plausible(self) -> bool:
        """Tell whether it is below the ceiling. Only a larger batch can exceed it: it updates weights less often."""
        return not self.is_above_ceiling or self.larger_batch


class LeverTable(BaseModel):
    rows: tuple[LeverRow, ...]
    tokens: float | None  # losses are compared after this many tokens, which all levers reached,
    seconds: float | None  # and after this time


@dataclass(frozen=True)
class LeversResult:
    table: LeverTable
    runs: dict[str, RunFolder]  # by lever, of the median round
    picture: Path
    figures: Path


def measure_levers(
    config: Config, levers: str, out: Path, watch: Callable[..., TrainDisplay], repeat: int = 1
) -> LeversResult:
    """Measure all levers in rounds, so that a disturbance affects all of them alike.

    `watch` makes the display of a run from its settings and a `title`, which names the lever.
    """
    experiments = plan_experiments(config, levers, out)
    tries: dict[str, list[tuple[LeverPoint, RunFolder]]] = {name: [] for name in experiments}
    for round_ in range(1, repeat + 1):
        for number, (name, chosen) in enumerate(experiments.items()):
            folder = f"{number:02}-{_file_name(name)}" + (f"-round-{round_}" if repeat > 1 else "")
            title = f"{name} ({number + 1} of {len(experiments)})"
            try:
                run, _ = start_training(chosen, out / folder, partial(watch, title=title))
            except Interrupted as error:
                # Not to resume the training of this lever: alone it compares nothing.
                error.fix = "measure all of them again, or fewer: shoal bench levers --levers stock,ddp,int8"
                raise
            tries[name].append((lever_point(name, summarize(run.read_all_events())), run))
    points = {name: median_point([point for point, _ in entries]) for name, entries in tries.items()}
    runs = {name: next(run for point, run in tries[name] if point is points[name]) for name in tries}
    table, picture, figures = compare(list(points.values())), out / "levers.png", out / "levers.json"
    with explain_write_errors(out):
        plot_levers(table, picture)
        figures.write_text(to_json(points.values()))
    return LeversResult(table, runs, picture, figures)


def plan_experiments(config: Config, levers: str, out: Path) -> dict[str, Config]:
    """Check all levers before the first run, not after ten minutes of measuring."""
    on = parse_on(config.run.on)
    if rank_count(on) < 2:
        raise UsageError(
            f"--on {config.run.on} is one rank, which has no other to exchange with",
            fix="use a cluster: --on local:2, or --on lab:2,link=1gbit",
        )
    # Check that all ranks get a part of a batch; no lever makes it smaller.
    micro_batch(config.train, rank_weights(config.run, rank_count(on)))
    names = list(dict.fromkeys(name.strip() for name in levers.split(",")))
    alone = first_nodes(on, 1, out)
    experiments = {}
    if alone is not None:
        experiments[ONE_NODE] = on_first_ranks(config, alone)
    experiments[CEILING] = with_sync(config, {"mode": "local", "every": _NEVER})
    return experiments | {name: with_sync(config, parse_lever(name)) for name in names}


def parse_lever(text: str) -> dict[str, Any]:
    """Parse a lever such as `diloco:50+int8`: a sync mode, its interval, and a wire format; each may be left out."""
    chosen: dict[str, Any] = {}
    for word in text.split("+"):
        name, _, number = word.partition(":")
        if name not in _WORDS or (number and not _COUNT.fullmatch(number)) or (number and name in ("stock", "ddp")):
            raise UsageError(
                f"{text!r} is not a lever",
                why=did_you_mean(name, _WORDS) or f"a lever is made of {', '.join(_WORDS)}",
                fix="write for example: --levers stock,ddp,int8,accumulate:4+fp16,diloco:50+int8",
            )
        if name in WIRE_FORMATS:
            chosen["wire"] = word
        elif shorthand := SYNC_METHODS[name].shorthand:
            chosen |= {**shorthand, **({name: int(number)} if number else {})}
        else:
            chosen |= {"mode": name} | ({"every": int(number)} if number else {})
    return chosen


def with_sync(config: Config, changes: dict[str, Any]) -> Config:
    """Change the sync settings and keep the number of tokens: with more tokens per step, take fewer steps."""
    try:
        sync = SyncConfig.model_validate(config.sync.model_dump() | changes)
    except ValidationError as error:
        raise UsageError(
            f"these levers cannot be combined: {', '.join(f'{name}={value}' for name, value in changes.items())}",
            why=error.errors()[0]["msg"].removeprefix("Value error, "),
            fix="name the levers that you want: --levers stock,ddp,int8",
        ) from None
    train = config.train
    steps = math.ceil(train.steps * config.sync.accumulate / sync.accumulate)
    wanted = max(1, train.eval_every * config.sync.accumulate // sync.accumulate)
    # Within a round the common weights are those of its beginning, so the loss would not change.
    eval_every = math.ceil(wanted / sync.round_steps) * sync.round_steps
    fewer = train.model_copy(update={"steps": steps, "eval_every": eval_every})
    return config.model_copy(update={"sync": sync, "train": fewer})


def _file_name(name: str) -> str:
    return name.replace(" ", "-").replace(":", "-")


_POINTS = TypeAdapter(list[LeverPoint])


def lever_point(name: str, summary: RunSummary) -> LeverPoint:
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
        # Replicas without any exchange have each learned from a part of the data: their average is meaningless.
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


def _without_exchange_s(summary: RunSummary) -> float:
    """Return the median step of the second half, without the last one, which averages all replicas."""
    times = np.concatenate([rank.series["step_s"][len(rank.steps) // 2 : -1] for rank in summary.ranks.values()])
    return float(np.median(times[np.isfinite(times)]))


def _evaluations(summary: RunSummary) -> Iterable[Evaluation]:
    """Yield the evaluations by the time of the slowest rank, including steps before a resume."""
    elapsed = [np.cumsum(np.nan_to_num(rank.series["step_s"])) for rank in summary.ranks.values()]
    first = next(iter(summary.ranks.values()))
    for step, loss in sorted(summary.val_loss.items()):
        row = int(np.searchsorted(first.steps, step))
        if row < min(len(times) for times in elapsed) and first.steps[row] == step:
            seconds = max(float(times[row]) for times in elapsed)
            yield Evaluation(tokens=step * float(summary.tokens_per_step or 0), seconds=seconds, loss=loss)


# A loss this many times as high as the median method's highest is not drawn; the legend names it.
_MOST_PEAK = 1.15


def plot_levers(table: LeverTable, path: Path) -> None:
    """Write a PNG, 1320 pixels wide."""
    save_figure(draw_levers(table), path, "the picture goes beside the runs that it shows")


def draw_levers(table: LeverTable) -> Figure:
    with new_figure(11, 1.6 + 0.32 * max(8, len(table.rows))) as figure:
        speed, learned = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_speed(speed, table.rows)
        _draw_loss(learned, table.rows)
    return figure


def _draw_speed(axes: Axes, rows: tuple[LeverRow, ...]) -> None:
    """Draw speeds; the pale end of a bar is the speed lost to waiting for the network."""
    names = [row.point.name for row in rows]
    speeds = [row.point.tokens_per_s for row in rows]
    colours = [IDEAL if name in (ONE_NODE, CEILING) else MEASURED for name in names]
    axes.barh(names, speeds, 0.62, color=colours)
    lost = [_unexposed(row) - speed for row, speed in zip(rows, speeds, strict=True)]
    if max(lost) > 0.02 * max(speeds):
        exposed = PHASE_COLOURS["exposed"]
        axes.barh(names, lost, 0.62, left=speeds, color=exposed, alpha=0.35, label="lost to the network")
    ceiling = next((row.point.tokens_per_s for row in rows if row.point.name == CEILING), None)
    if ceiling is not None:
        axes.axvline(ceiling, color=IDEAL, linestyle="--", lw=1, label=f"{CEILING}: the ceiling")
    # In a column of their own: beside the bars they would cross other bars and the ceiling.
    longest = max(map(_unexposed, rows))
    for place, row in enumerate(rows):
        axes.annotate(_label(row), (1.03 * longest, place), va="center", fontsize=9)
    axes.invert_yaxis()
    room = 1.35 if all(row.is_plausible for row in rows) else 1.8
    axes.set(xlabel="tokens per second", xlim=(0, room * longest))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if axes.get_legend_handles_labels()[1]:
        legend_below(axes, 2)
    set_title(axes, "Speed, and times one node")


def _unexposed(row: LeverRow) -> float:
    point = row.point
    return point.tokens_per_step / max(point.step_s - point.exposed_s, 0.05 * point.step_s)


def _label(row: LeverRow) -> str:
    label = f"{row.point.tokens_per_s:,.0f}"
    if row.of_one_node is not None and row.point.name != ONE_NODE:
        label += f"  ({row.of_one_node:.2f}×)"
    return label if row.is_plausible else f"{label}, not plausible"


def _draw_loss(axes: Axes, rows: tuple[LeverRow, ...]) -> None:
    drawn = [row.point for row in rows if row.point.evaluations]
    peaks = [max(entry.loss for entry in point.evaluations) for point in drawn]
    # One method that diverged would press all others into a corner.
    top = _MOST_PEAK * statistics.median(peaks) if peaks else math.inf
    for number, (point, peak) in enumerate(zip(drawn, peaks, strict=True)):
        colour = IDEAL if point.name == ONE_NODE else SERIES[number % len(SERIES)]
        seconds, losses = zip(*((entry.seconds, entry.loss) for entry in point.evaluations), strict=True)
        # Further lines repeat the colours, dashed.
        style = "-" if number < len(SERIES) else "--"
        label = f"{point.name} (up to {format_number(peak)})" if peak > top else point.name
        [line] = axes.plot(seconds, losses, color=colour, linestyle=style, marker=".", lw=1.5)
        line.set_label(label)
    axes.set(xlabel="seconds of training", ylabel="validation loss")
    if any(peak > top for peak in peaks):
        axes.set_ylim(top=top)
    axes.grid(axis="y", alpha=0.25)
    set_title(axes, "What was learned by when")
    if drawn:
        legend_beside(axes)
