"""Time the exchange of gradients by barriers and by a communication hook, in the same steps of two ranks.

shoal run --on local:2 two_clocks.py OUT STEPS
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH, WARM_UP = 512, 6, 256, 5


class Clock:
    """The hook's clock: from the first bucket that is sent to the last one that has arrived."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def average(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.began = self.began or time.perf_counter()
        buffer = bucket.buffer().div_(dist.get_world_size())
        done: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(buffer, async_op=True).get_future()

        def note(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self.ended = time.perf_counter()
            return future.value()[0]

        return done.then(note)


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(35_000)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    clock = Clock()
    model.register_comm_hook(None, clock.average)
    batch = torch.randn(BATCH, WIDTH)
    times: dict[str, list[float]] = {"barrier_s": [], "hook_s": [], "alone_s": []}
    for step in range(steps + WARM_UP):
        for name in ("barrier_s", "alone_s"):
            with contextlib.nullcontext() if name == "barrier_s" else model.no_sync():
                loss = model(batch).square().mean()
                clock.began = clock.ended = 0.0
                dist.barrier()
                before = time.perf_counter()
                loss.backward()
                dist.barrier()
                after = time.perf_counter()
            model.zero_grad()
            if step >= WARM_UP:
                times[name].append(after - before)
                times["hook_s"] += [clock.ended - clock.began] if name == "barrier_s" else []
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
