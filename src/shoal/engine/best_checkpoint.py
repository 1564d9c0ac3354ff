"""`session.best`: keep the checkpoint of the step with the best value, beside the newest ones.

The checkpoint itself has the value (see `engine.checkpoint`), so the best value so far outlives the process, and a
checkpoint that is damaged or belongs to an abandoned lineage counts no more.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import chain

from shoal.engine.checkpoint import BestValue, CheckpointFolder, best_of
from shoal.engine.evaluation import require_task
from shoal.engine.replica import Replica
from shoal.engine.state_transfer import gather_json
from shoal.errors import UsageError
from shoal.run_folder import RunFolder


def note_best(replica: Replica, run: RunFolder, value: float, lower: bool) -> bool:
    """Return whether the value is the best so far, the same on all ranks; then a checkpoint of this step comes next."""
    require_task(replica, "session.best")
    world, step, periodic = replica.world, replica.progress.step, replica.periodic
    own = BestValue(step, float(value), lower)
    folder = CheckpointFolder(run.checkpoints, replica.config.train.keep_checkpoints)
    saved = folder.best_values() if world.keeps_files else []
    documents = gather_json(world, {"own": asdict(own), "saved": [asdict(best) for best in saved]})
    if len({json.dumps(document["own"]) for document in documents}) > 1 or periodic.is_judged:
        values = [document["own"]["value"] for document in documents]
        other = next((rank for rank, given in enumerate(values) if given != values[0]), 0)
        differing = f"got {values[0]:.6g} on rank {world.ids[0]} and {values[other]:.6g} on rank {world.ids[other]}"
        raise UsageError(
            f"session.best {differing if other else f'was called twice after step {step}'}",
            why="all ranks keep the checkpoint or none, by one value of each step",
            fix="pass a value that is the same on all ranks, of session.evaluate or session.sum, and call it once",
        )
    periodic.is_judged = True
    # One of this step was saved before a peer was lost: the step is judged again.
    known = [BestValue(**best) for best in chain.from_iterable(document["saved"] for document in documents)]
    before = best_of([best for best in known if best.step < step and best.lower == lower])
    if not math.isfinite(own.value) or not own.is_better_than(before):
        return False
    periodic.best = own
    return True
