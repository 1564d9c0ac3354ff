"""What each wire format costs beside the network: CPU seconds for 124M gradients against copying them once.

    .venv/bin/python benchmarks/wires.py --rounds 5

A world of one: everything is packed, added up and unpacked, and nothing travels. GPT-2's parameters in buckets as large
as a training's. Seconds of the processor, which neighbours disturb less than those of the clock. `int8, plain torch` is
what a machine without a compiler gets. Prints a table and the figures as JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from _common import options, rounds
from shoal.config.presets import PRESETS
from shoal.config.schema import ModelConfig
from shoal.config.sync_choice import WIRE_FORMATS, WireChoice
from shoal.control.rank_env import Placement
from shoal.model.gpt import GPT
from shoal.sync.compression import make_compressor
from shoal.sync.compression.base import Bucket, Compressor
from shoal.sync.compression.codecs import Int8
from shoal.sync.compression.reduce_scatter import ReduceScatter
from shoal.sync.world import World, join_world, leave_world

_BUCKET_NUMBERS = 25 * 2**20 // 4
_FORMATS = tuple(str(WireChoice(name)) for name in WIRE_FORMATS if name != "fp32")


def main() -> None:
    parser = options(__doc__, rounds_=5, quick={"layers": 1})
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick look; figures are scaled to 124M")
    parser.add_argument("--formats", default=",".join(_FORMATS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shape = ModelConfig(**{**PRESETS["gpt2-124m"]["model"], "layers": chosen.layers})
    with torch.device("meta"):
        parameters = {name: each.detach() for name, each in GPT(shape).named_parameters()}
    numbers = sum(each.numel() for each in parameters.values())
    world = join_world(Placement(0, 1, 0, 1), torch.device("cpu"))
    variants = variants_of(world, parameters, chosen.formats.split(","))
    for measure in variants.values():
        measure()
    found = rounds({name: scaled(measure, 124e6 / numbers) for name, measure in variants.items()}, chosen.rounds)
    # A thread of a format that still runs while the interpreter ends would abort it.
    del variants, measure
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "wire":
            thread.join(10)
    leave_world(world)
    medians = {name: statistics.median(times) for name, times in found.items()}
    copy_s = medians["fp32 copy"]
    for name, seconds in medians.items():
        print(f"{name:20} {seconds:7.3f} s for 124M  {seconds / copy_s:6.2f} × a copy")
    print(json.dumps({"numbers": numbers, "median_s": {name: round(each, 4) for name, each in medians.items()}}))


def variants_of(world: World, parameters: dict[str, Tensor], formats: list[str]) -> dict[str, Callable[[], float]]:
    groups = filled(list(parameters.values()))
    flats = [1e-3 * torch.randn(sum(each.numel() for each in group)) for group in groups]
    target = [torch.empty_like(flat) for flat in flats]

    def copied() -> float:
        began = time.process_time()
        for flat, into in zip(flats, target, strict=True):
            into.copy_(flat)
        return time.process_time() - began

    def exchanged(wire: Compressor) -> Callable[[], float]:
        def measure() -> float:
            for flat, into in zip(flats, target, strict=True):
                into.copy_(flat)
            began = time.process_time()
            pairs = zip(groups, target, strict=True)
            done = [wire(Bucket(i, into, group, i == len(groups) - 1)) for i, (group, into) in enumerate(pairs)]
            torch.futures.wait_all(done)
            return time.process_time() - began

        return measure

    wires = {name: make_compressor(name, world, parameters) for name in formats}
    if "int8" in wires:
        wires["int8, plain torch"] = ReduceScatter(world, parameters, Int8())
    return {"fp32 copy": copied} | {name: exchanged(wire) for name, wire in wires.items()}


def filled(parameters: list[Tensor]) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    for parameter in reversed(parameters):
        groups[-1].append(parameter)
        if sum(each.numel() for each in groups[-1]) >= _BUCKET_NUMBERS:
            groups.append([])
    return [group for group in groups if group]


def scaled(measure: Callable[[], float], factor: float) -> Callable[[], float]:
    return lambda: factor * measure()


if __name__ == "__main__":
    main()
