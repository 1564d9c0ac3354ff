"""Own loops for storms: `storm_loops.py cnn|cnn-group|lstm|scaler RESULT`. Rank 0 writes the final losses to RESULT."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import shoal

STEPS, BATCH, SLOW_S = 300, 24, 0.01
kind, result = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(0)


class LastWord(nn.Module):
    """Guess every next number of a sequence; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(16, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(numbers))[0])


def make_sequences(count: int) -> Tensor:
    starts, strides = torch.randint(1, 16, (count, 1)), torch.randint(1, 4, (count, 1))
    numbers = (starts + strides * torch.arange(12)) % 15 + 1
    return numbers * (torch.arange(12) < torch.randint(4, 13, (count, 1)))


def make_images(count: int) -> tuple[Tensor, Tensor]:
    patterns, labels = torch.randn(5, 1, 8, 8), torch.randint(5, (count,))
    return patterns[labels] + torch.randn(count, 1, 8, 8), labels


def cnn(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)
    )


is_lstm = kind == "lstm"
session = shoal.Session(steps=STEPS, global_batch=BATCH, micro_batch=8, count_varies=is_lstm, checkpoint_every=40)
if is_lstm:
    model, sequences = LastWord(), make_sequences(960)
    data, tests = TensorDataset(sequences), (sequences[:200],)
else:
    model = cnn(nn.GroupNorm(2, 8) if kind == "cnn-group" else nn.BatchNorm2d(8))
    images, labels = make_images(960)
    data, tests = TensorDataset(images, labels), (images[:200], labels[:200])


def loss_of(model: nn.Module, *batch: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the losses and the number of terms."""
    if not is_lstm:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
    inputs, targets = batch[0][:, :-1], batch[0][:, 1:]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return loss, int((targets != 0).sum())


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
session.attach(model, optimizer, scheduler, average, *([scaler] if kind == "scaler" else []))
source = DataLoader(data, batch_size=8, num_workers=1) if kind == "scaler" else data
for step in session:
    with step:
        time.sleep(SLOW_S)
        for batch in step.batches(source):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "scaler"):
                loss, count = loss_of(model, *batch)
            if is_lstm:
                step.backward(loss, count=count)
            else:
                step.backward(loss)
        step.update(clip=1.0, after=lambda: average.update_parameters(model))
if session.is_main:
    model.eval()
    average.eval()
    with torch.no_grad():
        losses = {name: loss_of(one, *tests)[0].item() for name, one in (("model", model), ("average", average))}
    count = loss_of(model, *tests)[1]
    result.write_text(json.dumps({name: loss / count for name, loss in losses.items()}))
