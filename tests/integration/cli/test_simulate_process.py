"""`--simulate` as a verb would call it: options, table, JSON, picture, stragglers fitted fro: what starts processes."""

from __future__ import annotations

import sys


def test_declaring_the_options_loads_no_numbers_library() -> None:
    """`plan --help` must answer at once."""
    import subprocess

    script = "import sys, shoal.cli.simulate\nprint('numpy' in sys.modules, 'matplotlib' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]
