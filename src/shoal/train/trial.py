"""Tries on one block of the model how this machine computes it best. Every rank takes part, and all choose the same.

One block stands for all of them: it is a twelfth of GPT-2's time, all blocks share what is compiled for one, and its
gradients are thrown away, so that neither DDP nor the training sees anything of it.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from shoal.config.schema import Config
from shoal.control.machine import cpu_name
from shoal.events import Event, read_events
from shoal.model.gpt import GPT, Block
from shoal.model.kernels import prefer_blas
from shoal.runfolder import RunFolder
from shoal.sync.exchange import worst_over_world
from shoal.sync.replicas import tell_all
from shoal.sync.world import World, barrier
from shoal.train import memory
from shoal.train.peaks import matmul_gflops
from shoal.train.tuning import NEVER, Choice, Times, Work, decide, key, may_pay, settled

_RUNS = 5
# At least two runs, and then as many as fit into this.
_BUDGET_S = 1.0
_PEAK_S = 0.02
# Compiling takes a slow machine minutes; the others wait for it here, and not in an exchange.
_COMPILE_TIMEOUT_S = 600.0


def choose(model: GPT, config: Config, micro_batch: int, work: Work, world: World) -> Choice:
    """Settings that leave nothing open, and runs too short to gain, are answered without a trial."""
    choice = settled(config.train, world.device.type == "cpu", work)
    if choice is not None:
        return choice
    trial = _Trial(model, config, micro_batch, work, world)
    return trial.run()


def earlier_choice(run: RunFolder, world: World) -> Choice | None:
    """What the run chose when it began, by rank 0's own events: another choice would round otherwise, and a resumed run
    would not be the same to the bit. None where nothing is known, or it cannot be done any more."""
    known = _last_start(run.events(0)) if world.is_main else {}
    precision = known.get("precision")
    said, compiled, bf16 = tell_all(world, 0, [precision is not None, bool(known.get("compiled")), precision == "bf16"])
    cannot = worst_over_world(world, [float(bool(compiled) and not has_compiler())])[0]
    if not said or cannot:
        return None
    return Choice(bool(compiled), "bf16" if bf16 else "fp32", "as when the run began")


def _last_start(events: Path) -> Event:
    try:
        starts = [event for event in read_events(events) if event["event"] == "start"]
    except OSError:
        return {}
    return starts[-1] if starts else {}


def apply(choice: Choice, model: GPT) -> None:
    if choice.precision == "bf16":
        model.products = torch.bfloat16
    else:
        prefer_blas()
    if choice.compiled:
        _prepare_compiler()
        model.compile_blocks()


class _Trial:
    """Each rank remembers its own times; the decision is made by those of the slowest, which all ranks know."""

    def __init__(self, model: GPT, config: Config, micro_batch: int, work: Work, world: World) -> None:
        self._train = config.train
        self._work = work
        self._world = world
        self._block = _BlockTimer(model, micro_batch)
        machine = f"{cpu_name()} ({platform.machine()})"
        threads = torch.get_num_threads()
        self._key = key(machine, str(torch.__version__), threads, world.local_size, config.model, micro_batch)

    def run(self) -> Choice:
        file = memory.trials_file()
        known = memory.recall(file, self._key)
        mine = known or Times(plain_s=self._block.seconds(torch.float32))
        if self._train.precision == "auto" and not self._all(mine.bf16_s < NEVER):
            mine = replace(mine, bf16_s=self._try_bf16())
        mine, is_paid = self._maybe_compile(mine)
        if mine != known and self._world.is_node_main:
            memory.remember(file, self._key, mine)
        return decide(self._train, self._worst(mine), self._work, is_paid)

    def _maybe_compile(self, mine: Times) -> tuple[Times, bool]:
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

    def _worst(self, mine: Times) -> Times:
        return Times(*worst_over_world(self._world, mine.as_list()))

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
