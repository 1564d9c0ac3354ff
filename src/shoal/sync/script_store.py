"""`python -P -m shoal.sync.script_store`: serves a torch TCPStore to the ranks of a user's script.

If rank 0 of a script served the store itself, torch would listen on every address of the machine. Here the agent passes
a socket that listens on the run's address only, and every rank connects as a client, as with torchrun.

On SIGTERM it prints how many keys the ranks have written: 0 if no rank ever joined a process group.
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
    # Ctrl-C is for the ranks. The agent ends this process after the last rank of all nodes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imported after the signal is ignored: importing torch takes seconds.
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        options.address,
        options.port,
        is_master=True,
        master_listen_fd=options.fd,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    signal.signal(signal.SIGTERM, lambda *_: _exit_with_key_count(store))
    while True:
        signal.pause()


def _exit_with_key_count(store: TCPStore) -> NoReturn:
    # Older supported versions of torch cannot list keys.
    keys = len(store.list_keys()) if hasattr(store, "list_keys") else None
    sys.stdout.write(json.dumps({"keys": keys}) + "\n")
    sys.stdout.flush()
    # Skip torch's cleanup at exit, which would delay the end of the run.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
