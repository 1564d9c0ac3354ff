"""Train on two machines with plain DistributedDataParallel, and print what came of it as one line of JSON."""

import datetime
import hashlib
import json
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

TIMEOUT_S = 3.0
STEPS = 20


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = torch.nn.Linear(16, 16)
    # The first step of a process loads libraries: it must not count against the timeout.
    take_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    # Both ranks wait here for each other, so that the seconds below begin together.
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*where, world_size, is_master=rank == 0, timeout=datetime.timedelta(seconds=60))
    began = time.monotonic()
    outcome, error, digest = "trained", "", ""
    try:
        limit = datetime.timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(STEPS):
            take_step(replica, optimizer)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    except RuntimeError as problem:
        traceback.print_exc()
        outcome, error = "error", str(problem).splitlines()[0]
    facts = {"outcome": outcome, "seconds": time.monotonic() - began, "timeout_s": TIMEOUT_S, "digest": digest}
    sys.stdout.write(json.dumps(facts | {"error": error}) + "\n")


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
