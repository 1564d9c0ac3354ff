"""A process outside the run that connects to gloo's ports in place of ranks: python gloo_stranger.py NAME MODE

For every port that it receives on the abstract Unix socket NAME it connects once per rank number of gloo, from the
first on, and replies when that is done. MODE is what it does with a connection:

    silent   holds the connection and sends nothing
    close    closes it at once
    garbage  sends random bytes
    digest   waits until gloo requests the digest, and sends 32 wrong bytes in gloo's framing
    echo     sends back every message that it receives, the rank's own digest among them
"""

from __future__ import annotations

# Imported before the user changes: another user may not be allowed to read Python's files.
import encodings.idna  # noqa: F401
import os
import socket
import struct
import sys
import threading

RANKS = 4
# nbytes, opcode, slot, offset, length, roffset: the header of every message of gloo's TCP transport.
HEADER = struct.Struct("=6Q")
SEND_UNBOUND_BUFFER, NOTIFY_RECV_READY = 1, 3


def connect_as_rank(port: int, number: int, mode: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.sendall(struct.pack("=Q", number))
    if mode == "close":
        connection.close()
    elif mode == "garbage":
        connection.sendall(b"\xa5" * 96)
    elif mode == "digest":
        threading.Thread(target=send_wrong_digest, args=(connection,), daemon=True).start()
    elif mode == "echo":
        threading.Thread(target=send_back, args=(connection,), daemon=True).start()
    return connection


def send_wrong_digest(connection: socket.socket) -> None:
    connection.settimeout(30)
    with connection.makefile("rb") as stream:
        while len(head := stream.read(HEADER.size)) == HEADER.size:
            _, opcode, slot, _, _, _ = HEADER.unpack(head)
            if opcode == NOTIFY_RECV_READY:
                connection.sendall(HEADER.pack(HEADER.size + 32, SEND_UNBOUND_BUFFER, slot, 0, 32, 0) + b"\x5a" * 32)


def send_back(connection: socket.socket) -> None:
    connection.settimeout(30)
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def main(name: str, mode: str) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    connections = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        print("ready", flush=True)
        while True:
            requester, _ = listener.accept()
            with requester:
                port = int(requester.recv(16))
                connections += [connect_as_rank(port, number, mode) for number in range(RANKS)]
                requester.sendall(b"done")


if __name__ == "__main__":
    main(*sys.argv[1:])
