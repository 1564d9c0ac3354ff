"""A GPT in the shape of GPT-2: learned positions, pre-norm blocks, a head tied to the token embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shoal.config.schema import ModelConfig
from shoal.cost.model_size import HEAD_CHUNK
from shoal.model.kernels import Dropout, add_norm, attention, gelu, has_triton
from shoal.model.recompute import recomputed

# Receives the head's part of the gradient of the tied weight. Backward continues with the returned tensor, if any.
TakeGradient = Callable[[Tensor], Tensor | None]


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
        self.dropout = Dropout(config.dropout)

    @property
    def takes_any_batch(self) -> bool:
        """Whether its compiled code is for micro-batches of any size; on a GPU it is for one, and faster for that."""
        return self.attention_norm.weight.device.type == "cpu"

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream and what is still to be added to it: the next norm adds it in the same pass."""
        x, normed = add_norm(x, branch, self.attention_norm)
        x, normed = add_norm(x, self.dropout(self.attention(normed)), self.feedforward_norm)
        return x, self.dropout(self.feedforward(normed))


def compile_block(block: nn.Module, **options: Any) -> None:
    """Compile a block by itself, see `Block.takes_any_batch`."""
    block.compile(dynamic=None if getattr(block, "takes_any_batch", False) else False, **options)


def _run(block: nn.Module, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    if branch is not None:
        leave_batch_open(block, x, branch)
    result: tuple[Tensor, Tensor] = block(x, branch)
    return result


def leave_batch_open(block: nn.Module, *inputs: Tensor) -> None:
    """Mark the inputs of a block whose compiled code is to take micro-batches of any size."""
    if block._compiled_call_impl is not None and getattr(block, "takes_any_batch", False):
        for x in inputs:
            torch._dynamo.maybe_mark_dynamic(x, 0)


class GPT(nn.Module):
    """Called with targets it returns the loss *summed* over tokens: the caller knows the global number of tokens."""

    tied_name = "token.weight"

    def __init__(self, config: ModelConfig, recompute: bool = False) -> None:
        """With `recompute` a block keeps only its inputs, and is computed again during backward."""
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.rows_per_sample = config.seq_len
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.seq_len, config.width)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        # The type in which matrices are multiplied. Weights and losses stay in fp32, and on a CPU everything between
        # products too.
        self.matmul_dtype = torch.float32
        # Called as soon as backward has the head's part of the gradient of the tied weight.
        self.take_head: TakeGradient | None = None
        self._is_compiled = False
        self._init_weights()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        # The head gives a dense gradient of this weight first. With a sparse embedding autograd adds the rows of these
        # tokens to it, instead of a second dense gradient: 154 MB for GPT-2. On a GPU the order of adding is not fixed.
        x = F.embedding(tokens, self.token.weight, sparse=tokens.device.type == "cpu")
        x = self.dropout(x + self.position.weight[: tokens.shape[1]])
        if x.is_cuda:
            # The residual stream too: the blocks are bound by memory there.
            x = x.to(self.matmul_dtype)
        is_mixed = self.matmul_dtype != torch.float32
        precision = partial(torch.autocast, x.device.type, self.matmul_dtype, enabled=is_mixed)
        with precision():
            # Compiled blocks share one code only if the first has a branch of the same kind.
            branch = None
            if self._is_compiled:
                branch = torch.zeros_like(x, dtype=self.matmul_dtype, requires_grad=x.requires_grad)
            for block in self.blocks:
                run = partial(_run, block)
                if self.recompute and torch.is_grad_enabled():
                    x, branch = recomputed(run, x, branch, context=precision, is_random=self.config.dropout > 0)
                else:
                    x, branch = run(x, branch)
            x = add_norm(x, branch, self.norm)[1]
        if targets is None:
            return F.linear(x.to(self.token.weight.dtype), self.token.weight)
        hidden, flat_targets = x.flatten(0, 1), targets.flatten()
        return head_loss(
            hidden, self.token.weight, flat_targets, matmul_dtype=self.matmul_dtype, take_gradient=self.take_head
        )

    def compile_blocks(self) -> None:
        """Compile each block by itself: all share one code, and gradients still come block by block for DDP."""
        self._is_compiled = True
        for block in self.blocks:
            compile_block(block)

    def run_eagerly(self) -> AbstractContextManager[Any]:
        """Run eagerly inside: calls with other shapes than those of training would each be compiled anew."""
        return torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()

    def _init_weights(self) -> None:
        """Initialise as GPT-2: 0.02, but less for weights that add to the residual stream, which grows with depth."""
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds_to_residual = name.endswith(("attention.out.weight", "feedforward.2.weight"))
                nn.init.normal_(parameter, std=residual_std if adds_to_residual else 0.02)

    def decay_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Return the optimizer's parameter groups: matrices and embeddings decay; biases and norms don't."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float, generator: torch.Generator) -> Iterator[Tensor]:
        """Append `count` sampled tokens to each row, seeing at most the last `seq_len`; yield all after each token."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.seq_len :])[:, -1]
            if temperature == 0:
                choice = logits.argmax(dim=-1, keepdim=True)
            else:
                probabilities = F.softmax(logits / temperature, dim=-1)
                choice = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat((tokens, choice), dim=1)
            yield tokens


# The head and its cross-entropy in one function, in chunks of tokens. Plain cross-entropy holds the logits of all
# tokens twice: 206 MB for 512 tokens of GPT-2. But the gradient of a sum over tokens is known as soon as a token's
# logits are, up to the factor by which the caller scales the sum. So forward computes the gradients of the head's input
# and of its weight chunk by chunk, and backward only scales them.


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
    take_gradient: TakeGradient | None = None,
) -> Tensor:
    """Return the cross-entropy of `hidden @ weight.T` summed over tokens, as `F.cross_entropy(reduction="sum")`.

    `hidden` is tokens × width, `weight` vocabulary × width. Matrices are multiplied in `matmul_dtype`; everything else
    keeps its own precision. `chunk` tokens are computed at once; unset, as many as make good use of memory. Backward
    passes the weight's gradient to `take_gradient` first, and continues with what that returns.
    """
    size = chunk or max(1, HEAD_CHUNK // weight.shape[0])
    dtype = matmul_dtype or weight.dtype
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        arguments = (hidden, weight, targets, dtype, size, take_gradient)
        loss: Tensor = _HeadLoss.apply(*arguments)  # type: ignore[no-untyped-call]
        return loss
    return _forward(hidden, weight, targets, dtype, size, None)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        size: int,
        take_gradient: TakeGradient | None,
    ) -> Tensor:
        gradients = torch.empty_like(hidden), torch.empty_like(weight)
        loss = _forward(hidden, weight, targets, dtype, size, gradients)
        ctx.save_for_backward(*gradients)
        ctx.take_gradient = take_gradient
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a copy of the weight's gradient would cost as much memory as the logits did. Autograd refuses a
        # second backward through the same graph, because the saved tensors have changed.
        of_hidden, of_weight = (gradient.mul_(scale) for gradient in ctx.saved_tensors)
        return of_hidden, ctx.take_gradient(of_weight) if ctx.take_gradient else of_weight, None, None, None, None


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    size: int,
    gradients: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the loss; fill the gradients of hidden and weight, where given."""
    if hidden.is_cuda and has_triton():
        from shoal.model import gpu_kernels

        return gpu_kernels.head_forward(hidden, weight, targets, dtype, gradients)
    buffer = weight.new_empty(min(size, len(hidden)), weight.shape[0])
    loss = weight.new_zeros(())
    inputs, matrix = hidden.to(dtype), weight.to(dtype)
    for start in range(0, len(hidden), size):
        part, target = inputs[start : start + size], targets[start : start + size]
        logits = buffer[: len(part)]
        _multiply(part, matrix.t(), logits)
        loss += _softmax_in_place(logits, target)
        if gradients is not None:
            of_logits = logits.scatter_add_(1, target[:, None], logits.new_full((len(part), 1), -1.0)).to(dtype)
            _multiply(of_logits, matrix, gradients[0][start : start + size])
            _multiply(of_logits.t(), part, gradients[1], add=start > 0)
    return loss


def _softmax_in_place(logits: Tensor, target: Tensor) -> Tensor:
    """Turn logits into probabilities in place; return the sum of the losses.

    The largest probability is at least 1/vocabulary, so its logarithm is precise, where the probability of the target
    may be 0.
    """
    largest = logits.amax(dim=1)
    at_target = logits.gather(1, target[:, None]).squeeze(1)
    probabilities = torch.softmax(logits, dim=1, out=logits)
    return (largest - at_target - probabilities.amax(dim=1).log()).sum()


def _multiply(one: Tensor, other: Tensor, out: Tensor, add: bool = False) -> None:
    if one.dtype != out.dtype:
        product = one @ other
        (out.add_ if add else out.copy_)(product)
    elif add:
        out.addmm_(one, other)
    else:
        torch.mm(one, other, out=out)
