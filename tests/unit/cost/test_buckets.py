"""The cost of a step: buckets as DDP fills them, overlap, and cores shared by backward and exchange."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema import ModelConfig
from shoal.cost.buckets import BucketCost, even_gradients, fill_buckets, gradients
from shoal.cost.model_size import parameter_count
from shoal.cost.network import ExchangeCost, LinearFit, MeasuredNetwork, RingNetwork
from shoal.cost.workload import RankWork, exposed_s

GPT2 = ModelConfig(layers=12, heads=12, width=768, seq_len=1024, vocab_size=50_257)
SMALL = ModelConfig(vocab_size=2048)


@pytest.mark.parametrize("model", [GPT2, SMALL])
def test_buckets_hold_every_parameter_and_are_ready_in_order(model: ModelConfig) -> None:
    buckets = fill_buckets(gradients(model), 25.0, 1.0)
    assert sum(bucket.parameters for bucket in buckets) == parameter_count(model)
    assert [bucket.ready for bucket in buckets] == sorted(bucket.ready for bucket in buckets)
    assert buckets[-1].ready == 1.0


def test_the_tied_embedding_is_in_the_last_bucket_and_ready_last() -> None:
    last = fill_buckets(gradients(GPT2), 25.0)[-1]
    assert last.parameters >= GPT2.vocab_size * GPT2.width
    assert last.ready == 1.0


@given(st.integers(1, 10**10))
def test_even_gradients_add_up_to_the_parameter_count(parameters: int) -> None:
    assert sum(gradient.parameters for gradient in even_gradients(parameters)) == parameters


WORK = RankWork(micro_batches=1, forward_s=1.0, backward_s=2.0, optimizer_s=0.1)
HALVES = [BucketCost(10, 0.5), BucketCost(10, 1.0)]


def test_the_exchange_of_an_early_bucket_is_hidden() -> None:
    assert exposed_s(WORK, HALVES, lambda _: ExchangeCost(0.4), overlap=True) == pytest.approx(0.4)
    assert exposed_s(WORK, HALVES, lambda _: ExchangeCost(0.4), overlap=False) == pytest.approx(0.8)


def test_a_slow_link_delays_the_next_bucket() -> None:
    # The first exchange ends at 1.0 + 3.0, two seconds after backward; the second takes three more.
    assert exposed_s(WORK, HALVES, lambda _: ExchangeCost(3.0), overlap=True) == pytest.approx(5.0)


def test_an_exchange_that_uses_cores_slows_backward_down() -> None:
    # Half a core for 0.4 s is 0.2 core seconds that backward lacks; the second bucket runs after backward.
    assert exposed_s(WORK, HALVES, lambda _: ExchangeCost(0.4, cores=0.5), overlap=True) == pytest.approx(0.6)


def test_spare_cores_are_used_first() -> None:
    work = RankWork(1, 1.0, 2.0, 0.1, busy_cores=1.0, spare_cores=1.0)
    assert exposed_s(work, HALVES, lambda _: ExchangeCost(0.4, cores=0.9), overlap=True) == pytest.approx(0.4)


@given(st.floats(0, 10), st.floats(0, 4), st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0, 3))
def test_exposed_time_is_between_zero_and_the_exchange_without_overlap(
    seconds: float, cores: float, ready: list[float], spare: float
) -> None:
    work = RankWork(1, 1.0, 2.0, 0.1, spare_cores=spare)
    buckets = [BucketCost(1, part) for part in sorted(ready)]
    exposed = exposed_s(work, buckets, lambda _: ExchangeCost(seconds, cores), overlap=True)
    core_bound_s = len(buckets) * seconds * max(1.0, cores)
    assert -1e-9 <= exposed <= core_bound_s + 1e-6


def test_ring_times_follow_bandwidth_and_latency() -> None:
    network = RingNetwork(bytes_per_s=125e6, latency_s=1e-4)
    assert network.all_reduce(1, 1e6, 4).seconds == 0
    assert network.all_reduce(2, 125e6, 4).seconds == pytest.approx(1.0 + 2e-4)
    assert network.all_reduce(3, 125e6, 4).seconds == pytest.approx(4 / 3 + 4e-4)


def test_a_measured_network_is_scaled_to_other_numbers_of_ranks() -> None:
    network = MeasuredNetwork(2, {4: LinearFit(1e-3, 1e-8), 2: LinearFit(1e-3, 2e-8)}, {4: 0.3})
    assert network.all_reduce(2, 1e6, 4).seconds == pytest.approx(0.011)
    assert network.all_reduce(2, 1e6, 2).seconds == pytest.approx(0.021)
    assert network.all_reduce(3, 1e6, 4).seconds == pytest.approx(2e-3 + 4 / 3 * 0.01)
    assert network.all_reduce(2, 1e6, 1).cores == 0.3
