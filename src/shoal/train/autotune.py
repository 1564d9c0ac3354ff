"""Choose whether to compile the blocks and whether to multiply in bf16, by a trial on one block of the model.

Both win on some machines and lose on others, and compiling costs half a minute before the first step. Every rank takes
part in the trial, and all choose the same. One block stands for all: it takes a twelfth of GPT-2's time, all blocks
share the code compiled for one, and its gradients are dropped, so that neither DDP nor the training sees the trial.

The times are kept for this machine and model (`engine.trial_memory`).
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.config.schema import Config, ModelConfig, TrainConfig
from shoal.cost.model_size import flops_per_token
from shoal.cost.select_sync import LEAST_GAIN
from shoal.engine import trial_memory
from shoal.host.facts import cpu_name
from shoal.model.gpt import GPT, Block, compile_block, leave_batch_open
from shoal.model.kernels import prefer_blas
from shoal.sync.step_stats import max_over_world
from shoal.sync.world import World, barrier
from shoal.train.compute_speed import matmul_gflops
from shoal.train.gpu_speed import multiply_in_tf32
from shoal.units import format_duration, format_ms

# `device`: what `default_precision` says of each rank's own device.
Precision = Literal["fp32", "bf16", "device"]

# Compiling a block without any cache on a slow machine. Once tried, the measured time counts.
_COLD_COMPILE_S = 60.0
# The largest part of a block's time that compiling was seen to save: if even that cannot pay, it is not tried.
_BEST_SAVING = 0.35
# The slowest processor and GPU assumed: a slower one would gain from a trial that is skipped. None such is known.
_SLOWEST_FLOPS = {"cpu": 5e9, "cuda": 5e12}
# The time of what does not work or was not tried.
NEVER = math.inf

# A block is timed at least twice, and then until the runs or the seconds are used up.
_MAX_RUNS = 5
_BUDGET_S = 1.0
_MATMUL_BUDGET_S = 0.02
# Compiling takes minutes on a slow machine: the others wait for it in a barrier, and not in an exchange.
_COMPILE_TIMEOUT_S = 600.0


Note = Callable[[str], None]  # receives what the trial does, for the user


@dataclass(frozen=True)
class RemainingWork:
    """What the busiest rank still has to compute."""

    blocks: int  # Forward and backward passes of a block.
    flops: float  # Operations in all.


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block's forward and backward pass on one micro-batch, or `NEVER`."""

    plain_s: float = NEVER
    bf16_s: float = NEVER
    compiled_s: float = NEVER  # In the precision that won without compiling.
    compile_s: float = _COLD_COMPILE_S  # The time that compiling took.
    tried: float = 0.0  # Whether compiling was tried (1) or not (0).

    @property
    def uncompiled_s(self) -> float:
        return min(self.plain_s, self.bf16_s)

    @property
    def favour_bf16(self) -> bool:
        return self.bf16_s * LEAST_GAIN < self.plain_s


@dataclass(frozen=True)
class ComputeChoice:
    """How the model computes, and the reason for the `start` event."""

    compiled: bool = False
    precision: Precision = "fp32"
    why: str = "as configured"


def work_left(model: ModelConfig, micro_batch: int, micro_batches: int, steps: int) -> RemainingWork:
    tokens = steps * micro_batches * micro_batch * model.seq_len
    return RemainingWork(steps * micro_batches * model.layers, flops_per_token(model) * tokens)


def default_precision(device: torch.device) -> Precision:
    """Return the precision where none is configured: bf16 only on a GPU that multiplies it fast."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "fp32"


def settled(train: TrainConfig, device: str, work: RemainingWork) -> ComputeChoice | None:
    """Return the choice if it needs no trial: by the settings, or if the run is too short to gain."""
    configured = ComputeChoice(train.compile == "on", "bf16" if train.precision == "bf16" else "fp32")
    if "auto" not in (train.compile, train.precision):
        return configured
    best_saved_s = _BEST_SAVING * work.flops / _SLOWEST_FLOPS[device]
    if train.compile != "on" and train.precision != "auto" and best_saved_s < 2 * _COLD_COMPILE_S:
        return ComputeChoice(False, configured.precision, "not compiled: the run is too short to gain from it")
    return None


def may_pay(times: BlockTimes, work: RemainingWork) -> bool:
    """Return whether compiling could save more than twice its own time, at best."""
    return _BEST_SAVING * times.uncompiled_s * work.blocks > 2 * times.compile_s


def decide(train: TrainConfig, times: BlockTimes, work: RemainingWork, is_paid: bool) -> ComputeChoice:
    """Choose by measured times. `is_paid`: the trial has just compiled the block, so that using it costs no more."""
    takes_bf16 = train.precision == "bf16" or (train.precision == "auto" and times.favour_bf16)
    precision: Precision = "bf16" if takes_bf16 else "fp32"
    if train.compile != "auto":
        return ComputeChoice(train.compile == "on", precision, _explain_precision(train, times))
    saved_s = (times.uncompiled_s - times.compiled_s) * work.blocks - (0.0 if is_paid else times.compile_s)
    compiled = saved_s > 0 and _gains(times)
    reasons = (_explain_compiled(times, compiled), _explain_precision(train, times))
    return ComputeChoice(compiled, precision, "; ".join(filter(None, reasons)))


def _gains(times: BlockTimes) -> bool:
    return times.compiled_s * LEAST_GAIN < times.uncompiled_s


def _explain_compiled(times: BlockTimes, compiled: bool) -> str:
    if not times.tried:
        return "not compiled: the run is too short to gain from it, or there is no g++"
    if math.isinf(times.compiled_s):
        return "not compiled: compiling failed in a trial on this machine"
    gain = times.uncompiled_s / times.compiled_s
    if compiled:
        return f"compiled: a block is {gain:.2f}× as fast in a trial on this machine"
    if not _gains(times):
        return f"not compiled: a block is only {gain:.2f}× as fast in a trial on this machine"
    return f"not compiled: a block is {gain:.2f}× as fast, but compiling takes {format_duration(times.compile_s)}"


def _explain_precision(train: TrainConfig, times: BlockTimes) -> str:
    if train.precision != "auto":
        return ""
    if math.isinf(times.bf16_s):
        return "fp32: this processor multiplies bf16 no faster"
    name = "bf16" if times.favour_bf16 else "fp32"
    return f"{name}: a block takes {format_ms(times.bf16_s)} in bf16, {format_ms(times.plain_s)} in fp32"


def key(
    machine: str,
    torch_version: str,
    threads: int,
    ranks: int,
    model: ModelConfig,
    micro_batch: int,
    precision: str | None = "fp32",
) -> str:
    """Return the key of a trial: all that its times depend on. Ranks of one machine share memory and caches."""
    shape = f"width {model.width}, {model.heads} heads, {micro_batch} × {model.seq_len} tokens"
    where = f"{machine}, torch {torch_version}, {threads} threads, {ranks} ranks"
    return f"{where}, {shape}, dropout {model.dropout:g}" + (", bf16" if precision == "bf16" else "")


def recall(file: Path | None, key: str) -> BlockTimes | None:
    return _parse_times(trial_memory.recall(file, key))


def remember(file: Path | None, key: str, times: BlockTimes) -> None:
    # JSON has no infinity.
    entry = {name: value if math.isfinite(value) else None for name, value in asdict(times).items()}
    trial_memory.remember(file, key, entry)


def _parse_times(entry: Any) -> BlockTimes | None:
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(BlockTimes)}:
        return None
    if not all(value is None or _is_time(value) for value in entry.values()) or entry["plain_s"] is None:
        return None
    return BlockTimes(**{name: NEVER if value is None else float(value) for name, value in entry.items()})


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def choose(
    model: GPT, config: Config, micro_batch: int, work: RemainingWork, world: World, note: Note
) -> ComputeChoice:
    """Choose by the settings if they leave nothing open, otherwise by a trial. All ranks must call it.

    `note` receives what takes long.
    """
    train = config.train
    precision: Precision = train.precision if train.precision in ("fp32", "bf16") else "device"
    if config.sync.shard_level == 3:
        # A trial would gather the weights of a block on this rank alone.
        return ComputeChoice(False, precision, "not compiled: zero3 gathers weights between the blocks")
    if len({name == "cpu" for name in world.devices}) > 1:
        # One trial cannot speak for a GPU and a processor. Replicas stay equal: they add the same sums.
        return ComputeChoice(train.compile == "on", precision, "as each device does best")
    if train.precision is None:
        train = train.model_copy(update={"precision": default_precision(world.device)})
    choice = settled(train, world.device.type, work)
    return choice or _Trial(model, config.model_copy(update={"train": train}), micro_batch, work, world, note).run()


def precision_on(choice: ComputeChoice, device: torch.device) -> Precision:
    return default_precision(device) if choice.precision == "device" else choice.precision


def apply(choice: ComputeChoice, model: GPT) -> None:
    if precision_on(choice, model.token.weight.device) == "bf16":
        model.matmul_dtype = torch.bfloat16
    else:
        prefer_blas()
        multiply_in_tf32()
    if choice.compiled:
        _prepare_compiler()
        model.compile_blocks()


class _Trial:
    """Times a block on every rank. Each keeps its own times; all decide by those of the slowest rank."""

    def __init__(
        self, model: GPT, config: Config, micro_batch: int, work: RemainingWork, world: World, note: Note
    ) -> None:
        self._train = config.train
        self._note = note
        self._work = work
        self._world = world
        self._block = _BlockTimer(model, micro_batch, world.device)
        is_cuda = world.device.type == "cuda"
        machine = torch.cuda.get_device_name(world.device) if is_cuda else f"{cpu_name()} ({platform.machine()})"
        threads = torch.get_num_threads()
        version, ranks = str(torch.__version__), world.local_size
        self._key = key(machine, version, threads, ranks, config.model, micro_batch, config.train.precision)

    def run(self) -> ComputeChoice:
        file = trial_memory.trials_file()
        known = recall(file, self._key)
        # The precision that is configured stands for the plain one, unless both are tried.
        plain = torch.bfloat16 if self._train.precision == "bf16" else torch.float32
        own = known or BlockTimes(plain_s=self._block.seconds(plain))
        if self._train.precision == "auto" and not self._all(own.bf16_s < NEVER):
            own = replace(own, bf16_s=self._try_bf16())
        own, is_paid = self._maybe_compile(own)
        if own != known and self._world.is_node_main:
            remember(file, self._key, own)
        return decide(self._train, self._slowest(own), self._work, is_paid)

    def _maybe_compile(self, own: BlockTimes) -> tuple[BlockTimes, bool]:
        """Compile the block if that may pay; return the times, and whether it was compiled now."""
        slowest = self._slowest(own)
        is_wanted = self._train.compile == "auto" and may_pay(slowest, self._work)
        # If one rank has not tried before, all try: the slowest of all ranks together counts.
        all_tried = -max_over_world(self._world, [-own.tried])[0]
        if not is_wanted or all_tried or not self._all(has_compiler()):
            return own, False
        takes_bf16 = self._train.precision == "bf16" or (self._train.precision == "auto" and slowest.favour_bf16)
        precision = torch.bfloat16 if takes_bf16 else torch.float32
        self._note("compiling a part of the model, to see whether it gets faster")
        compile_s, compiled_s = self._block.compiled(precision)
        barrier(self._world, timeout_s=_COMPILE_TIMEOUT_S)
        return replace(own, compiled_s=compiled_s, compile_s=compile_s, tried=1.0), True

    def _try_bf16(self) -> float:
        """Time a block in bf16 if one product is faster: without instructions for it a block would take minutes."""
        with_bf16, without = (matmul_gflops(kind, _MATMUL_BUDGET_S) for kind in (torch.bfloat16, torch.float32))
        return self._block.seconds(torch.bfloat16) if with_bf16 > without else NEVER

    def _slowest(self, own: BlockTimes) -> BlockTimes:
        return BlockTimes(*max_over_world(self._world, list(astuple(own))))

    def _all(self, own: bool) -> bool:
        """Return whether `own` is true on every rank."""
        return max_over_world(self._world, [float(not own)])[0] <= 0


class _BlockTimer:
    def __init__(self, model: GPT, micro_batch: int, device: torch.device) -> None:
        block = model.blocks[0]
        assert isinstance(block, Block)  # noqa: S101 - a `ModuleList` has no type for its modules
        self._block = block
        shape = (micro_batch, model.config.seq_len, model.config.width)
        generator = torch.Generator().manual_seed(0)
        self._device = device
        self._inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for _ in range(2)]
        self._out_grad = torch.randn(shape, generator=generator).to(device)

    def seconds(self, precision: torch.dtype) -> float:
        """Return the median time of several runs, after one that does not count."""
        self._run(precision)
        times: list[float] = []
        deadline = time.perf_counter() + _BUDGET_S
        while len(times) < 2 or (len(times) < _MAX_RUNS and time.perf_counter() < deadline):
            began = time.perf_counter()
            self._run(precision)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def compiled(self, precision: torch.dtype) -> tuple[float, float]:
        """Return the seconds to compile, and those of the compiled block: `NEVER` if compiling fails for any reason."""
        _prepare_compiler()
        began = time.perf_counter()
        try:
            compile_block(self._block)
            self._run(precision)
            return time.perf_counter() - began, self.seconds(precision)
        except Exception as error:
            print(f"compiling failed, the block stays uncompiled: {type(error).__name__}: {error}")
            return time.perf_counter() - began, NEVER
        finally:
            self._block._compiled_call_impl = None

    def _run(self, precision: torch.dtype) -> None:
        is_cuda = self._device.type == "cuda"
        # As in the model: a branch has the precision of the products, and on a GPU the residual stream too.
        x, branch = self._inputs
        leave_batch_open(self._block, x, branch)
        with torch.autocast(self._device.type, precision, enabled=precision != torch.float32):
            outputs = self._block(x.to(precision) if is_cuda else x, branch.to(precision))
        # `backward` would leave gradients in the parameters.
        gradients = [self._out_grad.to(output.dtype) for output in outputs]
        torch.autograd.grad(outputs, [*self._inputs, *self._block.parameters()], gradients)
        if is_cuda:
            torch.cuda.synchronize(self._device)


def has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _prepare_compiler() -> None:
    """Turn off the pool of processes that compile in parallel: each imports torch, and outlives its use."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    # torch's own modules warn about each other.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
