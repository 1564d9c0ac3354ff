"""The connections that a chaos fault opens to a port.

Exercises tools.chaos.
"""

from __future__ import annotations

import socket
import threading

from shoal.tools.chaos.damage import connect


def test_the_requested_number_of_foreign_connections_is_opened() -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def serve() -> None:
            for _ in range(25):
                peer, _ = listener.accept()
                with peer:
                    received.append(peer.recv(64))

        server = threading.Thread(target=serve)
        server.start()
        connect([f"127.0.0.1:{listener.getsockname()[1]}"], connections=20, idle=5, on_node=list)
        server.join(10)
    assert sorted(map(len, received)) == [0] * 5 + [64] * 20
