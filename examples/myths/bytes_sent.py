"""What a rank sends for one collective over 16 MB, by the counter of its network interface.

shoal run --on lab:3 examples/myths/bytes_sent.py
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from shoal import barrier, cleanup, init_distributed, is_main_process

world = init_distributed()
interface = os.environ.get("GLOO_SOCKET_IFNAME") or "lo"
counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
whole = torch.ones(world.size * ((4 << 20) // world.size))
parts = list(whole.chunk(world.size))
part = torch.empty_like(parts[0])
calls: dict[str, Callable[[], object]] = {
    "all-reduce": lambda: dist.all_reduce(whole),
    "all-gather": lambda: dist.all_gather(parts, part),
    "reduce-scatter": lambda: dist.reduce_scatter(part, parts),
}
for name, call in calls.items():
    barrier()
    before = int(counter.read_text())
    call()
    barrier()
    sent = (int(counter.read_text()) - before) / int(os.environ["LOCAL_WORLD_SIZE"])
    if is_main_process():
        print(f"{name}, {world.size} ranks: a rank sent {sent / whole.nbytes:.2f} of the tensor", flush=True)
cleanup()
