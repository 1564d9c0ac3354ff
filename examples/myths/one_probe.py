"""One all-reduce of 64 MB, timed as a single probe does it, and then again with the ranks in step.

shoal run --on lab:3,link=1gbit examples/myths/one_probe.py
"""

import time

import torch
import torch.distributed as dist

from shoal import barrier, cleanup, init_distributed, is_main_process

world = init_distributed()
tensor = torch.ones((64 << 20) // 4)
for call in range(1, 5):
    if call > 1:
        barrier()  # Without it, the first call also times how much later the last rank arrives.
    began = time.perf_counter()
    dist.all_reduce(tensor)
    seconds = time.perf_counter() - began
    rate = 8e-9 * tensor.nbytes / seconds
    bus = rate * 2 * (world.size - 1) / world.size
    if is_main_process():
        print(f"call {call}: {seconds:.2f} s, {rate:.2f} Gbit/s by the algorithm, {bus:.2f} on the link", flush=True)
cleanup()
