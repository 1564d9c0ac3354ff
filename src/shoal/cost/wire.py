"""Wire formats: how many bytes of a gradient travel, and what making them takes."""

from __future__ import annotations

from shoal.cost.lever import Lever
from shoal.cost.workload import Workload

# Seconds of one thread for each parameter, there and back, measured for 124M parameters between two ranks (see
# docs/results.md): fp16 in torch on x86 (our kernel on an ARM core takes half of it), the others by our kernels.
THREAD_S = {"fp32": 0.0, "fp16": 0.15 / 124e6, "bf16": 0.27 / 124e6, "int8": 0.3 / 124e6, "powersgd": 0.71 / 124e6}
# Bytes of memory that each parameter crosses on the way, which is what takes the time on a GPU.
MEMORY_BYTES = {"fp32": 0, "fp16": 12, "bf16": 12, "int8": 30, "powersgd": 40}

_INT8_BLOCK = 256
_FLOAT_BYTES = 4
_ELEMENT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1 + _FLOAT_BYTES / _INT8_BLOCK}


def is_encoded(lever: Lever, workload: Workload) -> bool:
    """Gradients that are halves already gain nothing from being sent as halves."""
    return lever.wire == "powersgd" or _ELEMENT_BYTES[lever.wire] < workload.gradient_bytes


def bytes_per_parameter(lever: Lever, workload: Workload) -> float:
    """On average over the model: of PowerSGD's factors, those of all matrices, and the vectors as they are."""
    if lever.wire == "powersgd":
        return workload.gradient_bytes * _low_rank_part(lever.rank, workload)
    return min(float(workload.gradient_bytes), _ELEMENT_BYTES[lever.wire])


def element_bytes(lever: Lever, workload: Workload) -> int:
    """Of what is added up on the way."""
    return workload.gradient_bytes if lever.wire == "powersgd" else int(bytes_per_parameter(lever, workload))


def cpu_encode_s(lever: Lever, parameters: int, threads: float) -> float:
    """There and back; every thread takes its part."""
    return THREAD_S[lever.wire] * parameters / threads


def _low_rank_part(rank: int, workload: Workload) -> float:
    """A matrix of n by m travels as rank·(n+m) numbers, unless that is more."""
    shape, width = workload.shape, workload.shape.width
    block = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    matrices = [*block * shape.layers, (shape.vocab_size, width), (shape.seq_len, width)]
    whole = sum(rows * columns for rows, columns in matrices)
    low = sum(min(rows * columns, rank * (rows + columns)) for rows, columns in matrices)
    vectors = 13 * width * shape.layers + 2 * width
    return (low + vectors) / (whole + vectors)
