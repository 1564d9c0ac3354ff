"""`python -m shoal.tools.probe.worker`: one rank of `shoal probe`. Time models, gloo's collectives, then each machine.

The figures are events: `model-time` of each model, those of `Collectives`, and a `compute` event for each machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.profile import Op
from shoal.config.schema import ModelConfig
from shoal.control.rank_env import Placement, use_private_caches
from shoal.cost.network import (
    FEW_SIZES,
    SIZES,
    Sample,
    expected_s,
    held_out_size,
    is_affordable,
    repeats_for,
    rounds_for,
)
from shoal.engine.loop import LoadMeter
from shoal.engine.start_training import describe_hardware, describe_versions
from shoal.errors import ShoalError
from shoal.events import EventLog
from shoal.host.facts import boot_id
from shoal.run_folder import RunFolder
from shoal.sync.world import World, barrier, join_world, leave_world, with_second_group
from shoal.train.compute_speed import ComputePeaks, ModelTimer, measure_fp16_conversion_s

_MODELS_SHARE = 0.25
_FP16_CONVERSION_SHARE = 0.02
_COLLECTIVES_SHARE = 0.65
# Measure at least this long, however long starting took.
_LEAST_S = 2.0
_TURN_TIMEOUT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.tools.probe.worker")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, required=True, help="from the start of this process on")
    parser.add_argument(
        "--models", type=json.loads, default={}, help="JSON: name to model, whose step times are wanted"
    )
    options = parser.parse_args()
    for signum in (signal.SIGINT, signal.SIGTERM):
        # There is nothing to save, and Python's own handler does not run while a rank waits in gloo.
        signal.signal(signum, signal.SIG_DFL)
    try:
        use_private_caches()
        placement = Placement.from_env(os.environ)
        log = EventLog(RunFolder(options.folder).events(placement.rank), placement.rank)
        models = {name: ModelConfig(**shape) for name, shape in options.models.items()}
        measure(placement, log, options.budget_s, models)
    except ShoalError as error:
        sys.stderr.write(error.render())
        return error.exit_code
    return 0


def measure(placement: Placement, log: EventLog, budget_s: float, models: Mapping[str, ModelConfig]) -> None:
    peaks = ComputePeaks() if placement.local_rank == 0 else None
    world = join_world(placement, torch.device("cpu"), "gloo")
    load = LoadMeter()
    log.write(
        "facts", node=world.node, interface=world.interface, versions=describe_versions(), hardware=describe_hardware()
    )
    turns, own_turn = _turns(world)
    [age_s] = agree(world, [time.time() - psutil.Process().create_time()])
    left_s = max(_LEAST_S, budget_s - age_s)
    # Models first: large buffers of collectives fragment the heap, and everything after them is some per cent slower.
    began = time.monotonic()
    for name, model in models.items():
        log.write("doing", text=f"how fast {name} trains on all of them together")
        _time_model(world, log, name, model, _MODELS_SHARE * left_s / len(models))
    log.write(
        "fp16-conversion",
        node=world.node,
        fp16_s_per_parameter=measure_fp16_conversion_s(_FP16_CONVERSION_SHARE * left_s),
    )
    [models_s] = agree(world, [time.monotonic() - began])
    left_s = max(_LEAST_S, left_s - models_s)
    if world.size > 1:
        log.write("doing", text="collectives over gloo")
        collectives = Collectives(world, log, _COLLECTIVES_SHARE * left_s)
        collectives.measure()
        left_s -= collectives.budget_s
    for turn in range(turns):
        if peaks and turn == own_turn:
            log.write("doing", text=f"what {placement.node} computes")
            log.write("compute", node=placement.node, turns=turns, **peaks.measure(left_s / turns))
        _wait_for_all(world, f"turn/{turn}")
    log.write("load", node=world.node, **load.since_start())
    leave_world(world)


def _time_model(world: World, log: EventLog, name: str, model: ModelConfig, budget_s: float) -> None:
    timer = ModelTimer(model)
    _wait_for_all(world, f"model-time/{name}")
    for times in timer.measure(budget_s):
        shape = model.model_dump(mode="json")
        log.write("model-time", node=world.node, name=name, model=shape, threads=torch.get_num_threads(), **times)
    _wait_for_all(world, f"model-time-end/{name}")


def _turns(world: World) -> tuple[int, int]:
    """Return the number of turns and this node's turn: nodes of one machine compute one after another."""
    machine = boot_id() or world.node
    world.store.set(f"machine/{world.rank}", f"{world.node} {machine}")
    entries = (world.store.get(f"machine/{rank}").decode().partition(" ") for rank in range(world.size))
    turns = assign_turns({node: machine for node, _, machine in entries})
    return 1 + max(turns.values()), turns[world.node]


def assign_turns(machines: Mapping[str, str]) -> dict[str, int]:
    """Return turns by node: the first node of every machine computes in the first turn, its second in the second."""
    taken: dict[str, int] = {}
    turns = {}
    for node, machine in machines.items():
        turns[node] = taken[machine] = taken.get(machine, -1) + 1
    return turns


def _wait_for_all(world: World, name: str) -> None:
    """Wait through the store: a turn may last longer than gloo's timeout."""
    names = [f"{name}/{rank}" for rank in range(world.size)]
    world.store.set(names[world.rank], "done")
    world.store.wait(names, timedelta(seconds=_TURN_TIMEOUT_S))


CONNECTIONS = (1, 2, 4)
_PARALLEL_ALL_REDUCES = 4
_TRIAL_ROUNDS = 7
_MOST_TRIAL_BYTES = 4 << 20
_TIMEOUT_S = 60.0

FP32, FP16 = torch.float32, torch.float16

# Shares of the time that is left when each of them begins.
_ALL_REDUCE_SHARE = 0.5
_FP16_SHARE = 0.4
_OTHER_SHARES: dict[Op, float] = {"reduce-scatter": 0.25, "all-gather": 0.33, "broadcast": 0.5}

Call = Callable[[], object]


@dataclass
class Collectives:
    """Time gloo's collectives within a budget; write an event for each measured size.

    Events: `collective`, `held-out`, `connections`, and `cut` for the first size that was too large for the time. All
    ranks use the same figures, those of the slowest rank, so they decide alike without further messages.
    """

    world: World
    log: EventLog
    budget_s: float
    began: float = field(default_factory=time.monotonic)
    _cores: dict[int, float] = field(default_factory=dict)

    def measure(self) -> None:
        tries = self._sweep("all-reduce", FP32, SIZES, _ALL_REDUCE_SHARE, holds_out=True)
        self._sweep("all-reduce", FP16, FEW_SIZES, _FP16_SHARE)
        for op, share in _OTHER_SHARES.items():
            self._sweep(op, FP32, FEW_SIZES, share)
        self._try_connections(tries)

    def _sweep(
        self, op: Op, dtype: torch.dtype, sizes: tuple[int, ...], share: float, holds_out: bool = False
    ) -> list[Sample]:
        """Within this share of the remaining time, try every size that fits, then repeat all of them in rounds."""
        keep_s = (1 - share) * self._left_s()
        tries, calls = self._try_sizes(op, dtype, sizes, keep_s)
        expected = dict(tries)
        if holds_out:
            held_out, call = _prepare(op, dtype, held_out_size(list(expected)), self.world)
            expected[held_out], calls[held_out] = expected_s(held_out, tries), call
        times = self._repeat(expected, calls, self._left_s() - keep_s)
        for size, seconds in times.items() if self.world.is_main else ():
            self.log.write(
                "collective" if size in dict(tries) else "held-out",
                op=op,
                bytes=size,
                seconds=statistics.median(seconds),
                rounds=len(seconds),
                world_size=self.world.size,
                element_bytes=dtype.itemsize,
                cores=self._cores[size],
            )
        return tries

    def _try_sizes(
        self, op: Op, dtype: torch.dtype, sizes: tuple[int, ...], keep_s: float
    ) -> tuple[list[Sample], dict[int, Call]]:
        tries: list[Sample] = []
        calls: dict[int, Call] = {}
        for size in sizes:
            buffer_bytes, call = _prepare(op, dtype, size, self.world)
            once_s = self._try(call, expected_s(size, tries), tries, keep_s)
            if once_s is None:
                self._cut(op, dtype, size, tries)
                break
            tries.append((buffer_bytes, once_s))
            calls[buffer_bytes] = call
        return tries, calls

    def _try(self, call: Call, expected: float, tries: list[Sample], keep_s: float) -> float | None:
        """Time one call; return None when it would take too long, or did."""
        if not is_affordable(expected, tries, self._left_s() - keep_s - expected):
            return None
        [once_s] = self._seconds(call, 1)
        return once_s if is_affordable(once_s, tries, self._left_s() - keep_s) else None

    def _repeat(self, expected: dict[int, float], calls: dict[int, Call], left_s: float) -> dict[int, list[float]]:
        round_s = sum(expected.values())
        times: dict[int, list[float]] = {size: [] for size in expected}
        busy: dict[int, list[float]] = {size: [] for size in expected}
        for _ in range(rounds_for(round_s, left_s)):
            for size, once_s in expected.items():
                began_s, wall_s = time.process_time(), time.perf_counter()
                times[size] += self._seconds(calls[size], repeats_for(once_s, round_s))
                busy[size].append((time.process_time() - began_s) / (time.perf_counter() - wall_s))
        self._cores = {size: statistics.median(shares) for size, shares in busy.items()}
        return times

    def _try_connections(self, tries: list[Sample]) -> None:
        """Time several all-reduces at once, as DDP sends its buckets: a single one uses only one connection."""
        size = self._trial_size(tries)
        buffers = [torch.zeros(size // 4) for _ in range(_PARALLEL_ALL_REDUCES)]
        calls = {count: _in_parallel(_group(self.world, count), buffers) for count in CONNECTIONS}
        times: dict[int, list[float]] = {count: [] for count in CONNECTIONS}
        for round_ in range(_TRIAL_ROUNDS + 1):
            for count, call in calls.items():
                seconds = self._seconds(call, 1)
                # The first round includes one-time costs.
                times[count] += seconds if round_ else []
        if self.world.is_main:
            total_bytes = _PARALLEL_ALL_REDUCES * size
            for count, seconds in times.items():
                self.log.write("connections", count=count, bytes=total_bytes, seconds=statistics.median(seconds))

    def _trial_size(self, tries: list[Sample]) -> int:
        one_s = self._left_s() / ((1 + _TRIAL_ROUNDS) * len(CONNECTIONS) * _PARALLEL_ALL_REDUCES)
        fitting = [size for size in SIZES if size <= _MOST_TRIAL_BYTES and expected_s(size, tries) <= one_s]
        return fitting[-1] if fitting else SIZES[0]

    def _seconds(self, call: Call, rounds: int) -> list[float]:
        """Return the slowest rank's times, each from a common start."""
        times = []
        for _ in range(rounds):
            barrier(self.world)
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return agree(self.world, times)

    def _left_s(self) -> float:
        return max(0.0, self.budget_s - agree(self.world, [time.monotonic() - self.began])[0])

    def _cut(self, op: Op, dtype: torch.dtype, size: int, tries: list[Sample]) -> None:
        if self.world.is_main:
            once_s = expected_s(size, tries)
            self.log.write("size-skipped", op=op, element_bytes=dtype.itemsize, bytes=size, once_s=once_s)


def agree(world: World, values: list[float]) -> list[float]:
    """Return for each value the largest that any rank has."""
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.group)
    return [float(value) for value in largest]


def _prepare(op: Op, dtype: torch.dtype, size: int, world: World) -> tuple[int, Call]:
    """Return the bytes of the whole buffer, a multiple of the world size, and the operation on it."""
    part = max(1, size // dtype.itemsize // world.size)
    whole, own = torch.zeros(part * world.size, dtype=dtype), torch.zeros(part, dtype=dtype)
    group = world.group
    calls: dict[Op, Call] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
    }
    return dtype.itemsize * part * world.size, calls[op]


def _group(world: World, connections: int) -> dist.ProcessGroup:
    """Form a group with several connections: gloo opens one for every interface listed, also for a repeated one."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if before:
        os.environ["GLOO_SOCKET_IFNAME"] = ",".join([before.split(",")[0]] * connections)
    try:
        return with_second_group(world, _TIMEOUT_S).group
    finally:
        if before:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def _in_parallel(group: dist.ProcessGroup, buffers: list[Tensor]) -> Call:
    def call() -> None:
        for work in [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]:
            if work is not None:
                work.wait()

    return call


if __name__ == "__main__":
    sys.exit(main())
