"""Every wire format matches a computation in one process, has the same bits on all ranks and loses no gradient.

Exercises sync.compression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from shoal.config.schema import ModelConfig, SyncConfig
from shoal.config.sync_choice import WIRE_FORMATS, WireChoice
from shoal.engine.training_state import TrainingState
from shoal.errors import CheckpointError
from shoal.model.gpt import GPT
from shoal.sync.compression import make_compressor
from shoal.sync.compression.base import Bucket
from shoal.sync.gradients import GradientSync, make_gradient_sync
from shoal.sync.world import World
from tests.support.ranks import run_ranks

Arrays = dict[str, npt.NDArray[np.float32]]

FORMATS = [str(WireChoice(name, 2)) for name in WIRE_FORMATS]
# Sizes around one block, one large enough that every rank owns a part, and thin and square matrices.
SHAPES = {"a": (40, 96), "b": (1,), "c": (256,), "d": (257,), "e": (3, 5), "f": (700,), "g": (64, 64)}


def gradients_of(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    # Like gradients: every tensor has its own magnitude.
    return {
        name: torch.randn(shape, generator=generator) * 10.0 ** (number - 5)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def buckets(step: int) -> list[list[str]]:
    """Return buckets as DDP does: different ones from the second step on."""
    return [["g", "f", "e"], ["d", "c", "b", "a"]] if step == 0 else [["g"], ["e", "f", "d"], ["c", "a", "b"]]


class Exchanger:
    """A compressor with parameters, without a model and DDP."""

    def __init__(self, world: World, form: str) -> None:
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.wire = make_compressor(form, world, self.parameters)

    def exchange(self, gradients: dict[str, Tensor], groups: list[list[str]]) -> Arrays:
        futures = []
        for index, names in enumerate(groups):
            flat = torch.cat([gradients[name].flatten() for name in names])
            bucket = Bucket(index, flat, [self.parameters[name] for name in names], index == len(groups) - 1)
            futures.append(self.wire(bucket))
        summed = {}
        for names, future in zip(groups, futures, strict=True):
            parts = future.wait().split([self.parameters[name].numel() for name in names])
            summed.update({name: part.clone().numpy() for name, part in zip(names, parts, strict=True)})
        return summed


def steps(world: World, form: str, count: int) -> tuple[list[Arrays], Arrays]:
    exchanger = Exchanger(world, form)
    sums_by_step = [exchanger.exchange(gradients_of(world.rank, step), buckets(step)) for step in range(count)]
    return sums_by_step, {name: tensor.numpy() for name, tensor in exchanger.wire.state().items()}


# The same computation in one process


def quantised(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round every block of 256 to whole multiples of 1/127 of its largest value."""
    rounded = np.empty_like(values)
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        scale = np.float32(np.abs(block).max() * np.float32(1 / 127))
        whole = np.rint(block * (np.float32(1) / scale)) if scale > 0 else 0 * block
        rounded[start : start + 256] = whole * scale
    return rounded


def owner_of(number: int, block: int, blocks: int, size: int) -> int:
    turn = next(turn for turn in range(size) if blocks * turn // size <= block < blocks * (turn + 1) // size)
    return (turn - number) % size


def int8_reference(size: int, count: int) -> list[Arrays]:
    """Compute error feedback of senders and owners, block by block."""
    rest = {
        (rank, name): np.zeros(int(np.prod(shape)), np.float32)
        for rank in range(size)
        for name, shape in SHAPES.items()
    }
    sums_by_step: list[Arrays] = []
    for step in range(count):
        gradients = [gradients_of(rank, step) for rank in range(size)]
        summed: Arrays = {}
        for number, name in enumerate(SHAPES):
            wanted = [gradients[rank][name].flatten().numpy() + rest[rank, name] for rank in range(size)]
            result = np.empty_like(wanted[0])
            blocks = -(-len(result) // 256)
            for block in range(blocks):
                part = slice(256 * block, 256 * (block + 1))
                owner = owner_of(number, block, blocks, size)
                total = wanted[owner][part]
                for rank in range(size):
                    if rank != owner:
                        sent = quantised(wanted[rank][part])
                        rest[rank, name][part] = wanted[rank][part] - sent
                        total = total + sent
                result[part] = quantised(total)
                rest[owner, name][part] = total - result[part]
            summed[name] = result
        sums_by_step.append(summed)
    return sums_by_step


def bf16_reference(size: int, count: int) -> list[Arrays]:
    sums_by_step: list[Arrays] = []
    for step in range(count):
        gradients = [gradients_of(rank, step) for rank in range(size)]
        summed: Arrays = {}
        for number, name in enumerate(SHAPES):
            flat = [own[name].flatten() for own in gradients]
            result = torch.empty_like(flat[0])
            blocks = -(-len(result) // 256)
            for block in range(blocks):
                part = slice(256 * block, 256 * (block + 1))
                owner = owner_of(number, block, blocks, size)
                total = flat[owner][part].clone()
                for rank in range(size):
                    total += flat[rank][part].bfloat16().float() if rank != owner else 0
                result[part] = total.bfloat16().float()
            summed[name] = result.numpy()
        sums_by_step.append(summed)
    return sums_by_step


def powersgd_reference(size: int, count: int, rank: int = 2) -> list[Arrays]:
    """Follow the paper, with QR and matrix products in double precision."""
    low = [name for name, shape in SHAPES.items() if len(shape) == 2 and rank * sum(shape) < np.prod(shape)]
    assert low == ["a", "g"]
    q = {
        name: torch.randn(SHAPES[name][1], rank, generator=torch.Generator().manual_seed(seed)).double()
        for seed, name in enumerate(low)
    }
    errors = {(worker, name): torch.zeros(SHAPES[name]).double() for worker in range(size) for name in low}
    sums_by_step: list[Arrays] = []
    for step in range(count):
        gradients = [gradients_of(worker, step) for worker in range(size)]
        summed = {name: torch.stack([own[name].double() for own in gradients]).sum(dim=0) for name in SHAPES}
        for name in low:
            wanted = [gradients[worker][name].double() + errors[worker, name] for worker in range(size)]
            p = torch.linalg.qr(torch.stack([matrix @ q[name] for matrix in wanted]).sum(dim=0)).Q
            q[name] = torch.stack([matrix.T @ p for matrix in wanted]).sum(dim=0)
            for worker in range(size):
                errors[worker, name] = wanted[worker] - p @ (wanted[worker].T @ p).T
            summed[name] = p @ q[name].T
        sums_by_step.append({name: tensor.flatten().float().numpy() for name, tensor in summed.items()})
    return sums_by_step


def exact(size: int, count: int) -> list[Arrays]:
    sums_by_step: list[Arrays] = []
    for step in range(count):
        gradients = [gradients_of(rank, step) for rank in range(size)]
        sums = {name: torch.stack([own[name].double() for own in gradients]).sum(dim=0) for name in SHAPES}
        sums_by_step.append({name: tensor.flatten().float().numpy() for name, tensor in sums.items()})
    return sums_by_step


REFERENCES: dict[str, tuple[Callable[[int, int], list[Arrays]], float]] = {
    "fp32": (exact, 1e-6),
    "fp16": (exact, 1e-3),
    "bf16": (bf16_reference, 0.0),
    "int8": (int8_reference, 0.0),
    "powersgd:2": (powersgd_reference, 2e-4),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_sums_match_the_one_process_reference(form: str, size: int, tmp_path: Path) -> None:
    """fp16 and double precision differ by a fraction of the largest summand; the other formats match to the bit."""
    reference, tolerance = REFERENCES[form]
    wanted = reference(size, 4)
    ranks = run_ranks(steps, size, tmp_path, form, 4)
    for step, tensors in enumerate(wanted):
        for name, tensor in tensors.items():
            actual = ranks[0][0][step][name]
            largest = max(float(gradients_of(rank, step)[name].abs().max()) for rank in range(size))
            np.testing.assert_allclose(actual, tensor, rtol=0, atol=tolerance * largest * size)
            for other, _ in ranks[1:]:
                assert other[step][name].tobytes() == actual.tobytes(), f"{name} differs between ranks"


@pytest.mark.parametrize("form", ["int8", "powersgd:2"])
def test_error_feedback_loses_no_gradient(form: str, tmp_path: Path) -> None:
    """The sums of thirty steps plus the remaining errors of all ranks equal the sum of all gradients."""
    size, count = 3, 30
    ranks = run_ranks(steps, size, tmp_path, form, count)
    for name, shape in SHAPES.items():
        given_ = sum(gradients_of(rank, step)[name].double().numpy() for rank in range(size) for step in range(count))
        sent = np.sum([sums[name].astype(np.float64) for sums in ranks[0][0]], axis=0).reshape(shape)
        left = sum(state.get(f"residual.{name}", np.zeros(shape)).astype(np.float64) for _, state in ranks)
        np.testing.assert_allclose(sent + left, given_, rtol=0, atol=2e-5 * np.abs(given_).max())


# Values that are not finite


def exchange_nonfinite_value(world: World, form: str, value: float, where: str) -> tuple[Arrays, list[Arrays], Arrays]:
    exchanger = Exchanger(world, form)
    before = exchanger.exchange(gradients_of(world.rank, 0), buckets(0))
    broken = gradients_of(world.rank, 1)
    if world.rank == 1:
        broken[where].view(-1)[-1] = value
    nonfinite = exchanger.exchange(broken, buckets(1))
    after = [exchanger.exchange(gradients_of(world.rank, step), buckets(step)) for step in (2, 3)]
    assert all(np.isfinite(values).all() for values in before.values())
    return nonfinite, after, {name: tensor.numpy() for name, tensor in exchanger.wire.state().items()}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("where", ["a", "d"])
def test_a_nonfinite_value_reaches_every_rank_and_leaves_no_state(
    form: str, value: float, where: str, tmp_path: Path
) -> None:
    for nonfinite, after, state in run_ranks(exchange_nonfinite_value, 3, tmp_path, form, value, where):
        assert not np.isfinite(nonfinite[where]).all()
        assert all(np.isfinite(values).all() for name, values in nonfinite.items() if name != where)
        assert all(np.isfinite(values).all() for sums in after for values in sums.values())
        assert all(np.isfinite(values).all() for values in state.values())


# Save and load


def interrupted(world: World, form: str, count: int, saved_after: int) -> list[Arrays]:
    """Continue with a new wire from the saved state, with the buckets of a first step, as DDP does after a resume."""
    exchanger = Exchanger(world, form)
    sums_by_step = []
    for step in range(count):
        if step == saved_after:
            state = {name: tensor.clone() for name, tensor in exchanger.wire.state().items()}
            exchanger = Exchanger(world, form)
            exchanger.wire.load_state(state)
        sums_by_step.append(exchanger.exchange(gradients_of(world.rank, step), buckets(step % saved_after)))
    return sums_by_step


@pytest.mark.parametrize(("form", "size"), [("int8", 2), ("int8", 3), ("bf16", 3), ("powersgd:2", 2)])
def test_a_restored_wire_continues_with_the_same_bits(form: str, size: int, tmp_path: Path) -> None:
    straight = run_ranks(steps, size, tmp_path, form, 6)
    for (wanted, _), continued in zip(straight, run_ranks(interrupted, size, tmp_path, form, 6, 3), strict=True):
        for one, other in zip(wanted, continued, strict=True):
            assert all(one[name].tobytes() == other[name].tobytes() for name in SHAPES)


def load_wrong(world: World, form: str, name: str) -> str:
    exchanger = Exchanger(world, form)
    try:
        exchanger.wire.load_state({name: torch.zeros(7)})
    except CheckpointError as error:
        return error.render()
    return "taken"


@pytest.mark.parametrize(("form", "name"), [("fp16", "residual.a"), ("int8", "residual.z"), ("powersgd", "q.a")])
def test_a_state_of_another_wire_is_refused(form: str, name: str, tmp_path: Path) -> None:
    [error_text] = run_ranks(load_wrong, 1, tmp_path, form, name)
    assert "another state of the wire" in error_text
    assert "sync.wire" in error_text


# In a model


TINY = ModelConfig(layers=2, heads=2, width=32, seq_len=8, vocab_size=50)


def rows_of(rank: int, micro: int, step: int) -> Tensor:
    """Return learnable sequences: every token follows from the one before it."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
    first = torch.randint(0, TINY.vocab_size, (4, 1), generator=generator)
    return (first + 3 * torch.arange(TINY.seq_len + 1)) % TINY.vocab_size


def train(
    world: World, form: str, measure: str, count: int, saved_after: int | None = None
) -> tuple[list[float], Arrays]:
    """Train with r + 1 micro-batches on rank r. After a save a new model and a new exchange continue."""
    torch.manual_seed(1)
    model, state = GPT(TINY), dict[str, Tensor]()
    sync, optimizer = _make_exchange(model, world, form, measure)
    losses = []
    for step in range(count):
        if step == saved_after:
            state = {name: tensor.clone() for name, tensor in sync.state().items()}
            saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model = GPT(TINY)
            model.load_state_dict(saved)
            sync, optimizer = _make_exchange(model, world, form, measure)
            sync.load_state(state)
        losses.append(_step(sync, world, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, {name: tensor.detach().numpy().copy() for name, tensor in TrainingState(model).weights().items()}


def _make_exchange(model: GPT, world: World, form: str, measure: str) -> tuple[GradientSync, torch.optim.Optimizer]:
    config = SyncConfig(wire=form, measure=measure, bucket_mb=0.02)
    return make_gradient_sync(config, model, world), torch.optim.SGD(model.parameters(), lr=0.5)


def _step(sync: GradientSync, world: World, step: int) -> float:
    micros = world.rank + 1
    tokens = sum(rank + 1 for rank in range(world.size)) * 4 * TINY.seq_len
    loss_sum = 0.0
    for micro in range(micros):
        rows = rows_of(world.rank, micro, step)
        loss = sync.module(rows[:, :-1], rows[:, 1:])
        sync.backward(loss * sync.loss_scale(tokens), last=micro == micros - 1)
        loss_sum += loss.item()
    sync.finish()
    return loss_sum / (micros * 4 * TINY.seq_len)


def same_bits(replicas: Sequence[Arrays]) -> bool:
    return all(one[name].tobytes() == replicas[0][name].tobytes() for one in replicas for name in one)


@pytest.mark.parametrize(("measure", "size"), [("hook", 3), pytest.param("barrier", 2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "form", ["int8", *(pytest.param(form, marks=pytest.mark.long) for form in FORMATS if form != "int8")]
)
def test_the_loss_falls_and_replicas_stay_equal(form: str, measure: str, size: int, tmp_path: Path) -> None:
    results = run_ranks(train, size, tmp_path, form, measure, 40)
    assert same_bits([parameters for _, parameters in results])
    losses = results[0][0]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("form", ["int8", "powersgd:2"])
def test_a_resumed_training_has_the_same_bits(form: str, tmp_path: Path) -> None:
    straight = run_ranks(train, 2, tmp_path, form, "hook", 8)
    resumed = run_ranks(train, 2, tmp_path, form, "hook", 8, 4)
    assert straight[0][0] == resumed[0][0]
    assert same_bits([parameters for _, parameters in straight + resumed])
