"""A rank of DDP with ZeroRedundancyOptimizer: the moments are divided among the ranks, as in ZeRO-1."""

import sys
from contextlib import nullcontext

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from rivals.sharded_rank import CLIP, Meter, make_model, make_tokens, mean_loss, micro_batches, read_task

task = read_task(sys.argv[1])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
meter = Meter(task, rank)
meter.start()
tokens = make_tokens(task)
model = DistributedDataParallel(make_model(task))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, lr=1e-3, fused=True)
for step in range(task.warm_up + task.steps):
    batches = micro_batches(task, tokens, step, rank, world)
    for number, rows in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) else model.no_sync():
            (mean_loss(model, rows) / len(batches)).backward()
    clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    meter.step_done()
dist.barrier()
dist.destroy_process_group()
