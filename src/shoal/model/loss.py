"""The head and its cross-entropy in one: the logits of some tokens at a time, never those of a whole batch.

Plain cross-entropy holds as many numbers as all tokens have logits twice: 206 MB for 512 tokens of GPT-2. But the
gradient of a sum over tokens is known as soon as a token's logits are, up to the number by which the caller will scale
the sum. So forward goes through the tokens in chunks and leaves behind what backward only has to scale: the gradients
of the head's input and of its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.cost.sizes import HEAD_CHUNK

Take = Callable[[Tensor], Tensor | None]


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    products: torch.dtype | None = None,
    chunk: int | None = None,
    take: Take | None = None,
) -> Tensor:
    """The cross-entropy of `hidden @ weight.T` summed over tokens: what `F.cross_entropy(reduction="sum")` gives.

    `hidden` is tokens × width, `weight` vocabulary × width. Matrices are multiplied in `products`, everything else is
    done in their own precision. `chunk` tokens are computed at once; unset, as many as make good use of memory.
    Backward hands the weight's gradient to `take` first, and goes on with what that returns.
    """
    size = chunk or max(1, HEAD_CHUNK // weight.shape[0])
    products = products or weight.dtype
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _HeadLoss.apply(hidden, weight, targets, products, size, take)  # type: ignore[no-untyped-call]
        return loss
    return _forward(hidden, weight, targets, products, size, None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, products: torch.dtype, size: int, take: Take | None
    ) -> Tensor:
        gradients = torch.empty_like(hidden), torch.empty_like(weight)
        loss = _forward(hidden, weight, targets, products, size, gradients)
        ctx.save_for_backward(*gradients)
        ctx.take = take
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the weight's gradient would cost as much memory as the logits did. A second backward
        # through the same graph is refused by autograd, because what it saved has changed.
        of_hidden, of_weight = (gradient.mul_(scale) for gradient in ctx.saved_tensors)
        return of_hidden, ctx.take(of_weight) if ctx.take else of_weight, None, None, None, None


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    products: torch.dtype,
    size: int,
    gradients: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The loss; where there is room for gradients, those too."""
    room = hidden.new_empty(min(size, len(hidden)), weight.shape[0])
    loss = hidden.new_zeros(())
    factors, matrix = hidden.to(products), weight.to(products)
    for start in range(0, len(hidden), size):
        part, goal = factors[start : start + size], targets[start : start + size]
        logits = room[: len(part)]
        _multiply(part, matrix.t(), logits)
        loss += _to_odds(logits, goal)
        if gradients is not None:
            slopes = logits.scatter_add_(1, goal[:, None], logits.new_full((len(part), 1), -1.0)).to(products)
            _multiply(slopes, matrix, gradients[0][start : start + size])
            _multiply(slopes.t(), part, gradients[1], add=start > 0)
    return loss


def _to_odds(logits: Tensor, goal: Tensor) -> Tensor:
    """Turns logits into odds where they lie; the sum of the losses.

    The largest of the odds is at least one part of the vocabulary, so its logarithm keeps its precision where that of
    the target's may be the logarithm of nothing.
    """
    largest = logits.amax(dim=1)
    at_goal = logits.gather(1, goal[:, None]).squeeze(1)
    odds = torch.softmax(logits, dim=1, out=logits)
    return (largest - at_goal - odds.amax(dim=1).log()).sum()


def _multiply(one: Tensor, other: Tensor, out: Tensor, add: bool = False) -> None:
    if one.dtype != out.dtype:
        product = one @ other
        (out.add_ if add else out.copy_)(product)
    elif add:
        out.addmm_(one, other)
    else:
        torch.mm(one, other, out=out)
