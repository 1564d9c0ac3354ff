"""Before a run starts: what earlier ones left behind is shown, and ended when asked."""

from __future__ import annotations

import sys

from shoal.cli.lines import process_lines
from shoal.trials.overview import leftovers, running_runs
from shoal.trials.stopping import end_processes


def clear_leftovers(clean: bool) -> None:
    """Processes that carry a run's mark and that nobody keeps. They take cores and memory from the run to come."""
    found = leftovers(running_runs())
    if not found:
        return
    if clean:
        end_processes(found)
    said = "ended" if clean else "left over from earlier runs (--clean ends them)"
    lines = "".join(f"  {line}\n" for line in process_lines(found))
    sys.stderr.write(f"{said}:\n{lines}")
