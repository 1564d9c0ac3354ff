"""Compute a run's figures from its events: speed, phases, losses, bytes, memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shoal.config.sync_choice import SYNC_METHODS
from shoal.control.membership.types import NEVER, Ballot
from shoal.cost.causes import Demand, machine_demands
from shoal.cost.network import ring_bytes
from shoal.cost.sharding import payload
from shoal.errors import PeerLost
from shoal.event_schema import EXCHANGE_TIMES, PHASES, STEP_TIMES, Event
from shoal.records.history import (
    FinalLineage,
    GenerationSpan,
    Logs,
    choose_measured_size,
    last_members,
    logs_of_last_launch,
    ranks_elsewhere,
    read_history,
)
from shoal.records.measured_script import find_stragglers, node_stats
from shoal.records.rank_log import (
    Calls,
    Floats,
    RankLog,
    Span,
    Steps,
    as_float,
    is_number,
    is_step,
    read_rank_logs,
)
from shoal.units import TOKENS, Unit, unit_of

# "unfinished": still running, or dead without an `end` event. The folder alone does not show which.
Status = Literal["finished", "interrupted", "failed", "unfinished"]


# Fewer steps have no tail to speak of.
_LEAST_TAIL_STEPS = 20


@dataclass(frozen=True)
class MeanMedianP95:
    mean: float
    median: float
    p95: float


@dataclass(frozen=True)
class TailStats:
    """How the own part of a step varies, on every rank and on the slowest of all, for which a step waits."""

    by_rank: dict[int, tuple[float, float, float, float]]  # median, 95th and 99th percentile, longest
    median_s: float  # over all ranks
    slowest_s: float  # mean over the steps of the slowest rank's part
    independent_s: float  # the same if the ranks varied independently of each other
    one_more_s: float  # the same with one more rank of the same kind


@dataclass(frozen=True)
class RankSummary:
    """One rank, and where its time went in the measured steps."""

    rank: int
    start: Event
    shard: Event
    steps: Steps
    series: dict[str, Floats]
    step_s: MeanMedianP95 | None
    phases: dict[str, MeanMedianP95]  # each phase by itself
    typical: dict[str, float]  # seconds by phase that add up to the median step
    allreduce_s: MeanMedianP95 | None
    spans: tuple[Span, ...]

    @property
    def node(self) -> str:
        return str(self.start.get("node", "unknown"))

    @property
    def hardware(self) -> dict[str, Any]:
        hardware = self.start.get("hardware")
        return hardware if isinstance(hardware, dict) else {}


@dataclass(frozen=True)
class RunSummary:
    """A run in figures. What was never recorded is None, an empty dictionary or an empty curve."""

    status: Status
    world_size: int  # in the measured steps
    members: tuple[int, ...]  # ids of the ranks that took part at the end
    history: tuple[GenerationSpan, ...]  # of all launches; empty without membership
    took_part: dict[int, RankSummary]  # ranks of all launches; empty without membership
    ranks: dict[int, RankSummary]  # ranks of the last launch
    started_at: float | None
    duration_s: float | None
    steps_done: int
    measured: tuple[int, int] | None  # first and last measured step
    unit: Unit  # of the speed
    tokens_per_step: float | None  # None where a step counts samples only
    samples_per_step: float | None
    step_s: MeanMedianP95 | None
    phases: dict[str, float]  # seconds by phase that add up to the median of step_s
    allreduce_s: MeanMedianP95 | None
    collectives: dict[str, Calls]  # called from Python by a measured script: medians per step and rank, by kind
    hidden_s: float | None  # the part of the median all-reduce that was hidden behind backward
    wire_bytes_per_step: float | None
    theoretical_bytes_per_step: float | None
    loss_steps: Steps
    loss: Floats
    val_loss: dict[int, float]
    logged: dict[str, dict[int, float]]  # what the user's program recorded: values by name and step
    other_load: float | None  # cores that other programs kept busy, on the busiest machine
    demand: Demand | None  # for processors, on the machine that has the fewest for it; None where it is not known
    peak_memory_bytes: float | None  # of the rank that used the most
    choice: Event
    faults: list[Event]
    warnings: list[Event]
    tail: TailStats | None = None  # None for one rank, and where waits were not measured

    @property
    def start(self) -> Event:
        """Return the `start` event of the first rank that has one."""
        return next((rank.start for rank in self.ranks.values() if rank.start), {})

    @property
    def tokens_per_s(self) -> float | None:
        return _per_s(self.tokens_per_step, self.step_s)

    @property
    def samples_per_s(self) -> float | None:
        return _per_s(self.samples_per_step, self.step_s)

    @property
    def speed(self) -> float | None:
        """Return what the training did in a second, counted in `unit`."""
        return self.tokens_per_s if self.unit is TOKENS else self.samples_per_s

    @property
    def final_loss(self) -> float | None:
        return float(self.loss[-1]) if len(self.loss) else None

    @property
    def final_val_loss(self) -> float | None:
        return self.val_loss[max(self.val_loss)] if self.val_loss else None


def _per_s(per_step: float | None, step_s: MeanMedianP95 | None) -> float | None:
    return per_step / step_s.median if per_step is not None and step_s is not None and step_s.median > 0 else None


def summarize(events: Iterable[Event]) -> RunSummary:
    """Compute means, medians and 95th percentiles over the second half of the steps since the last start.

    If the world size changed, use only the steps of the size that `choose_measured_size` returns.
    """
    all_logs = read_rank_logs(events)
    logs, members = logs_of_last_launch(all_logs), last_members(all_logs)
    member_logs = {rank: log for rank, log in logs.items() if rank in members}
    size = choose_measured_size(logs)
    for log in logs.values():
        log.steps.measured_size = size
    ranks = {rank: _summarize_rank(log) for rank, log in logs.items()}
    longest = max(logs.values(), key=lambda log: len(log.steps), default=RankLog(0))
    loss_steps, loss = _losses(logs, longest)
    steps = longest.steps.numbers if longest.start.get("measured") else loss_steps
    world_size = size or len(members)
    timed = {rank: log for rank, log in logs.items() if len(log.steps.measured())} or logs
    step_s, tokens, samples, allreduce_s = (
        _pooled_stats(logs, name) for name in ("step_s", "tokens", "samples", "allreduce_s")
    )
    measured_steps = longest.steps.numbers[longest.steps.measured()]
    memory_bytes = (as_float(log.end.get("peak_memory_bytes")) for log in logs.values())
    faults = [log.fault for log in logs.values() if log.fault is not None]
    return RunSummary(
        status=_status(member_logs, len(members) - len(ranks_elsewhere(all_logs))),
        world_size=world_size,
        members=members,
        history=read_history(all_logs),
        took_part={rank: ranks.get(rank) or _summarize_rank(log) for rank, log in all_logs.items() if log.entered},
        ranks=ranks,
        started_at=min(
            (log.clock.started_at for log in logs.values() if log.clock.started_at is not None), default=None
        ),
        duration_s=max((log.clock.ran_s for log in all_logs.values() if log.clock.ran_s is not None), default=None),
        steps_done=int(steps[-1]) if len(steps) else 0,
        measured=(int(measured_steps[0]), int(measured_steps[-1])) if len(measured_steps) else None,
        unit=TOKENS if tokens else unit_of(longest.start),
        tokens_per_step=tokens.median if tokens else None,
        samples_per_step=samples.median if samples else _global_batch(longest.start),
        step_s=step_s,
        phases=_typical_phases(logs.values(), step_s.median) if step_s else {},
        allreduce_s=allreduce_s,
        collectives=_typical_collectives(logs.values()),
        hidden_s=_hidden_part(logs.values(), allreduce_s),
        wire_bytes_per_step=_wire_bytes(timed),
        theoretical_bytes_per_step=_theoretical_bytes(timed, longest.start, world_size),
        loss_steps=loss_steps,
        loss=loss,
        val_loss=_val_losses(logs),
        logged=_logged_values(logs),
        other_load=_other_load(member_logs.values()),
        demand=_highest_demand(member_logs.values()),
        peak_memory_bytes=max((size for size in memory_bytes if size > 0), default=None),
        choice=next((log.choice for log in logs.values() if log.choice), {}),
        # A lost peer is a consequence: show the peer's own fault first.
        faults=sorted(faults, key=lambda fault: fault.get("error") == PeerLost.__name__),
        warnings=[*(warning for log in logs.values() for warning in log.warnings), *find_stragglers(logs)],
        tail=_tail_stats(timed),
    )


def timing_rows(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `timings.jsonl`: one per step and rank, with the times that were recorded."""
    for rank, log in read_rank_logs(events).items():
        columns = {name: log.steps.column(name) for name in STEP_TIMES}
        for position, step in enumerate(log.steps.numbers.tolist()):
            times = {name: round(float(values[position]), 6) for name, values in columns.items()}
            yield {"step": step, "rank": rank, **{name: time for name, time in times.items() if np.isfinite(time)}}


def _tail_stats(logs: Logs) -> TailStats | None:
    """Compare the slowest rank of each measured step with what independent ranks would give.

    All ranks end a step together, so a rank's own part is its step without the wait.
    """
    own: dict[int, dict[int, float]] = {}
    for rank, log in logs.items():
        positions = log.steps.measured()
        own_s = (log.steps.column("step_s") - log.steps.column("wait_s"))[positions]
        own[rank] = {
            int(step): float(seconds)
            for step, seconds in zip(log.steps.numbers[positions], own_s, strict=True)
            if np.isfinite(seconds) and seconds > 0
        }
    common = sorted(set.intersection(*map(set, own.values()))) if len(own) > 1 else []
    if len(common) < _LEAST_TAIL_STEPS:
        return None
    table = np.array([[by_step[step] for step in common] for by_step in own.values()])
    values = np.unique(table)
    # The chance that a rank is done by then, by rank: independent ranks multiply.
    done = np.array([np.searchsorted(np.sort(row), values, side="right") / len(row) for row in table])
    every = done.prod(axis=0)
    return TailStats(
        by_rank={
            rank: (
                float(np.median(row)),
                float(np.percentile(row, 95)),
                float(np.percentile(row, 99)),
                float(row.max()),
            )
            for rank, row in zip(own, table, strict=True)
        },
        median_s=float(np.median(table)),
        slowest_s=float(table.max(axis=0).mean()),
        independent_s=_mean_of(values, every),
        one_more_s=_mean_of(values, every * done.mean(axis=0)),
    )


def _mean_of(values: Floats, cumulative: Floats) -> float:
    """Return the mean of a distribution on sorted values, given the chance of each value or less."""
    return float((values * np.diff(cumulative, prepend=0.0)).sum())


def _losses(logs: Logs, longest: RankLog) -> tuple[Steps, Floats]:
    """Return the loss of every step.

    That of a measured script is not known. Without membership changes all ranks recorded the same losses, so one log
    suffices. Otherwise take, for each step, the loss of the last generation that led to the final model.
    """
    if longest.start.get("measured"):
        return np.empty(0, dtype=np.int64), np.empty(0)
    if not any(log.entered for log in logs.values()):
        return longest.steps.numbers, longest.steps.column("loss")
    final = FinalLineage(logs)
    losses: dict[int, tuple[Ballot, float]] = {}
    for log in logs.values():
        for step, loss, entered in zip(
            log.steps.numbers.tolist(), log.steps.column("loss").tolist(), log.steps.generations(), strict=True
        ):
            generation = entered.generation if entered else NEVER
            if final.holds(entered, step) and (step not in losses or losses[step][0] < generation):
                losses[step] = (generation, loss)
    steps = sorted(losses)
    return np.array(steps, dtype=np.int64), np.array([losses[step][1] for step in steps], dtype=np.float64)


def _val_losses(logs: Logs) -> dict[int, float]:
    final = FinalLineage(logs)
    return {
        step: recorded.value
        for log in logs.values()
        for step, recorded in sorted(log.val_loss.items())
        if final.holds(recorded.entered, step)
    }


def _logged_values(logs: Logs) -> dict[str, dict[int, float]]:
    """Return what `session.log` recorded. Where several ranks recorded a value for a step, the lowest rank's counts."""
    final = FinalLineage(logs)
    logged: dict[str, dict[int, float]] = {}
    for log in logs.values():
        for name, values in log.logged.items():
            for step, value in values.items():
                if final.holds(log.logged_in[step], step):
                    logged.setdefault(name, {}).setdefault(step, value)
    return {name: dict(sorted(values.items())) for name, values in logged.items()}


def _global_batch(start: Event) -> float | None:
    """Return the samples of a step as the `start` event has them: steps of older versions have only their tokens."""
    samples = start.get("global_batch")
    return float(samples) if is_number(samples) and samples > 0 else None


def _stats(values: Floats) -> MeanMedianP95 | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return MeanMedianP95(float(values.mean()), float(np.median(values)), float(np.percentile(values, 95)))


def _pooled_stats(logs: Logs, name: str) -> MeanMedianP95 | None:
    """Return the statistics over the measured steps of all ranks together."""
    return _stats(np.concatenate([np.empty(0), *(_measured(log, name) for log in logs.values())]))


def _summarize_rank(log: RankLog) -> RankSummary:
    stats = {name: _stats(_measured(log, name)) for name in STEP_TIMES}
    return RankSummary(
        rank=log.rank,
        start=log.start,
        shard=log.shard,
        steps=log.steps.numbers,
        series={name: log.steps.column(name) for name in STEP_TIMES},
        step_s=stats["step_s"],
        phases={phase: phase_s for phase in PHASES if (phase_s := stats[f"{phase}_s"]) is not None},
        typical=_typical_phases([log], stats["step_s"].median) if stats["step_s"] else {},
        allreduce_s=stats["allreduce_s"],
        spans=log.steps.spans(),
    )


def _measured(log: RankLog, name: str) -> Floats:
    """Return one value per measured step, or per round where replicas exchange only every few steps.

    Steps with and without an exchange are not samples of the same thing: a median over steps would ignore the exchange.
    """
    values = log.steps.column(name)[log.steps.measured()]
    return values if name in EXCHANGE_TIMES else _by_rounds(values, _round_steps(log.start))


def _by_rounds(values: Floats, round_steps: int) -> Floats:
    """Return the means over rounds, counted from the end; for less than one round, the mean of all values."""
    size = min(round_steps, len(values))
    if size < 2:
        return values
    whole = len(values) // size * size
    means: Floats = values[len(values) - whole :].reshape(-1, size).mean(axis=1)
    return means


def _round_steps(start: Event) -> int:
    steps = start.get("round_steps")
    return steps if is_step(steps) and steps > 0 else 1


def _typical_phases(logs: Collection[RankLog], step_s: float) -> dict[str, float]:
    """Return the seconds per phase of a typical step on an average rank; they add up to `step_s`.

    Take each phase's share of the middle half of the steps, by duration. Medians of the phases would not add up, and
    plain means would include steps in which the machine was busy with something else. On a busy machine the mean of
    the middle half is not the median step either, so the shares are scaled to `step_s`.
    """
    total_s: dict[str, float] = {}  # of the phases that were recorded
    whole_s = 0.0
    for log in logs:
        typical = _typical_steps(log)
        if not len(typical):
            continue
        whole_s += float(log.steps.column("step_s")[typical].mean())
        for phase in PHASES:
            phase_s = log.steps.column(f"{phase}_s")[typical]
            if np.isfinite(phase_s).any():
                mean_s = max(0.0, float(np.where(np.isfinite(phase_s), phase_s, 0.0).mean()))
                total_s[phase] = total_s.get(phase, 0.0) + mean_s
    if not (0 < step_s < math.inf and 0 < whole_s < math.inf):
        return {}
    total_s.pop("other", None)
    named_s = sum(total_s.values())
    whole_s = max(whole_s, named_s)
    return {phase: seconds / whole_s * step_s for phase, seconds in (total_s | {"other": whole_s - named_s}).items()}


def _hidden_part(logs: Collection[RankLog], allreduce_s: MeanMedianP95 | None) -> float | None:
    """Return the part of the median all-reduce that was hidden behind backward.

    Its share comes from the same steps as the phases, so that it fits their exposed communication and wait.
    """
    total_s = dict.fromkeys(EXCHANGE_TIMES, 0.0)
    for log in logs:
        typical = _typical_steps(log)
        columns = {name: log.steps.column(name)[typical] for name in EXCHANGE_TIMES}
        is_timed = np.all([np.isfinite(values) for values in columns.values()], axis=0)
        for name, values in columns.items():
            total_s[name] += float(values[is_timed].sum())
    if allreduce_s is None or not total_s["allreduce_s"] > 0:
        return None
    return allreduce_s.median * min(1.0, max(0.0, total_s["hidden_s"] / total_s["allreduce_s"]))


def _typical_collectives(logs: Collection[RankLog]) -> dict[str, Calls]:
    """Return the medians over the measured steps of all ranks, of each kind that most steps have."""
    typical = {}
    steps = [(log, step) for log in logs for step in log.steps.numbers[log.steps.measured()].tolist()]
    for kind in sorted({kind for log in logs for kind in log.steps.collectives}):
        rows = [log.steps.collectives.get(kind, {}).get(step, Calls(0, 0, 0.0)) for log, step in steps]
        medians = Calls(*np.median(rows, axis=0).tolist()) if rows else Calls(0, 0, 0.0)
        if medians.calls:
            typical[kind] = medians
    return typical


def _typical_steps(log: RankLog) -> Steps:
    """Return the positions of the middle half of the measured steps (or whole rounds), by duration.

    Only steps with recorded phases count: a run may be resumed with another `sync.measure`.
    """
    measured = log.steps.measured()
    has_phases = np.any([np.isfinite(log.steps.column(f"{phase}_s")[measured]) for phase in PHASES], axis=0)
    positions = measured[has_phases]
    size = max(1, min(_round_steps(log.start), len(positions)))
    rounds = positions[len(positions) % size :].reshape(-1, size)
    round_s = log.steps.column("step_s")[rounds].mean(axis=1)
    timed = np.flatnonzero(np.isfinite(round_s))
    if len(timed):
        low, high = np.percentile(round_s[timed], (25, 75), method="nearest")
        timed = timed[(round_s[timed] >= low) & (round_s[timed] <= high)]
    typical: Steps = rounds[timed].reshape(-1)
    return typical


def _wire_bytes(logs: Logs) -> float | None:
    """Return the measured bytes per step and rank. The node's interface counts them, so its ranks divide the count."""
    ranks_on = Counter(str(log.start.get("node")) for log in logs.values())
    sent = []
    for log in logs.values():
        counted = _stats(_measured(log, "wire_bytes"))
        if counted is not None:
            sent.append(counted.median / ranks_on[str(log.start.get("node"))])
    return sum(sent) / len(sent) if sent else None


def _other_load(logs: Collection[RankLog]) -> float | None:
    """Return the cores that other programs kept busy on the busiest machine; None if any machine's load is unknown."""
    machines = {_machine(log) for log in logs}
    loads = [busy_cores_of_others([log.end for log in logs if _machine(log) == machine]) for machine in machines]
    known = [cores for cores in loads if cores is not None]
    return max(known, default=None) if len(known) == len(loads) else None


def busy_cores_of_others(meters: Collection[Event]) -> float | None:
    """Return the cores of one machine that programs other than these ranks kept busy, from each rank's load meter."""
    cpu, busy, wall = ([as_float(meter.get(key)) for meter in meters] for key in ("cpu_s", "machine_busy_s", "wall_s"))
    if not cpu or not all(0 < value < math.inf for value in (*cpu, *busy, *wall)):
        return None
    return max(0.0, (max(busy) - sum(cpu)) / max(wall))


def _highest_demand(logs: Collection[RankLog]) -> Demand | None:
    """Return the demand for processors of the ranks on one machine, of that which lacks the most."""
    names = sorted({_machine(log) for log in logs})
    nodes = [replace(node_stats(log), machine=names.index(_machine(log))) for log in logs]
    demands = [demand for demand in machine_demands(nodes).values() if demand.wanted and demand.cpus]
    return max(demands, key=lambda demand: (demand.is_too_high, demand.wanted / demand.cpus), default=None)


def _machine(log: RankLog) -> str:
    hardware = log.start.get("hardware")
    return str(hardware.get("boot_id") if isinstance(hardware, dict) else None)


def shard_level(start: Event) -> int:
    """Return what was divided among the ranks, as a `start` event records it; 0 for a model that was not."""
    method = SYNC_METHODS.get(str(start.get("sync")))
    return method.shard_level if method is not None and is_step(start.get("copies")) else 0


def _theoretical_bytes(logs: Logs, start: Event, world_size: int) -> float | None:
    """Return the bytes per step and rank that a ring all-reduce, or the halves of a sharded one, need.

    An exchange per round is divided by the steps of the round. With shared memory one rank per node sends for all.
    """
    grad_bytes = start.get("grad_bytes")
    if not isinstance(grad_bytes, int) or not world_size:
        return None
    if level := shard_level(start):
        batches, copies = start.get("micro_batches"), start.get("copies")
        return grad_bytes * payload(level, world_size, batches if is_step(batches) else 1, int(bool(copies)))
    if start.get("inside", "gloo") == "gloo":
        return ring_bytes(world_size, grad_bytes) / _round_steps(start)
    ranks_on = Counter((str(log.start.get("node")), _machine(log)) for log in logs.values())
    sent = ring_bytes(len(ranks_on), grad_bytes) / _round_steps(start)
    return sum(sent / ranks for ranks in ranks_on.values()) / len(ranks_on)


def _status(logs: Logs, world_size: int) -> Status:
    if any(log.fault for log in logs.values()):
        return "failed"
    ends = [log.ended for log in logs.values()]
    if "interrupted" in ends:
        return "interrupted"
    is_finished = bool(ends) and len(ends) >= world_size and all(end == "finished" for end in ends)
    return "finished" if is_finished else "unfinished"
