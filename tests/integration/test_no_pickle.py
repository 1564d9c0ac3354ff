"""Whoever unpickles runs what the sender wrote. Nothing here does: not in the source, and not in a training."""

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
# Collectives that pickle what they are given, for everybody in the group to unpickle.
OBJECTS = "_object"
# `spawn` hands three numbers and two strings to its own children over a pipe that nobody else has.
ALLOWED = {("train/spawn.py", "torch.multiprocessing")}


def found_in(tree: ast.AST) -> Iterator[str]:
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
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 200
    found = {
        (str(path.relative_to(SOURCE)), what) for path in files for what in found_in(ast.parse(path.read_text("utf-8")))
    }
    assert found == ALLOWED


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
def test_the_audit_sees_it(program: str) -> None:
    assert list(found_in(ast.parse(program)))


def test_the_watch_sees_it(tmp_path: Path) -> None:
    variables = watch(tmp_path / "watch")
    program = "import pickle, decimal; pickle.loads(pickle.dumps(1)); pickle.loads(pickle.dumps(decimal.Decimal))"
    subprocess.run([sys.executable, "-P", "-c", program], env={**os.environ, **variables}, check=True, timeout=20)
    assert [use.split(" in ")[0] for use in uses(tmp_path / "watch")] == ["loads", "loads", "pickle.find_class"]


@pytest.mark.parametrize(
    "launcher", [pytest.param("shoal", marks=pytest.mark.long), pytest.param("spawn", marks=pytest.mark.exhaustive)]
)
def test_no_process_of_a_training_unpickles_anything(tmp_path: Path, launcher: str) -> None:
    """Save, evaluate, resume and report included."""
    variables = watch(tmp_path / "watch")
    variables["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    words = ("--on", "local:2", "--steps", "6", "--set", f"run.launcher={launcher}")
    train_tiny(tmp_path / "run", *words, sets=("train.checkpoint_every=2", "train.eval_every=3"), **variables)
    assert any(
        f"shoal.train.{'worker' if launcher == 'shoal' else 'spawn'}" in argv for argv in watched(tmp_path / "watch")
    )
    ours = [use for use in uses(tmp_path / "watch") if not is_torchs_own(use)]
    assert ours == [], ours[0]


def is_torchs_own(use: str) -> bool:
    """What inductor keeps in the user's private cache, and what a spawning parent hands its own child."""
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
