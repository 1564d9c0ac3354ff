"""Two fused operations for CUDA, in Triton: the residual sum with its LayerNorm, and the head with its cross-entropy.

Both are bound by memory, not by arithmetic. Measured on an H200 (docs/speed.md): torch's own LayerNorm writes fp32 and
needs a second kernel to round for the next product, its weight gradient takes more time than the product beside it,
and plain cross-entropy reads and writes the logits of all tokens four times in fp32. A compiled block gets the same
fusions from the compiler, so these serve what is not compiled. Import this module only where `kernels.has_triton`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Programs per multiprocessor that share the rows of a backward pass; each sums its own part of the weight's gradient.
_PROGRAMS_PER_PROCESSOR = 8
# The part of the card's memory that the logits computed at once may take. Every chunk reads and writes the weight's
# gradient once more.
_LOGITS_PART = 1 / 32
# Columns of a row of logits that a program reads at once.
_COLUMNS = 4096
# Products are fast when every row of the weight begins at such a multiple. GPT-2 has 50,257 rows.
_ALIGNED = 64


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x + branch`, and its LayerNorm in `dtype`."""
    total, normed = _AddNorm.apply(x, branch, norm.weight, norm.bias, norm.eps, dtype)
    return total, normed


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        rows = x.numel() // width
        x = x.contiguous()
        total = x if branch is None else torch.empty_like(x)
        normed = torch.empty_like(x, dtype=dtype)
        mean, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        source = None if branch is None else branch.contiguous()
        _norm_forward[(rows,)](
            x, source, weight, bias, total, normed, mean, scale, width, eps,
            HAS_BRANCH=branch is not None, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, mean, scale)
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        return total.view_as(x), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor | None, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, mean, scale = ctx.saved_tensors
        width, rows = total.shape[-1], mean.numel()
        of_x = torch.empty_like(total)
        # Without a cast the branch gets the same gradient as x.
        rounds = ctx.branch_dtype not in (None, total.dtype)
        of_branch = torch.empty_like(total, dtype=ctx.branch_dtype) if rounds else None
        processors = torch.cuda.get_device_properties(total.device).multi_processor_count
        programs = min(rows, processors * _PROGRAMS_PER_PROCESSOR)
        of_weight, of_bias = (weight.new_empty(programs, width, dtype=torch.float32) for _ in range(2))
        _norm_backward[(programs,)](
            of_normed.contiguous(), None if of_total is None else of_total.contiguous(), total, weight, mean, scale,
            of_x, of_branch, of_weight, of_bias, rows, width,
            HAS_TOTAL=of_total is not None, ROUNDS=rounds, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        branch = of_branch if rounds else of_x if ctx.branch_dtype is not None else None
        return of_x, branch, of_weight.sum(0).to(weight.dtype), of_bias.sum(0).to(weight.dtype), None, None


@triton.jit
def _norm_forward(
    x, branch, weight, bias, total, normed, mean, scale, width, eps, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        value += tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        # Backward knows the rounded sum only.
        value = rounded.to(tl.float32)
    row_mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - row_mean, 0.0)
    row_scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean + row, row_mean)
    tl.store(scale + row, row_scale)
    out = centred * row_scale * tl.load(weight + column, mask=inside) + tl.load(bias + column, mask=inside)
    tl.store(normed + row * width + column, out, mask=inside)


@triton.jit
def _norm_backward(
    of_normed, of_total, total, weight, mean, scale, of_x, of_branch, of_weight, of_bias, rows, width,
    HAS_TOTAL: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + column
        row_scale = tl.load(scale + row)
        gradient = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        unit = tl.where(inside, (value - tl.load(mean + row)) * row_scale, 0.0)
        weight_sum += gradient * unit
        bias_sum += gradient
        scaled = gradient * factor
        along, shift = tl.sum(scaled * unit, 0) / width, tl.sum(scaled, 0) / width
        out = (scaled - shift - unit * along) * row_scale
        if HAS_TOTAL:
            out += tl.load(of_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + at, out, mask=inside)
        if ROUNDS:
            tl.store(of_branch + at, out, mask=inside)
    tl.store(of_weight + program * width + column, weight_sum, mask=inside)
    tl.store(of_bias + program * width + column, bias_sum, mask=inside)


def head_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, gradients: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T`; fill the gradients of hidden and weight, where given."""
    rows, vocabulary = len(weight), -(-len(weight) // _ALIGNED) * _ALIGNED
    # Rows of zeros make the count a multiple; their logits are left out.
    matrix = weight.new_zeros(vocabulary, weight.shape[1], dtype=dtype)
    matrix[:rows].copy_(weight)
    inputs, targets = hidden.to(dtype), targets.contiguous()
    losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    most_bytes = torch.cuda.get_device_properties(hidden.device).total_memory * _LOGITS_PART
    chunks = math.ceil(len(hidden) * vocabulary * matrix.element_size() / most_bytes)
    for index, (part, target, loss) in enumerate(
        zip(inputs.chunk(chunks), targets.chunk(chunks), losses.chunk(chunks), strict=True)
    ):
        logits = part @ matrix.t()
        _cross_entropy[(len(part),)](
            logits, target, loss, rows, vocabulary, IN_PLACE=gradients is not None, BLOCK=_COLUMNS, num_warps=8
        )
        if gradients is not None:
            of_hidden, of_weight = gradients
            _multiply(logits, matrix, of_hidden.chunk(chunks)[index])
            product = (logits.t() @ part)[:rows]
            (of_weight.copy_ if index == 0 else of_weight.add_)(product)
    return losses.sum()


def _multiply(one: Tensor, other: Tensor, out: Tensor) -> None:
    if out.dtype == one.dtype:
        torch.mm(one, other, out=out)
    else:
        out.copy_(one @ other)


@triton.jit
def _cross_entropy(logits, targets, losses, count, width, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row's loss and, in place of its logits, their gradient: probabilities, less one at the target."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * width
    target = tl.load(targets + row)
    at_target = tl.load(start + target).to(tl.float32)
    largest, total = -float("inf"), 0.0
    for first in range(0, count, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < count, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(value - larger), 0)
        largest = larger
    log_sum = largest + tl.log(total)
    tl.store(losses + row, log_sum - at_target)
    if IN_PLACE:
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(start + column, mask=column < count, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(value - log_sum) - tl.where(column == target, 1.0, 0.0)
            tl.store(start + column, gradient, mask=column < width)
