"""A plan: what so many machines would make of a training, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.config.schema import ROUND_STEPS
from shoal.cost.batch_plan import scaled_lr
from shoal.cost.buckets import AVAILABLE, Lever
from shoal.cost.machines import Speed
from shoal.cost.memory import PROCESS_BYTES, copied_bytes, largest_micro_batch, needed
from shoal.cost.network import payload_factor
from shoal.cost.predict import ClusterModel, Prediction, predict, speeds
from shoal.cost.workload import RankWork, Workload
from shoal.units import format_duration, format_si


@dataclass(frozen=True)
class PlanRow:
    """So many nodes. Speed-up is against the fastest of all known nodes alone, one base for a whole plan; efficiency is
    against these nodes, each alone, added up."""

    nodes: int
    prediction: Prediction
    speedup: float
    efficiency: float
    # The fastest node and what it trains alone, with the same batch.
    base: str
    base_tokens_per_s: float

    @property
    def payload_factor(self) -> float:
        return payload_factor(self.prediction.world_size)

    @property
    def ratio(self) -> float:
        """Communication against computing: hidden behind backward at best as long as it is below two thirds."""
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
            "micro_batch": prediction.deal.micro_batch,
            "micro_batches": max(prediction.deal.micro_batches),
            "memory_bytes": prediction.memory.total,
            "fits": prediction.fits,
        }


@dataclass(frozen=True)
class Plan:
    workload: Workload
    lever: Lever
    setting: ClusterModel
    rows: tuple[PlanRow, ...]

    @property
    def best(self) -> PlanRow:
        return max(self.rows, key=lambda row: row.prediction.tokens_per_s)


def make_plan(workload: Workload, lever: Lever, setting: ClusterModel, nodes: Sequence[int]) -> Plan:
    return Plan(workload, lever, setting, tuple(make_row(workload, lever, setting, count) for count in nodes))


def make_row(workload: Workload, lever: Lever, setting: ClusterModel, nodes: int) -> PlanRow:
    world_size = nodes * setting.ranks_per_node
    prediction = predict(workload, lever, setting, world_size)
    known = len(setting.node_names)
    alone = [one_node(workload, lever, setting, node).tokens_per_s for node in range(known)]
    base = max(range(known), key=lambda node: alone[node])
    added_up = sum(alone[min(node, known - 1)] for node in range(nodes))
    speed = prediction.tokens_per_s
    return PlanRow(nodes, prediction, speed / alone[base], speed / added_up, setting.node_names[base], alone[base])


def one_node(workload: Workload, lever: Lever, setting: ClusterModel, node: int = 0) -> Prediction:
    """The same training on one of the nodes alone."""
    speed = _From(setting.speed, node * setting.ranks_per_node) if node else setting.speed
    return predict(workload, replace(lever, balanced=False), replace(setting, speed=speed), setting.ranks_per_node)


@dataclass(frozen=True)
class _From:
    """The same machines without the first few ranks."""

    speed: Speed
    first: int

    def in_world(self, world_size: int) -> _From:
        return _From(self.speed.in_world(world_size), self.first)

    def work(self, workload: Workload, rank: int, micro_batch: int, micro_batches: int) -> RankWork:
        return self.speed.work(workload, self.first + rank, micro_batch, micro_batches)

    def encode_s(self, lever: Lever, rank: int, parameters: int) -> float:
        return self.speed.encode_s(lever, self.first + rank, parameters)

    def memory_bytes(self, rank: int) -> float:
        return self.speed.memory_bytes(self.first + rank)


# SECTION cost/advice
# Which lever helps, what it costs, and whether to distribute at all.


# What a lever has to gain over a plainer one before its price is worth paying, and what one that trains differently.
_WORTH = 1.03
_WORTH_ANOTHER = 1.1
_BATCHES = 4
# Machines whose speeds differ by less are equal, and measured on two days.
_UNEQUAL = 0.95


@dataclass(frozen=True)
class PlanOption:
    """A lever on so many nodes, against one node alone; `costs` is its price in accuracy or memory, in words."""

    lever: Lever
    row: PlanRow
    costs: str

    @property
    def tokens_per_s(self) -> float:
        return self.row.prediction.tokens_per_s

    @property
    def is_possible(self) -> bool:
        return self.lever.is_available and self.row.prediction.fits


@dataclass(frozen=True)
class Advice:
    """`options` by predicted speed; `best` is what to do, on `best.row.nodes` nodes, and None where one machine is
    faster than any number of them. It trains as one machine would; `larger_batch` is the best that a larger global
    batch would allow, `other_training` the best of those that change what is learned, if that is far ahead."""

    options: tuple[PlanOption, ...]
    best: PlanOption | None
    larger_batch: PlanOption | None
    other_training: PlanOption | None


def advise(plan: Plan) -> Advice:
    """Ranked at the largest number of nodes; what is recommended may be on fewer of them."""
    most = max(row.nodes for row in plan.rows)
    levers = list(candidates(plan.lever, plan.workload, plan.setting, most))
    options = tuple(_option(plan, lever, most) for lever in levers)
    ranked = tuple(sorted(options, key=lambda option: option.tokens_per_s, reverse=True))
    same = [lever for lever in levers if lever.accumulation == plan.lever.accumulation]
    larger = [lever for lever in levers if lever.accumulation > plan.lever.accumulation]
    best = _best(plan, [lever for lever in same if lever.keeps_training or lever == plan.lever])
    other = _best(plan, [lever for lever in same if not lever.keeps_training])
    ahead = other is not None and (best is None or other.tokens_per_s > _WORTH_ANOTHER * best.tokens_per_s)
    return Advice(ranked, best, _best(plan, larger), other if ahead else None)


def candidates(base: Lever, workload: Workload, setting: ClusterModel, nodes: int) -> Iterator[Lever]:
    """From the plainest to those that cost more. What costs nothing is part of all the others, if it is there."""
    yield base
    free = list(_free(base, workload, setting, nodes))
    yield from (base.with_(**{name: True}) for name in free)
    plain = base.with_(**{name: True for name in free if AVAILABLE[name]})
    if base.sync == "sharded":
        yield plain.with_(sync="ddp")
    if base.sync != "ddp":
        return
    wires = [plain.with_(wire=wire) for wire in ("fp16", "bf16", "int8", "powersgd") if wire != base.wire]
    yield from wires if workload.gradient_bytes == 4 else wires[2:]
    yield plain.with_(accumulation=_BATCHES * base.accumulation)
    if workload.gradient_bytes == 4 and base.wire == "fp32":
        yield plain.with_(accumulation=_BATCHES * base.accumulation, wire="fp16")
    yield plain.with_(sync="local", every=ROUND_STEPS["local"])
    yield plain.with_(sync="diloco", every=ROUND_STEPS["diloco"])
    if workload.gradient_bytes == 4 and base.wire == "fp32":
        yield plain.with_(sync="diloco", every=ROUND_STEPS["diloco"], wire="int8")
    yield plain.with_(sync="streaming", every=ROUND_STEPS["streaming"])
    yield plain.with_(sync="sharded", wire="fp32")


def _free(base: Lever, workload: Workload, setting: ClusterModel, nodes: int) -> Iterator[str]:
    """Levers that change nothing but the speed, where there is something to gain."""
    if not base.balanced and min(speeds(workload, setting.speed, nodes * setting.ranks_per_node)) < _UNEQUAL:
        yield "balanced"
    if not base.hierarchical and setting.hierarchical is not None and nodes > 1:
        yield "hierarchical"


def _best(plan: Plan, levers: Sequence[Lever]) -> PlanOption | None:
    """The plainest lever and the fewest nodes that come close to the fastest of all, if that beats one node."""
    counts = sorted({row.nodes for row in plan.rows} - {1})
    tried = [_option(plan, lever, count) for lever in levers if lever.is_available for count in counts]
    found = [option for option in tried if option.row.prediction.fits and option.row.speedup > 1]
    if not found:
        return None
    fastest = max(option.tokens_per_s for option in found)
    return next(option for option in found if option.tokens_per_s * _WORTH >= fastest)


def _option(plan: Plan, lever: Lever, nodes: int) -> PlanOption:
    row = make_row(plan.workload, lever, plan.setting, nodes)
    words = [] if row.prediction.fits else ["does not fit into memory"]
    return PlanOption(lever, row, "; ".join([*words, *_costs(lever)]) or "nothing: the same training as on one machine")


def _costs(lever: Lever) -> Iterator[str]:
    """Short: each has its line of a table."""
    match lever.sync:
        case "local" | "diloco":
            yield f"replicas drift for {lever.every} steps"
        case "streaming":
            yield "as diloco, applied later"
        case "sharded":
            yield "half as many bytes again; the memory is divided"
    what = "gradients" if lever.every == 1 else "differences"
    match lever.wire:
        case "fp16":
            yield f"{what} keep 11 bits"
        case "bf16":
            yield f"{what} keep 8 bits"
        case "int8":
            yield f"{what} keep 8 bits a block"
        case "powersgd":
            yield f"{what} of rank {lever.rank}"
    if lever.accumulation > 1:
        yield f"{lever.accumulation}× the batch, fewer updates"
    if (more := copied_bytes(lever)) > 0:
        yield f"+{more} bytes a parameter"


# SECTION report/explain_plan
# A plan in sentences: distribute or not, which lever, what memory and learning rate it takes.


# Backward is two thirds of computing, and only behind it an exchange can hide.
_HIDDEN = 2 / 3
# Up to there linear scaling was seen to hold (Goyal and others, 2017, from 256 to 8,192); with Adam often less far.
_FAR = 8
# Of the communication: from there on latency is named.
_LATENCY = 1 / 3
_SYNC_NAMES = {"ddp": "DDP", "local": "LocalSGD", "diloco": "DiLoCo", "streaming": "Streaming DiLoCo"}


def explain(plan: Plan, advice: Advice) -> list[str]:
    """One paragraph a thought, the verdict first."""
    gains = (_larger_batch(plan, advice), _other_training(plan, advice))
    lines = [verdict(plan, advice), _ratio(plan), *gains, _memory(plan, advice), learning_rate(plan)]
    return [line for line in lines if line]


def verdict(plan: Plan, advice: Advice) -> str:
    if not any(row.prediction.fits for row in plan.rows):
        return f"This does not fit into the memory of {_machines(plan)}."
    best = advice.best
    if best is None:
        return _cannot(plan) + _alone(plan, advice)
    return _cannot(plan) + (
        f"Distribute it: {best.row.nodes} nodes by {best.lever} train {best.row.speedup:.2f} times as fast as "
        f"{_base(plan, 'one')}, {best.tokens_per_s:,.0f} tokens/s against {best.row.base_tokens_per_s:,.0f}."
    )


def _base(plan: Plan, alike: str = "one machine") -> str:
    """The machine that speed-ups are against, by its name where they are not `alike`."""
    return alike if len(set(plan.setting.node_names)) == 1 else f"{plan.rows[-1].base} alone"


def _speed_of_base(plan: Plan) -> str:
    return "one machine's speed" if len(set(plan.setting.node_names)) == 1 else f"the speed of {_base(plan)}"


def _cannot(plan: Plan) -> str:
    """Of a plan for what shoal cannot do: its figures stand, and are no advice."""
    together = [row for row in plan.rows if row.nodes > 1]
    if plan.lever.is_available or not together:
        return ""
    fastest = max(together, key=lambda row: row.speedup)
    return (
        f"shoal cannot train by {plan.lever} yet; if it could, {fastest.nodes} nodes would reach "
        f"{fastest.speedup:.2f} times {_speed_of_base(plan)}. "
    )


def _alone(plan: Plan, advice: Advice) -> str:
    together = [row for row in plan.rows if row.nodes > 1]
    if not together:
        return "One node: nothing is exchanged."
    # Of a lever that shoal does not have, nothing is advised: then the options show what it has.
    tried = (
        together if plan.lever.is_available else [option.row for option in advice.options if option.lever.is_available]
    )
    possible = [row for row in tried if row.prediction.fits]
    by = "" if plan.lever.is_available else " by ddp"
    if not possible:
        return f"Don't distribute this: several nodes{by} do not have the memory for it."
    fastest = max(possible, key=lambda row: row.speedup)
    step = fastest.prediction.step
    words = (
        f"Don't distribute this{_as_it_is(advice)}: {_base(plan)} is faster, with "
        f"{fastest.base_tokens_per_s:,.0f} tokens/s. {fastest.nodes} nodes{by} reach {fastest.speedup:.2f} times its "
        f"speed: in each step they compute for {format_duration(step.compute_s)} and "
        f"stand still for {format_duration(step.exposed_s + step.wait_s)} while gradients travel."
    )
    ahead = [option for option in advice.options if option.row.speedup > 1 and option.row.prediction.fits]
    later = [option for option in ahead if not option.lever.is_available]
    if later and plan.lever.is_available:
        words += f" What shoal cannot do yet would help: {later[0].lever}, {later[0].row.speedup:.2f} times."
    return words


def _as_it_is(advice: Advice) -> str:
    return " with an exchange in every step" if advice.other_training is not None else ""


def _ratio(plan: Plan) -> str:
    together = [row for row in plan.rows if row.nodes > 1]
    if not together:
        return ""
    first, last = together[0], together[-1]
    ratios = f"{first.ratio:.2f} on {first.nodes} nodes"
    ratios += f" and {last.ratio:.2f} on {last.nodes}" if last is not first else ""
    return f"T_comm/T_compute is {ratios}. {_ratio_meaning(last)}{_latency(last)}"


def _ratio_meaning(row: PlanRow) -> str:
    if row.ratio > _HIDDEN:
        return "Above 0.67 it cannot all hide behind backward, which is two thirds of the computing."
    hidden = 1 - row.prediction.step.exposed_s / row.prediction.step.comm_s if row.prediction.step.comm_s else 1.0
    return f"Of the exchange {max(0.0, hidden):.0%} hides behind backward."


def _latency(row: PlanRow) -> str:
    """Said where bytes over bandwidth would be far from the figure in the table."""
    step = row.prediction.step
    if step.latency_s < _LATENCY * step.comm_s:
        return ""
    return (
        f" Of the {format_duration(step.comm_s)} of communication on {row.nodes} nodes the bytes take "
        f"{format_duration(step.comm_s - step.latency_s)}; the other {format_duration(step.latency_s)} is latency: "
        "messages that wait for each other, however small they are."
    )


def _larger_batch(plan: Plan, advice: Advice) -> str:
    larger, best = advice.larger_batch, advice.best
    if larger is None or (best is not None and larger.tokens_per_s < 1.03 * best.tokens_per_s):
        return ""
    return (
        f"A global batch of {larger.row.prediction.deal.global_batch} sequences would allow "
        f"{larger.row.speedup:.2f} times {_speed_of_base(plan)} on {larger.row.nodes} nodes ({larger.lever}), if the "
        "training can do with fewer updates."
    )


def _other_training(plan: Plan, advice: Advice) -> str:
    other = advice.other_training
    if other is None:
        return ""
    return (
        f"{other.row.nodes} nodes by {other.lever} would train {other.row.speedup:.2f} times as fast as "
        f"{_base(plan, 'one')}, at a price: {other.costs}. What that does to the loss, `shoal bench levers` measures."
    )


def _memory(plan: Plan, advice: Advice) -> str:
    """Always said: many expect two machines to hold a model that one cannot."""
    row = plan.rows[-1]
    memory, world_size = row.prediction.memory, row.prediction.world_size
    available = min(plan.setting.speed.memory_bytes(rank) for rank in range(world_size))
    parts = (
        f"weights {_gb(memory.weights)}, gradients {_gb(memory.gradients)}, moments {_gb(memory.moments)}, "
        f"activations {_gb(memory.activations)}, the rest {_gb(memory.copies + PROCESS_BYTES)}"
    )
    held = f"{_gb(memory.total)} of its {_gb(available)} ({parts})."
    if plan.lever.sync == "sharded" and world_size == 1:
        return " ".join([f"With one rank there is nothing to shard: it holds {held}", *_room(plan, row, available)])
    if plan.lever.sync == "sharded":
        words = f"Sharding divides weights, gradients and moments among {world_size} ranks: each holds {held}"
        return " ".join([words, *_room(plan, row, available), *_by_ddp(plan, row)])
    words = (
        f"{_SYNC_NAMES[plan.lever.sync]} does not add up the machines' memory: every rank holds the whole training, "
    )
    return " ".join([words + held, *_room(plan, row, available), *_sharding(plan, advice.options, row)])


def _room(plan: Plan, row: PlanRow, available: float) -> list[str]:
    if row.prediction.fits:
        return []
    world_size, batch = row.prediction.world_size, row.prediction.deal.global_batch
    most = largest_micro_batch(plan.workload, plan.lever, world_size, available)
    sizes = [size for size in range(1, most + 1) if batch % size == 0 and batch // size >= world_size]
    if sizes:
        return [f"That does not fit; with --micro-batch {max(sizes)} it would."]
    return ["That does not fit, not even one sequence at a time."]


def _sharding(plan: Plan, options: tuple[PlanOption, ...], row: PlanRow) -> list[str]:
    sharded = next((option for option in options if option.lever.sync == "sharded"), None)
    if sharded is None or row.nodes == 1:
        return []
    found = sharded.row.prediction
    memory = needed(plan.workload, sharded.lever, row.prediction.deal.micro_batch, found.world_size)
    return [
        f"Sharding it over {found.world_size} ranks (not in shoal yet) would take {_gb(memory.total)} each, send "
        f"{format_si(found.wire_bytes, 'B')} instead of {format_si(row.prediction.wire_bytes, 'B')} a step, and make "
        f"the step {format_duration(found.step.step_s)} instead of {format_duration(row.prediction.step.step_s)}."
    ]


def _by_ddp(plan: Plan, row: PlanRow) -> list[str]:
    """What sharding is compared with."""
    if row.nodes == 1:
        return []
    found = make_row(plan.workload, plan.lever.with_(sync="ddp"), plan.setting, row.nodes).prediction
    return [
        f"By DDP each rank would hold {_gb(found.memory.total)} and send {format_si(found.wire_bytes, 'B')} instead of "
        f"{format_si(row.prediction.wire_bytes, 'B')} a step, and the step would take "
        f"{format_duration(found.step.step_s)} instead of {format_duration(row.prediction.step.step_s)}."
    ]


def learning_rate(plan: Plan) -> str:
    """For the batch of the largest number of nodes."""
    workload = plan.workload.accumulated(plan.lever.accumulation)
    world_size = plan.rows[-1].prediction.world_size
    batch, train = workload.sequences(world_size), workload.train
    if workload.model is None:
        rule = (
            f"Learning rate: the one tuned for a global batch of {batch} sequences; k times the batch takes k times it"
        )
        return f"{rule}, with warm-up. {_other_n(workload)}"
    factor = batch / train.base_batch
    words = (
        f"Learning rate: {scaled_lr(train, world_size):.3g} for a global batch of {batch}, scaled linearly from "
        f"{train.lr:.3g} for {train.base_batch}; warm-up {train.warmup_steps} steps."
    )
    if factor > _FAR:
        words += f" So far from the tuned batch try the square root too: {train.lr * factor**0.5:.3g}."
    return f"{words} {_other_n(workload)}"


def _other_n(workload: Workload) -> str:
    if workload.train.scaling == "strong":
        return "Another number of nodes changes neither: the global batch stays what it is (strong scaling)."
    per_rank = workload.train.global_batch
    return (
        f"With another number of nodes it changes in proportion, because every rank brings {per_rank} sequences (weak "
        "scaling); warm up for as many steps, which then see more text."
    )


def _machines(plan: Plan) -> str:
    return "this machine" if plan.rows[-1].nodes == 1 else "these machines"


def _gb(value: float) -> str:
    return format_si(value, "B")
