"""An all-reduce by hand: N chunks travel around a ring. Also notes which rank dialled which.

shoal run --on lab:2 ring.py
"""

import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

CHUNK = 250_000  # numbers, 1 MB
LISTENS, CONNECTED = "0A", "01"


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    names = all_names(size)
    torch.manual_seed(rank)
    chunks = list(torch.randn(size, CHUNK))
    expected = torch.stack(chunks)
    dist.all_reduce(expected)
    gradient_bytes, sent_bytes, rounds = sum(chunk.nbytes for chunk in chunks), 0, []
    for number in range(2 * (size - 1)):
        # First each chunk collects the numbers of all ranks; then the finished chunks travel around once more.
        sends, receives = (rank - number) % size, (rank - number - 1) % size
        to, incoming = (rank + 1) % size, torch.empty(CHUNK)
        outgoing = chunks[sends]
        sending = dist.isend(outgoing, to)
        dist.recv(incoming, (rank - 1) % size)
        sending.wait()
        sent_bytes += outgoing.nbytes
        chunks[receives] = chunks[receives] + incoming if number < size - 1 else incoming
        rounds.append({"from": names[rank], "to": names[to], "chunk": sends})
    facts = {
        "node": names[rank],
        "dialled": dialled(),
        "rounds": rounds,
        "is_equal": torch.allclose(torch.stack(chunks), expected, atol=1e-5),
        "sent_of_gradients": sent_bytes / gradient_bytes,
    }
    Path(f"ring-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def all_names(size: int) -> list[str]:
    """Return the host names of all ranks. As bytes: objects would be sent as pickle, which runs what it is told."""
    own = torch.tensor(list(socket.gethostname().encode().ljust(64)[:64]), dtype=torch.uint8)
    everywhere = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everywhere, own)
    return [bytes(name.tolist()).decode().strip() for name in everywhere]


def dialled() -> list[str]:
    """Return the addresses that this process has dialled: its connections whose own end is no port it listens at."""
    own = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    # Of each row: own end, the other end, state, and the number of the socket.
    ends = [(row[1], row[2], row[3]) for row in rows if f"socket:[{row[9]}]" in own]
    listening = {end.split(":")[1] for end, _, state in ends if state == LISTENS}
    store = f"{int(os.environ['MASTER_PORT']):04X}"
    return [
        socket.inet_ntoa(bytes.fromhex(other.split(":")[0])[::-1])
        for end, other, state in ends
        if state == CONNECTED and end.split(":")[1] not in listening and other.split(":")[1] != store
    ]


if __name__ == "__main__":
    main()
