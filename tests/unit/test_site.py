"""The site of docs/: its navigation, and the pages that are made from tables of the program."""

from __future__ import annotations

import importlib.util
import re
import shlex
from types import ModuleType

import pytest

from shoal.cli.help import NAMES
from shoal.cli.main import find_command, leading_commands, load_command
from shoal.explain.pattern import Pattern
from shoal.explain.patterns import PATTERNS
from shoal.tools.doctor.checks import CHECK_MEANINGS
from tests.support.paths import ROOT

# Pages of the site that are made from files beside docs/, by scripts/docs_hook.py.
FROM_THE_ROOT = {"contributing.md", "changelog.md", "security-policy.md"}


def load_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / "scripts/docs_pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_pages()


def test_the_navigation_has_every_page_once() -> None:
    _, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")
    listed = re.findall(r"(?m)^ *- .*: (\S+\.md)$", re.sub(r"(?m)^ *#.*$", "", nav))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(listed) == sorted(pages | FROM_THE_ROOT)


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert linked | {"index.md"} == {path.name for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("name", SCRIPT.PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    """Write it anew: python scripts/docs_pages.py."""
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == SCRIPT.PAGES[name]()


def test_a_new_pattern_and_a_new_check_appear() -> None:
    pattern = Pattern("gloo.new", ("a line that is new",), cause="a [new] cause of HOST", fix="type this")
    page = SCRIPT.troubleshooting_page((*PATTERNS, pattern), {**CHECK_MEANINGS, "other.check": "is also made"})
    first = page.partition("\n## A machine cannot")[0]
    assert "- `a line that is new`: a \\[new] cause of HOST. *Fix:* type this. (`gloo.new`)" in first
    assert "\n## Everything else\n" in page
    assert "- `other.check`: is also made" in page


def test_text_of_the_program_is_no_markup() -> None:
    page = SCRIPT.troubleshooting_page(
        (Pattern("x.y", ("a line",), cause="if __name__ == '__main__': a_b", fix="_c_ *"),), {}
    )
    assert r"if \_\_name\_\_ == '\_\_main\_\_': a_b. *Fix:* \_c\_ \*." in " ".join(page.split())


def test_building_the_site_writes_none_of_its_pages() -> None:
    """A page that is not current would otherwise pass, because the test of the site builds it in this tree."""
    rules = re.split(r"(?m)^(?=\S)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    [recipe] = [rule for rule in rules if rule.startswith("docs:")]
    assert "mkdocs build" in recipe
    assert "docs_pages" not in recipe


def test_every_explanation_and_check_is_in_one_section() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert "Everything else" not in page
    assert [one.id for one in PATTERNS if page.count(f"(`{one.id}`)") != 1] == []
    assert [one for one in CHECK_MEANINGS if page.count(f"- `{one}`: ") != 1] == []
    known = [one.id for one in PATTERNS] + list(CHECK_MEANINGS)
    beginnings = [one for _, _, words in SCRIPT.SYMPTOMS for one in words.split()]
    assert [one for one in beginnings if not any(name.startswith(one) for name in known)] == []


def test_the_page_of_commands_has_every_command_and_option() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    commands = {name: load_command(name) for name in NAMES}
    for name in NAMES:
        commands |= {f"{name} {child}": command for child, command in commands[name].commands.items()}
    assert sorted(re.findall(r"(?m)^###+ shoal (.+)$", page)) == sorted(commands)
    for path, command in commands.items():
        section = re.split(r"(?m)^#+ ", page.partition(f"# shoal {path}\n")[2])[0]
        shown = [one for one in command.parameters if not one.option.is_hidden and not one.is_argument]
        assert [one.name for one in shown if f"{SCRIPT.option_name(one)}`: " not in " ".join(section.split())] == []


def command_lines(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```\n(.*?)^```", text)
    return [line for block in blocks for line in block.splitlines() if line.startswith("shoal ")]


@pytest.mark.parametrize("line", command_lines("get-started.md"))
def test_a_command_of_get_started_is_accepted(line: str) -> None:
    words = shlex.split(line)[1:]
    if words != ["--version"]:
        path = leading_commands(words)
        command = find_command(path)
        assert command is not None
        command.read(" ".join(path), words[len(path) :])
