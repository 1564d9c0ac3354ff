"""Fine-tune a Hugging Face GPT-2 with low-rank adapters: the base weights are frozen, only the adapters are exchanged.

pip install transformers
shoal run --on lab:3,link=100mbit examples/finetune.py
"""

import sys
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    print("error: this example needs transformers\n  next: pip install transformers", file=sys.stderr)
    sys.exit(2)

LENGTH, PADDING = 64, -100


class Adapter(nn.Module):
    """A frozen layer plus a trained product of two thin matrices, as in LoRA."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


def make_rows(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return token ids (bytes here), and targets in which padding is -100."""
    rows = [list(text.encode()[:LENGTH]) for text in texts]
    ids = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, ids.masked_fill(torch.arange(LENGTH) >= lengths[:, None], PADDING)


# The number of tokens differs from text to text: count_varies makes the ranks sum it in every step.
session = shoal.Session(steps=40, global_batch=24, count_varies=True)
torch.manual_seed(7)
config: Any = GPT2Config(
    vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)  # Or GPT2LMHeadModel.from_pretrained("gpt2"), with its tokenizer.
model.requires_grad_(False)
for block in model.transformer.h:
    block.attn.c_attn = Adapter(block.attn.c_attn, config.n_embd, 3 * config.n_embd)
model.to(session.device)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)
session.attach(model, optimizer)

text = files("shoal.data").joinpath("shakespeare.txt").read_text()
data = make_rows([line for line in text.splitlines() if len(line) > 8])

for step in session:
    with step:
        for ids, targets in step.batches(data):
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            count = int((targets[:, 1:] != PADDING).sum())
            loss = F.cross_entropy(logits, targets[:, 1:].flatten(), ignore_index=PADDING, reduction="sum")
            step.backward(loss, count=count)
        step.update(clip=1.0)
    if session.is_main and session.step % 10 == 0:
        print(
            f"step {session.step} of {session.world_size} ranks: loss of the last batch {loss / count:.3f}", flush=True
        )
