"""`python -m shoal.train.gauge`: one rank of `shoal probe`. Times gloo between all ranks, then each machine alone.

What it finds it writes into its events, see `sync.gauge`; of the machine itself a `compute` event.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import psutil
import torch

from shoal.config.schema import ModelConfig
from shoal.control.placement import Placement
from shoal.control.private import use_private_caches
from shoal.errors import ShoalError
from shoal.events import EventLog
from shoal.runfolder import RunFolder
from shoal.sync.gauge import Collectives, agree
from shoal.sync.world import World, join, leave
from shoal.train.facts import hardware, versions
from shoal.train.load import LoadMeter
from shoal.train.pace import Pacer, halving_s
from shoal.train.peaks import Machine

_PACES_PART = 0.25
_HALVING_PART = 0.02
_COLLECTIVES_PART = 0.65
# However long starting took, this much is measured.
_LEAST_S = 2.0
_TURN_WITHIN_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.train.gauge")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, required=True, help="from the start of this process on")
    parser.add_argument("--models", type=json.loads, default={}, help="JSON: name to model, whose pace is wanted")
    options = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM):
        # There is nothing to save, and a rank that waits in gloo would not hear of Python's own handler.
        signal.signal(signum, signal.SIG_DFL)
    try:
        use_private_caches()
        placement = Placement.from_env(os.environ)
        log = EventLog(RunFolder(options.folder).events(placement.rank), placement.rank)
        models = {name: ModelConfig(**shape) for name, shape in options.models.items()}
        gauge(placement, log, options.budget_s, models)
    except ShoalError as error:
        sys.stderr.write(error.render())
        return error.exit_code
    return 0


def gauge(placement: Placement, log: EventLog, budget_s: float, models: Mapping[str, ModelConfig]) -> None:
    machine = Machine() if placement.local_rank == 0 else None
    world = join(placement, torch.device("cpu"), "gloo")
    load = LoadMeter()
    log.write("facts", node=world.node, interface=world.interface, versions=versions(), hardware=hardware())
    turns, mine = _turns(world)
    [age_s] = agree(world, [time.time() - psutil.Process().create_time()])
    left_s = max(_LEAST_S, budget_s - age_s)
    # First: large buffers of collectives leave a heap behind on which everything after them is some per cent slower.
    began = time.monotonic()
    for name, model in models.items():
        log.write("doing", text=f"how fast {name} trains on all of them together")
        _pace(world, log, name, model, _PACES_PART * left_s / len(models))
    log.write("halving", node=world.node, fp16_s_per_parameter=halving_s(_HALVING_PART * left_s))
    [paced_s] = agree(world, [time.monotonic() - began])
    left_s = max(_LEAST_S, left_s - paced_s)
    if world.size > 1:
        log.write("doing", text="collectives over gloo")
        collectives = Collectives(world, log, _COLLECTIVES_PART * left_s)
        collectives.measure()
        left_s -= collectives.budget_s
    for turn in range(turns):
        if machine and turn == mine:
            log.write("doing", text=f"what {placement.node} computes")
            log.write("compute", node=placement.node, turns=turns, **machine.measure(left_s / turns))
        _wait_for_all(world, f"turn/{turn}")
    log.write("load", node=world.node, **load.since_start())
    leave(world)


def _pace(world: World, log: EventLog, name: str, model: ModelConfig, budget_s: float) -> None:
    pacer = Pacer(model)
    _wait_for_all(world, f"pace/{name}")
    for times in pacer.measure(budget_s):
        shape = model.model_dump(mode="json")
        log.write("pace", node=world.node, name=name, model=shape, threads=torch.get_num_threads(), **times)
    _wait_for_all(world, f"paced/{name}")


def _turns(world: World) -> tuple[int, int]:
    """How many turns there are, and which is ours: nodes that are one machine compute one after another."""
    machine = str(hardware()["boot_id"] or world.node)
    world.store.set(f"machine/{world.rank}", f"{world.node} {machine}")
    said = (world.store.get(f"machine/{rank}").decode().partition(" ") for rank in range(world.size))
    turns = deal_turns({node: machine for node, _, machine in said})
    return 1 + max(turns.values()), turns[world.node]


def deal_turns(machines: Mapping[str, str]) -> dict[str, int]:
    """By node. The first node of every machine computes in the first turn, its second one in the second."""
    taken: dict[str, int] = {}
    turns = {}
    for node, machine in machines.items():
        turns[node] = taken[machine] = taken.get(machine, -1) + 1
    return turns


def _wait_for_all(world: World, name: str) -> None:
    """Through the store: a turn may last longer than gloo waits."""
    names = [f"{name}/{rank}" for rank in range(world.size)]
    world.store.set(names[world.rank], "done")
    world.store.wait(names, timedelta(seconds=_TURN_WITHIN_S))


if __name__ == "__main__":
    sys.exit(main())
