"""Preparing a corpus in several processes at once.

Exercises data.prepare.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shoal.data.prepare import read_entry


def test_two_processes_can_prepare_the_same_corpus_at_once(tmp_path: Path) -> None:
    """Both wait for a line on their standard input, so that they build at the same time."""
    code = (
        "import sys; from pathlib import Path; from shoal.config.schema import DataConfig;"
        "from shoal.data.prepare import prepare; print('ready', flush=True); sys.stdin.readline();"
        "print(prepare(DataConfig(sentences=5000, cache_dir=Path(sys.argv[1]))).digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdout
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert answers[0] == answers[1] != ""
    (entry,) = tmp_path.iterdir()
    assert read_entry(entry)
