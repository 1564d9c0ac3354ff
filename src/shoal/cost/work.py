"""What a training step computes and moves, by counting."""

from __future__ import annotations

from shoal.config.schema import ModelConfig
from shoal.cost.sizes import parameter_count

_FLOAT_BYTES = 4
# Of width floats, read and written in one block's forward: two norms 4, two residuals 6, qkv 4, attention 4, its copy
# 2, projection 2, feedforward 18. Backward reads and writes about twice as much.
_BLOCK_ROWS = 3 * 40
# Of vocabulary floats: logits, log-softmax, and both again backward, with the two products that read them.
_HEAD_ROWS = 8
# Of each parameter: read forward and backward, gradient written, cleared, clipped; AdamW reads four and writes three.
_PARAMETER_TOUCHES = 12


def flops_per_token(model: ModelConfig) -> float:
    """Forward and backward: six for each weight of a matrix (the tied head included), and attention's own products."""
    matrices = model.layers * 12 * model.width**2 + model.vocab_size * model.width
    return 6.0 * matrices + 12.0 * model.layers * model.width * model.seq_len


def step_bytes(model: ModelConfig, tokens: int) -> float:
    """Every tensor read or written counts as if no cache helped: more than really crosses the memory's bus."""
    activations = tokens * (_BLOCK_ROWS * model.layers * model.width + _HEAD_ROWS * model.vocab_size)
    return float(_FLOAT_BYTES * (activations + _PARAMETER_TOUCHES * parameter_count(model)))


def intensity(model: ModelConfig, tokens: int) -> float:
    """Arithmetic for each byte moved."""
    return flops_per_token(model) * tokens / step_bytes(model, tokens)
