"""A loop in the style of nanoGPT: get_batch, cosine schedule, gradient clipping, evaluation.

shoal run --on lab:3,link=1gbit --wire int8 examples/nanogpt.py
python examples/nanogpt.py
"""

import math
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

STEPS, BATCH, BLOCK, WIDTH, VOCAB = 60, 24, 48, 96, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight  # Tied, as in GPT-2.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten(), reduction="sum")


def get_batch(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    windows = tokens[starts[:, None] + torch.arange(BLOCK + 1, device=starts.device)]
    return windows[:, :-1], windows[:, 1:]


session = shoal.Session(steps=STEPS, global_batch=BATCH)
torch.manual_seed(1337)
model = GPT().to(session.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / STEPS)))
)
session.attach(model, optimizer, scheduler)
text = files("shoal.data").joinpath("shakespeare.txt").read_bytes()
tokens = torch.tensor(list(text), device=session.device).clamp(max=VOCAB - 1)
train, val = tokens[: int(0.9 * len(tokens))], tokens[int(0.9 * len(tokens)) :]


@session.every(20)
@torch.no_grad()
def evaluate() -> None:
    starts = torch.arange(session.rank, 64, session.world_size, device=session.device) * BLOCK
    loss, count = session.sum(model(*get_batch(val, starts)).item(), len(starts) * BLOCK)
    session.log(val_loss=loss / count)
    if session.is_main:
        print(f"step {session.step}: val loss {loss / count:.3f}", flush=True)


for step in session:
    with step:
        for starts in step.batches(torch.arange(len(train) - BLOCK)):
            step.backward(model(*get_batch(train, starts)), count=len(starts) * BLOCK)
        step.update(clip=1.0)
