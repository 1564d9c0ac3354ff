"""An event log of a process that ends while its disk is full.

Exercises events.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.test_events import numbers


def test_kept_lines_are_written_when_the_process_ends_without_closing(tmp_path: Path) -> None:
    program = """
import resource, sys, threading
from pathlib import Path
from shoal.events import EventLog
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
log = EventLog(Path(sys.argv[1]), 0)
log.append({"n": 0})
log.append({"n": 1})
assert log.kept == 2
threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_FSIZE, (soft, hard))).start()
"""
    path = tmp_path / "log.jsonl"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "works again; 2 lines were kept and are written" in done.stderr
    assert numbers(path) == [0, 1]
