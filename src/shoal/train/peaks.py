"""What this machine computes: its peaks, and how much of them a small GPT makes use of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shoal.config.profile import SMALL_GPT
from shoal.control.machine import physical_cores
from shoal.cost.sizes import parameter_count
from shoal.cost.work import flops_per_token, intensity
from shoal.model.gpt import GPT
from shoal.model.kernels import prefer_blas
from shoal.train.pace import Updates

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


class Machine:
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
    updates = Updates(list(model.parameters()))

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
