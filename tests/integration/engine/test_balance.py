"""Shares that change in the middle of a training: the losses of one process, equal replicas, a complete ledger.

Exercises engine.balance, cost.batch_plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.engine.balance import Balance, RankTime
from shoal.engine.replica import Replica
from shoal.events import read_events
from shoal.records.commit_log import check_ledger
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from tests.integration.engine.test_session import (
    BATCH,
    Arrays,
    Task,
    arrays,
    loss_sum,
    make_data,
    make_folder,
    make_model,
    make_optimizer,
    make_session,
    train_plainly,
)
from tests.support.ranks import run_ranks
from tests.support.trainings import GptTraining, make_run

# The speeds of the ranks from a step on.
SPEEDS = {1: (5.0, 2.0, 1.0), 26: (1.0, 1.0, 2.0)}
LIVE: dict[str, dict[str, Any]] = {"run": {"balance": "live"}, "train": {"micro_batch": 1}}


@contextmanager
def measured(
    speeds: Mapping[int, Sequence[float]], session_step: list[int], shares: list[Sequence[int]]
) -> Iterator[None]:
    """Let all ranks measure these speeds, instead of those of the machine that runs the test."""
    observe = Balance.observe

    def observe_speeds(self: Balance, step: Sequence[RankTime]) -> None:
        now = speeds[max(first for first in speeds if first <= session_step[0])]
        times = [RankTime(count / speed, 0.1) for count, speed in zip(shares[0], now, strict=True)]
        observe(self, times)

    Balance.observe = observe_speeds  # type: ignore[method-assign]
    try:
        yield
    finally:
        Balance.observe = observe  # type: ignore[method-assign]


def train(world: World, path: Path, task: Task, resume: bool = False, stop_after: int = 0) -> tuple[Arrays, list[int]]:
    """Train with ranks of `SPEEDS`; return the parameters and this rank's micro-batches in every step."""
    session = make_session(world, path, task, resume)
    model, data = make_model(task), make_data(task)
    session.attach(model, make_optimizer(model, task))
    step_number, own = [0], list[int]()
    shares: list[Sequence[int]] = [()]
    with measured(SPEEDS, step_number, shares):
        for step in session:
            step_number[0], shares[0] = step.number, session.replica.plan.shares
            own.append(shares[0][world.rank])
            with step:
                for inputs, targets in step.batches(data):
                    step.backward(*loss_sum(model, task, inputs, targets))
                step.update(clip=task.clip)
            if step.number == stop_after:
                session.stop()
    return arrays(model), own


def commits(path: Path) -> list[dict[str, Any]]:
    return list(read_events(RunFolder(path).commits))


def check_training(
    results: Sequence[tuple[Arrays, Sequence[int]]], expected: Arrays, path: Path
) -> list[dict[str, Any]]:
    """Check that all ranks trained what one process does, on every sample once; return the ledger."""
    for result, _ in results:
        for name, values in result.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
            assert values.tobytes() == results[0][0][name].tobytes(), f"{name} differs between ranks"
    records = commits(path)
    assert check_ledger(records).ok
    assert len(records) == 50
    assert records[0]["shares"] == [4, 4, 4]
    return records


@pytest.mark.parametrize("counts", ["samples", "texts"])
def test_changing_shares_of_any_size_train_what_one_process_does(counts: str, tmp_path: Path) -> None:
    # A rank's share is computed in micro-batches of at most four samples, which may be of two sizes.
    task = Task(counts, steps=50, run=LIVE["run"], train={"count_varies": counts == "texts"})
    path = make_folder(tmp_path, task)
    records = check_training(run_ranks(train, 3, tmp_path, path, task), train_plainly(task), path)
    # Seven samples are micro-batches of four and of three.
    assert {tuple(record["shares"]) for record in records} > {(4, 4, 4), (2, 3, 7)}
    changes = [event for event in read_events(RunFolder(path).events(0)) if event["event"] == "shares"]
    assert {event["micro_batch"] for event in changes} == {4}


@pytest.mark.parametrize("counts", ["samples", "texts"])
def test_changing_shares_train_what_one_process_does(counts: str, tmp_path: Path) -> None:
    task = Task(counts, steps=50, run=LIVE["run"], train={**LIVE["train"], "count_varies": counts == "texts"})
    path = make_folder(tmp_path, task)
    results = run_ranks(train, 3, tmp_path, path, task)
    records = check_training(results, train_plainly(task), path)
    assert records[20]["shares"] == [8, 3, 1]
    assert records[-1]["shares"] == [3, 3, 6]
    assert all(sum(record["shares"]) == BATCH for record in records)
    for step, record in enumerate(records):
        assert record["shares"] == [own[step] for _, own in results]
    changes = [event for event in read_events(RunFolder(path).events(0)) if event["event"] == "shares"]
    assert [event["shares"] for event in changes[:1]] == [[8, 3, 1]]
    assert changes[0]["why"].startswith("shares now 8:3:1 samples instead of 4:4:4, because rank 2 ")
    assert "computes at 0.20 of the speed of rank 0" in changes[0]["why"]
    start = next(event for event in read_events(RunFolder(path).events(0)) if event["event"] == "start")
    assert start["shares_why"] == "equal shares until the speeds of the machines are measured"


def test_a_resumed_run_has_the_shares_of_its_checkpoint(tmp_path: Path) -> None:
    task = Task(steps=40, run=LIVE["run"], train={**LIVE["train"], "checkpoint_every": 10})
    path = make_folder(tmp_path, task)
    run_ranks(train, 3, tmp_path, path, task, False, 15)
    newest = max(RunFolder(path).checkpoints.glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    assert state["shares"] == {
        "micro_batch": 1,
        "ids": [0, 1, 2],
        "shares": [8, 3, 1],
        "speeds": {"0": 1.0, "1": 0.4, "2": 0.2},
    }
    results = run_ranks(train, 3, tmp_path, path, task, True)
    assert [own[0] for _, own in results] == [8, 3, 1]
    records = commits(path)
    assert check_ledger(records).ok
    assert [record["step"] for record in records] == list(range(1, 41))


def flushes(world: World, path: Path, task: Task) -> list[bool]:
    """Return whether numbers below 1e-38 are zero before, in and after the steps of a session."""

    def is_flushed() -> bool:
        return bool(torch.full((8,), 1e-40).mul(0.5).eq(0).all())

    session = make_session(world, path, task)
    model, data = make_model(task), make_data(task)
    session.attach(model, make_optimizer(model, task))
    seen = [is_flushed()]
    for step in session:
        with step:
            for inputs, targets in step.batches(data):
                step.backward(*loss_sum(model, task, inputs, targets))
            step.update()
        seen.append(is_flushed())
    return [*seen, is_flushed()]


def test_denormal_numbers_are_zero_in_the_steps_of_a_session(tmp_path: Path) -> None:
    task = Task(steps=2)
    assert run_ranks(flushes, 1, tmp_path, make_folder(tmp_path, task), task) == [[False, True, True, False]]


def train_compiled(world: World, path: Path, task: Task) -> list[tuple[int, ...]]:
    """Resume as a model that is compiled by now; return the sizes of this rank's micro-batches in every step."""
    session = make_session(world, path, task, resume=True)
    model, data = make_model(task), make_data(task)
    session.attach(model, make_optimizer(model, task))
    session.hooks.on_start = lambda: session.replica.division.fix_shapes(True)
    sizes: list[tuple[int, ...]] = []
    for step in session:
        with step:
            sizes.append(tuple(len(inputs) for inputs, _ in step.batches(data)))
            for inputs, targets in step.batches(data):
                step.backward(*loss_sum(model, task, inputs, targets))
            step.update(clip=task.clip)
    return sizes


def test_a_resumed_run_that_is_compiled_has_micro_batches_of_one_size(tmp_path: Path) -> None:
    task = Task(steps=20, run=LIVE["run"], train={"checkpoint_every": 10})
    path = make_folder(tmp_path, task)
    run_ranks(train, 3, tmp_path, path, task, False, 15)
    assert commits(path)[-1]["shares"] == [8, 3, 1]
    results = run_ranks(train_compiled, 3, tmp_path, path, task)
    assert {size for rank in results for step in rank for size in step} == {4}
    assert check_ledger(commits(path)).ok


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_outer_rounds_change_their_shares_together(mode: str, tmp_path: Path) -> None:
    sync = {"mode": mode, "every": 4, **({"fragments": 2, "overlap": 1} if mode == "streaming" else {})}
    task = Task(steps=40, run=LIVE["run"], train=LIVE["train"], sync=sync)
    path = make_folder(tmp_path, task)
    results = run_ranks(train, 3, tmp_path, path, task)
    for result, own in results:
        assert len(set(own)) > 1 or own[0] == 4
        for name, values in result.items():
            assert values.tobytes() == results[0][0][name].tobytes(), f"{name} differs between ranks"
    records = commits(path)
    assert check_ledger(records).ok
    assert records[-1]["shares"] != [4, 4, 4]
    # A share is the weight of a whole round.
    for first in range(0, 40, 4):
        assert len({tuple(record["shares"]) for record in records[first : first + 4]}) == 1


def test_without_a_setting_ranks_of_one_machine_are_equal(tmp_path: Path) -> None:
    task = Task(steps=16, train=LIVE["train"])
    for _, own in run_ranks(train, 3, tmp_path, make_folder(tmp_path, task), task):
        assert set(own) == {4}
    given = replace(task, run={"weights": "2/1/1", "balance": "live"})
    folder = tmp_path / "given"
    folder.mkdir()
    results = run_ranks(train, 3, folder, make_folder(folder, given), given)
    assert [own[0] for _, own in results] == [6, 3, 3]
    assert [own[-1] for _, own in results] == [8, 3, 1]


def test_the_first_shares_are_those_of_a_profile_and_then_follow(tmp_path: Path) -> None:
    task = Task(steps=20, run={"speeds": "0.250/1.000/0.250"}, train=LIVE["train"])
    path = make_folder(tmp_path, task)
    results = run_ranks(train, 3, tmp_path, path, task)
    assert [own[0] for _, own in results] == [2, 8, 2]
    assert [own[-1] for _, own in results] == [8, 3, 1]
    start = next(event for event in read_events(RunFolder(path).events(0)) if event["event"] == "start")
    assert start["shares_why"] == "shares 2:8:2, by the speeds that shoal probe measured"


def first_sizes(world: World, path: Path) -> tuple[int, int]:
    """Return the micro-batch of the first step, and the largest that later shares may have."""
    training = GptTraining(world, path)
    sizes: list[tuple[int, int]] = []

    def look(replica: Replica) -> bool:
        sizes.append((replica.plan.micro_batch, replica.division.largest_micro_batch))
        return True

    training.train(look)
    return sizes[0]


def test_micro_batches_may_grow_after_first_shares_by_a_profile(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2, "train.global_batch=8", "run.speeds=3/1", "train.compile=off", "train.pin=off")
    assert run_ranks(first_sizes, 2, tmp_path, run.path) == [(4, 4)] * 2
