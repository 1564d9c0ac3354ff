"""Examples and claims of the documentation match the code, where that is cheap to check."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shoal.cli.help import NAMES
from shoal.cli.main import run
from tests.support.paths import ROOT

PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_its_title(page: Path) -> None:
    """Rows of a table were once before the title, on the same line."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert not [line for line in lines if line.startswith("|") and "||" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_pictures_and_pages_exist(page: Path) -> None:
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in linked if not (page.parent / link).exists()]


def test_the_readme_lists_every_command() -> None:
    _, _, table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| command | does |")
    listed = re.findall(r"`([a-z]+)`", "".join(re.findall(r"(?m)^\|[^|]*\|", table)))
    assert sorted(listed) == sorted(NAMES)


def test_live_recovery_is_not_called_missing() -> None:
    assert "not built" not in (ROOT / "docs/simulate.md").read_text(encoding="utf-8")


def output_block(page: str, command: str) -> str:
    """Return the block after the block, or the line, with this command."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, match, rest = text.partition(command)
    assert match, f"{page} does not show {command}"
    return rest.split("```\n")[2 if rest.startswith("\n```\n") else 1].split("```")[0]


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("plan.md", "shoal plan gpt2-124m --link 1gbe --nodes 1..4"),
        (
            "simulate.md",
            "shoal simulate three-laptops.toml",
        ),
    ],
)
def test_an_example_matches_the_output_of_the_command(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        Path(name).write_text(text)
    assert run(shlex.split(command)[1:], debug=False) == 0
    # The command to paste begins with the path that started this program.
    printed = re.sub(r"(?m)^  .* train ", "  shoal train ", capsys.readouterr().out)
    assert output_block(page, command).split() == printed.split()


def heading_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_headings_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    pages = [(page.parent / name if name else page, anchor) for name, anchor in links]
    assert [anchor for target, anchor in pages if anchor not in heading_anchors(target)] == []


def test_every_claim_is_in_the_log_of_measurements() -> None:
    """The figures of results.md are those of measurements.md, and each benchmark that it names exists."""
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    log = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`|\d{4}-\d\d-\d\d", "", results)
    figures = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", prose)
    assert len(figures) > 100
    missing = [f for f in figures if not re.search(rf"(?<![\d.,]){re.escape(f.rstrip(','))}(?!\d)", log)]
    assert missing == []
    names = set(re.findall(r"\b([a-z_]+\.py) -", results))
    assert len(names) > 10
    assert [name for name in names if not (ROOT / "benchmarks" / name).exists()] == []
