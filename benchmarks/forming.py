"""How long the ranks of one machine take to form a gloo group: without and with the proof of every pair.

    .venv/bin/python benchmarks/forming.py --rounds 21

Both take turns in the same processes, which meet through the agents' store as in a training. A time is the slowest
rank's, from a common start; the figures are medians.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress

from _common import options

SIZES = (2, 4, 8)


def be_a_rank(rank: int, size: int, fd: int, rounds: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from shoal.sync.interruptible import close_listeners
    from shoal.sync.kv_store_client import AgentStore
    from shoal.sync.process_groups import GroupForming, drop_groups, form_main_group, pair_key

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = AgentStore(fd, timedelta(seconds=60))

    def meet(name: str) -> None:
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/{each}" for each in range(size)])

    def without(name: str) -> None:
        keys = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size, timeout=timedelta(seconds=1))
        close_listeners()

    def proved(name: str) -> None:
        keys = dist.PrefixStore(name, store)
        key = pair_key(store, keys, name, rank)
        form_main_group(GroupForming(keys, rank, size, key, name, 1.0), 60)

    times: dict[str, list[float]] = {"without": [], "proved": []}
    # The first round pays for what comes only once.
    for round_ in range(rounds + 1):
        for way, form in (("without", without), ("proved", proved)):
            meet(f"before/{way}/{round_}")
            began = time.perf_counter()
            form(f"{way}/{round_}")
            seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            dist.barrier()
            times[way] += [float(seconds[0])] if round_ else []
            meet(f"after/{way}/{round_}")
            drop_groups()
    if rank == 0:
        print(json.dumps(times), flush=True)
    meet("end")
    # The last group is freed by a thread of its own.
    time.sleep(0.5)


async def serve(ours: socket.socket, keys: object) -> None:
    """One rank's questions, answered as its agent does."""
    from shoal.agent.kv_store import KvStore, derive_key, read_request, to_frame

    assert isinstance(keys, KvStore)
    reader, writer = await asyncio.open_connection(sock=ours)
    with suppress(EOFError, OSError):
        while True:
            request = await read_request(reader)
            derives = request.get("op") == "derive"
            writer.write(to_frame(derive_key("token", request) if derives else await keys.answer(request)))
            await writer.drain()
    writer.close()


async def measure(size: int, rounds: int) -> dict[str, list[float]]:
    from shoal.agent.kv_store import KvStore

    keys, processes, serving = KvStore(), [], []
    for rank in range(size):
        ours, theirs = socket.socketpair()
        words = [sys.executable, __file__, "--rank", str(rank), "--size", str(size), "--fd", str(theirs.fileno())]
        with theirs:
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            fds = (theirs.fileno(),)
            processes.append(
                await asyncio.create_subprocess_exec(*words, "--rounds", str(rounds), stdout=pipe, pass_fds=fds)
            )
        serving.append(asyncio.create_task(serve(ours, keys)))
    said, _ = await processes[0].communicate()
    for process in processes:
        await process.wait()
    await asyncio.gather(*serving)
    times: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return times


def main() -> None:
    parser = options(__doc__, rounds_=21, quick={"sizes": [2]})
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    for name in ("--rank", "--size", "--fd"):
        parser.add_argument(name, type=int)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        be_a_rank(chosen.rank, chosen.size, chosen.fd, chosen.rounds)
        return
    print("ranks   without    proved     more    ratio")
    for size in chosen.sizes:
        times = asyncio.run(measure(size, chosen.rounds))
        without, proved = (1e3 * statistics.median(times[way]) for way in ("without", "proved"))
        ratio = statistics.median(b / a for a, b in zip(times["without"], times["proved"], strict=True))
        print(f"{size:5} {without:6.1f} ms {proved:6.1f} ms {proved - without:5.1f} ms {ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
