"""The learning rate of a step: linear warm-up, then a cosine down to a fraction of the peak."""

from __future__ import annotations

import math

from shoal.config.schema import TrainConfig


def learning_rate(step: int, peak: float, train: TrainConfig) -> float:
    """`step` counts from 1. A warm-up longer than the run is cut to the run, so short trials still reach the peak."""
    warmup = min(train.warmup_steps, train.steps)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    floor = peak * train.min_lr_fraction
    return floor + (peak - floor) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
