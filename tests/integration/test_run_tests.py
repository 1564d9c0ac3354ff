"""scripts/run-tests: what failed beside other tests runs again alone, and is named at the end.

Exercises scripts/run-tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# The tests of a module are one group of pytest-xdist, which changes their names. One passes the second time.
_TESTS = """
import pathlib, pytest
pytestmark = pytest.mark.xdist_group("some/group.py")
def test_that_fails(): assert False
def test_that_passes(): pass
@pytest.mark.parametrize("text", ["a@b", "other"])
def test_that_passes_later(text):
    seen = pathlib.Path(text)
    if not seen.exists():
        seen.touch()
        assert False
"""
_LATER = "test_some.py::test_that_passes_later"


@pytest.mark.parametrize(
    ("chosen", "code", "named"),
    [
        ("later", 0, [f"{_LATER}[a@b]", f"{_LATER}[other]"]),
        ("other or fails", 1, [f"{_LATER}[other]"]),
    ],
)
def test_a_test_that_needed_a_second_try_is_named_last(
    chosen: str, code: int, named: list[str], tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "run-tests", tmp_path / "scripts")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    (tmp_path / "test_some.py").write_text(_TESTS)
    script = str(tmp_path / "scripts" / "run-tests")
    done = subprocess.run(
        [script, "--rootdir", str(tmp_path), "-p", "no:hypothesispytest", "-k", chosen],
        env={**os.environ, "WORKERS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "once more, one at a time" in done.stdout
    assert done.stdout.partition("run-tests: failed beside other tests, passed alone:\n")[2].splitlines() == named
