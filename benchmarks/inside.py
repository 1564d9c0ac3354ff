"""All-reduce of 64 MB between ranks of one machine: gloo on loopback, shared memory with copies, buckets living there.

    .venv/bin/python benchmarks/inside.py --rounds 9

The three take turns in the same processes, so that noise hits all alike; a time is the slowest rank's. `step` is
forward and backward of a model with 64 MB of gradients under DDP, and under SharedDDP, until they are summed.
`cpu_ms` is the time of processors that all ranks together spent, which says more where other programs run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from _common import median_ratio, options

if TYPE_CHECKING:
    from shoal.sync.world import World

SIZE_BYTES = 64 * 2**20
LAYERS, WIDTH = 16, 1024
WAYS = ("gloo", "copies", "shared")

Calls = dict[str, Callable[[], object]]
Times = dict[str, dict[str, list[float]]]


def be_a_rank(rank: int, size: int, store: Path, rounds: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from shoal.sync.world import World

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = dist.FileStore(str(store), size)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    device, ids = torch.device("cpu"), tuple(range(size))
    world = World(rank, size, rank, size, "local", "gloo", device, "lo", dist.group.WORLD, meeting, ids)
    found = {
        "sum": in_turns(world, bare_sums(world), rounds),
        "step": in_turns(world, steps(world), rounds),
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def bare_sums(world: World) -> Calls:
    """The exchange alone, of one buffer."""
    import torch
    import torch.distributed as dist

    from shoal.config.schema import SyncConfig
    from shoal.sync.compression.base import Bucket
    from shoal.sync.shared_memory.ddp import ResidentSum, SharedCompressor, row_bytes
    from shoal.sync.shared_memory.group import open_host_sharing

    config = SyncConfig()
    elements = SIZE_BYTES // 4
    _, small = open_host_sharing(config, world, "copies", lambda group: row_bytes(len(group.first_ranks)))
    _, large = open_host_sharing(config, world, "shared", lambda _: SIZE_BYTES)
    assert small is not None
    assert large is not None
    buffer = torch.zeros(elements)
    bucket = Bucket(0, buffer, [])
    wire = SharedCompressor(small, None)
    rows = large.memory.rows(torch.float32)
    rows[world.rank].zero_()
    resident = ResidentSum(large, rows)
    return {
        "gloo": lambda: dist.all_reduce(buffer, group=world.group),
        "copies": lambda: wire(bucket).wait(),
        "shared": lambda: resident.sum_in_place((0, elements)),
    }


def steps(world: World) -> Calls:
    """Forward and backward with all buckets; computing is as little as a model can need."""
    import torch
    from torch import nn

    from shoal.config.schema import SyncConfig
    from shoal.sync.gradients import make_gradient_sync

    def step_with(way: str) -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        sync = make_gradient_sync(SyncConfig.model_validate({"inside": way}), model, world)

        def step() -> None:
            sync.backward(sync.module(torch.ones(1, WIDTH)).sum(), last=True)
            sync.finish()
            model.zero_grad(set_to_none=True)

        return step

    return {way: step_with(way) for way in WAYS}


def in_turns(world: World, calls: Calls, rounds: int) -> Times:
    from shoal.sync.step_stats import sum_over_world
    from shoal.sync.world import barrier
    from shoal.tools.probe.worker import agree

    times: Times = {name: {"wall": [], "cpu": []} for name in calls}
    # The first two rounds pay for what comes only once: fresh pages, and DDP's second choice of buckets.
    for number in range(rounds + 2):
        for name, call in calls.items():
            barrier(world)
            began, began_cpu = time.perf_counter(), time.process_time()
            call()
            spent, spent_cpu = time.perf_counter() - began, time.process_time() - began_cpu
            [wall], [cpu] = agree(world, [spent]), sum_over_world(world, [spent_cpu])
            if number > 1:
                times[name]["wall"].append(wall)
                times[name]["cpu"].append(cpu)
    return times


def measure(size: int, rounds: int) -> dict[str, Times]:
    with tempfile.TemporaryDirectory() as folder:
        common = ("--store", str(Path(folder) / "store"), "--rounds", str(rounds))
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--of", str(size), *common],
                stdout=subprocess.PIPE if rank == 0 else None,
            )
            for rank in range(size)
        ]
        said, _ = ranks[0].communicate()
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed")
    found: dict[str, Times] = json.loads(said)
    return found


def main() -> None:
    parser = options(__doc__, rounds_=9, steps=1, quick={"ranks": [2]})
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--rank", type=int, help="internal: be one rank")
    parser.add_argument("--of", type=int, help="internal: of so many")
    parser.add_argument("--store", type=Path, help="internal: where they meet")
    chosen = parser.parse_args()
    if chosen.rank is not None:
        be_a_rank(chosen.rank, chosen.of, chosen.store, chosen.rounds)
        return
    report = {}
    for size in chosen.ranks:
        for what, times in measure(size, chosen.rounds).items():
            for way in WAYS:
                report[f"{size} ranks, {what}, {way}"] = compare(times["gloo"], times[way])
                print(f"{size} ranks, {what}, {way}: {report[f'{size} ranks, {what}, {way}']}", flush=True)
    print(json.dumps(report))


def compare(gloo: dict[str, list[float]], ours: dict[str, list[float]]) -> dict[str, float]:
    figures = {"ms": 1e3 * statistics.median(ours["wall"]), "ratio": median_ratio(gloo["wall"], ours["wall"])}
    cpu = {"cpu_ms": 1e3 * statistics.median(ours["cpu"]), "cpu_ratio": median_ratio(gloo["cpu"], ours["cpu"])}
    return {name: round(value, 2) for name, value in (figures | cpu).items()}


if __name__ == "__main__":
    main()
