"""A scaling experiment: the same training on 1, 2, 4 … ranks, as points of a curve."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shoal.errors import DataError
from shoal.report.summary import Summary
from shoal.runfolder import RunFolder

SCALING_FILE = "scaling.json"


class ScalingPoint(BaseModel):
    """One measured run. Times are medians in seconds per step; phases are averaged over the ranks and add up to a
    step. `hidden_s` is the part of the all-reduce that lay behind backward; both are None where not measured."""

    model_config = ConfigDict(frozen=True)

    ranks: int = Field(ge=1)
    threads: int | None = None
    cores: int | None = None
    tokens_per_s: float = Field(gt=0)
    tokens_per_step: float = Field(gt=0)
    step_s: float = Field(gt=0)
    phases: dict[str, float] = {}
    allreduce_s: float | None = None
    hidden_s: float | None = None
    other_load: float | None = None

    @property
    def compute_s(self) -> float:
        return self.phases.get("forward", 0.0) + self.phases.get("backward", 0.0)


_POINTS = TypeAdapter(list[ScalingPoint])


def scaling_point(summary: Summary) -> ScalingPoint:
    """A run as a point of the curve; a run that measured no step has no place on it."""
    if summary.step_s is None or summary.tokens_per_s is None or summary.tokens_per_step is None:
        raise DataError(
            f"the run on {summary.world_size} ranks recorded no finished step",
            why=f"its status is {summary.status}, and a point of the curve needs a step time",
            fix="run it again with more steps: shoal bench scaling --steps 40",
        )
    threads = summary.start.get("threads")
    return ScalingPoint(
        ranks=summary.world_size,
        threads=threads if isinstance(threads, int) else None,
        cores=_cores(summary),
        tokens_per_s=summary.tokens_per_s,
        tokens_per_step=summary.tokens_per_step,
        step_s=summary.step_s.median,
        phases=summary.phases,
        allreduce_s=summary.allreduce_s.median if summary.allreduce_s else None,
        hidden_s=summary.hidden_s,
        other_load=summary.other_load,
    )


def efficiency(point: ScalingPoint, base: ScalingPoint) -> float:
    """Speed per rank, as a part of the base's speed per rank; 1 is perfect."""
    return (point.tokens_per_s / point.ranks) / (base.tokens_per_s / base.ranks)


def in_order(points: list[ScalingPoint]) -> list[ScalingPoint]:
    return sorted(points, key=lambda point: point.ranks)


def to_json(points: list[ScalingPoint]) -> str:
    return _POINTS.dump_json(in_order(points), indent=2).decode() + "\n"


def read_scaling(run: RunFolder) -> list[ScalingPoint]:
    """The points kept in a run folder; none when there are none."""
    path = run.path / SCALING_FILE
    try:
        return in_order(_POINTS.validate_json(path.read_bytes()))
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} values are not as expected"
        raise DataError(
            f"{path} cannot be used: {reason}",
            why="shoal bench scaling writes it whole; it was changed or cut off since",
            fix=f"move it away (mv {path} {path}.bad), or measure again: shoal bench scaling",
        ) from None


def _cores(summary: Summary) -> int | None:
    """Cores of all nodes together, as far as they are known."""
    by_node = {rank.node: rank.hardware.get("cores") for rank in summary.ranks.values()}
    known = [cores for cores in by_node.values() if isinstance(cores, int)]
    return sum(known) if known and len(known) == len(by_node) else None
