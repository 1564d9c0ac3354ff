"""Pages in one file that need no network: their parts, and the whole document with its policy.

All text of a run is escaped where it enters a page. The page's content security policy allows only its own script and
style, by their digests: text from a corpus or a log is shown and cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from shoal.events import Event
from shoal.tools.draw.palette import css_variables
from shoal.units import format_number, format_si

NOTHING = "–"

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
