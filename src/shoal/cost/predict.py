"""The time of a step for a model, a lever and a number of ranks: everything in `cost`, put together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from shoal.config.schema import SyncConfig
from shoal.cost.batch_plan import MICRO_BATCH_CAP, BatchPlan
from shoal.cost.buckets import BucketCost, Lever, bucket_mb_for, fill_buckets, split_tied, touches_few_rows
from shoal.cost.machines import Speed, bytes_per_parameter, element_bytes, is_encoded, rank_kinds
from shoal.cost.memory import MemoryNeed, fits, largest_micro_batch, needed
from shoal.cost.network import ExchangeCost, Network, payload_factor
from shoal.cost.workload import RankWork, StepTime, Workload, exposed_s

# SECTION cost/slowest
# The slowest of many: what a world that waits for everybody loses to chance.


# Midpoints of a smooth hump that is flat at both ends: so many give ten digits.
_POINTS = 400
# Standard deviations; of 10¹⁵ draws hardly one lies further out.
_REACH = 8.0


@cache
def expected_max(count: int) -> float:
    """Of so many draws from a standard normal distribution: 0, 0.564, 0.846 … 3.24 for a thousand."""
    return _integrated([(0.0, 1.0, count)])


def expected_slowest(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Of one draw from each normal distribution."""
    kinds = [(mean, sigma, count) for (mean, sigma), count in Counter(zip(means, deviations, strict=True)).items()]
    if len(kinds) == 1:
        mean, sigma, count = kinds[0]
        return mean + sigma * expected_max(count)
    return _integrated(kinds)


def expected_max_of(samples: Sequence[float], count: int) -> float:
    """Of so many draws from what was measured, each sample as likely as the others."""
    ordered = sorted(samples)
    total = len(ordered)
    return sum(
        value * (((place + 1) / total) ** count - (place / total) ** count) for place, value in enumerate(ordered)
    )


def _integrated(kinds: Sequence[tuple[float, float, int]]) -> float:
    """Over time, how likely it is that anybody is still under way. Before `begin` somebody certainly is."""
    begin = max(mean - _REACH * sigma for mean, sigma, _ in kinds)
    end = max(mean + _REACH * sigma for mean, sigma, _ in kinds)
    late = [(mean, sigma, count) for mean, sigma, count in kinds if sigma > 0 and mean + _REACH * sigma > begin]
    width = (end - begin) / _POINTS
    return begin + width * sum(1 - _all_done(late, begin + (point + 0.5) * width) for point in range(_POINTS))


def _all_done(late: Sequence[tuple[float, float, int]], at: float) -> float:
    """The probability that nobody takes longer. By the upper tail: its digits are lost in a sum with 1."""
    logarithm = 0.0
    for mean, sigma, count in late:
        tail = 0.5 * math.erfc((at - mean) / (sigma * math.sqrt(2)))
        if tail >= 1:
            return 0.0
        logarithm += count * math.log1p(-tail)
    return math.exp(logarithm)


# PowerSGD sends one factor, then the other.
_MESSAGES = {"powersgd": 2}


@dataclass(frozen=True)
class ClusterModel:
    """Where it runs. `hierarchical` is the same network used by summing up inside each node first. `node_names` are
    those that are known one by one; further nodes are like the last of them."""

    speed: Speed
    network: Network
    hierarchical: Network | None = None
    ranks_per_node: int = 1
    node_names: tuple[str, ...] = ("one machine",)


@dataclass(frozen=True)
class Prediction:
    """Of one step of the whole world; `wire_bytes` is what each rank sends in it, on average over steps."""

    world_size: int
    step: StepTime
    deal: BatchPlan
    tokens: int
    wire_bytes: float
    memory: MemoryNeed
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.step_s


@dataclass(frozen=True)
class _Exchanges:
    """What a lever adds to a step of the slowest rank; `encode_s` is making its wire format, which backward does."""

    comm_s: float
    exposed_s: float
    latency_s: float = 0.0
    encode_s: float = 0.0


def predict(
    workload: Workload, lever: Lever, setting: ClusterModel, world_size: int, weights: Sequence[float] | None = None
) -> Prediction:
    """`weights` are the ranks' shares as configured; without them they are equal, or by speed for a balanced lever."""
    workload = workload.accumulated(lever.accumulation)
    setting = replace(setting, speed=setting.speed.in_world(world_size))
    speed = setting.speed
    if weights is None:
        weights = speeds(workload, speed, world_size) if lever.balanced else (1.0,) * world_size
    kinds = rank_kinds(speed, world_size)
    available = min(speed.memory_bytes(rank) for rank in _one_of_each(kinds))
    dealt = workload.deal(weights, _most_at_once(workload, lever, world_size, available))
    works = _works(workload, speed, dealt, kinds)
    last = max(range(world_size), key=lambda rank: _busy_s(works[rank]))
    exchanges = _exchanges(workload, lever, setting, dealt, works[last], last)
    memory = needed(workload, lever, dealt.micro_batch, world_size)
    return Prediction(
        world_size=world_size,
        step=_step(works, works[last], exchanges, lever),
        deal=dealt,
        tokens=workload.seq_len * dealt.global_batch,
        wire_bytes=wire_bytes(workload, lever, world_size, dealt.micro_batches[last]),
        memory=memory,
        fits=fits(memory, available),
    )


def _most_at_once(workload: Workload, lever: Lever, world_size: int, available_bytes: float) -> int:
    """A training of ours takes its micro-batch whatever the memory; for anybody else's it is chosen to fit."""
    if workload.model is not None:
        return MICRO_BATCH_CAP
    return max(1, min(MICRO_BATCH_CAP, largest_micro_batch(workload, lever, world_size, available_bytes)))


def speeds(workload: Workload, speed: Speed, world_size: int) -> tuple[float, ...]:
    """Of each rank against the fastest, in hundredths: as somebody would write them down."""
    kinds = rank_kinds(speed, world_size)
    times = {kinds[rank]: speed.work(workload, rank, 1, 1).compute_s for rank in _one_of_each(kinds)}
    fastest = min(times.values())
    return tuple(max(0.01, round(fastest / times[kind], 2)) for kind in kinds)


def _one_of_each(kinds: Sequence[int]) -> list[int]:
    return list({kind: rank for rank, kind in enumerate(kinds)}.values())


def _works(workload: Workload, speed: Speed, dealt: BatchPlan, kinds: Sequence[int]) -> list[RankWork]:
    found: dict[tuple[int, int], RankWork] = {}
    for rank, key in enumerate(zip(kinds, dealt.micro_batches, strict=True)):
        if key not in found:
            found[key] = speed.work(workload, rank, dealt.micro_batch, key[1])
    return [found[key] for key in zip(kinds, dealt.micro_batches, strict=True)]


def wire_bytes(workload: Workload, lever: Lever, world_size: int, micro_batches: int) -> float:
    whole = payload_factor(world_size) * bytes_per_parameter(lever, workload) * workload.parameters
    return whole * 1.5 * micro_batches if lever.sync == "sharded" else whole / lever.every


def _step(works: Sequence[RankWork], last: RankWork, exchanges: _Exchanges, lever: Lever) -> StepTime:
    # Over several steps on its own a rank's good and bad ones even out.
    calm = math.sqrt(lever.every)
    deviations = [work.spread * work.compute_s / calm for work in works]
    wait_s = expected_slowest([_busy_s(work) for work in works], deviations) - _busy_s(last)
    return StepTime(
        compute_s=last.compute_s + exchanges.encode_s,
        comm_s=exchanges.comm_s,
        exposed_s=exchanges.exposed_s,
        wait_s=wait_s if len(works) > 1 else 0.0,
        optimizer_s=last.optimizer_s,
        other_s=last.other_s,
        latency_s=exchanges.latency_s,
    )


def _busy_s(work: RankWork) -> float:
    return work.compute_s + work.optimizer_s + work.other_s


def _exchanges(
    workload: Workload, lever: Lever, setting: ClusterModel, dealt: BatchPlan, work: RankWork, rank: int
) -> _Exchanges:
    world_size = len(dealt.micro_batches)
    if world_size == 1:
        return _Exchanges(0.0, 0.0)
    exchange = _exchange(workload, lever, setting, world_size)
    buckets = _buckets(workload, lever, dealt.micro_batch * workload.seq_len, world_size)
    encode_s = setting.speed.encode_s(lever, rank, workload.parameters) if is_encoded(lever, workload) else 0.0
    shown = {"ddp": _every_step, "sharded": _sharded, "streaming": _streaming}.get(lever.sync, _blocking)
    found = shown(lever, work, buckets, exchange)
    return replace(found, encode_s=encode_s / lever.every)


def _buckets(workload: Workload, lever: Lever, tokens: int, world_size: int) -> list[BucketCost]:
    """Stock DDP has a first bucket of its own; ours sends the two parts of a tied weight apart where that pays."""
    each_mb = lever.bucket_mb or bucket_mb_for(workload.gradient_bytes * workload.parameters)
    model, is_ours = workload.model, lever.sync == "ddp" and lever.first_bucket_mb is None and lever.overlap
    if is_ours and model is not None and touches_few_rows(model.vocab_size, tokens, world_size):
        return split_tied(model, tokens, world_size, each_mb)
    return fill_buckets(workload.gradients(), each_mb, lever.first_bucket_mb, workload.gradient_bytes)


def _exchange(
    workload: Workload, lever: Lever, setting: ClusterModel, world_size: int
) -> Callable[[BucketCost], ExchangeCost]:
    network = setting.hierarchical if lever.hierarchical and setting.hierarchical else setting.network
    each, element = bytes_per_parameter(lever, workload), element_bytes(lever, workload)
    messages = _MESSAGES.get(lever.wire, 1)

    def exchange(bucket: BucketCost) -> ExchangeCost:
        once = network.all_reduce(world_size, each * bucket.parameters / messages, element)
        return once.times(messages)

    return exchange


def _every_step(
    lever: Lever, work: RankWork, buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost]
) -> _Exchanges:
    comm_s, latency_s = _alone(buckets, exchange)
    return _Exchanges(comm_s, exposed_s(work, buckets, exchange, lever.overlap), latency_s)


def _alone(buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost]) -> tuple[float, float]:
    """How long all of them take one after another, and how much of that is latency."""
    exchanges = [exchange(bucket) for bucket in buckets]
    return sum(each.seconds for each in exchanges), sum(each.latency_s for each in exchanges)


def _sharded(
    lever: Lever, work: RankWork, buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost]
) -> _Exchanges:
    """Weights are gathered for forward and again for backward, which scatters the gradients: an all-gather and a
    reduce-scatter are an all-reduce's two halves. All of it for each micro-batch, because nobody has room to wait."""

    def gather(bucket: BucketCost) -> ExchangeCost:
        return exchange(bucket).times(0.5)

    both = _every_step(lever, work, buckets, exchange)
    forward = _every_step(lever, replace(work, backward_s=work.forward_s), _early(buckets), gather)
    return _Exchanges(
        work.micro_batches * (forward.comm_s + both.comm_s),
        work.micro_batches * (forward.exposed_s + both.exposed_s),
        work.micro_batches * (forward.latency_s + both.latency_s),
    )


def _blocking(
    lever: Lever, work: RankWork, buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost]
) -> _Exchanges:
    """Everybody stands still for the exchange of the weights, but only so often."""
    comm_s, latency_s = _alone(buckets, exchange)
    return _Exchanges(comm_s / lever.every, comm_s / lever.every, latency_s / lever.every)


def _streaming(
    lever: Lever, work: RankWork, buckets: Sequence[BucketCost], exchange: Callable[[BucketCost], ExchangeCost]
) -> _Exchanges:
    """Fragment by fragment, each behind the computing of the steps for which it may be on its way."""
    comm_s, latency_s = _alone(buckets, exchange)
    fragments = min(lever.every, SyncConfig().fragments)
    asked = SyncConfig(mode="streaming", every=lever.every, fragments=fragments)
    behind = replace(work, backward_s=min(lever.every, fragments * asked.overlap_steps) * _busy_s(work))
    shown_s = exposed_s(behind, _early(buckets), exchange, overlap=True)
    return _Exchanges(comm_s / lever.every, shown_s / lever.every, latency_s / lever.every)


def _early(buckets: Sequence[BucketCost]) -> list[BucketCost]:
    """Nothing has to be computed before they can travel."""
    return [replace(bucket, ready=0.0) for bucket in buckets]
