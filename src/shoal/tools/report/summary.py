"""From events to figures. Pure: the readers of files are elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shoal.control.membership.types import NEVER, Ballot
from shoal.cost.network import ring_bytes
from shoal.errors import PeerLost
from shoal.events import Event
from shoal.tools.report.membership import (
    FinalLineage,
    GenerationSpan,
    Logs,
    elsewhere,
    history,
    last_members,
    measured_size,
    party,
)
from shoal.tools.report.rank_log import OF_EXCHANGE, PHASES, TIMES, Floats, RankLog, Span, Steps, as_float, collect

# SECTION report/losses
# The loss of every step, also where ranks came and went. Pure.


def losses(logs: Logs, longest: RankLog) -> tuple[Steps, Floats]:
    """One rank's where nobody came or went: all recorded the same. Otherwise, of every step, what its last generation
    recorded that led to the model at the end."""
    if not any(log.entered for log in logs.values()):
        return longest.steps, longest.column("loss")
    standing = FinalLineage(logs)
    found: dict[int, tuple[Ballot, float]] = {}
    for log in logs.values():
        rows = zip(log.steps.tolist(), log.column("loss").tolist(), log.generations(), strict=True)
        for step, loss, entered in rows:
            generation = entered.generation if entered else NEVER
            if standing.holds(entered, step) and (step not in found or found[step][0] < generation):
                found[step] = (generation, loss)
    steps = sorted(found)
    return np.array(steps, dtype=np.int64), np.array([found[step][1] for step in steps], dtype=np.float64)


def val_losses(logs: Logs) -> dict[int, float]:
    standing = FinalLineage(logs)
    return {
        step: loss
        for log in logs.values()
        for step, loss in sorted(log.val_loss.items())
        if standing.holds(log.entered_at_eval(step), step)
    }


# "unfinished" is alive, or dead without a last word: the folder alone cannot tell the two apart.
Status = Literal["finished", "interrupted", "failed", "unfinished"]


@dataclass(frozen=True)
class MinMedianMax:
    mean: float
    median: float
    p95: float


@dataclass(frozen=True)
class RankSummary:
    """One rank: who it was, and where its time went over the measured steps. `phases` each by itself; in `typical` they
    add up to the median step."""

    rank: int
    start: Event
    shard: Event
    steps: Steps
    series: dict[str, Floats]
    step_s: MinMedianMax | None
    phases: dict[str, MinMedianMax]
    typical: dict[str, float]
    allreduce_s: MinMedianMax | None
    spans: tuple[Span, ...]

    @property
    def node(self) -> str:
        return str(self.start.get("node", "unknown"))

    @property
    def hardware(self) -> dict[str, Any]:
        found = self.start.get("hardware")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class RunSummary:
    """A run in figures. What was never recorded is None, an empty dictionary or an empty curve. `phases` add up to the
    median of `step_s`. `hidden_s` is the part of the median of `allreduce_s` that lay behind backward.

    `world_size` is that of the steps that were measured, `ranks` are those of the last launch and `members` the ids of
    those who took part at last; `history` and `took_part` are of all launches, empty where nobody can come or go."""

    status: Status
    world_size: int
    members: tuple[int, ...]
    history: tuple[GenerationSpan, ...]
    took_part: dict[int, RankSummary]
    ranks: dict[int, RankSummary]
    started_at: float | None
    duration_s: float | None
    steps_done: int
    measured: tuple[int, int] | None
    tokens_per_step: float | None
    step_s: MinMedianMax | None
    tokens_per_s: float | None
    phases: dict[str, float]
    allreduce_s: MinMedianMax | None
    hidden_s: float | None
    wire_bytes_per_step: float | None
    theoretical_bytes_per_step: float | None
    loss_steps: Steps
    loss: Floats
    val_loss: dict[int, float]
    other_load: float | None
    peak_memory_bytes: float | None
    choice: Event
    faults: list[Event]
    warnings: list[Event]

    @property
    def start(self) -> Event:
        """What the first rank said of the whole run when it started."""
        return next((rank.start for rank in self.ranks.values() if rank.start), {})

    @property
    def final_loss(self) -> float | None:
        return float(self.loss[-1]) if len(self.loss) else None

    @property
    def final_val_loss(self) -> float | None:
        return self.val_loss[max(self.val_loss)] if self.val_loss else None


def summarize(events: Iterable[Event]) -> RunSummary:
    """Figures are medians, means and 95th percentiles over the second half of the steps since the last start; where
    the world changed in between, of the steps that `measured_size` says."""
    everybody = collect(events)
    logs, members = party(everybody), last_members(everybody)
    last = {rank: log for rank, log in logs.items() if rank in members}
    size = measured_size(logs)
    for log in logs.values():
        log.measured_size = size
    ranks = {rank: _summarize_rank(log) for rank, log in logs.items()}
    longest = max(logs.values(), key=lambda log: len(log.steps), default=RankLog(0))
    loss_steps, loss = losses(logs, longest)
    world_size = size or len(members)
    timed = {rank: log for rank, log in logs.items() if len(log.measured())} or logs
    step_s = spread(_pooled(logs, "step_s"))
    tokens = spread(_pooled(logs, "tokens"))
    allreduce_s = spread(_pooled(logs, "allreduce_s"))
    return RunSummary(
        status=_status(last, len(members) - len(elsewhere(everybody))),
        world_size=world_size,
        members=members,
        history=history(everybody),
        took_part={rank: ranks.get(rank) or _summarize_rank(log) for rank, log in everybody.items() if log.entered},
        ranks=ranks,
        started_at=min((log.started_at for log in logs.values() if log.started_at is not None), default=None),
        duration_s=max((log.ran_s for log in everybody.values() if log.ran_s is not None), default=None),
        steps_done=int(loss_steps[-1]) if len(loss_steps) else 0,
        measured=_measured_range(longest),
        tokens_per_step=tokens.median if tokens else None,
        step_s=step_s,
        tokens_per_s=tokens.median / step_s.median if tokens and step_s and step_s.median > 0 else None,
        phases=_typical_phases(logs.values(), step_s.median) if step_s else {},
        allreduce_s=allreduce_s,
        hidden_s=_hidden(logs.values(), allreduce_s),
        wire_bytes_per_step=_wire_bytes(timed),
        theoretical_bytes_per_step=_theory(timed, longest.start, world_size),
        loss_steps=loss_steps,
        loss=loss,
        val_loss=val_losses(logs),
        other_load=_other_load(last.values()),
        peak_memory_bytes=_peak_memory(logs.values()),
        choice=next((log.choice for log in logs.values() if log.choice), {}),
        faults=_causes_first([log.fault for log in logs.values() if log.fault is not None]),
        warnings=[warning for log in logs.values() for warning in log.warnings],
    )


def timing_rows(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    """The rows of `timings.jsonl`: one per step and rank, with the times that were recorded."""
    logs = collect(events)
    for rank, log in logs.items():
        columns = {name: log.column(name) for name in TIMES}
        for position, step in enumerate(log.steps.tolist()):
            times = {name: round(float(values[position]), 6) for name, values in columns.items()}
            yield {"step": step, "rank": rank, **{name: time for name, time in times.items() if np.isfinite(time)}}


def spread(values: Floats) -> MinMedianMax | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return MinMedianMax(float(values.mean()), float(np.median(values)), float(np.percentile(values, 95)))


def _summarize_rank(log: RankLog) -> RankSummary:
    series = {name: log.column(name) for name in TIMES}
    spreads = {name: spread(_measured(log, name)) for name in TIMES}
    return RankSummary(
        rank=log.rank,
        start=log.start,
        shard=log.shard,
        steps=log.steps,
        series=series,
        step_s=spreads["step_s"],
        phases={phase: found for phase in PHASES if (found := spreads[f"{phase}_s"]) is not None},
        typical=_typical_phases([log], spreads["step_s"].median) if spreads["step_s"] else {},
        allreduce_s=spreads["allreduce_s"],
        spans=log.spans(),
    )


def _pooled(logs: dict[int, RankLog], name: str) -> Floats:
    """The measured steps of all ranks together."""
    return np.concatenate([np.empty(0), *(_measured(log, name) for log in logs.values())])


def _measured(log: RankLog, name: str) -> Floats:
    """One value a step or, where replicas meet only now and then, a round: a step with an exchange and one without are
    no two samples of the same thing, and a median of steps would never see the exchange."""
    values = log.column(name)[log.measured()]
    return values if name in OF_EXCHANGE else _by_rounds(values, _round_steps(log.start))


def _by_rounds(values: Floats, round_steps: int) -> Floats:
    """Means over rounds, counted from the end; of less than one, the mean of what there is."""
    size = min(round_steps, len(values))
    if size < 2:
        return values
    whole = len(values) // size * size
    means: Floats = values[len(values) - whole :].reshape(-1, size).mean(axis=1)
    return means


def _round_steps(start: Event) -> int:
    found = start.get("round_steps")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 1


def _measured_range(log: RankLog) -> tuple[int, int] | None:
    steps = log.steps[log.measured()]
    return (int(steps[0]), int(steps[-1])) if len(steps) else None


def _typical_phases(logs: Collection[RankLog], step_s: float) -> dict[str, float]:
    """Where the time of a typical step went on an average rank; the phases add up to `step_s`.

    Each phase has its share of the time of the middle half of the steps, by duration. Medians of each phase would not
    add up, and plain means would count the steps in which the machine was busy with something else. On a busy machine
    the mean of that middle half is not the median step either: hence shares, of which `step_s` is the whole.
    """
    total_s = dict.fromkeys(PHASES, 0.0)
    whole_s = 0.0
    for log in logs:
        typical = _typical_steps(log)
        if not len(typical):
            continue
        whole_s += float(log.column("step_s")[typical].mean())
        for phase in PHASES:
            total_s[phase] += max(0.0, float(_finite_or_zero(log.column(f"{phase}_s")[typical]).mean()))
    if not (0 < step_s < math.inf and 0 < whole_s < math.inf):
        return {}
    del total_s["other"]
    named_s = sum(total_s.values())
    whole_s = max(whole_s, named_s)
    return {phase: seconds / whole_s * step_s for phase, seconds in (total_s | {"other": whole_s - named_s}).items()}


def _hidden(logs: Collection[RankLog], allreduce_s: MinMedianMax | None) -> float | None:
    """The part of the median all-reduce that lay behind backward: its share in the steps from which the phases are, so
    that it goes with their exposed communication and wait."""
    total_s = dict.fromkeys(OF_EXCHANGE, 0.0)
    for log in logs:
        typical = _typical_steps(log)
        columns = {name: log.column(name)[typical] for name in OF_EXCHANGE}
        is_timed = np.all([np.isfinite(values) for values in columns.values()], axis=0)
        for name, values in columns.items():
            total_s[name] += float(values[is_timed].sum())
    if allreduce_s is None or not total_s["allreduce_s"] > 0:
        return None
    return allreduce_s.median * min(1.0, max(0.0, total_s["hidden_s"] / total_s["allreduce_s"]))


def _typical_steps(log: RankLog) -> Steps:
    """Positions of the middle half of the measured steps by duration, or of whole rounds, among those whose phases were
    recorded: a run may be resumed with another `sync.measure`."""
    measured = log.measured()
    has_phases = np.any([np.isfinite(log.column(f"{phase}_s")[measured]) for phase in PHASES], axis=0)
    positions = measured[has_phases]
    size = max(1, min(_round_steps(log.start), len(positions)))
    rounds = positions[len(positions) % size :].reshape(-1, size)
    typical: Steps = rounds[_middle_half(log.column("step_s")[rounds].mean(axis=1))].reshape(-1)
    return typical


def _finite_or_zero(values: Floats) -> Floats:
    found: Floats = np.where(np.isfinite(values), values, 0.0)
    return found


def _middle_half(step_s: Floats) -> Steps:
    timed: Steps = np.flatnonzero(np.isfinite(step_s))
    if not len(timed):
        return timed
    low, high = np.percentile(step_s[timed], (25, 75), method="nearest")
    middle: Steps = timed[(step_s[timed] >= low) & (step_s[timed] <= high)]
    return middle


def _wire_bytes(logs: dict[int, RankLog]) -> float | None:
    """Bytes per step and rank. The counter belongs to the node's interface, so its ranks share what it counted."""
    ranks_on = Counter(str(log.start.get("node")) for log in logs.values())
    found = []
    for log in logs.values():
        counted = spread(_measured(log, "wire_bytes"))
        if counted is not None:
            found.append(counted.median / ranks_on[str(log.start.get("node"))])
    return sum(found) / len(found) if found else None


def _other_load(logs: Collection[RankLog]) -> float | None:
    """How many cores other programs kept busy meanwhile, on the machine where it was worst."""
    machines = {_machine(log) for log in logs}
    found = [cores_of_others([log.end for log in logs if _machine(log) == machine]) for machine in machines]
    known = [cores for cores in found if cores is not None]
    return max(known, default=None) if len(known) == len(found) else None


def cores_of_others(spent: Collection[Event]) -> float | None:
    """How many cores of one machine programs other than these ranks kept busy, by what each rank's load meter says."""
    cpu, busy, wall = ([as_float(each.get(key)) for each in spent] for key in ("cpu_s", "machine_busy_s", "wall_s"))
    if not cpu or not all(0 < value < math.inf for value in (*cpu, *busy, *wall)):
        return None
    return max(0.0, (max(busy) - sum(cpu)) / max(wall))


def _peak_memory(logs: Collection[RankLog]) -> float | None:
    """Of the rank that had most."""
    found = [as_float(log.end.get("peak_memory_bytes")) for log in logs]
    return max((each for each in found if each > 0), default=None)


def _machine(log: RankLog) -> str:
    hardware = log.start.get("hardware")
    return str(hardware.get("boot_id") if isinstance(hardware, dict) else None)


def _theory(logs: dict[int, RankLog], start: Event, world_size: int) -> float | None:
    """Bytes per step and rank. What is exchanged once in a round counts for all steps of it; through shared memory one
    rank a node sends, for all ranks of that node."""
    grad_bytes = start.get("grad_bytes")
    if not isinstance(grad_bytes, int) or not world_size:
        return None
    if start.get("inside", "gloo") == "gloo":
        return ring_bytes(world_size, grad_bytes) / _round_steps(start)
    ranks_on = Counter((str(log.start.get("node")), _machine(log)) for log in logs.values())
    sent = ring_bytes(len(ranks_on), grad_bytes) / _round_steps(start)
    return sum(sent / ranks for ranks in ranks_on.values()) / len(ranks_on)


def _causes_first(faults: list[Event]) -> list[Event]:
    """A rank that lost its peer is a consequence: the peer's own fault comes before it."""
    return sorted(faults, key=lambda fault: fault.get("error") == PeerLost.__name__)


def _status(logs: dict[int, RankLog], world_size: int) -> Status:
    if any(log.fault for log in logs.values()):
        return "failed"
    ends = [log.ended for log in logs.values()]
    if "interrupted" in ends:
        return "interrupted"
    everybody = bool(ends) and len(ends) >= world_size and all(end == "finished" for end in ends)
    return "finished" if everybody else "unfinished"
