"""Plain DDP, started by hand with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: what happens when a peer is lost?

Rank 0 writes into FILE.steps after each step, and into FILE how long after its last step an error came.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, PAUSE_S = 64, 8, 0.1


def main() -> None:
    out, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    torch.manual_seed(35_000)
    model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while True:
        began = time.monotonic()
        time.sleep(PAUSE_S)
        try:
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        except RuntimeError as error:
            # gloo puts the place in its source before the reason, and advice after it.
            reason = str(error).partition("] ")[2].partition(". This is")[0]
            facts = {"step": step, "error_after_s": time.monotonic() - began, "error": reason}
            if dist.get_rank() == 0:
                out.with_suffix(".part").write_text(json.dumps(facts))
                out.with_suffix(".part").rename(out)
            return
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            out.with_suffix(".steps").write_text(str(step))


if __name__ == "__main__":
    main()
