"""The training that the ways of `sharded.py` share, in figures. Torch-free, for the side that measures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from shoal.config.schema import ModelConfig


@dataclass(frozen=True)
class ShardedTask:
    """What a rank trains, and how long. A rank gets it as JSON, as the first argument of its script."""

    layers: int = 8
    heads: int = 8
    width: int = 512
    seq_len: int = 64
    vocab_size: int = 1024
    micro_batch: int = 2  # samples
    accumulate: int = 1  # micro-batches of a rank in a step
    # DDP sorts its buckets after the first step, and optimizers make their moments in it.
    warm_up: int = 2
    steps: int = 4
    folder: str = ""  # where the ranks leave their figures

    @property
    def shape(self) -> ModelConfig:
        names = ("layers", "heads", "width", "seq_len", "vocab_size")
        return ModelConfig(**{name: getattr(self, name) for name in names})

    def to_argument(self) -> str:
        return json.dumps(asdict(self))
