"""Points of a scaling experiment: one measured run each, stored in `scaling.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shoal.cost.causes import Demand
from shoal.errors import DataError
from shoal.records.summary import RunSummary
from shoal.run_folder import RunFolder
from shoal.units import name_ranks

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
