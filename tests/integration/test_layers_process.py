"""Import rules checked in fresh processes: which verbs load torch, numpy or pickle.

Exercises cli.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shoal
from shoal.cli.help import NAMES
from tests.unit.test_layers import (
    HELP,
    LOADED,
    MODULES,
    QUICK,
    WORK_WITHOUT_PICKLE,
    WORKER_HALF,
    commands_and_subcommands,
    module_name,
    package_of,
    python,
)


def test_every_help_works_without_torch_and_slow_imports() -> None:
    words = commands_and_subcommands()
    answers = json.loads(python(HELP, json.dumps(words)))
    assert ["bench", "scaling"] in words
    assert answers.pop("blocker") == "works"
    # What takes longest to import; help is printed without it.
    assert answers.pop("loaded") == []
    assert answers.keys() == {" ".join(verb) for verb in words}
    assert all(f"Usage: shoal {verb}".strip() in text for verb, text in answers.items())


@pytest.mark.parametrize(
    ("words", "code", "seen", "unwanted"),
    [
        (["--version"], 0, "shoal", ("pydantic", "psutil", "numpy")),
        (["ps"], 0, "", ("pydantic", "numpy", "shoal.config.schema")),
        (["status", "--json"], 0, "[", ("pydantic", "numpy", "shoal.config.schema")),
        (["join", "nowhere"], 2, "is no invitation", ("numpy", "shoal.config.schema", "shoal.agent")),
        (["emit", "torchrun"], 0, "torch.distributed.run", ("numpy", "shoal.agent", "shoal.runs")),
        (["emit", "k8s"], 0, "kind: Job", ("numpy", "shoal.agent", "shoal.runs")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_quick_commands_import_little(words: list[str], code: int, seen: str, unwanted: tuple[str, ...]) -> None:
    exit_code, output, loaded = json.loads(python(QUICK, json.dumps(words)))
    assert exit_code == code, output
    assert seen in output
    assert not [name for name in unwanted if name in loaded]


def test_importing_shoal_alone_imports_neither_torch_nor_numpy() -> None:
    script = "import sys, shoal\nprint(len(dir(shoal)), 'torch' in sys.modules, 'numpy' in sys.modules)"
    assert python(script).split() == [str(len(shoal.__all__)), "False", "False"]


@pytest.mark.parametrize("tokenizer", ["bpe", "char"])
def test_texts_checkpoints_and_replicas_are_read_without_unpickling(tmp_path: Path, tokenizer: str) -> None:
    """Run with a hook that ends the program at the first unpickled class; its last lines check the hook."""
    output = python(WORK_WITHOUT_PICKLE, str(tmp_path), tokenizer)
    assert output == "tripped: unpickled ('collections', 'OrderedDict')\n"


def test_the_overview_lists_every_verb_and_loads_none() -> None:
    text, loaded = json.loads(python(LOADED))
    assert all(f" {verb} " in text for verb in NAMES)
    assert set(loaded) == {"shoal.cli.main", "shoal.cli.help"}


def test_the_tool_half_never_imports_torch() -> None:
    names = [module_name(path) for path in MODULES if package_of(module_name(path)) not in WORKER_HALF]
    tool = [name for name in names if not name.endswith("__main__")]
    script = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    assert "shoal.data.prepare" in tool
    assert python(script, *tool).split() == ["False"]
