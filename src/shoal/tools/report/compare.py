"""Several runs on one page: a table, their losses and speeds in one picture each, the parts of a step, what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from shoal.records.explain_run import explain_step_time
from shoal.records.summary import RunSummary
from shoal.run_folder import RunFolder
from shoal.tools.draw.pages import (
    NOTHING,
    Figure,
    chart_place,
    compose_page,
    html_notice,
    html_section,
    html_table,
    html_value,
    make_curve,
    make_lines,
    or_nothing,
    series_colour,
    stack_parts,
    thin_keeping_extremes,
    thin_with_envelope,
)
from shoal.tools.draw.palette import PHASE_NAMES, SERIES
from shoal.tools.report.page import LOSS_UNITS, RunData, read_run, skipped_lines
from shoal.tools.report.redact import Redactor
from shoal.tools.report.script_page import require_steps
from shoal.units import (
    DISTURBING_CORES,
    format_duration,
    format_loss,
    format_ms,
    format_rounded,
    format_share,
    pluralize,
    whole_percents,
)

# Colours are used again with the next kind of line.
_DASHES: tuple[list[int], ...] = ([], [6, 4], [2, 3], [8, 3, 2, 3])
_LONGEST_FILE = 100
# Fields of the manifest that are results, or have a place of their own on the page.
_RESULTS = {
    "shoal_manifest", "created", "status", "commands", "duration_s", "steps", "final_loss", "val_loss", "logged",
    "step_s_measured", "step_s_predicted", "prediction", "prediction_notes", "phases", "allreduce_mean_ms",
    "allreduce_p50_ms", "allreduce_p95_ms", "collectives", "wire_bytes_per_step", "theoretical_bytes_per_step",
    "peak_memory_bytes",
    "samples_per_sec", "tokens_per_sec", "tokens_per_sec_1proc", "tokens_per_sec_2proc", "members", "generations",
    "lineage", "recoveries", "membership_notes", "redone_steps", "abandoned_steps", "byte_equivalent", "max_abs_diff",
    "choice_notes", "lesson_notes",
}  # fmt: skip
# Settings that the manifest has under another name, or that differ between any two runs.
_LISTED = {"train.steps", "sync.mode", "run.lineage", "data.cache_dir"}


def name_runs(runs: Sequence[RunFolder]) -> list[str]:
    """Return a name for each run: that of its folder, with as many folders above it as tell all of them apart."""
    names = [""] * len(runs)
    for depth in range(1, max(len(run.path.parts) for run in runs) + 1):
        names = ["/".join(run.path.parts[-depth:]) for run in runs]
        if len(set(names)) == len({run.path for run in runs}):
            break
    return names


def read_runs(runs: Sequence[RunFolder], redactor: Redactor | None = None) -> list[RunData]:
    """Read several runs for one page, with names that differ."""
    for run in runs:
        require_steps(run)
    if redactor is not None:
        # All names before any text: an error of the first run may name a machine of the second.
        for run in runs:
            redactor.learn(run)
    names = [redactor.text(name) if redactor is not None else name for name in name_runs(runs)]
    return [replace(read_run(run, None, redactor), name=name) for run, name in zip(runs, names, strict=True)]


def comparison_file(runs: Sequence[RunFolder]) -> str:
    """Return the name of the page's file, which is another one for other runs."""
    stem = "-".join(["compare", *(run.path.name for run in runs)])
    if len(stem) > _LONGEST_FILE:
        digest = hashlib.sha256("\0".join(str(run.path) for run in runs).encode()).hexdigest()[:8]
        stem = f"compare-{runs[0].path.name[: _LONGEST_FILE // 2]}-and-{len(runs) - 1}-more-{digest}"
    return f"{stem}.html"


def render_comparison(runs: Sequence[RunData]) -> str:
    """Return the page. The names of the runs must differ."""
    figures: dict[str, Figure] = {}
    for trains, unit in LOSS_UNITS.items():
        trained = {number: run for number, run in enumerate(runs) if run.manifest.trains == trains}
        if any(len(run.summary.loss) for run in trained.values()):
            figures[f"loss-{trains}"] = _loss_chart(trained, unit)
    for unit in ("tokens", "samples"):
        counted = {number: run for number, run in enumerate(runs) if run.manifest.unit == unit}
        chart = _speed_chart(counted, unit)
        if chart["series"]:
            figures[f"speed-{unit}"] = chart
    if any(run.summary.phases for run in runs):
        figures["parts"] = _parts_chart(runs)
    losses, speeds = ([name for name in figures if name.startswith(kind)] for kind in ("loss-", "speed-"))
    parts = f"{chart_place('parts', figures)}{_parts_table(runs)}" if "parts" in figures else ""
    body = [
        f"<h1>{pluralize(len(runs), 'run')} compared</h1>",
        html_section("Side by side", _runs_table(runs)),
        html_section("Loss", "".join(chart_place(name, figures) for name in losses)),
        html_section("Speed", "".join(chart_place(name, figures) for name in speeds)),
        html_section("Where a median step's time goes", parts),
        html_section("What differs", _differences(runs)),
        *(html_section(run.name, _about_run(run)) for run in runs),
    ]
    return compose_page(f"{pluralize(len(runs), 'run')} compared", "\n".join(filter(None, body)), figures)


def compare_runs(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the rows of the table for programs."""
    return [
        {
            "run": run.name,
            "status": run.manifest.status,
            "on": run.manifest.on,
            "ranks": run.manifest.world_size,
            "sync": run.manifest.sync,
            "wire": run.manifest.wire,
            "steps": run.manifest.steps,
            "loss": _finite(run.manifest.final_loss),
            "val_loss": _finite(run.manifest.val_loss),
            "unit": run.manifest.unit,
            "per_s": run.manifest.speed,
            "step_s": run.manifest.step_s_measured,
            "phases": run.manifest.phases,
            "allreduce_ms": run.manifest.allreduce_p50_ms,
            "collectives": {kind: calls.model_dump() for kind, calls in run.manifest.collectives.items()},
            "duration_s": run.manifest.duration_s,
            "byte_equivalent": run.manifest.byte_equivalent,
            "other_programs_cores": run.summary.other_load,
            "skipped_lines": sum(run.skipped.values()),
        }
        for run in runs
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _runs_table(runs: Sequence[RunData]) -> str:
    base = runs[0].manifest
    rows = []
    for run in runs:
        manifest = run.manifest
        speed, is_alike = manifest.speed, manifest.unit == base.unit
        ratio = f"{speed / base.speed:.2f}×" if speed and base.speed and is_alike else NOTHING
        waiting_s = manifest.phases.get("exposed", 0.0) + manifest.phases.get("wait", 0.0)
        replicas = {None: NOTHING, True: "identical", False: "differ"}[manifest.byte_equivalent]
        val = f" / {format_loss(manifest.val_loss)}" if manifest.val_loss is not None else ""
        rows.append(
            [
                run.name,
                manifest.status,
                manifest.on or NOTHING,
                manifest.world_size,
                manifest.sync if manifest.wire == "fp32" else f"{manifest.sync}, {manifest.wire}",
                f"{manifest.steps:,}",
                NOTHING if manifest.final_loss is None else format_loss(manifest.final_loss) + val,
                f"{format_rounded(speed)} {manifest.unit}/s" if speed else NOTHING,
                ratio,
                or_nothing(manifest.step_s_measured, format_ms),
                format_share(waiting_s, manifest.step_s_measured or 0.0) if "exposed" in manifest.phases else NOTHING,
                or_nothing(manifest.duration_s, format_duration),
                replicas,
            ]
        )
    head = [
        "run", "state", "on", "ranks", "sync", "steps", "loss / validation", "speed", "× first", "step",
        "comm + wait", "took", "replicas",
    ]  # fmt: skip
    busy = [run.name for run in runs if (run.summary.other_load or 0.0) >= DISTURBING_CORES]
    note = f"<p>Other programs disturbed {escape(', '.join(busy))}: see below.</p>" if busy else ""
    return html_table(head, rows) + note


def _look(number: int) -> dict[str, Any]:
    return {"colour": series_colour(number), "dash": _DASHES[number // len(SERIES) % len(_DASHES)]}


def _loss_chart(runs: dict[int, RunData], unit: str) -> Figure:
    series = [
        make_curve(run.name, "", *thin_keeping_extremes(run.summary.loss_steps, run.summary.loss)) | _look(number)
        for number, run in runs.items()
        if len(run.summary.loss)
    ]
    # A single run has a legend too: another picture of the page may have the others.
    return make_lines(series, "step", f"loss ({unit})", legend=True)


def _speed_chart(runs: dict[int, RunData], unit: str) -> Figure:
    series = [
        {"name": run.name, "points": points, **_look(number)}
        for number, run in runs.items()
        if (points := _speeds(run.summary))
    ]
    return make_lines(series, "step", f"{unit} per second", legend=True)


def _speeds(summary: RunSummary) -> list[list[float | None]]:
    """Return the speed over the steps: the work of a median step divided by the time of each, on the longest rank."""
    amount = summary.tokens_per_step if summary.unit.name == "tokens" else summary.samples_per_step
    rank = max(summary.ranks.values(), key=lambda rank: len(rank.steps), default=None)
    if rank is None or not amount or not len(rank.steps):
        return []
    step_s = np.where(rank.series["step_s"] > 0, rank.series["step_s"], np.nan)
    return thin_with_envelope(rank.steps, amount / step_s)


def _parts_chart(runs: Sequence[RunData]) -> Figure:
    timed = [run for run in runs if run.summary.phases]
    return stack_parts([run.name for run in timed], [run.summary.phases for run in timed], PHASE_NAMES)


def _parts_table(runs: Sequence[RunData]) -> str:
    phases = [phase for phase in PHASE_NAMES if any(run.summary.phases.get(phase) for run in runs)]
    rows = []
    for run in runs:
        parts = run.summary.phases
        shares = dict(zip(parts, whole_percents(list(parts.values())), strict=True))
        rows.append([run.name, *(f"{shares[phase]}%" if phase in shares else NOTHING for phase in phases)])
    return html_table(["run", *(PHASE_NAMES[phase] for phase in phases)], rows)


def _differences(runs: Sequence[RunData]) -> str:
    """Return a table of the settings in which the runs differ."""
    settings = [run.manifest.model_dump(mode="json", exclude=_RESULTS) for run in runs]
    differing = [name for name in settings[0] if any(other[name] != settings[0][name] for other in settings[1:])]
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name, NOTHING) for run in runs]
        is_listed = name in _LISTED or name.partition(".")[2] in settings[0]
        if len(set(values)) > 1 and not is_listed:
            differing.append(name)
            for table, value in zip(settings, values, strict=True):
                table[name] = value
    if not differing:
        return "<p>The settings, versions and machines of these runs are the same.</p>"
    head = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in runs)
    cells = {name: "".join(f"<td>{html_value(values[name])}</td>" for values in settings) for name in differing}
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>' for name, values in cells.items())
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _about_run(run: RunData) -> str:
    typed = "".join(f"<p><code>{escape(command)}</code></p>" for command in run.manifest.commands)
    faults = "".join(html_notice("fault", fault) for fault in run.summary.faults)
    warnings = "".join(html_notice("warning", warning) for warning in run.summary.warnings)
    lesson = f'<p class="lesson">{escape(explain_step_time(run.summary))}</p>'
    return f"{typed}{faults}{lesson}{warnings}{skipped_lines(run.skipped)}"
