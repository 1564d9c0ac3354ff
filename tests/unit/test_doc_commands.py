"""Every command line of README.md and docs/ is one that the program accepts, and a test or a reason stands for it.

tests/integration/test_doc_commands.py runs them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from tests.support.doc_commands import (
    PAGES,
    DocCommand,
    Undocumented,
    doc_commands,
    handling,
    parse,
    whole_commands,
    words_of_code,
    words_that_matter,
    write_named_files,
)
from tests.support.paths import ROOT


def written(folder: Path, text: str) -> list[str]:
    page = folder / "docs" / "page.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(text)
    return [command.line for command in doc_commands(page, folder)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named")
    write_named_files(path, path / "no-run")
    return path


def test_command_lines_are_found_where_they_stand(tmp_path: Path) -> None:
    text = """Use `shoal ps` or `sudo shoal doctor --on lab`, not `other`.
```
$ A=1 shoal run --on local:2 \\
    train.py     # two ranks
shoal train   a column
x 2>&1 | shoal explain > out
  fix:   shoal lab down && shoal lab up 2
shoal: a message
```
"""
    assert written(tmp_path, text) == [
        "shoal ps",
        "shoal doctor --on lab",
        "shoal run --on local:2 train.py",
        "shoal train",
        "shoal explain",
        "shoal lab down",
        "shoal lab up 2",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_program_accepts_every_command_line(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    refused = []
    for command in doc_commands(page):
        if command.words[0] == "shoal":
            try:
                parse(command)
            except (ShoalError, Undocumented) as error:
                refused.append(f"{command.place}: {error}")
    assert refused == []


@pytest.mark.parametrize(
    "line",
    [
        "shoal trian",
        "shoal train --no-such-option",
        "shoal train --steps many",
        "shoal train gpt3",
        "shoal train --on nowhere",
        "shoal train --sync sometimes",
        "shoal train --set train.no_such_key=1",
        "shoal lab upp 2",
        "shoal chaos run no-such-scenario",
        "shoal report",
    ],
)
def test_a_wrong_command_line_is_refused(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises((ShoalError, Undocumented)):
        parse(DocCommand("docs/page.md", 1, line, is_inline=False))


def test_every_command_line_is_run_or_has_a_reason() -> None:
    """A new one belongs to a pattern in tests/support/doc_commands.py, or needs one there."""
    assert [command.place for command in whole_commands() if handling(command) is None] == []
    assert handling(DocCommand("docs/page.md", 1, "shoal learn-nothing 1", is_inline=False)) is None


def test_the_tests_that_stand_for_others_exist() -> None:
    ways = [how for command in whole_commands() if (how := handling(command))]
    assert {how.kind for how in ways} == {"quick", "long", "elsewhere", "by hand"}
    assert [how.where for how in ways if how.kind == "elsewhere" and not (ROOT / how.where).is_file()] == []
    assert all(how.where for how in ways if how.kind == "by hand")


def test_the_tests_that_stand_for_others_have_their_words() -> None:
    missing = []
    for command in whole_commands():
        if (how := handling(command)) and how.kind == "elsewhere":
            lacks = words_that_matter(command) - words_of_code((ROOT / how.where).read_text(encoding="utf-8"))
            missing += [f"{command.place}: {how.where} has no {', '.join(sorted(lacks))}"] if lacks else []
    assert missing == []


def test_a_word_in_a_comment_stands_for_no_command() -> None:
    stop = DocCommand("docs/page.md", 1, "shoal stop RUN", is_inline=False)
    lost = DocCommand("docs/page.md", 1, "shoal lab cut node1 node2 --one-way", is_inline=False)
    assert words_that_matter(stop) == {"stop"}
    assert words_that_matter(lost) == {"lab", "cut", "one", "way"}
    assert words_of_code('"""Stop it."""\n# stop\nx = 1\n').isdisjoint({"stop"})
    assert words_of_code("shoal('stop')\nlab.cut(a, one_way=True)\n") >= {"stop", "cut", "one", "way"}


def has_option(source: str, flag: str) -> bool:
    """Return whether a benchmark has an option: one of its own, or one that it gives a default in `options`."""
    return f'"{flag}"' in source or bool(re.search(rf"\boptions\([^)]*\b{flag.lstrip('-')}_?=", source))


def test_benchmarks_and_their_options_exist() -> None:
    wrong, count = [], 0
    for command in whole_commands():
        _, file, *rest = command.words
        if not file.startswith("benchmarks/") or file == "benchmarks/NAME.py":
            continue
        count += 1
        source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        flags = [word for word in rest if word.startswith("-")]
        wrong += [command.place] * (not source or not all(has_option(source, flag) for flag in flags))
    assert wrong == []
    assert count > 10
    assert not has_option("parser = options(__doc__, rounds_=5)", "--steps")


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {command.words[1] for command in whole_commands() if command.words[0] == "make"}
    assert {"demo", "test"} <= targets
    assert [target for target in targets if not re.search(rf"(?m)^{target}:", makefile)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_picture_has_the_command_that_made_it(page: Path) -> None:
    """Beside it or on the next line, where the test of command lines reads it. Drawings are made by hand."""
    text = re.sub(r"!\[[^\]]*\]\(drawings/\S+\.svg\)", "", page.read_text(encoding="utf-8"))
    pictures = re.findall(r"!\[[^\]]*\]\(\S+\.(?:png|svg)\)(?:\s(.*))?", text)
    assert len(pictures) == len(re.findall(r"\]\(\S+\.(?:png|svg)\)", text))
    for beside in pictures:
        made = re.match(r"Made by `([^`]+)`", beside)
        assert made
        assert shlex.split(made[1])[0] in ("shoal", "make", ".venv/bin/python")
