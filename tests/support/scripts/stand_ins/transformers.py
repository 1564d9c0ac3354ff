"""A stand-in for Hugging Face's transformers, with the few names that examples/finetune.py uses."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class GPT2Config(SimpleNamespace):
    pass


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)

    def forward(self, x):
        return x + self.attn(self.ln_1(x))


class GPT2LMHeadModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.n_positions, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids):
        x = self.transformer.wte(input_ids) + self.transformer.wpe(torch.arange(input_ids.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return SimpleNamespace(logits=self.lm_head(x))
