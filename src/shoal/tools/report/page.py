"""Write the report: one HTML file that needs no network, no server and no other file."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.load import load_settings
from shoal.config.manifest import Manifest, RecoveryRecord
from shoal.errors import ShoalError
from shoal.events import Event
from shoal.records.explain_run import PHASE_TEXTS, explain_scaling, explain_step_time, phase_errors
from shoal.records.history import cost_sentence
from shoal.records.manifest import manifest_of
from shoal.records.measured_script import NO_EXCHANGE, has_own_exchanges, name_collectives
from shoal.records.scaling import ScalingPoint, efficiency, in_order, read_scaling
from shoal.records.summary import RunSummary, shard_level, summarize
from shoal.run_folder import RunFolder, write_atomically
from shoal.tools.draw.pages import (
    NOTHING,
    Figure,
    chart_place,
    compose_page,
    format_bytes,
    html_head,
    html_notice,
    html_section,
    html_table,
    html_value,
    make_areas,
    make_bars,
    make_curve,
    make_lines,
    or_nothing,
    series_colour,
    stack_parts,
    thin_keeping_extremes,
)
from shoal.tools.draw.palette import PART_NAMES, PHASE_NAMES
from shoal.tools.report.figures import step_parts
from shoal.tools.report.redact import Redactor
from shoal.units import (
    SCRIPT_LOSS,
    format_count,
    format_duration,
    format_loss,
    format_ms,
    format_percent,
    format_rounded,
    format_share,
    format_value,
    join_words,
    name_ranks,
    pluralize,
)

_MOST_MARKS = 40
_MOST_DOTS = 400
# Fields of the manifest that have their own section on the page.
_SHOWN_ELSEWHERE = {"lesson_notes", "choice_notes", "recoveries", "membership_notes", "shoal_manifest", "commands"}
# Fields that mean nothing for a user's script, whose model and data shoal does not know.
_ONLY_OF_GPT = {
    "data_source", "data_digest", "val_loss", "step_s_predicted", "prediction", "prediction_notes",
    "tokens_per_sec", "tokens_per_sec_1proc", "tokens_per_sec_2proc",
}  # fmt: skip
LOSS_UNITS = {"gpt": "nats per token", "script": SCRIPT_LOSS}
# Curves of values that a user's program recorded.
_MOST_CURVES = 24


@dataclass(frozen=True)
class RunData:
    """What a page shows of one run."""

    name: str
    summary: RunSummary
    manifest: Manifest
    points: list[ScalingPoint]
    skipped: dict[str, int]  # lines that could not be read, by file
    settings: dict[str, str]  # of config.toml, as `section.key`


def read_run(run: RunFolder, scaling: list[ScalingPoint] | None = None, redactor: Redactor | None = None) -> RunData:
    """Read a run folder; `scaling` defaults to its `scaling.json`. With a redactor, no other text leaves this function.

    Events are redacted before anything is derived from them, so every sentence made from them is redacted too.
    """
    points, skipped = scaling or read_scaling(run), Counter[str]()
    events: Iterable[Event] = run.read_all_events(skipped)
    if redactor is None:
        summary = summarize(events)
        manifest = manifest_of(run, summary, None, points)
        return RunData(run.path.name, summary, manifest, points, dict(skipped), _read_settings(run))
    redactor.learn(run)
    summary = summarize(map(redactor.event, events))
    manifest = redactor.record(manifest_of(run, summary, None, points))
    points = [redactor.record(point) for point in points]
    settings = {name: redactor.text(value) for name, value in _read_settings(run).items()}
    return RunData(redactor.text(run.path.name), summary, manifest, points, dict(skipped), settings)


def _read_settings(run: RunFolder) -> dict[str, str]:
    sections = load_settings(run.config).model_dump(mode="json")
    return {f"{section}.{key}": str(value) for section, keys in sections.items() for key, value in keys.items()}


def write_report(
    run: RunFolder,
    scaling: list[ScalingPoint] | None = None,
    file: Path | None = None,
    redactor: Redactor | None = None,
) -> Path:
    """Write `report.html` into the run folder, or the page into `file`."""
    data = read_run(run, scaling, redactor)
    page = render_page(data.summary, data.manifest, data.points, name=data.name, skipped=data.skipped)
    return write_page(page, file or run.report, [run])


def write_page(page: str, file: Path, runs: list[RunFolder]) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, page)
    except OSError as error:
        raise unwritable_page(file, error, runs) from None
    return file


def unwritable_page(file: Path, error: OSError, runs: list[RunFolder]) -> ShoalError:
    return ShoalError(
        f"cannot write {file}: {(error.strerror or str(error)).lower()}",
        why="the run's records are safe; only the page made from them is missing",
        fix=f"write it elsewhere: shoal report {shlex.join(str(run.path) for run in runs)} --out FOLDER",
    )


def render_page(
    summary: RunSummary,
    manifest: Manifest,
    scaling: list[ScalingPoint] | None = None,
    name: str = "",
    skipped: dict[str, int] | None = None,
) -> str:
    points = scaling or []
    figures = _charts(summary, points, manifest.trains)
    body = _body(summary, manifest, points, figures, name or manifest.preset, skipped or {})
    return compose_page(f"{name or manifest.preset} · {manifest.status}", body, figures)


def _body(
    summary: RunSummary,
    manifest: Manifest,
    points: list[ScalingPoint],
    figures: dict[str, Figure],
    name: str,
    skipped: dict[str, int],
) -> str:
    parts = [
        _head(manifest, name),
        html_section("What went wrong", "".join(html_notice("fault", fault) for fault in summary.faults)),
        _key_figures(manifest, summary),
        html_section("What the numbers say", _lesson(summary, points)),
        html_section("Who took part", _members_section(summary, manifest, chart_place("members", figures))),
        html_section("How replicas agree", f"<p>{escape(manifest.choice_notes)}</p>" if manifest.choice_notes else ""),
        html_section("Loss", chart_place("loss", figures)),
        html_section("Recorded values", _logged_section(summary, figures)),
        html_section("Where a step's time goes", _times(summary, figures)),
        html_section("Predicted and measured", _prediction_section(manifest, summary)),
        html_section("Scaling", _scaling(points, figures)),
        html_section("Replicas", _replicas_section(manifest)),
        html_section(
            "Ranks and their data" if manifest.trains == "gpt" else "Ranks",
            _ranks_section(summary) if summary.ranks else "",
        ),
        html_section("Warnings", "".join(html_notice("warning", warning) for warning in summary.warnings)),
        html_section("Damaged lines", skipped_lines(skipped)),
        html_section("Manifest", _manifest_section(manifest)),
    ]
    return "\n".join(part for part in parts if part)


def _head(manifest: Manifest, name: str) -> str:
    created = manifest.created[:16].replace("T", " ") + " UTC" if manifest.created else ""
    planned = f"{manifest.steps:,} of {manifest.steps_planned:,} steps"
    program = f"{'preset' if manifest.trains == 'gpt' else 'script'} {manifest.preset}"
    where = manifest.on or ""
    if where and not where.startswith("joined "):
        where = f"on {where}"
    took = f"trained for {format_duration(manifest.duration_s)}" if manifest.duration_s else ""
    version = f"shoal {manifest.versions['shoal']}" if "shoal" in manifest.versions else ""
    facts = [manifest.status, planned, program, manifest.data_source, where, took, created, version]
    return html_head(name, facts, manifest.commands)


def skipped_lines(skipped: dict[str, int]) -> str:
    """Count the lines of event files that could not be read; empty without any."""
    if not skipped:
        return ""
    files = ", ".join(f"{count:,} in {escape(file)}" for file, count in skipped.items())
    total = sum(skipped.values())
    return (
        f"<p>{pluralize(total, 'line')} could not be read and {'is' if total == 1 else 'are'} left out: {files}. "
        "A process that is killed while it writes, or a full disk, leaves half a line.</p>"
    )


def _lesson(summary: RunSummary, points: list[ScalingPoint]) -> str:
    texts = [explain_scaling(points)] if len(points) > 1 else []
    return "".join(f'<p class="lesson">{escape(text)}</p>' for text in [*texts, explain_step_time(summary)])


def _times(summary: RunSummary, figures: dict[str, Figure]) -> str:
    if "medians" not in figures:
        return ""
    first = next(name for name in figures if name.startswith("steps-"))
    window = f" over steps {summary.measured[0]}–{summary.measured[1]}" if summary.measured else ""
    return (
        f"<h3>A median step{window}</h3>{chart_place('medians', figures)}"
        f"<h3>Over the steps of {_rank_choice(figures)}</h3>"
        f'<div class="chart" id="steps" data-figure="{first}"></div>{_tail(summary)}'
    )


def _tail(summary: RunSummary) -> str:
    """Return a table of the own part of a step on every rank, and of the slowest of all."""
    tail = summary.tail
    if tail is None:
        return ""
    window = f" (steps {summary.measured[0]:,}–{summary.measured[1]:,})" if summary.measured else ""
    rows = [[f"rank {rank}", *map(format_ms, parts)] for rank, parts in tail.by_rank.items()]
    return (
        f"<h3>A rank's own part of a step, without waiting{window}</h3>"
        f"{html_table(['', 'median', '95%', '99%', 'longest'], rows)}"
        f"<p>The slowest of {len(tail.by_rank)} takes {format_ms(tail.slowest_s)} on average; if ranks varied "
        f"independently of each other it would be {format_ms(tail.independent_s)}, and with one more such rank "
        f"{format_ms(tail.one_more_s)}.</p>"
    )


def _rank_choice(figures: dict[str, Figure]) -> str:
    ranks = [name.removeprefix("steps-") for name in figures if name.startswith("steps-")]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    options = "".join(f'<option value="steps-{rank}">rank {rank}</option>' for rank in ranks)
    return f'<select id="rank" aria-label="rank" autocomplete="off">{options}</select>'


def _scaling(points: list[ScalingPoint], figures: dict[str, Figure]) -> str:
    if not points:
        return ""
    pair = f'<div class="pair">{chart_place("speed", figures)}{chart_place("split", figures)}</div>'
    return pair + _scaling_table(points)


def _key_figures(manifest: Manifest, summary: RunSummary) -> str:
    exposed = manifest.phases.get("exposed", 0.0) + manifest.phases.get("wait", 0.0)
    share = format_share(exposed, manifest.step_s_measured or 0)
    waiting = f"{share} communication and waiting" if "exposed" in manifest.phases else "waiting not measured"
    formula = "2(N−1)/N·S" if manifest.inside == "gloo" else "through shared memory"
    level = shard_level(summary.start)
    if level > 1:
        formula = f"of {manifest.sync}"
    expected = or_nothing(manifest.theoretical_bytes_per_step, format_bytes).replace(" B", "\u00a0B")
    theory = f"theory {formula}: {expected}"
    nodes = pluralize(len(manifest.nodes), "node")
    where = f"measured; {len(manifest.members)} at the end, {nodes} in all" if manifest.recoveries else f"on {nodes}"
    unknown = "not verified yet" if manifest.replicas > 1 else "one rank"
    replicas = {None: (NOTHING, unknown), True: ("identical", "bit for bit"), False: ("differ", "see below")}
    figures = [
        ("speed", or_nothing(summary.speed, format_rounded), f"{summary.unit.name} per second"),
        (
            "step",
            or_nothing(manifest.step_s_measured, format_ms),
            waiting,
        ),
        _exchange_figure(manifest, summary),
        ("sent per step and rank", or_nothing(manifest.wire_bytes_per_step, format_bytes), theory),
        ("loss", or_nothing(manifest.final_loss, format_loss), _about_loss(manifest)),
        ("ranks", str(manifest.world_size), where),
        ("model", or_nothing(manifest.model_params, format_count), "parameters"),
        ("replicas", *replicas[manifest.byte_equivalent]),
        *([_parts_figure(level, manifest, summary)] if level else []),
    ]
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in figures
    )
    return f'<dl class="figures">{"".join(boxes)}</dl>'


def _parts_figure(level: int, manifest: Manifest, summary: RunSummary) -> tuple[str, str, str]:
    """Return name, value and note of the parts into which the model was divided at the start."""
    ranks = 1 + bool(summary.start["copies"])
    divided = join_words(["moments", "gradients", "weights"][:level])
    note = (
        f"{manifest.sync}: each on {pluralize(ranks, 'rank')}, which keep {format_share(ranks, manifest.world_size)} "
    )
    return "parts", str(manifest.world_size), f"{note}of the {divided}"


def _exchange_figure(manifest: Manifest, summary: RunSummary) -> tuple[str, str, str]:
    """Return name, value and note of the all-reduce, or of the collectives of a script without DDP."""
    own = name_collectives(summary.collectives)
    if has_own_exchanges(summary.start):
        total_s = sum(calls.waited_s for calls in summary.collectives.values())
        return "collectives", format_ms(total_s) if own else NOTHING, own or NO_EXCHANGE
    p50_ms, p95_ms = manifest.allreduce_p50_ms, manifest.allreduce_p95_ms
    p95 = "not measured" if p95_ms is None else f"median; p95 {format_ms(1e-3 * p95_ms)}"
    note = f"{p95}; own collectives: {own}" if own else p95
    return "all-reduce", or_nothing(p50_ms, lambda ms: format_ms(1e-3 * ms)), note


def _about_loss(manifest: Manifest) -> str:
    if manifest.trains == "script":
        return LOSS_UNITS["script"]
    return f"validation {or_nothing(manifest.val_loss, '{:.3f}'.format)}"


def _logged_section(summary: RunSummary, figures: dict[str, Figure]) -> str:
    """Show what the user's program recorded: the last value of each name, and a curve of those with several."""
    if not summary.logged:
        return ""
    rows = []
    for name, values in summary.logged.items():
        last = max(values)
        rows.append([name, format_value(values[last]), last, format_value(min(values.values())),
                     format_value(max(values.values()))])  # fmt: skip
    table = html_table(["name", "last value", "at step", "lowest", "highest"], rows)
    charts = "".join(
        f"<div><h3>{escape(name)}</h3>{chart_place(key, figures)}</div>"
        for key, name in _logged_keys(summary).items()
        if key in figures
    )
    left_out = len(summary.logged) - _MOST_CURVES
    note = f"<p>The curves of {left_out} more names are not drawn.</p>" if left_out > 0 else ""
    return f'{table}<div class="pair">{charts}</div>{note}'


def _logged_keys(summary: RunSummary) -> dict[str, str]:
    """Return the names that get a curve, by the id of its place: a name can be any text."""
    return {f"logged-{number}": name for number, name in enumerate(list(summary.logged)[:_MOST_CURVES])}


def _replicas_section(manifest: Manifest) -> str:
    if manifest.byte_equivalent is None and manifest.replicas == 1:
        return "<p>One rank: there is no other replica to compare it with.</p>"
    if manifest.byte_equivalent is None:
        return (
            "<p>Not verified yet. <code>shoal verify RUN</code> compares the final state of all ranks bit for bit.</p>"
        )
    if manifest.byte_equivalent:
        return '<p class="good">All replicas are identical: every weight and every optimizer moment, to the bit.</p>'
    distance = manifest.max_abs_diff
    apart = f"at most {distance:.3g}" if distance is not None and math.isfinite(distance) else "no finite number"
    return (
        f'<p class="bad">The replicas differ; the largest difference is {escape(apart)}. '
        "<code>shoal verify RUN</code> names the first tensor that differs.</p>"
    )


def _prediction_section(manifest: Manifest, summary: RunSummary) -> str:
    """Compare prediction and measurement; empty without either."""
    prediction, measured_s = manifest.prediction, manifest.step_s_measured
    if prediction is None or measured_s is None:
        return ""
    rows = [
        _compared(PHASE_TEXTS[error.phase], error.predicted_s, error.measured_s)
        for error in phase_errors(prediction, summary)
    ]
    rows.append(_compared("the whole step", prediction.step_s, measured_s))
    words = f"<p>{escape(manifest.prediction_notes or '')}</p>"
    return html_table(["phase", "predicted (ms)", "measured (ms)", "difference (ms)"], rows) + words


def _compared(name: str, predicted_s: float, measured_s: float) -> list[str]:
    difference_s = measured_s - predicted_s
    return [name, f"{predicted_s * 1e3:.1f}", f"{measured_s * 1e3:.1f}", f"{difference_s * 1e3:+.1f}"]


def _ranks_section(summary: RunSummary) -> str:
    head = ["rank", "node", "device", "threads"]
    rows = [
        [rank.rank, rank.node, _fact(rank.start, "device"), _fact(rank.start, "threads")]
        for rank in summary.ranks.values()
    ]
    if any(rank.shard for rank in summary.ranks.values()):
        head += ["samples", "first text of its shard"]
        for row, rank in zip(rows, summary.ranks.values(), strict=True):
            row += [_samples(rank.shard), _fact(rank.shard, "first")]
    return html_table(head, rows)


def _scaling_table(points: list[ScalingPoint]) -> str:
    base, *_ = in_order(points)
    rows = [
        [
            point.ranks,
            point.threads or NOTHING,
            f"{point.tokens_per_s:,.0f}",
            f"{point.tokens_per_s / base.tokens_per_s:.2f}×",
            format_percent(efficiency(point, base)),
            f"{point.step_s * 1e3:.1f}",
            or_nothing(point.allreduce_s or None, lambda seconds: f"{1e3 * seconds:.1f}"),
        ]
        for point in in_order(points)
    ]
    head = ["ranks", "threads per rank", "tokens/s", "speed-up", "efficiency", "step (ms)", "all-reduce (ms)"]
    return html_table(head, rows)


def _manifest_section(manifest: Manifest) -> str:
    """Show every field of `manifest.json` that has no section of its own."""
    hidden = _SHOWN_ELSEWHERE if manifest.trains == "gpt" else _SHOWN_ELSEWHERE | _ONLY_OF_GPT
    fields = manifest.model_dump(mode="json", exclude=hidden)
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{html_value(value, key)}</td></tr>' for key, value in fields.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def _samples(shard: Event) -> str:
    return f"{shard['size']} of {shard['total']}" if {"size", "total"} <= shard.keys() else NOTHING


def _fact(record: Event, key: str) -> Any:
    value = record.get(key)
    return NOTHING if value is None else value


def _has_changed(summary: RunSummary) -> bool:
    return any(not generation.is_first for generation in summary.history)


def _members_chart(summary: RunSummary) -> Figure:
    """Draw a bar for every rank over the steps, one colour per lineage; abandoned steps are hatched."""
    ranks = [rank for rank in summary.took_part.values() if rank.spans]
    stands = {generation.generation: generation.stands for generation in summary.history}
    lineages = sorted({span.entered.lineage for rank in ranks for span in rank.spans})
    series = []
    for number, lineage in enumerate(lineages):
        for counts in (True, False):
            # The bar of step N spans N-1 to N: the state before and after it.
            spans = [
                [row, span.first - 1, span.last, f"steps {span.first}–{span.last}, generation {name}"]
                for row, rank in enumerate(ranks)
                for span in rank.spans
                if span.entered.lineage == lineage and stands.get(name := span.entered.generation) is counts
            ]
            title = f"lineage {lineage}" if counts else f"lineage {lineage}, abandoned"
            if spans:
                series.append({"name": title, "colour": series_colour(number), "spans": spans, "hatched": not counts})
    # A line where a generation begins. More than _MOST_MARKS lines would hide the bars.
    began = [generation for generation in summary.history if not generation.is_first][:_MOST_MARKS]
    marks = [
        {"x": generation.step, "colour": "ideal", "text": f"generation {generation.generation}", "quiet": True}
        for generation in began
    ]
    figure = make_bars([f"rank {rank.rank} ({rank.node})" for rank in ranks], series, "step")
    return figure | {"legend": True, "marks": marks, "last": max(summary.steps_done, 1)}


def _members_section(summary: RunSummary, manifest: Manifest, chart: str) -> str:
    """Describe the membership changes; empty without any."""
    if not _has_changed(summary):
        return ""
    cost = cost_sentence(manifest.recoveries, manifest.abandoned_steps, manifest.redone_steps)
    notes = "".join(f"<p>{escape(note)}</p>" for note in manifest.membership_notes)
    return f"<p>{escape(cost)}</p>{notes}{chart}{_recoveries_table(manifest.recoveries)}"


def _recoveries_table(recoveries: list[RecoveryRecord]) -> str:
    rows = [
        [
            recovery.generation,
            recovery.step,
            ", ".join(map(str, recovery.members)),
            NOTHING if recovery.seconds is None else f"{recovery.seconds:.1f} s",
            recovery.text + ("" if recovery.stands else " Abandoned later."),
        ]
        for recovery in recoveries
    ]
    return html_table(["generation", "after step", "ranks", "next commit", "what happened"], rows)


def _charts(summary: RunSummary, scaling: list[ScalingPoint], trains: str) -> dict[str, Figure]:
    """Return every figure that has data, by the id of its place on the page."""
    figures: dict[str, Figure] = {}
    if len(summary.loss):
        figures["loss"] = _loss_chart(summary, LOSS_UNITS[trains])
    for key, name in _logged_keys(summary).items():
        if len(summary.logged[name]) > 1:
            figures[key] = _logged_chart(name, summary.logged[name])
    if any(rank.phases for rank in summary.ranks.values()):
        figures["medians"] = _medians_chart(summary)
        timed = [rank for rank in summary.ranks.values() if rank.phases]
        for rank in timed:
            seconds = {phase: rank.series[f"{phase}_s"] for phase in PHASE_NAMES}
            figures[f"steps-{rank.rank}"] = make_areas(PHASE_NAMES, rank.steps, seconds, len(timed))
    if _has_changed(summary):
        figures["members"] = _members_chart(summary)
    if scaling:
        figures["speed"] = _speed_chart(in_order(scaling))
        figures["split"] = _split_chart(in_order(scaling))
    return figures


def _loss_chart(summary: RunSummary, unit: str) -> Figure:
    series = [make_curve("training", "measured", *thin_keeping_extremes(summary.loss_steps, summary.loss))]
    if at := sorted(summary.val_loss):
        values = [summary.val_loss[step] for step in at]
        series.append(make_curve("validation", "validation", at, values, dots=True))
    return make_lines(series, "step", f"loss ({unit})")


def _logged_chart(name: str, values: dict[int, float]) -> Figure:
    at = np.array(sorted(values), dtype=np.int64)
    steps, points = thin_keeping_extremes(at, np.array([values[step] for step in at.tolist()], dtype=np.float64))
    curve = make_curve(name, "measured", steps, points, dots=len(steps) < _MOST_DOTS)
    return make_lines([curve], "step", "", zero=False) | {"height": 240, "label": name}


def _medians_chart(summary: RunSummary) -> Figure:
    ranks = [rank for rank in summary.ranks.values() if rank.phases]
    return stack_parts([f"rank {rank.rank}" for rank in ranks], [rank.typical for rank in ranks], PHASE_NAMES)


def _speed_chart(points: list[ScalingPoint]) -> Figure:
    ranks, base = [point.ranks for point in points], points[0]
    ideal = [base.tokens_per_s * n / base.ranks for n in ranks]
    series = [
        make_curve("ideal", "ideal", ranks, ideal, dash=[6, 4]),
        make_curve("measured", "measured", ranks, [point.tokens_per_s for point in points], dots=True),
    ]
    return make_lines(series, "ranks", "tokens per second") | {"xTicks": ranks}


def _split_chart(points: list[ScalingPoint]) -> Figure:
    names = [name_ranks(point.ranks) for point in points]
    return stack_parts(names, [step_parts(point) for point in points], PART_NAMES)
