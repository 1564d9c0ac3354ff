"""Pages in one file that need no network: their charts, their parts, and the document with its policy.

All text of a run is escaped where it enters a page. The page's content security policy allows only its own script and
style, by their digests: text from a corpus or a log is shown and cannot run. Charts are drawn by assets/chart.js, whose
labels are text. A curve is thinned honestly: what is drawn of many steps has their lowest and their highest value.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.events import Event
from shoal.tools.draw.palette import SERIES, css_variables
from shoal.units import format_number, format_si

NOTHING = "–"

Figure = dict[str, Any]  # assets/chart.js says what it has
Floats = NDArray[np.float64]

MAX_POINTS = 1000
# All ranks together: 64 ranks must not make the page of a long run large.
_MAX_ROWS = 8 * MAX_POINTS
_LEAST_ROWS = 100
# A distance of this many usual ones between two rows is a gap: the rank was away.
_GAP = 3
_BAR_PX = 34

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
<noscript><p>A script inside this page draws its figures, and scripts are switched off.</p></noscript>
<script type="application/json" id="figures">{figures}</script>
<script>{script}</script>
</body>
</html>
"""


def compose_page(title: str, body: str, figures: Mapping[str, object]) -> str:
    """Return the HTML document of a report."""
    script, style = page_script("shoal.tools.report"), page_style("shoal.tools.report")
    return _PAGE.format(
        policy=page_policy(script, style),
        title=escape(title),
        style=style,
        body=body,
        figures=embed_json(figures),
        script=script,
    )


def embed_json(value: object) -> str:
    """Return JSON for a script element. An HTML parser ends the element at any `</`, so `<` is escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_style(package: str) -> str:
    """Return the style of a page: the colours, what pages have in common, and the package's own."""
    return css_variables() + _asset("shoal.tools.draw", "page.css") + _asset(package, "page.css")


def page_script(package: str) -> str:
    return _asset("shoal.tools.draw", "chart.js") + _asset(package, "page.js")


def page_policy(script: str, style: str) -> str:
    """Return a content security policy that allows one script and one style, by their digests."""
    return (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:; base-uri 'none'"
    )


def _asset(package: str, name: str) -> str:
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def html_head(name: str, facts: Sequence[str], commands: Sequence[str]) -> str:
    """Return the title, the facts in one line, and the command of each launch."""
    line = " · ".join(escape(fact) for fact in facts if fact)
    typed = "".join(f"<br><code>{escape(command)}</code>" for command in commands)
    return f'<h1>{escape(name)}</h1>\n<p class="soft">{line}{typed}</p>'


def html_section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def html_table(head: list[str], rows: Iterable[list[Any]]) -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def html_notice(kind: str, notice: Event) -> str:
    seen = notice.get("seen") or notice.get("error") or "no text"
    why, fix = str(notice.get("why") or ""), str(notice.get("fix") or "")
    rank = notice.get("rank")
    by = "" if rank is None else f' <span class="soft">rank {escape(str(rank))}</span>'
    title = f"<strong>{escape(str(seen))}</strong>{by}"
    lines = [title, escape(why), f"<code>{escape(fix)}</code>" if fix else ""]
    return f'<p class="{kind}">{"<br>".join(line for line in lines if line)}</p>'


def html_value(value: Any, name: str = "") -> str:
    """Return a value as a person reads it; that of a field whose name says bytes with its unit."""
    if isinstance(value, dict):
        return (
            "<br>".join(f"{escape(str(key))}: {html_value(item, str(key))}" for key, item in value.items()) or NOTHING
        )
    if isinstance(value, list):
        return "<br>".join(f"{html_value(item)}" for item in value) or NOTHING
    if "bytes" in name and isinstance(value, int | float):
        value = format_bytes(value)
    elif isinstance(value, float):
        value = format_number(value, 6)
    return NOTHING if value is None else escape(str(value))


def or_nothing(value: float | None, form: Callable[[float], str]) -> str:
    return NOTHING if value is None else form(value)


def format_bytes(count: float) -> str:
    return format_si(count, "B")


# Charts


def make_lines(series: Sequence[Figure], x: str, y: str, *, zero: bool = True, legend: bool | None = None) -> Figure:
    """Return curves. An axis that begins at zero makes a flat line of a value such as an accuracy near 1."""
    return {"kind": "lines", "series": series, "x": x, "y": y, "zero": zero, "legend": legend, "height": 360}


def make_bars(names: Sequence[str], series: Sequence[Figure], x: str) -> Figure:
    """Return horizontal bars, one for each name."""
    height = 56 + _BAR_PX * len(names)
    return {"kind": "bars", "names": names, "series": series, "x": x, "height": height}


def stack_parts(names: Sequence[str], steps: Sequence[Mapping[str, float]], titles: Mapping[str, str]) -> Figure:
    """Stack the parts of steps, given in seconds, one bar for each name. The keys of `titles` are colours too."""
    series = [
        {"name": title, "colour": part, "values": [_short(1e3 * step.get(part, 0.0)) for step in steps]}
        for part, title in titles.items()
        if any(step.get(part) for step in steps)
    ]
    return make_bars(names, series, "ms per step")


def make_areas(
    names: Mapping[str, str], steps: NDArray[np.int64], parts: Mapping[str, Floats], ranks: int = 1
) -> Figure:
    """Stack the parts of each step, in ms; `names` are those of the parts, whose colours have the same keys.

    Of more steps than can be drawn each row is the mean of some, and has the longest of them as well.
    """
    known = {part: 1e3 * np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0) for part, values in parts.items()}
    known = {part: values for part, values in known.items() if values.any()}
    most = max(_LEAST_ROWS, min(MAX_POINTS, _MAX_ROWS // ranks))
    is_thinned = len(steps) > most
    rows: list[list[float] | None] = []
    totals = np.sum(list(known.values()), axis=0)
    usual = max(1.0, len(steps) / most)
    for group in np.array_split(np.arange(len(steps)), min(most, len(steps))) if known else ():
        row = [int(steps[group[0]]), *(_short(float(values[group].mean())) for values in known.values())]
        if rows and rows[-1] and row[0] - rows[-1][0] > _GAP * usual:
            rows.append(None)
        rows.append([*row, _short(float(totals[group].max()))] if is_thinned else row)
    series = [{"name": names[part], "colour": part} for part in known]
    panels = [{"name": "", "rows": rows}]
    unit = "ms per step: means, and the longest as a line" if is_thinned else "ms per step"
    labels = {"x": "step", "y": unit, "height": 360}
    return {"kind": "areas", "series": series, "panels": panels, "thinned": is_thinned, **labels}


def series_colour(number: int) -> str:
    return f"series-{number % len(SERIES)}"


def make_curve(name: str, colour: str, x: Sequence[int], y: Sequence[float], **look: Any) -> Figure:
    """Return one series of `make_lines`; a value that is not finite is a gap."""
    points = [[place, _short(value) if math.isfinite(value) else None] for place, value in zip(x, y, strict=True)]
    return {"name": name, "colour": colour, "points": points, **look}


def thin_keeping_extremes(steps: NDArray[np.int64], values: Floats) -> tuple[list[int], list[float]]:
    """Keep the lowest and the highest of each group of steps, so that no spike is lost, and a gap where one has any."""
    if len(steps) <= MAX_POINTS:
        return steps.tolist(), values.tolist()
    keep: set[int] = set()
    for group in np.array_split(np.arange(len(steps)), MAX_POINTS // 2):
        is_known = np.isfinite(values[group])
        if known := group[is_known].tolist():
            keep |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
        keep |= set(group[~is_known][:1].tolist())
    rows = sorted(keep)
    return steps[rows].tolist(), values[rows].tolist()


def thin_with_envelope(steps: NDArray[np.int64], values: Floats) -> list[list[float | None]]:
    """Return points of `make_lines`: of many, means of groups of steps, each with the lowest and the highest."""
    points: list[list[float | None]] = []
    for group in np.array_split(np.arange(len(steps)), min(len(steps), MAX_POINTS) or 1):
        known = values[group][np.isfinite(values[group])]
        if not len(known):
            points += [[int(steps[row]), None] for row in group[:1]]
            continue
        band = [_short(float(known.min())), _short(float(known.max()))] if len(group) > 1 else []
        points.append([int(steps[group[0]]), _short(float(known.mean())), *band])
    return points


def _short(value: float) -> float:
    """Return five digits: on a chart more cannot be seen."""
    text = f"{value:.5g}"
    return int(text) if text.isdecimal() else float(text)


def chart_place(name: str, figures: dict[str, Figure]) -> str:
    """Return the place of a figure on the page; nothing if it has no data."""
    return f'<div class="chart" data-figure="{escape(name)}"></div>' if name in figures else ""
