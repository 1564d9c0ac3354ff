"""A plan: what a number of machines would make of a training, which sync strategy helps, and both in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from shoal.config.sync_choice import SHARDED_METHODS, SYNC_METHODS, WIRE_FORMATS
from shoal.cost.batch_plan import scaled_lr
from shoal.cost.machines import Speed
from shoal.cost.memory import PROCESS_BYTES, USABLE, RankMemory, copied_bytes, largest_micro_batch, needed
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
_NOT_FOR_SPEED = "Divide it to save memory, never for speed."


# Rows of a plan


@dataclass(frozen=True)
class MachineMemory:
    """The ranks of one kind of machine, by the one that has least room."""

    machine: str
    ranks: int
    memory: RankMemory

    def as_dict(self) -> dict[str, object]:
        memory = self.memory
        sizes = {"memory_bytes": memory.need.total, "available_bytes": memory.available_bytes}
        return {"machine": self.machine, "ranks": self.ranks, **sizes, "part": memory.part, "fits": memory.fits}


@dataclass(frozen=True)
class PlanRow:
    """A number of nodes."""

    nodes: int
    prediction: Prediction
    speedup: float  # against the fastest of all known nodes alone: one base for a whole plan
    efficiency: float  # against the sum of these nodes, each alone
    base: str  # the fastest node
    base_tokens_per_s: float  # of the fastest node alone, with the same batch
    base_fits: bool  # whether that node has the memory for it
    machines: tuple[MachineMemory, ...]

    @property
    def ratio(self) -> float:
        """Communication relative to computing; backward can hide all of it up to two thirds."""
        return self.prediction.step.comm_s / self.prediction.step.compute_s

    def as_dict(self) -> dict[str, object]:
        step, prediction = self.prediction.step, self.prediction
        return {
            "nodes": self.nodes,
            "ranks": prediction.world_size,
            "payload_factor": prediction.payload,
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
            "machines": [machine.as_dict() for machine in self.machines],
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
    def counts(self) -> list[int]:
        return [row.nodes for row in self.rows]

    @property
    def distributed_rows(self) -> list[PlanRow]:
        return [row for row in self.rows if row.nodes > 1]


def make_plan(workload: Workload, strategy: SyncStrategy, setting: ClusterModel, nodes: Sequence[int]) -> Plan:
    return Plan(workload, strategy, setting, tuple(make_row(workload, strategy, setting, count) for count in nodes))


def divided_plan(plan: Plan) -> Plan:
    """Return the plan by the sharded method that divides least, where the model does not fit with ddp."""
    fitting = _fitting(plan)
    return make_plan(plan.workload, fitting[0].strategy, plan.setting, plan.counts) if fitting else plan


def recommended_plan(plan: Plan, advice: Advice) -> Plan:
    """Return the same rows by the strategy that the verdict names."""
    if advice.best is None or advice.best.strategy == plan.strategy:
        return plan
    return make_plan(plan.workload, advice.best.strategy, plan.setting, plan.counts)


def make_row(workload: Workload, strategy: SyncStrategy, setting: ClusterModel, nodes: int) -> PlanRow:
    prediction = predict(workload, strategy, setting, nodes * setting.ranks_per_node)
    known = len(setting.node_names)
    predicted = [one_node(workload, strategy, setting, node) for node in range(known)]
    alone = [one.tokens_per_s for one in predicted]
    base = max(range(known), key=lambda node: alone[node])
    added_up = sum(alone[min(node, known - 1)] for node in range(nodes))
    speed = prediction.tokens_per_s
    return PlanRow(
        nodes,
        prediction,
        speedup=speed / alone[base],
        efficiency=speed / added_up,
        base=setting.node_names[base],
        base_tokens_per_s=alone[base],
        base_fits=predicted[base].fits,
        machines=_machines(prediction, setting),
    )


def _machines(prediction: Prediction, setting: ClusterModel) -> tuple[MachineMemory, ...]:
    by_name: dict[str, list[RankMemory]] = {}
    for rank, memory in enumerate(prediction.memories):
        node = min(rank // setting.ranks_per_node, len(setting.node_names) - 1)
        by_name.setdefault(setting.node_names[node], []).append(memory)
    return tuple(
        MachineMemory(name, len(ranks), max(ranks, key=lambda memory: memory.filled)) for name, ranks in by_name.items()
    )


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
    # Where ddp does not fit on any row: the sharded strategies that do, on the fewest nodes; those that divide least
    # first.
    fitting: tuple[PlanOption, ...]


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
    fitting = _fitting(plan)
    return Advice(
        ranked,
        best or next(iter(fitting), None),
        _best(plan, larger),
        other if other is not None and other.tokens_per_s > least else None,
        fitting,
    )


def least_divided(strategy: SyncStrategy, workload: Workload, setting: ClusterModel, nodes: int) -> SyncStrategy:
    """Return this strategy by ddp if that fits on the nodes, otherwise by the sharded method that divides least."""
    ways = divisions(strategy)
    return next((way for way in ways if predict(workload, way, setting, nodes * setting.ranks_per_node).fits), strategy)


def divisions(strategy: SyncStrategy) -> tuple[SyncStrategy, ...]:
    """Return this strategy by ddp and by all sharded methods. Giving up the copies comes last: it costs safety."""
    if not strategy.keeps_training:
        return (strategy,)
    ways = [strategy.with_(sync=name) for name in SHARDED_METHODS]
    bare = [way.with_(copies=0) for way in ways] if strategy.copies is None else []
    return (strategy.with_(sync="ddp"), *ways, *bare)


def _fitting(plan: Plan) -> tuple[PlanOption, ...]:
    counts = sorted({row.nodes for row in plan.distributed_rows})
    strategy = plan.strategy if plan.strategy.keeps_training else plan.strategy.with_(sync="ddp", wire="fp32", every=1)
    ddp, *ways = divisions(strategy)
    if any(_option(plan, ddp, row.nodes).row.prediction.fits for row in plan.rows):
        return ()
    options: list[PlanOption] = []
    for way in ways:
        possible = (_option(plan, way, count) for count in counts)
        first = next((option for option in possible if option.row.prediction.fits), None)
        # One that divides more is worth naming only where fewer nodes are enough for it.
        if first is not None and all(first.row.nodes < option.row.nodes for option in options):
            options.append(first)
    return tuple(options)


def candidates(base: SyncStrategy, workload: Workload, setting: ClusterModel, nodes: int) -> Iterator[SyncStrategy]:
    """Yield strategies from the plainest to those that cost more. What costs nothing is part of all the others."""
    yield base
    free = list(_free_changes(base, workload, setting, nodes))
    yield from (base.with_(**{name: True}) for name in free)
    plain = base.with_(**dict.fromkeys(free, True))
    if SYNC_METHODS[base.sync].is_outer:
        return
    is_short = not predict(workload, plain, setting, nodes * setting.ranks_per_node).fits
    if base.shard_level or is_short:
        fitting = least_divided(plain, workload, setting, nodes)
        levels = [way for way in divisions(plain) if way.copies == plain.copies or way == fitting]
        yield from (way for way in levels if way != plain)
        if is_short and fitting == plain:
            return
        plain = fitting if is_short else plain
    for name, wire in WIRE_FORMATS.items():
        # 16-bit gradients gain nothing from a 16-bit format.
        if name in ("fp32", base.wire) or (wire.is_low_rank and plain.shard_level):
            continue
        if wire.is_low_rank or wire.number_bytes < workload.gradient_bytes:
            yield plain.with_(wire=name)
    is_exact = workload.gradient_bytes == 4 and base.wire == "fp32"
    larger = plain.with_(accumulation=_LARGER_BATCH * base.accumulation)
    yield larger
    if is_exact:
        yield larger.with_(wire="fp16")
    if plain.shard_level:
        return
    for name, method in SYNC_METHODS.items():
        if method.is_outer:
            yield plain.with_(sync=name, every=method.round_steps)
            if name == "diloco" and is_exact:
                yield plain.with_(sync=name, every=method.round_steps, wire="int8")


def _free_changes(base: SyncStrategy, workload: Workload, setting: ClusterModel, nodes: int) -> Iterator[str]:
    """Yield the changes that affect only the speed, where there is something to gain."""
    if not base.balanced and min(speeds(workload, setting.speed, nodes * setting.ranks_per_node)) < _UNEQUAL:
        yield "balanced"
    if not base.hierarchical and setting.hierarchical is not None and nodes > 1:
        yield "hierarchical"


def _best(plan: Plan, strategies: Sequence[SyncStrategy]) -> PlanOption | None:
    """Return the plainest strategy on the fewest nodes that comes close to the fastest, if that beats one node.

    Memory is divided only where it must be: that saves no time worth naming.
    """
    counts = sorted({row.nodes for row in plan.distributed_rows})
    choices = dict.fromkeys(
        (least_divided(strategy, plan.workload, plan.setting, count), count)
        for strategy in strategies
        if strategy.is_available
        for count in counts
    )
    options = [_option(plan, strategy, count) for strategy, count in choices]
    possible = [option for option in options if option.row.prediction.fits]
    faster = [option for option in possible if option.row.speedup > 1 or not option.row.base_fits]
    fastest = max((option.tokens_per_s for option in faster), default=0.0)
    return next((option for option in faster if option.tokens_per_s * LEAST_GAIN >= fastest), None)


def _option(plan: Plan, strategy: SyncStrategy, nodes: int) -> PlanOption:
    row = make_row(plan.workload, strategy, plan.setting, nodes)
    costs = [
        *([] if row.prediction.fits else ["does not fit into memory"]),
        *_costs(strategy, row.prediction.world_size),
    ]
    return PlanOption(strategy, row, "; ".join(costs) or "nothing: the same training as on one machine")


def _costs(strategy: SyncStrategy, world_size: int) -> Iterator[str]:
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
    if strategy.shard_level and world_size > 1 and not strategy.copies_in(world_size):
        yield "a loss returns to a checkpoint"


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
        explain_pipeline(plan),
        learning_rate(plan),
    ]
    return [line for line in lines if line]


def verdict(plan: Plan, advice: Advice) -> str:
    best = advice.best
    if advice.fitting:
        assert best is not None  # noqa: S101 - one that fits is the best where no other is
        more = f"{best.row.nodes} nodes by {best.strategy} train {format_speed(best.tokens_per_s)}."
        return f"{_only_divided(plan, advice.fitting)} {more}"
    if best is None and not any(row.prediction.fits for row in plan.rows):
        machines = "this machine" if plan.rows[-1].nodes == 1 else "these machines"
        return f"This does not fit into the memory of {machines}{_smallest(plan, advice)}."
    if best is None:
        return _stay_alone(plan, advice)
    return (
        f"Distribute it: {best.row.nodes} nodes by {best.strategy} train {best.row.speedup:.2f} times as fast as "
        f"{_base(plan, 'one')}, {format_speed(best.tokens_per_s)} against {best.row.base_tokens_per_s:,.0f}."
    )


def _smallest(plan: Plan, advice: Advice) -> str:
    """Return what would make it fit, or how much memory it needs at least."""
    if size := _fitting_micro_batch(plan, plan.strategy, plan.rows[-1]):
        return f"; with --micro-batch {size} it would"
    smallest = min(advice.options, key=lambda option: option.row.prediction.memory.total)
    memory = smallest.row.prediction.tightest
    if not smallest.strategy.shard_level or smallest.row.prediction.world_size == 1:
        return ""
    return (
        f", not even with {smallest.strategy} on {smallest.row.nodes}: a rank may fill "
        f"{format_si(USABLE * memory.available_bytes, 'B')} and needs {format_si(memory.need.total, 'B')}"
    )


def _only_divided(plan: Plan, fitting: Sequence[PlanOption]) -> str:
    """Return which sharded methods make a model fit that ddp does not."""
    first, *others = fitting
    memory, nodes = first.row.prediction.tightest, first.row.nodes
    all_fit = all(_option(plan, first.strategy, count).row.prediction.fits for count in plan.counts if count > nodes)
    where = f"{nodes} or more machines" if all_fit and nodes < plan.counts[-1] else pluralize(nodes, "machine")
    also = [f"with {option.strategy} on {option.row.nodes}" for option in others]
    ddp = plan.strategy.with_(sync="ddp")
    if size := _fitting_micro_batch(plan, ddp, first.row):
        also.append(f"with ddp and --micro-batch {size}")
    whole = needed(plan.workload, ddp, first.row.prediction.batch_plan.micro_batch, 1)
    return (
        f"This fits only {', or '.join([f'with {first.strategy} on {where}', *also])}: a rank may fill "
        f"{format_si(USABLE * memory.available_bytes, 'B')} of {format_si(memory.available_bytes, 'B')}, and needs "
        f"{format_si(memory.need.total, 'B')} instead of {format_si(whole.total, 'B')}."
    )


def _base(plan: Plan, alike: str = "one machine") -> str:
    """Return the machine that speed-ups are against: `alike` if all are equal, otherwise by name."""
    return alike if len(set(plan.setting.node_names)) == 1 else f"{plan.rows[-1].base} alone"


def _base_speed(plan: Plan) -> str:
    return "one machine's speed" if len(set(plan.setting.node_names)) == 1 else f"the speed of {_base(plan)}"


def _stay_alone(plan: Plan, advice: Advice) -> str:
    if not plan.distributed_rows:
        ranks = plan.setting.ranks_per_node
        inside = f"its {ranks} ranks exchange gradients inside the machine" if ranks > 1 else "nothing is exchanged"
        return f"One node: {inside}."
    possible = [row for row in plan.distributed_rows if row.prediction.fits]
    if not possible:
        return "Don't distribute this: several nodes do not have the memory for it."
    fastest = max(possible, key=lambda row: row.speedup)
    step = fastest.prediction.step
    as_it_is = " with an exchange in every step" if advice.other_training is not None else ""
    return (
        f"Don't distribute this{as_it_is}: {_base(plan)} is faster, with "
        f"{format_speed(fastest.base_tokens_per_s)}. {fastest.nodes} nodes reach {fastest.speedup:.2f} times its "
        f"speed: in each step they compute for {format_duration(step.compute_s)} and "
        f"wait for {format_duration(step.exposed_s + step.wait_s)} while gradients are exchanged."
    )


def _ratio(plan: Plan) -> str:
    rows = plan.distributed_rows
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    step = last.prediction.step
    text = f"T_comm/T_compute is {first.ratio:.2f} on {first.nodes} nodes"
    text += f" and {last.ratio:.2f} on {last.nodes}" if last is not first else ""
    if last.ratio > _BACKWARD_FRACTION and not plan.strategy.shard_level:
        text += ". Above 0.67 it cannot all hide behind backward, which is two thirds of the computing."
    else:
        behind = "computing" if plan.strategy.shard_level else "backward"
        hidden = 1 - step.exposed_s / step.comm_s if step.comm_s else 1.0
        text += f". Of the exchange {format_percent(max(0.0, hidden))} hides behind {behind}."
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
    row, strategy = plan.rows[-1], plan.strategy
    tightest, world_size = row.prediction.tightest, row.prediction.world_size
    memory, method = tightest.need, SYNC_METHODS[strategy.sync]
    held = (
        f"{format_si(memory.total, 'B')} of its {format_si(tightest.available_bytes, 'B')} "
        f"(weights {format_si(memory.weights, 'B')}, gradients {format_si(memory.gradients, 'B')}, "
        f"moments {format_si(memory.moments, 'B')}, activations {format_si(memory.activations, 'B')}, "
        f"the rest {format_si(memory.buffers + PROCESS_BYTES, 'B')})."
    )
    room = _room(plan, row)
    if not strategy.shard_level:
        text = f"{method.title} does not add up the machines' memory: every rank holds the whole training, {held}"
        return " ".join([text, *room, *_levels(plan, advice, row)])
    if world_size == 1:
        return " ".join(
            [f"With one rank there is nothing to divide, and {strategy.sync} is ddp: it holds {held}", *room]
        )
    divided = ("moments", "moments and gradients", "moments, gradients and weights")[strategy.shard_level - 1]
    copied = ", with a copy of each part on another rank" if strategy.copies_in(world_size) else ""
    text = f"{method.title} divides {divided} among {world_size} ranks{copied}: each holds {held}"
    return " ".join([text, *room, *_unequal_memory(row), *_compare_with_ddp(plan, row)])


def _room(plan: Plan, row: PlanRow) -> list[str]:
    if row.prediction.fits:
        return []
    if size := _fitting_micro_batch(plan, plan.strategy, row):
        return [f"That does not fit; with --micro-batch {size} it would."]
    return ["That does not fit, not even one sequence at a time."]


def _fitting_micro_batch(plan: Plan, strategy: SyncStrategy, row: PlanRow) -> int:
    """Return the largest micro-batch that these nodes have room for; 0 if there is none."""
    world_size, batch = row.prediction.world_size, row.prediction.batch_plan.global_batch
    available = [memory.available_bytes for memory in row.prediction.memories]
    most = largest_micro_batch(plan.workload, strategy, available)
    sizes = (size for size in range(1, most + 1) if batch % size == 0 and batch // size >= world_size)
    return max(sizes, default=0)


def _levels(plan: Plan, advice: Advice, row: PlanRow) -> list[str]:
    """Return what the sharded methods would need instead of ddp."""
    if plan.strategy.sync != "ddp" or row.prediction.world_size == 1:
        return []
    batch_plan, world_size = row.prediction.batch_plan, row.prediction.world_size
    sizes = []
    for name in SHARDED_METHODS:
        need = needed(plan.workload, plan.strategy.with_(sync=name), batch_plan.micro_batch, world_size)
        sizes.append(f"{name} {format_si(need.total, 'B')}")
    text = f"Divided among {world_size} ranks: {', '.join(sizes)}."
    return [text, *([_NOT_FOR_SPEED] if row.prediction.fits else [])]


def _unequal_memory(row: PlanRow) -> list[str]:
    if len({machine.memory.part for machine in row.machines}) == 1:
        return []
    parts = (
        f"{machine.machine} {format_percent(machine.memory.part)} ({format_si(machine.memory.need.total, 'B')} of "
        f"{format_si(machine.memory.available_bytes, 'B')})"
        for machine in row.machines
    )
    return [f"Parts follow the machines' memory; the largest of each kind: {', '.join(parts)}."]


def _compare_with_ddp(plan: Plan, row: PlanRow) -> list[str]:
    other = make_row(plan.workload, plan.strategy.with_(sync="ddp"), plan.setting, row.nodes).prediction
    sent, own_sent = format_si(other.wire_bytes, "B"), format_si(row.prediction.wire_bytes, "B")
    send = "send as much" if sent == own_sent else f"send {sent} instead of {own_sent} a step"
    return [
        f"By ddp each rank would hold {format_si(other.memory.total, 'B')} and {send}, and "
        f"{_compare_steps('the step would take', other, row.prediction)}.",
        *([f"ddp fits too. {_NOT_FOR_SPEED}"] if other.fits else []),
    ]


def _compare_steps(verb: str, other: Prediction, own: Prediction) -> str:
    other_s, own_s = format_duration(other.step.step_s), format_duration(own.step.step_s)
    return "the step would take as long" if other_s == own_s else f"{verb} {other_s} instead of {own_s}"


@dataclass(frozen=True)
class PipelineCost:
    """What pipeline parallelism would send and wait for: arithmetic only, it is not in shoal."""

    activation_bytes: float  # of one micro-batch at a cut between two stages
    wire_bytes: float  # at a cut in a step: the activations, and their gradients back
    gradient_bytes: float
    idle: float  # the fraction of a step in which a stage waits

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "available": False}


def pipeline_of(plan: Plan) -> PipelineCost:
    """Compute with a stage on each node, and the batch of a step cut into micro-batches."""
    row, workload = plan.rows[-1], plan.workload
    batch_plan = row.prediction.batch_plan
    sequence_bytes = workload.gradient_bytes * workload.seq_len * workload.shape.width
    micro_batches = max(1, batch_plan.global_batch // batch_plan.micro_batch)
    return PipelineCost(
        activation_bytes=sequence_bytes * batch_plan.micro_batch,
        wire_bytes=2.0 * sequence_bytes * batch_plan.global_batch,
        gradient_bytes=float(workload.gradient_bytes * workload.parameters),
        idle=(row.nodes - 1) / (micro_batches + row.nodes - 1),
    )


def explain_pipeline(plan: Plan) -> str:
    if not plan.distributed_rows:
        return ""
    pipeline, nodes = pipeline_of(plan), plan.rows[-1].nodes
    return (
        f"Pipeline parallelism (not in shoal) sends the activations at a cut: "
        f"{format_si(pipeline.activation_bytes, 'B')} a micro-batch, {format_si(pipeline.wire_bytes, 'B')} a step "
        f"there and back, against {format_si(pipeline.gradient_bytes, 'B')} of gradients. But {nodes} stages would "
        f"wait for each other {format_percent(pipeline.idle)} of the time, and a lost machine takes its layers with it."
    )


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
