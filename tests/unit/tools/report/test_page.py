"""The report page: complete, self-contained, and safe against markup in a run's texts."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.events import Event
from shoal.records.manifest import write_derived_files
from shoal.tools.draw.pages import html_value, page_style
from shoal.tools.draw.palette import css_variables
from shoal.tools.report.page import write_report
from tests.support.run_samples import all_events, demo_points, make_run, start, step

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Parse a page as a browser does: elements, visible text, and the content of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.text += data

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = json.loads(self.scripts[0])
        return figures


def page_of(folder: Path, events: list[Event] | None = None, *sets: str) -> Page:
    return Page(write_report(make_run(folder / "run", events, *sets)).read_text(encoding="utf-8"))


def test_the_page_of_a_finished_run_is_complete(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_derived_files(run, scaling=demo_points())
    page = Page(write_report(run).read_text(encoding="utf-8"))
    assert set(page.figures) == {"loss", "medians", "steps-0", "steps-1", "speed", "split"}
    places = {attrs.get("data-figure") for _, attrs in page.tags} - {None}
    assert places == set(page.figures) - {"steps-1"}, "rank 1 is reached through the choice of ranks"
    for text in (
        "15,515",
        "Two ranks were faster",
        "On two ranks",
        "Not verified yet",
        "She has not been singing.",
        "shoal 0.1.0",
    ):
        assert text in page.text


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert not [tag for tag, attrs in page.tags if tag in {"link", "iframe", "img"} or "src" in attrs]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_texts_of_a_run_cannot_inject_scripts(tmp_path: Path) -> None:
    shard = {"event": "shard", "rank": 0, "size": 1, "total": 1, "first": EVIL}
    fault = {"event": "fault", "rank": 1, "error": EVIL, "seen": EVIL, "why": EVIL, "fix": EVIL}
    warning = {"event": "warning", "rank": 1, "seen": EVIL, "why": EVIL, "fix": EVIL}
    note = {"event": "note", "rank": 0, "text": EVIL}
    lost = {"event": "lost", "rank": 0, "node": EVIL, "how": EVIL}
    events = [start(0, node=EVIL, device=EVIL), start(1), shard, step(1), step(1, 1), fault, warning, note, lost]
    page = page_of(tmp_path, events, f"data.path={json.dumps(EVIL)}")
    assert len(page.scripts) == 2, "the figures and the page's own script"
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.text.count(EVIL) >= 6


def test_the_name_of_the_folder_cannot_inject_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<script>alert(1)<" / "<b>run")
    assert not [tag for tag, _ in Page(write_report(run).read_text()).tags if tag == "b"]


@pytest.mark.parametrize(
    "events",
    [[], [start(0), start(1)], [start(0, 1), step(1)], [start(0, 1), step(1, loss=math.nan, step_s=math.inf)]],
    ids=["nothing", "started", "one step", "diverged"],
)
def test_a_run_that_died_early_has_a_page(tmp_path: Path, events: list[Event]) -> None:
    page = page_of(tmp_path, events)
    assert "unfinished" in page.text
    assert "NaN" not in page.scripts[0]


def test_a_failed_run_shows_its_error_first(tmp_path: Path) -> None:
    fault = {"event": "fault", "rank": 1, "error": "RunFailed", "seen": "out of memory", "fix": "use a smaller batch"}
    warning = {
        "event": "warning",
        "rank": 0,
        "error": "CheckpointError",
        "seen": "could not write a checkpoint",
        "fix": "",
    }
    alive = [event for event in all_events(2, 5) if event["event"] != "end"]
    text = page_of(tmp_path, [*alive, fault, warning]).text
    assert text.index("out of memory") < text.index("What the numbers say") < text.index("could not write")


def test_the_verdict_on_replicas_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    manifest = write_derived_files(run)
    for verdict, words in ((True, "identical"), (False, "The replicas differ; the largest difference is at most 0.25")):
        changed = manifest.model_copy(update={"byte_equivalent": verdict, "max_abs_diff": 0.0 if verdict else 0.25})
        run.manifest.write_text(changed.model_dump_json())
        assert words in Page(write_report(run).read_text()).text


def test_bytes_have_a_unit() -> None:
    assert html_value({"wire_bytes_per_step": 1_500_000.0, "memory": {"peak_memory_bytes": 2_000}, "steps": 2_000}) == (
        "wire_bytes_per_step: 1.5 MB<br>memory: peak_memory_bytes: 2 kB<br>steps: 2000"
    )


def test_a_page_is_small(tmp_path: Path) -> None:
    """It once had 5 MB, whatever the run: the library that drew its charts."""
    events = [event for rank in (0, 1) for event in [start(rank), *(step(number, rank) for number in range(1, 3001))]]
    assert len(write_report(make_run(tmp_path / "run", events)).read_bytes()) < 300_000


def test_every_colour_of_a_page_has_a_name() -> None:
    """The colour of a warning is in one place: palette.py."""
    for package in ("shoal.tools.report", "shoal.tools.watch"):
        own = page_style(package).removeprefix(css_variables())
        assert not re.search(r"#[0-9a-f]{3,8}\b", own), "a colour without a name"
        assert set(re.findall(r"var\(--([\w-]+)\)", own)) <= set(re.findall(r"--([\w-]+):", css_variables()))
