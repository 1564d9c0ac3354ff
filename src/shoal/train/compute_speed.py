"""What this machine computes: its peaks, and how much of them a small GPT makes use of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.config.profile import SMALL_GPT
from shoal.config.schema import ModelConfig
from shoal.cost.model_size import flops_per_token, intensity, parameter_count
from shoal.host.facts import physical_cores
from shoal.model.gpt import GPT
from shoal.model.kernels import prefer_blas
from shoal.sync.compression.base import from_half, to_half
from shoal.sync.gradients import clip

# SECTION train/pace
# How long a rank takes for a micro-batch and for the update, phase by phase, with the threads that a run gives it.


_PHASES = ("forward", "backward", "optimizer")
_PACE_LEAST_RUNS = 3
_GROWTH = 2
_MOST_MICRO_BATCH = 64
_CLIP = 1.0
# Parameters of one of DDP's buckets.
_BUCKET = 25 * 2**20 // 4


@dataclass
class OptimizerTimer:
    """AdamW and clipping as a training does them.

    By the kernel of `AdamW(fused=True)` alone: the first optimizer of a process imports torch's compiler, for seconds.
    """

    parameters: list[Tensor]
    _means: list[Tensor] = field(init=False)
    _squares: list[Tensor] = field(init=False)
    _steps: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._means, self._squares = ([torch.zeros_like(each) for each in self.parameters] for _ in range(2))
        self._steps = [torch.zeros(()) for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        clip(self.parameters, _CLIP)
        torch._fused_adamw_(
            self.parameters,
            [each.grad for each in self.parameters if each.grad is not None],
            self._means,
            self._squares,
            [],
            self._steps,
            lr=1e-4,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        for each in self.parameters:
            each.grad = None


def halving_s(budget_s: float) -> float:
    """Seconds a parameter to make fp16 of a bucket of gradients and fp32 of the sum.

    Of numbers like gradients: where this is done one by one, equal ones go through in half the time.
    """
    bucket = 1e-3 * torch.randn(_BUCKET)
    half = torch.empty_like(bucket, dtype=torch.float16)
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < _PACE_LEAST_RUNS or time.perf_counter() < until:
        began = time.perf_counter()
        from_half(to_half(bucket, half), bucket)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / _BUCKET


class ModelTimer:
    """One model on one rank. `measure` gives the times of growing micro-batches, as many as fit into the time."""

    def __init__(self, model: ModelConfig) -> None:
        # As a training does.
        prefer_blas()
        self._config = model
        self._model = GPT(model)
        self._updates = OptimizerTimer(list(self._model.parameters()))
        self._last_s = 0.0

    def measure(self, budget_s: float) -> Iterator[dict[str, float]]:
        deadline = time.perf_counter() + budget_s
        size = 1
        while size <= _MOST_MICRO_BATCH:
            began = time.perf_counter()
            # A quarter of what is left: each one is twice as large as the last, and needs as many runs.
            yield {"micro_batch": size, **self._timed(size, (deadline - began) / 4)}
            if deadline - time.perf_counter() < _GROWTH * (1 + _PACE_LEAST_RUNS) * self._last_s:
                return
            size *= _GROWTH

    def _timed(self, micro_batch: int, budget_s: float) -> dict[str, float]:
        tokens = torch.randint(self._config.vocab_size, (micro_batch, self._config.seq_len))
        self._run(tokens)
        runs: list[dict[str, float]] = []
        until = time.perf_counter() + budget_s
        while len(runs) < _PACE_LEAST_RUNS or time.perf_counter() < until:
            runs.append(self._run(tokens))
        medians = {f"{name}_s": statistics.median(run[name] for run in runs) for name in _PHASES}
        whole = [run["forward"] + run["backward"] for run in runs]
        self._last_s = statistics.median(whole)
        return {**medians, "spread": statistics.pstdev(whole) / statistics.mean(whole)}

    def _run(self, tokens: Tensor) -> dict[str, float]:
        marks = [time.perf_counter()]
        loss = self._model(tokens, tokens) / tokens.numel()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self._updates.step()
        marks.append(time.perf_counter())
        return {name: after - before for name, before, after in zip(_PHASES, marks, marks[1:], strict=False)}


SEQUENCES = 8
TOKENS = SEQUENCES * SMALL_GPT.seq_len

# Small, because bf16 is a hundred times slower than fp32 on a CPU that has no instructions for it.
_FIRST_SIDE = 128
_MOST_SIDE = 4096
# The largest product that is quicker than this: small ones are mostly starting threads.
_PRODUCT_S = 0.1
# Larger than any cache there is.
_COPY_BYTES = 128 << 20
_LEAST_RUNS = 2

_PEAK_PART = 0.15
_COPY_PART = 0.1


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 … and all of them."""
    counts = []
    count = 1
    while count < cores:
        counts.append(count)
        count *= 2
    return [*counts, cores]


class ComputePeaks:
    def __init__(self) -> None:
        prefer_blas()
        self.cores = physical_cores()
        self._step = make_step()

    def measure(self, budget_s: float) -> dict[str, Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.cores)
        try:
            peaks = {
                "fp32_gflops": matmul_gflops(torch.float32, _PEAK_PART * budget_s),
                "bf16_gflops": matmul_gflops(torch.bfloat16, _PEAK_PART * budget_s),
                "memory_gbytes_per_s": copy_gbytes_per_s(_COPY_PART * budget_s),
            }
            counts = thread_counts(self.cores)
            each_s = (1 - 2 * _PEAK_PART - _COPY_PART) * budget_s / len(counts)
            return {
                **peaks,
                "threads": self.cores,
                "parameters": parameter_count(SMALL_GPT),
                "tokens_per_step": TOKENS,
                "intensity": intensity(SMALL_GPT, TOKENS),
                "training": [self._train(count, each_s) for count in counts],
            }
        finally:
            torch.set_num_threads(before)

    def _train(self, threads: int, budget_s: float) -> dict[str, float]:
        torch.set_num_threads(threads)
        tokens_per_s = TOKENS / statistics.median(_times(self._step, budget_s))
        gflops = 1e-9 * flops_per_token(SMALL_GPT) * tokens_per_s
        return {"threads": threads, "tokens_per_s": tokens_per_s, "gflops": gflops}


def make_step() -> Callable[[], None]:
    """Forward, backward, and the update that a training makes."""
    shape = (SEQUENCES, SMALL_GPT.seq_len)
    tokens = torch.randint(SMALL_GPT.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    model = GPT(SMALL_GPT)
    updates = OptimizerTimer(list(model.parameters()))

    def step() -> None:
        (model(tokens, tokens) / TOKENS).backward()
        updates.step()

    return step


def matmul_gflops(dtype: torch.dtype, budget_s: float) -> float:
    """The best of several, on squares large enough to keep every thread busy: a peak is what can be reached."""
    side = _FIRST_SIDE
    while side < _MOST_SIDE and 8 * min(_times(_product(side, dtype), 0.0)) < _PRODUCT_S:
        side *= 2
    return 2e-9 * side**3 / min(_times(_product(side, dtype), budget_s))


def _product(side: int, dtype: torch.dtype) -> Callable[[], object]:
    one, other = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
    out = torch.empty_like(one)
    return lambda: torch.mm(one, other, out=out)


def copy_gbytes_per_s(budget_s: float) -> float:
    """Read and written bytes both count."""
    source, target = torch.ones(_COPY_BYTES // 4), torch.ones(_COPY_BYTES // 4)
    return 2e-9 * _COPY_BYTES / min(_times(lambda: target.copy_(source), budget_s))


def _times(call: Callable[[], object], budget_s: float) -> list[float]:
    return list(_timed(call, budget_s))


def _timed(call: Callable[[], object], budget_s: float) -> Iterator[float]:
    """After one that does not count, as many as fit, but a few at least."""
    call()
    deadline, runs = time.perf_counter() + budget_s, 0
    while runs < _LEAST_RUNS or time.perf_counter() < deadline:
        began = time.perf_counter()
        call()
        yield time.perf_counter() - began
        runs += 1
