"""What commands print."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.output import process_lines
from shoal.control.processes import RunProcess


def test_processes_are_listed_in_columns() -> None:
    parts = {"supervisor": "", "agent": "a-node-with-a-long-name", "rank-0": "node1"}
    processes = [RunProcess(pid, Path("run"), part, parts[part], "THE COMMAND", 0.0) for pid, part in enumerate(parts)]
    lines = list(process_lines(processes))
    assert [line.split()[1] for line in lines] == list(parts)
    assert len({line.index("THE COMMAND") for line in lines}) == 1
