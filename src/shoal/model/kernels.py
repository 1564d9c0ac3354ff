"""Operations of the GPT for devices on which torch's own are slow; elsewhere torch's are used.

On 64-bit ARM without bf16 instructions attention and GELU are shoal's. Measured on a Neoverse-N1 (docs/speed.md):
oneDNN multiplies by a transposed matrix at two thirds of OpenBLAS's speed, the derivative of GELU computes a second
tanh that costs three times an exp, and flash attention takes 1.6 times as long as plain products. On x86 attention is
shoal's with one thread. On every processor dropout is shoal's, and attention with it: torch draws a number of 24 bits
for each element, and has no flash attention with dropout. On CUDA sums with their norms are one kernel
(`gpu_kernels`). The mathematics is torch's, up to rounding.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.host.proc import read_cpuinfo

# The longest sequence: the attention weights are kept for backward, 9 MB per layer at 512 tokens of GPT-2, and four
# times as much at twice the length.
_LONGEST = 512
_IS_X86 = platform.machine() == "x86_64"
# The shortest sequence: below, starting the products takes longer than they do. On ARM these kernels are 7% slower at
# 64 tokens and 9% faster at 128, on x86 3% slower at 128 and 12% faster at 256.
_SHORTEST = 256 if _IS_X86 else 128
# Queries per block. Queries see no later key, so a block skips the keys after it; smaller blocks cost more than they
# save.
_QUERIES = 128 if _IS_X86 else 256
# Dropout keeps an element by a random number of 16 bits: one draw of 64 bits serves four.
_DRAWS = 1 << 16
# The widest row that one GPU program normalises in registers.
_WIDEST_NORM = 8192
# GELU by tanh is x · sigmoid(x · (A + B·x²)).
_A = 2 * math.sqrt(2 / math.pi)
_B = 0.044715 * _A


@cache
def torch_is_slow_here() -> bool:
    if platform.machine() != "aarch64":
        return False
    features = read_cpuinfo("Features").split()
    return bool(features) and "bf16" not in features


def prefer_blas() -> None:
    """Multiply by OpenBLAS instead of oneDNN in the whole process, where oneDNN is slower."""
    if torch_is_slow_here():
        torch._C._set_mkldnn_enabled(False)


@cache
def has_triton() -> bool:
    """Return whether Triton kernels can be made here: it compiles a small C program to start each of them."""
    compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, filter(None, compilers)))


def add_norm(x: Tensor, branch: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return `x + branch`, the residual stream, and its LayerNorm."""
    if _use_gpu_kernels(x) and x.shape[-1] <= _WIDEST_NORM:
        from shoal.model import gpu_kernels

        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else norm.weight.dtype
        return gpu_kernels.add_norm(x, branch, norm, dtype)
    if branch is not None:
        x = x + branch
    return x, norm(x)


def _use_gpu_kernels(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.is_cuda and has_triton()


def gelu(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype == torch.float32:
        # Compiled for x86 it takes half the time of a tanh.
        return x * torch.sigmoid(x * (_A + _B * (x * x)))
    if not _use_own_kernels(x):
        return F.gelu(x, approximate="tanh")
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
        return out
    return x * _gate(x, _slope_of_gate(x * x))


def attention(qkv: Tensor, heads: int, dropout: float) -> Tensor:
    """Return causal attention of batch × length × (queries, keys, values of all heads), with the heads side by side."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    if _use_own_attention(qkv, dropout):
        out: Tensor = _attend(qkv, heads, dropout)[0]
        return out
    # Not one view of five dimensions: its gradient costs a copy more on a GPU.
    q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in qkv.split(width, dim=2))
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, width)


class Dropout(nn.Dropout):
    """torch's, with a quarter of the time for random numbers on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p or x.device.type != "cpu":
            return super().forward(x)
        noise: Tensor = dropout_noise(x.detach(), self.p)
        return x * noise


# An operation of its own for the compiler too, whose random numbers are slower still. The tag keeps it from computing
# the noise again in backward, where it would be another.
@torch.library.custom_op("shoal::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_noise(x: Tensor, dropout: float) -> Tensor:
    """Return a tensor like `x` of zeros and, for what is kept, the factor that makes up for the zeros."""
    kept = _draw(x.numel()) >= _dropped(dropout) - _DRAWS // 2
    return kept.to(x.dtype).mul_(_factor(dropout)).view(x.shape)


@dropout_noise.register_fake
def _(x: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _draw(count: int) -> Tensor:
    """Return uniform random numbers of 16 bits."""
    # From the lowest number: without bounds torch draws none below zero.
    return torch.empty(-(-count // 4), dtype=torch.int64).random_(-(1 << 63), None).view(torch.int16)[:count]


def _dropped(dropout: float) -> int:
    """Return how many of all values of a draw mean that an element is dropped."""
    return min(round(dropout * _DRAWS), _DRAWS - 1)


def _factor(dropout: float) -> float:
    """Return the inverse of the part that is kept: the mean over all draws is then exact."""
    return _DRAWS / (_DRAWS - _dropped(dropout))


def _use_own_attention(qkv: Tensor, dropout: float) -> bool:
    if qkv.device.type != "cpu" or qkv.dtype != torch.float32 or not torch.is_grad_enabled():
        return False
    if dropout:
        return True
    is_in_range = _SHORTEST <= qkv.shape[1] <= _LONGEST
    # In this order: a tracer cannot follow the rest.
    if not is_in_range or torch.compiler.is_compiling():
        return False
    return torch_is_slow_here() or (_IS_X86 and torch.get_num_threads() == 1)


def _use_own_kernels(x: Tensor) -> bool:
    # First, because a tracer cannot follow the rest: a compiler makes its own kernels.
    if torch.compiler.is_compiling():
        return False
    return x.device.type == "cpu" and x.dtype == torch.float32 and torch_is_slow_here()


def _slope_of_gate(square: Tensor) -> Tensor:
    return torch.add(square.new_tensor(_A), square, alpha=_B)


def _gate(x: Tensor, slope: Tensor) -> Tensor:
    return torch.mul(slope, x).sigmoid_()


class _Gelu(torch.autograd.Function):
    """Computes the derivative in forward, so that backward is one product. It keeps one tensor, as torch does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        slope = _slope_of_gate(square)
        gate = _gate(x, slope)
        out = x * gate
        # The derivative is gate + out · (1 - gate) · (A + 3·B·x²), and the last factor is 3 · slope - 2 · A.
        inner = torch.add(slope.new_tensor(-2 * _A), slope, alpha=3, out=square)
        rest = torch.addcmul(out, out, gate, value=-1, out=slope)
        ctx.save_for_backward(torch.addcmul(gate, rest, inner, out=rest))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        derivative: Tensor = ctx.saved_tensors[0]
        return gradient * derivative


# Attention by plain products. Queries, keys, values and the attention weights are kept for backward, the weights of all
# blocks of queries in one flat tensor. A weight that dropout drops is kept with a minus sign.
@torch.library.custom_op("shoal::attend", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _attend(qkv: Tensor, heads: int, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention, contiguous copies of queries, keys and values, and the weights."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    by_head = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    parts = by_head.clone(memory_format=torch.contiguous_format).view(3, batch * heads, length, -1)
    q, k, v = parts
    mixed = torch.empty_like(q)
    weights = qkv.new_empty(_weight_count(batch * heads, length))
    for first, end, part in _blocks(weights, batch * heads, length):
        _multiply(q[:, first:end], k[:, :end].transpose(1, 2), part, q.shape[2] ** -0.5)
        part[:, :, first:].add_(part.new_full((end - first, end - first), -math.inf).triu_(1))
        torch.softmax(part, dim=2, out=part)
        if dropout:
            signs = _draw(part.numel()).to(part.dtype).sub_(_dropped(dropout) - _DRAWS // 2 - 0.5)
            part.copysign_(signs.view(part.shape))
        _multiply(part.relu() if dropout else part, v[:, :end], mixed[:, first:end], _factor(dropout))
    return mixed.view(batch, heads, length, -1).transpose(1, 2).reshape(batch, length, width), parts, weights


@_attend.register_fake
def _(qkv: Tensor, heads: int, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    parts = qkv.new_empty(3, batch * heads, length, width // heads)
    return qkv.new_empty(batch, length, width), parts, qkv.new_empty(_weight_count(batch * heads, length))


@torch.library.custom_op("shoal::attend_backward", mutates_args=())
def _attend_backward(gradient: Tensor, parts: Tensor, weights: Tensor, heads: int, dropout: float) -> Tensor:
    """Return the gradient of queries, keys and values, given that of the attention."""
    batch, length, width = gradient.shape
    q, k, v = parts
    of_mixed = gradient.view(batch, length, heads, -1).transpose(1, 2).reshape(q.shape)
    of_parts = torch.empty_like(parts)
    of_q, of_k, of_v = of_parts
    scale, factor = q.shape[2] ** -0.5, _factor(dropout)
    # From the last block, which sees all keys: it writes, the others add to it.
    for first, end, part in reversed(_blocks(weights, len(q), length)):
        of_block, add = of_mixed[:, first:end], end < length
        kept = part.relu() if dropout else part
        _multiply(kept.transpose(1, 2), of_block, of_v[:, :end], factor, add)
        of_weights = torch.empty_like(part)
        _multiply(of_block, v[:, :end].transpose(1, 2), of_weights, factor)
        if dropout:
            of_weights = torch.ops.aten.threshold_backward(of_weights, part, 0)
            part = torch.abs(part, out=kept)
        of_scores = torch._softmax_backward_data(of_weights, part, 2, part.dtype)
        _multiply(of_scores, k[:, :end], of_q[:, first:end], scale)
        _multiply(of_scores.transpose(1, 2), q[:, first:end], of_k[:, :end], scale, add)
    by_head = of_parts.view(3, batch, heads, length, -1)
    return by_head.permute(1, 3, 0, 2, 4).reshape(batch, length, 3 * width)


@_attend_backward.register_fake
def _(gradient: Tensor, parts: Tensor, weights: Tensor, heads: int, dropout: float) -> Tensor:
    batch, length, width = gradient.shape
    return gradient.new_empty(batch, length, 3 * width)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.arguments = inputs[1:]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_attend(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor, None, None]:
    return _attend_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.arguments), None, None


_attend.register_autograd(_backward_of_attend, setup_context=_keep_for_backward)


def _weight_count(matrices: int, length: int) -> int:
    return matrices * sum((end - first) * end for first, end in _bounds(length))


def _bounds(length: int) -> list[tuple[int, int]]:
    return [(first, min(first + _QUERIES, length)) for first in range(0, length, _QUERIES)]


def _blocks(weights: Tensor, matrices: int, length: int) -> list[tuple[int, int, Tensor]]:
    """Return the blocks of queries: first, end, and their weights over the keys before the end."""
    bounds = _bounds(length)
    parts = weights.split([matrices * (end - first) * end for first, end in bounds])
    return [(*ends, part.view(matrices, -1, ends[1])) for ends, part in zip(bounds, parts, strict=True)]


def _multiply(one: Tensor, other: Tensor, out: Tensor, factor: float, add: bool = False) -> None:
    torch.baddbmm(out, one, other, beta=float(add), alpha=factor, out=out)
