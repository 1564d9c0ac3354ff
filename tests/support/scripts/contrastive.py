"""Two encoders trained by comparing all samples of a step: `contrastive.py own|gather RESULT`.

With `own` the program calls torch's all-gather itself. At step 6 rank 1 of the first launch kills itself inside the
step, while the others wait for its rows.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shoal

way, result = sys.argv[1], Path(sys.argv[2])
killed = result.with_suffix(".killed")
torch.manual_seed(0)
session = shoal.Session(steps=16, global_batch=12, settings={"train.pin": "off"})
left, right = nn.Linear(8, 4), nn.Linear(6, 4)
model = nn.ModuleList([left, right])
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
hidden = torch.randn(96, 5)
data = hidden @ torch.randn(5, 8), hidden @ torch.randn(5, 6)


def gather_plainly(rows: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """As programs do it: only this rank's own rows have a gradient."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    parts[dist.get_rank()] = rows
    first = dist.get_rank() * len(rows)
    return torch.cat(parts), slice(first, first + len(rows))


for step in session:
    with step:
        for xs, ys in step.batches(data):
            ours, theirs = F.normalize(left(xs)), F.normalize(right(ys))
            if step.number == 6 and session.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            everyone, own = gather_plainly(theirs) if way == "own" else step.gather(theirs)
            numbers = torch.arange(len(everyone))[own]
            step.backward(F.cross_entropy(10 * ours @ everyone.T, numbers, reduction="sum"))
        step.update()
if session.is_main:
    result.write_text(json.dumps([parameter.sum().item() for parameter in model.parameters()]))
