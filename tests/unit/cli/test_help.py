"""The help of all verbs, and what is said about options that do not exist."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shoal.cli.command import Command
from shoal.cli.config import SHELLS, completion_words
from shoal.cli.help import EXAMPLES, NAMES, OPTION_GROUPS
from shoal.cli.main import find_command, load_command, run
from shoal.terminal import printable


def test_every_verb_has_examples_and_their_options_exist() -> None:
    assert set(EXAMPLES) == {"", *NAMES}
    words = completion_words()
    for command, _ in (example for examples in EXAMPLES.values() for example in examples):
        if not command.startswith("shoal "):
            continue
        _, verb, *rest = shlex.split(command.partition(">")[0])
        path = [verb, *rest[:1]] if rest[:1] and f"{verb} {rest[0]}" in words else [verb]
        found = find_command(path)
        known = [] if found is None else options_of(found)
        given = [word for word in rest if word.startswith("-")]
        # The options after a script are its own.
        own = given[: given.index("--lr")] if "--lr" in given else given
        assert verb == "help" or [word for word in own if word not in known] == [], command


def options_of(command: Command) -> list[str]:
    return [name for parameter in command.parameters for name in parameter.flags]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for verb in ["", *NAMES]:
        children = ["", *load_command(verb).commands] if verb else [""]
        for child in children:
            words = [word for word in (verb, child) if word]
            assert run([*words, "-h"], debug=False) == 0
            text = capsys.readouterr().out
            assert text.startswith(f"Usage: shoal {' '.join(words)}".rstrip())
            commands = {example for examples in EXAMPLES.values() for example, _ in examples}
            too_long = [line for line in text.splitlines() if len(line) > width and line.strip() not in commands]
            assert too_long == []
            assert printable(text) == text


def test_help_can_be_asked_for_in_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for words in (["help", "lab", "up"], ["lab", "up", "-h"], ["lab", "up", "--help"]):
        assert run(words, debug=False) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].startswith("Usage: shoal lab up [OPTIONS] NODES\n")
    assert "--kind TEXT" in answers[0]
    assert "--profile" not in answers[0]
    assert len(set(answers)) == 1


def test_synonyms_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "-h"], debug=False) == 0
    assert "List the runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why", "fix"),
    [
        (["train", "--ranks", "2", "--steps", "5"], "--on local:2", "shoal train --on local:2 --steps 5"),
        (["train", "--nproc_per_node=4"], "--on local:4", "shoal train --on local:4"),
        (["plan", "--preset", "gpt2-124m", "--json"], "here it is gpt2-124m", "shoal plan gpt2-124m --json"),
        (["run", "--hostfile", "h", "a.py"], "--on h", "shoal run --on h a.py"),
        (["train", "--checkpoint-every", "5"], "--set train.checkpoint_every=5", "--set train.checkpoint_every=5"),
        (["train", "--learning-rate"], "--set train.lr=…", "train.lr=…"),
        (["train", "--stpes", "5"], "did you mean '--steps'?", "shoal train --help"),
        (["ps", "--ranks", "2"], "", "shoal ps --help"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(
    words: list[str], why: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, debug=False) == 2
    error = capsys.readouterr().err
    assert f"No such option: {words[1].partition('=')[0]}\n" in error
    assert why in error
    assert fix in error.partition("next: ")[2]


def test_an_argument_given_as_an_option_and_another_name_of_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "link", "node1", "--rate", "5mbit"], debug=False) == 2
    assert "RATE is given without a name in front" in capsys.readouterr().err
    assert run(["lab", "list"], debug=False) == 2
    assert "did you mean 'status'?" in capsys.readouterr().err


def test_an_error_names_the_flag_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--data", "none.txt"], debug=False) == 2
    error = capsys.readouterr().err
    assert "--data names a text file" in error
    assert "data.path" not in error


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts_offer_verbs_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell], debug=False) == 0
    script = capsys.readouterr().out
    assert "levers" in script
    assert "global-batch" in script
    assert run(["completion", "tcsh"], debug=False) == 2
    assert "use bash, zsh or fish" in capsys.readouterr().err


@pytest.mark.parametrize("verb", OPTION_GROUPS)
def test_every_option_of_a_verb_with_groups_is_in_one(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    grouped = [name for names in OPTION_GROUPS[verb].values() for name in names.split()]
    options = [one.name for one in load_command(verb).parameters if not one.is_argument and not one.option.is_hidden]
    assert sorted(grouped) == sorted(options)
    assert run([verb, "--help"], debug=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in OPTION_GROUPS[verb]] == list(OPTION_GROUPS[verb])
