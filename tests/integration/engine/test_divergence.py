"""A bit flip in one rank's memory is detected, reported and healed in a real training with real ranks.

Exercises engine.divergence, engine.part_copies, sync.replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine import part_copies, sharding
from shoal.engine.divergence import Difference, find_difference, find_rounding
from shoal.engine.part_copies import part_tensors
from shoal.engine.replica import Replica
from shoal.engine.saving import replica_state
from shoal.engine.step import DoneStep
from shoal.errors import RunFailed
from shoal.records.commit_log import check_ledger
from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder
from shoal.sync.replicas import combine_digests, tensor_digests
from shoal.sync.world import World
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.trainings import GptTraining, make_run

ROWS = st.integers(2, 5).flatmap(
    lambda tensors: st.lists(st.lists(st.integers(0, 1), min_size=tensors, max_size=tensors), min_size=2, max_size=6)
)
WEIGHT, MOMENT = "model.blocks.0.feedforward.0.weight", "optimizer.state.blocks.0.feedforward.0.weight.exp_avg"


Train = Callable[[World, Path, Sequence["Flip"]], tuple[int, str | None]]


@dataclass(frozen=True)
class Flip:
    """Flip one bit of one tensor on one rank right after a step, only the first time the step is done."""

    rank: int
    step: int
    tensor: str
    bit: int = 5
    place: int = 3
    part: int | None = None  # Of a divided model: the first tensor of this rank's part whose name begins like that.


def train(world: World, run: Path, flips: Sequence[Flip]) -> tuple[int, str | None]:
    """Run a whole training; return the digest of this rank's final state and the error that ended it."""
    training = GptTraining(world, run)
    pending = [flip for flip in flips if flip.rank == world.rank]

    def flip_between_steps(replica: Replica) -> None:
        """Flip before periodic tasks, comparisons and checkpoints."""
        trial = training.session.entry.trial
        assert trial is not None
        after_step = trial.after_step

        def flip(done: DoneStep) -> None:
            after_step(done)
            while pending and pending[0].step == replica.progress.step:
                change(replica, pending.pop(0))

        if replica.progress.step == 0:
            trial.after_step = flip  # type: ignore[method-assign]

    try:
        training.train(flip_between_steps)
    except RunFailed as error:
        return 0, str(error)
    return combine_digests(tensor_digests(replica_state(training.replica))), None


def train_mixed(world: World, run: Path, flips: Sequence[Flip]) -> tuple[int, str | None]:
    """The same, but the first rank says that it computes on a GPU."""
    return train(replace(world, devices=("cuda:0", *["cpu"] * (world.size - 1))), run, flips)


def train_unlike(world: World, run: Path, flips: Sequence[Flip]) -> tuple[int, str | None]:
    """The same, but the ranks say that they compute differently."""
    for module in (sharding, part_copies):
        vars(module)["are_alike"] = lambda world: False
    return train(world, run, flips)


def change(replica: Replica, flip: Flip) -> None:
    with replica.outer.common():
        tensors = replica_state(replica)
        if flip.part is not None and replica.state.divided is not None:
            tensors = part_tensors(replica.state.divided, flip.part)
        tensor: Tensor = tensors[min(name for name in tensors if name.startswith(flip.tensor))]
        tensor.view(-1).view(torch.int32)[flip.place] ^= 1 << flip.bit


def run_with(
    folder: Path, ranks: int, flips: Sequence[Flip], *sets: str, train: Train = train
) -> tuple[RunFolder, list[tuple[int, str | None]]]:
    common = ("train.steps=30", "train.global_batch=6", "train.eval_every=100", "train.compile=off", "train.pin=off")
    run = make_run(folder, ranks, *common, *sets)
    return run, run_ranks(train, ranks, folder, run.path, flips)


def events(run: RunFolder, name: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run.events(rank)) if event["event"] == name]


def all_equal(ended: Sequence[tuple[int, str | None]]) -> bool:
    return [error for _, error in ended] == [None] * len(ended) and len({digest for digest, _ in ended}) == 1


@pytest.mark.parametrize("tensor", [WEIGHT, MOMENT])
def test_with_three_ranks_the_odd_one_is_reported_and_healed(tensor: str, tmp_path: Path) -> None:
    run, ended = run_with(tmp_path, 3, [Flip(1, 10, tensor)], "members.digest_every=10", "train.checkpoint_every=100")
    for rank in range(3):
        [event] = events(run, "divergence", rank)
        assert (event["step"], event["ranks"], event["healed_from"], event["back_to"]) == (10, [1], 0, None)
        assert event["tensor"] == tensor
    assert all_equal(ended)
    [warning] = [warning for rank in range(3) for warning in events(run, "warning", rank)]
    assert warning["seen"] == (
        f"after step 10 rank 1 has another {tensor} than the others: its whole state was copied from rank 0"
    )
    assert "memtester" in warning["fix"]


@pytest.mark.long
def test_a_flip_is_detected_at_the_next_comparison(tmp_path: Path) -> None:
    """Flip two steps after a comparison on rank 0, and right before one on rank 2."""
    flips = [Flip(0, 12, WEIGHT, bit=20), Flip(2, 29, MOMENT)]
    run, ended = run_with(tmp_path, 3, flips, "members.digest_every=10", "train.checkpoint_every=1000")
    detections = [(event["step"], event["ranks"], event["healed_from"]) for event in events(run, "divergence")]
    assert detections == [(20, [0], 1), (30, [2], 0)]
    assert all_equal(ended)


@pytest.mark.long
def test_two_ranks_return_to_the_last_agreed_checkpoint(tmp_path: Path) -> None:
    run, ended = run_with(
        tmp_path, 2, [Flip(1, 13, WEIGHT)], "members.digest_every=10", "train.checkpoint_every=8", "train.steps=24"
    )
    for rank in range(2):
        [event] = events(run, "divergence", rank)
        assert (event["step"], event["ranks"], event["healed_from"], event["back_to"]) == (16, [0, 1], None, 8)
        steps = [event["step"] for event in events(run, "step", rank)]
        assert steps == [*range(1, 17), *range(9, 25)]
    ledger = check_ledger(read_jsonl(run.commits))
    assert (ledger.ok, ledger.steps, ledger.redone) == (True, 24, 8)
    [warning] = events(run, "warning")
    assert "all went back to step 8, the last they had agreed on" in warning["seen"]
    undisturbed, expected = run_with(
        tmp_path / "undisturbed", 2, [], "train.checkpoint_every=8", "train.steps=24", "members.digest_every=10"
    )
    assert not events(undisturbed, "divergence")
    assert all_equal(ended)
    assert ended == expected, "the flipped bit is in the final state"


def test_two_ranks_return_to_a_checkpoint_at_the_last_step_too(tmp_path: Path) -> None:
    """Step 24 is the last; only the final checkpoint is due there."""
    run, ended = run_with(tmp_path, 2, [Flip(0, 23, MOMENT)], "train.checkpoint_every=10", "train.steps=24")
    [event] = events(run, "divergence")
    assert (event["step"], event["back_to"]) == (24, 20)
    assert all_equal(ended)
    assert [event["status"] for event in events(run, "end")] == ["finished"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_on_a_gpu_that_rounds_otherwise_takes_the_state_of_a_processor(ranks: int, tmp_path: Path) -> None:
    """One of the flipped bits is the last one of a weight, and one is the last one of a moment."""
    flips = [Flip(0, 3, WEIGHT, bit=0), Flip(0, 14, MOMENT, bit=0)]
    sets = ("members.digest_every=10", "train.checkpoint_every=100")
    run, ended = run_with(tmp_path, ranks, flips, *sets, train=train_mixed)
    assert all_equal(ended)
    for rank in range(ranks):
        aligned = events(run, "aligned", rank)
        assert [(event["step"], event["ranks"], event["source"]) for event in aligned] == [(10, [0], 1), (20, [0], 1)]
        assert "they round differently" in aligned[0]["why"]
        assert "why" not in aligned[1]
        assert not events(run, "divergence", rank)
        assert not events(run, "warning", rank)


def test_a_bit_that_changes_a_weight_much_is_no_rounding(tmp_path: Path) -> None:
    run, ended = run_with(tmp_path, 2, [Flip(1, 10, WEIGHT, bit=30)], "members.digest_every=10", train=train_mixed)
    assert [error for _, error in ended] == [f"after step 10 ranks 0 and 1 have another {WEIGHT} than each other"] * 2
    assert not events(run, "aligned")


def test_only_ranks_of_different_kinds_differ_by_rounding() -> None:
    names, mixed = ["a", "b"], ["cuda:0", "cpu", "cpu"]
    assert find_rounding(mixed, names, [[1, 3], [1, 2], [1, 2]]) == Difference((0,), 1, "b")
    assert find_rounding(mixed, names, [[1, 3], [1, 2], [1, 4]]) is None, "two processors differ"
    assert find_rounding(["cpu"] * 3, names, [[1, 3], [1, 2], [1, 2]]) is None, "all compute on processors"


def test_two_ranks_without_a_checkpoint_fail_with_an_error(tmp_path: Path) -> None:
    run, ended = run_with(tmp_path, 2, [Flip(1, 5, WEIGHT)], "members.digest_every=10", "train.checkpoint_every=20")
    assert [error for _, error in ended] == [f"after step 10 ranks 0 and 1 have another {WEIGHT} than each other"] * 2
    assert not list(run.checkpoints.iterdir())
    verdict = verify_run(run)
    assert not verdict.ok
    texts = [finding.text for finding in verdict.findings if finding.is_wrong]
    assert any(text.startswith(f"after step 10 the replicas differed, first in {WEIGHT}") for text in texts), texts


@given(rows=ROWS.filter(lambda rows: any(row != rows[0] for row in rows)))
def test_only_a_strict_majority_is_a_source(rows: list[list[int]]) -> None:
    names = [f"tensor {index}" for index in range(len(rows[0]))]
    difference = find_difference(names, rows)
    if difference.source is None:
        assert max(rows.count(row) for row in rows) * 2 <= len(rows)
        assert difference.odd == tuple(range(len(rows)))
    else:
        assert rows.count(rows[difference.source]) * 2 > len(rows)
        assert difference.odd == tuple(rank for rank, row in enumerate(rows) if row != rows[difference.source])
        assert difference.source == rows.index(rows[difference.source])
    index = names.index(difference.tensor)
    assert len({row[index] for row in rows}) == 2
    assert all(len({row[earlier] for row in rows}) == 1 for earlier in range(index))


# In every outer mode the common parameters stay unchanged for some steps while replicas differ as intended.
OUTER: dict[str, tuple[str, ...]] = {
    "local": ("sync.mode=local", "sync.every=4"),
    "diloco": ("sync.mode=diloco", "sync.every=10"),
    "streaming": ("sync.mode=streaming", "sync.every=8", "sync.fragments=2", "sync.overlap=3"),
}


@pytest.mark.long
@pytest.mark.parametrize("mode", OUTER)
def test_common_parameters_of_outer_modes_are_compared_and_healed(mode: str, tmp_path: Path) -> None:
    """The flip is detected at the next outer step; streaming replicas are compared continuously."""
    sets = (*OUTER[mode], "members.digest_every=10", "train.checkpoint_every=100")
    run, ended = run_with(tmp_path, 3, [Flip(2, 9, WEIGHT, bit=12)], *sets)
    [event] = events(run, "divergence")
    assert (event["ranks"], event["tensor"], event["healed_from"]) == ([2], WEIGHT, 0)
    assert event["step"] == {"local": 12, "diloco": 10, "streaming": 10}[mode]
    assert all_equal(ended)


# Rank 0 keeps a copy of the part of rank 2, rank 1 of that of rank 0, rank 2 of that of rank 1.
DIVIDED = ("members.digest_every=10", "train.checkpoint_every=8", "train.steps=24")
MOMENTS, WEIGHTS = "optimizer.state.", "model."


@pytest.mark.parametrize(
    "settings", [("sync.mode=zero1",), ("sync.mode=zero2", "sync.wire=int8")], ids=["fp32", "int8"]
)
@pytest.mark.parametrize(
    "flip", [Flip(2, 13, MOMENTS, part=1), Flip(1, 13, WEIGHTS, bit=20, part=1)], ids=["copy", "owner"]
)
def test_ranks_return_to_a_checkpoint_if_the_copies_of_a_part_differ(
    flip: Flip, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """A wrong weight of an owner reaches all ranks but the one with the copy: a majority would be wrong."""
    run, ended = run_with(tmp_path, 3, [flip], *DIVIDED, *settings)
    for rank in range(3):
        [event] = events(run, "divergence", rank)
        assert (event["step"], event["part"], event["ranks"], event["back_to"]) == (16, 1, [1, 2], 8)
        assert event["tensor"].startswith((flip.tensor, "model."))
    [warning] = events(run, "warning")
    assert "after step 16 ranks 1 and 2 have different copies of the part of rank 1, first in" in warning["seen"]
    assert "all went back to step 8" in warning["seen"]
    assert all_equal(ended)
    if "sync.wire=int8" not in settings:
        _, expected = run_with(tmp_path / "undisturbed", 3, [], *DIVIDED, *settings)
        assert ended == expected, "the flipped bit is in the final state"


def test_a_weight_of_a_rank_that_keeps_no_part_of_it_is_healed_by_the_majority(tmp_path: Path) -> None:
    """The last weight of the first layer is in the part of rank 2, which rank 1 has no copy of."""
    run, ended = run_with(tmp_path, 3, [Flip(1, 16, "model.token.weight", place=-1)], *DIVIDED, "sync.mode=zero1")
    [event] = events(run, "divergence")
    assert (event["step"], event["ranks"], event["healed_from"], event["back_to"]) == (16, [1], 0, None)
    assert all_equal(ended)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_copies_on_ranks_that_round_differently_take_the_moments_of_the_owner(wire: str, tmp_path: Path) -> None:
    flips = [Flip(2, 8, MOMENTS, bit=0, part=1), Flip(1, 9, MOMENTS, bit=0, part=1)]
    run, ended = run_with(tmp_path, 3, flips, *DIVIDED, "sync.mode=zero1", f"sync.wire={wire}", train=train_unlike)
    assert all_equal(ended)
    [first, *later] = events(run, "aligned", 1)
    assert (first["step"], first["ranks"]) == (8, [2])
    assert "rank 2 took those of rank 1" in first["why"]
    assert not any("why" in event for event in later)
    assert not events(run, "divergence")


def test_a_bit_that_changes_a_moment_much_is_no_rounding(tmp_path: Path) -> None:
    run, ended = run_with(
        tmp_path, 3, [Flip(2, 13, MOMENTS, bit=30, part=1)], *DIVIDED, "sync.mode=zero1", train=train_unlike
    )
    [event] = events(run, "divergence")
    assert (event["part"], event["back_to"]) == (1, 8)
    assert all_equal(ended)
