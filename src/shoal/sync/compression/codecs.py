"""Blocks of 256 numbers as bytes: bf16, and int8 with a scale a block and error feedback."""

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

    def send(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        _as_bf16(records, gradient.numel()).copy_(gradient)

    def settle(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        for other in others:
            gradient.add_(_as_bf16(other, gradient.numel()))
        _as_bf16(records, gradient.numel()).copy_(gradient)

    def spread(self, records: Tensor, gradient: Tensor) -> None:
        gradient.copy_(_as_bf16(records, gradient.numel()))


def _as_bf16(records: Tensor, count: int) -> Tensor:
    return records.view(-1).view(torch.bfloat16)[:count]


class NativeBf16:
    """The same, in one pass over memory."""

    record_bytes = RECORD_BYTES["bf16"]
    keeps_residual = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.spread = kernels.bf16_spread

    def send(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        self._kernels.bf16_settle(gradient, (), records)

    def settle(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        self._kernels.bf16_settle(gradient, others, records)


class Int8:
    """A block is its largest number ÷ 127 as a float, and how many of these each of its numbers is, as a byte.

    What rounding leaves is kept and added next time. A block with a number that is not finite travels as a scale of
    NaN: whoever unpacks it, or adds to it, gets NaN. Its residual stays as it was.
    """

    record_bytes = RECORD_BYTES["int8"]
    keeps_residual = True

    def __init__(self) -> None:
        self._room = torch.empty(2, 0)

    def send(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        self._pack(self._padded(gradient, residual), residual, records)

    def settle(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        values = self._padded(gradient, residual)
        for other in others:
            values.add_(_unpacked(other, self._blocks(1, len(records))))
        self._pack(values, residual, records)

    def spread(self, records: Tensor, gradient: Tensor) -> None:
        values = _unpacked(records, self._blocks(1, len(records)))
        gradient.copy_(values.view(-1)[: gradient.numel()])

    def _padded(self, gradient: Tensor, residual: Tensor) -> Tensor:
        values = self._blocks(0, blocks_of(gradient.numel()))
        flat = values.view(-1)
        torch.add(gradient, residual, out=flat[: gradient.numel()])
        flat[gradient.numel() :] = 0
        return values

    def _pack(self, values: Tensor, residual: Tensor, records: Tensor) -> None:
        rest = self._blocks(1, len(records))
        largest = torch.abs(values, out=rest).amax(dim=1, keepdim=True)
        finite = largest.isfinite()
        scale = torch.where(largest > _LEAST, largest * _STEPS, 0.0)
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        torch.mul(values, inverse, out=rest).add_(_ROUNDER).sub_(_ROUNDER)
        if not finite.all():
            rest.masked_fill_(~finite, 0.0)
        records[:, :BLOCK].copy_(rest)
        _scales(records).copy_(scale.masked_fill(~finite, float("nan")))
        left = torch.sub(values, rest.mul_(scale), out=rest).view(-1)[: residual.numel()]
        if finite.all():
            residual.copy_(left)
        else:
            kept = finite.expand(-1, BLOCK).reshape(-1)[: residual.numel()]
            residual.copy_(torch.where(kept, left, residual))

    def _blocks(self, which: int, count: int) -> Tensor:
        """Made once for the longest run, which is a piece at most."""
        if self._room.shape[1] < count * BLOCK:
            self._room = torch.empty(2, count * BLOCK)
        return self._room[which, : count * BLOCK].view(count, BLOCK)


def _unpacked(records: Tensor, into: Tensor) -> Tensor:
    return into.copy_(records[:, :BLOCK]).mul_(_scales(records))


def _scales(records: Tensor) -> Tensor:
    """The last four bytes of each record."""
    return records.view(torch.float32)[:, -1:]


class NativeInt8:
    """The same, in one pass over memory instead of ten."""

    record_bytes = RECORD_BYTES["int8"]
    keeps_residual = True

    def __init__(self, kernels: Kernels) -> None:
        self.send = kernels.int8_send
        self.settle = kernels.int8_settle
        self.spread = kernels.int8_spread


def bf16_codec(kernels: Kernels | None) -> Codec:
    return Bf16() if kernels is None or not _agree(NativeBf16(kernels), Bf16()) else NativeBf16(kernels)


def int8_codec(kernels: Kernels | None) -> Codec:
    return Int8() if kernels is None or not _agree(NativeInt8(kernels), Int8()) else NativeInt8(kernels)


def _agree(one: Codec, other: Codec) -> bool:
    """On one small example: a compiler that was told not to, and still rounds differently, is not to be trusted."""
    found = []
    for codec in (one, other):
        gradient = torch.linspace(-1.7, 3.1, 3 * BLOCK - 5) ** 5
        residual = gradient.flip(0) / 300
        records, settled = torch.zeros(2, 3, codec.record_bytes, dtype=torch.int8)
        codec.send(gradient, residual, records)
        codec.settle(gradient, residual, [records], settled)
        codec.spread(settled, gradient)
        found.append((records, settled, residual, gradient))
    return all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
