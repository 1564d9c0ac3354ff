"""Validation loss, every rank on its part of the validation text."""

from __future__ import annotations

import torch

from shoal.config.schema import Config
from shoal.data.batches import Tokens, validation_batches
from shoal.data.order import window_count
from shoal.model.gpt import GPT
from shoal.sync.exchange import sum_over_world
from shoal.sync.world import World
from shoal.train.trainer import split


@torch.no_grad()
def evaluate(model: GPT, tokens: Tokens, config: Config, micro_batch: int, world: World) -> float:
    """Mean loss per token over the first `eval_sequences` windows; the same number on every rank."""
    seq_len = config.model.seq_len
    sequences = min(config.train.eval_sequences, window_count(len(tokens), seq_len))
    loss_sum, count = 0.0, 0
    model.eval()
    # Without gradients, without dropout and with a shorter last batch, compiled blocks would be compiled anew.
    with model.uncompiled():
        for rows in validation_batches(tokens, seq_len, sequences, micro_batch, world.rank, world.size):
            inputs, targets = split(rows, world.device)
            loss_sum += model(inputs, targets).item()
            count += targets.numel()
    model.train()
    total_loss, total_count = sum_over_world(world, [loss_sum, float(count)])
    return total_loss / total_count
