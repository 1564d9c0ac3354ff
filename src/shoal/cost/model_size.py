"""Sizes of a model, by arithmetic alone. A test compares them with the real model for every preset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shoal.config.schema import ModelConfig
from shoal.config.sync_choice import BLOCK_NUMBERS, WIRE_FORMATS, WireChoice, parse_wire

BLOCK = BLOCK_NUMBERS
# Bytes of an encoded block by format, for those that are sent in blocks.
RECORD_BYTES = {wire.name: wire.block_bytes for wire in WIRE_FORMATS.values() if wire.has_blocks}
_FLOAT_BYTES = 4

# In units of `width` elements, what a block's forward keeps for backward: input and output of two norms 4, queries,
# keys and values 3, attention's output 1, the feedforward's hidden layer before and after its activation function 8.
_BLOCK_WIDTHS = 16
# This many logits exist at once: 103 MB, those of 512 tokens with GPT-2's vocabulary. Fewer tokens read and write the
# gradient of the head's weight more often than their arithmetic is worth, more gain nothing (docs/speed.md).
HEAD_CHUNK = 512 * 50_257
# A norm keeps mean and deviation of a row.
_NORM_FIGURES = 2
# In units of `width` floats, read and written in a block's forward: two norms 4, two residuals 6, qkv 4, attention 4,
# its copy 2, projection 2, feedforward 18. Backward reads and writes about twice as much.
_BLOCK_ROWS = 3 * 40
# In units of `vocab_size` floats: logits, log-softmax, and both again in backward, with two products that read them.
_HEAD_ROWS = 8
# Per parameter: read in forward and backward, gradient written, cleared, clipped; AdamW reads four and writes three.
_PARAMETER_TOUCHES = 12


def parameter_count(model: ModelConfig) -> int:
    """Count a tied GPT-2: two embeddings, per block 12·w² weights and 13·w biases and norms, one last norm."""
    width = model.width
    embeddings = (model.vocab_size + model.seq_len) * width
    return embeddings + model.layers * (12 * width**2 + 13 * width) + 2 * width


def flops_per_token(model: ModelConfig, recompute: bool = False) -> float:
    """Count forward and backward: six per weight of a matrix (the tied head included), and attention's products. With
    `recompute` the blocks have a second forward, which ends before its last product."""
    width, length = model.width, model.seq_len
    block = 72.0 * width**2 + 12.0 * width * length
    again = 16.0 * width**2 + 4.0 * width * length if recompute else 0.0
    return model.layers * (block + again) + 6.0 * model.vocab_size * width


def step_bytes(model: ModelConfig, tokens: int) -> float:
    """Count every tensor read or written as if no cache helped: an upper bound of the memory traffic."""
    activations = tokens * (_BLOCK_ROWS * model.layers * model.width + _HEAD_ROWS * model.vocab_size)
    return float(_FLOAT_BYTES * (activations + _PARAMETER_TOUCHES * parameter_count(model)))


def intensity(model: ModelConfig, tokens: int) -> float:
    """Return the arithmetic operations per byte moved."""
    return flops_per_token(model) * tokens / step_bytes(model, tokens)


def saved_elements(model: ModelConfig, recompute: bool = False) -> float:
    """Return what forward keeps for backward per token, without dropout: the blocks, the last norm and the gradient of
    the head's input. With `recompute` a block keeps only its two inputs, of which the first block has one."""
    blocks = (2 * model.layers - 1) * model.width if recompute else model.layers * _block_elements(model)
    return blocks + 2 * model.width + _NORM_FIGURES


def _block_elements(model: ModelConfig) -> int:
    return _BLOCK_WIDTHS * model.width + model.heads + _NORM_FIGURES * 2


def head_elements(model: ModelConfig) -> int:
    """Return what forward keeps once, whatever the number of tokens: the gradient of the head's weight."""
    return model.vocab_size * model.width


def activation_bytes(model: ModelConfig, sequences: int, element_bytes: int = 4, recompute: bool = False) -> float:
    """Return the peak: what was kept, and the logits of one chunk of tokens while the head computes. With `recompute`
    the block that is computed again may need more than these."""
    tokens = sequences * model.seq_len
    logits = min(tokens, max(1, HEAD_CHUNK // model.vocab_size)) * model.vocab_size
    most = max(logits, tokens * _block_elements(model)) if recompute else logits
    return float(element_bytes) * (tokens * saved_elements(model, recompute) + head_elements(model) + most)


def grad_bytes(shapes: Iterable[Sequence[int]], wire: str) -> int:
    """Return what one rank contributes to one gradient exchange; it sends 2(N-1)/N of that, in any format."""
    choice = parse_wire(wire)
    return sum(_tensor_bytes(tuple(shape), choice) for shape in shapes)


def blocks_of(numbers: int) -> int:
    return -(-numbers // BLOCK)


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Return whether two factors are smaller than the matrix; further dimensions count as columns."""
    return len(shape) > 1 and _factor_numbers(shape, rank) < math.prod(shape)


def _factor_numbers(shape: Sequence[int], rank: int) -> int:
    return rank * (shape[0] + math.prod(shape[1:]))


def _tensor_bytes(shape: tuple[int, ...], choice: WireChoice) -> int:
    numbers, wire = math.prod(shape), choice.format
    if wire.is_low_rank:
        return _FLOAT_BYTES * (_factor_numbers(shape, choice.rank) if is_low_rank(shape, choice.rank) else numbers)
    return wire.block_bytes * blocks_of(numbers) if wire.has_blocks else math.ceil(wire.number_bytes * numbers)
