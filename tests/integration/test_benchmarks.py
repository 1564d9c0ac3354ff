"""Every benchmark runs to its end with --quick: one that is not run rots.

Exercises benchmarks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.labs import need_lab
from tests.support.needs import need_gpu, need_tool
from tests.support.paths import ROOT

FILES = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
# One that starts another with --quick itself, by the name of the other.
RUN_BY = {"plan_grid": "simulate_runs"}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", [path for path in FILES if path.stem not in RUN_BY], ids=lambda path: str(path.stem))
def test_a_benchmark_runs_to_its_end(file: Path, tmp_path: Path) -> None:
    source = file.read_text(encoding="utf-8")
    if file.stem.startswith("gpu_"):
        need_gpu()
    if re.search(r"build_lab|\blab:\d", source) or file.stem in RUN_BY.values():
        need_lab()
    if "iperf3" in source:
        need_tool("iperf3")
    done = subprocess.run(
        [sys.executable, str(file), "--quick"], cwd=tmp_path, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"\d", done.stdout), "no figure was printed"


def test_a_benchmark_without_a_test_of_its_own_is_started_by_another() -> None:
    for name, starter in RUN_BY.items():
        assert f'"{name}.py"' in (ROOT / "benchmarks" / f"{starter}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.stem))
def test_a_benchmark_has_the_common_options(file: Path) -> None:
    assert re.search(r"options\(\s*__doc__", file.read_text(encoding="utf-8"))
