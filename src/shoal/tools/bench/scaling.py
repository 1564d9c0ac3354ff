"""Measure how speed grows with the number of ranks: the same training on 1, 2, 4 … of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.manifest import Manifest
from shoal.config.schema import Config
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.runs.start import MakeDisplay, start_training
from shoal.tools.report.figures import ScalingPoint, make_scaling_point, plot_scaling
from shoal.tools.report.manifest import explain_write_errors, write_derived_files
from shoal.tools.report.page import write_report
from shoal.tools.report.replicas import compare_replicas
from shoal.tools.report.summary import summarize


@dataclass(frozen=True)
class ScalingResult:
    points: list[ScalingPoint]
    runs: dict[int, RunFolder]  # by rank count
    manifest: Manifest  # of the largest run
    picture: Path
    report: Path


def measure_scaling(
    config: Config, ranks: Sequence[int], out: Path, watch: MakeDisplay, repeat: int = 1
) -> ScalingResult:
    """Measure all rank counts in rounds, so that a disturbance affects all of them alike."""
    counts = check_ranks(config, ranks)
    tries: dict[int, list[tuple[ScalingPoint, RunFolder]]] = {count: [] for count in counts}
    for round_ in range(1, repeat + 1):
        for count in counts:
            name = f"ranks-{count}" if repeat == 1 else f"ranks-{count}-round-{round_}"
            run, _ = start_training(on_ranks(config, count), out / name, watch)
            tries[count].append((make_scaling_point(summarize(run.read_all_events())), run))
    median = {count: _median(runs) for count, runs in tries.items()}
    points, runs = [median[count][0] for count in counts], {count: median[count][1] for count in counts}
    largest = runs[max(runs)]
    manifest = write_derived_files(largest, compare_replicas(largest.state_files(), range(max(runs))), points)
    picture = out / "scaling.png"
    with explain_write_errors(out):
        plot_scaling(points, picture)
    return ScalingResult(points, runs, manifest, picture, write_report(largest, points))


def check_ranks(config: Config, ranks: Sequence[int]) -> list[int]:
    """Check every count before the first run, not after ten minutes of measuring."""
    counts = sorted(set(ranks))
    if not counts or counts[0] < 1:
        raise UsageError(
            f"cannot measure on {', '.join(map(str, ranks)) or 'no'} ranks", fix="write for example: --ranks 1,2,4"
        )
    for count in counts:
        micro_batch(config.train, rank_weights(config.run, count))
    return counts


def on_ranks(config: Config, count: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"on": f"local:{count}"})})


def _median(tries: list[tuple[ScalingPoint, RunFolder]]) -> tuple[ScalingPoint, RunFolder]:
    return sorted(tries, key=lambda entry: entry[0].tokens_per_s)[len(tries) // 2]
