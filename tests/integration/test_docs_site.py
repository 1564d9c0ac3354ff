"""Build the site of docs/ as a user does, and read it from disk with a browser.

Exercises Makefile, mkdocs.yml, scripts/docs_hook.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page, open_browser
from tests.support.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

# In the page: errors, and every address that it asks for.
_WATCH = """
window.problems = [];
addEventListener("error", (event) => problems.push(event.message || event.target.src || event.target.href), true);
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => problems.push(event.blockedURI));
for (const name of ["error", "warn"]) console[name] = (...words) => problems.push(words.join(" "));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    # The tests have the environment that `setup` would make.
    argv = ["make", "--silent", "--assume-old=setup", "docs", f"BIN={Path(sys.executable).parent}", f"SITE={folder}"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280)
    if "No matching distribution" in done.stderr and os.environ.get("SHOAL_REQUIRE_ALL") != "1":
        pytest.skip("no package index here offers mkdocs-material")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_browser() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
        yield opened


def show(page: Page, file: Path) -> None:
    page.open("about:blank")
    page.wait_for("location.href == 'about:blank'")
    page.open(file.as_uri())
    page.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")


def search(page: Page, words: str) -> list[dict[str, Any]]:
    """Type words into the search, and return the pages found, each with its matching sections."""
    page.evaluate(
        "document.querySelector('[for=__search]').click(), document.querySelector('.md-search__input').focus()"
    )
    page.call("Input.insertText", text=words)
    page.evaluate("document.querySelector('.md-search__input').dispatchEvent(new KeyboardEvent('keyup', {key: 'a'}))")
    page.wait_for("document.querySelectorAll('.md-search-result__item').length")
    links = "[...item.querySelectorAll('a')].map((link) => link.getAttribute('href').split('/').pop())"
    items = page.evaluate(f"[...document.querySelectorAll('.md-search-result__item')].map((item) => {links})")
    return [{"page": re.split("[?#]", links[0])[0], "links": links} for links in items]


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]*", re.I)
    assert [match for file in pages for match in loaded.findall(file.read_text(encoding="utf-8"))] == []
    styles = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*")
    assert [match for file in site.rglob("*.css") for match in styles.findall(file.read_text(encoding="utf-8"))] == []
    assert (site / "search/search_index.js").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [("firewall", "troubleshooting.html"), ("slower than one", "troubleshooting.html"), ("resume", "train.html")],
)
def test_the_search_works_from_disk(site: Path, page: Page, words: str, expected: str) -> None:
    show(page, site / "index.html")
    results = search(page, words)
    assert results[0]["page"] == expected, json.dumps(results[:4], indent=2)
    assert page.evaluate("problems") == []


def test_pages_fit_a_narrow_window_without_errors(site: Path, page: Page) -> None:
    """Wide tables, code and signatures scroll inside the page."""
    page.resize(390, 800)
    wide, problems, remote = [], {}, []
    for file in sorted(site.glob("*.html")):
        show(page, file)
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(file.name)
        if found := page.evaluate("problems"):
            problems[file.name] = found
        loaded = page.evaluate("performance.getEntriesByType('resource').map((one) => one.name)")
        remote += [address for address in loaded if not address.startswith(("file:", "about:", "data:"))]
    assert wide == []
    assert problems == {}
    assert remote == []


def test_colours_follow_the_system_until_the_reader_chooses(site: Path, page: Page) -> None:
    """A drawing has the colours of its page: with a light system and a page that was made dark, the dark ones."""
    page.resize(1280, 900)
    show(page, site / "concepts.html")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    for system, expected in (("dark", "slate"), ("light", "default")):
        page.set_scheme(system)
        page.wait_for(f"{scheme} == '{expected}'")
    for expected in ("default", "slate"):
        page.evaluate("[...document.querySelectorAll('.md-header__option label')].find((one) => !one.hidden).click()")
        page.wait_for(f"{scheme} == '{expected}'")
    assert page.evaluate("getComputedStyle(document.querySelector('img')).colorScheme") == "dark"
    page.evaluate("localStorage.clear()")
