"""Writing the summary files of a run on a full disk.

Exercises `shoal report`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shoal.records.manifest import write_derived_files
from tests.support.run_samples import make_run


def test_a_full_disk_is_reported_and_no_file_is_lost(tmp_path: Path) -> None:
    """A file-size limit of one block makes a write fail like a full disk."""
    run = make_run(tmp_path / "run")
    command = f'ulimit -f 1; exec "{sys.executable}" -m shoal.records.manifest "{run.path}"'
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "cannot write into" in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.manifest.exists()
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")]
    assert write_derived_files(run).steps == 100
