"""An LSTM over streams: `recurrent.py RESULT [die]`. With `die` rank 1 kills itself once, in the middle of step 6."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

result = Path(sys.argv[1])
killed = result.with_suffix(".killed")
torch.manual_seed(0)
session = shoal.Session(steps=12, global_batch=7, settings={"train.pin": "off"})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 11)

    def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, state = self.lstm(self.embed(inputs), state)
        return self.head(outputs), state


model = Model()
memory = shoal.Carried(torch.zeros(2, 8), torch.zeros(2, 8), dim=1)
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), memory)
tokens = torch.randint(11, (7 * 5 * 4 + 3,))
text = shoal.streams((tokens[:-1], tokens[1:]), length=4)

for step in session:
    with step:
        for inputs, targets, rows in step.batches(text):
            outputs, state = model(inputs, memory.read(rows))
            memory.write(rows, state)
            if "die" in sys.argv and step.number == 6 and session.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
            step.backward(loss, count=targets.numel())
        step.update(clip=1.0)
if session.is_main:
    result.write_text(json.dumps([parameter.sum().item() for parameter in model.parameters()]))
