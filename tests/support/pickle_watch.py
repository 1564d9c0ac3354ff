"""A `sitecustomize` that records every unpickling and its caller."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "SHOAL_TEST_PICKLES"

_PROGRAM = """
import os, pickle, sys, traceback

_folder = os.environ.get("SHOAL_TEST_PICKLES")

def _record(what):
    path = os.path.join(_folder, f"{os.getpid()}.txt")
    with open(path, "a") as file:
        file.write("==== " + what + " in " + " ".join(sys.orig_argv) + "\\n" + "".join(traceback.format_stack()[:-2]))

def _watched(name, original):
    def read(*words, **more):
        _record(name)
        return original(*words, **more)
    return read

class _Unpickler(pickle.Unpickler):
    def load(self):
        _record("Unpickler.load")
        return super().load()

if _folder:
    with open(os.path.join(_folder, f"{os.getpid()}.argv"), "w") as file:
        file.write(" ".join(sys.orig_argv))
    pickle.loads, pickle.load = _watched("loads", pickle.loads), _watched("load", pickle.load)
    pickle.Unpickler = _Unpickler
    sys.addaudithook(lambda event, words: _record(event) if event == "pickle.find_class" else None)
"""


def watch(folder: Path) -> dict[str, str]:
    """Return variables that make every Python record its unpickling in files in `folder`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_PROGRAM)
    return {"PYTHONPATH": str(folder), VARIABLE: str(folder)}


def watched(folder: Path) -> list[str]:
    """Return the command lines of the watched processes."""
    return [path.read_text() for path in folder.glob("*.argv")]


def uses(folder: Path) -> list[str]:
    texts = (path.read_text() for path in sorted(folder.glob("*.txt")))
    return [use for text in texts for use in text.split("==== ")[1:]]
