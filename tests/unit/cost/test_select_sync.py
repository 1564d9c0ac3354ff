"""Selection of the sync method from synthetic times: the simplest that is fast enough, and the reason."""

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
# A third of it is an embedding, whose gradient is ready last. Encoding it as int8 takes some hundredths of a second.
SHAPES = ((4096, 256), (2048, 256), (2048, 256), (4096, 256))
FP32 = MeasuredExchange(DDP, SHAPES)


def step(compute_s: float, allreduce_s: float, hidden_s: float = 0.0) -> FirstSteps:
    exposed_s = allreduce_s - hidden_s
    return FirstSteps(compute_s + exposed_s, exposed_s, allreduce_s, compute_s)


def chosen(measured: FirstSteps, sync: SyncConfig = AUTO, steps: int = 1000, spare_bytes: float = 1e12) -> SyncDecision:
    return decide(measured, FP32, sync, SyncLimits(AUTO_WIRES, steps, spare_bytes))


@pytest.mark.parametrize(
    ("measured", "choice", "reason"),
    [
        # No exchange time is exposed: nothing to gain.
        (step(1.0, 0.5, hidden_s=0.5), DDP, "no other way gains enough"),
        # A hundredth is exposed.
        (step(1.0, 0.5, hidden_s=0.49), DDP, "10 ms of it the exchange"),
        # With fp16 almost nothing is exposed.
        (step(1.0, 0.2, hidden_s=0.1), HALVES, "with ddp in fp32, 100 ms of it the exchange; 1."),
        # A link so slow that only fewer exchanges help.
        (step(1.0, 2.0), DILOCO, "2.9× as fast (with ddp in int8 1.5"),
        # So slow that even one exchange in fifty steps is exposed.
        (step(1.0, 20.0), STREAMING, "21× as fast"),
    ],
)
def test_the_simplest_method_that_is_fast_enough_is_chosen(
    measured: FirstSteps, choice: SyncChoice, reason: str
) -> None:
    decision = chosen(measured)
    assert decision.choice == choice
    assert reason in decision.why
    assert decision.why.startswith(f"{choice}: a step takes")
    assert decision.agrees is None


def test_int8_is_chosen_over_fp16_only_for_a_gain() -> None:
    """It exposes half as much; where encoding takes longer than that, nothing is gained."""
    assert chosen(step(1.0, 0.5), steps=99).choice == BYTES
    larger = MeasuredExchange(DDP, tuple((40 * rows, columns) for rows, columns in SHAPES))
    assert decide(step(1.0, 0.5), larger, AUTO, SyncLimits(AUTO_WIRES, 99)).choice == HALVES


def test_an_embedding_sent_in_two_parts_hides_more() -> None:
    """Four times the bytes could have been hidden: with fp16 only the part that is ready last is exposed."""
    hiding = step(1.0, 0.8, hidden_s=0.6)
    whole, apart = (MeasuredExchange(DDP, SHAPES, last_bytes=last_bytes) for last_bytes in (0, 100_000))
    exposed_s = [
        expected_option(hiding, exchange, AUTO, HALVES).step_s - 1.0 - exchange.encode_s(HALVES)
        for exchange in (whole, apart)
    ]
    assert exposed_s == pytest.approx([0.1, 0.8 / 2 * 100_000 / (4 * whole.parameters)])


def test_outer_steps_need_two_rounds() -> None:
    slow = step(1.0, 2.0)
    assert chosen(slow, steps=100).choice == DILOCO
    assert chosen(slow, steps=99).choice == BYTES
    assert chosen(slow, AUTO.model_copy(update={"every": 10}), steps=99).choice.every == 10


@pytest.mark.parametrize(("spare_bytes", "choice"), [(26e6, DILOCO), (25e6, BYTES), (12e6, HALVES), (0.0, HALVES)])
def test_a_method_without_enough_memory_is_not_chosen(spare_bytes: float, choice: SyncChoice) -> None:
    """Two copies of 3.1 million numbers for outer steps, one for int8."""
    assert chosen(step(1.0, 2.0), spare_bytes=spare_bytes).choice == choice


def test_a_requested_wire_format_is_kept() -> None:
    sync = SyncConfig(mode="auto", wire="bf16")
    assert {choice.wire for choice in candidates(sync, AUTO_WIRES, 1000)} == {"bf16"}
    assert decide(
        step(1.0, 1.0), MeasuredExchange(SyncChoice("ddp", "bf16"), SHAPES), sync, SyncLimits(AUTO_WIRES, 1000)
    ).choice == (SyncChoice("diloco", "bf16", 50))


def test_shared_memory_offers_only_fp32() -> None:
    assert list(candidates(AUTO, AUTO_WIRES[:1], 1000)) == [
        DDP,
        SyncChoice("diloco", "fp32", 50),
        SyncChoice("streaming", "fp32", 50),
    ]


def test_rounds_too_short_for_fragments_are_not_streamed() -> None:
    modes = [choice.mode for choice in candidates(SyncConfig(mode="auto", every=3), AUTO_WIRES, 1000)]
    assert modes == ["ddp", "ddp", "ddp", "diloco"]


@pytest.mark.parametrize(
    ("planned", "agrees", "reason"),
    [
        ("diloco:50,fp16", True, "; as planned"),
        ("ddp:1,fp16", False, "; the plan had chosen ddp in fp16 with 1.2 s a step: measurement disagrees"),
    ],
)
def test_a_plan_is_confirmed_or_contradicted(planned: str, agrees: bool, reason: str) -> None:
    decision = chosen(step(1.0, 2.0), SyncConfig(mode="auto", planned=planned, planned_step_s=1.2))
    assert (decision.choice, decision.agrees) == (DILOCO, agrees)
    assert decision.why.endswith(reason)


def test_the_rank_that_waits_least_is_the_slowest() -> None:
    fast, slow = RankStep(2.0, 0.1, 0.9, 1.5), RankStep(2.0, 0.5, 0.0, 0.6)
    assert slowest([fast, slow]) == slow
    assert typical_step([[fast, slow]] * 4) == FirstSteps(2.0, 0.5, 0.6, own_s=1.5)


def test_ranks_that_are_late_in_turn_have_an_average_own_time() -> None:
    """In every step one of two ranks is half a second late, and the other waits for it."""
    late, early = RankStep(2.0, 0.5, 0.0, 0.5), RankStep(2.0, 0.5, 0.5, 1.0)
    assert typical_step([[late, early], [early, late]] * 2) == FirstSteps(2.0, 0.5, 0.5, own_s=1.25)


def test_few_slow_steps_are_enough() -> None:
    quick, slow = [RankStep(0.2, 0.1, 0.0, 0.1)] * 2, [RankStep(41.0, 40.0, 0.0, 40.0)] * 2
    assert [is_enough([quick] * count) for count in range(6)] == [False] * 4 + [True] * 2
    assert is_enough([slow])


def test_one_odd_step_does_not_decide() -> None:
    usual, odd = [RankStep(1.5, 0.5, 0.0, 0.5)], [RankStep(9.9, 0.9, 0.0, 0.9)]
    assert typical_step([usual, usual, odd]) == step(1.0, 0.5)


# Properties for all times

SECONDS = st.floats(0.0, 100.0)
MEASURED = st.builds(
    lambda compute_s, allreduce_s, part: step(compute_s + 0.01, allreduce_s, part * allreduce_s),
    SECONDS,
    SECONDS,
    st.floats(0.0, 1.0),
)


@given(MEASURED)
def test_the_measured_exchange_is_predicted_with_its_own_time(measured: FirstSteps) -> None:
    assert expected_option(measured, FP32, AUTO, DDP).step_s == pytest.approx(measured.step_s)


@given(MEASURED, st.sampled_from(list(candidates(AUTO, AUTO_WIRES, 1000))))
def test_fewer_bytes_never_expose_more_time_nor_less_than_none(measured: FirstSteps, choice: SyncChoice) -> None:
    taken_s = expected_option(measured, FP32, AUTO, choice).step_s - FP32.encode_s(choice)
    alone_s = measured.step_s - measured.exposed_s
    within = 1e-9 * (1 + measured.step_s + measured.allreduce_s)
    blocked_s = max(measured.exposed_s, measured.allreduce_s / choice.every if choice.is_outer else 0.0)
    assert alone_s - FP32.encode_s(choice) - within <= taken_s <= alone_s + blocked_s + within


@given(MEASURED)
def test_a_prediction_from_fp16_to_fp32_is_at_least_proportional(measured: FirstSteps) -> None:
    """From steps measured with fp16, the predicted exposed time of fp32 is at least proportional to the bytes."""
    halves = MeasuredExchange(HALVES, SHAPES)
    exposed_s = expected_option(measured, halves, AUTO, DDP).step_s - (measured.step_s - measured.exposed_s)
    assert exposed_s >= 2 * measured.exposed_s - halves.encode_s(HALVES) - 1e-6


@given(st.lists(st.floats(0.01, 100.0), min_size=5, max_size=5))
def test_a_method_that_costs_accuracy_is_picked_only_for_a_gain(times: list[float]) -> None:
    options = [
        SyncOption(choice, step_s) for choice, step_s in zip(candidates(AUTO, AUTO_WIRES, 1000), times, strict=True)
    ]
    best = pick(options)
    simpler = options[: options.index(best)]
    for other in simpler:
        gain = LEAST_GAIN_OTHER_TRAINING if best.choice.is_outer and not other.choice.is_outer else LEAST_GAIN
        assert best.step_s * gain <= other.step_s * LEAST_GAIN_OTHER_TRAINING
    assert all(best.step_s < other.step_s for other in simpler)
    assert best.step_s <= LEAST_GAIN_OTHER_TRAINING * LEAST_GAIN * min(times)


# Text form


@given(st.sampled_from(["ddp", "local", "diloco", "streaming"]), st.sampled_from(AUTO_WIRES), st.integers(1, 10**6))
def test_a_choice_survives_its_text_form(mode: str, wire: str, every: int) -> None:
    choice = parse_choice(f"{mode}:{every},{wire}")
    assert parse_choice(choice.text) == choice
    assert choice_of_event({"sync": mode, "wire": wire, "round_steps": every}) == choice


@pytest.mark.parametrize("record", [{}, {"sync": "stock", "wire": "fp32", "round_steps": 1}, {"sync": "ddp"}])
def test_an_incomplete_event_gives_no_choice(record: dict[str, object]) -> None:
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
def test_settings_that_conflict_with_auto_are_refused(sets: list[str]) -> None:
    with pytest.raises(ConfigError):
        build_config(sets=sets)
