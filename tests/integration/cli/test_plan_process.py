"""Modules that `shoal plan` imports.

Exercises `shoal plan`.
"""

from __future__ import annotations

import subprocess
import sys

from tests.unit.cli.test_plan import LOADED


def test_a_plan_imports_no_heavy_module() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 []\n"
