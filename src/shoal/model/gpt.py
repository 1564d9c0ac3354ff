"""A GPT in the shape of GPT-2: learned positions, pre-norm blocks, a head tied to the token embedding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.config.schema import ModelConfig
from shoal.cost.model_size import HEAD_CHUNK
from shoal.model.kernels import attention, gelu

# SECTION model/loss
# The head and its cross-entropy in one: the logits of some tokens at a time, never those of a whole batch.
#
# Plain cross-entropy holds as many numbers as all tokens have logits twice: 206 MB for 512 tokens of GPT-2. But the
# gradient of a sum over tokens is known as soon as a token's logits are, up to the number by which the caller will
# scale
# the sum. So forward goes through the tokens in chunks and leaves behind what backward only has to scale: the gradients
# of the head's input and of its weight.


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


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(attention(self.qkv(x), self.heads, self.dropout if self.training else 0.0))
        return out


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


class Feedforward(nn.Sequential):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            nn.Linear(config.width, 4 * config.width),
            Gelu(),
            nn.Linear(4 * config.width, config.width),
        )


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feedforward_norm = nn.LayerNorm(config.width)
        self.feedforward = Feedforward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return out


class GPT(nn.Module):
    """Called with targets it returns the loss *summed* over tokens: the caller knows how many tokens the world has.

    `take_head` is told the head's part of the gradient of the tied weight as soon as backward has it.
    """

    tied_name = "token.weight"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.seq_len, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        # What matrices are multiplied in; weights, sums and everything between products stay as they are.
        self.products = torch.float32
        self.take_head: Take | None = None
        self._is_compiled = False
        self._init_weights()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self._embed(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.dropout(x)
        with torch.autocast(x.device.type, self.products, enabled=self.products != torch.float32):
            for block in self.blocks:
                x = block(x)
        x = self.norm(x)
        if targets is None:
            return F.linear(x, self.token.weight)
        hidden, goals = x.flatten(0, 1), targets.flatten()
        return head_loss(hidden, self.token.weight, goals, products=self.products, take=self.take_head)

    def _embed(self, tokens: Tensor) -> Tensor:
        # The head gives a dense gradient of this weight first. Autograd then adds the rows of these tokens to it,
        # where it would otherwise make and add a second dense one: 154 MB for GPT-2. A GPU adds in any order.
        return F.embedding(tokens, self.token.weight, sparse=tokens.device.type == "cpu")

    def compile_blocks(self) -> None:
        """Each by itself: all have one code, so one is compiled, and gradients still come block by block for DDP."""
        self._is_compiled = True
        for block in self.blocks:
            block.compile(dynamic=False)

    def uncompiled(self) -> AbstractContextManager[Any]:
        """For calls that differ from those of a training, each of which would be compiled anew."""
        return torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()

    def _init_weights(self) -> None:
        """GPT-2's: 0.02 everywhere, less for what adds to the residual stream, so depth does not blow it up."""
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds_to_residual = name.endswith(("attention.out.weight", "feedforward.2.weight"))
                nn.init.normal_(parameter, std=residual_std if adds_to_residual else 0.02)

    def decay_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Matrices and embeddings decay; biases and norms don't."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
        """Appends `count` sampled tokens to each row, seeing at most the last `seq_len`."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.seq_len :])[:, -1]
            if temperature == 0:
                choice = logits.argmax(dim=-1, keepdim=True)
            else:
                odds = F.softmax(logits / temperature, dim=-1)
                choice = torch.multinomial(odds, 1, generator=generator)
            tokens = torch.cat((tokens, choice), dim=1)
        return tokens
