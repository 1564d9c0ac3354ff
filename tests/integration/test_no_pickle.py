"""Unpickling runs code chosen by the sender: no source file and no training run unpickles data.

Exercises src/shoal.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from tests.support.pickle_watch import uses, watch, watched
from tests.support.programs import train_tiny

SOURCE = Path(shoal.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Both send their arguments as pickle to a child of the same process; see `ALLOWED`.
MODULES |= {"multiprocessing", "torch.multiprocessing"}
CALLS = {"torch.load", "torch.save", "np.save", "numpy.save", "eval", "exec"}
# Collectives that pickle their arguments; every rank of the group unpickles them.
OBJECTS = "_object"
# `spawn` passes three numbers and two strings to its own children over a pipe that no other process has.
# `shoal run --measure` runs the user's own script.
ALLOWED = {("shoal/train/spawn.py", "torch.multiprocessing"), ("shoal/engine/measure.py", "exec")}


def forbidden_uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_forbidden_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and is_forbidden_module(node.module or ""):
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from forbidden_call(node)


def is_forbidden_module(name: str) -> bool:
    return bool(MODULES & {name, name.partition(".")[0]})


def forbidden_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in CALLS or OBJECTS in name.rpartition(".")[2]:
        yield name
    if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords):
        yield f"{name}(allow_pickle)"
    if any(word.arg == "weights_only" for word in node.keywords):
        yield name


def test_no_source_file_reads_or_writes_pickle() -> None:
    files = sorted([*SOURCE.rglob("*.py"), *SOURCE.with_name("shoal_lab").rglob("*.py")])
    assert len(files) > 200
    uses_by_file = {
        (path.relative_to(SOURCE.parent).as_posix(), use)
        for path in files
        for use in forbidden_uses(ast.parse(path.read_text("utf-8")))
    }
    assert uses_by_file == ALLOWED


@pytest.mark.parametrize(
    "program",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.connection",
        "from torch.multiprocessing import spawn",
        "torch.load(path)",
        "dist.all_gather_object(all, mine)",
        "dist.broadcast_object_list(all)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_source_check_finds_every_kind_of_pickle_use(program: str) -> None:
    assert list(forbidden_uses(ast.parse(program)))


def test_the_pickle_watch_records_every_use(tmp_path: Path) -> None:
    variables = watch(tmp_path / "watch")
    program = "import pickle, decimal; pickle.loads(pickle.dumps(1)); pickle.loads(pickle.dumps(decimal.Decimal))"
    subprocess.run([sys.executable, "-P", "-c", program], env={**os.environ, **variables}, check=True, timeout=20)
    assert [use.split(" in ")[0] for use in uses(tmp_path / "watch")] == ["loads", "loads", "pickle.find_class"]


@pytest.mark.parametrize(
    "launcher", [pytest.param("shoal", marks=pytest.mark.long), pytest.param("spawn", marks=pytest.mark.exhaustive)]
)
def test_no_process_of_a_training_unpickles_anything(tmp_path: Path, launcher: str) -> None:
    """Cover save, evaluation, resume and report too."""
    variables = watch(tmp_path / "watch")
    variables["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    words = ("--on", "local:2", "--steps", "6", "--set", f"run.launcher={launcher}")
    train_tiny(tmp_path / "run", *words, sets=("train.checkpoint_every=2", "train.eval_every=3"), **variables)
    # The ranks of shoal's own launcher are forked from the template, and record what they unpickle like it.
    program = f"shoal.train.{'template' if launcher == 'shoal' else 'spawn'}"
    assert any(program in argv for argv in watched(tmp_path / "watch"))
    unexpected = [use for use in uses(tmp_path / "watch") if not is_expected_in_torch(use)]
    assert unexpected == [], unexpected[0]


def is_expected_in_torch(use: str) -> bool:
    """Recognize inductor's files in the user's private cache and the arguments of a spawned child."""
    return any(
        place in use
        for place in (
            "torch/_inductor/",
            "torch/_dynamo/",
            "torch/_functorch/",
            "multiprocessing/spawn.py",
            "spawn_main",
        )
    )
