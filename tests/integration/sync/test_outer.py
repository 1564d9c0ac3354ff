"""Outer steps between real ranks, compared with the same computation in one process with torch's SGD.

Exercises sync.outer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import SGD, AdamW

from shoal.config.load import build_config
from shoal.config.schema import ModelConfig, SyncConfig
from shoal.errors import ConfigError, RunFailed
from shoal.model.gpt import GPT
from shoal.sync.compression.base import Bucket, NoState
from shoal.sync.outer import (
    AVERAGE,
    DiLoCo,
    OuterExchange,
    OuterOptimizer,
    OuterShard,
    OuterSync,
    StreamingDiLoCo,
    cut_fragments,
    cut_shards,
    is_fragment_due,
    make_outer_sync,
)
from shoal.sync.step_stats import CommTimes, StepGather, StepStats, StopKind
from shoal.sync.world import World
from tests.support.ranks import run_ranks

Arrays = dict[str, npt.NDArray[np.float32]]

SHAPE = ModelConfig(layers=2, heads=2, width=16, seq_len=8, vocab_size=30)
# An incomplete last round, pieces smaller than the model, and fragments in flight at the end.
STEPS = 11
SMALL = {"bucket_mb": 0.004}
MODES: dict[str, dict[str, Any]] = {
    "local": {"mode": "local", "every": 4, **SMALL},
    "diloco": {"mode": "diloco", "every": 4, **SMALL},
    "streaming": {"mode": "streaming", "every": 4, "fragments": 2, "overlap": 2, **SMALL},
}
SHARES = [(0.5, 0.5), (0.75, 0.25), (0.5, 0.25, 0.25)]


def fresh() -> tuple[GPT, AdamW]:
    torch.manual_seed(1)
    model = GPT(SHAPE)
    return model, AdamW(model.decay_groups(0.1), lr=1e-2, fused=True)


def inner_step(model: GPT, optimizer: AdamW, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    rows = torch.randint(0, SHAPE.vocab_size, (2, SHAPE.seq_len + 1), generator=generator)
    (model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def arrays(model: nn.Module) -> Arrays:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def train(world: World, settings: dict[str, Any], shares: Sequence[float]) -> list[tuple[Arrays, Arrays]]:
    """Return after every step the parameters of this replica and the common parameters."""
    model, optimizer = fresh()
    outer = make_outer_sync(SyncConfig(**settings), model, world, shares[world.rank])
    seen = []
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, world.rank, step)
        comm = outer.after_inner_step(step, last=step == STEPS)
        assert 0 <= (comm.wait_s or 0.0) <= comm.tail_s
        own = arrays(model)
        with outer.common():
            seen.append((own, arrays(model)))
        assert all(np.array_equal(own[name], value) for name, value in arrays(model).items())
    return seen


class Together:
    """N replicas in one process: the expected result of `train`, with plain torch."""

    def __init__(self, shares: Sequence[float], descent: OuterOptimizer) -> None:
        self.shares = shares
        self.replicas = [fresh() for _ in shares]
        self.common = {name: nn.Parameter(p.detach().clone()) for name, p in self.replicas[0][0].named_parameters()}
        self.sgd = {
            name: SGD([parameter], lr=descent.lr, momentum=descent.momentum, nesterov=bool(descent.momentum))
            for name, parameter in self.common.items()
        }

    def own(self, rank: int) -> dict[str, nn.Parameter]:
        return dict(self.replicas[rank][0].named_parameters())

    @torch.no_grad()
    def gap(self, name: str) -> Tensor:
        gaps = [(self.common[name] - self.own(rank)[name]) * share for rank, share in enumerate(self.shares)]
        return torch.stack(gaps).sum(dim=0) if len(gaps) > 2 else gaps[0] + gaps[1]

    @torch.no_grad()
    def work_in(self, name: str, gap: Tensor, mix: float, averages: bool = False) -> None:
        if averages:
            self.common[name].sub_(gap)
        else:
            self.common[name].grad = gap
            self.sgd[name].step()
        for rank in range(len(self.shares)):
            own = self.own(rank)[name]
            own.copy_(mix * own + (1 - mix) * self.common[name])

    def inner(self, step: int) -> None:
        for rank, (model, optimizer) in enumerate(self.replicas):
            inner_step(model, optimizer, rank, step)

    def seen(self) -> list[tuple[Arrays, Arrays]]:
        common = {name: parameter.detach().numpy().copy() for name, parameter in self.common.items()}
        return [(arrays(model), common) for model, _ in self.replicas]


def reference(_: World, mode: str, shares: Sequence[float]) -> list[list[tuple[Arrays, Arrays]]]:
    """Return parameters by step and rank. Run it in a rank process: other thread counts change the order of sums."""
    world = Together(shares, AVERAGE if mode == "local" else OuterOptimizer(0.7, 0.9))
    result = []
    sent: dict[str, Tensor] = {}
    fragments = cut_fragments([(name, p.numel()) for name, p in world.common.items()], 2)
    for step in range(1, STEPS + 1):
        world.inner(step)
        if mode == "streaming":
            stream(world, fragments, sent, step)
        elif step in (4, 8, STEPS):
            for name in world.common:
                world.work_in(name, world.gap(name), mix=0.0, averages=step == STEPS)
        result.append(world.seen())
    return result


def stream(world: Together, fragments: list[list[str]], sent: dict[str, Tensor], step: int) -> None:
    """Send the first of two fragments at 2, 6, 10, the second at 4 and 8; both return two steps later."""
    sends = {2: 0, 4: 1, 6: 0, 8: 1, 10: 0}
    back = {4: [0], 6: [1], 8: [0], 10: [1], STEPS: [0]}
    for index in back.get(step, []):
        for name in fragments[index]:
            world.work_in(name, sent.pop(name), mix=0.5)
    if step in sends:
        sent.update({name: world.gap(name) for name in fragments[sends[step]]})
    if step == STEPS:
        for name in world.common:
            world.work_in(name, world.gap(name), mix=0.0, averages=True)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_outer_steps_match_those_of_one_process(mode: str, shares: Sequence[float], tmp_path: Path) -> None:
    [expected] = run_ranks(reference, 1, tmp_path, mode, shares)
    results = run_ranks(train, len(shares), tmp_path, MODES[mode], shares)
    # Two numbers have one sum; with three, gloo sums every part of a message in another order.
    rtol, atol = (0.0, 0.0) if len(shares) == 2 else (1e-3, 1e-4)
    for step in range(STEPS):
        for rank in range(len(shares)):
            for actual, wanted in zip(results[rank][step], expected[step][rank], strict=True):
                for name, values in actual.items():
                    np.testing.assert_allclose(values, wanted[name], rtol, atol, err_msg=f"{name} in step {step + 1}")


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("mode", MODES)
def test_common_parameters_have_the_same_bits_on_every_rank(mode: str, wire: str, tmp_path: Path) -> None:
    ranks = run_ranks(train, 3, tmp_path, {**MODES[mode], "wire": wire}, (0.5, 0.25, 0.25))
    for step in range(STEPS):
        commons = [{name: values.tobytes() for name, values in rank[step][1].items()} for rank in ranks]
        assert commons[0] == commons[1] == commons[2], f"step {step + 1}"
    for own, common in (rank[-1] for rank in ranks):
        assert all(own[name].tobytes() == values.tobytes() for name, values in common.items()), (
            "replicas differ at the end"
        )
    differs = [own != common for own, common in ((r[4][0]["token.weight"], r[4][1]["token.weight"]) for r in ranks)]
    assert all(difference.any() for difference in differs), "replicas do not differ inside a round"


def test_fp16_is_close(tmp_path: Path) -> None:
    exact = run_ranks(train, 2, tmp_path, MODES["diloco"], SHARES[0])[0][-1][1]
    halves = run_ranks(train, 2, tmp_path, {**MODES["diloco"], "wire": "fp16"}, SHARES[0])[0][-1][1]
    for name, values in halves.items():
        np.testing.assert_allclose(values, exact[name], atol=2e-3)
    assert any((values != exact[name]).any() for name, values in halves.items())


def one_rank(world: World, settings: dict[str, Any]) -> bool:
    model, optimizer = fresh()
    alone, plain = fresh()
    outer = make_outer_sync(SyncConfig(**settings), model, world, 1.0)
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, 0, step)
        outer.after_inner_step(step, last=step == STEPS)
        inner_step(alone, plain, 0, step)
    return all(np.array_equal(values, arrays(alone)[name]) for name, values in arrays(model).items())


def test_averaging_over_one_rank_equals_plain_training(tmp_path: Path) -> None:
    assert run_ranks(one_rank, 1, tmp_path, MODES["local"]) == [True]
    assert run_ranks(one_rank, 1, tmp_path, MODES["diloco"]) == [False], (
        "its outer optimizer must move further than one rank"
    )


# Continuing from a saved state


def interrupted(world: World, mode: str, at: int) -> bool:
    """Load the state of a training after step `at` into a second one; return whether both continue equally."""
    settings, share = SyncConfig(**MODES[mode]), SHARES[1][world.rank]
    model, optimizer = fresh()
    outer = make_outer_sync(settings, model, world, share)
    again, other, resumed = model, optimizer, outer
    for step in range(1, STEPS + 1):
        inner_step(model, optimizer, world.rank, step)
        outer.after_inner_step(step, last=step == STEPS)
        if step > at:
            inner_step(again, other, world.rank, step)
            resumed.after_inner_step(step, last=step == STEPS)
        elif step == at:
            again, other, resumed = copied(settings, model, optimizer, outer, world, share)
    assert again is not model
    return all(np.array_equal(values, arrays(again)[name]) for name, values in arrays(model).items())


def copied(
    settings: SyncConfig, model: GPT, optimizer: AdamW, outer: OuterSync, world: World, share: float
) -> tuple[GPT, AdamW, OuterSync]:
    again, other = fresh()
    with outer.common(), torch.no_grad():
        again.load_state_dict(model.state_dict())
    resumed = make_outer_sync(settings, again, world, share)
    resumed.rewind(outer.common_step(0), outer.in_flight)
    room, saved = resumed.state(), outer.state()
    assert room.keys() == saved.keys()
    for name, tensor in room.items():
        tensor.copy_(saved[name])
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again, other, resumed


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_state_continues_in_the_middle_of_a_round(mode: str, at: int, tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, tmp_path, mode, at) == [True, True]


# The wire


class HeldWire(NoState):
    """Sum nothing, and complete the futures when `answer` is called."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Tensor], Tensor]] = []

    def __call__(self, bucket: Bucket) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self.held.append((future, bucket.flat))
        return future

    def answer(self) -> None:
        for future, gap in self.held:
            future.set_result(gap)
        self.held = []


def train_with_held_fragment(world: World) -> list[float]:
    model, optimizer = fresh()
    wire = HeldWire()
    exchange = OuterExchange(world, wire, 1.0)
    pieces = [OuterShard(0, dict(model.named_parameters()), OuterOptimizer(0.7, 0.9))]
    outer = StreamingDiLoCo([pieces], exchange, every=6, overlap=4, optimizer=OuterOptimizer(0.7, 0.9))
    before = arrays(model)
    blocked_s = []
    for step in range(1, 10):
        inner_step(model, optimizer, 0, step)
        blocked_s.append(outer.after_inner_step(step, last=False).tail_s)
        assert len(wire.held) == (1 if step >= 6 else 0), "the fragment must be sent once and stay unanswered"
        with outer.common():
            assert all(np.array_equal(values, before[name]) for name, values in arrays(model).items())
    assert outer.in_flight == 1
    wire.answer()
    inner_step(model, optimizer, 0, 10)
    outer.after_inner_step(10, last=False)
    assert outer.in_flight == 0
    with outer.common():
        assert any((values != before[name]).any() for name, values in arrays(model).items())
    return blocked_s


def test_steps_do_not_wait_for_a_fragment_in_flight(tmp_path: Path) -> None:
    """The exchange completes only after nine steps: a step that waited for it would never end."""
    [blocked_s] = run_ranks(train_with_held_fragment, 1, tmp_path)
    assert blocked_s == [0.0] * 9


def most_gaps_at_once(world: World) -> int:
    model, _ = fresh()
    alive, most = 0, 0

    class Answering(NoState):
        def __call__(self, bucket: Bucket) -> Future[Tensor]:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            done: Future[Tensor] = Future()
            done.set_result(bucket.flat)
            return done

    class Counted(OuterShard):
        def stash(self, gradient: Tensor) -> None:
            nonlocal alive
            alive -= 1
            super().stash(gradient)

    parameters = model.named_parameters()
    pieces = [Counted(index, {name: parameter}, AVERAGE) for index, (name, parameter) in enumerate(parameters)]
    DiLoCo(pieces, OuterExchange(world, Answering(), 1.0), every=1, optimizer=AVERAGE).after_inner_step(1, last=False)
    assert alive == 0
    return most


def test_an_exchange_holds_few_pieces_in_memory_at_a_time(tmp_path: Path) -> None:
    assert run_ranks(most_gaps_at_once, 1, tmp_path) == [3]


def state_bytes(world: World, settings: dict[str, Any]) -> tuple[int, int]:
    model, _ = fresh()
    state = make_outer_sync(SyncConfig(**settings), model, world, 0.5).state()
    return sum(tensor.nbytes for tensor in state.values()), sum(p.nbytes for p in model.parameters())


def test_momentum_is_the_only_copy_beside_the_common_parameters(tmp_path: Path) -> None:
    for outer_bytes, model_bytes in run_ranks(state_bytes, 2, tmp_path, MODES["diloco"]):
        assert outer_bytes == model_bytes
    assert all(outer_bytes == 0 for outer_bytes, _ in run_ranks(state_bytes, 2, tmp_path, MODES["local"]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sum_that_is_not_finite_is_refused(bad: float) -> None:
    piece = OuterShard(0, {"weight": nn.Parameter(torch.ones(3))}, AVERAGE)
    with pytest.raises(RunFailed, match="not finite"):
        piece.outer_step(torch.tensor([0.0, bad, 0.0]), AVERAGE)


# How a model is split

SIZED = st.lists(
    st.tuples(
        st.sampled_from(["token", "position", "norm", *(f"blocks.{number}" for number in range(6))]),
        st.integers(1, 3),
        st.integers(1, 1000),
    ),
    min_size=1,
    unique_by=lambda unit: unit[0],
).map(lambda units: [(f"{unit}.{number}", size) for unit, count, size in units for number in "abc"[:count]])


@given(SIZED, st.integers(1, 8))
def test_fragments_are_whole_blocks_in_order(parameters: list[tuple[str, int]], wanted: int) -> None:
    cut = cut_fragments(parameters, wanted)
    assert [name for names in cut for name in names] == [name for name, _ in parameters]
    assert 1 <= len(cut) <= wanted
    assert all(cut)
    of = {
        name.rpartition(".")[0]: {index for index, names in enumerate(cut) if name in names} for name, _ in parameters
    }
    assert all(len(indices) == 1 for indices in of.values())


def test_fragments_of_gpt2_are_about_equal() -> None:
    with torch.device("meta"):
        model = GPT(ModelConfig(layers=12, heads=12, width=768, seq_len=1024, vocab_size=50_257))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    parts = [
        sum(sizes[name] for name in names) / sum(sizes.values()) for names in cut_fragments(list(sizes.items()), 4)
    ]
    assert len(parts) == 4
    assert min(parts) > 0.15
    assert max(parts) < 0.35


@given(SIZED, st.integers(1, 2000))
def test_pieces_are_no_larger_than_allowed(parameters: list[tuple[str, int]], piece_bytes: int) -> None:
    sizes = dict(parameters)
    cut = cut_shards(parameters, piece_bytes)
    assert [name for names in cut for name in names] == list(sizes)
    assert all(len(names) == 1 or sum(sizes[name] for name in names) <= piece_bytes for names in cut)


@given(st.integers(1, 60), st.data())
def test_every_fragment_is_sent_once_a_round(every: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, every))
    for fragment in range(fragments):
        turns = [step for step in range(1, 2 * every + 1) if is_fragment_due(step, fragment, fragments, every)]
        assert len(turns) == 2
        assert turns[1] - turns[0] == every
    assert is_fragment_due(every, fragments - 1, fragments, every)


# Statistics exchanged between ranks at different steps

LAG = 3


def run_ahead(world: World, steps: int) -> tuple[list[int], list[StepStats], list[StepStats]]:
    """Let rank 0 run ahead as far as allowed before rank 1 starts; rank 1 requests a stop in its second step."""
    exchange = StepGather(world, lag=LAG)
    if world.rank == 1:
        world.store.wait(["ahead"])
    counts, known = [], []
    for step in range(1, steps + 1):
        comm = CommTimes(ready_at=0.0, tail_s=0.0, allreduce_s=None, wait_s=0.0)
        exchange.begin(float(step * (1 + world.rank)), comm, stop=StopKind(world.rank == 1 and step == 2))
        finished = exchange.finish()
        counts.append(len(finished))
        known += finished
        if world.rank == 0 and step == LAG:
            world.store.set("ahead", "yes")
    return counts, known, exchange.drain()


def test_ranks_at_different_steps_receive_the_same_statistics(tmp_path: Path) -> None:
    """If rank 0 waited for rank 1 in one of its first steps, both would wait forever."""
    ranks = run_ranks(run_ahead, 2, tmp_path, 6)
    for counts, known, drained in ranks:
        assert counts == [0] * LAG + [1] * 3
        assert [shared.loss_sum for shared in known + drained] == [3.0 * step for step in range(1, 7)]
        assert [shared.stop for shared in known] == [StopKind.NO, StopKind.PAUSE, StopKind.NO], (
            "every rank must stop after step 5"
        )


# Configuration


def test_every_mode_has_its_own_round_length() -> None:
    assert [SyncConfig(mode=mode).round_steps for mode in ("ddp", "stock", "local", "diloco", "streaming")] == [
        1, 1, 8, 50, 50,
    ]  # fmt: skip
    assert SyncConfig(mode="diloco", every=7).round_steps == 7
    assert SyncConfig(mode="ddp", every=7).round_steps == 1
    assert SyncConfig(mode="streaming", every=50).overlap_steps == 5
    assert SyncConfig(mode="streaming", every=4, fragments=4).overlap_steps == 1


def test_accumulate_is_ddp_with_four_times_the_batch() -> None:
    sync = build_config(flags={"sync": {"mode": "accumulate"}}).sync
    assert (sync.mode, sync.accumulate) == ("ddp", 4)
    assert build_config(flags={"sync": {"mode": "accumulate"}}, sets=["sync.accumulate=2"]).sync.accumulate == 2


@pytest.mark.parametrize(
    "sets",
    [
        ["sync.mode=streaming", "sync.every=3", "sync.fragments=4"],
        ["sync.mode=streaming", "sync.every=8", "sync.overlap=9"],
        ["sync.mode=diloco", "sync.measure=barrier"],
        ["sync.mode=diloco", "sync.every=0"],
        ["sync.mode=somehow"],
    ],
)
def test_invalid_combinations_of_settings_are_refused(sets: list[str]) -> None:
    with pytest.raises(ConfigError):
        build_config(sets=sets)
