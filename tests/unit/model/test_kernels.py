"""shoal's attention and GELU kernels equal torch's in values and gradients, on any processor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.config.schema import ModelConfig
from shoal.model import kernels
from shoal.model.gpt import GPT, compile_block
from shoal.model.kernels import Dropout, attention, gelu


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


def test_long_and_short_sequences_and_evaluation_use_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_attend", lambda *_: pytest.fail("shoal's kernel was used"))
    monkeypatch.setattr(kernels, "_SHORTEST", 5)
    attention(torch.randn(1, 4, 24, requires_grad=True), 2, 0.0)
    attention(torch.randn(1, kernels._LONGEST + 1, 24, requires_grad=True), 2, 0.0)
    with torch.no_grad():
        attention(torch.randn(1, 8, 24), 2, 0.0)


def test_x86_uses_torchs_attention_with_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "torch_is_slow_here", lambda: False)
    monkeypatch.setattr(kernels, "_IS_X86", True)
    qkv = torch.randn(1, 8, 24, requires_grad=True)
    used = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        used.append(kernels._use_own_attention(qkv, 0.0))
    assert used == [True, False]


@pytest.mark.parametrize(("batch", "length", "heads", "width"), [(3, 16, 2, 8), (2, 100, 1, 24), (1, 600, 2, 4)])
def test_attention_with_dropout_equals_the_formula(batch: int, length: int, heads: int, width: int) -> None:
    torch.manual_seed(length)
    x = torch.randn(batch, length, 3 * width)
    torch.manual_seed(1)
    weights = kernels._attend(x, heads, 0.3)[2]
    kept = torch.zeros(batch * heads, length, length, dtype=torch.float64)
    for first, end, part in kernels._blocks(weights, batch * heads, length):
        kept[:, first:end, :end] = part > 0

    def formula(qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) * (width // heads) ** -0.5
        causal = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(3)
        mixed = (causal * kept.view(causal.shape) / 0.7) @ v
        out: Tensor = mixed.transpose(1, 2).reshape(batch, length, width)
        return out

    def own(qkv: Tensor) -> Tensor:
        torch.manual_seed(1)
        return attention(qkv, heads, 0.3)

    # The part that is kept has 16 bits.
    for actual, expected in zip(value_and_gradient(own, x), value_and_gradient(formula, x.double()), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=5e-5, atol=5e-6)
    if length == 600:
        lower = kept.sum() / (batch * heads * length * (length + 1) / 2)
        assert lower.item() == pytest.approx(0.7, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_its_part_in_all_positions_and_the_mean(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dropout = Dropout(0.2)
    ones = torch.ones(1000, 403, dtype=dtype, requires_grad=True)
    out = dropout(ones)
    out.sum().backward()
    assert out.dtype == dtype
    assert out.unique().tolist() == pytest.approx([0.0, 1.25], rel=1e-4)
    assert ones.grad is not None
    assert torch.equal(out, ones.grad)
    # Four elements share a draw of 64 bits: each of the four is kept as often, and independently of the next.
    lanes = (out.flatten() > 0)[: out.numel() // 4 * 4].view(-1, 4).double()
    torch.testing.assert_close(lanes.mean(dim=0), torch.full((4,), 0.8, dtype=torch.float64), rtol=0, atol=0.006)
    assert (lanes.T.corrcoef() - torch.eye(4)).abs().max() < 0.015


def test_dropout_is_repeated_by_the_seed_and_absent_in_evaluation() -> None:
    dropout, x = Dropout(0.5), torch.randn(33)
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(dropout(x))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_with_dropout_equal_eager_ones_for_any_batch() -> None:
    config = ModelConfig(layers=2, heads=2, width=16, seq_len=8, vocab_size=20, dropout=0.2)
    torch.manual_seed(0)
    model = GPT(config)

    def gradients(batch: int) -> list[Tensor]:
        torch.manual_seed(batch)
        tokens = torch.randint(20, (batch, 8))
        return list(torch.autograd.grad(model(tokens, tokens), list(model.blocks.parameters())))

    eager = [gradients(batch) for batch in (2, 3, 5)]
    model._is_compiled = True
    for block in model.blocks:
        compile_block(block, backend="aot_eager", fullgraph=True)
    for batch, expected in zip((2, 3, 5), eager, strict=True):
        torch.testing.assert_close(gradients(batch), expected)


def test_gelu_equals_torchs() -> None:
    x = torch.cat([torch.linspace(-30, 30, 5001), torch.tensor([0.0, -0.0, 1e-20, 88.0, -88.0, 1e4, -1e4])])
    assert_same(gelu, lambda x: F.gelu(x, approximate="tanh"), x)
    with torch.no_grad():
        torch.testing.assert_close(gelu(x), F.gelu(x, approximate="tanh"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_other_precisions_use_torchs_gelu(kind: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 50, dtype=kind)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
