"""Activation checkpointing: the same bits with less memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from shoal.config.schema import ModelConfig
from shoal.model.gpt import GPT
from shoal.model.recompute import recomputed

TOKENS = torch.arange(32).view(2, 16)


def learned(recompute: bool, dropout: float, dtype: torch.dtype) -> list[Tensor]:
    """Return loss, gradients, and random numbers drawn after forward and after backward."""
    torch.manual_seed(1)
    model = GPT(ModelConfig(layers=3, heads=2, width=32, seq_len=16, vocab_size=50, dropout=dropout), recompute)
    model.matmul_dtype = dtype
    loss = model(TOKENS, TOKENS)
    after_forward = torch.rand(3)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    return [loss.detach(), after_forward, torch.rand(3), *dense]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_blocks_that_are_computed_again_give_the_same_bits(dropout: float, dtype: torch.dtype) -> None:
    plain, again = (learned(recompute, dropout, dtype) for recompute in (False, True))
    assert len(plain) == 3 + len(list(GPT(ModelConfig(layers=3)).parameters()))
    assert all(map(torch.equal, plain, again))


def test_forward_runs_again_for_each_backward_and_only_for_it() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return x.exp().sin()

    x = torch.ones(3, requires_grad=True)
    result = recomputed(function, x, context=nullcontext, is_random=False).sum()
    assert calls == [True]
    result.backward(retain_graph=True)
    result.backward()
    assert calls == [True] * 3
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.exp().cos() * x.exp())


def test_a_function_that_computes_something_else_the_second_time_is_refused() -> None:
    powers = iter((3, 0))

    def function(x: Tensor) -> Tensor:
        for _ in range(next(powers)):
            x = x.exp()
        return x

    result = recomputed(function, torch.ones(3, requires_grad=True), context=nullcontext, is_random=False).sum()
    with pytest.raises(RuntimeError, match="saved 0 tensors, and the first one 3"):
        result.backward()
