"""What `shoal run --measure` costs: a DDP step that is measured against the same step that is not.

    .venv/bin/python benchmarks/measure_cost.py --rounds 5

Two ranks on this machine with four models each, which take turns step by step, so that noise hits all alike. One has a
communication hook that does what DDP does without one: the way of timing that was not chosen. One is plain again: what
differs between two plain models is chance, such as where their memory lies. So the models are made in another order in
each round. Then the same without DDP, with 32 or 24 collectives a step that are called from Python: an asynchronous
reduce-scatter of each gradient, and an all-gather of its parts. Both the time of a step and the processor time of rank
0 are compared: on a busy machine only the second one repeats.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import options
from shoal.cluster.node import reserve_port

if TYPE_CHECKING:
    from torch import nn

VARIANTS = {"ddp": ("plain", "measured", "hook", "again"), "own": ("plain", "measured", "again")}
# Layers, width and samples of two models.
MODELS = {"8 layers of 512": (8, 512, 64), "6 layers of 1024": (6, 1024, 128)}


def exchange(model: nn.Module) -> None:
    """Average the gradients as an optimizer does that divides its state."""
    import torch
    import torch.distributed as dist

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    pairs = [(gradient, torch.empty_like(gradient.chunk(2)[0])) for gradient in gradients]
    works = [dist.reduce_scatter_single(part, gradient, async_op=True) for gradient, part in pairs]
    gathered = []
    for work, (gradient, part) in zip(works, pairs, strict=True):
        work.wait()
        gathered.append(dist.all_gather_single(gradient, part, async_op=True))
    for work in gathered:
        work.wait()


def measure_rank(folder: Path, shape: tuple[int, int, int], steps: int, number: int, how: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel, distributed
    from torch.optim import optimizer as optimizer_module

    from shoal.control.rank_env import Placement
    from shoal.engine.measure import Measurement
    from shoal.engine.measured_collectives import measure_collectives, measure_ddp, measure_optimizers
    from shoal.run_folder import RunFolder

    layers, width, batch = shape
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measurement = Measurement(RunFolder(folder), Placement.from_env(os.environ))
    measure_ddp(distributed, measurement)
    measure_collectives(dist, measurement)
    measure_optimizers(optimizer_module, measurement)
    models: dict[str, Any] = {}
    optimizers = {}
    for variant in random.Random(number).sample(VARIANTS[how], len(VARIANTS[how])):
        torch.manual_seed(0)
        measurement.is_on = variant == "measured"
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
        models[variant] = nn.Sequential(*parts) if how == "own" else DistributedDataParallel(nn.Sequential(*parts))
        if variant == "hook":
            dist._register_comm_hook(models[variant].reducer, None, allreduce_hook)
        optimizers[variant] = torch.optim.AdamW(models[variant].parameters(), lr=1e-3)
    inputs = torch.randn(batch, width)
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS[how]}
    for step in range(steps):
        # In an order drawn anew, the same on both ranks: who runs after whom is worth a per cent of a step.
        for variant in random.Random(step).sample(VARIANTS[how], len(VARIANTS[how])):
            measurement.is_on = variant == "measured"
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            models[variant](inputs).square().mean().backward()
            if how == "own":
                exchange(models[variant])
            optimizers[variant].step()
            optimizers[variant].zero_grad()
            times[variant].append((time.perf_counter() - began, time.process_time() - used))
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def one_round(model: str, steps: int, number: int, how: str) -> dict[str, list[list[float]]]:
    with tempfile.TemporaryDirectory() as folder, reserve_port("127.0.0.1", 0) as held:
        command = [sys.executable, __file__, "--steps", str(steps), "--rank-of", folder, "--model", model]
        command += ["--round", str(number), "--how", how]
        world = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
        }
        ranks = [
            subprocess.Popen(command, env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0]
        times: dict[str, list[list[float]]] = json.loads((Path(folder) / "times.json").read_text())
        return times


def main() -> None:
    parser = options(__doc__, rounds_=5, steps=100, quick={"steps": 3})
    parser.add_argument("--model", help="internal")
    parser.add_argument("--how", choices=VARIANTS, help="internal")
    parser.add_argument("--round", type=int, default=0, help="internal")
    parser.add_argument("--rank-of", type=Path, help="internal: be one rank")
    chosen = parser.parse_args()
    if chosen.rank_of:
        measure_rank(chosen.rank_of, MODELS[chosen.model], chosen.steps, chosen.round, chosen.how)
        return
    for how, model in itertools.product(VARIANTS, MODELS):
        ratios: dict[str, list[float]] = {}
        for number in range(1, chosen.rounds + 1):
            times = one_round(model, chosen.steps, number, how)
            took_ms, used_ms = (statistics.median(pair[place] for pair in times["plain"]) * 1e3 for place in (0, 1))
            line = f"{how}, {model}, round {number}: plain {took_ms:.2f} ms, CPU {used_ms:.2f} ms"
            for variant in VARIANTS[how][1:]:
                for place, what in enumerate(("time", "CPU")):
                    # Each step against the plain one beside it.
                    pairs = zip(times[variant], times["plain"], strict=True)
                    ratio = statistics.median(ours[place] / base[place] for ours, base in pairs)
                    ratios.setdefault(f"{variant} {what}", []).append(ratio)
                    line += f", {variant} {what} {ratio:.4f}×"
            print(line, flush=True)
        print(
            how, model, json.dumps({name: round(statistics.median(values) - 1, 4) for name, values in ratios.items()})
        )


if __name__ == "__main__":
    main()
