"""Modules that `shoal simulate` imports.

Exercises `shoal simulate`, tools.plan.
"""

from __future__ import annotations

import sys


def test_the_command_imports_neither_numpy_nor_matplotlib() -> None:
    """`simulate --help` must be fast."""
    import subprocess

    script = "import sys, shoal.cli.simulate\nprint('numpy' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
