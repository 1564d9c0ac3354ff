"""Which way to synchronise, by made-up times: the plainest that is fast enough, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.load import build_config
from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import AUTO_WIRES, SyncChoice, choice_of_event, parse_choice
from shoal.cost.select_sync import (
    LEAST_GAIN,
    LEAST_GAIN_OTHER_TRAINING,
    FirstSteps,
    MeasuredExchange,
    RankStep,
    SyncDecision,
    SyncLimits,
    SyncOption,
    candidates,
    decide,
    expected_option,
    is_enough,
    pick,
    slowest,
    typical_step,
)
from shoal.errors import ConfigError

AUTO = SyncConfig(mode="auto")
DDP, HALVES, BYTES = (SyncChoice("ddp", wire) for wire in AUTO_WIRES)
DILOCO, STREAMING = SyncChoice("diloco", "fp16", 50), SyncChoice("streaming", "fp16", 50)
# A third of it is an embedding, whose gradient is ready last. Making int8 of it takes some hundredths of a second.
SHAPES = ((4096, 256), (2048, 256), (2048, 256), (4096, 256))
FP32 = MeasuredExchange(DDP, SHAPES)


def step(compute_s: float, allreduce_s: float, hidden_s: float = 0.0) -> FirstSteps:
    exposed_s = allreduce_s - hidden_s
    return FirstSteps(compute_s + exposed_s, exposed_s, allreduce_s, compute_s)


def chosen(measured: FirstSteps, sync: SyncConfig = AUTO, steps: int = 1000, spare_bytes: float = 1e12) -> SyncDecision:
    return decide(measured, FP32, sync, SyncLimits(AUTO_WIRES, steps, spare_bytes))


@pytest.mark.parametrize(
    ("measured", "choice", "says"),
    [
        # Nothing shows: nothing to gain.
        (step(1.0, 0.5, hidden_s=0.5), DDP, "no other way gains enough"),
        # A hundredth shows.
        (step(1.0, 0.5, hidden_s=0.49), DDP, "10 ms of it the exchange"),
        # Halves are as good as nothing at all, then.
        (step(1.0, 0.2, hidden_s=0.1), HALVES, "with ddp in fp32, 100 ms of it the exchange; 1."),
        # A link so slow that only fewer trips help.
        (step(1.0, 2.0), DILOCO, "2.9× as fast (with ddp in int8 1.5"),
        # So slow that even one trip in fifty steps shows.
        (step(1.0, 20.0), STREAMING, "21× as fast"),
    ],
)
def test_the_plainest_that_is_fast_enough(measured: FirstSteps, choice: SyncChoice, says: str) -> None:
    decision = chosen(measured)
    assert decision.choice == choice
    assert says in decision.why
    assert decision.why.startswith(f"{choice}: a step takes")
    assert decision.agrees is None


def test_int8_needs_a_reason_beside_fp16() -> None:
    """It shows half as much; where making it takes longer than that, nothing is gained."""
    assert chosen(step(1.0, 0.5), steps=99).choice == BYTES
    larger = MeasuredExchange(DDP, tuple((40 * rows, columns) for rows, columns in SHAPES))
    assert decide(step(1.0, 0.5), larger, AUTO, SyncLimits(AUTO_WIRES, 99)).choice == HALVES


def test_an_embedding_that_goes_in_two_parts_hides_more() -> None:
    """Four times the bytes could have been hidden: of halves nothing shows but what is ready last."""
    hiding = step(1.0, 0.8, hidden_s=0.6)
    whole, apart = (MeasuredExchange(DDP, SHAPES, last_bytes=last_bytes) for last_bytes in (0, 100_000))
    shown_s = [
        expected_option(hiding, each, AUTO, HALVES).step_s - 1.0 - each.encode_s(HALVES) for each in (whole, apart)
    ]
    assert shown_s == pytest.approx([0.1, 0.8 / 2 * 100_000 / (4 * whole.parameters)])


def test_outer_steps_need_two_rounds() -> None:
    slow = step(1.0, 2.0)
    assert chosen(slow, steps=100).choice == DILOCO
    assert chosen(slow, steps=99).choice == BYTES
    assert chosen(slow, AUTO.model_copy(update={"every": 10}), steps=99).choice.every == 10


@pytest.mark.parametrize(("spare_bytes", "choice"), [(26e6, DILOCO), (25e6, BYTES), (12e6, HALVES), (0.0, HALVES)])
def test_what_has_no_room_is_not_chosen(spare_bytes: float, choice: SyncChoice) -> None:
    """Two copies of 3.1 million numbers for outer steps, one for int8."""
    assert chosen(step(1.0, 2.0), spare_bytes=spare_bytes).choice == choice


def test_a_wire_that_was_asked_for_stays() -> None:
    sync = SyncConfig(mode="auto", wire="bf16")
    assert {choice.wire for choice in candidates(sync, AUTO_WIRES, 1000)} == {"bf16"}
    assert decide(
        step(1.0, 1.0), MeasuredExchange(SyncChoice("ddp", "bf16"), SHAPES), sync, SyncLimits(AUTO_WIRES, 1000)
    ).choice == (SyncChoice("diloco", "bf16", 50))


def test_memory_of_one_machine_has_no_format() -> None:
    assert list(candidates(AUTO, AUTO_WIRES[:1], 1000)) == [
        DDP,
        SyncChoice("diloco", "fp32", 50),
        SyncChoice("streaming", "fp32", 50),
    ]


def test_rounds_too_short_for_fragments_are_not_streamed() -> None:
    modes = [choice.mode for choice in candidates(SyncConfig(mode="auto", every=3), AUTO_WIRES, 1000)]
    assert modes == ["ddp", "ddp", "ddp", "diloco"]


@pytest.mark.parametrize(
    ("planned", "agrees", "says"),
    [
        ("diloco:50,fp16", True, "; as planned"),
        ("ddp:1,fp16", False, "; the plan had chosen ddp in fp16 with 1.2 s a step: measurement disagrees"),
    ],
)
def test_a_plan_is_confirmed_or_contradicted(planned: str, agrees: bool, says: str) -> None:
    decision = chosen(step(1.0, 2.0), SyncConfig(mode="auto", planned=planned, planned_step_s=1.2))
    assert (decision.choice, decision.agrees) == (DILOCO, agrees)
    assert decision.why.endswith(says)


def test_who_waits_least_is_the_slowest() -> None:
    fast, slow = RankStep(2.0, 0.1, 0.9, 1.5), RankStep(2.0, 0.5, 0.0, 0.6)
    assert slowest([fast, slow]) == slow
    assert typical_step([[fast, slow]] * 4) == FirstSteps(2.0, 0.5, 0.6, own_s=1.5)


def test_ranks_that_take_turns_in_being_late_lose_nothing_alone() -> None:
    """In every step one of two is half a second late, and the other waits for it."""
    late, early = RankStep(2.0, 0.5, 0.0, 0.5), RankStep(2.0, 0.5, 0.5, 1.0)
    assert typical_step([[late, early], [early, late]] * 2) == FirstSteps(2.0, 0.5, 0.5, own_s=1.25)


def test_few_slow_steps_are_enough() -> None:
    quick, slow = [RankStep(0.2, 0.1, 0.0, 0.1)] * 2, [RankStep(41.0, 40.0, 0.0, 40.0)] * 2
    assert [is_enough([quick] * count) for count in range(6)] == [False] * 4 + [True] * 2
    assert is_enough([slow])


def test_one_odd_step_does_not_decide() -> None:
    usual, odd = [RankStep(1.5, 0.5, 0.0, 0.5)], [RankStep(9.9, 0.9, 0.0, 0.9)]
    assert typical_step([usual, usual, odd]) == step(1.0, 0.5)


# What holds for all times

SECONDS = st.floats(0.0, 100.0)
MEASURED = st.builds(
    lambda compute_s, allreduce_s, part: step(compute_s + 0.01, allreduce_s, part * allreduce_s),
    SECONDS,
    SECONDS,
    st.floats(0.0, 1.0),
)


@given(MEASURED)
def test_the_same_exchange_takes_as_long_as_it_did(measured: FirstSteps) -> None:
    assert expected_option(measured, FP32, AUTO, DDP).step_s == pytest.approx(measured.step_s)


@given(MEASURED, st.sampled_from(list(candidates(AUTO, AUTO_WIRES, 1000))))
def test_fewer_bytes_never_show_more_and_never_less_than_nothing(measured: FirstSteps, choice: SyncChoice) -> None:
    taken_s = expected_option(measured, FP32, AUTO, choice).step_s - FP32.encode_s(choice)
    alone_s = measured.step_s - measured.exposed_s
    within = 1e-9 * (1 + measured.step_s + measured.allreduce_s)
    blocked_s = max(measured.exposed_s, measured.allreduce_s / choice.every if choice.is_outer else 0.0)
    assert alone_s - FP32.encode_s(choice) - within <= taken_s <= alone_s + blocked_s + within


@given(MEASURED)
def test_there_and_back_again(measured: FirstSteps) -> None:
    """Steps measured with halves say of fp32 at least what would show in proportion."""
    halves = MeasuredExchange(HALVES, SHAPES)
    shown_s = expected_option(measured, halves, AUTO, DDP).step_s - (measured.step_s - measured.exposed_s)
    assert shown_s >= 2 * measured.exposed_s - halves.encode_s(HALVES) - 1e-6


@given(st.lists(st.floats(0.01, 100.0), min_size=5, max_size=5))
def test_what_costs_accuracy_pays(times: list[float]) -> None:
    options = [
        SyncOption(choice, step_s) for choice, step_s in zip(candidates(AUTO, AUTO_WIRES, 1000), times, strict=True)
    ]
    best = pick(options)
    plainer = options[: options.index(best)]
    for other in plainer:
        gain = LEAST_GAIN_OTHER_TRAINING if best.choice.is_outer and not other.choice.is_outer else LEAST_GAIN
        assert best.step_s * gain <= other.step_s * LEAST_GAIN_OTHER_TRAINING
    assert all(best.step_s < other.step_s for other in plainer)
    assert best.step_s <= LEAST_GAIN_OTHER_TRAINING * LEAST_GAIN * min(times)


# How it is written down


@given(st.sampled_from(["ddp", "local", "diloco", "streaming"]), st.sampled_from(AUTO_WIRES), st.integers(1, 10**6))
def test_a_choice_is_read_as_it_was_written(mode: str, wire: str, every: int) -> None:
    choice = parse_choice(f"{mode}:{every},{wire}")
    assert parse_choice(choice.text) == choice
    assert choice_of_event({"sync": mode, "wire": wire, "round_steps": every}) == choice


@pytest.mark.parametrize("record", [{}, {"sync": "stock", "wire": "fp32", "round_steps": 1}, {"sync": "ddp"}])
def test_an_event_that_says_nothing(record: dict[str, object]) -> None:
    assert choice_of_event(record) is None


def test_settings_before_and_after_the_choice() -> None:
    assert AUTO.first_settings.expected_choice == DDP
    planned = SyncConfig(mode="auto", planned="diloco:100,fp16")
    assert (planned.expected_choice, planned.first_settings.expected_choice) == (
        SyncChoice("diloco", "fp16", 100),
        HALVES,
    )
    assert AUTO.with_choice(DILOCO).expected_choice == DILOCO
    assert not AUTO.is_outer
    assert SyncConfig(mode="diloco").first_settings.mode == "diloco"


@pytest.mark.parametrize(
    "sets",
    [
        ["sync.mode=auto", "sync.measure=off"],
        ["sync.mode=auto", "sync.measure=barrier"],
        ["sync.mode=auto", "sync.wire=powersgd"],
        ["sync.mode=auto", "sync.planned=diloco"],
        ["sync.mode=auto", "sync.planned=stock:1,fp32"],
        ["sync.mode=auto", "sync.planned=ddp:1,fp99"],
    ],
)
def test_what_cannot_be_chosen_from_is_refused(sets: list[str]) -> None:
    with pytest.raises(ConfigError):
        build_config(sets=sets)
