"""Measure the compute speed of this machine: its peaks, a small GPT, and one rank of a given model phase by phase."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.config.profile import SMALL_GPT, Precision
from shoal.config.schema import ModelConfig
from shoal.cost.machines import Roofline
from shoal.cost.model_size import flops_per_token, intensity, parameter_count
from shoal.engine.update import clip_divisor, clip_gradients, gradient_norm
from shoal.host.topology import this_topology
from shoal.model.gpt import GPT
from shoal.model.kernels import prefer_blas
from shoal.sync.compression.base import from_half, to_half
from shoal.sync.step_stats import Mark, mark, seconds_between
from shoal.train.gpu_speed import await_event, multiply_in_tf32

_CPU = torch.device("cpu")
_PHASES = ("forward", "backward", "optimizer")
_CLIP = 1.0
# Parameters of one of DDP's buckets.
_BUCKET_PARAMETERS = 25 * 2**20 // 4
_MIN_MODEL_RUNS = 3
_MICRO_BATCH_GROWTH = 2
# A GPU repeats well, but each new shape costs it half a second. Small micro-batches, which only wait for the processor,
# tell nothing about large ones there: few sizes, few runs, and time enough for the largest.
_GPU_GROWTH, _MAX_GPU_RUNS, _MIN_GPU_S = 4, 5, 5.0
_MAX_MICRO_BATCH = 64

_SEQUENCES = 8
_TOKENS = _SEQUENCES * SMALL_GPT.seq_len
# The first square matrix is small: bf16 is a hundred times slower than fp32 on a CPU without instructions for it.
_MIN_MATRIX_SIDE = 128
_MAX_MATRIX_SIDE = 4096
_LARGE_MATRIX_SIDE = 1024  # a tenth of a second on a core of 20 GFLOP/s
# The matrix grows until a product takes this long: in short products, starting threads dominates.
_MIN_PRODUCT_S = 0.1
# Larger than any cache.
_COPY_BYTES = 128 << 20
_MIN_RUNS = 2
# Parts of the time for each matrix peak and for the copy; the rest is for training steps.
_PEAK_PART = 0.15
_COPY_PART = 0.1
# How often peaks are measured again that a training has exceeded.
_MOST_REPEATS = 2


@dataclass
class OptimizerTimer:
    """Runs clipping and AdamW as a training does.

    Calls the kernel of `AdamW(fused=True)` directly: the first optimizer object of a process imports torch's compiler,
    which takes seconds.
    """

    parameters: list[Tensor]
    _means: list[Tensor] = field(init=False)
    _squares: list[Tensor] = field(init=False)
    _steps: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._means, self._squares = ([torch.zeros_like(weight) for weight in self.parameters] for _ in range(2))
        self._steps = [torch.zeros((), device=weight.device) for weight in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        norm = gradient_norm(self.parameters)
        on_gpu: dict[str, Tensor] = {}
        if norm.is_cuda:
            # As in a training: the GPU itself clips and decides.
            on_gpu = {"grad_scale": clip_divisor(norm, _CLIP), "found_inf": (~norm.isfinite()).float()}
        else:
            clip_gradients(self.parameters, float(norm), _CLIP)
        # Without counting, the first correction would divide by zero: a GPU multiplies such numbers faster.
        torch._foreach_add_(self._steps, 1)
        torch._fused_adamw_(
            self.parameters,
            [weight.grad for weight in self.parameters if weight.grad is not None],
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
            **on_gpu,
        )
        for weight in self.parameters:
            weight.grad = None


def measure_fp16_conversion_s(budget_s: float) -> float:
    """Measure the seconds per parameter to convert a bucket of gradients to fp16 and the sum back to fp32.

    Uses random numbers like gradients: where numbers are converted one by one, equal ones take half the time.
    """
    bucket = 1e-3 * torch.randn(_BUCKET_PARAMETERS)
    half = torch.empty_like(bucket, dtype=torch.float16)
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < _MIN_MODEL_RUNS or time.perf_counter() < deadline:
        began = time.perf_counter()
        from_half(to_half(bucket, half), bucket)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / _BUCKET_PARAMETERS


class ModelTimer:
    """Times one model on one rank, with the threads that a run gives it, or on its GPU."""

    def __init__(self, model: ModelConfig, device: torch.device = _CPU, precision: Precision = "fp32") -> None:
        # A training does the same.
        prefer_blas()
        self._config = model
        self._device = device
        self._model = GPT(model).to(device)
        if precision == "bf16":
            self._model.matmul_dtype = torch.bfloat16
        elif device.type == "cuda":
            multiply_in_tf32()
        self._updates = OptimizerTimer(list(self._model.parameters()))
        self._last_s = 0.0

    def measure(self, budget_s: float) -> Iterator[dict[str, float]]:
        """Yield the times of growing micro-batches, as many as fit into the time, and into the memory of a GPU."""
        try:
            if self._device.type == "cuda":
                # The first step compiles kernels, for seconds that no later step takes.
                self._run(self._tokens(1))
            yield from self._measure_sizes(budget_s)
        except torch.cuda.OutOfMemoryError:
            self._model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()

    def _measure_sizes(self, budget_s: float) -> Iterator[dict[str, float]]:
        is_gpu = self._device.type == "cuda"
        growth = _GPU_GROWTH if is_gpu else _MICRO_BATCH_GROWTH
        deadline = time.perf_counter() + (max(budget_s, _MIN_GPU_S) if is_gpu else budget_s)
        size = 1
        while size <= _MAX_MICRO_BATCH:
            began = time.perf_counter()
            # A quarter of the time left: each micro-batch is larger than the last, and needs as many runs.
            yield {"micro_batch": size, **self._measure_phases(size, (deadline - began) / 4)}
            if deadline - time.perf_counter() < growth * (1 + _MIN_MODEL_RUNS) * self._last_s:
                return
            size *= growth

    def _measure_phases(self, micro_batch: int, budget_s: float) -> dict[str, float]:
        tokens = self._tokens(micro_batch)
        self._run(tokens)
        runs: list[dict[str, float]] = []
        deadline = time.perf_counter() + budget_s
        most = _MAX_GPU_RUNS if self._device.type == "cuda" else math.inf
        while len(runs) < _MIN_MODEL_RUNS or (time.perf_counter() < deadline and len(runs) < most):
            runs.append(self._run(tokens))
        medians = {f"{name}_s": statistics.median(run[name] for run in runs) for name in _PHASES}
        whole = [run["forward"] + run["backward"] for run in runs]
        self._last_s = statistics.median(whole)
        return {**medians, "spread": statistics.pstdev(whole) / statistics.mean(whole)}

    def _tokens(self, micro_batch: int) -> Tensor:
        return torch.randint(self._config.vocab_size, (micro_batch, self._config.seq_len), device=self._device)

    def _run(self, tokens: Tensor) -> dict[str, float]:
        marks = [mark(self._device)]
        loss = self._model(tokens, tokens) / tokens.numel()
        marks.append(mark(self._device))
        loss.backward()
        marks.append(mark(self._device))
        self._updates.step()
        marks.append(mark(self._device))
        _await_mark(marks[-1])
        return {
            name: seconds_between(before, after) for name, before, after in zip(_PHASES, marks, marks[1:], strict=False)
        }


def _await_mark(moment: Mark) -> None:
    if not isinstance(moment, float):
        await_event(moment, "a training step")


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4 … and `cores`."""
    counts = []
    count = 1
    while count < cores:
        counts.append(count)
        count *= 2
    return [*counts, cores]


class ComputePeaks:
    def __init__(self) -> None:
        prefer_blas()
        self.cores = this_topology().usable
        self._step = _make_step()

    def measure(self, budget_s: float) -> dict[str, Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.cores)
        try:
            peaks = _measure_peaks(budget_s)
            counts = thread_counts(self.cores)
            count_s = (1 - 2 * _PEAK_PART - _COPY_PART) * budget_s / len(counts)
            training = [self._train(count, count_s) for count in counts]
            for _ in range(_MOST_REPEATS):
                roof = Roofline(peaks["fp32_gflops"], peaks["memory_gbytes_per_s"])
                if all(roof.is_plausible(point["gflops"]) for point in training):
                    break
                # Another program had the processor during the products, or while their size was chosen: each peak is
                # the best that was seen.
                torch.set_num_threads(self.cores)
                again = _measure_peaks(budget_s, _LARGE_MATRIX_SIDE)
                peaks = {name: max(peaks[name], again[name]) for name in peaks}
            return {
                **peaks,
                "threads": self.cores,
                "parameters": parameter_count(SMALL_GPT),
                "tokens_per_step": _TOKENS,
                "intensity": intensity(SMALL_GPT, _TOKENS),
                "training": training,
            }
        finally:
            torch.set_num_threads(before)

    def _train(self, threads: int, budget_s: float) -> dict[str, float]:
        torch.set_num_threads(threads)
        tokens_per_s = _TOKENS / statistics.median(_times(self._step, budget_s))
        gflops = 1e-9 * flops_per_token(SMALL_GPT) * tokens_per_s
        return {"threads": threads, "tokens_per_s": tokens_per_s, "gflops": gflops}


def _make_step() -> Callable[[], None]:
    """Return a function that does one training step of a small GPT."""
    shape = (_SEQUENCES, SMALL_GPT.seq_len)
    tokens = torch.randint(SMALL_GPT.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    model = GPT(SMALL_GPT)
    updates = OptimizerTimer(list(model.parameters()))

    def step() -> None:
        (model(tokens, tokens) / _TOKENS).backward()
        updates.step()

    return step


def _measure_peaks(budget_s: float, least_side: int = _MIN_MATRIX_SIDE) -> dict[str, float]:
    return {
        "fp32_gflops": matmul_gflops(torch.float32, _PEAK_PART * budget_s, least_side),
        "bf16_gflops": matmul_gflops(torch.bfloat16, _PEAK_PART * budget_s),
        "memory_gbytes_per_s": _copy_gbytes_per_s(_COPY_PART * budget_s),
    }


def matmul_gflops(dtype: torch.dtype, budget_s: float, least_side: int = _MIN_MATRIX_SIDE) -> float:
    """Return the best of several products of square matrices that are large enough to keep every thread busy."""
    side = least_side
    while side < _MAX_MATRIX_SIDE and 8 * min(_times(_product(side, dtype), 0.0)) < _MIN_PRODUCT_S:
        side *= 2
    return 2e-9 * side**3 / min(_times(_product(side, dtype), budget_s))


def _product(side: int, dtype: torch.dtype) -> Callable[[], object]:
    left, right = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _copy_gbytes_per_s(budget_s: float) -> float:
    """Measure the memory bandwidth. Bytes read and bytes written both count."""
    source, target = torch.ones(_COPY_BYTES // 4), torch.ones(_COPY_BYTES // 4)
    return 2e-9 * _COPY_BYTES / min(_times(lambda: target.copy_(source), budget_s))


def _times(call: Callable[[], object], budget_s: float) -> list[float]:
    """Time as many calls as fit into `budget_s`, after one that does not count."""
    call()
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < _MIN_RUNS or time.perf_counter() < deadline:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times
