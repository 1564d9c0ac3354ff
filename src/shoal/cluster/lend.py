"""`python -m shoal.cluster.lend ADDRESS CHANNEL`: binds a socket where it runs and hands it to whoever started it.

A socket belongs to the network namespace it was made in. The launcher stands outside a lab's nodes, so it has one made
inside and passes it on to rank 0, which then serves the store on an address and port that nobody guessed.
"""

from __future__ import annotations

import socket
import sys


def main() -> None:
    address, channel_fd = sys.argv[1:]
    with socket.socket(fileno=int(channel_fd)) as channel, socket.create_server((address, 0)) as listener:
        socket.send_fds(channel, [str(listener.getsockname()[1]).encode()], [listener.fileno()])


if __name__ == "__main__":
    main()
