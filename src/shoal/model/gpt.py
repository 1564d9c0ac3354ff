"""A GPT in the shape of GPT-2: learned positions, pre-norm blocks, a head tied to the token embedding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.schema import ModelConfig
from shoal.model.kernels import attention, gelu
from shoal.model.loss import Take, head_loss


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
