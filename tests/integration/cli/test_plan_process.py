"""`shoal plan`: what it answers, what it recommends, and how it says no: what starts processes."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.cli.test_plan import LOADED


def test_a_plain_plan_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 []\n"
