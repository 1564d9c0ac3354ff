"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): a matrix of gradients travels as two thin ones.

With M = gradient + residual of one rank and Q from the step before:

    P = Σ M·Q over the ranks, orthogonalised        first all-reduce, n·r numbers, and the vectors as they are
    Q = Σ Mᵀ·P over the ranks                       second all-reduce, m·r numbers
    gradient = P·Qᵀ, residual = M - P·(Mᵀ·P)ᵀ       each rank's own part of what was sent

The residuals add up to what P·Qᵀ omits of Σ M, so nothing is lost, only delayed. Results that every rank computes and
that must not differ (orthogonalisation, P·Qᵀ) are computed number by number in a fixed order: the sums inside a matrix
product depend on the processor. A sum that is not finite makes the whole matrix NaN on all ranks, and leaves residual
and Q as they were.
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

# Numbers of a product computed at once: they stay in the cache while one column after another is added.
_BLOCK_ELEMENTS = 2**16


@dataclass(frozen=True)
class _Matrix:
    """What is kept of an n×m parameter from step to step."""

    residual: Tensor  # n×m, this rank's own
    q: Tensor  # m×r, the same on all ranks
    initial_q: Tensor


@dataclass(frozen=True)
class _LowRank:
    """A matrix of a bucket: its place there, and its views of the messages."""

    matrix: _Matrix
    place: slice
    p: Tensor
    q: Tensor
    own_q: Tensor  # this rank's part of `q`


@dataclass(frozen=True)
class _Buffers:
    vectors: list[tuple[slice, Tensor]]  # places in the bucket and in `first`
    matrices: list[_LowRank]
    first: Tensor  # the vectors and every P
    second: Tensor  # every Q
    own_second: Tensor


class PowerSGD:
    def __init__(self, world: World, parameters: Mapping[str, Tensor], rank: int) -> None:
        self._world = world
        self._rank = rank
        self._queue = OrderedQueue()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        compressed = [name for name, parameter in parameters.items() if is_low_rank(tuple(parameter.shape), rank)]
        self._matrices = {name: _make_matrix(parameters[name], rank, seed) for seed, name in enumerate(compressed)}
        self._buffers = BufferPool(self._make_buffers)
        load_kernels()

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._queue.put(self._rounds(bucket, self._buffers.of(bucket)), bucket)

    def state(self) -> dict[str, Tensor]:
        residuals = {f"residual.{name}": matrix.residual for name, matrix in self._matrices.items()}
        return residuals | {f"q.{name}": matrix.q for name, matrix in self._matrices.items()}

    def load_state(self, state: State) -> None:
        load_tensors(self.state(), state)

    def _rounds(self, bucket: Bucket, buffers: _Buffers) -> Rounds:
        for place, sent in buffers.vectors:
            sent.copy_(bucket.flat[place])
        for low in buffers.matrices:
            _compute_p(bucket.flat[low.place], low)
        work = self._all_reduce(buffers.first)
        yield
        await_work(work, self._world.release)
        for place, summed in buffers.vectors:
            bucket.flat[place].copy_(summed)
        if not buffers.matrices:
            return
        for low in buffers.matrices:
            _compute_own_q(low)
        buffers.second.copy_(buffers.own_second)
        work = self._all_reduce(buffers.second)
        yield
        await_work(work, self._world.release)
        for low in buffers.matrices:
            _reconstruct(low, bucket.flat[low.place].view_as(low.matrix.residual))

    def _all_reduce(self, message: Tensor) -> dist.Work:
        return begun(dist.all_reduce(message, group=self._world.group, async_op=True))

    def _make_buffers(self, bucket: Bucket) -> _Buffers:
        matrices = [self._matrices.get(self._names[id(parameter)]) for parameter in bucket.parameters]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        firsts = [size if m is None else len(m.residual) * self._rank for m, size in zip(matrices, sizes, strict=True)]
        seconds = [0 if m is None else m.q.numel() for m in matrices]
        first, second, own = torch.zeros(sum(firsts)), torch.zeros(sum(seconds)), torch.zeros(sum(seconds))
        buffers = _Buffers([], [], first, second, own)
        offset = 0
        views = zip(matrices, sizes, first.split(firsts), second.split(seconds), own.split(seconds), strict=True)
        for matrix, size, p, q, own_q in views:
            place, offset = slice(offset, offset + size), offset + size
            if matrix is None:
                buffers.vectors.append((place, p))
            else:
                thin = (p.view(-1, self._rank), q.view_as(matrix.q), own_q.view_as(matrix.q))
                buffers.matrices.append(_LowRank(matrix, place, *thin))
        return buffers


def _make_matrix(parameter: Tensor, rank: int, seed: int) -> _Matrix:
    rows, columns = len(parameter), parameter.numel() // len(parameter)
    initial_q = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed))
    return _Matrix(torch.zeros(rows, columns), initial_q.clone(), initial_q)


def _compute_p(gradient: Tensor, low: _LowRank) -> None:
    """Compute P = M·Q. Numbers that are not finite are sent, but do not enter the residual."""
    matrix = low.matrix
    if gradient.sum().isfinite():
        matrix.residual.add_(gradient.view_as(matrix.residual))
        torch.mm(matrix.residual, matrix.q, out=low.p)
    else:
        low.p.fill_(float("nan"))


def _compute_own_q(low: _LowRank) -> None:
    """Orthogonalise the summed P and compute this rank's Mᵀ·P."""
    if not low.p.isfinite().all():
        low.own_q.fill_(float("nan"))
        return
    low.p.copy_(orthogonal(low.p))
    # (Pᵀ·M)ᵀ is twice as fast as Mᵀ·P.
    low.own_q.copy_(torch.mm(low.p.T, low.matrix.residual).T)


def _reconstruct(low: _LowRank, gradient: Tensor) -> None:
    """Compute the gradient P·Qᵀ and the residual, and keep Q for the next step."""
    if not low.q.isfinite().all():
        gradient.fill_(float("nan"))
        return
    low.matrix.residual.addmm_(low.p, low.own_q.T, alpha=-1)
    multiply(low.p, low.q.T.contiguous(), gradient, load_kernels())
    # A column of zeros would stay zero forever: restart it.
    low.matrix.q.copy_(torch.where(low.q.any(dim=0), low.q, low.matrix.initial_q))


def orthogonal(columns: Tensor) -> Tensor:
    """Orthogonalise by Gram-Schmidt, in double precision; a column of zeros remains one."""
    result = columns.double()
    for number in range(result.shape[1]):
        column = result[:, number : number + 1]
        norm = ordered_sum(column * column).sqrt()
        column.mul_(torch.where(norm > 0, 1 / norm, 0.0))
        rest = result[:, number + 1 :]
        rest.sub_(column * ordered_sum(column * rest))
    return result.float()


def ordered_sum(rows: Tensor) -> Tensor:
    """Sum all rows pairwise: torch's own order of adding depends on the width of the processor's vectors."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat((rows[:half] + rows[half : 2 * half], rows[2 * half :]))
    return rows[0]


def multiply(p: Tensor, q_rows: Tensor, product: Tensor, kernels: Kernels | None) -> None:
    """Compute `product = p @ q_rows` in a fixed order, with the same bits with and without a kernel."""
    if kernels is not None:
        kernels.thin_product(p, q_rows, product)
        return
    rows = max(1, _BLOCK_ELEMENTS // q_rows.shape[1])
    scratch = torch.empty(min(rows, len(p)), q_rows.shape[1])
    for first in range(0, len(p), rows):
        part, into = p[first : first + rows], product[first : first + rows]
        torch.mul(part[:, :1], q_rows[0], out=into)
        for column in range(1, len(q_rows)):
            into.add_(torch.mul(part[:, column : column + 1], q_rows[column], out=scratch[: len(part)]))
