"""The training that all do, in figures: a GPT of 1.3 million parameters. Torch-free, for the side that measures."""

from __future__ import annotations

from shoal.config.schema import ModelConfig

MODEL = ModelConfig(layers=2, heads=3, width=192, seq_len=64, vocab_size=2048)
# Three, two and one rank share it equally.
GLOBAL_BATCH = 12
CHECKPOINT_EVERY = 20
_NEVER = 1_000_000

SHOAL_SETTINGS = (
    *(f"model.{name}={getattr(MODEL, name)}" for name in ("layers", "heads", "width", "seq_len", "vocab_size")),
    f"train.global_batch={GLOBAL_BATCH}",
    f"train.checkpoint_every={CHECKPOINT_EVERY}",
    f"train.steps={_NEVER}",
    f"train.eval_every={_NEVER}",
    "train.compile=off",
    "run.threads=1",
)
