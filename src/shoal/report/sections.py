"""The parts of the report page that are text: key figures, tables, verdicts. Pure; everything is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

from shoal.config.manifest import Manifest
from shoal.events import Event
from shoal.report.explain_prediction import NAMES, phase_errors
from shoal.report.palette import PHASE_COLOURS, PHASE_NAMES
from shoal.report.scaling import ScalingPoint, efficiency, in_order
from shoal.report.summary import Summary
from shoal.report.wording import count, ms
from shoal.units import format_count, format_number, format_share, format_si

NOTHING = "–"
_ELSEWHERE = {"lesson_notes", "choice_notes", "recoveries", "membership_notes", "shoal_manifest"}


def key_figures(manifest: Manifest, summary: Summary) -> str:
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


def prediction_section(manifest: Manifest, summary: Summary) -> str:
    """Nothing where nobody predicted, or nothing has been measured yet."""
    prediction, measured_s = manifest.prediction, manifest.step_s_measured
    if prediction is None or measured_s is None:
        return ""
    rows = [
        _compared(NAMES[each.phase], each.predicted_s, each.measured_s) for each in phase_errors(prediction, summary)
    ]
    rows.append(_compared("the whole step", prediction.step_s, measured_s))
    words = f"<p>{escape(manifest.prediction_notes or '')}</p>"
    return table(["phase", "predicted (ms)", "measured (ms)", "difference (ms)"], rows) + words


def _compared(name: str, predicted_s: float, measured_s: float) -> list[str]:
    difference_s = measured_s - predicted_s
    return [name, f"{predicted_s * 1e3:.1f}", f"{measured_s * 1e3:.1f}", f"{difference_s * 1e3:+.1f}"]


def faults_section(summary: Summary) -> str:
    return "".join(_notice("fault", fault) for fault in summary.faults)


def warnings_section(summary: Summary) -> str:
    return "".join(_notice("warning", warning) for warning in summary.warnings)


def ranks_section(summary: Summary) -> str:
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
