"""Sums in fp32 with less on the wire: every rank adds up its own part of each bucket, and sends the result to all.

The first round is a reduce-scatter (by all-to-all: gloo's own costs more than an all-reduce), the second an all-gather,
both in pieces, so that one is encoded while another travels. Each rank sends 2(N-1)/N of the bucket, as in a ring. A
rank's own part is never rounded before it is added up, and what is sent back is what its owner rounded, on every rank:
all get the same bits, whatever their processors are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shoal.sync.waiting import await_work
from shoal.sync.wires.bucket import Bucket, State, begun, load_tensors
from shoal.sync.wires.desks import Desks
from shoal.sync.wires.lane import Lane, Rounds
from shoal.sync.wires.layout import Layout, lay_out
from shoal.sync.world import World


class Codec(Protocol):
    """Blocks of numbers as records of bytes. `records` has a row for each block; the last block may be shorter.

    `residual` is what earlier steps could not say, and afterwards what this one could not; empty for a codec that keeps
    none. `gradient` may be used up by `settle`: the result comes with `spread`.
    """

    record_bytes: int
    keeps_residual: bool

    def send(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None: ...
    def settle(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None: ...
    def spread(self, records: Tensor, gradient: Tensor) -> None: ...


@dataclass(frozen=True)
class _Desk:
    """What a bucket needs in every step: who gets what, and room for it, piece by piece and rank by rank.

    `parts` holds what goes to each owner, and after that what each owner sends back.
    """

    layout: Layout
    parts: Tensor
    received: Tensor
    own: Tensor


class Scattered:
    def __init__(self, world: World, parameters: Mapping[str, Tensor], codec: Codec) -> None:
        self._world = world
        self._codec = codec
        self._lane = Lane()
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters.values())}
        self._residuals = [torch.zeros(each.numel() * codec.keeps_residual) for each in parameters.values()]
        self._desks = Desks(self._make_desk)

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        return self._lane.take(self._rounds(bucket, self._desks.of(bucket)), bucket)

    def state(self) -> dict[str, Tensor]:
        if not self._codec.keeps_residual:
            return {}
        kept = zip(self._shapes.items(), self._residuals, strict=True)
        return {f"residual.{name}": residual.view(shape) for (name, shape), residual in kept}

    def load_state(self, state: State) -> None:
        load_tensors(self.state(), state)

    def _make_desk(self, bucket: Bucket) -> _Desk:
        members = [(self._numbers[id(parameter)], parameter.numel()) for parameter in bucket.parameters]
        layout = lay_out(members, self._world.size, self._codec.record_bytes)
        one = (layout.records, self._codec.record_bytes)
        for_all = (len(layout.pieces), self._world.size, *one)
        parts, received = (torch.zeros(for_all, dtype=torch.int8) for _ in range(2))
        return _Desk(layout, parts, received, torch.zeros(len(layout.pieces), *one, dtype=torch.int8))

    def _rounds(self, bucket: Bucket, desk: _Desk) -> Rounds:
        pieces = range(len(desk.layout.pieces))
        sent = [self._scatter(bucket, desk, piece) for piece in pieces]
        yield
        back = [self._gather(bucket, desk, piece, sent[piece]) for piece in pieces]
        yield
        for piece in pieces:
            self._spread(bucket, desk, piece, back[piece])

    def _scatter(self, bucket: Bucket, desk: _Desk, piece: int) -> dist.Work:
        for owner, runs in enumerate(desk.layout.pieces[piece]):
            for run in runs if owner != self._world.rank else ():
                residual = self._residuals[run.parameter][run.of_parameter]
                self._codec.send(bucket.flat[run.of_bucket], residual, desk.parts[piece, owner, run.of_records])
        target, source = desk.received[piece].view(-1), desk.parts[piece].view(-1)
        return begun(dist.all_to_all_single(target, source, group=self._world.group, async_op=True))

    def _gather(self, bucket: Bucket, desk: _Desk, piece: int, sent: dist.Work) -> dist.Work:
        await_work(sent, self._world.release)
        theirs = [desk.received[piece, rank] for rank in range(self._world.size) if rank != self._world.rank]
        for run in desk.layout.pieces[piece][self._world.rank]:
            residual = self._residuals[run.parameter][run.of_parameter]
            others = [records[run.of_records] for records in theirs]
            self._codec.settle(bucket.flat[run.of_bucket], residual, others, desk.own[piece, run.of_records])
        # By the group itself: the public function of this name changed between the versions of torch that we allow.
        return self._world.group._allgather_base(desk.parts[piece].view(-1), desk.own[piece].view(-1))

    def _spread(self, bucket: Bucket, desk: _Desk, piece: int, back: dist.Work) -> None:
        await_work(back, self._world.release)
        for owner, runs in enumerate(desk.layout.pieces[piece]):
            for run in runs:
                self._codec.spread(desk.parts[piece, owner, run.of_records], bucket.flat[run.of_bucket])
