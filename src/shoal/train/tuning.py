"""Whether compiling the blocks, or multiplying in bf16, is worth it here: the decision, by measured times. Pure.

Both win on some machines and lose on others, and compiling costs half a minute before the first step. So one block is
tried (`train/trial.py`), the times are remembered for this machine and model (`train/memory.py`), and this decides.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Literal

from shoal.config.schema import ModelConfig, TrainConfig
from shoal.cost.work import flops_per_token
from shoal.units import format_duration

Precision = Literal["fp32", "bf16"]

# What compiling a block takes without any cache on a slow machine; once tried, the measured time counts.
COLD_S = 60.0
# The most that compiling has been seen to save of a block: what cannot pay even then is not tried.
_HOPED = 0.35
# A machine slower than this would gain from a trial that we leave out; none such is known.
_SLOW_FLOPS = 5e9
# Below this a gain is not told from noise.
_LEAST_GAIN = 1.03
NEVER = math.inf


@dataclass(frozen=True)
class Work:
    """What the busiest rank has still to do: so often a block's forward and backward, so many operations in all."""

    blocks: int
    flops: float


@dataclass(frozen=True)
class Times:
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
        return self.bf16_s * _LEAST_GAIN < self.plain_s


@dataclass(frozen=True)
class Choice:
    """How the model computes, and the reason in words for the `start` event."""

    compiled: bool = False
    precision: Precision = "fp32"
    why: str = "as configured"


def work_left(model: ModelConfig, micro_batch: int, micro_batches: int, steps: int) -> Work:
    tokens = steps * micro_batches * micro_batch * model.seq_len
    return Work(steps * micro_batches * model.layers, flops_per_token(model) * tokens)


def settled(train: TrainConfig, is_cpu: bool, work: Work) -> Choice | None:
    """The choice that needs no trial: all is said, there is nothing known to try, or the run is too short for one."""
    said = Choice(train.compile == "on", "bf16" if train.precision == "bf16" else "fp32")
    if not is_cpu or "auto" not in (train.compile, train.precision):
        return said
    if train.compile != "on" and train.precision != "auto" and _HOPED * work.flops / _SLOW_FLOPS < 2 * COLD_S:
        return Choice(False, said.precision, "not compiled: the run is too short to gain from it")
    return None


def may_pay(times: Times, work: Work) -> bool:
    """Whether compiling could save more than twice what it takes, if it does here what it does at best."""
    return _HOPED * times.uncompiled_s * work.blocks > 2 * times.compile_s


def decide(train: TrainConfig, times: Times, work: Work, is_paid: bool) -> Choice:
    """`is_paid`: the trial has just compiled the block, so that using it costs nothing more."""
    takes_bf16 = train.precision == "bf16" or (train.precision == "auto" and times.favour_bf16)
    precision: Precision = "bf16" if takes_bf16 else "fp32"
    if train.compile != "auto":
        return Choice(train.compile == "on", precision, _say_precision(train, times))
    saved_s = (times.uncompiled_s - times.compiled_s) * work.blocks - (0.0 if is_paid else times.compile_s)
    compiled = saved_s > 0 and _gains(times)
    words = (_say_compiled(times, compiled), _say_precision(train, times))
    return Choice(compiled, precision, "; ".join(word for word in words if word))


def _gains(times: Times) -> bool:
    return times.compiled_s * _LEAST_GAIN < times.uncompiled_s


def _say_compiled(times: Times, compiled: bool) -> str:
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


def _say_precision(train: TrainConfig, times: Times) -> str:
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
