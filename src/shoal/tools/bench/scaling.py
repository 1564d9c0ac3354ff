"""Measure the same training on several clusters: on 1, 2, 4 … ranks, on 1, 2, 3 machines, or on any that `--on` names.

The figures are written after every run, so that what was measured is kept when a later run fails.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cluster.hosts.spec import HostsSpec
from shoal.cluster.lab import LabSpec, ShoalLab
from shoal.cluster.pods.spec import PodsSpec
from shoal.cluster.slurm.spec import SlurmSpec
from shoal.cluster.target import (
    ExistingLab,
    On,
    first_nodes,
    on_first_ranks,
    parse_on,
    place_ranks,
    rank_count,
)
from shoal.config.schema import Config
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.errors import Interrupted, RunFailed, ShoalError, UsageError
from shoal.records.explain_run import explain_scaling, is_plausible, warn_of_load
from shoal.records.manifest import compare_if_finished, explain_write_errors, write_derived_files
from shoal.records.scaling import ScalingPoint, are_alike, efficiency, make_scaling_point
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.start import MakeDisplay, start_training
from shoal.terminal import printable_json
from shoal.tools.report.figures import plot_clusters, plot_scaling
from shoal.tools.report.page import write_report

_NODES_EXAMPLE = "write for example: --nodes 1,2,3 --on hosts.toml"
# Of a row, as --json and --csv call them.
_FIGURES = (
    "ranks", "threads", "processors", "tokens_per_s", "speedup", "efficiency", "step_s", "allreduce_p50_ms",
    "allreduce_p95_ms", "exposed_ms", "wait_ms", "phases", "other_programs_cores", "plausible",
)  # fmt: skip


@dataclass
class ScalingRow:
    """One cluster and what was measured there."""

    key: str  # names it in `--json`
    name: str  # as the table shows it
    config: Config
    folder: str  # of its runs, inside the folder of the comparison
    label: str = ""  # names its point where clusters are compared, not numbers of ranks
    tries: list[tuple[ScalingPoint, RunFolder]] = field(default_factory=list)
    error: ShoalError | None = None  # why it was skipped, or failed
    has_begun: bool = False  # it had trained a step before it failed

    @property
    def median(self) -> tuple[ScalingPoint, RunFolder]:
        return sorted(self.tries, key=lambda entry: entry[0].tokens_per_s)[len(self.tries) // 2]

    @property
    def status(self) -> str:
        if self.error is None:
            return "measured" if self.tries else "not measured yet"
        return "failed" if self.has_begun else "skipped"

    @property
    def reason(self) -> str:
        if self.error is None:
            return ""
        return self.error.seen + (f" ({self.error.why})" if self.error.why else "")

    @property
    def problem(self) -> str:
        return f"{self.status}: {self.name}: {self.reason}"


@dataclass(frozen=True)
class ScalingResult:
    rows: list[ScalingRow]
    out: Path
    report: Path | None  # of the largest run, where numbers of ranks were compared

    @property
    def points(self) -> list[ScalingPoint]:
        return [row.median[0] for row in self.rows if row.tries]

    @property
    def runs(self) -> dict[str, RunFolder]:
        return {row.key: row.median[1] for row in self.rows if row.tries}

    @property
    def picture(self) -> Path:
        return self.out / "scaling.png"

    @property
    def table(self) -> Path:
        return self.out / "scaling.csv"


# Rows. Everything is checked before the first run, not after ten minutes of measuring.


def rank_rows(config: Config, counts: Sequence[int]) -> list[ScalingRow]:
    """Return a row for each number of ranks on this machine."""
    wanted = _check_counts(counts, "rank", "write for example: --ranks 1,2,4")
    rows = [
        ScalingRow(str(count), f"local:{count}", _on(config, f"local:{count}"), f"ranks-{count}") for count in wanted
    ]
    return check_rows(rows)


def cluster_rows(config: Config, clusters: Sequence[str]) -> list[ScalingRow]:
    """Return a row for each cluster, in the order in which they are given."""
    rows = []
    for number, on in enumerate(dict.fromkeys(text.strip() for text in clusters), start=1):
        folder = f"{number:02}-{re.sub(r'[^A-Za-z0-9.]+', '-', Path(on).name)}"
        rows.append(ScalingRow(on, on, _on(config, on), folder, label=on))
    return check_rows(rows)


def node_rows(config: Config, on: str, counts: Sequence[int], out: Path) -> list[ScalingRow]:
    """Return a row for each number of machines: the first ones of a cluster. Files that describe them go into `out`."""
    spec = parse_on(on)
    wanted, machines = _check_counts(counts, "machine", _NODES_EXAMPLE), _count_machines(spec, on)
    if wanted[-1] > machines:
        raise UsageError(
            f"--nodes {wanted[-1]}: --on {on} has {machines}",
            why="the first machines of the cluster are measured",
            fix=f"ask for at most {machines}, or add machines to {on}",
        )
    rows = []
    for count in wanted:
        smaller = on if count == machines else str(first_nodes(spec, count, out))
        name = f"{on}, {count} of {machines}"
        rows.append(ScalingRow(str(count), name, on_first_ranks(config, smaller), f"nodes-{count}"))
    return check_rows(rows)


def _on(config: Config, on: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"on": on})})


def _check_counts(counts: Sequence[int], what: str, fix: str) -> list[int]:
    wanted = sorted(set(counts))
    if not wanted or wanted[0] < 1:
        raise UsageError(f"cannot measure on {', '.join(map(str, counts)) or 'no'} {what}s", fix=fix)
    return wanted


def _count_machines(spec: On, on: str) -> int:
    match spec:
        case HostsSpec():
            return len(spec.hosts)
        case LabSpec():
            return len(spec.nodes)
        case ExistingLab():
            return len(ShoalLab.open(spec.name).nodes)
        case SlurmSpec():
            return len(spec.places())
        case PodsSpec():
            return spec.pods
    raise UsageError(
        f"--nodes does not go with --on {on}",
        why="it measures the first machines of a lab, of a hosts file or of Slurm; local:N is one machine with N ranks",
        fix=f"{_NODES_EXAMPLE}, or --ranks 1,2,4",
    )


def check_rows(rows: list[ScalingRow]) -> list[ScalingRow]:
    """Place the ranks of each row and check the batch. Refuse what cannot be trained; keep a lab that is not up."""
    for row in rows:
        try:
            row.config = place_ranks(row.config)
            ranks = rank_count(parse_on(row.config.run.on))
        except ShoalError as error:
            # A lab that is not up is not a mistake of the command line: other rows may still be measured.
            if not isinstance(parse_on(row.config.run.on), ExistingLab):
                raise
            row.error = error
            continue
        micro_batch(row.config.train, rank_weights(row.config.run, ranks))
    return rows


# Measuring


def measure_scaling(
    rows: list[ScalingRow],
    out: Path,
    watch: MakeDisplay,
    repeat: int = 1,
    note: Callable[[str], object] = lambda text: None,
) -> ScalingResult:
    """Measure all rows in rounds, so that a disturbance affects all of them alike.

    A row that cannot run is skipped, and one that fails is given up; `note` gets the reason. The others are measured.
    """
    result = ScalingResult(rows, out, None)
    for row in rows:
        if row.error is not None:
            note(row.problem)
    for round_ in range(1, repeat + 1):
        for row in rows:
            if row.error is not None:
                continue
            folder = out / (row.folder if repeat == 1 else f"{row.folder}-round-{round_}")
            is_measured = _measure_row(row, folder, watch, result)
            write_figures(result)
            if not is_measured:
                note(row.problem)
    if not result.points:
        raise _nothing_measured(rows)
    if any(row.label for row in rows):
        with explain_write_errors(out):
            plot_clusters(result.points, result.picture, _title(rows), _picture_notes(rows))
        return result
    largest = max((row.median for row in rows if row.tries), key=lambda entry: entry[0].ranks)[1]
    write_derived_files(largest, compare_if_finished(largest), result.points)
    with explain_write_errors(out):
        plot_scaling(result.points, result.picture)
    return ScalingResult(rows, out, write_report(largest, result.points))


def _measure_row(row: ScalingRow, folder: Path, watch: MakeDisplay, result: ScalingResult) -> bool:
    """Measure a row once. Return False, with the reason in the row, if its cluster cannot run or fails."""
    was_there, expected = folder.exists(), rank_count(parse_on(row.config.run.on))
    try:
        run, _ = start_training(row.config, folder, watch)
        point = make_scaling_point(summarize(run.read_all_events()), row.label)
        if point.ranks != expected:
            raise RunFailed(
                f"{point.ranks} of {expected} ranks were left",
                why="a machine left while the row was measured",
                fix=f"look at it: shoal report {folder}",
            )
    except Interrupted as error:
        # Not to resume the training of this row: its time would be that of two parts.
        again = "measure again, or fewer rows: shoal bench scaling --ranks 1,2"
        error.fix = f"what was measured so far: {result.table}\n{again}" if result.points else again
        raise
    except ShoalError as error:
        if was_there or not folder.exists():
            # It did not get as far as its cluster: the settings are wrong, and would be for every row.
            raise
        row.error, row.has_begun = error, any(event["event"] == "step" for event in _events(folder))
        return False
    row.tries.append((point, run))
    return True


def _events(folder: Path) -> list[dict[str, Any]]:
    try:
        return list(RunFolder.open(folder).read_all_events())
    except ShoalError:
        return []


def _nothing_measured(rows: list[ScalingRow]) -> ShoalError:
    errors = [row.error for row in rows if row.error is not None]
    if len(errors) == 1:
        return errors[0]
    why = "\n".join(f"{row.name}: {row.reason}" for row in rows)
    return RunFailed("no row could be measured", why=why, fix=errors[0].fix)


# Output


def scaling_document(result: ScalingResult) -> dict[str, Any]:
    """Return the result as `--json` prints it."""
    points = result.points
    return {
        "rows": [_row_figures(row, points[0] if points else None) for row in result.rows],
        "baseline": points[0].label if points else None,
        "explanation": explain_scaling(points),
        "warning": warn_of_load(points) or None,
        "picture": str(result.picture),
        "table": str(result.table),
        "report": None if result.report is None else str(result.report),
        "runs": {key: str(run.path) for key, run in result.runs.items()},
    }


def scaling_csv(result: ScalingResult) -> str:
    """Return one line a row, without the phases that have no column of their own."""
    base = result.points[0] if result.points else None
    lines = [_row_figures(row, base) for row in result.rows]
    text = io.StringIO()
    names = [name for name in lines[0] if name != "phases"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def write_figures(result: ScalingResult) -> None:
    with explain_write_errors(result.out):
        result.out.mkdir(parents=True, exist_ok=True)
        write_atomically(result.out / "scaling.json", printable_json(scaling_document(result), indent=2) + "\n")
        write_atomically(result.table, scaling_csv(result))


def _row_figures(row: ScalingRow, base: ScalingPoint | None) -> dict[str, Any]:
    figures: dict[str, Any] = {"cluster": row.name, "status": row.status, "reason": row.reason or None}
    if not row.tries or base is None:
        return figures | dict.fromkeys(_FIGURES)
    point = row.median[0]
    times = (point.allreduce_s, point.allreduce_p95_s, point.phases.get("exposed", 0.0), point.phases.get("wait", 0.0))
    values = (
        point.ranks,
        point.threads,
        point.processors,
        point.tokens_per_s,
        point.tokens_per_s / base.tokens_per_s,
        efficiency(point, base) if are_alike(point, base) else None,
        point.step_s,
        *(None if point.ranks == 1 or seconds is None else 1e3 * seconds for seconds in times),
        point.phases,
        point.other_load,
        is_plausible(point, base),
    )
    return figures | dict(zip(_FIGURES, values, strict=True))


def _title(rows: list[ScalingRow]) -> str:
    config = rows[0].config
    model, train = config.model, config.train
    batch = f"{train.global_batch} × {model.seq_len} tokens a step"
    per_rank = " and rank" if train.scaling == "weak" else ""
    return f"{config.run.preset}: {model.layers} layers of width {model.width}, {batch}{per_rank}"


def _picture_notes(rows: list[ScalingRow]) -> list[str]:
    busy = warn_of_load([row.median[0] for row in rows if row.tries])
    return [*([busy] if busy else []), *(row.problem for row in rows if row.error is not None)]
