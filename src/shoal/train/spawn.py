"""`python -m shoal.train.spawn`: start ranks as children of one Python process with `torch.multiprocessing.spawn`.

The parent serves the key-value store on a socket that it bound itself, so no port has to be agreed on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from shoal.control.processes import tie_to
from shoal.control.rank_env import Placement, use_private_caches
from shoal.errors import ShoalError
from shoal.train import worker
from shoal.train.worker import report_error


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.train.spawn")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    tie_to(os.getppid())()
    try:
        use_private_caches()
    except ShoalError as error:
        return report_error(error)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, master_listen_fd=listener.detach(), timeout=timedelta(seconds=60)
    )
    arguments = ["--folder", str(options.folder), *(["--resume"] if options.resume else [])]
    context = mp.spawn(_child, args=(options.ranks, port, arguments), nprocs=options.ranks, join=False)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: _interrupt(context.pids()))
    code = _wait(context)
    del store
    return code


def _child(rank: int, ranks: int, port: int, arguments: list[str]) -> None:
    placement = Placement(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_addr="127.0.0.1",
        master_port=port,
        store_is_served=True,
        launcher="spawn",
        keeps_files=rank == 0,
    )
    os.environ.update(placement.to_env())
    sys.exit(worker.main(arguments))


def _wait(context: mp.ProcessContext) -> int:
    """Return the exit code of the first rank that fails, as the other launchers do."""
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


def _interrupt(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
