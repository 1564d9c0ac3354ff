"""The report's "Who took part": a bar for every rank over the steps, the sentences, and what it cost. Pure."""

from __future__ import annotations

from html import escape
from typing import Any

from shoal.config.manifest import Manifest, RecoveryRecord
from shoal.control.membership.generation import Ballot
from shoal.report.changes import cost_sentence
from shoal.report.palette import IDEAL, LINEAGE_COLOURS
from shoal.report.summary import RankSummary, Summary

Figure = dict[str, Any]

_BAR_PX = 34
_MOST_MARKS = 40


def has_changed(summary: Summary) -> bool:
    return any(not stretch.is_first for stretch in summary.history)


def members_chart(summary: Summary) -> Figure:
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


def members_section(summary: Summary, manifest: Manifest, chart: str) -> str:
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


def _layout(summary: Summary, names: list[str]) -> Figure:
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
