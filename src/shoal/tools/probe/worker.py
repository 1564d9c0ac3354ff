"""`python -m shoal.tools.probe.worker`: one rank of `shoal probe`. Time models, gloo's collectives, each machine, GPUs.

The figures are events: `model-time` of each model, those of `Collectives`, a `compute` event for each machine, and a
`gpu` event for each GPU.
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
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.profile import Backend, Op, Precision
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
from shoal.sync.world import World, barrier, choose_device, join_world, leave_world, with_second_group
from shoal.train.autotune import default_precision
from shoal.train.compute_speed import ComputePeaks, ModelTimer, measure_fp16_conversion_s
from shoal.train.gpu_speed import await_event, measure_card, time_on_gpu

_MODELS_SHARE = 0.25
_FP16_CONVERSION_SHARE = 0.02
_COLLECTIVES_SHARE = 0.65
# Of all the time, where a rank has a GPU; and of that for each card by itself, and for models. The rest: collectives.
_GPU_SHARE = 0.5
_CARD_SHARE = 0.2
_GPU_MODELS_SHARE = 0.6
# Measure at least this long, however long starting took.
_LEAST_S = 2.0
_TURN_TIMEOUT_S = 600.0
_CPU = torch.device("cpu")


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
    # A GPU even where ranks must share it: a run may ask for that.
    device = choose_device("cuda" if torch.cuda.is_available() else "cpu", placement)
    world = join_world(placement, device)
    load = LoadMeter()
    log.write(
        "facts", node=world.node, interface=world.interface, versions=describe_versions(), hardware=describe_hardware()
    )
    turns, own_turn = _turns(world)
    [age_s] = agree(world, [time.time() - psutil.Process().create_time()])
    left_s = max(_LEAST_S, budget_s - age_s)
    gpu_s = _GPU_SHARE * left_s if world.has_gpus else 0.0
    left_s -= gpu_s
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
    if world.has_gpus:
        measure_gpus(world, log, gpu_s, models)
    log.write("load", node=world.node, **load.since_start())
    leave_world(world)


def _time_model(
    world: World,
    log: EventLog,
    name: str,
    model: ModelConfig,
    budget_s: float,
    device: torch.device = _CPU,
    precision: Precision = "fp32",
) -> None:
    timer = None
    # A model that does not fit into a GPU has no times there.
    with suppress(torch.cuda.OutOfMemoryError):
        timer = ModelTimer(model, device, precision)
    turn = f"model-time/{name}/{device.type}/{precision}"
    _wait_for_all(world, turn)
    fields = {"node": world.node, "name": name, "model": model.model_dump(mode="json"), "device": device.type}
    for times in timer.measure(budget_s) if timer else ():
        log.write("model-time", **fields, precision=precision, threads=torch.get_num_threads(), **times)
    _wait_for_all(world, f"{turn}/end")


def measure_gpus(world: World, log: EventLog, budget_s: float, models: Mapping[str, ModelConfig]) -> None:
    """Measure each GPU alone, then models on all of them together, then how gradients get from one to another.

    Every rank takes part, also one without a GPU: it waits where others measure theirs.
    """
    is_first = world.devices.index(world.devices[world.rank]) == world.rank
    if world.device.type == "cuda" and is_first:
        log.write("doing", text=f"the GPU of {world.node}")
        try:
            log.write("gpu", node=world.node, **measure_card(world.device, _CARD_SHARE * budget_s))
        except torch.cuda.OutOfMemoryError:
            free_bytes = torch.cuda.mem_get_info(world.device)[0]
            log.write("gpu-skipped", node=world.node, gpu=str(world.device), free_bytes=free_bytes)
        torch.cuda.empty_cache()
    _wait_for_all(world, "gpus")
    # The precision that a run takes by default, and the other that it may ask for.
    precisions: tuple[Precision, ...] = ("bf16", "fp32")
    for name, model in models.items():
        for precision in precisions:
            log.write("doing", text=f"how fast {name} trains on GPUs in {precision}")
            share = _GPU_MODELS_SHARE * budget_s / len(models) / len(precisions)
            if world.device.type == "cuda" and (precision == "fp32" or default_precision(world.device) == "bf16"):
                _time_model(world, log, name, model, share, world.device, precision)
            else:
                turn = f"model-time/{name}/cuda/{precision}"
                _wait_for_all(world, turn)
                _wait_for_all(world, f"{turn}/end")
    if world.size > 1:
        backend: Backend = "staged" if world.gpu_group is None else "nccl"
        log.write("doing", text="collectives over NCCL" if backend == "nccl" else "gloo between GPUs, by pinned memory")
        Collectives(world, log, (1 - _CARD_SHARE - _GPU_MODELS_SHARE) * budget_s, backend).measure()


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
# NCCL's calls in a row, so that the ranks' different starts count for little.
_NCCL_CALLS = 4

FP32, FP16 = torch.float32, torch.float16

# Shares of the time that is left when each of them begins.
_ALL_REDUCE_SHARE = 0.5
_FP16_SHARE = 0.4
_OTHER_SHARES: dict[Op, float] = {"reduce-scatter": 0.25, "all-gather": 0.33, "broadcast": 0.5}

# Returns the seconds, where the GPU measured them itself.
Call = Callable[[], object]


@dataclass
class Collectives:
    """Time a backend's collectives within a budget; write an event for each measured size.

    Events: `collective`, `held-out`, `connections`, and `cut` for the first size that was too large for the time. All
    ranks use the same figures, those of the slowest rank, so they decide alike without further messages.
    """

    world: World
    log: EventLog
    budget_s: float
    backend: Backend = "gloo"
    began: float = field(default_factory=time.monotonic)
    _cores: dict[int, float] = field(default_factory=dict)

    def measure(self) -> None:
        if self.backend == "staged":
            # Formats with fewer bytes are encoded behind the copy, which stays the same.
            self._sweep("all-reduce", FP32, SIZES, 1.0, holds_out=True)
            return
        tries = self._sweep("all-reduce", FP32, SIZES, _ALL_REDUCE_SHARE, holds_out=True)
        self._sweep("all-reduce", FP16, FEW_SIZES, _FP16_SHARE)
        for op, share in _OTHER_SHARES.items():
            self._sweep(op, FP32, FEW_SIZES, share)
        if self.backend == "gloo":
            self._try_connections(tries)

    def _sweep(
        self, op: Op, dtype: torch.dtype, sizes: tuple[int, ...], share: float, holds_out: bool = False
    ) -> list[Sample]:
        """Within this share of the remaining time, try every size that fits, then repeat all of them in rounds."""
        keep_s = (1 - share) * self._left_s()
        tries, calls = self._try_sizes(op, dtype, sizes, keep_s)
        expected = dict(tries)
        if holds_out:
            held_out, call = self._prepare(op, dtype, held_out_size(list(expected)))
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
                backend=self.backend,
            )
        return tries

    def _try_sizes(
        self, op: Op, dtype: torch.dtype, sizes: tuple[int, ...], keep_s: float
    ) -> tuple[list[Sample], dict[int, Call]]:
        tries: list[Sample] = []
        calls: dict[int, Call] = {}
        for size in sizes:
            buffer_bytes, call = self._prepare(op, dtype, size)
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
            gpu_s = call()
            times.append(gpu_s if isinstance(gpu_s, float) else time.perf_counter() - began)
        return agree(self.world, times)

    def _left_s(self) -> float:
        return max(0.0, self.budget_s - agree(self.world, [time.monotonic() - self.began])[0])

    def _cut(self, op: Op, dtype: torch.dtype, size: int, tries: list[Sample]) -> None:
        if self.world.is_main:
            once_s = expected_s(size, tries)
            fields = {"op": op, "element_bytes": dtype.itemsize, "bytes": size, "backend": self.backend}
            self.log.write("size-skipped", **fields, once_s=once_s)

    def _prepare(self, op: Op, dtype: torch.dtype, size: int) -> tuple[int, Call]:
        """Return the bytes of the whole buffer, a multiple of the world size, and the operation on it."""
        world = self.world
        device = _CPU if self.backend == "gloo" else world.device
        group = world.gpu_group if self.backend == "nccl" else world.group
        part = max(1, size // dtype.itemsize // world.size)
        whole = torch.zeros(part * world.size, dtype=dtype, device=device)
        own = torch.zeros(part, dtype=dtype, device=device)
        calls: dict[Op, Call] = {
            "all-reduce": lambda: dist.all_reduce(whole, group=group),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
            "all-gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        }
        call = calls[op]
        if self.backend == "nccl":
            call = partial(time_on_gpu, calls[op], _NCCL_CALLS, f"{op} by NCCL")
        elif device.type == "cuda":
            call = partial(_reduce_staged, whole, torch.empty_like(whole, device=_CPU, pin_memory=True), group)
        return dtype.itemsize * part * world.size, call


def agree(world: World, values: list[float]) -> list[float]:
    """Return for each value the largest that any rank has."""
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.group)
    return [float(value) for value in largest]


def _reduce_staged(on_gpu: Tensor, pinned: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum the buffers of GPUs as `StagedCompressor` does: copy to pinned memory, exchange there, copy back."""
    pinned.copy_(on_gpu, non_blocking=True)
    await_event(torch.cuda.current_stream().record_event(), "a copy to pinned memory")
    dist.all_reduce(pinned, group=group)
    on_gpu.copy_(pinned, non_blocking=True)
    await_event(torch.cuda.current_stream().record_event(), "a copy from pinned memory")


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
