"""Which rank adds up which part of a bucket, and where each part lies on the wire.

Every parameter is cut into blocks, and its blocks into one part a rank. That depends on the parameter alone, never on
the bucket it travels in: DDP arranges its buckets anew after the first backward and after a resume, and neither the
scales nor what an owner keeps for next time may change with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.cost.sizes import BLOCK, blocks_of

# gloo moves large messages at half the link's speed, and many of this size at a time at 92% of it.
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Run:
    """Neighbouring elements of one parameter that travel in one piece to one owner."""

    parameter: int
    start: int
    offset: int
    count: int
    record: int

    @property
    def of_parameter(self) -> slice:
        return slice(self.start, self.start + self.count)

    @property
    def of_bucket(self) -> slice:
        return slice(self.offset, self.offset + self.count)

    @property
    def of_records(self) -> slice:
        return slice(self.record, self.record + blocks_of(self.count))


@dataclass(frozen=True)
class Layout:
    """`pieces[k][r]` is what piece k has for owner r; every one of them has room for `records` blocks."""

    pieces: tuple[tuple[tuple[Run, ...], ...], ...]
    records: int


def lay_out(bucket: Sequence[tuple[int, int]], world_size: int, record_bytes: int) -> Layout:
    """`bucket` has the number and the size of each parameter, in the order in which they lie in it."""
    parts = [list(_part(bucket, owner, world_size)) for owner in range(world_size)]
    longest = max(1, *(sum(blocks_of(run.count) for run in part) for part in parts))
    count = -(-longest * record_bytes // _PIECE_BYTES)
    each = -(-longest // count)
    cut = [[run for whole in part for run in _cut(whole, each)] for part in _placed(parts)]
    pieces = tuple(
        tuple(tuple(run for piece, run in part if piece == number) for part in cut) for number in range(count)
    )
    return Layout(pieces, each)


def _part(bucket: Sequence[tuple[int, int]], owner: int, world_size: int) -> Iterator[Run]:
    """The owner of the first part changes from one parameter to the next, so that crumbs don't all go to one rank."""
    offset = 0
    for parameter, size in bucket:
        blocks, turn = blocks_of(size), (owner + parameter) % world_size
        start = BLOCK * (blocks * turn // world_size)
        end = min(size, BLOCK * (blocks * (turn + 1) // world_size))
        if start < end:
            yield Run(parameter, start, offset + start, end - start, 0)
        offset += size


def _placed(parts: list[list[Run]]) -> Iterator[list[Run]]:
    """Behind one another on the wire."""
    for part in parts:
        record, placed = 0, []
        for run in part:
            placed.append(Run(run.parameter, run.start, run.offset, run.count, record))
            record += blocks_of(run.count)
        yield placed


def _cut(run: Run, each: int) -> Iterator[tuple[int, Run]]:
    """Where pieces end; with the number of the piece, and the record counted from its beginning."""
    done = 0
    while done < run.count:
        piece, record = divmod(run.record + done // BLOCK, each)
        count = min(run.count - done, BLOCK * (each - record))
        yield piece, Run(run.parameter, run.start + done, run.offset + done, count, record)
        done += count
