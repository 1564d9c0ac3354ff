"""Operations of the GPT for devices on which torch's own are slow; elsewhere torch's are used.

On 64-bit ARM without bf16 instructions attention and GELU are ours. Measured on a Neoverse-N1 (docs/speed.md): oneDNN
multiplies by a transposed matrix at two thirds of OpenBLAS's speed, the derivative of GELU computes a second tanh that
costs three times an exp, and flash attention takes 1.6 times as long as plain products. On CUDA sums with their norms
are one kernel (`gpu_kernels`). The mathematics is torch's, up to rounding.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
from collections.abc import Iterator
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
# The shortest sequence: below, starting the products takes longer than they do. At 64 tokens these kernels are 7%
# slower, at 128 9% faster.
_SHORTEST = 128
# Queries per block. Queries see no later key, so a block skips the keys after it; smaller blocks cost more than they
# save.
_QUERIES = 256
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
    if not _use_own_kernels(x):
        return F.gelu(x, approximate="tanh")
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
        return out
    return x * _gate(x, _slope_of_gate(x * x))


def attention(qkv: Tensor, heads: int, dropout: float) -> Tensor:
    """Return causal attention of batch × length × (queries, keys, values of all heads), with the heads side by side."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    if _use_own_kernels(qkv) and not dropout and _SHORTEST <= length <= _LONGEST and torch.is_grad_enabled():
        out: Tensor = _Attention.apply(qkv, heads)  # type: ignore[no-untyped-call]
        return out
    # Not one view of five dimensions: its gradient costs a copy more on a GPU.
    q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in qkv.split(width, dim=2))
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, width)


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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = _by_head(qkv, heads)
        q.mul_(q.shape[2] ** -0.5)
        mixed = torch.empty_like(q)
        weights = [_attention_weights(q[:, first:end], k[:, :end], first) for first, end in _blocks(length)]
        for (first, end), part in zip(_blocks(length), weights, strict=True):
            torch.bmm(part, v[:, :end], out=mixed[:, first:end])
        ctx.save_for_backward(q, k, v, *weights)
        return mixed.view(batch, heads, length, -1).transpose(1, 2).reshape(batch, length, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        q, k, v, *weights = ctx.saved_tensors
        batch, length, width = gradient.shape
        heads = len(q) // batch
        of_mixed = gradient.view(batch, length, heads, -1).transpose(1, 2).reshape(q.shape)
        of_q, of_k, of_v = (torch.empty_like(q) for _ in range(3))
        # From the last block, which sees all keys: it writes, the others add to it.
        for (first, end), part in reversed(list(zip(_blocks(length), weights, strict=True))):
            of_block, add = of_mixed[:, first:end], end < length
            _multiply(part.transpose(1, 2), of_block, of_v[:, :end], add)
            of_weights = torch.bmm(of_block, v[:, :end].transpose(1, 2))
            of_score = torch._softmax_backward_data(of_weights, part, 2, part.dtype)
            torch.bmm(of_score, k[:, :end], out=of_q[:, first:end])
            _multiply(of_score.transpose(1, 2), q[:, first:end], of_k[:, :end], add)
        of_q.mul_(q.shape[2] ** -0.5)
        parts = [part.view(batch, heads, length, -1).transpose(1, 2) for part in (of_q, of_k, of_v)]
        return torch.stack(parts, dim=2).view(batch, length, 3 * width), None


def _by_head(qkv: Tensor, heads: int) -> Iterator[Tensor]:
    """Return contiguous copies of queries, keys and values: (batch and head) × length × a head's width."""
    batch, length, _ = qkv.shape
    parts = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).clone(memory_format=torch.contiguous_format)
    return (part.reshape(batch * heads, length, -1) for part in parts)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(first, min(first + _QUERIES, length)) for first in range(0, length, _QUERIES)]


def _attention_weights(q: Tensor, k: Tensor, first: int) -> Tensor:
    """Return the softmax weights of a block of queries, from position `first`, over the keys up to each query."""
    scores = torch.bmm(q, k.transpose(1, 2))
    count = q.shape[1]
    scores[:, :, first:].add_(scores.new_full((count, count), -math.inf).triu_(1))
    return torch.softmax(scores, dim=2, out=scores)


def _multiply(one: Tensor, other: Tensor, out: Tensor, add: bool) -> None:
    if add:
        out.baddbmm_(one, other)
    else:
        torch.bmm(one, other, out=out)
