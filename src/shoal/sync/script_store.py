"""`python -P -m shoal.sync.script_store`: serves torch's own store to the ranks of a user's script.

By default rank 0 of a script serves the store itself, and torch then listens on every address of the machine. Here an
agent hands over a socket that listens on the run's address only, and every rank connects as a client. torchrun does
the same.

Asked to end by SIGTERM, it prints how many keys the ranks have written: none, if no rank ever joined a process group.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.sync.script_store")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket that listens there")
    options = parser.parse_args()
    # The agent ends this process after the last rank of all nodes: a Ctrl-C is for the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Afterwards: importing torch takes seconds.
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        options.address,
        options.port,
        is_master=True,
        master_listen_fd=options.fd,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    signal.signal(signal.SIGTERM, lambda *_: _leave(store))
    while True:
        signal.pause()


def _leave(store: TCPStore) -> NoReturn:
    # Not every torch that shoal runs with can list them.
    keys = len(store.list_keys()) if hasattr(store, "list_keys") else None
    sys.stdout.write(json.dumps({"keys": keys}) + "\n")
    sys.stdout.flush()
    # At once: what torch does at the end of a process takes longer than a run should.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
