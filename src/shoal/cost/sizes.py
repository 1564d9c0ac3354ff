"""Sizes of a model, by arithmetic alone. A test compares them with the real model for every preset."""

from __future__ import annotations

from shoal.config.schema import ModelConfig

WIRE_BYTES = {"fp32": 4, "fp16": 2}


def parameter_count(model: ModelConfig) -> int:
    """A tied GPT-2: two embeddings, per block 12·w² weights and 13·w biases and norms, one last norm."""
    width = model.width
    embeddings = (model.vocab_size + model.seq_len) * width
    return embeddings + model.layers * (12 * width**2 + 13 * width) + 2 * width


def grad_bytes(parameters: int, wire: str) -> int:
    """What one rank contributes to one gradient exchange."""
    return parameters * WIRE_BYTES[wire]
