"""The first lab of distributed training: a mini GPT on two ranks; how long the all-reduce takes, measured in two ways.

shoal run --on local:2 examples/classroom.py OUT          torchrun --nproc-per-node=2 examples/classroom.py OUT
"""

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

STEPS, BATCH, LENGTH, WIDTH = 10, 16, 32, 64


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


class MiniGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=ids.device)
        hidden = self.block(self.tokens(ids) + self.positions.weight, src_mask=mask, is_causal=True)
        return F.linear(hidden, self.tokens.weight / WIDTH)


def timed_allreduce(times: list[float], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients while backward goes on, and note how long that takes."""
    began = time.perf_counter()
    done: torch.futures.Future[list[Tensor]] = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    done.add_done_callback(lambda _: times.append(time.perf_counter() - began))
    return done.then(lambda future: future.value()[0].div_(world.size))


out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/classroom")
out.mkdir(parents=True, exist_ok=True)
world = shoal.init_distributed()
seed_everything(35_000)
model = shoal.wrap_for_ddp(MiniGPT().to(world.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
notes: dict[str, list[float]] = {"loss": [], "barrier_s": [], "hook_s": []}
shard = shoal.make_shard(world.rank, world.size)[: 2 * STEPS * BATCH]  # Every rank has its own sentences.
rows = torch.tensor([[ord(c) % 128 for c in sentence[: LENGTH + 1].ljust(LENGTH + 1)] for sentence in shard])

for step, batch in enumerate(rows.to(world.device).split(BATCH)):
    model.require_backward_grad_sync = step >= STEPS
    if step == STEPS:  # The second half: DDP averages buckets while backward computes, and the hook times them.
        model.register_comm_hook(notes["hook_s"], timed_allreduce)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    if step < STEPS:  # The first half: between two barriers. Exact, but nothing is hidden behind backward.
        shoal.barrier()
        began = time.perf_counter()
        for gradient in (p.grad for p in model.parameters() if p.grad is not None):
            dist.all_reduce(gradient.div_(world.size))
        shoal.barrier()
        notes["barrier_s"].append(time.perf_counter() - began)
    optimizer.step()
    optimizer.zero_grad()
    notes["loss"].append(loss.item())
save_file(model.module.state_dict(), out / f"state-rank-{world.rank}.safetensors")
if shoal.is_main_process():
    (out / "manifest.json").write_text(json.dumps({"ranks": world.size, "steps": 2 * STEPS, **notes}, indent=2))
    barrier_ms, hook_ms = (1e3 * sum(notes[name]) / STEPS for name in ("barrier_s", "hook_s"))
    print(f"loss {loss:.3f}; all-reduce per step: {barrier_ms:.1f} ms by barriers, {hook_ms:.1f} ms by the hook")
shoal.cleanup()
