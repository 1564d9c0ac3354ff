"""shoal's attention and GELU kernels equal torch's in values and gradients, on any processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model import kernels
from shoal.model.kernels import attention, gelu


@pytest.fixture(autouse=True)
def use_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "torch_is_slow_here", lambda: True)
    monkeypatch.setattr(kernels, "_SHORTEST", 1)


def torch_attention(qkv: Tensor, heads: int) -> Tensor:
    batch, length, width = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, length, width // 3)


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value, and the gradient for random output gradients."""
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (gradient,) = torch.autograd.grad(out, leaf, slope)
    return out.detach(), gradient


def assert_same(own: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare with torch in double precision: in single precision both round."""
    for actual, expected in zip(value_and_gradient(own, x), value_and_gradient(reference, x.double()), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("batch", "length", "heads", "width"), [(1, 1, 1, 4), (3, 16, 2, 8), (2, 100, 3, 24)])
def test_attention_equals_torchs(batch: int, length: int, heads: int, width: int) -> None:
    torch.manual_seed(length)
    assert_same(
        lambda x: attention(x, heads, 0.0), lambda x: torch_attention(x, heads), torch.randn(batch, length, 3 * width)
    )


@pytest.mark.parametrize("queries", [1, 7, 10, 64])
def test_attention_does_not_depend_on_the_block_size(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(queries)
    monkeypatch.setattr(kernels, "_QUERIES", queries)
    assert_same(lambda x: attention(x, 2, 0.0), lambda x: torch_attention(x, 2), torch.randn(2, 30, 48))


def test_long_and_short_sequences_dropout_and_evaluation_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels._Attention, "apply", lambda *_: pytest.fail("shoal's kernel was used"))
    monkeypatch.setattr(kernels, "_SHORTEST", 5)
    attention(torch.randn(1, 4, 24, requires_grad=True), 2, 0.0)
    attention(torch.randn(1, kernels._LONGEST + 1, 24, requires_grad=True), 2, 0.0)
    attention(torch.randn(1, 8, 24, requires_grad=True), 2, 0.1)
    with torch.no_grad():
        attention(torch.randn(1, 8, 24), 2, 0.0)


def test_gelu_equals_torchs() -> None:
    x = torch.cat([torch.linspace(-30, 30, 5001), torch.tensor([0.0, -0.0, 1e-20, 88.0, -88.0, 1e4, -1e4])])
    assert_same(gelu, lambda x: F.gelu(x, approximate="tanh"), x)
    with torch.no_grad():
        torch.testing.assert_close(gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_precisions_use_torchs_gelu(kind: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 50, dtype=kind)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
