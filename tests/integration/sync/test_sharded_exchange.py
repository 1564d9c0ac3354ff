"""The two halves of a sharded exchange against plain sums, for all kinds of numbers, shares and wire formats.

Exercises sync.sharded.exchange, sync.sharded.pipeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.sync.sharded import exchange as exchange_module
from shoal.sync.sharded.exchange import ExactPart, Part, PartExchange, Spread, make_codecs
from shoal.sync.sharded.layout import BucketLayout, ShardLayout, fill_buckets, lay_out_parts
from shoal.sync.world import World
from tests.support.ranks import run_ranks

SIZES = (1, 3000, 255, 0, 256, 700, 5000, 2)
DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}
SHARES: dict[int, list[list[float]]] = {2: [[0.5, 0.5], [0.9, 0.1], [1.0, 0.0]], 3: [[1 / 3] * 3, [0.6, 0.3, 0.1]]}
# How far a sum of rounded numbers may be from the exact one, relative to the largest of a block.
PRECISION = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2}


def layouts(ranks: int) -> list[ShardLayout]:
    """Return layouts of one bucket, of several, and with copies."""
    found = []
    for shares in SHARES[ranks]:
        for bucket_elements in (1, 1 << 20):
            buckets = fill_buckets(SIZES, [0] * len(SIZES), bucket_elements)
            found += [lay_out_parts(SIZES, buckets, shares, shift) for shift in (0, 1)]
    return found


def gradients_of(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + elements)
    return torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)


def part_of(bucket: BucketLayout, owner: int, dtype: torch.dtype, value: float) -> Part:
    begin, end = bucket.part(owner)
    return Part(begin, torch.full((end - begin,), value, dtype=dtype))


def reduce_all(world: World, wire: str, kind: str, in_rounds: bool) -> list[float]:
    """Return how far the sums of the parts that this rank keeps are from exact ones.

    `in_rounds` they are added to those of earlier micro-batches, which are ones here.
    """
    dtype, results = DTYPES[kind], []
    for layout in layouts(world.size):
        exchange = PartExchange(
            world, layout, make_codecs(wire, 1), are_alike=True, dtypes=[dtype] * len(layout.buckets)
        )
        waiting = []
        for index, bucket in enumerate(layout.buckets):
            flat = Part(0, gradients_of(world.rank, bucket.elements, dtype))
            own, *copied = layout.held_by(world.rank)
            sums, copy = None, flat if copied else None
            if in_rounds:
                sums = part_of(bucket, own, dtype, 1.0)
                copy = part_of(bucket, copied[0], dtype, 0.0) if copied else None
            done = exchange.reduce_scatter(index, flat, sums, copy, is_last=index == len(layout.buckets) - 1)
            waiting.append((done, bucket, own, copied, sums or flat, copy))
        for done, bucket, own, copied, sums, copy in waiting:
            done.result()
            exact = sum(gradients_of(rank, bucket.elements, dtype).double() for rank in range(world.size))
            assert isinstance(exact, Tensor)
            exact = exact + float(in_rounds)
            for owner, part in [(own, sums), *((owner, copy) for owner in copied)]:
                assert part is not None
                begin, end = bucket.part(owner)
                error = (part.view(begin, end).double() - exact[begin:end]).abs()
                results.append(float(error.max()) if end > begin else 0.0)
        exchange.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        ("fp32", "float"),
        ("fp32", "double"),
        ("fp32", "bfloat16"),
        ("bf16", "float"),
        ("fp16", "float"),
        ("int8", "float"),
        ("int8", "double"),
    ],
)
@pytest.mark.parametrize("in_rounds", [False, True])
def test_every_rank_has_the_sum_of_what_it_keeps(
    ranks: int, wire: str, kind: str, in_rounds: bool, tmp_path: Path
) -> None:
    most = 0.1 if kind == "bfloat16" else PRECISION["fp32" if kind == "double" else wire] * 6
    for results in run_ranks(reduce_all, ranks, tmp_path, wire, kind, in_rounds):
        assert max(results) <= most


def gather_all(world: World, wire: str, kind: str) -> list[tuple[bytes, float]]:
    """Update this rank's parts, gather the weights; return their bits, and how far they are from exact ones."""
    dtype, results = DTYPES[kind], []
    for layout in layouts(world.size):
        exchange = PartExchange(
            world, layout, make_codecs(wire, 1), are_alike=False, dtypes=[dtype] * len(layout.buckets)
        )
        before = [gradients_of(9, size, dtype) for size in SIZES]
        weights = [tensor.clone() for tensor in before]
        for index, bucket in enumerate(layout.buckets):
            spread = Spread(bucket, [weights[number] for number in bucket.parameters])
            update = gradients_of(5, bucket.elements, dtype) / 100
            exact = spread.read(0, bucket.elements, torch.empty(bucket.elements, dtype=dtype)) + update
            begin, end = bucket.part(world.rank)
            own: Any = spread
            if exchange.is_lossy and dtype == torch.float32:
                own = Part(begin, exact[begin:end].clone())
            else:
                spread.write(begin, end, exact[begin:end])
            exchange.gather(index, own, spread, is_last=True).result()
            reached = spread.read(0, bucket.elements, torch.empty(bucket.elements, dtype=dtype))
            error = (reached.double() - exact.double()).abs()
            results.append((reached.view(torch.uint8).numpy().tobytes(), float(error.max()) if len(error) else 0.0))
        exchange.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        ("fp32", "float"),
        ("fp32", "double"),
        ("fp32", "bfloat16"),
        ("bf16", "float"),
        ("fp16", "float"),
        ("int8", "float"),
        ("int8", "bfloat16"),
    ],
)
def test_all_ranks_get_the_same_weights(ranks: int, wire: str, kind: str, tmp_path: Path) -> None:
    first, *others = run_ranks(gather_all, ranks, tmp_path, wire, kind)
    for other in others:
        assert [bits for bits, _ in other] == [bits for bits, _ in first]
    # An update of a hundredth is rounded, not the weights.
    most = 0.0 if wire == "fp32" or kind != "float" else PRECISION["int8"] / 20
    assert max(error for _, error in first) <= most


def sum_many(world: World, wire: str, steps: int) -> tuple[float, float]:
    """Sum the same gradients in every step; return the error of the mean over all steps, and that of one step."""
    layout = lay_out_parts([2000], [[0]], [1 / world.size] * world.size)
    exchange = PartExchange(world, layout, make_codecs(wire, 1), are_alike=True, dtypes=[torch.float32])
    begin, end = layout.buckets[0].part(world.rank)
    exact = sum((gradients_of(rank, 2000, torch.float32) for rank in range(world.size)), torch.zeros(2000))[begin:end]
    total, first = torch.zeros(end - begin, dtype=torch.float64), 0.0
    for step in range(steps):
        flat = Part(0, gradients_of(world.rank, 2000, torch.float32))
        exchange.reduce_scatter(0, flat, None, None, is_last=True).result()
        total += flat.view(begin, end)
        first = first or float((total / (step + 1) - exact).abs().mean())
    exchange.close()
    return float((total / steps - exact).abs().mean()), first


def test_what_int8_leaves_out_of_a_step_is_in_the_next_ones(tmp_path: Path) -> None:
    for mean_error, first_error in run_ranks(sum_many, 3, tmp_path, "int8", 100):
        assert mean_error < first_error / 20


def follow_updates(world: World, wire: str, steps: int) -> tuple[float, bytes]:
    """Make small updates that a rounded weight could not show; return how far the weights are from exact ones."""
    layout = lay_out_parts([2000], [[0]], [1 / world.size] * world.size)
    exchange = PartExchange(world, layout, make_codecs(wire, 1), are_alike=True, dtypes=[torch.float32])
    weights = gradients_of(9, 2000, torch.float32)
    exact = weights.double()
    spread = Spread(layout.buckets[0], [weights])
    begin, end = layout.buckets[0].part(world.rank)
    own = ExactPart(begin, torch.zeros(end - begin))
    for step in range(steps):
        update = gradients_of(step, 2000, torch.float32) * 1e-5 + 1e-5
        own.make_whole(spread)
        own.numbers += update[begin:end]
        exact += update
        exchange.gather(0, own, spread, True, [own]).result()
    exchange.close()
    return float((weights.double() - exact).abs().max()), weights.numpy().tobytes()


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_weights_follow_the_exact_ones_over_many_steps(wire: str, tmp_path: Path) -> None:
    steps = 100
    first, second = run_ranks(follow_updates, 2, tmp_path, wire, steps)
    assert first == second
    # The updates are 1e-3 together; the weights themselves are rounded in every step.
    assert first[0] < 5e-6


def exchange_in_small_chunks(world: World, chunk_bytes: int) -> list[Any]:
    """Return the weights after an exchange in chunks of this size."""
    vars(exchange_module)["CHUNK_BYTES"] = chunk_bytes
    results: list[Any] = []
    for wire in ("fp32", "int8"):
        layout = lay_out_parts(SIZES, fill_buckets(SIZES, [0] * len(SIZES), 3000), SHARES[world.size][1], 1)
        exchange = PartExchange(
            world, layout, make_codecs(wire, 1), are_alike=True, dtypes=[torch.float32] * len(layout.buckets)
        )
        parts = []
        for index, bucket in enumerate(layout.buckets):
            flat = Part(0, gradients_of(world.rank, bucket.elements, torch.float32))
            parts.append((flat, exchange.reduce_scatter(index, flat, None, flat, is_last=False)))
        exchange.reduce_scatter(0, Part(0, torch.zeros(layout.buckets[0].elements)), None, None, is_last=True).result()
        for (flat, done), bucket in zip(parts, layout.buckets, strict=True):
            done.result()
            results += [flat.view(*bucket.part(owner)).numpy().copy() for owner in layout.held_by(world.rank)]
        exchange.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_size_of_chunks_changes_no_bit(ranks: int, tmp_path: Path) -> None:
    large, small = (run_ranks(exchange_in_small_chunks, ranks, tmp_path, size) for size in (1 << 20, 2048))
    for one, other in zip(large, small, strict=True):
        for numbers, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(numbers, expected)
