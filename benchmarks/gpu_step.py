"""A step of shoal's GPT on one GPU against nanoGPT's model in a plain loop, alternating in one process.

    .venv/bin/python benchmarks/gpu_step.py                 # gpt2-124m, 32 × 1,024 tokens, compiled and not
    .venv/bin/python benchmarks/gpu_step.py --batch 8 --compile off

The peer never waits for the GPU inside its rounds; shoal waits once a step, for the loss and the norm that decide
whether the step is applied. Beside the ratio: the matrix rate of the card, and the part of it that the step reaches;
and what timing the phases costs, against a twin of the training that times none.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from _common import find_gpu, median_ratio, options, rounds
from _gpt import STEPS_ONLY, make_step
from rivals.nano_gpt import make_step as make_peer_step
from shoal.config.load import build_config, load_config
from shoal.control.rank_env import Placement
from shoal.cost.model_size import flops_per_token
from shoal.data.prepare import create_run
from shoal.sync.world import join_world, leave_world


def seconds_per_step(step: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def matmul_tflops(size: int = 8192, count: int = 20) -> float:
    """The rate of one large bf16 product with random numbers: zeros would need less power, and run faster."""
    one, other = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = [seconds_per_step(lambda: one @ other, count) for _ in range(5)]
    return 2 * size**3 / statistics.median(seconds) / 1e12


def main() -> None:
    parser = options(__doc__, rounds_=5, steps=20, quick={"steps": 2, "preset": "grammar", "compile": "off"})
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--compile", choices=("on", "off", "both"), default="both")
    parser.add_argument("--set", action="append", default=[], dest="sets")
    chosen = parser.parse_args()
    if not find_gpu():
        return
    tflops = matmul_tflops()
    for compiled in (False, True) if chosen.compile == "both" else (chosen.compile == "on",):
        with tempfile.TemporaryDirectory() as folder:
            batch = [f"train.global_batch={chosen.batch}", f"train.micro_batch={chosen.batch}"]
            compile_ = f"train.compile={'on' if compiled else 'off'}"
            config = build_config(chosen.preset, sets=[*STEPS_ONLY, *batch, compile_, *chosen.sets])
            run = create_run(config, Path(folder) / "run", world_size=1)
            world = join_world(Placement(0, 1, 0, 1), torch.device("cuda", 0))
            config = load_config(run.config)
            ours = make_step(config, run, world)
            untimed = config.model_copy(update={"sync": config.sync.model_copy(update={"measure": "off"})})
            twin = make_step(untimed, run, world)
            model = config.model
            peer = make_peer_step(model.layers, model.heads, model.width, chosen.batch, model.seq_len, compiled)
            for step in (ours, twin, peer):
                seconds_per_step(step, 5)
            variants = {"nanoGPT, plain loop": peer, "shoal": ours, "shoal, no phase timed": twin}
            timed = {name: partial(seconds_per_step, step, chosen.steps) for name, step in variants.items()}
            found = rounds(timed, chosen.rounds)
            leave_world(world)
        base, shoal, not_timed = found.values()
        tokens, step_s = chosen.batch * model.seq_len, statistics.median(shoal)
        result = {
            "preset": chosen.preset,
            "compiled": compiled,
            "gpu": torch.cuda.get_device_name(),
            "peer_ms": round(statistics.median(base) * 1e3, 2),
            "shoal_ms": round(step_s * 1e3, 2),
            "tokens_per_s": round(tokens / step_s),
            "ratio": round(median_ratio(base, shoal), 3),
            "cost_of_phases": round(median_ratio(shoal, not_timed) - 1, 4),
            "matmul_tflops": round(tflops),
            "of_matmul_rate": round(flops_per_token(model) * tokens / step_s / tflops / 1e12, 3),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
