"""What measuring costs: a step with every phase and bucket timed against the same step with timing off.

    .venv/bin/python benchmarks/instrumentation.py --rounds 9

Two ranks with three trainings each that take turns step by step, so that noise hits all alike. Variant A's barriers
change the step itself (no overlap), so their cost is shown beside, not counted.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import options
from _gpt import STEPS_ONLY, make_step
from shoal.cluster.node import Rendezvous, local_node, reserve_port
from shoal.config.load import build_config
from shoal.data.prepare import create_run
from shoal.launch.plan import plan_ranks

VARIANTS = ("off", "hook", "barrier")


def measure_rank(folder: Path, steps: int) -> None:
    """One rank: three trainings of the same model in one world, stepping in turns."""
    import time

    import torch

    from shoal.config.load import load_config
    from shoal.control.rank_env import Placement
    from shoal.run_folder import RunFolder
    from shoal.sync.world import join_world, leave_world

    torch.set_num_threads(1)
    world = join_world(Placement.from_env(os.environ), torch.device("cpu"))
    run = RunFolder.open(folder)
    base = load_config(run.config)
    steps_of = {}
    for variant in VARIANTS:
        config = base.model_copy(update={"sync": base.sync.model_copy(update={"measure": variant})})
        steps_of[variant] = make_step(config, run, world)
        # The first step starts the training.
        steps_of[variant]()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for step in range(steps):
        # In an order drawn anew, the same on both ranks: who runs after whom is worth a per cent of a step.
        for variant in random.Random(step).sample(VARIANTS, len(VARIANTS)):
            began = time.perf_counter()
            steps_of[variant]()
            times[variant].append(time.perf_counter() - began)
    if world.is_main:
        (folder / "times.json").write_text(json.dumps(times))
    leave_world(world)


def main() -> None:
    parser = options(__doc__, rounds_=5, steps=60, quick={"steps": 3}, trains=True)
    parser.add_argument("--preset", default="grammar")
    parser.add_argument("--rank-of", type=Path, help="internal: be one rank")
    chosen = parser.parse_args()
    if chosen.rank_of:
        measure_rank(chosen.rank_of, chosen.steps)
        return
    ratios: dict[str, list[float]] = {"hook": [], "barrier": []}
    for number in range(1, chosen.rounds + 1):
        times = one_round(chosen.preset, chosen.sets, chosen.steps)
        off = statistics.median(times["off"])
        for variant, found in ratios.items():
            found.append(statistics.median(times[variant]) / off)
        print(f"round {number}: off {off * 1e3:.2f} ms, " + ", ".join(f"{v} {r[-1]:.4f}×" for v, r in ratios.items()))
    print(json.dumps({f"{variant}_cost": round(statistics.median(r) - 1, 4) for variant, r in ratios.items()}))


def one_round(preset: str, sets: list[str], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(preset, sets=[*STEPS_ONLY, *sets])
        run = create_run(config, Path(folder) / "run", world_size=2)
        node = local_node(2)
        with reserve_port(node.address, 0) as holder:
            meeting = Rendezvous(node.address, holder.getsockname()[1])
            ranks = [
                subprocess.Popen(
                    [sys.executable, __file__, "--rank-of", str(run.path), "--steps", str(steps)],
                    # The ranks do not search the folder of their script by themselves.
                    env={**os.environ, **command.env, "PYTHONPATH": str(Path(__file__).parent)},
                )
                for command in plan_ranks(config.run, lambda node: str(run.path), [node], meeting, resume=False)
            ]
            codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"a rank failed: {codes}")
        found: dict[str, Any] = json.loads((run.path / "times.json").read_text())
        return found


if __name__ == "__main__":
    main()
