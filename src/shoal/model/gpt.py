"""A GPT in the shape of GPT-2: learned positions, pre-norm blocks, a head tied to the token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.schema import ModelConfig


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Feedforward(nn.Sequential):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
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
    """Called with targets it returns the loss *summed* over tokens: the caller knows how many tokens the world has."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.seq_len, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self._init_weights()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

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
