"""Modules that the readers of the report import.

Exercises `shoal report`.
"""

from __future__ import annotations

import subprocess
import sys


def test_readers_import_no_torch() -> None:
    names = (
        "tools.report.page",
        "tools.report.figures",
        "records.manifest",
        "records.final_states",
        "records.commit_log",
    )
    modules = ", ".join(f"shoal.{name}" for name in names)
    check = f"import sys, {modules}; sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib')))"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
