"""What is printed about a wrong command line: what was typed, why it is refused, and the next command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.cli.help import NAMES
from shoal.cli.main import find_command, run
from shoal.config.presets import PRESETS


@pytest.mark.parametrize(
    ("line", "seen", "why", "fix"),
    [
        (
            "train --preset micro",
            "--preset",
            "there is no preset 'micro'; the presets are grammar",
            "shoal train grammar",
        ),
        ("train --preset gpt2-124m", "--preset", "here it is gpt2-124m", "shoal train gpt2-124m"),
        ("train --steps ten", "--steps is a whole number from 1; 'ten' was given", "", "shoal train --help"),
        ("train --steps=0", "--steps is a whole number from 1; '0' was given", "", "shoal train --help"),
        ("sample x --count 0", "--count is a whole number from 1 to 1,000; '0' was given", "", "shoal sample --help"),
        ("sample x --temperature hot", "--temperature is a number from 0 to 10; 'hot'", "", "shoal sample --help"),
        ("watch x --port -1", "--port is a whole number from 0 to 65,535; '-1' was given", "", "shoal watch --help"),
        ("verify", "Missing argument RUN", "such as runs/NAME", "list the runs: shoal runs"),
        ("report", "Missing argument RUN", "such as runs/NAME", "list the runs: shoal runs"),
        ("resume", "there is no command 'resume'", "another command", "shoal train --resume RUN"),
        ("resume runs/a", "there is no command 'resume'", "another command", "shoal train --resume runs/a"),
        ("version", "there is no command 'version'", "another command", "shoal --version"),
        ("kill runs/a", "there is no command 'kill'", "another command", "shoal stop runs/a"),
        ("rm runs/a", "there is no command 'rm'", "another command", "shoal runs --delete runs/a"),
        ("tensorboard", "there is no command", "another command", "shoal export RUN --format tensorboard"),
        ("report runs/a --format pdf", "--format", "here it is --pdf", "shoal report runs/a --pdf"),
        ("report runs/a --format csv", "--format", "", "shoal report --help"),
        ("runs --state bogus", "there is no state 'bogus'", "the states are running, finished", "shoal runs --state"),
        ("train notes.txt", "there is no preset 'notes.txt'", "a text is given", "shoal train --data notes.txt"),
        ("train my.toml", "there is no preset 'my.toml'", "with --config", "shoal train --config my.toml"),
        ("train runs/b", "there is no preset 'runs/b'", "with --resume", "shoal train --resume runs/b"),
        ("train --every 10", "--every has no effect", "local, diloco, streaming or auto", "or: --sync local"),
        ("train --sync diloco:5", "--sync 'diloco:5'", "command line", "correct it: --sync diloco --every 5"),
        ("train --sync diloco+int8", "accumulate", "command line", "correct it: --sync diloco --wire int8"),
        ("train --threads 0", "--threads 0", "command line", "correct it: --threads 1"),
        ("train --tokenizer word", "'char', 'byte' or 'bpe'", "command line", "correct it: --tokenizer char"),
        ("train --set train.lrr=0.1", "train.lrr", "did you mean 'train.lr'?", "shoal config show train"),
        ("run --wire int4 a.py", "--wire 'int4'", "command line", "correct it: --wire int8"),
        ("train --set train.lr=big", "train.lr='big': input should be a valid number", "", "--set train.lr=…"),
        (
            "--steps 10 train --on local:2",
            "--steps stands before the command",
            "after it",
            "shoal train --steps 10 --on",
        ),
        ("train --epochs 3", "--epochs", "an epoch has as many as samples / global batch", "write --steps N"),
        ("run --epochs 3 a.py", "--epochs", "a number of steps", "stands after it: shoal run train.py --epochs …"),
        ("train -n 4", "-n", "here it is --on local:4", "shoal train --on local:4"),
        ("run -n 2 a.py", "-n", "here it is --on local:2", "shoal run --on local:2 a.py"),
        (
            "train --on local:4 --global-batch 3 --dry-run",
            "4 ranks cannot share",
            "one sequence",
            "--global-batch 4 or",
        ),
        ("lab up many", "NODES is a whole number; 'many' was given", "", "shoal lab up --help"),
        (
            "plan --simulate --hours 5",
            "--simulate",
            "a scenario file; docs/simulate.md",
            "shoal simulate SCENARIO.toml",
        ),
        ("plan --mtbf-hours 5", "--mtbf-hours", "mtbf_hours = … is written into", "shoal simulate SCENARIO.toml"),
        ("train --json=3", "'--json' does not take a value", "", "shoal train --help"),
        ("train --steps", "'--steps' requires an argument", "", "shoal train --help"),
        ("verify b", "b is not a run folder", "did you mean runs/b?", "runs/b"),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_right_one(
    line: str,
    seen: str,
    why: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/b").mkdir(parents=True)
    for name in ("a.py", "notes.txt", "my.toml", "runs/b/config.toml"):
        Path(name).touch()
    assert run(line.split(), debug=False) == 2
    first, *middle, last = capsys.readouterr().err.splitlines()
    assert seen in first
    assert why in " ".join(middle)
    assert re.fullmatch(rf"  next: .*{re.escape(fix)}.*", last)


def test_no_word_for_another_command_is_a_command() -> None:
    from shoal.cli.main import _OTHER_COMMANDS

    assert not _OTHER_COMMANDS.keys() & NAMES.keys()
    for command in _OTHER_COMMANDS.values():
        verb = command.split()[1]
        assert verb == "--version" or find_command([verb]) is not None


@pytest.mark.parametrize(("words", "usage"), [(["report"], "RUN…"), (["chaos", "run"], "SCENARIO…")])
def test_an_argument_that_repeats_has_one_ellipsis(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--help"], debug=False) == 0
    assert capsys.readouterr().out.startswith(f"Usage: shoal {' '.join(words)} [OPTIONS] {usage}\n")


def test_a_preset_with_the_name_of_a_file_is_the_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.cli.train import refuse_path_as_preset

    monkeypatch.chdir(tmp_path)
    name = next(iter(PRESETS))
    Path(name).touch()
    refuse_path_as_preset(name)


def test_the_rate_and_the_seed_are_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--lr", "0.5", "--seed", "7", "--dry-run", "--json"], debug=False) == 0
    train = json.loads(capsys.readouterr().out)["config"]["train"]
    assert (train["lr"], train["seed"]) == (0.5, 7)
