"""When a fault happens, which ones a soak draws, and what is made of a soak: what starts processes."""

from __future__ import annotations

import socket
import threading

from shoal.tools.chaos.damage import connect


def test_strangers_knock_as_often_as_asked() -> None:
    came: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as door:

        def serve() -> None:
            for _ in range(25):
                peer, _ = door.accept()
                with peer:
                    came.append(peer.recv(64))

        server = threading.Thread(target=serve)
        server.start()
        connect([f"127.0.0.1:{door.getsockname()[1]}"], connections=20, idle=5, on_node=list)
        server.join(10)
    assert sorted(map(len, came)) == [0] * 5 + [64] * 20
