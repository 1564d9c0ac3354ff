"""GPT-2 as nanoGPT has it: the model, the baseline of `gpu_step.py` and `one_node.py`, and their plain training steps.

Exact GELU, biases, torch's own attention, all logits at once, clipping. On a GPU: vocabulary padded to 50,304, bf16
autocast, fused AdamW; on a CPU: fp32, AdamW as torch chooses it. `compiled=True`: the whole model in `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 50_304


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).contiguous().view(batch, length, width)))
        out: Tensor = x + self.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))))
        return out


class NanoGPT(nn.Module):
    def __init__(
        self,
        layers: int,
        heads: int,
        width: int,
        length: int,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def make_cpu_step(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], compiled: bool) -> Callable[[], None]:
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-3, betas=(0.9, 0.99))

    def step() -> None:
        loss = call(*batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def make_step(layers: int, heads: int, width: int, batch: int, length: int, compiled: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = NanoGPT(layers, heads, width, length).cuda()
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(decay_groups(model), lr=6e-4, betas=(0.9, 0.95), fused=True)
    text = torch.randint(0, 50_257, (1 << 20,))

    def step() -> None:
        starts = torch.randint(len(text) - length - 1, (batch,)).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts]).pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
