"""Sizes of a model, by arithmetic alone. A test compares them with the real model for every preset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shoal.config.schema import ModelConfig
from shoal.config.sync_choice import WireChoice, parse_wire

# bf16 and int8 travel in blocks of so many numbers, each a record of its own; one of int8 has its scale with it.
BLOCK = 256
RECORD_BYTES = {"bf16": 2 * BLOCK, "int8": BLOCK + 4}
_NUMBER_BYTES = {"fp32": 4, "fp16": 2}

# Of width elements that one block's forward keeps for backward: input and output of two norms 4, queries, keys and
# values 3, what attention mixed 1, the feedforward's hidden layer before and after its curve 8.
_BLOCK_WIDTHS = 16
# So many logits exist at once: 103 MB, those of 512 tokens with GPT-2's vocabulary. Fewer tokens read and write the
# gradient of the head's weight more often than their arithmetic is worth, more gain nothing (docs/speed.md).
HEAD_CHUNK = 512 * 50_257
# A norm keeps mean and deviation of a row.
_NORM_FIGURES = 2


def parameter_count(model: ModelConfig) -> int:
    """A tied GPT-2: two embeddings, per block 12·w² weights and 13·w biases and norms, one last norm."""
    width = model.width
    embeddings = (model.vocab_size + model.seq_len) * width
    return embeddings + model.layers * (12 * width**2 + 13 * width) + 2 * width


def grad_bytes(shapes: Iterable[Sequence[int]], wire: str) -> int:
    """What one rank contributes to one gradient exchange, of which it sends 2(N-1)/N, in whichever format."""
    choice = parse_wire(wire)
    return sum(_tensor_bytes(tuple(shape), choice) for shape in shapes)


def blocks_of(numbers: int) -> int:
    return -(-numbers // BLOCK)


def is_low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether two thin matrices are less than the matrix; what has more dimensions counts as its rows by the rest."""
    return len(shape) > 1 and _thin(shape, rank) < math.prod(shape)


def _thin(shape: Sequence[int], rank: int) -> int:
    return rank * (shape[0] + math.prod(shape[1:]))


def _tensor_bytes(shape: tuple[int, ...], choice: WireChoice) -> int:
    numbers = math.prod(shape)
    if choice.name == "powersgd":
        return 4 * (_thin(shape, choice.rank) if is_low_rank(shape, choice.rank) else numbers)
    if choice.name in RECORD_BYTES:
        return RECORD_BYTES[choice.name] * blocks_of(numbers)
    return _NUMBER_BYTES[choice.name] * numbers


def saved_elements(model: ModelConfig) -> float:
    """What forward keeps for backward, for each token, without dropout: the blocks, the last norm and the gradient of
    the head's input."""
    block = _BLOCK_WIDTHS * model.width + model.heads + _NORM_FIGURES * 2
    return model.layers * block + 2 * model.width + _NORM_FIGURES


def head_elements(model: ModelConfig) -> int:
    """What forward keeps once, however many tokens: the gradient of the head's weight."""
    return model.vocab_size * model.width


def activation_bytes(model: ModelConfig, sequences: int, element_bytes: int = 4) -> float:
    """At the peak, when the head is at work: what was kept, and the logits of one chunk of tokens."""
    tokens = sequences * model.seq_len
    logits = min(tokens, max(1, HEAD_CHUNK // model.vocab_size)) * model.vocab_size
    return float(element_bytes) * (tokens * saved_elements(model) + head_elements(model) + logits)


# SECTION cost/work
# What a training step computes and moves, by counting.


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
