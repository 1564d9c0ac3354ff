"""What numbers below 1e-38 cost: steps of one training that flushes them to zero, and of one that does not, in turns.

    .venv/bin/python benchmarks/denormals.py --preset grammar --steps 60

Both trainings have the same weights and data. Prints the median step time of each ten steps, and whether the losses are
the same.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from _common import options
from _gpt import STEPS_ONLY, make_step
from shoal.config.load import build_config, load_config
from shoal.control.rank_env import Placement
from shoal.data.prepare import create_run
from shoal.events import read_events
from shoal.sync.world import join_world, leave_world

GROUP = 10


def main() -> None:
    parser = options(__doc__, rounds_=1, steps=60, quick={"steps": 4}, trains=True)
    parser.add_argument("--preset", default="grammar")
    parser.add_argument("--global-batch", type=int, default=64)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for _ in range(chosen.rounds):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), chosen.preset, chosen.steps, chosen.global_batch, chosen.sets)


def measure(folder: Path, preset: str, steps: int, global_batch: int, sets: list[str]) -> None:
    config = build_config(preset, sets=(*STEPS_ONLY, f"train.global_batch={global_batch}", "train.compile=off", *sets))
    runs = {flushed: create_run(config, folder / str(flushed), world_size=1) for flushed in (True, False)}
    world = join_world(Placement(0, 1, 0, 1), torch.device("cpu"))
    step_of = {flushed: make_step(load_config(run.config), run, world) for flushed, run in runs.items()}
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(steps):
        for flushed in random.Random(number).sample((True, False), 2):
            if number:
                # The first call begins the training, which sets it.
                torch.set_flush_denormal(flushed)
            began = time.perf_counter()
            step_of[flushed]()
            times[flushed].append(time.perf_counter() - began)
    torch.set_flush_denormal(False)
    leave_world(world)
    losses = {
        flushed: [event["loss"] for event in read_events(run.events(0)) if event["event"] == "step"]
        for flushed, run in runs.items()
    }
    for first in range(0, steps, GROUP):
        kept, gone = (statistics.median(times[flushed][first : first + GROUP]) for flushed in (False, True))
        line = {"preset": preset, "steps": f"{first + 1}-{first + GROUP}", "kept_ms": round(1e3 * kept, 1)}
        print(json.dumps({**line, "flushed_ms": round(1e3 * gone, 1), "ratio": round(kept / gone, 3)}), flush=True)
    print(json.dumps({"preset": preset, "equal_losses": losses[True] == losses[False], "last": losses[True][-1]}))


if __name__ == "__main__":
    main()
