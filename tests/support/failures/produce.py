"""Provoke every failure that `shoal explain` knows and store the output as `NAME.log` beside this file.

    python -m tests.support.failures.produce [NAME …]

Needs root (network namespaces, mounts, a memory limit), for some of them an NVIDIA GPU, and for some an older torch:
the variable TORCH_2_0 (TORCH_2_5, …) names a Python that has it. Takes a quarter of an hour; not part of the tests,
which read the logs.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from shoal_lab.lab import Lab
from tests.support.failures import at_store, of_shoal, on_gpu, on_lab, on_machine, over_ssh
from tests.support.failures.bench import FIRST, HERE, SECOND, THIRD, Bench, Labs, older_python, older_pythons
from tests.support.failures.registry import FAILURES, Failure

MOST_LINES = 60
_FRAMES = r"^.*\bframe #\d+: .*\n"
_COLOURS = r"\x1b\[[0-9;]*m"
# Leftovers of other runs on the machine are not part of the failure.
_LEFTOVERS = r"^left over from earlier runs.*\n(?: +\d+ .*\n)*"
_TIDY = re.compile("|".join((_FRAMES, _COLOURS, _LEFTOVERS)), re.MULTILINE)
# Importing them fills the registry.
MODULES = (at_store, of_shoal, on_gpu, on_lab, on_machine, over_ssh)


def main(names: list[str]) -> None:
    labs = Labs()
    chosen = [FAILURES[name] for name in names or sorted(FAILURES)]
    try:
        for failure in chosen:
            if failure.needs_gpu and not shutil.which("nvidia-smi"):
                print(f"{failure.name}: left out, there is no GPU here", flush=True)
                continue
            if failure.torch and not older_python(failure.torch):
                print(f"{failure.name}: left out, no Python with torch {failure.torch} was named", flush=True)
                continue
            if not failure.provoke and not failure.on_lab:
                print(f"{failure.name}: left out, it is quoted from public reports", flush=True)
                continue
            text = produce(failure, labs)
            (HERE / f"{failure.name}.log").write_text(text, encoding="utf-8")
            print(f"{failure.name}: {len(text.splitlines())} lines", flush=True)
    finally:
        labs.close()


def produce(failure: Failure, labs: Labs) -> str:
    with tempfile.TemporaryDirectory(prefix="failure-") as folder:
        bench = Bench(Path(folder))
        try:
            if failure.on_lab:
                failure.on_lab(bench, labs.get())
            elif failure.provoke:
                failure.provoke(bench)
        finally:
            bench.close()
            if failure.on_lab:
                heal(labs.get())
        return trim(anonymous(bench.text(), Path(folder)))


def heal(lab: Lab) -> None:
    lab.heal()
    for node in (FIRST, SECOND, THIRD):
        lab.node(node).remove_firewall()


def anonymous(text: str, folder: Path) -> str:
    """Remove this machine's paths, nested paths first."""
    places = {
        str(folder): "/project",
        str(HERE): "/project",
        str(HERE.parent.parent): "/shoal",
        **{str(Path(python).parent.parent): "/venv" for python in older_pythons()},
        sys.prefix: "/venv",
        sys.base_prefix: "/usr",
    }
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


def trim(text: str) -> str:
    """Remove the C++ frames, and the middle of a long text."""
    lines = [line.rstrip() for line in _TIDY.sub("", text).splitlines()]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[: half - 1], "[…]", *lines[-half:]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
