"""The report: one HTML file that needs no network, no server and no other file.

Everything that comes from the run is escaped where it enters the page, and the page's own policy allows only the two
scripts that belong to it, by their digests: text from a corpus or a log can be shown and cannot run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from html import escape
from importlib import resources
from pathlib import Path

from shoal.config.manifest import Manifest
from shoal.errors import ShoalError
from shoal.report import sections
from shoal.report.charts import Figure, charts
from shoal.report.explain_run import explain_single
from shoal.report.explain_scaling import explain
from shoal.report.finish import manifest_of
from shoal.report.members_picture import members_section
from shoal.report.scaling import ScalingPoint, read_scaling
from shoal.report.summary import Summary, summarize
from shoal.runfolder import RunFolder, write_atomically


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


def render_page(summary: Summary, manifest: Manifest, scaling: list[ScalingPoint] | None = None, name: str = "") -> str:
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
    summary: Summary, manifest: Manifest, points: list[ScalingPoint], figures: dict[str, Figure], name: str
) -> str:
    parts = [
        _head(manifest, name),
        _section("What went wrong", sections.faults_section(summary)),
        sections.key_figures(manifest, summary),
        _section("What the numbers say", _lesson(summary, points)),
        _section("Who took part", members_section(summary, manifest, _chart("members", figures))),
        _section("How replicas agree", sections.choice_section(manifest)),
        _section("Loss", _chart("loss", figures)),
        _section("Where a step's time goes", _times(summary, figures)),
        _section("Predicted and measured", sections.prediction_section(manifest, summary)),
        _section("Scaling", _scaling(points, figures)),
        _section("Replicas", sections.replicas_section(manifest)),
        _section("Ranks and their data", sections.ranks_section(summary) if summary.ranks else ""),
        _section("Warnings", sections.warnings_section(summary)),
        _section("Manifest", sections.manifest_section(manifest)),
    ]
    return "\n".join(part for part in parts if part)


def _head(manifest: Manifest, name: str) -> str:
    planned = f"{manifest.steps:,} of {manifest.steps_planned:,} steps"
    facts = [manifest.status, planned, f"preset {manifest.preset}", manifest.data_source, _day(manifest.created)]
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f'<h1>{escape(name)}</h1>\n<p class="soft">{line}</p>'


def _day(created: str | None) -> str:
    return created[:16].replace("T", " ") + " UTC" if created else ""


def _lesson(summary: Summary, points: list[ScalingPoint]) -> str:
    texts = [explain(points)] if len(points) > 1 else []
    return "".join(f'<p class="lesson">{escape(text)}</p>' for text in [*texts, explain_single(summary)])


def _times(summary: Summary, figures: dict[str, Figure]) -> str:
    if "medians" not in figures:
        return ""
    window = f" over steps {summary.measured[0]}–{summary.measured[1]}" if summary.measured else ""
    return (
        f"{sections.phases_legend()}<h3>A median step{window}</h3>{_chart('medians', figures)}"
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
    return pair + sections.scaling_table(points)


def _chart(name: str, figures: dict[str, Figure]) -> str:
    return f'<div class="chart" data-figure="{name}"></div>' if name in figures else ""


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _asset(name: str) -> str:
    return (resources.files("shoal.report") / "assets" / name).read_text(encoding="utf-8")


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
