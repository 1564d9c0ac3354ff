"""The report: one HTML file that needs no network, no server and no other file.

Everything that comes from the run is escaped where it enters the page, and the page's own policy allows only the two
scripts that belong to it, by their digests: text from a corpus or a log can be shown and cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from shoal.config.manifest import Manifest, RecoveryRecord
from shoal.control.membership.types import Ballot
from shoal.errors import ShoalError
from shoal.events import Event
from shoal.run_folder import RunFolder, write_atomically
from shoal.tools.report.explain_run import PHASE_TEXTS, explain_scaling, explain_step_time, phase_errors
from shoal.tools.report.figures import (
    IDEAL,
    LINEAGE_COLOURS,
    MEASURED,
    PHASE_COLOURS,
    PHASE_NAMES,
    STACK,
    VALIDATION,
    ScalingPoint,
    efficiency,
    in_order,
    read_scaling,
    step_parts,
)
from shoal.tools.report.manifest import manifest_of
from shoal.tools.report.membership import cost_sentence
from shoal.tools.report.rank_log import Floats, Steps
from shoal.tools.report.summary import RankSummary, RunSummary, summarize
from shoal.units import count, format_count, format_number, format_share, format_si, ms

# SECTION report/sections
# The parts of the report page that are text: key figures, tables, verdicts. Pure; everything is escaped here.


NOTHING = "–"
_ELSEWHERE = {"lesson_notes", "choice_notes", "recoveries", "membership_notes", "shoal_manifest"}


def key_figures(manifest: Manifest, summary: RunSummary) -> str:
    """What somebody wants to know who looks at the page for three seconds."""
    exposed = manifest.phases.get("exposed", 0.0) + manifest.phases.get("wait", 0.0)
    share = format_share(exposed, manifest.step_s_measured or 0)
    figures = [
        ("speed", _or_nothing(summary.tokens_per_s, "{:,.0f}"), "tokens per second"),
        ("step", _duration(manifest.step_s_measured), f"{share} communication and waiting"),
        (
            "all-reduce",
            _milliseconds(manifest.allreduce_p50_ms),
            "not measured"
            if manifest.allreduce_p95_ms is None
            else f"median; p95 {_milliseconds(manifest.allreduce_p95_ms)}",
        ),
        ("sent per step and rank", _bytes(manifest.wire_bytes_per_step), _theory(manifest)),
        ("loss", _or_nothing(manifest.final_loss, "{:.3f}"), f"validation {_or_nothing(manifest.val_loss, '{:.3f}')}"),
        ("ranks", str(manifest.world_size), _where(manifest)),
        ("model", _or_nothing(manifest.model_params, "{}", format_count), "parameters"),
        ("replicas", *_replicas_figure(manifest)),
    ]
    return f'<dl class="figures">{"".join(_key_figure(*figure) for figure in figures)}</dl>'


def replicas_section(manifest: Manifest) -> str:
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


def choice_section(manifest: Manifest) -> str:
    """Nothing where there was nothing to choose."""
    return f"<p>{escape(manifest.choice_notes)}</p>" if manifest.choice_notes else ""


def prediction_section(manifest: Manifest, summary: RunSummary) -> str:
    """Nothing where nobody predicted, or nothing has been measured yet."""
    prediction, measured_s = manifest.prediction, manifest.step_s_measured
    if prediction is None or measured_s is None:
        return ""
    rows = [
        _compared(PHASE_TEXTS[error.phase], error.predicted_s, error.measured_s)
        for error in phase_errors(prediction, summary)
    ]
    rows.append(_compared("the whole step", prediction.step_s, measured_s))
    words = f"<p>{escape(manifest.prediction_notes or '')}</p>"
    return table(["phase", "predicted (ms)", "measured (ms)", "difference (ms)"], rows) + words


def _compared(name: str, predicted_s: float, measured_s: float) -> list[str]:
    difference_s = measured_s - predicted_s
    return [name, f"{predicted_s * 1e3:.1f}", f"{measured_s * 1e3:.1f}", f"{difference_s * 1e3:+.1f}"]


def faults_section(summary: RunSummary) -> str:
    return "".join(_notice("fault", fault) for fault in summary.faults)


def warnings_section(summary: RunSummary) -> str:
    return "".join(_notice("warning", warning) for warning in summary.warnings)


def ranks_section(summary: RunSummary) -> str:
    rows = [
        [
            rank.rank,
            rank.node,
            _fact(rank.start, "device"),
            _fact(rank.start, "threads"),
            _samples(rank.shard),
            _fact(rank.shard, "first"),
        ]
        for rank in summary.ranks.values()
    ]
    return table(["rank", "node", "device", "threads", "samples", "first text of its shard"], rows)


def phases_legend() -> str:
    """One legend for all figures of a step's phases; on a phone plotly's own takes more room than the bars."""
    marks = (
        f'<span><i style="background:{PHASE_COLOURS[phase]}"></i>{escape(name)}</span>'
        for phase, name in PHASE_NAMES.items()
    )
    return f'<p class="legend">{"".join(marks)}</p>'


def scaling_table(points: list[ScalingPoint]) -> str:
    base, *_ = in_order(points)
    rows = [
        [
            point.ranks,
            point.threads or NOTHING,
            f"{point.tokens_per_s:,.0f}",
            f"{point.tokens_per_s / base.tokens_per_s:.2f}×",
            f"{efficiency(point, base):.0%}",
            f"{point.step_s * 1e3:.1f}",
            _or_nothing(point.allreduce_s or None, "{:.1f}", lambda seconds: seconds * 1e3),
        ]
        for point in in_order(points)
    ]
    head = ["ranks", "threads per rank", "tokens/s", "speed-up", "efficiency", "step (ms)", "all-reduce (ms)"]
    return table(head, rows)


def manifest_section(manifest: Manifest) -> str:
    """Every field as it is in `manifest.json`; some have their own place on the page."""
    fields = manifest.model_dump(mode="json", exclude=_ELSEWHERE)
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th><td>{_value(value)}</td></tr>' for key, value in fields.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'


def table(head: list[str], rows: Iterable[list[Any]]) -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _key_figure(name: str, value: str, note: str) -> str:
    return f'<div class="figure"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'


def _notice(kind: str, notice: Event) -> str:
    seen = notice.get("seen") or notice.get("error") or "no text"
    why, fix = str(notice.get("why") or ""), str(notice.get("fix") or "")
    title = f'<strong>{escape(str(seen))}</strong> <span class="soft">rank {escape(str(notice.get("rank")))}</span>'
    lines = [title, escape(why), f"<code>{escape(fix)}</code>" if fix else ""]
    return f'<p class="{kind}">{"<br>".join(line for line in lines if line)}</p>'


def _replicas_figure(manifest: Manifest) -> tuple[str, str]:
    if manifest.byte_equivalent is None:
        return NOTHING, "not verified yet"
    return ("identical", "bit for bit") if manifest.byte_equivalent else ("differ", "see below")


def _where(manifest: Manifest) -> str:
    nodes = count(len(manifest.nodes), "node")
    if not manifest.recoveries:
        return f"on {nodes}"
    return f"measured; {len(manifest.members)} at the end, {nodes} in all"


def _theory(manifest: Manifest) -> str:
    formula = "2(N−1)/N·S" if manifest.inside == "gloo" else "through shared memory"
    return f"theory {formula}: {_bytes(manifest.theoretical_bytes_per_step)}"


def _samples(shard: Event) -> str:
    return f"{shard['size']} of {shard['total']}" if {"size", "total"} <= shard.keys() else NOTHING


def _fact(record: Event, key: str) -> Any:
    value = record.get(key)
    return NOTHING if value is None else value


def _duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else ms(seconds)


def _milliseconds(value: float | None) -> str:
    return NOTHING if value is None else ms(1e-3 * value)


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else format_si(value, "B")


def _or_nothing(value: float | None, form: str, convert: Any = None) -> str:
    if value is None:
        return NOTHING
    return form.format(convert(value) if convert else value)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"{escape(str(key))}: {_value(item)}" for key, item in value.items()) or NOTHING
    if isinstance(value, list):
        return "<br>".join(f"{_value(item)}" for item in value) or NOTHING
    if isinstance(value, float):
        value = format_number(value, 6)
    return NOTHING if value is None else escape(str(value))


# SECTION report/members_picture
# The report's "Who took part": a bar for every rank over the steps, the sentences, and what it cost. Pure.


_BAR_PX = 34
_MOST_MARKS = 40


def has_changed(summary: RunSummary) -> bool:
    return any(not stretch.is_first for stretch in summary.history)


def members_chart(summary: RunSummary) -> Figure:
    """One colour a lineage; one that was given up is hatched where it does not count."""
    ranks = [rank for rank in summary.took_part.values() if rank.spans]
    stands = {stretch.generation: stretch.stands for stretch in summary.history}
    lineages = sorted({span.entered.lineage for rank in ranks for span in rank.spans})
    traces = []
    for number, lineage in enumerate(lineages):
        colour = LINEAGE_COLOURS[number % len(LINEAGE_COLOURS)]
        for counts in (True, False):
            bars = _bars(ranks, lineage, {name for name, each in stands.items() if each is counts})
            if bars["x"]:
                traces.append(_trace(bars, lineage, colour, counts))
    return {"data": traces, "layout": _layout(summary, [_name(rank) for rank in ranks])}


def members_section(summary: RunSummary, manifest: Manifest, chart: str) -> str:
    """Nothing where nobody came or went."""
    if not has_changed(summary):
        return ""
    cost = cost_sentence(manifest.recoveries, manifest.abandoned_steps, manifest.redone_steps)
    notes = "".join(f"<p>{escape(note)}</p>" for note in manifest.membership_notes)
    return f"<p>{escape(cost)}</p>{notes}{chart}{_table(manifest.recoveries)}"


def _bars(ranks: list[RankSummary], lineage: Ballot, generations: set[Ballot]) -> dict[str, list[Any]]:
    bars: dict[str, list[Any]] = {"y": [], "base": [], "x": [], "text": []}
    for rank in ranks:
        for span in rank.spans:
            if span.entered.lineage == lineage and span.entered.generation in generations:
                bars["y"].append(_name(rank))
                # A step's bar ends at its number, as the state does that it leaves behind.
                bars["base"].append(span.first - 1)
                bars["x"].append(span.last - span.first + 1)
                bars["text"].append(f"steps {span.first}–{span.last}, generation {span.entered.generation}")
    return bars


def _trace(bars: dict[str, list[Any]], lineage: Ballot, colour: str, counts: bool) -> Figure:
    hatched = {} if counts else {"pattern": {"shape": "/", "fgcolor": colour, "bgcolor": "rgba(0,0,0,0)", "size": 6}}
    name = f"lineage {lineage}" if counts else f"lineage {lineage}, given up"
    look = {"color": colour, "line": {"width": 1, "color": colour}, **hatched}
    shown = {"textposition": "none", "hovertemplate": "%{y}: %{text}<extra></extra>"}
    return {"type": "bar", "orientation": "h", "name": name, "marker": look, "width": 0.55, **bars, **shown}


def _layout(summary: RunSummary, names: list[str]) -> Figure:
    """A dotted line where a generation begins, with its number above; too many of them would hide the bars."""
    marks = [stretch for stretch in summary.history if not stretch.is_first][:_MOST_MARKS]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": IDEAL, "width": 1, "dash": "dot"}}
    return {
        "barmode": "overlay",
        "height": 110 + _BAR_PX * len(names),
        "showlegend": True,
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero", "range": [0, max(summary.steps_done, 1)]},
        "yaxis": {"autorange": "reversed", "type": "category", "categoryarray": names},
        "shapes": [{**line, "x0": stretch.step, "x1": stretch.step} for stretch in marks],
    }


def _table(recoveries: list[RecoveryRecord]) -> str:
    head = ("generation", "after step", "ranks", "next commit", "what happened")
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(each))}</tr>" for each in recoveries)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(recovery: RecoveryRecord) -> tuple[str, ...]:
    seconds = "–" if recovery.seconds is None else f"{recovery.seconds:.1f} s"
    members = ", ".join(map(str, recovery.members))
    given_up = "" if recovery.stands else " Given up later."
    return recovery.generation, str(recovery.step), members, seconds, recovery.text + given_up


def _name(rank: RankSummary) -> str:
    # Plotly takes tags in a label for its own.
    return f"rank {rank.rank} ({escape(rank.node)})"


# SECTION report/charts
# The figures of the report page, as plain plotly data. Pure: colours of text and paper come with the page.


Figure = dict[str, Any]

MAX_POINTS = 1000


def charts(summary: RunSummary, scaling: list[ScalingPoint]) -> dict[str, Figure]:
    """Every figure that has something to show, by the id of its place on the page."""
    figures: dict[str, Figure] = {}
    if len(summary.loss):
        figures["loss"] = loss_chart(summary)
    if any(rank.phases for rank in summary.ranks.values()):
        figures["medians"] = medians_chart(summary)
        figures |= {f"steps-{rank.rank}": steps_chart(rank) for rank in summary.ranks.values() if rank.phases}
    if has_changed(summary):
        figures["members"] = members_chart(summary)
    if scaling:
        figures["speed"] = speed_chart(in_order(scaling))
        figures["split"] = split_chart(in_order(scaling))
    return figures


def loss_chart(summary: RunSummary) -> Figure:
    steps, loss = thin_keeping_extremes(summary.loss_steps, summary.loss)
    traces = [_line("training", steps, loss, MEASURED)]
    if summary.val_loss:
        at = sorted(summary.val_loss)
        validation = _line("validation", at, [_json_number(summary.val_loss[step]) for step in at], VALIDATION)
        traces.append({**validation, "mode": "lines+markers"})
    return _figure(traces, x="step", y="loss (nats per token)")


def steps_chart(rank: RankSummary) -> Figure:
    """Where each step's time went, stacked; averaged over neighbours where there are more steps than pixels."""
    traces = []
    for phase, name in PHASE_NAMES.items():
        steps, seconds = thin_by_mean(rank.steps, rank.series[f"{phase}_s"])
        if any(seconds):
            area = {"stackgroup": "step", "mode": "none", "fillcolor": PHASE_COLOURS[phase]}
            traces.append(
                {"name": name, "x": steps, "y": _milliseconds_charts(seconds), **area, "hoverinfo": "x+y+name"}
            )
    return _without_legend(_figure(traces, x="step", y="ms per step"))


def medians_chart(summary: RunSummary) -> Figure:
    ranks = [rank for rank in summary.ranks.values() if rank.phases]
    names = [f"rank {rank.rank}" for rank in ranks]
    traces = []
    for phase, name in PHASE_NAMES.items():
        seconds = [rank.typical.get(phase, 0.0) for rank in ranks]
        if any(seconds):
            traces.append(_bar(name, _milliseconds_charts(seconds), names, PHASE_COLOURS[phase], horizontal=True))
    figure = _figure(traces, x="ms per step", y="")
    figure["layout"] |= {"barmode": "stack", "height": 90 + 44 * len(ranks)}
    figure["layout"]["yaxis"] |= {"autorange": "reversed"}
    return _without_legend(figure)


def speed_chart(points: list[ScalingPoint]) -> Figure:
    ranks = [point.ranks for point in points]
    base = points[0]
    ideal = _line("ideal", ranks, [base.tokens_per_s * n / base.ranks for n in ranks], IDEAL)
    ideal["line"]["dash"] = "dash"
    measured = _line("measured", ranks, [point.tokens_per_s for point in points], MEASURED)
    figure = _figure([ideal, {**measured, "mode": "lines+markers"}], x="ranks", y="tokens per second")
    figure["layout"]["xaxis"] |= {"tickvals": ranks}
    return figure


def split_chart(points: list[ScalingPoint]) -> Figure:
    names = [str(point.ranks) for point in points]
    parts = [step_parts(point) for point in points]
    traces = [
        _bar(label, names, [round(part[cause], 3) for part in parts], colour)
        for cause, (label, colour) in STACK.items()
    ]
    figure = _figure(traces, x="ranks", y="ms per step")
    figure["layout"] |= {"barmode": "stack"}
    figure["layout"]["xaxis"] |= {"type": "category"}
    return figure


def thin_keeping_extremes(steps: Steps, values: Floats) -> tuple[list[int], list[float | None]]:
    """At most `MAX_POINTS`: of each group of steps the lowest and the highest, so that no spike is lost."""
    if len(steps) <= MAX_POINTS:
        return steps.tolist(), [_json_number(value) for value in values.tolist()]
    keep: set[int] = set()
    for group in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        known = np.nan_to_num(values[group], nan=math.inf)
        keep |= {int(group[known.argmin()]), int(group[known.argmax()])}
    rows = sorted(keep)
    return steps[rows].tolist(), [_json_number(value) for value in values[rows].tolist()]


def thin_by_mean(steps: Steps, values: Floats) -> tuple[list[int], list[float]]:
    """At most `MAX_POINTS`, each the mean of its group of steps; a step that recorded nothing counts as zero."""
    known = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    if len(steps) <= MAX_POINTS:
        return steps.tolist(), known.tolist()
    groups = np.array_split(np.arange(len(steps)), MAX_POINTS)
    return [int(steps[group[0]]) for group in groups], [float(known[group].mean()) for group in groups]


def _figure(traces: list[Figure], x: str, y: str) -> Figure:
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}}
    return {"data": traces, "layout": {**axes, "height": 360}}


def _without_legend(figure: Figure) -> Figure:
    """The page has one legend for all figures of phases."""
    figure["layout"]["showlegend"] = False
    return figure


def _line(name: str, x: list[int], y: list[Any], colour: str) -> Figure:
    return {"type": "scatter", "name": name, "x": x, "y": y, "mode": "lines", "line": {"color": colour, "width": 2}}


def _bar(name: str, x: list[Any], y: list[Any], colour: str, horizontal: bool = False) -> Figure:
    turned = {"orientation": "h"} if horizontal else {}
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour}, "width": 0.55, **turned}


def _milliseconds_charts(seconds: list[float]) -> list[float]:
    return [round(value * 1e3, 3) for value in seconds]


def _json_number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity; a gap in the curve says it better than a string."""
    return value if math.isfinite(value) else None


def write_report(run: RunFolder, scaling: list[ScalingPoint] | None = None, out: Path | None = None) -> Path:
    """Writes `report.html` from the folder as it stands, into that folder or into `out`; without `scaling`, from the
    folder's own `scaling.json`."""
    points = scaling or read_scaling(run)
    summary = summarize(run.read_all_events())
    page = render_page(summary, manifest_of(run, summary, None, points), points, name=run.path.name)
    file = run.report if out is None else out / run.report.name
    try:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, page)
    except OSError as error:
        raise ShoalError(
            f"cannot write {file}: {(error.strerror or str(error)).lower()}",
            why="what the run recorded is safe; only the page made from it is missing",
            fix=f"write it elsewhere: shoal report {shlex.quote(str(run.path))} --out FOLDER",
        ) from None
    return file


def render_page(
    summary: RunSummary, manifest: Manifest, scaling: list[ScalingPoint] | None = None, name: str = ""
) -> str:
    """The whole page as text; `name` is the run's, for its title."""
    # Imported here because plotly takes as long to import as a short command takes to run.
    from plotly.offline import get_plotlyjs

    points = scaling or []
    figures = charts(summary, points)
    scripts = [str(get_plotlyjs()), _asset("page.js")]
    title = f"{name or manifest.preset} · {manifest.status}"
    return _PAGE.format(
        policy=_policy(scripts),
        title=escape(title),
        style=_asset("page.css"),
        body=_body(summary, manifest, points, figures, name or manifest.preset),
        figures=embed_json(figures),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def embed_json(value: object) -> str:
    """JSON for a script element, which ends at `</` whatever the JSON says; `<` has another spelling in strings."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _body(
    summary: RunSummary, manifest: Manifest, points: list[ScalingPoint], figures: dict[str, Figure], name: str
) -> str:
    parts = [
        _head(manifest, name),
        _section("What went wrong", faults_section(summary)),
        key_figures(manifest, summary),
        _section("What the numbers say", _lesson(summary, points)),
        _section("Who took part", members_section(summary, manifest, _chart("members", figures))),
        _section("How replicas agree", choice_section(manifest)),
        _section("Loss", _chart("loss", figures)),
        _section("Where a step's time goes", _times(summary, figures)),
        _section("Predicted and measured", prediction_section(manifest, summary)),
        _section("Scaling", _scaling(points, figures)),
        _section("Replicas", replicas_section(manifest)),
        _section("Ranks and their data", ranks_section(summary) if summary.ranks else ""),
        _section("Warnings", warnings_section(summary)),
        _section("Manifest", manifest_section(manifest)),
    ]
    return "\n".join(part for part in parts if part)


def _head(manifest: Manifest, name: str) -> str:
    planned = f"{manifest.steps:,} of {manifest.steps_planned:,} steps"
    facts = [manifest.status, planned, f"preset {manifest.preset}", manifest.data_source, _day(manifest.created)]
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f'<h1>{escape(name)}</h1>\n<p class="soft">{line}</p>'


def _day(created: str | None) -> str:
    return created[:16].replace("T", " ") + " UTC" if created else ""


def _lesson(summary: RunSummary, points: list[ScalingPoint]) -> str:
    texts = [explain_scaling(points)] if len(points) > 1 else []
    return "".join(f'<p class="lesson">{escape(text)}</p>' for text in [*texts, explain_step_time(summary)])


def _times(summary: RunSummary, figures: dict[str, Figure]) -> str:
    if "medians" not in figures:
        return ""
    window = f" over steps {summary.measured[0]}–{summary.measured[1]}" if summary.measured else ""
    return (
        f"{phases_legend()}<h3>A median step{window}</h3>{_chart('medians', figures)}"
        f"<h3>Over the steps of {_rank_choice(figures)}</h3>{_steps_chart(figures)}"
    )


def _rank_choice(figures: dict[str, Figure]) -> str:
    ranks = [name.removeprefix("steps-") for name in figures if name.startswith("steps-")]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    options = "".join(f'<option value="steps-{rank}">rank {rank}</option>' for rank in ranks)
    return f'<select id="rank" aria-label="rank" autocomplete="off">{options}</select>'


def _steps_chart(figures: dict[str, Figure]) -> str:
    first = next(name for name in figures if name.startswith("steps-"))
    return f'<div class="chart" id="steps" data-figure="{first}"></div>'


def _scaling(points: list[ScalingPoint], figures: dict[str, Figure]) -> str:
    if not points:
        return ""
    pair = f'<div class="pair">{_chart("speed", figures)}{_chart("split", figures)}</div>'
    return pair + scaling_table(points)


def _chart(name: str, figures: dict[str, Figure]) -> str:
    return f'<div class="chart" data-figure="{name}"></div>' if name in figures else ""


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _asset(name: str) -> str:
    return (resources.files("shoal.tools.report") / "assets" / name).read_text(encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<noscript><p>The figures of this page are drawn by a script inside it, and scripts are switched off.</p></noscript>
<script type="application/json" id="figures">{figures}</script>
{scripts}
</body>
</html>
"""
