"""One rank of shoal's engine against a plain eager loop with unfused AdamW, on the same model and batches.

    .venv/bin/python benchmarks/one_rank.py --preset grammar --rounds 7

What a user gives up or gains by training through shoal before a second rank is even there.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from _common import median_ratio, options, rounds, seconds_per_call
from _gpt import STEPS_ONLY, PlainBatches, make_step
from shoal.config.load import build_config, load_config
from shoal.config.schema import Config
from shoal.control.rank_env import Placement
from shoal.data.prepare import create_run
from shoal.model.gpt import GPT
from shoal.sync.world import join_world, leave_world


class Plain:
    """What a tutorial writes: forward, backward, clip, `AdamW(foreach=False, fused=False)`, nothing measured."""

    def __init__(self, config: Config, batches: PlainBatches) -> None:
        torch.manual_seed(config.train.seed)
        self.model = GPT(config.model)
        train = config.train
        self.optimizer = torch.optim.AdamW(
            self.model.decay_groups(train.weight_decay), lr=1e-3, betas=(0.9, 0.99), foreach=False, fused=False
        )
        self.batches = batches
        self.clip = train.clip

    def step(self) -> None:
        for inputs, targets in self.batches.next_step():
            loss = self.model(inputs, targets) / targets.numel()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def main() -> None:
    parser = options(__doc__, rounds_=7, steps=12, quick={"steps": 2}, trains=True)
    parser.add_argument("--preset", default="grammar")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(chosen.preset, sets=[*STEPS_ONLY, *chosen.sets])
        run = create_run(config, Path(folder) / "run", world_size=1)
        world = join_world(Placement(0, 1, 0, 1), torch.device("cpu"))
        config = load_config(run.config)
        our_step = make_step(config, run, world)
        plain = Plain(config, PlainBatches(config, run))
        our_step()
        plain.step()
        found = rounds(
            {
                "plain eager, unfused": lambda: seconds_per_call(plain.step, chosen.steps),
                "shoal, one rank": lambda: seconds_per_call(our_step, chosen.steps),
            },
            chosen.rounds,
        )
        leave_world(world)
    base, shoal = found.values()
    print(
        json.dumps({"preset": chosen.preset, "threads": chosen.threads, "ratio": round(median_ratio(base, shoal), 3)})
    )


if __name__ == "__main__":
    main()
