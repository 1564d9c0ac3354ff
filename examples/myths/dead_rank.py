"""How plain gloo notices a rank that was killed, and one that is frozen: two processes, no launcher.

python examples/myths/dead_rank.py kill        python examples/myths/dead_rank.py freeze [TIMEOUT_S]
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


def train(rank: int, file: str, timeout_s: float, ready: Connection) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s)
    )
    gradient = torch.ones(1_000_000)
    dist.all_reduce(gradient)
    ready.send(os.getpid())  # One exchange is done.
    if rank == 1:
        signal.pause()  # The signal comes here, before the next exchange.
    try:
        dist.all_reduce(gradient)
    except RuntimeError as error:
        ready.send(str(error).split(". ")[0])


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else "kill"
    timeout_s = float(sys.argv[2]) if len(sys.argv) > 2 else 5.0
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=train, args=(i, f"{folder}/store", timeout_s, pipes[i][1])) for i in range(2)]
        for rank in ranks:
            rank.start()
        _, victim = (pipe.recv() for pipe, _ in pipes)
        began = time.monotonic()
        os.kill(victim, signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
        error = pipes[0][0].recv()
        print(f"{how}, timeout {timeout_s:g} s: rank 0 raised after {time.monotonic() - began:.2f} s: {error}")
        ranks[1].kill()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
