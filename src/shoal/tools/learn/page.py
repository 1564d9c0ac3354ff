"""`shoal learn report`: one page of everything that a learner did, pictures included."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path

from shoal.errors import DataError, UsageError
from shoal.run_folder import write_atomically
from shoal.tools.draw.pages import compose_page, html_head, html_section, html_table
from shoal.tools.learn.judge import LessonResult, read_results
from shoal.units import format_duration, pluralize

PAGE = "report.html"


def write_page(out: Path) -> Path:
    results = read_results(out)
    if not results:
        raise UsageError(
            f"no lesson was done yet in {out}", why="the report shows results of lessons", fix="shoal learn 1"
        )
    path = out / PAGE
    write_atomically(path, render_page(results, out))
    return path


def render_page(results: Mapping[int, LessonResult | DataError], out: Path) -> str:
    tried = [result for result in results.values() if isinstance(result, LessonResult)]
    passed = sum(result.was_passed for result in tried)
    facts = [f"{passed} passed of {pluralize(len(results), 'lesson')} tried"]
    facts += [_day(max(one.time for one in tried))] if tried else []
    rows = [
        [number, result.title, _progress(result), len(result.tries), _day(result.time)]
        if isinstance(result, LessonResult)
        else [number, "", f"damaged: {result.fix}", "", ""]
        for number, result in results.items()
    ]
    overview = html_table(["", "lesson", "verdict", "tries", "last"], rows)
    body = [html_head("shoal learn", facts, []), html_section("Lessons", overview)]
    body += [html_section(f"{result.number}. {result.title}", _lesson(result, out)) for result in tried]
    return compose_page("shoal learn", "\n".join(body), {})


def _lesson(result: LessonResult, out: Path) -> str:
    parts = [f"<p>{escape(result.question)}</p>"]
    if result.predictions:
        rows = [[one.label, *one.shown.values(), one.within, one.judgement] for one in result.predictions]
        parts.append(html_table(["", "prediction", "theory", "measurement", "right is", "verdict"], rows))
    parts.append(f"<p>Theory: {escape(result.theory)}</p>")
    for check in result.checks:
        seen = f": {check.seen}" if check.seen else ""
        mark = {"right": "✓", "wrong": "✗"}.get(check.judgement, f"{check.judgement}:")
        parts.append(f"<p><strong>{escape(mark)}</strong> {escape(check.text + seen)}</p>")
    parts.append(f"<p><strong>{escape(_state(result))}</strong>. {escape(result.explanation)}</p>")
    parts.append(f"<p>On a large cluster: {escape(result.cluster)}</p>")
    parts.append(_picture(out / result.picture, result.title))
    commands = "<br>".join(
        f"<code>{escape(one.command)}</code> {escape(format_duration(one.seconds))}" for one in result.commands
    )
    parts.append(f'<p class="soft">{commands}</p>')
    if len(result.tries) > 1:
        rows = [
            [_day(one.time), ", ".join(f"{name} {value}" for name, value in one.predictions.items()), one.verdict]
            for one in result.tries
        ]
        parts.append(html_table(["try", "predictions", "verdict"], rows))
    return "\n".join(filter(None, parts))


def _picture(path: Path, title: str) -> str:
    """Return the picture inside the page, so that the page can be sent as one file."""
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""
    return f'<p><img alt="{escape(title)}" src="data:image/png;base64,{data}"></p>'


def _progress(result: LessonResult) -> str:
    """Return what `shoal learn` says: a lesson that was passed stays so."""
    return f"passed (last try: {result.verdict})" if result.was_passed and not result.is_passed else _state(result)


def _state(result: LessonResult) -> str:
    notes = [
        *(["with the theory's predictions"] if result.took_theory and result.predictions else []),
        *(["short form: times not judged"] if result.quick else []),
    ]
    return result.verdict + (f" ({'; '.join(notes)})" if notes else "")


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
