"""Each test module of tests/integration names what it exercises; a test of a topic is found by that line.

It has modules or packages below shoal, commands (in backquotes), and files of the project.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

MODULES = sorted((ROOT / "tests/integration").rglob("test_*.py"))
# tests/unit/test_docs.py compares the table of the README with the commands.
COMMANDS = re.findall(r"`([a-z]+)`", "".join(re.findall(r"(?m)^\|[^|]*\|", (ROOT / "README.md").read_text("utf-8"))))


def exercised(docstring: str) -> list[str]:
    """Return what the last line of the docstring names."""
    match = re.fullmatch(r"Exercises (.+)\.", docstring.rstrip().rpartition("\n")[2])
    return match[1].split(", ") if match else []


def exists(name: str) -> bool:
    if command := re.fullmatch(r"`shoal (\w+)`", name):
        return command[1] in COMMANDS
    module = ROOT / "src/shoal" / name.replace(".", "/")
    return module.is_dir() or module.with_suffix(".py").exists() or (ROOT / name).exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_an_integration_test_names_existing_modules(path: Path) -> None:
    names = exercised(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    assert names, "the docstring ends without a line such as: Exercises agent.mesh, `shoal run`."
    assert [name for name in names if not exists(name)] == []


def test_a_name_that_does_not_exist_is_detected() -> None:
    assert exercised("Text.\n\nExercises agent.mesh, `shoal fly`, scripts/none.\n") == [
        "agent.mesh",
        "`shoal fly`",
        "scripts/none",
    ]
    assert exercised("Exercises nothing, and more text follows.\n\nThis.") == []
    assert not any(map(exists, ["agent.meshes", "`shoal fly`", "scripts/none"]))
