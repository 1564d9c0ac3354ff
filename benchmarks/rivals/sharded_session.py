"""A rank of `shoal.Session`: the same loop for every `--sync`, which is given on the command line."""

import sys

from torch.optim import AdamW

import shoal
from rivals.sharded_rank import CLIP, Meter, make_model, make_tokens, read_task

task = read_task(sys.argv[1])
session = shoal.Session(
    steps=task.warm_up + task.steps,
    global_batch=int(sys.argv[2]) * task.micro_batch * task.accumulate,
    micro_batch=task.micro_batch,
    checkpoint_every=1_000_000,
)
meter = Meter(task, session.rank)
meter.start()
tokens = make_tokens(task)
model = make_model(task)
optimizer = AdamW(model.parameters(), lr=1e-3, fused=True)
session.attach(model, optimizer)
for step in session:
    with step:
        for rows in step.batches(tokens):
            step.backward(model(rows[:, :-1], rows[:, 1:]) / task.seq_len)
        step.update(clip=CLIP)
    meter.step_done()
