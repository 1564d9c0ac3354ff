"""Points of a scaling experiment, and its figures (PNG)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shoal.cost.causes import Demand
from shoal.errors import DataError
from shoal.run_folder import RunFolder
from shoal.tools.draw.palette import IDEAL, MEASURED, NOTE
from shoal.tools.draw.pictures import (
    LOW_LABEL_SHARE,
    add_label,
    legend_beside,
    new_figure,
    pick_labelled,
    save_figure,
    set_title,
    stack_steps,
)
from shoal.tools.report.summary import RunSummary
from shoal.units import format_percent, name_ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# In characters.
_NOTE_WIDTH = 190
_LONG_NAME = 24
SCALING_FILE = "scaling.json"


class ScalingPoint(BaseModel):
    """One measured run. Times are medians in seconds per step."""

    model_config = ConfigDict(frozen=True)

    ranks: int = Field(ge=1)
    # What the run is called where clusters are compared, as `lab:2,link=1gbit`; unset, its number of ranks names it.
    name: str = ""
    processors: str = ""  # the kinds of CPUs and GPUs that computed
    threads: int | None = None
    cores: int | None = None  # of all machines
    tokens_per_s: float = Field(gt=0)
    tokens_per_step: float = Field(gt=0)
    step_s: float = Field(gt=0)
    phases: dict[str, float] = {}  # averaged over the ranks; they add up to a step
    allreduce_s: float | None = None
    allreduce_p95_s: float | None = None
    hidden_s: float | None = None  # the part of the all-reduce hidden behind backward
    other_load: float | None = None  # cores that other programs kept busy
    demand: Demand | None = None  # for processors, on the machine that has the fewest for it

    @property
    def compute_s(self) -> float:
        return self.phases.get("forward", 0.0) + self.phases.get("backward", 0.0)

    @property
    def label(self) -> str:
        return self.name or name_ranks(self.ranks)


_POINTS = TypeAdapter(list[ScalingPoint])


def make_scaling_point(summary: RunSummary, name: str = "") -> ScalingPoint:
    """Convert a run into a point of the curve. Refuse a run that measured no step."""
    if summary.step_s is None or summary.tokens_per_s is None or summary.tokens_per_step is None:
        raise DataError(
            f"the run on {summary.world_size} ranks recorded no finished step",
            why=f"its status is {summary.status}, and a point of the curve needs a step time",
            fix="run it again with more steps: shoal bench scaling --steps 40",
        )
    threads = summary.start.get("threads")
    return ScalingPoint(
        ranks=summary.world_size,
        name=name,
        processors=_processors(summary),
        threads=threads if isinstance(threads, int) else None,
        cores=_cores(summary),
        tokens_per_s=summary.tokens_per_s,
        tokens_per_step=summary.tokens_per_step,
        step_s=summary.step_s.median,
        phases=summary.phases,
        allreduce_s=summary.allreduce_s.median if summary.allreduce_s else None,
        allreduce_p95_s=summary.allreduce_s.p95 if summary.allreduce_s else None,
        hidden_s=summary.hidden_s,
        other_load=summary.other_load,
        demand=summary.demand,
    )


def efficiency(point: ScalingPoint, base: ScalingPoint) -> float:
    """Return the speed per rank relative to the base's speed per rank; 1 is perfect."""
    return (point.tokens_per_s / point.ranks) / (base.tokens_per_s / base.ranks)


def are_alike(point: ScalingPoint, base: ScalingPoint) -> bool:
    """Tell whether both computed on the same kind of processor; otherwise an efficiency has no meaning."""
    return point.processors == base.processors


def in_order(points: list[ScalingPoint]) -> list[ScalingPoint]:
    """Sort by ranks. Points with names are compared with the first, so they keep the order in which they are given."""
    return points if any(point.name for point in points) else sorted(points, key=lambda point: point.ranks)


def to_json(points: list[ScalingPoint]) -> str:
    return _POINTS.dump_json(in_order(points), indent=2).decode() + "\n"


def read_scaling(run: RunFolder) -> list[ScalingPoint]:
    """Read the points stored in a run folder; an empty list without the file."""
    path = run.path / SCALING_FILE
    try:
        return in_order(_POINTS.validate_json(path.read_bytes()))
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} values are not as expected"
        raise DataError(
            f"{path} cannot be used: {reason}",
            why="shoal bench scaling writes it whole; it was changed or truncated since",
            fix=f"move it away (mv {path} {path}.bad), or measure again: shoal bench scaling",
        ) from None


def _cores(summary: RunSummary) -> int | None:
    """Return the cores of all machines; None if any is unknown. Emulated nodes share those of their machine, except
    where each has a quota of its own."""
    machines: dict[str, dict[str, Mapping[str, Any]]] = {}
    for rank in summary.ranks.values():
        machines.setdefault(str(rank.hardware.get("boot_id") or rank.node), {})[rank.node] = rank.hardware
    total = 0
    for nodes in machines.values():
        cores = {node: count for node, facts in nodes.items() if isinstance(count := facts.get("cores"), int)}
        if len(cores) < len(nodes):
            return None
        shared = [cores[node] for node, facts in nodes.items() if facts.get("quota") is None]
        total += max(shared) if shared else sum(cores.values())
    return total or None


def _processors(summary: RunSummary) -> str:
    kinds = {
        str(rank.hardware.get("cpu" if str(rank.start.get("device", "cpu")) == "cpu" else "gpu") or "")
        for rank in summary.ranks.values()
    }
    return " + ".join(sorted(filter(None, kinds)))


def plot_scaling(points: list[ScalingPoint], path: Path) -> None:
    """Write the scaling figure as a PNG, 1200 pixels wide."""
    if not points:
        raise ValueError("a scaling figure needs at least one point")
    save_figure(draw_scaling(in_order(points)), path, "the figure goes beside the other files of the run")


def plot_clusters(points: list[ScalingPoint], path: Path, title: str, notes: Sequence[str] = ()) -> None:
    """Write the figure of a comparison of clusters as a PNG, 1320 pixels wide. The notes stand below."""
    why = "the picture goes beside the runs that it shows"
    save_figure(draw_clusters(points, title, notes), path, why)


def draw_scaling(points: list[ScalingPoint]) -> Figure:
    with new_figure(10, 4.4) as figure:
        speed, split = figure.subplots(1, 2, width_ratios=(1.25, 1))
        _draw_speed(speed, points)
        stack_steps(split, [str(point.ranks) for point in points], [step_parts(point) for point in points])
        split.set_xlabel("ranks")
        set_title(split, "Time of a step")
        legend_beside(split, is_reversed=True)
    return figure


def draw_clusters(points: list[ScalingPoint], title: str, notes: Sequence[str] = ()) -> Figure:
    """Draw one line a cluster: its speed with the speed-up against the first, and where the time of a step goes."""
    wrapped = [line for note in notes for line in textwrap.wrap(note, _NOTE_WIDTH)]
    height = 1.7 + 0.5 * max(2, len(points)) + 0.17 * len(wrapped)
    # Long names are broken at their commas.
    names = [point.label if len(point.label) < _LONG_NAME else point.label.replace(",", ",\n") for point in points]
    with new_figure(11, height, title) as figure:
        speed, split = figure.subplots(1, 2, sharey=True)
        _draw_cluster_speeds(speed, names, points)
        stack_steps(split, names, [step_parts(point) for point in points], is_level=True)
        split.tick_params(axis="y", left=False, labelleft=False)
        # Above the axes: a bar may be as long as they are.
        above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "columnspacing": 1}
        split.legend(frameon=False, fontsize=8, ncols=3, handlelength=1, **above)
        if wrapped:
            figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=8, color=NOTE)
    return figure


def step_parts(point: ScalingPoint) -> dict[str, float]:
    """Return a step in seconds by the parts of PART_NAMES. Time that no phase covers is in `other`, so they add up."""
    parts = {"compute": point.compute_s}
    parts |= {phase: point.phases.get(phase, 0.0) for phase in ("exposed", "wait", "optimizer")}
    return parts | {"other": max(point.step_s - sum(parts.values()), 0.0)}


def _draw_speed(axes: Axes, points: list[ScalingPoint]) -> None:
    ranks = [point.ranks for point in points]
    base = points[0]
    ideal = [base.tokens_per_s * count / base.ranks for count in ranks]
    axes.plot(ranks, ideal, color=IDEAL, linestyle="--", label="ideal")
    axes.plot(ranks, [point.tokens_per_s for point in points], color=MEASURED, marker="o", lw=2, label="measured")
    top = 1.25 * max(*ideal, *(point.tokens_per_s for point in points))
    for point in (points[number] for number in pick_labelled(ranks)):
        reached = efficiency(point, base)
        note = f"{point.tokens_per_s:,.0f}\n({format_percent(reached)})"
        # Below the point, away from the ideal line, unless the labels of the axis are there.
        above = reached > 1 or point.tokens_per_s < LOW_LABEL_SHARE * top
        add_label(axes, note, (point.ranks, point.tokens_per_s), (0, 8 if above else -9))
    set_title(axes, "Speed, with efficiency against the ideal")
    axes.set(xlabel="ranks", ylabel="tokens per second", xticks=ranks, ylim=(0, top))
    axes.margins(x=0.16)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")


def _draw_cluster_speeds(axes: Axes, names: list[str], points: list[ScalingPoint]) -> None:
    speeds = [point.tokens_per_s for point in points]
    axes.barh(names, speeds, 0.62, color=[IDEAL, *[MEASURED] * (len(points) - 1)])
    for row, speed in enumerate(speeds):
        add_label(axes, f"{speed:,.0f}  ({speed / speeds[0]:.2f}×)", (speed, row), (4, 0), ha="left", va="center")
    axes.axvline(speeds[0], color=IDEAL, linestyle="--", lw=1, zorder=0)
    axes.set(xlabel="tokens per second", xlim=(0, 1.35 * max(speeds)))
    axes.set_title(f"Speed (× {points[0].label})", loc="left", fontsize=10)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
