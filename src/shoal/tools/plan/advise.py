"""A plan: what a number of machines would make of a training, which sync strategy helps, and both in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.config.sync_choice import SYNC_METHODS, WIRE_FORMATS
from shoal.cost.batch_plan import scaled_lr
from shoal.cost.machines import Speed
from shoal.cost.memory import PROCESS_BYTES, copied_bytes, largest_micro_batch, needed
from shoal.cost.network import payload_factor
from shoal.cost.predict import ClusterModel, Prediction, predict, speeds
from shoal.cost.select_sync import LEAST_GAIN, LEAST_GAIN_OTHER_TRAINING
from shoal.cost.strategy import SyncStrategy
from shoal.cost.workload import RankWork, Workload
from shoal.units import format_duration, format_percent, format_si, format_speed, pluralize

# The larger batch that a plan considers, as a multiple of the configured one.
_LARGER_BATCH = 4
# Machines whose speeds differ by less are equal: two measurements of one machine differ as much.
_UNEQUAL = 0.95
# Backward is two thirds of computing, and an exchange can hide only behind backward.
_BACKWARD_FRACTION = 2 / 3
# Linear scaling of the learning rate was seen to hold up to this factor (Goyal and others, 2017, from 256 to 8,192);
# with Adam it often holds less far.
_LINEAR_SCALING_FACTOR = 8
# Parts of a batch are called unequal where the largest is this many times as large as the average.
_UNEQUAL_PARTS = 1.1
_MOST_NAMED = 6
# Latency is mentioned from this fraction of the communication on.
_MUCH_LATENCY = 1 / 3


# Rows of a plan


@dataclass(frozen=True)
class PlanRow:
    """A number of nodes."""

    nodes: int
    prediction: Prediction
    speedup: float  # against the fastest of all known nodes alone: one base for a whole plan
    efficiency: float  # against the sum of these nodes, each alone
    base: str  # the fastest node
    base_tokens_per_s: float  # of the fastest node alone, with the same batch

    @property
    def payload_factor(self) -> float:
        return payload_factor(self.prediction.world_size)

    @property
    def ratio(self) -> float:
        """Communication relative to computing; backward can hide all of it up to two thirds."""
        return self.prediction.step.comm_s / self.prediction.step.compute_s

    def as_dict(self) -> dict[str, object]:
        step, prediction = self.prediction.step, self.prediction
        return {
            "nodes": self.nodes,
            "ranks": prediction.world_size,
            "payload_factor": self.payload_factor,
            "wire_bytes": prediction.wire_bytes,
            "comm_s": step.comm_s,
            "comm_latency_s": step.latency_s,
            "compute_s": step.compute_s,
            "exposed_s": step.exposed_s,
            "wait_s": step.wait_s,
            "optimizer_s": step.optimizer_s,
            "other_s": step.other_s,
            "step_s": step.step_s,
            "comm_to_compute": self.ratio,
            "tokens": prediction.tokens,
            "tokens_per_s": prediction.tokens_per_s,
            "speedup": self.speedup,
            "base": self.base,
            "base_tokens_per_s": self.base_tokens_per_s,
            "efficiency": self.efficiency,
            "micro_batch": prediction.batch_plan.micro_batch,
            "micro_batches": max(prediction.batch_plan.counts),
            "memory_bytes": prediction.memory.total,
            "fits": prediction.fits,
        }


@dataclass(frozen=True)
class Plan:
    workload: Workload
    strategy: SyncStrategy
    setting: ClusterModel
    rows: tuple[PlanRow, ...]

    @property
    def best(self) -> PlanRow:
        return max(self.rows, key=lambda row: row.prediction.tokens_per_s)

    @property
    def distributed_rows(self) -> list[PlanRow]:
        return [row for row in self.rows if row.nodes > 1]


def make_plan(workload: Workload, strategy: SyncStrategy, setting: ClusterModel, nodes: Sequence[int]) -> Plan:
    return Plan(workload, strategy, setting, tuple(make_row(workload, strategy, setting, count) for count in nodes))


def recommended_plan(plan: Plan, advice: Advice) -> Plan:
    """Return the same rows by the strategy that the verdict names."""
    if advice.best is None or advice.best.strategy == plan.strategy:
        return plan
    return make_plan(plan.workload, advice.best.strategy, plan.setting, [row.nodes for row in plan.rows])


def make_row(workload: Workload, strategy: SyncStrategy, setting: ClusterModel, nodes: int) -> PlanRow:
    prediction = predict(workload, strategy, setting, nodes * setting.ranks_per_node)
    known = len(setting.node_names)
    alone = [one_node(workload, strategy, setting, node).tokens_per_s for node in range(known)]
    base = max(range(known), key=lambda node: alone[node])
    added_up = sum(alone[min(node, known - 1)] for node in range(nodes))
    speed = prediction.tokens_per_s
    return PlanRow(nodes, prediction, speed / alone[base], speed / added_up, setting.node_names[base], alone[base])


def one_node(workload: Workload, strategy: SyncStrategy, setting: ClusterModel, node: int = 0) -> Prediction:
    """Predict the same training on one of the nodes alone."""
    speed = _LaterRanks(setting.speed, node * setting.ranks_per_node) if node else setting.speed
    return predict(workload, replace(strategy, balanced=False), replace(setting, speed=speed), setting.ranks_per_node)


@dataclass(frozen=True)
class _LaterRanks:
    """The same machines without the first ranks."""

    speed: Speed
    first: int

    def in_world(self, world_size: int) -> _LaterRanks:
        return _LaterRanks(self.speed.in_world(world_size), self.first)

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        return self.speed.work(workload, self.first + rank, micro_batch, micro_batches)

    def encode_s(self, strategy: SyncStrategy, rank: int, parameters: int) -> float:
        return self.speed.encode_s(strategy, self.first + rank, parameters)

    def memory_bytes(self, rank: int) -> float:
        return self.speed.memory_bytes(self.first + rank)


# Which strategy helps, and what it costs


@dataclass(frozen=True)
class PlanOption:
    """A strategy on a number of nodes."""

    strategy: SyncStrategy
    row: PlanRow
    costs: str  # its price in accuracy or memory

    @property
    def tokens_per_s(self) -> float:
        return self.row.prediction.tokens_per_s

    @property
    def is_possible(self) -> bool:
        return self.strategy.is_available and self.row.prediction.fits


@dataclass(frozen=True)
class Advice:
    options: tuple[PlanOption, ...]  # fastest first
    # What to do: a strategy that trains as one machine would. None where one machine is faster than several.
    best: PlanOption | None
    # The best strategy with a larger global batch.
    larger_batch: PlanOption | None
    # The best strategy that changes what is learned, if it is far ahead.
    other_training: PlanOption | None


def advise(plan: Plan) -> Advice:
    """Rank all strategies at the largest number of nodes; the recommendation may use fewer."""
    most = max(row.nodes for row in plan.rows)
    strategies = list(candidates(plan.strategy, plan.workload, plan.setting, most))
    options = [_option(plan, strategy, most) for strategy in strategies]
    ranked = tuple(sorted(options, key=lambda option: option.tokens_per_s, reverse=True))
    same = [strategy for strategy in strategies if strategy.accumulation == plan.strategy.accumulation]
    larger = [strategy for strategy in strategies if strategy.accumulation > plan.strategy.accumulation]
    best = _best(plan, [strategy for strategy in same if strategy.keeps_training or strategy == plan.strategy])
    other = _best(plan, [strategy for strategy in same if not strategy.keeps_training])
    least = LEAST_GAIN_OTHER_TRAINING * best.tokens_per_s if best is not None else 0.0
    return Advice(
        ranked, best, _best(plan, larger), other if other is not None and other.tokens_per_s > least else None
    )


def candidates(base: SyncStrategy, workload: Workload, setting: ClusterModel, nodes: int) -> Iterator[SyncStrategy]:
    """Yield strategies from the plainest to those that cost more. What costs nothing is part of all the others."""
    yield base
    free = list(_free_changes(base, workload, setting, nodes))
    yield from (base.with_(**{name: True}) for name in free)
    plain = base.with_(**dict.fromkeys(free, True))
    if base.sync == "sharded":
        yield plain.with_(sync="ddp")
    if base.sync != "ddp":
        return
    for name, wire in WIRE_FORMATS.items():
        # 16-bit gradients gain nothing from a 16-bit format.
        if name not in ("fp32", base.wire) and (wire.is_low_rank or wire.number_bytes < workload.gradient_bytes):
            yield plain.with_(wire=name)
    is_exact = workload.gradient_bytes == 4 and base.wire == "fp32"
    larger = plain.with_(accumulation=_LARGER_BATCH * base.accumulation)
    yield larger
    if is_exact:
        yield larger.with_(wire="fp16")
    for name, method in SYNC_METHODS.items():
        if method.is_outer:
            yield plain.with_(sync=name, every=method.round_steps)
            if name == "diloco" and is_exact:
                yield plain.with_(sync=name, every=method.round_steps, wire="int8")
    yield plain.with_(sync="sharded", wire="fp32")


def _free_changes(base: SyncStrategy, workload: Workload, setting: ClusterModel, nodes: int) -> Iterator[str]:
    """Yield the changes that affect only the speed, where there is something to gain."""
    if not base.balanced and min(speeds(workload, setting.speed, nodes * setting.ranks_per_node)) < _UNEQUAL:
        yield "balanced"
    if not base.hierarchical and setting.hierarchical is not None and nodes > 1:
        yield "hierarchical"


def _best(plan: Plan, strategies: Sequence[SyncStrategy]) -> PlanOption | None:
    """Return the plainest strategy on the fewest nodes that comes close to the fastest, if that beats one node."""
    counts = sorted({row.nodes for row in plan.distributed_rows})
    available = [strategy for strategy in strategies if strategy.is_available]
    options = [_option(plan, strategy, count) for strategy in available for count in counts]
    faster = [option for option in options if option.row.prediction.fits and option.row.speedup > 1]
    fastest = max((option.tokens_per_s for option in faster), default=0.0)
    return next((option for option in faster if option.tokens_per_s * LEAST_GAIN >= fastest), None)


def _option(plan: Plan, strategy: SyncStrategy, nodes: int) -> PlanOption:
    row = make_row(plan.workload, strategy, plan.setting, nodes)
    costs = [*([] if row.prediction.fits else ["does not fit into memory"]), *_costs(strategy)]
    return PlanOption(strategy, row, "; ".join(costs) or "nothing: the same training as on one machine")


def _costs(strategy: SyncStrategy) -> Iterator[str]:
    """Yield short phrases: each strategy has one line of a table."""
    if price := SYNC_METHODS[strategy.sync].price:
        yield price.format(every=strategy.every)
    if price := strategy.format.price:
        values = "gradients" if strategy.every == 1 else "differences"
        yield f"{values} {price.format(rank=strategy.rank)}"
    if strategy.accumulation > 1:
        yield f"{strategy.accumulation}× the batch, fewer updates"
    if (more := copied_bytes(strategy)) > 0:
        yield f"+{more} bytes a parameter"


# A plan in sentences


def explain_plan(plan: Plan, advice: Advice) -> list[str]:
    """Return one paragraph per topic, the verdict first."""
    gains = (_larger_batch(plan, advice), describe_other_training(plan, advice))
    lines = [
        verdict(plan, advice),
        _ratio(plan),
        explain_unequal_parts(plan),
        *gains,
        _memory(plan, advice),
        learning_rate(plan),
    ]
    return [line for line in lines if line]


def verdict(plan: Plan, advice: Advice) -> str:
    if not any(row.prediction.fits for row in plan.rows):
        machines = "this machine" if plan.rows[-1].nodes == 1 else "these machines"
        return f"This does not fit into the memory of {machines}."
    best = advice.best
    if best is None:
        return _unavailable(plan) + _stay_alone(plan, advice)
    return _unavailable(plan) + (
        f"Distribute it: {best.row.nodes} nodes by {best.strategy} train {best.row.speedup:.2f} times as fast as "
        f"{_base(plan, 'one')}, {format_speed(best.tokens_per_s)} against {best.row.base_tokens_per_s:,.0f}."
    )


def _base(plan: Plan, alike: str = "one machine") -> str:
    """Return the machine that speed-ups are against: `alike` if all are equal, otherwise by name."""
    return alike if len(set(plan.setting.node_names)) == 1 else f"{plan.rows[-1].base} alone"


def _base_speed(plan: Plan) -> str:
    return "one machine's speed" if len(set(plan.setting.node_names)) == 1 else f"the speed of {_base(plan)}"


def _unavailable(plan: Plan) -> str:
    """Return what a strategy that shoal does not have would reach; it is not advice."""
    if plan.strategy.is_available or not plan.distributed_rows:
        return ""
    fastest = max(plan.distributed_rows, key=lambda row: row.speedup)
    return (
        f"shoal cannot train by {plan.strategy} yet; if it could, {fastest.nodes} nodes would reach "
        f"{fastest.speedup:.2f} times {_base_speed(plan)}. "
    )


def _stay_alone(plan: Plan, advice: Advice) -> str:
    if not plan.distributed_rows:
        ranks = plan.setting.ranks_per_node
        inside = f"its {ranks} ranks exchange gradients inside the machine" if ranks > 1 else "nothing is exchanged"
        return f"One node: {inside}."
    is_available = plan.strategy.is_available
    by, rows = "", plan.distributed_rows
    if not is_available:
        by, rows = " by ddp", [option.row for option in advice.options if option.strategy.is_available]
    possible = [row for row in rows if row.prediction.fits]
    if not possible:
        return f"Don't distribute this: several nodes{by} do not have the memory for it."
    fastest = max(possible, key=lambda row: row.speedup)
    step = fastest.prediction.step
    as_it_is = " with an exchange in every step" if advice.other_training is not None else ""
    text = (
        f"Don't distribute this{as_it_is}: {_base(plan)} is faster, with "
        f"{format_speed(fastest.base_tokens_per_s)}. {fastest.nodes} nodes{by} reach {fastest.speedup:.2f} times its "
        f"speed: in each step they compute for {format_duration(step.compute_s)} and "
        f"wait for {format_duration(step.exposed_s + step.wait_s)} while gradients are exchanged."
    )
    faster = [option for option in advice.options if option.row.speedup > 1 and option.row.prediction.fits]
    later = [option for option in faster if not option.strategy.is_available]
    if later and is_available:
        text += f" What shoal cannot do yet would help: {later[0].strategy}, {later[0].row.speedup:.2f} times."
    return text


def _ratio(plan: Plan) -> str:
    rows = plan.distributed_rows
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    step = last.prediction.step
    text = f"T_comm/T_compute is {first.ratio:.2f} on {first.nodes} nodes"
    text += f" and {last.ratio:.2f} on {last.nodes}" if last is not first else ""
    if last.ratio > _BACKWARD_FRACTION:
        text += ". Above 0.67 it cannot all hide behind backward, which is two thirds of the computing."
    else:
        hidden = 1 - step.exposed_s / step.comm_s if step.comm_s else 1.0
        text += f". Of the exchange {format_percent(max(0.0, hidden))} hides behind backward."
    if step.latency_s >= _MUCH_LATENCY * step.comm_s:
        # Bytes divided by bandwidth would be far from the figure in the table.
        text += (
            f" Of the {format_duration(step.comm_s)} of communication on {last.nodes} nodes the bytes take "
            f"{format_duration(step.comm_s - step.latency_s)}; the other {format_duration(step.latency_s)} is latency: "
            "messages that wait for each other, however small they are."
        )
    return text


def explain_unequal_parts(plan: Plan) -> str:
    """Return which numbers of nodes gain less because whole sequences cannot be divided equally among their ranks."""
    rows = [row for row in plan.distributed_rows if row.prediction.batch_plan.largest_part > _UNEQUAL_PARTS]
    if not rows or plan.strategy.balanced:
        return ""
    batch_plan = rows[0].prediction.batch_plan
    shares = Counter(batch_plan.shares)
    batch = pluralize(batch_plan.global_batch, "sequence")
    if len(rows) == 1:
        parts = ", ".join(f"{share} for {pluralize(ranks, 'rank')}" for share, ranks in shares.items())
        return f"{rows[0].nodes} nodes divide {batch} unequally ({parts}): every step waits for the largest part."
    counts = [str(row.nodes) for row in rows]
    named = ", ".join(counts[:_MOST_NAMED]) + (" …" if len(counts) > _MOST_NAMED else "")
    return f"{batch} cannot be divided equally among {named} nodes: every step waits for the largest part."


def _larger_batch(plan: Plan, advice: Advice) -> str:
    larger, best = advice.larger_batch, advice.best
    if larger is None or (best is not None and larger.tokens_per_s < LEAST_GAIN * best.tokens_per_s):
        return ""
    return (
        f"A global batch of {larger.row.prediction.batch_plan.global_batch:,} sequences would allow "
        f"{larger.row.speedup:.2f} times {_base_speed(plan)} on {larger.row.nodes} nodes ({larger.strategy}), if the "
        "training can do with fewer updates."
    )


def describe_other_training(plan: Plan, advice: Advice) -> str:
    """Return what the strategy that changes the training would gain, and its price; empty if it is not far ahead."""
    other = advice.other_training
    if other is None:
        return ""
    return (
        f"{other.row.nodes} nodes by {other.strategy} would train {other.row.speedup:.2f} times as fast as "
        f"{_base(plan, 'one')}, at a price: {other.costs}. What that does to the loss, `shoal bench levers` measures."
    )


def _memory(plan: Plan, advice: Advice) -> str:
    """Always part of a plan: many users expect two machines to hold a model that one cannot."""
    row = plan.rows[-1]
    memory, world_size = row.prediction.memory, row.prediction.world_size
    available = min(plan.setting.speed.memory_bytes(rank) for rank in range(world_size))
    parts = (
        f"weights {format_si(memory.weights, 'B')}, gradients {format_si(memory.gradients, 'B')}, "
        f"moments {format_si(memory.moments, 'B')}, activations {format_si(memory.activations, 'B')}, "
        f"the rest {format_si(memory.copies + PROCESS_BYTES, 'B')}"
    )
    held = f"{format_si(memory.total, 'B')} of its {format_si(available, 'B')} ({parts})."
    room = _room(plan, row, available)
    if plan.strategy.sync != "sharded":
        text = (
            f"{SYNC_METHODS[plan.strategy.sync].title} does not add up the machines' memory: every rank holds the whole"
        )
        return " ".join([f"{text} training, {held}", *room, *_compare_with_sharding(plan, advice.options, row)])
    if world_size == 1:
        return " ".join([f"With one rank there is nothing to shard: it holds {held}", *room])
    text = f"Sharding divides weights, gradients and moments among {world_size} ranks: each holds {held}"
    return " ".join([text, *room, *_compare_with_ddp(plan, row)])


def _room(plan: Plan, row: PlanRow, available: float) -> list[str]:
    if row.prediction.fits:
        return []
    world_size, batch = row.prediction.world_size, row.prediction.batch_plan.global_batch
    most = largest_micro_batch(plan.workload, plan.strategy, world_size, available)
    sizes = [size for size in range(1, most + 1) if batch % size == 0 and batch // size >= world_size]
    if sizes:
        return [f"That does not fit; with --micro-batch {max(sizes)} it would."]
    return ["That does not fit, not even one sequence at a time."]


def _compare_with_sharding(plan: Plan, options: tuple[PlanOption, ...], row: PlanRow) -> list[str]:
    sharded = next((option for option in options if option.strategy.sync == "sharded"), None)
    if sharded is None or row.nodes == 1:
        return []
    other = sharded.row.prediction
    memory = needed(plan.workload, sharded.strategy, row.prediction.batch_plan.micro_batch, other.world_size)
    return [
        f"Sharding it over {other.world_size} ranks (not in shoal yet) would take {format_si(memory.total, 'B')} each, "
        f"send {format_si(other.wire_bytes, 'B')} instead of {format_si(row.prediction.wire_bytes, 'B')} a step, "
        f"and {_compare_steps('make the step', other, row.prediction)}."
    ]


def _compare_with_ddp(plan: Plan, row: PlanRow) -> list[str]:
    if row.nodes == 1:
        return []
    other = make_row(plan.workload, plan.strategy.with_(sync="ddp"), plan.setting, row.nodes).prediction
    return [
        f"By DDP each rank would hold {format_si(other.memory.total, 'B')} and send {format_si(other.wire_bytes, 'B')} "
        f"instead of {format_si(row.prediction.wire_bytes, 'B')} a step, and "
        f"{_compare_steps('the step would take', other, row.prediction)}."
    ]


def _compare_steps(verb: str, other: Prediction, own: Prediction) -> str:
    other_s, own_s = format_duration(other.step.step_s), format_duration(own.step.step_s)
    return "the step would take as long" if other_s == own_s else f"{verb} {other_s} instead of {own_s}"


def learning_rate(plan: Plan) -> str:
    """Return a paragraph about the learning rate for the batch of the largest number of nodes."""
    workload = plan.workload.accumulated(plan.strategy.accumulation)
    world_size = plan.rows[-1].prediction.world_size
    batch, train = workload.sequences(world_size), workload.train
    if train.scaling == "strong" and batch <= world_size * (train.micro_batch or 1):
        scaling = "Fewer nodes change neither, if they keep this batch (strong scaling); more nodes need a larger one."
    elif train.scaling == "strong":
        scaling = "Another number of nodes changes neither: the global batch stays what it is (strong scaling)."
    else:
        scaling = (
            f"With another number of nodes it changes in proportion, because every rank brings {train.global_batch} "
            "sequences (weak scaling); warm up for as many steps, which then see more text."
        )
    if workload.model is None:
        return (
            f"Learning rate: the one tuned for a global batch of {pluralize(batch, 'sequence')}; k times the batch "
            f"takes k times it, with warm-up. {scaling}"
        )
    text = (
        f"Learning rate: {scaled_lr(train, world_size):.3g} for a global batch of {batch}, scaled linearly from "
        f"{train.lr:.3g} for {train.base_batch}; warm-up {train.warmup_steps} steps."
    )
    factor = batch / train.base_batch
    if factor > _LINEAR_SCALING_FACTOR:
        text += f" So far from the tuned batch try the square root too: {train.lr * factor**0.5:.3g}."
    return f"{text} {scaling}"
