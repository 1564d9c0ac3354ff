"""What to type when a rank ran out of memory."""

from __future__ import annotations

from shoal.config.schema import Config
from shoal.cost.batch import half_micro_batch, micro_batch, rank_weights
from shoal.errors import ConfigError

RELIEF = "use a smaller --micro-batch or --seq-len"


def relief(config: Config, ranks: int) -> str:
    """Activations grow with the micro-batch and the training does not depend on it, so that is the first to shrink."""
    try:
        weights = rank_weights(config.run, ranks)
    except ConfigError:
        # Machines have come or gone since the weights were given.
        return RELIEF
    half = half_micro_batch(config.train, weights)
    if half is None:
        return f"start a new run with a shorter --seq-len than {config.model.seq_len}: the micro-batch is 1 already"
    present = micro_batch(config.train, weights)
    return f"start a new run with a smaller micro-batch: --micro-batch {half} (it was {present})"
