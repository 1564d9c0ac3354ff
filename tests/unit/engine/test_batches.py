"""Every kind of dataset gives each rank its part of the global batch, each sample once in an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.cost.batch_plan import BatchPlan
from shoal.engine.batches import Source, move, open_source, weighted, with_replacement
from shoal.engine.sampling import CursorShard
from shoal.errors import DataError, UsageError

COUNT = 24


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT))


SOURCES: dict[str, Callable[[], Any]] = {
    "dataset": Squares,
    "tensors": lambda: (torch.arange(COUNT), torch.arange(COUNT) ** 2),
    "arrays": lambda: (np.arange(COUNT), np.arange(COUNT) ** 2),
    "list": lambda: [(index, index * index) for index in range(COUNT)],
    "loader": lambda: DataLoader(Squares(), batch_size=3, shuffle=True),
    "stream": lambda: _Pairs(),
}


class _Pairs(IterableDataset[tuple[int, int]]):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(index, index * index) for index in range(COUNT)])


def shards(*micro_batches: int) -> list[CursorShard]:
    """Return the shards of ranks with so many micro-batches of two samples each."""
    return shards_of(BatchPlan(2, tuple(2 * count for count in micro_batches)))


def shards_of(plan: BatchPlan) -> list[CursorShard]:
    return [CursorShard(rank, plan, COUNT, seed=7) for rank in range(len(plan.shares))]


def read(source: Source, shard: CursorShard, cursor: int) -> list[int]:
    """Return the samples of one step, after a check that their parts belong together."""
    taken: list[int] = []
    for inputs, targets in source.fetch(shard, cursor):
        assert len(inputs) <= shard.plan.micro_batch
        assert (inputs**2 == targets).all()
        taken += inputs.tolist()
    return taken


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shares", [(2,), (2, 2), (4, 2), (2, 4, 2), (1, 3), (7, 1)])
def test_each_sample_of_an_epoch_is_used_once(kind: str, shares: tuple[int, ...]) -> None:
    ranks = [(open_source(SOURCES[kind]()), shard) for shard in shards_of(BatchPlan(3, shares))]
    batch = sum(shares)
    taken: list[int] = []
    for cursor in range(0, COUNT // batch * batch, batch):
        taken += [sample for source, shard in ranks for sample in read(source, shard, cursor)]
    assert len(set(taken)) == len(taken) == COUNT // batch * batch


@pytest.mark.parametrize("kind", SOURCES)
def test_a_step_done_again_by_other_ranks_gets_the_same_samples(kind: str) -> None:
    data = SOURCES[kind]()
    before = [(open_source(data), shard) for shard in shards(1, 1, 1)]
    after = shards(2, 1)
    for cursor in (0, 6, 12):
        first = [sample for source, shard in before for sample in read(source, shard, cursor)]
    second = [sample for (source, _), shard in zip(before, after, strict=False) for sample in read(source, shard, 12)]
    assert sorted(first) == sorted(second)


def test_a_stream_goes_back_further_than_it_keeps_and_starts_again_at_its_end() -> None:
    source, [shard] = open_source(Numbers()), shards(2)
    steps = [[number for batch in source.fetch(shard, cursor) for number in batch.tolist()] for cursor in (0, 16, 20)]
    assert steps == [[0, 1, 2, 3], [16, 17, 18, 19], [20, 21, 22, 23]]
    assert [batch.tolist() for batch in source.fetch(shard, 24)] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in source.fetch(shard, 4)] == [[4, 5], [6, 7]]


def test_collate_functions_and_nested_batches_are_kept() -> None:
    loader = DataLoader(Squares(), collate_fn=lambda items: {"n": len(items), "x": torch.tensor(items)})
    [batch] = open_source(loader).fetch(shards(1)[0], 0)
    assert batch["n"] == 2
    assert batch["x"].shape == (2, 2)


def test_move_keeps_the_structure() -> None:
    class Custom:
        def to(self, device: torch.device) -> str:
            return str(device)

    moved = move({"a": (torch.ones(2), [torch.ones(1)]), "b": "text", "c": Custom()}, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert isinstance(moved["a"], tuple)
    assert (moved["b"], moved["c"]) == ("text", "meta")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: iter([1, 2]), "is no dataset that can be shared by ranks"),
        (lambda: 3, "is no dataset"),
        (lambda: (torch.ones(3), torch.ones(4)), "the tensors have 3, 4 rows"),
        (lambda: DataLoader(Numbers(), num_workers=2), "over an IterableDataset has workers"),
        (lambda: DataLoader(Squares(), batch_sampler=[[0, 1], [2]]), "a sampler of its own, list"),
        (lambda: weighted([1, 2], [1.0]), "got 1 weights for 2 samples"),
        (lambda: weighted([1, 2], [1.0, -1.0]), "weights that are not one number for each sample"),
        (lambda: weighted([1, 2], [0.0, 0.0]), "weights that are not one number for each sample"),
        (lambda: weighted([1, 2], [1.0, float("nan")]), "weights that are not one number for each sample"),
        (lambda: with_replacement(Numbers()), "samples of a Numbers cannot be drawn with replacement"),
        (lambda: DataLoader(Squares(), batch_size=None), "each item of its dataset is a batch already"),
    ],
)
def test_what_cannot_be_shared_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((UsageError, DataError), match=message):
        open_source(make())


class Halves(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(COUNT // 2))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * COUNT, COUNT)}, "step.batches(shoal.weighted(dataset, weights))"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "step.batches(torch.utils.data.Subset(dataset, indices))"),
        ({"sampler": DistributedSampler(Squares(), 2, 0)}, "step.batches(dataset): shoal divides it"),
        ({"sampler": RandomSampler(Squares(), replacement=True)}, "step.batches(shoal.with_replacement(dataset))"),
        ({"sampler": RandomSampler(Squares(), num_samples=3)}, "step.batches(shoal.with_replacement(dataset))"),
        ({"batch_sampler": BatchSampler(Halves(), 2, False)}, "step.batches(dataset), with Session(micro_batch=…)"),
        ({"sampler": Halves()}, "step.batches(dataset); an order of your own"),
    ],
)
def test_a_refused_sampler_names_the_line_to_write(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match="the DataLoader has a sampler of its own") as caught:
        open_source(DataLoader(Squares(), **options))
    assert line in caught.value.fix


def test_drawn_samples_have_other_fingerprints() -> None:
    data = torch.arange(3)
    kinds = [data, with_replacement(data), weighted(data, [1, 2, 3]), weighted(data, [1, 3, 2])]
    assert len({open_source(kind).fingerprint() for kind in kinds}) == 4


def test_an_empty_stream_is_refused() -> None:
    class Empty(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(DataError, match="the stream Empty has no samples"):
        list(open_source(Empty()).fetch(shards(1)[0], 0))


def test_fingerprints_differ_for_other_data_and_not_for_random_samples() -> None:
    class Random(Dataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(2)

    prints = [open_source(torch.full((length,), value)).fingerprint() for length, value in ((3, 1), (4, 1), (3, 2))]
    assert len(set(prints)) == 3
    assert open_source(torch.full((3,), 1)).fingerprint() == prints[0]
    assert open_source(Random()).fingerprint() == open_source(Random()).fingerprint()
    assert open_source(Squares()).fingerprint() != open_source([(5, 25)] * COUNT).fingerprint()
