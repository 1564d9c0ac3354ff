"""gloo's all-reduce of 64 MB between two emulated nodes, against iperf3 over the same 1 Gbit links.

    .venv/bin/python benchmarks/lab_allreduce.py            # needs iperf3 and the right to make a lab

Bus bandwidth is what crossed the wire: 2(N-1)/N of the bytes, over the time.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import options
from shoal_lab.lab import Lab
from shoal_lab.spec import make_spec

SIZE_BYTES = 64 * 2**20


def be_a_rank(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tensor = torch.ones(SIZE_BYTES // 4)
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        seconds = statistics.median(times[1:])
        factor = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        print(json.dumps({"seconds": seconds, "bus_mbps": 8e-6 * factor * SIZE_BYTES / seconds}), flush=True)
    dist.destroy_process_group()


def iperf_mbps(lab: Lab, seconds: int) -> float:
    server = subprocess.Popen(lab.command("node2", ["iperf3", "--server", "--one-off"]), stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    client = ["iperf3", "--client", "10.77.0.2", "--time", str(seconds), "--json"]
    said = subprocess.run(lab.command("node1", client), capture_output=True, check=True).stdout
    server.wait()
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 1e6


def allreduce_mbps(lab: Lab, rounds: int, out: Path) -> float:
    argv = [sys.executable, "-m", "shoal", "run", "--on", f"lab:{lab.name}", "--out", str(out)]
    argv += [__file__, "--rank", "--rounds", str(rounds)]
    said = subprocess.run(argv, capture_output=True, check=True, text=True).stdout
    figures = next(line.partition("] ")[2] for line in said.splitlines() if '"bus_mbps"' in line)
    return float(json.loads(figures)["bus_mbps"])


def main() -> None:
    parser = options(__doc__, rounds_=5, steps=3, quick={"steps": 1})
    parser.add_argument("--rank", action="store_true", help="internal: be one rank")
    chosen = parser.parse_args()
    if chosen.rank:
        be_a_rank(chosen.rounds)
        return
    if not shutil.which("iperf3"):
        raise SystemExit("iperf3 is not installed, and there is nothing to compare with; next: sudo apt install iperf3")
    lab = Lab.build(make_spec(2, name=f"bench-{os.getpid()}", link="1gbit"), owner=os.getpid())
    try:
        with tempfile.TemporaryDirectory() as folder:
            pairs = []
            for number in range(1, chosen.steps + 1):
                raw = iperf_mbps(lab, seconds=3)
                bus = allreduce_mbps(lab, chosen.rounds, Path(folder) / str(number))
                pairs.append((raw, bus))
                print(f"round {number}: iperf3 {raw:.0f} Mbit/s, all-reduce of 64 MB {bus:.0f} Mbit/s bus bandwidth")
    finally:
        lab.close()
    print(json.dumps({"ratio": round(statistics.median(bus / raw for raw, bus in pairs), 3)}))


if __name__ == "__main__":
    main()
