"""A process outside the run that takes the places of ranks at gloo's ports: python gloo_stranger.py NAME MODE

For every port it is sent at the abstract Unix socket NAME it connects once for each of the first numbers that gloo
gives to ranks, and answers when that is done. MODE says what it does with a place:

    silent   holds the connection and sends nothing
    close    closes it at once
    garbage  sends random bytes
    digest   waits until gloo asks for the digest, and sends 32 wrong bytes in gloo's own framing
"""

from __future__ import annotations

# Loaded before the user changes: another user may not be allowed to read Python's files.
import encodings.idna  # noqa: F401
import os
import socket
import struct
import sys
import threading

RANKS = 4
# nbytes, opcode, slot, offset, length, roffset: what stands before every message of gloo's TCP transport.
HEADER = struct.Struct("=6Q")
SEND_UNBOUND_BUFFER, NOTIFY_RECV_READY = 1, 3


def take_place(port: int, number: int, mode: str) -> socket.socket:
    place = socket.create_connection(("127.0.0.1", port), timeout=5)
    place.sendall(struct.pack("=Q", number))
    if mode == "close":
        place.close()
    elif mode == "garbage":
        place.sendall(b"\xa5" * 96)
    elif mode == "digest":
        threading.Thread(target=send_wrong_digest, args=(place,), daemon=True).start()
    return place


def send_wrong_digest(place: socket.socket) -> None:
    place.settimeout(30)
    with place.makefile("rb") as stream:
        while len(head := stream.read(HEADER.size)) == HEADER.size:
            _, opcode, slot, _, _, _ = HEADER.unpack(head)
            if opcode == NOTIFY_RECV_READY:
                place.sendall(HEADER.pack(HEADER.size + 32, SEND_UNBOUND_BUFFER, slot, 0, 32, 0) + b"\x5a" * 32)


def main(name: str, mode: str) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    places = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        print("ready", flush=True)
        while True:
            asker, _ = listener.accept()
            with asker:
                port = int(asker.recv(16))
                places += [take_place(port, number, mode) for number in range(RANKS)]
                asker.sendall(b"done")


if __name__ == "__main__":
    main(*sys.argv[1:])
