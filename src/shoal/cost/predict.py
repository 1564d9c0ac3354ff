"""The time of a step for a model, a sync strategy and a number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from shoal.config.schema import SyncConfig
from shoal.cost.batch_plan import MICRO_BATCH_CAP, BatchPlan
from shoal.cost.buckets import BucketCost, bucket_mb_for, fill_buckets, split_tied, touches_few_rows
from shoal.cost.machines import Speed, rank_kinds
from shoal.cost.memory import MemoryNeed, RankMemory, largest_micro_batch, rank_memories
from shoal.cost.network import ExchangeCost, Network, payload_factor
from shoal.cost.sharding import held_fractions, payload
from shoal.cost.strategy import SyncStrategy, bytes_per_parameter, element_bytes, is_encoded
from shoal.cost.workload import RankWork, StepTime, Workload, exposed_s

Exchange = Callable[[BucketCost], ExchangeCost]


@dataclass(frozen=True)
class ClusterModel:
    """Where a training runs."""

    speed: Speed
    network: Network
    hierarchical: Network | None = None  # the same network with an all-reduce inside each node first
    ranks_per_node: int = 1
    node_names: tuple[str, ...] = ("one machine",)  # of the known nodes; further nodes are like the last one
    # To copy a byte of gradients from a GPU to the processor's memory and its sum back, where gloo exchanges them.
    staging_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """One step of all ranks."""

    world_size: int
    step: StepTime
    batch_plan: BatchPlan
    tokens: int
    payload: float  # times the gradients' bytes that each rank sends in an exchange
    wire_bytes: float  # that each rank sends, on average over steps
    memories: tuple[RankMemory, ...]  # of every rank

    @cached_property
    def tightest(self) -> RankMemory:
        return max(self.memories, key=lambda memory: memory.filled)

    @property
    def memory(self) -> MemoryNeed:
        """Of the rank that has least room."""
        return self.tightest.need

    @property
    def fits(self) -> bool:
        return self.tightest.fits

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step.step_s


@dataclass(frozen=True)
class _ExchangeTime:
    """What a strategy adds to a step of the slowest rank."""

    comm_s: float
    exposed_s: float
    latency_s: float = 0.0
    encode_s: float = 0.0  # counted as part of backward


def predict(
    workload: Workload,
    strategy: SyncStrategy,
    setting: ClusterModel,
    world_size: int,
    weights: Sequence[float] | None = None,
) -> Prediction:
    """Predict a step. `weights` are the ranks' configured shares of a batch; None: equal, or by speed if balanced."""
    workload = workload.accumulated(strategy.accumulation)
    setting = replace(setting, speed=setting.speed.in_world(world_size))
    speed = setting.speed
    follows_speed = weights is None and strategy.balanced
    if weights is None:
        weights = speeds(workload, speed, world_size) if strategy.balanced else (1.0,) * world_size
    strategy = strategy.in_world(world_size)
    kinds = rank_kinds(speed, world_size)
    available = [speed.memory_bytes(rank) for rank in range(world_size)]
    most = MICRO_BATCH_CAP
    if workload.model is None:
        # A training of shoal takes its micro-batch whatever the memory; for other programs one that fits is assumed.
        most = max(1, min(most, largest_micro_batch(workload, strategy, available)))
    batch_plan = workload.divide_batch(weights, most, follows_speed)
    works = _works(workload, speed, batch_plan, kinds)
    copy_shift = setting.ranks_per_node if world_size > setting.ranks_per_node else 1
    memories = rank_memories(workload, strategy, batch_plan.micro_batch, available, copy_shift)
    if strategy.shard_level:
        held = held_fractions([memory.part for memory in memories], strategy.copies_in(world_size), copy_shift)
        works = [replace(work, optimizer_s=part * work.optimizer_s) for work, part in zip(works, held, strict=True)]
    slowest = max(range(world_size), key=lambda rank: _busy_s(works[rank]))
    exchange = _exchange_time(workload, strategy, setting, batch_plan, works[slowest], slowest)
    sent = payload_factor(world_size)
    if strategy.shard_level:
        sent = payload(strategy.shard_level, world_size, batch_plan.counts[slowest], strategy.copies_in(world_size))
    return Prediction(
        world_size=world_size,
        step=_step_time(works, works[slowest], exchange, strategy),
        batch_plan=batch_plan,
        tokens=workload.seq_len * batch_plan.global_batch,
        payload=sent,
        wire_bytes=sent * bytes_per_parameter(strategy, workload) * workload.parameters / strategy.every,
        memories=memories,
    )


def speeds(workload: Workload, speed: Speed, world_size: int) -> tuple[float, ...]:
    """Return each rank's speed relative to the fastest, in hundredths, as a user would write weights."""
    kinds = rank_kinds(speed, world_size)
    times = {kinds[rank]: speed.work(workload, rank, 1, 1).compute_s for rank in _one_of_each(kinds)}
    fastest = min(times.values())
    return tuple(max(0.01, round(fastest / times[kind], 2)) for kind in kinds)


def _one_of_each(kinds: Sequence[int]) -> list[int]:
    return list({kind: rank for rank, kind in enumerate(kinds)}.values())


def _works(workload: Workload, speed: Speed, batch_plan: BatchPlan, kinds: Sequence[int]) -> list[RankWork]:
    known: dict[tuple[int, int], RankWork] = {}
    keys = list(zip(kinds, batch_plan.shares, strict=True))
    for rank, key in enumerate(keys):
        if key not in known:
            known[key] = speed.work(workload, rank, batch_plan.sizes(rank)[0], batch_plan.counts[rank])
    return [known[key] for key in keys]


def _step_time(
    works: Sequence[RankWork], slowest: RankWork, exchange: _ExchangeTime, strategy: SyncStrategy
) -> StepTime:
    # Over several steps without an exchange a rank's fast and slow steps even out.
    deviations = [work.spread * work.compute_s / math.sqrt(strategy.every) for work in works]
    wait_s = expected_slowest([_busy_s(work) for work in works], deviations) - _busy_s(slowest)
    return StepTime(
        compute_s=slowest.compute_s + exchange.encode_s,
        comm_s=exchange.comm_s,
        exposed_s=exchange.exposed_s,
        wait_s=wait_s if len(works) > 1 else 0.0,
        optimizer_s=slowest.optimizer_s,
        other_s=slowest.other_s,
        latency_s=exchange.latency_s,
    )


def _busy_s(work: RankWork) -> float:
    return work.compute_s + work.optimizer_s + work.other_s


# The exchange of each sync method


def _exchange_time(
    workload: Workload, strategy: SyncStrategy, setting: ClusterModel, batch_plan: BatchPlan, work: RankWork, rank: int
) -> _ExchangeTime:
    world_size = len(batch_plan.shares)
    if world_size == 1:
        return _ExchangeTime(0.0, 0.0)
    network = setting.hierarchical if strategy.hierarchical and setting.hierarchical else setting.network
    parameter_bytes, element = bytes_per_parameter(strategy, workload), element_bytes(strategy, workload)
    # A low-rank format sends one factor after the other.
    messages = 2 if strategy.format.is_low_rank else 1

    def exchange(bucket: BucketCost) -> ExchangeCost:
        sent = network.all_reduce(world_size, parameter_bytes * bucket.parameters / messages, element).times(messages)
        # What is copied are the gradients: they are encoded behind that.
        staging_s = setting.staging_s_per_byte * workload.gradient_bytes * bucket.parameters
        return replace(sent, seconds=sent.seconds + staging_s)

    buckets = _buckets(workload, strategy, batch_plan.micro_batch * workload.seq_len, world_size)
    encode_s = setting.speed.encode_s(strategy, rank, workload.parameters) if is_encoded(strategy, workload) else 0.0
    if strategy.shard_level:
        return _sharded(strategy, work, buckets, exchange, encode_s, world_size)
    model = {"ddp": _ddp, "streaming": _streaming}.get(strategy.sync, _blocking)
    return replace(model(strategy, work, buckets, exchange), encode_s=encode_s / strategy.every)


def _buckets(workload: Workload, strategy: SyncStrategy, tokens: int, world_size: int) -> list[BucketCost]:
    """Stock DDP has a first bucket of another size; shoal splits the exchange of a tied weight where that pays."""
    bucket_mb = strategy.bucket_mb or bucket_mb_for(workload.gradient_bytes * workload.parameters)
    can_split = strategy.sync == "ddp" and strategy.first_bucket_mb is None and strategy.overlap
    model = workload.model
    if can_split and model is not None and touches_few_rows(model.vocab_size, tokens, world_size):
        return split_tied(model, tokens, world_size, bucket_mb)
    return fill_buckets(workload.gradients(), bucket_mb, strategy.first_bucket_mb, workload.gradient_bytes)


def _ddp(strategy: SyncStrategy, work: RankWork, buckets: Sequence[BucketCost], exchange: Exchange) -> _ExchangeTime:
    return replace(_unhidden(buckets, exchange), exposed_s=exposed_s(work, buckets, exchange, strategy.overlap))


def _sharded(
    strategy: SyncStrategy,
    work: RankWork,
    buckets: Sequence[BucketCost],
    exchange: Exchange,
    encode_s: float,
    world_size: int,
) -> _ExchangeTime:
    """Gradients are scattered behind a backward, and weights gathered behind a forward: each is half an all-reduce.

    Forward needs the weights in the order opposite to that in which backward completes the gradients, so it waits as
    long as a backward that begins where it ends.
    """
    to_copy = strategy.copies_in(world_size) / (2 * (world_size - 1))
    gather, times = 0.5 - to_copy, work.micro_batches
    # How often, behind what, and the fraction of an all-reduce.
    phases = [(1, work.backward_s, 0.5 + to_copy), (1, work.forward_s, gather)]
    if strategy.shard_level == 2:
        phases += [(times - 1, work.backward_s, 0.5)]
    elif strategy.shard_level == 3:
        # No rank can keep all weights: forward gathers them, and so does backward.
        phases = [
            (times, work.forward_s, gather),
            (times - 1, work.backward_s, gather + 0.5),
            (1, work.backward_s, gather + 0.5 + to_copy),
        ]
    total = _ExchangeTime(0.0, 0.0)
    for count, behind_s, fraction in phases:
        part = _behind(strategy, replace(work, backward_s=behind_s), buckets, exchange, fraction)
        total = _ExchangeTime(
            total.comm_s + count * part.comm_s,
            total.exposed_s + count * part.exposed_s,
            total.latency_s + count * part.latency_s,
            total.encode_s + count * fraction * encode_s,
        )
    return total


def _behind(
    strategy: SyncStrategy, work: RankWork, buckets: Sequence[BucketCost], exchange: Exchange, fraction: float
) -> _ExchangeTime:
    return _ddp(strategy, work, buckets, lambda bucket: exchange(bucket).times(fraction))


def _blocking(
    strategy: SyncStrategy, work: RankWork, buckets: Sequence[BucketCost], exchange: Exchange
) -> _ExchangeTime:
    """All ranks wait for the exchange of the parameters, once a round."""
    return _unhidden(buckets, exchange, strategy.every)


def _streaming(
    strategy: SyncStrategy, work: RankWork, buckets: Sequence[BucketCost], exchange: Exchange
) -> _ExchangeTime:
    """Each fragment is exchanged behind the steps that it may take."""
    fragments = min(strategy.every, SyncConfig().fragments)
    overlap_steps = SyncConfig(mode="streaming", every=strategy.every, fragments=fragments).overlap_steps
    behind = replace(work, backward_s=min(strategy.every, fragments * overlap_steps) * _busy_s(work))
    shown_s = exposed_s(behind, _ready_at_once(buckets), exchange, overlap=True)
    return replace(_unhidden(buckets, exchange, strategy.every), exposed_s=shown_s / strategy.every)


def _unhidden(buckets: Sequence[BucketCost], exchange: Exchange, every: int = 1) -> _ExchangeTime:
    """Return the time per step of an exchange of all buckets once in `every` steps, if nothing hides it."""
    costs = [exchange(bucket) for bucket in buckets]
    comm_s = sum(cost.seconds for cost in costs) / every
    return _ExchangeTime(comm_s, comm_s, sum(cost.latency_s for cost in costs) / every)


def _ready_at_once(buckets: Sequence[BucketCost]) -> list[BucketCost]:
    return [replace(bucket, ready=0.0) for bucket in buckets]


# Stragglers: the expected slowest of many ranks

# Midpoints of the integral over a smooth curve that is flat at both ends: this many give ten digits.
_POINTS = 400
# Standard deviations; of 10¹⁵ draws hardly one lies further out.
_REACH = 8.0


@cache
def expected_max(count: int) -> float:
    """Return the expected maximum of `count` standard normal draws: 0, 0.564, 0.846 … 3.24 for a thousand."""
    return _integrated([(0.0, 1.0, count)])


def expected_slowest(means: Sequence[float], deviations: Sequence[float]) -> float:
    """Return the expected maximum of one draw from each normal distribution."""
    kinds = [(mean, sigma, count) for (mean, sigma), count in Counter(zip(means, deviations, strict=True)).items()]
    if len(kinds) == 1:
        mean, sigma, count = kinds[0]
        return mean + sigma * expected_max(count)
    return _integrated(kinds)


def _integrated(kinds: Sequence[tuple[float, float, int]]) -> float:
    """Integrate over time the probability that a rank still computes; before `begin` one certainly does."""
    begin = max(mean - _REACH * sigma for mean, sigma, _ in kinds)
    end = max(mean + _REACH * sigma for mean, sigma, _ in kinds)
    late = [(mean, sigma, count) for mean, sigma, count in kinds if sigma > 0 and mean + _REACH * sigma > begin]
    width = (end - begin) / _POINTS
    return begin + width * sum(1 - _all_done(late, begin + (point + 0.5) * width) for point in range(_POINTS))


def _all_done(late: Sequence[tuple[float, float, int]], at: float) -> float:
    """Return the probability that all ranks are done. Computed from the upper tail, whose digits a sum with 1 loses."""
    logarithm = 0.0
    for mean, sigma, count in late:
        tail = 0.5 * math.erfc((at - mean) / (sigma * math.sqrt(2)))
        if tail >= 1:
            return 0.0
        logarithm += count * math.log1p(-tail)
    return math.exp(logarithm)
