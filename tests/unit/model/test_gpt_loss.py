"""Chunked head and loss equal torch's cross-entropy on all logits, in single calls and in whole trainings."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.config.schema import ModelConfig
from shoal.engine.update import clip_gradients, gradient_norm
from shoal.model.gpt import GPT, head_loss

SHAPE = ModelConfig(layers=2, heads=2, width=32, seq_len=8, vocab_size=50)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def with_gradients(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor], scale: float) -> list[Tensor]:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in tensors[:2])
    value = loss(hidden, weight, tensors[2])
    (value * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [value.detach(), hidden.grad, weight.grad]


def make(tokens: int, vocabulary: int, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    hidden = spread * torch.randn(tokens, 16, generator=chance)
    return hidden, torch.randn(vocabulary, 16, generator=chance), torch.randint(vocabulary, (tokens,), generator=chance)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(2, 90), st.integers(1, 50), st.sampled_from([1.0, 1 / 512, 0.0, -3.0]))
def test_chunked_loss_and_gradients_equal_those_of_all_logits(
    tokens: int, vocabulary: int, chunk: int, scale: float
) -> None:
    tensors = make(tokens, vocabulary)
    chunked = with_gradients(lambda *args: head_loss(*args, chunk=chunk), tensors, scale)
    for actual, expected in zip(chunked, with_gradients(full, tensors, scale), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_probabilities_that_underflow_have_a_finite_loss(chunk: int) -> None:
    """Logits are hundreds apart: the target's probability is zero in fp32, its loss is finite."""
    tensors = make(20, 30, spread=60.0)
    chunked = with_gradients(lambda *args: head_loss(*args, chunk=chunk), tensors, 1.0)
    reference = with_gradients(full, tensors, 1.0)
    assert reference[0] > 1000
    for actual, expected in zip(chunked, reference, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)


def test_without_grad_nothing_is_saved_for_backward() -> None:
    tensors = make(9, 20)
    with torch.no_grad():
        loss = head_loss(*tensors, chunk=4)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, full(*tensors))


def test_a_second_backward_through_one_graph_is_refused() -> None:
    hidden, weight, targets = make(6, 20)
    loss = head_loss(hidden.requires_grad_(), weight.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_matmuls_in_bf16_are_close() -> None:
    tensors = make(30, 50)
    chunked = with_gradients(lambda *args: head_loss(*args, matmul_dtype=torch.bfloat16, chunk=8), tensors, 1.0)
    for actual, expected in zip(chunked, with_gradients(full, tensors, 1.0), strict=True):
        assert actual.dtype == torch.float32
        assert float((actual - expected).norm() / expected.norm()) < 0.02


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_chunked_loss_compiles() -> None:
    """Use torch's tracer without its code generator: that needs no compiler and takes a second."""
    tensors = make(10, 20)
    compiled = torch.compile(lambda *args: head_loss(*args, chunk=4), backend="eager")
    for actual, expected in zip(
        with_gradients(compiled, tensors, 0.5), with_gradients(full, tensors, 0.5), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


class PlainGPT(GPT):
    """GPT with dense embedding gradients and all logits at once."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        x = self.dropout(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = sum(block(x, None))
        return full(self.norm(x).flatten(0, 1), self.token.weight, targets.flatten())


def losses(kind: type[GPT], dropout: float, micro_batches: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(3)
    model = kind(SHAPE.model_copy(update={"dropout": dropout}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    chance = torch.Generator().manual_seed(5)
    loss_values = []
    for step in range(12):
        torch.manual_seed(step)
        rows = torch.randint(SHAPE.vocab_size // 5, (2 * micro_batches, SHAPE.seq_len + 1), generator=chance)
        for part in rows.chunk(micro_batches):
            loss = model(part[:, :-1], part[:, 1:]) / rows[:, 1:].numel()
            loss.backward()
            loss_values.append(loss.item())
        assert all(p.grad is not None and not p.grad.is_sparse for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return loss_values, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_with_a_tied_weight_equals_the_plain_model(dropout: float, micro_batches: int) -> None:
    """Two gradients add up in the tied weight: a dense one of the head, and rows of tokens, some repeated."""
    (chunked, chunked_weights), (plain, plain_weights) = (
        losses(kind, dropout, micro_batches) for kind in (GPT, PlainGPT)
    )
    assert chunked == pytest.approx(plain, rel=1e-5)
    assert chunked[-1] < chunked[0]
    for actual, expected in zip(chunked_weights, plain_weights, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_without_targets_the_model_returns_logits() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(SHAPE.vocab_size, (2, SHAPE.seq_len))
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, tokens), expected)


@pytest.mark.long
def test_memory_does_not_grow_with_steps() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32, requires_grad=True), torch.randn(20_000, 32, requires_grad=True)
    targets = torch.randint(20_000, (64,))

    def run(times: int) -> int:
        for _ in range(times):
            head_loss(hidden, weight, targets, chunk=16).backward()
            hidden.grad = weight.grad = None
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before_kb = run(10)
    # A step that kept its gradients would add 2.6 MB.
    assert run(30) - before_kb < 20_000


class LargestTensor(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


@pytest.mark.parametrize(("loss", "largest"), [(full, 64 * 500), (lambda *args: head_loss(*args, chunk=8), 500 * 16)])
def test_no_tensor_of_the_chunked_loss_holds_all_logits(loss: Loss, largest: int) -> None:
    """Only the weight and its gradient are larger than a chunk's logits."""
    with LargestTensor() as seen:  # type: ignore[no-untyped-call]
        with_gradients(loss, make(64, 500), 1.0)
    assert seen.numbers == largest


@pytest.mark.parametrize("factor", [1e-3, 0.999999, 1.0, 50.0, float("nan")])
def test_clipping_is_bit_identical_to_torch(factor: float) -> None:
    def parameters() -> list[nn.Parameter]:
        chance = torch.Generator().manual_seed(2)
        created = [nn.Parameter(torch.zeros(size)) for size in (3, 50, 7)]
        for parameter in created[:2]:
            parameter.grad = torch.randn(parameter.shape, generator=chance)
        norm = torch.cat([parameter.grad for parameter in created[:2] if parameter.grad is not None]).norm()
        for parameter in created[:2]:
            parameter.grad = parameter.grad * (factor / norm) if parameter.grad is not None else None
        return created

    clipped, reference = parameters(), parameters()
    norm = float(gradient_norm(clipped))
    clip_gradients(clipped, norm, 1.0)
    torch.testing.assert_close(
        torch.tensor(norm), nn.utils.clip_grad_norm_(reference, 1.0), equal_nan=True, rtol=0, atol=0
    )
    for actual, expected in zip(clipped, reference, strict=True):
        assert (actual.grad is None) == (expected.grad is None)
        if actual.grad is not None and expected.grad is not None:
            assert actual.grad.numpy().tobytes() == expected.grad.numpy().tobytes()
