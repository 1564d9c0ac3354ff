"""One version everywhere: shoal.__version__, from which the build takes it, and every page that mentions it."""

from __future__ import annotations

import re
import tomllib

import pytest

import shoal
from tests.support.paths import ROOT

FILES = [ROOT / "Dockerfile", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# `shoal:0.2.0`, `shoal==0.2.0`, `shoal-0.2.0-py3-none-any.whl`, `[0.2.0, …](…)`.
MENTION = re.compile(r"(?:shoal(?::|==|-| )|\[(?=[\d.]+, ))(\d+\.\d+\.\d+)")


def test_the_build_reads_the_version_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/shoal/__init__.py"


def test_pages_mention_this_version() -> None:
    mentions = [(path.name, match[1]) for path in FILES for match in MENTION.finditer(path.read_text(encoding="utf-8"))]
    assert {"Dockerfile", "README.md", "hosts.md", "platforms.md"} <= {name for name, _ in mentions}
    assert [mention for mention in mentions if mention[1] != shoal.__version__] == []


def test_the_changelog_has_this_version_first() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"(?m)^## (\d+\.\d+\.\d+) — \d{4}-\d\d-\d\d$", changelog)
    assert released[0] == shoal.__version__


@pytest.mark.parametrize("page", ["CHANGELOG.md", "CONTRIBUTING.md"])
def test_linked_pages_exist(page: str) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
