"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): a matrix of gradients travels as two thin ones.

With M = gradient + residual of one rank and Q from the step before:

    P = Σ M·Q over the ranks, orthogonalised        first all-reduce, n·r numbers, and the vectors as they are
    Q = Σ Mᵀ·P over the ranks                       second all-reduce, m·r numbers
    gradient = P·Qᵀ, residual = M - P·(Mᵀ·P)ᵀ       each rank's own part of what was sent

Residuals add up to what P·Qᵀ leaves of Σ M, so nothing is lost, only late. Whatever every rank computes for itself and
must not differ (orthogonalising, P·Qᵀ) is done number by number in a fixed order: the sums inside a matrix product
depend on the processor. A sum that is not finite makes the whole matrix NaN on all ranks, and leaves residual and Q as
they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.cost.model_size import is_low_rank
from shoal.sync.compression.base import Bucket, BufferPool, State, begun, load_tensors
from shoal.sync.compression.native import Kernels, load_kernels
from shoal.sync.compression.reduce_scatter import OrderedQueue, Rounds
from shoal.sync.interruptible import await_work
from shoal.sync.world import World

# Numbers of a gradient made at once: they stay in the cache while one column after another is added.
_AT_ONCE = 2**16


@dataclass(frozen=True)
class _Matrix:
    """What is kept from step to step: `residual` (n by m) of this rank, `q` (m by r) the same on all."""

    residual: Tensor
    q: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class _Low:
    """A matrix in a bucket: its place there, and its places in the messages. `mine` is this rank's part of `q`."""

    matrix: _Matrix
    place: slice
    p: Tensor
    q: Tensor
    mine: Tensor


@dataclass(frozen=True)
class _PowerBuffers:
    """`first` holds the vectors and every P, `second` every Q."""

    vectors: list[tuple[slice, Tensor]]
    low: list[_Low]
    first: Tensor
    second: Tensor
    mine: Tensor


class PowerSGD:
    def __init__(self, world: World, parameters: Mapping[str, Tensor], rank: int) -> None:
        self._world = world
        self._rank = rank
        self._lane = OrderedQueue()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        low = {name: each for name, each in parameters.items() if is_low_rank(tuple(each.shape), rank)}
        self._matrices = {name: _begin(each, rank, seed) for seed, (name, each) in enumerate(low.items())}
        self._desks = BufferPool(self._make_desk)
        load_kernels()

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._lane.take(self._rounds(bucket, self._desks.of(bucket)), bucket)

    def state(self) -> dict[str, Tensor]:
        residuals = {f"residual.{name}": matrix.residual for name, matrix in self._matrices.items()}
        return residuals | {f"q.{name}": matrix.q for name, matrix in self._matrices.items()}

    def load_state(self, state: State) -> None:
        load_tensors(self.state(), state)

    def _rounds(self, bucket: Bucket, desk: _PowerBuffers) -> Rounds:
        for place, sent in desk.vectors:
            sent.copy_(bucket.flat[place])
        for low in desk.low:
            _project(bucket.flat[low.place], low)
        work = self._sum(desk.first)
        yield
        await_work(work, self._world.release)
        for place, summed in desk.vectors:
            bucket.flat[place].copy_(summed)
        if not desk.low:
            return
        for low in desk.low:
            _turn_over(low)
        desk.second.copy_(desk.mine)
        work = self._sum(desk.second)
        yield
        await_work(work, self._world.release)
        for low in desk.low:
            _settle(low, bucket.flat[low.place].view_as(low.matrix.residual))

    def _sum(self, message: Tensor) -> dist.Work:
        return begun(dist.all_reduce(message, group=self._world.group, async_op=True))

    def _make_desk(self, bucket: Bucket) -> _PowerBuffers:
        matrices = [self._matrices.get(self._names[id(parameter)]) for parameter in bucket.parameters]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        firsts = [size if m is None else len(m.residual) * self._rank for m, size in zip(matrices, sizes, strict=True)]
        seconds = [0 if m is None else m.q.numel() for m in matrices]
        first, second, mine = torch.zeros(sum(firsts)), torch.zeros(sum(seconds)), torch.zeros(sum(seconds))
        desk = _PowerBuffers([], [], first, second, mine)
        offset = 0
        places = zip(matrices, sizes, first.split(firsts), second.split(seconds), mine.split(seconds), strict=True)
        for matrix, size, one, two, own in places:
            place, offset = slice(offset, offset + size), offset + size
            if matrix is None:
                desk.vectors.append((place, one))
            else:
                thin = (one.view(-1, self._rank), two.view_as(matrix.q), own.view_as(matrix.q))
                desk.low.append(_Low(matrix, place, *thin))
        return desk


def _begin(parameter: Tensor, rank: int, seed: int) -> _Matrix:
    rows, columns = len(parameter), parameter.numel() // len(parameter)
    fresh = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed))
    return _Matrix(torch.zeros(rows, columns), fresh.clone(), fresh)


def _project(gradient: Tensor, low: _Low) -> None:
    """What is not finite is sent on, but not kept."""
    matrix = low.matrix
    if gradient.sum().isfinite():
        matrix.residual.add_(gradient.view_as(matrix.residual))
        torch.mm(matrix.residual, matrix.q, out=low.p)
    else:
        low.p.fill_(float("nan"))


def _turn_over(low: _Low) -> None:
    if not low.p.isfinite().all():
        low.mine.fill_(float("nan"))
        return
    low.p.copy_(orthogonal(low.p))
    # Twice as fast as the other way round.
    low.mine.copy_(torch.mm(low.p.T, low.matrix.residual).T)


def _settle(low: _Low, gradient: Tensor) -> None:
    if not low.q.isfinite().all():
        gradient.fill_(float("nan"))
        return
    low.matrix.residual.addmm_(low.p, low.mine.T, alpha=-1)
    multiply(low.p, low.q.T.contiguous(), gradient, load_kernels())
    # A column of zeros would stay one for ever: nothing is found in a direction in which nobody looks.
    low.matrix.q.copy_(torch.where(low.q.any(dim=0), low.q, low.matrix.fresh))


def orthogonal(columns: Tensor) -> Tensor:
    """Gram and Schmidt, in double precision; a column of zeros remains one."""
    found = columns.double()
    for number in range(found.shape[1]):
        column = found[:, number : number + 1]
        norm = steady_sum(column * column).sqrt()
        column.mul_(torch.where(norm > 0, 1 / norm, 0.0))
        rest = found[:, number + 1 :]
        rest.sub_(column * steady_sum(column * rest))
    return found.float()


def steady_sum(rows: Tensor) -> Tensor:
    """Of all rows, halves on halves: torch's own order of adding depends on how wide the processor's vectors are."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat((rows[:half] + rows[half : 2 * half], rows[2 * half :]))
    return rows[0]


def multiply(p: Tensor, lines: Tensor, product: Tensor, kernels: Kernels | None) -> None:
    """`p` times `lines`, column by line; with a kernel or without, to the same bits."""
    if kernels is not None:
        kernels.thin_product(p, lines, product)
        return
    rows = max(1, _AT_ONCE // lines.shape[1])
    room = torch.empty(min(rows, len(p)), lines.shape[1])
    for first in range(0, len(p), rows):
        part, into = p[first : first + rows], product[first : first + rows]
        torch.mul(part[:, :1], lines[0], out=into)
        for column in range(1, len(lines)):
            into.add_(torch.mul(part[:, column : column + 1], lines[column], out=room[: len(part)]))
