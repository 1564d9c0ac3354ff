"""How a command line is read: options in every form, arguments, and what follows a script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.command import Command, HelpAsked, Request, any_word
from shoal.cli.options import Option, argument
from shoal.errors import UsageError

OPTIONS = {
    "words": argument(),
    "rank": Option("Which.", low=0, high=9),
    "follow": Option("On.", flags="--follow -f"),
    "all_": Option("All.", flags="--all -a"),
    "out": Option("Where.", flags="--out -o"),
    "steps": Option("Steps.", "train.steps"),
    "names": Option("Several.", flags="--name"),
}


def read(
    run: Path,
    words: list[str] | None = None,
    rank: int | None = None,
    follow: bool = False,
    all_: bool = False,
    out: Path | None = None,
    names: list[str] | None = None,
) -> None:
    """Do nothing."""


def start(words: list[str] | None = None, out: Path | None = None, follow: bool = False) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class SmallRequest(Request):
    steps: int = 3
    out: Path | None = None


RUN = {"run": Path("r")}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("r", RUN),
        ("r --rank 3", RUN | {"rank": 3}),
        ("--rank=3 r", RUN | {"rank": 3}),
        ("r -fa", RUN | {"follow": True, "all_": True}),
        ("r -oFILE", RUN | {"out": Path("FILE")}),
        ("r -o FILE --all", RUN | {"out": Path("FILE"), "all_": True}),
        ("r --name a --name=b", RUN | {"names": ["a", "b"]}),
        ("r a b --rank 1 c", RUN | {"rank": 1, "words": ["a", "b", "c"]}),
        ("r -- --rank 1", RUN | {"words": ["--rank", "1"]}),
        ("-", {"run": Path("-")}),
    ],
)
def test_options_and_arguments_are_read_in_every_form(line: str, values: dict[str, Any]) -> None:
    assert Command(read, OPTIONS).read("read", line.split()) == values


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("", "Missing argument RUN"),
        ("r --rank", "Option '--rank' requires an argument."),
        ("r --rank ten", "--rank is a whole number from 0 to 9; 'ten' was given"),
        ("r --rank -1", "--rank is a whole number from 0 to 9; '-1' was given"),
        ("r --all=3", "Option '--all' does not take a value."),
        ("r -x", "No such option: -x"),
        ("r -fx", "No such option: -x"),
    ],
)
def test_a_wrong_command_line_is_refused(line: str, seen: str) -> None:
    with pytest.raises(UsageError) as refused:
        Command(read, OPTIONS).read("read", line.split())
    assert refused.value.seen == seen
    assert refused.value.fix


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("-f train.py --out x -f", {"follow": True, "words": ["train.py", "--out", "x", "-f"]}),
        ("-m module --out x", {"words": ["-m", "module", "--out", "x"]}),
        ("--out y -- train.py", {"out": Path("y"), "words": ["train.py"]}),
        ("train.py --help", {"words": ["train.py", "--help"]}),
    ],
)
def test_the_words_after_a_script_are_its_own(line: str, values: dict[str, Any]) -> None:
    assert Command(start, OPTIONS, takes_words=any_word).read("start", line.split()) == values


def test_help_may_stand_among_other_words() -> None:
    with pytest.raises(HelpAsked):
        Command(read, OPTIONS).read("read", ["r", "--rank", "1", "-h"])


@pytest.mark.parametrize(("line", "given"), [("", {}), ("--steps 3", {"train.steps": "--steps"}), ("-o x", {})])
def test_a_request_knows_what_was_typed(line: str, given: dict[str, str]) -> None:
    requests: list[SmallRequest] = []

    def small(request: SmallRequest) -> None:
        requests.append(request)

    # As at the top of a module, where the names of annotations are known.
    small.__annotations__["request"] = SmallRequest
    Command(small, OPTIONS).call("small", line.split())
    [request] = requests
    assert (request.steps, request.flags()) == (3, given)
    assert request.overrides() == ({"train": {"steps": 3}} if given else {})
