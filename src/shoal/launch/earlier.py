"""What earlier launches of a run have left behind, as far as a new one must know it."""

from __future__ import annotations

from shoal.control.rankline import generation_of
from shoal.events import read_events
from shoal.runfolder import RunFolder


def highest_generation(run: RunFolder) -> int:
    """The highest number of a generation in the ledger."""
    if not run.commits.exists():
        return 0
    named = (generation_of(f"gen-{record.get('generation')}/") for record in read_events(run.commits))
    return max((ballot.number for ballot in named if ballot is not None), default=0)
