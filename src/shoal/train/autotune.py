"""Tries on one block of the model how this machine computes it best. Every rank takes part, and all choose the same.

One block stands for all of them: it is a twelfth of GPT-2's time, all blocks share what is compiled for one, and its
gradients are thrown away, so that neither DDP nor the training sees anything of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import statistics
import time
import warnings
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.config.schema import Config, ModelConfig, TrainConfig
from shoal.cost.model_size import flops_per_token
from shoal.cost.select_sync import LEAST_GAIN
from shoal.data.prepare import cache_root
from shoal.errors import ShoalError
from shoal.events import Event, read_events
from shoal.host.facts import cpu_name
from shoal.model.gpt import GPT, Block
from shoal.model.kernels import prefer_blas
from shoal.run_folder import RunFolder, write_atomically
from shoal.sync.replicas import tell_all
from shoal.sync.step_stats import worst_over_world
from shoal.sync.world import World, barrier
from shoal.train.compute_speed import matmul_gflops
from shoal.units import format_duration

# SECTION train/tuning
# Whether compiling the blocks, or multiplying in bf16, is worth it here: the decision, by measured times. Pure.
#
# Both win on some machines and lose on others, and compiling costs half a minute before the first step. So one block is
# tried (`train/trial.py`), the times are remembered for this machine and model (`train/memory.py`), and this decides.


Precision = Literal["fp32", "bf16"]

# What compiling a block takes without any cache on a slow machine; once tried, the measured time counts.
COLD_S = 60.0
# The most that compiling has been seen to save of a block: what cannot pay even then is not tried.
_HOPED = 0.35
# A machine slower than this would gain from a trial that we leave out; none such is known.
_SLOW_FLOPS = 5e9
NEVER = math.inf


@dataclass(frozen=True)
class RemainingWork:
    """What the busiest rank has still to do: so often a block's forward and backward, so many operations in all."""

    blocks: int
    flops: float


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one block's forward and backward on one micro-batch; infinite for what does not work or was not tried.

    `compiled_s` is in the precision that won without compiling, `compile_s` what compiling took, `tried` whether it was
    tried at all (1) or not (0).
    """

    plain_s: float = NEVER
    bf16_s: float = NEVER
    compiled_s: float = NEVER
    compile_s: float = COLD_S
    tried: float = 0.0

    def as_list(self) -> list[float]:
        return list(astuple(self))

    @property
    def uncompiled_s(self) -> float:
        return min(self.plain_s, self.bf16_s)

    @property
    def favour_bf16(self) -> bool:
        return self.bf16_s * LEAST_GAIN < self.plain_s


@dataclass(frozen=True)
class ComputeChoice:
    """How the model computes, and the reason in words for the `start` event."""

    compiled: bool = False
    precision: Precision = "fp32"
    why: str = "as configured"


def work_left(model: ModelConfig, micro_batch: int, micro_batches: int, steps: int) -> RemainingWork:
    tokens = steps * micro_batches * micro_batch * model.seq_len
    return RemainingWork(steps * micro_batches * model.layers, flops_per_token(model) * tokens)


def settled(train: TrainConfig, is_cpu: bool, work: RemainingWork) -> ComputeChoice | None:
    """The choice that needs no trial: all is said, there is nothing known to try, or the run is too short for one."""
    said = ComputeChoice(train.compile == "on", "bf16" if train.precision == "bf16" else "fp32")
    if not is_cpu or "auto" not in (train.compile, train.precision):
        return said
    if train.compile != "on" and train.precision != "auto" and _HOPED * work.flops / _SLOW_FLOPS < 2 * COLD_S:
        return ComputeChoice(False, said.precision, "not compiled: the run is too short to gain from it")
    return None


def may_pay(times: BlockTimes, work: RemainingWork) -> bool:
    """Whether compiling could save more than twice what it takes, if it does here what it does at best."""
    return _HOPED * times.uncompiled_s * work.blocks > 2 * times.compile_s


def decide(train: TrainConfig, times: BlockTimes, work: RemainingWork, is_paid: bool) -> ComputeChoice:
    """`is_paid`: the trial has just compiled the block, so that using it costs nothing more."""
    takes_bf16 = train.precision == "bf16" or (train.precision == "auto" and times.favour_bf16)
    precision: Precision = "bf16" if takes_bf16 else "fp32"
    if train.compile != "auto":
        return ComputeChoice(train.compile == "on", precision, _say_precision(train, times))
    saved_s = (times.uncompiled_s - times.compiled_s) * work.blocks - (0.0 if is_paid else times.compile_s)
    compiled = saved_s > 0 and _gains(times)
    words = (_say_compiled(times, compiled), _say_precision(train, times))
    return ComputeChoice(compiled, precision, "; ".join(word for word in words if word))


def _gains(times: BlockTimes) -> bool:
    return times.compiled_s * LEAST_GAIN < times.uncompiled_s


def _say_compiled(times: BlockTimes, compiled: bool) -> str:
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


def _say_precision(train: TrainConfig, times: BlockTimes) -> str:
    if train.precision != "auto":
        return ""
    if math.isinf(times.bf16_s):
        return "fp32: this processor multiplies bf16 no faster"
    name = "bf16" if times.favour_bf16 else "fp32"
    return f"{name}: a block takes {1e3 * times.bf16_s:.3g} ms in bf16, {1e3 * times.plain_s:.3g} ms in fp32"


def key(machine: str, torch_version: str, threads: int, ranks: int, model: ModelConfig, micro_batch: int) -> str:
    """What a time depends on. How many ranks compute beside each other is part of it: they share memory and caches."""
    shape = f"width {model.width}, {model.heads} heads, {micro_batch} × {model.seq_len} tokens"
    where = f"{machine}, torch {torch_version}, {threads} threads, {ranks} ranks"
    return f"{where}, {shape}, dropout {model.dropout:g}"


# SECTION train/memory
# What trials found on this machine, in one small JSON file of the user's cache.
#
# It only ever saves time: whatever is wrong with it (damaged, foreign, unwritable), the trial is made anew.


_VERSION = 1
_MOST = 64
_NAMES = {field.name for field in fields(BlockTimes)}


def trials_file() -> Path | None:
    try:
        return cache_root(None) / "trials.json"
    except ShoalError:
        return None


def recall(file: Path | None, key: str) -> BlockTimes | None:
    return _times(_read(file).get(key))


def remember(file: Path | None, key: str, times: BlockTimes) -> None:
    """The newest entries only; two ranks that write at once leave the entry of one of them."""
    if file is None:
        return
    kept = {name: entry for name, entry in _read(file).items() if name != key}
    newest = dict([*kept.items()][-_MOST + 1 :]) | {key: _document(times)}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"version": _VERSION, "trials": newest}, indent=1) + "\n")


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found = document.get("trials") if isinstance(document, dict) and document.get("version") == _VERSION else None
    return found if isinstance(found, dict) else {}


def _document(times: BlockTimes) -> dict[str, float | None]:
    """JSON has no infinity: what does not work has no time."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(times).items()}


def _times(entry: Any) -> BlockTimes | None:
    if not isinstance(entry, dict) or entry.keys() != _NAMES:
        return None
    if not all(value is None or _is_time(value) for value in entry.values()) or entry["plain_s"] is None:
        return None
    return BlockTimes(**{name: NEVER if value is None else float(value) for name, value in entry.items()})


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


_RUNS = 5
# At least two runs, and then as many as fit into this.
_BUDGET_S = 1.0
_PEAK_S = 0.02
# Compiling takes a slow machine minutes; the others wait for it here, and not in an exchange.
_COMPILE_TIMEOUT_S = 600.0


def choose(model: GPT, config: Config, micro_batch: int, work: RemainingWork, world: World) -> ComputeChoice:
    """Settings that leave nothing open, and runs too short to gain, are answered without a trial."""
    choice = settled(config.train, world.device.type == "cpu", work)
    if choice is not None:
        return choice
    trial = _Trial(model, config, micro_batch, work, world)
    return trial.run()


def earlier_choice(run: RunFolder, world: World) -> ComputeChoice | None:
    """What the run chose when it began, by rank 0's own events: another choice would round otherwise, and a resumed run
    would not be the same to the bit. None where nothing is known, or it cannot be done any more."""
    known = _last_start(run.events(0)) if world.is_main else {}
    precision = known.get("precision")
    said, compiled, bf16 = tell_all(world, 0, [precision is not None, bool(known.get("compiled")), precision == "bf16"])
    cannot = worst_over_world(world, [float(bool(compiled) and not has_compiler())])[0]
    if not said or cannot:
        return None
    return ComputeChoice(bool(compiled), "bf16" if bf16 else "fp32", "as when the run began")


def _last_start(events: Path) -> Event:
    try:
        starts = [event for event in read_events(events) if event["event"] == "start"]
    except OSError:
        return {}
    return starts[-1] if starts else {}


def apply(choice: ComputeChoice, model: GPT) -> None:
    if choice.precision == "bf16":
        model.products = torch.bfloat16
    else:
        prefer_blas()
    if choice.compiled:
        _prepare_compiler()
        model.compile_blocks()


class _Trial:
    """Each rank remembers its own times; the decision is made by those of the slowest, which all ranks know."""

    def __init__(self, model: GPT, config: Config, micro_batch: int, work: RemainingWork, world: World) -> None:
        self._train = config.train
        self._work = work
        self._world = world
        self._block = _BlockTimer(model, micro_batch)
        machine = f"{cpu_name()} ({platform.machine()})"
        threads = torch.get_num_threads()
        self._key = key(machine, str(torch.__version__), threads, world.local_size, config.model, micro_batch)

    def run(self) -> ComputeChoice:
        file = trials_file()
        known = recall(file, self._key)
        mine = known or BlockTimes(plain_s=self._block.seconds(torch.float32))
        if self._train.precision == "auto" and not self._all(mine.bf16_s < NEVER):
            mine = replace(mine, bf16_s=self._try_bf16())
        mine, is_paid = self._maybe_compile(mine)
        if mine != known and self._world.is_node_main:
            remember(file, self._key, mine)
        return decide(self._train, self._worst(mine), self._work, is_paid)

    def _maybe_compile(self, mine: BlockTimes) -> tuple[BlockTimes, bool]:
        worst = self._worst(mine)
        wanted = self._train.compile == "auto" and may_pay(worst, self._work)
        # Where one rank was never asked before, all try: it is the slowest of them together that counts.
        everyone_tried = -worst_over_world(self._world, [-mine.tried])[0]
        if not wanted or everyone_tried or not self._all(has_compiler()):
            return mine, False
        precision = torch.bfloat16 if worst.favour_bf16 and self._train.precision == "auto" else torch.float32
        compile_s, compiled_s = self._block.compiled(precision)
        barrier(self._world, timeout_s=_COMPILE_TIMEOUT_S)
        return replace(mine, compiled_s=compiled_s, compile_s=compile_s, tried=1.0), True

    def _try_bf16(self) -> float:
        """On a processor without instructions for it a block would take minutes: one product tells."""
        with_bf16, without = (matmul_gflops(kind, _PEAK_S) for kind in (torch.bfloat16, torch.float32))
        return self._block.seconds(torch.bfloat16) if with_bf16 > without else NEVER

    def _worst(self, mine: BlockTimes) -> BlockTimes:
        return BlockTimes(*worst_over_world(self._world, mine.as_list()))

    def _any(self, fact: bool) -> bool:
        return worst_over_world(self._world, [float(fact)])[0] > 0

    def _all(self, fact: bool) -> bool:
        return not self._any(not fact)


class _BlockTimer:
    def __init__(self, model: GPT, micro_batch: int) -> None:
        block = model.blocks[0]
        assert isinstance(block, Block)  # noqa: S101 - a list of modules does not say so
        self._block = block
        shape = (micro_batch, model.config.seq_len, model.config.width)
        chance = torch.Generator().manual_seed(0)
        self._input = torch.randn(shape, generator=chance, requires_grad=True)
        self._slope = torch.randn(shape, generator=chance)

    def seconds(self, precision: torch.dtype) -> float:
        """After one that does not count."""
        self._run(precision)
        times: list[float] = []
        until = time.perf_counter() + _BUDGET_S
        while len(times) < 2 or (len(times) < _RUNS and time.perf_counter() < until):
            began = time.perf_counter()
            self._run(precision)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def compiled(self, precision: torch.dtype) -> tuple[float, float]:
        """Seconds to compile, and of the compiled block; infinite where compiling fails, for whatever reason."""
        _prepare_compiler()
        began = time.perf_counter()
        try:
            self._block.compile(dynamic=False)
            self._run(precision)
            return time.perf_counter() - began, self.seconds(precision)
        except Exception as error:
            print(f"compiling was given up: {type(error).__name__}: {error}")
            return time.perf_counter() - began, NEVER
        finally:
            self._block._compiled_call_impl = None

    def _run(self, precision: torch.dtype) -> None:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            out = self._block(self._input)
        # Not backward: that would leave gradients in the parameters.
        torch.autograd.grad(out, [self._input, *self._block.parameters()], self._slope)


def has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _prepare_compiler() -> None:
    """Without the pool of processes that would compile parts at once: each imports torch, and outlives its use."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    # Of torch's own parts, about each other.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
