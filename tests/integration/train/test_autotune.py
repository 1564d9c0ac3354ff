"""When to compile and when to use bf16: decisions from given times, the trial cache, and real trials.

Exercises train.autotune.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema import Config, ModelConfig, TrainConfig
from shoal.engine.division import _is_compiled
from shoal.model.gpt import GPT, compile_block, leave_batch_open
from shoal.sync.world import World
from shoal.train import autotune
from shoal.train.autotune import (
    NEVER,
    BlockTimes,
    ComputeChoice,
    RemainingWork,
    decide,
    key,
    may_pay,
    settled,
    work_left,
)
from tests.support.ranks import run_ranks

AUTO = TrainConfig(compile="auto", precision="auto")
LONG = RemainingWork(blocks=100_000, flops=1e18)
SHORT = RemainingWork(blocks=10, flops=1e9)


def make_times(plain_s: float, compiled_s: float, compile_s: float = 30.0, bf16_s: float = NEVER) -> BlockTimes:
    return BlockTimes(plain_s, bf16_s, compiled_s, compile_s, tried=1.0)


@pytest.mark.parametrize(
    ("times", "work", "is_paid", "compiled", "reason"),
    [
        (make_times(0.010, 0.008), LONG, True, True, "compiled: a block is 1.25× as fast"),
        (make_times(0.010, 0.008), LONG, False, True, "1.25×"),
        (make_times(0.010, 0.012), LONG, True, False, "only 0.83× as fast"),
        # One percent is noise.
        (make_times(0.010, 0.0099), LONG, True, False, "only 1.01×"),
        # Saving 2 ms ten times does not pay for 30 s of compiling, unless the result is cached.
        (make_times(0.010, 0.008), SHORT, False, False, "compiling takes 30"),
        (make_times(0.010, 0.008), SHORT, True, True, "compiled"),
        (make_times(0.010, NEVER), LONG, True, False, "compiling failed"),
        (BlockTimes(0.010), LONG, False, False, "too short to gain from it, or there is no g++"),
    ],
)
def test_compiling_is_chosen_where_it_pays(
    times: BlockTimes, work: RemainingWork, is_paid: bool, compiled: bool, reason: str
) -> None:
    choice = decide(TrainConfig(), times, work, is_paid)
    assert (choice.compiled, choice.precision) == (compiled, "fp32")
    assert reason in choice.why


@pytest.mark.parametrize(
    ("times", "precision", "reason"),
    [
        (BlockTimes(0.010, 0.002), "bf16", "bf16: a block takes 2 ms in bf16, 10 ms in fp32"),
        (BlockTimes(0.010, 0.020), "fp32", "fp32: a block takes 20 ms in bf16"),
        (BlockTimes(0.010), "fp32", "multiplies bf16 no faster"),
    ],
)
def test_bf16_is_chosen_where_it_is_faster(times: BlockTimes, precision: str, reason: str) -> None:
    choice = decide(AUTO, times, LONG, is_paid=False)
    assert choice.precision == precision
    assert reason in choice.why


def test_explicit_settings_override_the_trial() -> None:
    slow = make_times(0.01, 0.09, bf16_s=0.09)
    assert decide(TrainConfig(compile="on", precision="auto"), slow, SHORT, is_paid=False).compiled
    assert decide(TrainConfig(compile="auto", precision="bf16"), slow, LONG, is_paid=False).precision == "bf16"


def test_no_trial_runs_without_an_open_choice_or_possible_gain() -> None:
    assert settled(TrainConfig(compile="off"), device="cpu", work=LONG) == ComputeChoice(False, "fp32")
    on = TrainConfig(compile="on", precision="bf16")
    assert settled(on, device="cpu", work=LONG) == ComputeChoice(True, "bf16")
    # A GPU needs more work before a trial can pay.
    assert settled(TrainConfig(), "cuda", RemainingWork(1000, 1e12)) is not None
    assert settled(TrainConfig(), "cuda", RemainingWork(10**6, 1e18)) is None
    assert settled(TrainConfig(), device="cpu", work=LONG) is None
    assert settled(AUTO, device="cpu", work=SHORT) is None
    short = settled(TrainConfig(), device="cpu", work=SHORT)
    assert short is not None
    assert not short.compiled
    assert "too short" in short.why


def test_the_demo_is_too_short_for_a_trial() -> None:
    demo = Config(model=ModelConfig(vocab_size=2048))
    assert settled(demo.train, device="cpu", work=work_left(demo.model, 16, 1, demo.train.steps)) is not None


@given(st.floats(1e-4, 10), st.floats(1e-4, 10), st.floats(1, 200), st.integers(0, 10**6))
def test_compiling_without_a_cached_result_saves_time(
    plain_s: float, compiled_s: float, compile_s: float, blocks: int
) -> None:
    work = RemainingWork(blocks, 1e18)
    if decide(TrainConfig(), make_times(plain_s, compiled_s, compile_s), work, is_paid=False).compiled:
        assert compile_s + blocks * compiled_s < blocks * plain_s
    if not may_pay(BlockTimes(plain_s, compile_s=compile_s), work):
        assert 0.35 * plain_s * blocks <= 2 * compile_s


def test_the_cache_key_depends_on_every_input() -> None:
    model = ModelConfig(vocab_size=9)
    base = ("Neoverse-N1", "2.13.0", 1, 2, model, 4)
    others = [
        ("EPYC", *base[1:]),
        (base[0], "2.12.0", *base[2:]),
        (*base[:2], 2, *base[3:]),
        (*base[:3], 1, *base[4:]),
        (*base[:4], model.model_copy(update={"width": 384}), 4),
        (*base[:5], 8),
    ]
    assert len({key(*fields) for fields in [base, *others]}) == 7


def test_times_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "trials.json"
    times = make_times(0.1, 0.08)
    assert autotune.recall(file, "here") is None
    autotune.remember(file, "here", times)
    autotune.remember(file, "there", BlockTimes(0.5))
    assert autotune.recall(file, "here") == times
    assert autotune.recall(file, "there") == BlockTimes(0.5)
    assert [path.name for path in file.parent.iterdir()] == ["trials.json"]


def test_only_the_newest_times_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    for number in range(70):
        autotune.remember(file, f"model {number}", BlockTimes(1.0 + number))
    assert autotune.recall(file, "model 5") is None
    assert autotune.recall(file, "model 6") == BlockTimes(7.0)
    assert autotune.recall(file, "model 69") == BlockTimes(70.0)


WHOLE = {"plain_s": 0.1, "bf16_s": None, "compiled_s": 0.05, "compile_s": 20.0, "tried": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "\udce4".encode("utf-8", "surrogateescape").decode("latin-1"),
        "[" * 100_000,
        json.dumps({"version": 1, "trials": {"here": WHOLE}}),
        json.dumps({"version": 2, "trials": [WHOLE]}),
        *(
            json.dumps({"version": 2, "trials": {"here": entry}})
            for entry in (
                None,
                "fast",
                {},
                WHOLE | {"plain_s": None},
                WHOLE | {"plain_s": "0.1"},
                WHOLE | {"compiled_s": -1},
                WHOLE | {"compiled_s": math.nan},
                WHOLE | {"tried": True},
                WHOLE | {"more": 1.0},
            )
        ),
    ],
)
def test_a_damaged_or_foreign_cache_is_ignored(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    file.write_text(text)
    assert autotune.recall(file, "here") is None
    autotune.remember(file, "here", BlockTimes(0.25))
    assert autotune.recall(file, "here") == BlockTimes(0.25)


def test_an_unwritable_or_missing_cache_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "file" / "trials.json", None):
        autotune.remember(file, "here", BlockTimes(0.25))
        assert autotune.recall(file, "here") is None


MODEL = ModelConfig(layers=2, heads=2, width=16, seq_len=8, vocab_size=30)


def choose_together(world: World, cache: str, times: list[float], fake: bool) -> tuple[Any, ...]:
    """Choose with a compiled block that takes `times[r]` on rank r; an eager one takes one second on every rank."""
    os.environ["XDG_CACHE_HOME"] = f"{cache}-{world.rank}"
    calls = []

    def compiled(self: Any, precision: torch.dtype) -> tuple[float, float]:
        calls.append(precision)
        return 5.0, times[world.rank]

    if fake:
        autotune._BlockTimer.compiled = compiled  # type: ignore[method-assign]
        autotune._BlockTimer.seconds = lambda self, precision: 1.0  # type: ignore[method-assign]
    autotune.has_compiler = lambda: True
    model = GPT(MODEL)
    before = [parameter.clone() for parameter in model.parameters()]
    choice = autotune.choose(model, Config(model=MODEL), 2, LONG, world, print)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    return choice.compiled, choice.why, len(calls)


@pytest.mark.parametrize(("times", "compiled"), [([0.5, 0.6], True), ([0.5, 1.2], False), ([math.inf, 0.5], False)])
def test_the_slowest_rank_decides_for_all_and_is_remembered(times: list[float], compiled: bool, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    first = run_ranks(choose_together, 2, tmp_path, cache, times, True)
    assert [result[0] for result in first] == [compiled] * 2
    assert first[0][1] == first[1][1]
    assert [result[2] for result in first] == [1, 1]
    # Only rank 0 is the first rank of its node, so rank 1's cache is empty: both ranks try and agree again.
    again = run_ranks(choose_together, 2, tmp_path, cache, times, True)
    assert [result[:2] for result in again] == [result[:2] for result in first]


def test_remembered_times_are_not_measured_again(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    [first] = run_ranks(choose_together, 1, tmp_path, cache, [0.5], True)
    [second] = run_ranks(choose_together, 1, tmp_path, cache, [9.9], True)
    assert (first[0], first[2]) == (True, 1)
    assert (second[0], second[2]) == (True, 0)


def without_compiler(world: World, cache: str) -> tuple[bool, str]:
    os.environ["XDG_CACHE_HOME"] = cache
    os.environ["CXX"] = "no-such-compiler"
    autotune._BlockTimer.seconds = lambda self, precision: 1.0  # type: ignore[method-assign]
    model = GPT(MODEL)
    choice = autotune.choose(model, Config(model=MODEL), 2, LONG, world, print)
    autotune.apply(choice, model)
    return model._is_compiled, choice.why


def test_without_a_compiler_every_rank_stays_eager(tmp_path: Path) -> None:
    [(compiled, why)] = run_ranks(without_compiler, 1, tmp_path, str(tmp_path / "cache"))
    assert not compiled
    assert "there is no g++" in why


def train_compiled(world: World, precision: str) -> tuple[list[float], list[float], float, float, int]:
    """Train with torch's tracer but without its code generator: the number of compilations is the same."""
    torch.manual_seed(0)
    plain = GPT(MODEL)
    traced = GPT(MODEL)
    traced.load_state_dict(plain.state_dict())
    plain.matmul_dtype = traced.matmul_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    seen: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        seen.append(1)
        return graph.forward

    for block in traced.blocks:
        compile_block(block, backend=count)
    traced._is_compiled = True
    rows = torch.randint(MODEL.vocab_size, (4, MODEL.seq_len + 1))
    curves: list[list[float]] = [[], []]
    for curve, model in zip(curves, (plain, traced), strict=True):
        # Shares follow the speed of a machine, and its micro-batches their shares.
        for size in (4, 3, 2, 4):
            loss = model(rows[:size, :-1], rows[:size, 1:])
            loss.backward()
            curve.append(loss.item())
    values = []
    for model in (plain, traced):
        model.eval()
        with torch.no_grad(), model.run_eagerly():
            # Another shape and mode: evaluation compiles nothing.
            values.append(model(rows[:1, :-1], rows[:1, 1:]).item())
    return curves[0], curves[1], values[0], values[1], len(seen)


def find_fixed_blocks(world: World, device: str) -> tuple[bool, bool]:
    """Return whether a compiled block counts as a user's compiled module, and whether its batch is left open."""
    model, x = GPT(MODEL).to(device), torch.zeros(2, MODEL.seq_len, MODEL.width, device=device)
    model.compile_blocks()
    leave_batch_open(model.blocks[0], x)
    return any(_is_compiled(module) for module in model.modules()), hasattr(x, "_dynamo_weak_dynamic_indices")


# The meta device stands for a GPU. Ranks with and without one must divide the batch in the same way.
@pytest.mark.parametrize(("device", "is_open"), [("cpu", True), ("meta", False)])
def test_blocks_compiled_on_a_cpu_take_any_micro_batch(device: str, is_open: bool, tmp_path: Path) -> None:
    assert run_ranks(find_fixed_blocks, 1, tmp_path, device) == [(False, is_open)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_are_compiled_once_and_evaluation_never(precision: str, tmp_path: Path) -> None:
    [(plain, compiled, evaluated, as_compiled, graphs)] = run_ranks(train_compiled, 1, tmp_path, precision)
    assert compiled == pytest.approx(plain, rel=1e-5 if precision == "fp32" else 1e-2)
    assert as_compiled == pytest.approx(evaluated, rel=1e-6)
    assert graphs == 1


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_bf16_model_is_close_and_keeps_fp32_weights() -> None:
    torch.manual_seed(0)
    model = GPT(MODEL)
    rows = torch.randint(MODEL.vocab_size, (2, MODEL.seq_len + 1))
    exact = model(rows[:, :-1], rows[:, 1:]).item()
    autotune.apply(ComputeChoice(precision="bf16"), model)
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    assert loss.item() == pytest.approx(exact, rel=1e-2)
    assert loss.item() != exact
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
