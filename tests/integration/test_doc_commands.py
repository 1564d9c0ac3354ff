"""The command lines of README.md and docs/ do what is written: those that one machine can run end with exit code 0.

Exercises README.md, docs.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shoal.config.load import write_profile
from shoal.tools.probe.run import assemble
from tests.support.doc_commands import DocCommand, handling, typed_words, whole_commands, write_named_files
from tests.support.labs import need_lab
from tests.support.programs import TINY, set_flags, shoal, train_tiny
from tests.unit.config.test_profile import measured

# They need more than a finished run of the smallest model, or answer no.
CODES = {
    "shoal explain runs/grammar-…": 1,  # It ended well, so there is nothing to explain.
    "shoal explain": 1,  # Nothing is piped in.
}
COMMANDS = [command for command in whole_commands() if command.words[0] == "shoal"]


def commands(kind: str) -> list[DocCommand]:
    return [command for command in COMMANDS if (how := handling(command)) and how.kind == kind]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with all that the command lines name; runs are copies of a small one."""
    folder = tmp_path_factory.mktemp("named")
    train_tiny(folder / "prepared", "--on", "local:2", "--steps", "4", timeout_s=300)
    write_named_files(folder, folder / "prepared")
    write_profile(assemble(measured(), "now", 60.0, 51.0), folder / "profile.toml")
    return folder


@pytest.fixture
def folder(named: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(named)
    return named


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", commands("quick"), ids=lambda command: command.line)
def test_a_quick_command_line_works(command: DocCommand, folder: Path) -> None:
    done = shoal(*typed_words(command), timeout_s=300)
    assert done.returncode == CODES.get(command.line, 0), done.stderr
    assert done.stdout or done.stderr
    assert "Traceback" not in done.stderr


def shortened(words: list[str]) -> list[str]:
    """Return the command with few steps and, for shoal's own model, the smallest one."""
    short = list(words)
    for flag, value in {"--steps": "4", "--repeat": "1", "--budget": "5"}.items():
        if flag in short:
            short[short.index(flag) + 1] = value
    if words[0] in ("train", "bench"):
        short += [] if "--steps" in short else ["--steps", "4"]
        keeps = {"data.sentences=400"}
        keeps |= {"model.layers=1", "model.heads=2", "model.width=16"} if "--depth" in words else set()
        keeps |= {"model.seq_len=16"} if "--seq-len" in words else set()
        short += set_flags(*(setting for setting in TINY if setting not in keeps))
    return short


# Those of the first page that a user tries run for every change, the others with the exhaustive tests.
LONG = [
    pytest.param(
        command,
        marks=pytest.mark.long if command.page == "docs/get-started.md" else pytest.mark.exhaustive,
        id=command.line,
    )
    for command in commands("long")
]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("command", LONG)
def test_a_long_command_line_works(command: DocCommand, folder: Path) -> None:
    if "lab" in command.line:
        need_lab()
    for name in re.findall(r"--out (runs/\S+)", command.line):
        shutil.rmtree(folder / name, ignore_errors=True)
    words = shortened(typed_words(command))
    if "--plan" in words:
        # The profile in this folder is of another cluster.
        assert shoal("probe", "--budget", "5", "-o", "here.toml", timeout_s=300).returncode == 0
        words += ["--profile", "here.toml"]
    done = shoal(*words, timeout_s=450)
    # Doctor's warnings about this machine are its answer, not a mistake of the page.
    assert done.returncode in ((0, 1) if command.words[1] == "doctor" else (0,)), done.stderr
    assert "Traceback" not in done.stderr
