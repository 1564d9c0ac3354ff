"""Which rank owns which part of the model: pure arithmetic on sizes.

Parameters lie in *buckets*, one after the other. Every bucket is cut into one *part* for each rank: its owner sums the
part's gradients, keeps its moments and updates it. A part is a range of elements and cuts through parameters, so parts
are as equal as wanted whatever the sizes of the parameters are; the *pieces* of a part are the ranges of single
parameters in it. With a copy, another rank keeps and updates each part too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shoal.config.sync_choice import BLOCK_NUMBERS

Range = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of one parameter."""

    parameter: int  # Its number in the model.
    start: int  # In the parameter.
    offset: int  # In the bucket.
    count: int

    @property
    def of_parameter(self) -> slice:
        return slice(self.start, self.start + self.count)


@dataclass(frozen=True)
class BucketLayout:
    parameters: tuple[int, ...]  # Their numbers in the model.
    sizes: tuple[int, ...]
    cuts: tuple[int, ...]  # Rank r owns the elements from cuts[r] to cuts[r + 1].

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes))[:-1]

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    def part(self, owner: int) -> Range:
        return self.cuts[owner], self.cuts[owner + 1]

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the ranges of parameters between two places of the bucket."""
        for parameter, offset, size in zip(self.parameters, self.offsets, self.sizes, strict=True):
            low, high = max(begin, offset), min(end, offset + size)
            if low < high:
                yield Piece(parameter, low - offset, low, high - low)


@dataclass(frozen=True)
class ShardLayout:
    buckets: tuple[BucketLayout, ...]
    ranks: int
    copy_shift: int = 0  # Rank (r + copy_shift) keeps a copy of the part of rank r; 0: there are no copies.

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the owners of the parts that a rank keeps, itself first."""
        return (rank, (rank - self.copy_shift) % self.ranks) if self.copy_shift else (rank,)

    def holders(self, owner: int) -> tuple[int, ...]:
        """Return the ranks that keep a part, its owner first."""
        return (owner, (owner + self.copy_shift) % self.ranks) if self.copy_shift else (owner,)

    @property
    def largest_held(self) -> float:
        """The largest fraction of the divided state that a rank keeps."""
        total = sum(bucket.elements for bucket in self.buckets)
        held = [
            sum(bucket.cuts[owner + 1] - bucket.cuts[owner] for bucket in self.buckets for owner in self.held_by(rank))
            for rank in range(self.ranks)
        ]
        return max(held) / total


def fill_buckets(sizes: Sequence[int], kinds: Sequence[object], bucket_elements: float) -> list[list[int]]:
    """Group parameters, given in the order of backward, into buckets of one kind; the last one in closes a bucket."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for number, size in enumerate(sizes):
        if buckets[-1] and (filled >= bucket_elements or kinds[number] != kinds[buckets[-1][-1]]):
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += size
    return buckets


def lay_out_parts(
    sizes: Sequence[int], buckets: Sequence[Sequence[int]], shares: Sequence[float], copy_shift: int = 0
) -> ShardLayout:
    """Cut buckets, given as numbers of parameters, into parts of these shares.

    Cuts are at whole blocks, as wire formats encode them. What rounding leaves over goes to another rank in each
    bucket, so that many small buckets are fair too.
    """
    layouts = []
    for turn, numbers in enumerate(buckets):
        bucket_sizes = tuple(sizes[number] for number in numbers)
        layouts.append(BucketLayout(tuple(numbers), bucket_sizes, _cut(sum(bucket_sizes), shares, turn)))
    return ShardLayout(tuple(layouts), len(shares), copy_shift)


def _cut(elements: int, shares: Sequence[float], turn: int) -> tuple[int, ...]:
    whole, rest = divmod(elements, BLOCK_NUMBERS)
    wanted = [whole * share for share in shares]
    blocks = [int(blocks) for blocks in wanted]
    ranks = range(len(shares))
    # The largest remainders first; of equal ones, beginning with another rank in each bucket.
    order = sorted(ranks, key=lambda rank: (blocks[rank] - wanted[rank], (rank - turn) % len(shares)))
    for place in range(whole - sum(blocks)):
        blocks[order[place % len(shares)]] += 1
    last = max((rank for rank in ranks if blocks[rank]), default=turn % len(shares))
    counts = [BLOCK_NUMBERS * count + (rest if rank == last else 0) for rank, count in enumerate(blocks)]
    return (0, *accumulate(counts))


def choose_copy_shift(nodes: Sequence[str]) -> int:
    """Return by how many ranks a copy is moved, so that most copies are on another machine than their part.

    `nodes` has the machine of each rank.
    """
    ranks = len(nodes)

    def on_same_machine(shift: int) -> int:
        return sum(nodes[rank] == nodes[(rank + shift) % ranks] for rank in range(ranks))

    return min(range(1, ranks), key=on_same_machine, default=0)


@dataclass(frozen=True)
class Move:
    """Elements of a bucket that one rank sends to another, or keeps."""

    source: int
    target: int
    begin: int
    end: int


def plan_moves(
    old: BucketLayout, holders: Sequence[Sequence[int]], new: BucketLayout, held_by: Sequence[Sequence[int]]
) -> list[Move]:
    """Return which rank of a new world sends what to which, so that every rank has its parts of the new layout.

    `holders` has, for every part of the old layout, the ranks of the new world that keep it; `held_by`, for every rank,
    the parts of the new layout that it is to keep. A rank takes what it has itself; the ranks that keep a part take
    turns in sending it.
    """
    moves = []
    for target, owners in enumerate(held_by):
        for owner in owners:
            begin, end = new.part(owner)
            for part, ranks in enumerate(holders):
                low, high = max(begin, old.cuts[part]), min(end, old.cuts[part + 1])
                if low < high:
                    source = target if target in ranks else ranks[target % len(ranks)]
                    moves.append(Move(source, target, low, high))
    return moves
