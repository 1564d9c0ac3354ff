"""A replica of torchft's fault-tolerant DDP, by its own `train_ddp.py`: gloo with 5 s, one rank a replica group.

Written for torchft 0.2 and its nightly builds, for which there are wheels for x86-64 only.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

from rivals.journal import Journal
from rivals.small_gpt import backward, batch, make_model, make_optimizer

# The example's own. Its documentation wants the manager's time-outs above the time of a step, which is 0.1 s here.
_COLLECTIVE_S = 5
_MANAGER_S = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True, help="by which the other replicas reach this one")
    chosen = parser.parse_args()
    model = make_model()
    inner = make_optimizer(model)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=_COLLECTIVE_S)),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=chosen.name,
        hostname=chosen.address,
        timeout=timedelta(seconds=_MANAGER_S),
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    journal = Journal(chosen.folder / "steps", chosen.name)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        # The size of a replica's batch must not change in mid-run: it is set for three of them.
        backward(ddp, batch(before, int(chosen.name[-1]), 3))
        optimizer.step()
        if manager.current_step() > before:
            world = manager.num_participants()
            journal.done(manager.current_step(), world, f"of {world}")


if __name__ == "__main__":
    main()
