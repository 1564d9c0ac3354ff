"""Measure a GPU: products of matrices, its memory, and copies between it and the processor's memory.

All times are between two events in the GPU's queue, and every wait has a deadline. A ROCm build of torch has the same
functions under the same names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shoal.errors import RunFailed
from shoal.sync.world import gpu_runtime

_TIMEOUT_S = 60.0
_POLL_S = 2e-5

# A product must take this long: the launch of a shorter one shows.
_MIN_PRODUCT_S = 1e-3
_MIN_SIDE, _MAX_SIDE = 1024, 8192
_COPY_BYTES = 1 << 30
_TRANSFER_BYTES = 256 << 20
# The most of the free memory that a measurement takes, all its buffers together.
_MEMORY_PART = 0.25
# Calls between two events, so that the gap before the first does not count.
_CALLS = 5
_MIN_RUNS = 3


def multiply_in_tf32() -> None:
    """Round the factors of fp32 products to TF32 on GPUs that have it: three to eight times as fast, with the range of
    fp32 and 11 bits of precision."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def await_event(event: torch.cuda.Event, what: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Wait until the GPU's queue has reached the event."""
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            raise RunFailed(
                f"the GPU did not finish {what} within {timeout_s:.0f} s",
                why="another program keeps it busy, or its driver hangs",
                fix="look at it: nvidia-smi (AMD: rocm-smi), and at the kernel's messages: sudo dmesg | tail",
            )
        time.sleep(_POLL_S)


def time_on_gpu(call: Callable[[], object], calls: int = 1, what: str = "a measurement") -> float:
    """Return the seconds of one of `calls` calls in a row, from the first one's start on the GPU to the last one's
    end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    await_event(end, what)
    return float(begin.elapsed_time(end)) / 1e3 / calls


def measure_card(device: torch.device, budget_s: float) -> dict[str, Any]:
    """Return the figures of a `GpuProfile`. Raise `torch.cuda.OutOfMemoryError` where other programs fill the card."""
    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    part_s = budget_s / 8
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {
        "name": torch.cuda.get_device_name(device),
        "runtime": gpu_runtime(),
        "memory_bytes": memory_bytes,
        "bf16_tflops": _matmul_tflops(device, torch.bfloat16, "ieee", part_s) if has_bf16 else None,
        "tf32_tflops": _matmul_tflops(device, torch.float32, "tf32", part_s),
        "fp32_tflops": _matmul_tflops(device, torch.float32, "ieee", part_s),
        "memory_gbytes_per_s": _copy_gbytes_per_s(device, _bytes_for(_COPY_BYTES, free_bytes), part_s),
        **_transfer_rates(device, _bytes_for(_TRANSFER_BYTES, free_bytes), part_s),
    }


def _matmul_tflops(device: torch.device, dtype: torch.dtype, precision: str, budget_s: float) -> float:
    """Return the rate of one large product of random numbers: zeros need less power, and are multiplied faster."""
    with _fp32_precision(precision):
        side = _MIN_SIDE
        while True:
            left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(left)
            product = partial(torch.mm, left, right, out=out)
            once_s = _median_s(product, 0.0)
            if side == _MAX_SIDE or once_s >= _MIN_PRODUCT_S:
                break
            side *= 2
        return 2e-12 * side**3 / _median_s(product, budget_s)


@contextmanager
def _fp32_precision(name: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _copy_gbytes_per_s(device: torch.device, size: int, budget_s: float) -> float:
    """Measure the card's memory bandwidth. Bytes read and bytes written both count."""
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2e-9 * size / _median_s(lambda: target.copy_(source), budget_s)


def _transfer_rates(device: torch.device, size: int, budget_s: float) -> dict[str, float]:
    """Measure copies to the card and from it: pinned pages by DMA, others by a detour through the driver's buffers."""
    on_gpu = torch.ones(size, dtype=torch.uint8, device=device)
    rates = {}
    for is_pinned, suffix in ((True, ""), (False, "_pageable")):
        # Written once, so that the kernel has given it pages.
        host = torch.ones(size, dtype=torch.uint8)
        host = host.pin_memory() if is_pinned else host
        for name, target, source in (("to_gpu", on_gpu, host), ("from_gpu", host, on_gpu)):
            seconds = _median_s(partial(target.copy_, source, non_blocking=True), budget_s, calls=1)
            rates[f"{name}{suffix}_gbytes_per_s"] = 1e-9 * size / seconds
    return rates


def _median_s(call: Callable[[], object], budget_s: float, calls: int = _CALLS) -> float:
    """Return the median time of as many rounds of calls as fit into `budget_s`, after one that does not count."""
    time_on_gpu(call)
    times: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(times) < _MIN_RUNS or time.perf_counter() < deadline:
        times.append(time_on_gpu(call, calls))
    return statistics.median(times)


def _bytes_for(wanted: int, free_bytes: int) -> int:
    """Return the size of one of two buffers."""
    return max(1 << 20, min(wanted, int(_MEMORY_PART * free_bytes / 2)))
