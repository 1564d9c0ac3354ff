"""Which lever helps, what it costs, and whether to distribute at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.config.schema import ROUND_STEPS
from shoal.cost.lever import AVAILABLE, Lever
from shoal.cost.memory import copied_bytes
from shoal.cost.plan import Plan, Row, make_row
from shoal.cost.predict import Setting, speeds
from shoal.cost.workload import Workload

# What a lever has to gain over a plainer one before its price is worth paying, and what one that trains differently.
_WORTH = 1.03
_WORTH_ANOTHER = 1.1
_BATCHES = 4
# Machines whose speeds differ by less are equal, and measured on two days.
_UNEQUAL = 0.95


@dataclass(frozen=True)
class Option:
    """A lever on so many nodes, against one node alone; `costs` is its price in accuracy or memory, in words."""

    lever: Lever
    row: Row
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

    options: tuple[Option, ...]
    best: Option | None
    larger_batch: Option | None
    other_training: Option | None


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


def candidates(base: Lever, workload: Workload, setting: Setting, nodes: int) -> Iterator[Lever]:
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


def _free(base: Lever, workload: Workload, setting: Setting, nodes: int) -> Iterator[str]:
    """Levers that change nothing but the speed, where there is something to gain."""
    if not base.balanced and min(speeds(workload, setting.speed, nodes * setting.ranks_per_node)) < _UNEQUAL:
        yield "balanced"
    if not base.hierarchical and setting.hierarchical is not None and nodes > 1:
        yield "hierarchical"


def _best(plan: Plan, levers: Sequence[Lever]) -> Option | None:
    """The plainest lever and the fewest nodes that come close to the fastest of all, if that beats one node."""
    counts = sorted({row.nodes for row in plan.rows} - {1})
    tried = [_option(plan, lever, count) for lever in levers if lever.is_available for count in counts]
    found = [option for option in tried if option.row.prediction.fits and option.row.speedup > 1]
    if not found:
        return None
    fastest = max(option.tokens_per_s for option in found)
    return next(option for option in found if option.tokens_per_s * _WORTH >= fastest)


def _option(plan: Plan, lever: Lever, nodes: int) -> Option:
    row = make_row(plan.workload, lever, plan.setting, nodes)
    words = [] if row.prediction.fits else ["does not fit into memory"]
    return Option(lever, row, "; ".join([*words, *_costs(lever)]) or "nothing: the same training as on one machine")


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
