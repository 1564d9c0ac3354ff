"""Encodes blocks of 256 numbers as bytes: bf16, and int8 with a scale per block and error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.cost.model_size import BLOCK, RECORD_BYTES, blocks_of
from shoal.sync.compression.native import Kernels
from shoal.sync.compression.reduce_scatter import Codec

_STEPS = 1 / 127
# Below it, one divided by the scale would overflow.
_LEAST = 1e-35
# 1.5·2^23: adding and subtracting it rounds to the nearest whole number, ties to even.
_ROUNDER = 12582912.0


class Bf16:
    """The upper half of a float: its range, and 8 bits of precision. The owner adds in fp32 and rounds once."""

    record_bytes = RECORD_BYTES["bf16"]
    keeps_residual = False

    def encode(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        _as_bf16(records, gradient.numel()).copy_(gradient)

    def reduce(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        for other in others:
            gradient.add_(_as_bf16(other, gradient.numel()))
        _as_bf16(records, gradient.numel()).copy_(gradient)

    def decode(self, records: Tensor, gradient: Tensor) -> None:
        gradient.copy_(_as_bf16(records, gradient.numel()))


def _as_bf16(records: Tensor, count: int) -> Tensor:
    return records.view(-1).view(torch.bfloat16)[:count]


class NativeBf16:
    """`Bf16` in one pass over memory."""

    record_bytes = RECORD_BYTES["bf16"]
    keeps_residual = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.decode = kernels.bf16_decode

    def encode(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        self._kernels.bf16_reduce(gradient, (), records)

    def reduce(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        self._kernels.bf16_reduce(gradient, others, records)


class Int8:
    """A block is a float scale, its largest number ÷ 127, and one byte per number, as a multiple of the scale.

    The rounding error is kept in the residual and added in the next step. A block with a number that is not finite
    travels with a scale of NaN, so that decoding or adding it gives NaN. Its residual stays as it was.
    """

    record_bytes = RECORD_BYTES["int8"]
    keeps_residual = True

    def __init__(self) -> None:
        self._scratch = torch.empty(2, 0)

    def encode(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        self._pack(self._padded(gradient, residual), residual, records)

    def reduce(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        values = self._padded(gradient, residual)
        for other in others:
            values.add_(_unpack(other, self._blocks(1, len(records))))
        self._pack(values, residual, records)

    def decode(self, records: Tensor, gradient: Tensor) -> None:
        values = _unpack(records, self._blocks(1, len(records)))
        gradient.copy_(values.view(-1)[: gradient.numel()])

    def _padded(self, gradient: Tensor, residual: Tensor) -> Tensor:
        values = self._blocks(0, blocks_of(gradient.numel()))
        flat = values.view(-1)
        torch.add(gradient, residual, out=flat[: gradient.numel()])
        flat[gradient.numel() :] = 0
        return values

    def _pack(self, values: Tensor, residual: Tensor, records: Tensor) -> None:
        rounded = self._blocks(1, len(records))
        largest = torch.abs(values, out=rounded).amax(dim=1, keepdim=True)
        finite = largest.isfinite()
        scale = torch.where(largest > _LEAST, largest * _STEPS, 0.0)
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        torch.mul(values, inverse, out=rounded).add_(_ROUNDER).sub_(_ROUNDER)
        if not finite.all():
            rounded.masked_fill_(~finite, 0.0)
        records[:, :BLOCK].copy_(rounded)
        _scales(records).copy_(scale.masked_fill(~finite, float("nan")))
        error = torch.sub(values, rounded.mul_(scale), out=rounded).view(-1)[: residual.numel()]
        if finite.all():
            residual.copy_(error)
        else:
            is_kept = finite.expand(-1, BLOCK).reshape(-1)[: residual.numel()]
            residual.copy_(torch.where(is_kept, error, residual))

    def _blocks(self, which: int, count: int) -> Tensor:
        """Return scratch memory, allocated once for the longest range."""
        if self._scratch.shape[1] < count * BLOCK:
            self._scratch = torch.empty(2, count * BLOCK)
        return self._scratch[which, : count * BLOCK].view(count, BLOCK)


def _unpack(records: Tensor, into: Tensor) -> Tensor:
    return into.copy_(records[:, :BLOCK]).mul_(_scales(records))


def _scales(records: Tensor) -> Tensor:
    """Return the last four bytes of each record as floats."""
    return records.view(torch.float32)[:, -1:]


class NativeInt8:
    """`Int8` in one pass over memory instead of ten."""

    record_bytes = RECORD_BYTES["int8"]
    keeps_residual = True

    def __init__(self, kernels: Kernels) -> None:
        self.encode = kernels.int8_encode
        self.reduce = kernels.int8_reduce
        self.decode = kernels.int8_decode


def bf16_codec(kernels: Kernels | None) -> Codec:
    return Bf16() if kernels is None or not _gives_same_bits(NativeBf16(kernels), Bf16()) else NativeBf16(kernels)


def int8_codec(kernels: Kernels | None) -> Codec:
    return Int8() if kernels is None or not _gives_same_bits(NativeInt8(kernels), Int8()) else NativeInt8(kernels)


def _gives_same_bits(native: Codec, plain: Codec) -> bool:
    """Compare two codecs on a small example: some compilers round differently in spite of their options."""
    results = []
    for codec in (native, plain):
        gradient = torch.linspace(-1.7, 3.1, 3 * BLOCK - 5) ** 5
        residual = gradient.flip(0) / 300
        records, reduced = torch.zeros(2, 3, codec.record_bytes, dtype=torch.int8)
        codec.encode(gradient, residual, records)
        codec.reduce(gradient, residual, [records], reduced)
        codec.decode(reduced, gradient)
        results.append((records, reduced, residual, gradient))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))
