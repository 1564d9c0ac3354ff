"""Write all ranks of a run on one time axis, in Chrome's trace-event format (Perfetto, chrome://tracing).

Wall clocks of two machines are never compared as they are. All ranks leave an all-reduce together, so the difference of
what their clocks show at its end is the offset between the clocks. The median over a block of steps is one knot of a
node's offset; between two knots it is interpolated, so that drifting and corrected clocks are followed.

Every event file is read twice and never kept: memory does not grow with the length of a run.
"""

from __future__ import annotations

import gzip
import heapq
import json
import secrets
import shlex
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple

from shoal.control.membership.types import NEVER
from shoal.errors import ShoalError
from shoal.event_schema import PHASES
from shoal.events import Event, read_events
from shoal.records.rank_log import as_float, is_number, is_step, no_steps_error, read_ballot, split_tail
from shoal.run_folder import RunFolder

# Common steps of a knot, and the most knots of a node: with more, every two become one, of twice as many steps.
_KNOT_STEPS = 32
_MOST_KNOTS = 256
# Name and category of the phases of a step, in their order: the exchange ends after `exposed`.
_BEFORE = ("data", "forward", "backward")
_EXCHANGE = ("wait", "exposed")
_CATEGORIES = {
    "data": "data",
    "forward": "compute",
    "backward": "compute",
    "wait": "wait",
    "exposed": "communication",
    "optimizer": "compute",
}
_RECOVERY = ("halted_s", "waited_s", "formed_s", "copied_s")
_RANK_MOMENTS = {"warning": "seen", "fault": "seen", "note": "text", "choice": "why", "trial": "why", "lost": "why"}
_AGENT_MOMENTS = {"note": "text", "announce": "text", "restart": "name", "ended": "name", "lost": "how"}
# Of the samples of a node, see `host.node_stats.NodeStats`.
_COUNTERS = ("throttled", "frozen", "other_cores", "memory_stall", "io_stall", "steal", "clock", "resent", "waited")
# Threads of a node beside its ranks' own, whose numbers are those of the ranks.
_AGENT_THREAD = 1_000_000
_NETWORK_THREADS = 2_000_000
_PROFILE_THREADS = 3_000_000
# Threads of one rank in a profile.
_MOST_PROFILE_THREADS = 10_000


@dataclass
class NodeClock:
    """The offset of a node's clock from the clock of the reference node, over time."""

    knots: list[tuple[float, float]] = field(default_factory=list)  # the node's own time, and seconds to add to it
    spread_s: float = 0.0  # how far the steps of a knot disagree, as their median deviation; the largest of all knots
    _block: list[tuple[float, float]] = field(default_factory=list)
    _block_steps: int = _KNOT_STEPS

    def add(self, own_time: float, offset_s: float) -> None:
        self._block.append((own_time, offset_s))
        if len(self._block) >= self._block_steps:
            self.flush()

    def flush(self) -> None:
        """Make a knot of the steps since the last one."""
        if not self._block:
            return
        offset_s = median(offset for _, offset in self._block)
        self.spread_s = max(self.spread_s, median(abs(offset - offset_s) for _, offset in self._block))
        self.knots.append((median(time for time, _ in self._block), offset_s))
        self._block.clear()
        if len(self.knots) > _MOST_KNOTS:
            pairs = zip(self.knots[::2], self.knots[1::2], strict=False)
            self.knots = [((a + b) / 2, (x + y) / 2) for (a, x), (b, y) in pairs]
            self._block_steps *= 2

    def correct(self, time: float) -> float:
        """Return the time by the reference clock."""
        if not self.knots:
            return time
        place = bisect(self.knots, (time, float("inf")))
        if place in (0, len(self.knots)):
            return time + self.knots[max(0, place - 1)][1]
        (before, low), (after, high) = self.knots[place - 1], self.knots[place]
        part = (time - before) / (after - before) if after > before else 0.0
        return time + low + part * (high - low)


class _Meeting(NamedTuple):
    """The end of an exchange, by the clock of one rank. Ordered as the exchanges of a run are."""

    launch: int
    generation: Any
    step: int
    time: float


def _meetings(path: Path) -> Iterator[_Meeting]:
    """Yield when a rank left each exchange, in order. Without an exchange, as in outer modes, the end of the step."""
    launch, generation = 0, NEVER
    for event in read_events(path):
        match event["event"]:
            case "start" if generation == NEVER:
                launch += 1
            case "membership":
                # Their generations are ordered over all launches of a run.
                generation, launch = read_ballot(event.get("generation")) or generation, 0
            case "step" if is_step(event["step"]) and is_number(event["time"]):
                end = _began(event) + as_float(event.get("exchanged_s"), event["step_s"])
                yield _Meeting(launch, generation, event["step"], end)


def _began(event: Event) -> float:
    return float(event["time"]) - float(event["step_s"])


def compare_clocks(
    reference: Iterator[_Meeting], other: Iterator[_Meeting], correct: Callable[[float], float]
) -> NodeClock:
    """Return the offset between two clocks from the exchanges that both ranks took part in."""
    clock = NodeClock()
    first, second = next(reference, None), next(other, None)
    while first is not None and second is not None:
        if first[:3] == second[:3]:
            clock.add(second.time, correct(first.time) - second.time)
            first, second = next(reference, None), next(other, None)
        elif first[:3] < second[:3]:
            first = next(reference, None)
        else:
            second = next(other, None)
    clock.flush()
    return clock


@dataclass(frozen=True)
class TraceSummary:
    """What a trace shows, and how exact its time axis is."""

    path: Path
    ranks: int
    events: int
    offsets_s: dict[str, float]  # by node: its clock's newest offset from the reference
    spreads_s: dict[str, float]  # by node: how far single steps disagree about it
    unaligned: tuple[str, ...]  # nodes that share no step with the others


def write_trace(run: RunFolder, out: Path | None = None) -> TraceSummary:
    """Write the trace of a run, compressed if the file's name ends with `.gz`."""
    files = {rank: path for rank, path in run.event_files().items() if path.stat().st_size}
    nodes = {rank: _node_of(path) for rank, path in files.items()}
    if not any(next(_meetings(path), None) is not None for path in files.values()):
        raise no_steps_error(run, "the trace is drawn from the steps in the events of a run")
    clocks = _align(files, nodes)
    path = out or run.path / "trace.json"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with gzip.open(temporary, "wt") if path.suffix == ".gz" else temporary.open("w", encoding="utf-8") as file:
            writer = _TraceWriter(file, run, files, nodes, clocks)
            count = writer.write()
        temporary.replace(path)
    except OSError as error:
        raise ShoalError(
            f"cannot write {path}: {(error.strerror or str(error)).lower()}",
            why="the run's records are safe; only the trace made from them is missing",
            fix=f"write it elsewhere: shoal trace {shlex.quote(str(run.path))} --out FILE",
        ) from None
    finally:
        # In a folder that cannot be used this fails as the writing did, and would name the temporary file.
        with suppress(OSError):
            temporary.unlink()
    return TraceSummary(
        path,
        len(files),
        count,
        {node: clock.knots[-1][1] for node, clock in clocks.items() if clock.knots},
        {node: clock.spread_s for node, clock in clocks.items()},
        tuple(node for node, clock in clocks.items() if not clock.knots),
    )


def _node_of(path: Path) -> str:
    """Return the node of a rank, by its first `start` event."""
    return next((str(event.get("node")) for event in read_events(path) if event["event"] == "start"), "unknown")


def _align(files: dict[int, Path], nodes: dict[int, str]) -> dict[str, NodeClock]:
    """Estimate every node's clock against that of the first rank's node, or against one that is placed already."""
    first = next(iter(files))
    clocks = {nodes[first]: NodeClock([(0.0, 0.0)])}
    open_ranks = [rank for rank in files if rank != first]
    is_progress = True
    while open_ranks and is_progress:
        is_progress = False
        for rank in list(open_ranks):
            node = nodes[rank]
            if node in clocks:
                open_ranks.remove(rank)
                continue
            for placed in (other for other in files if nodes[other] in clocks):
                correct = clocks[nodes[placed]].correct
                clock = compare_clocks(_meetings(files[placed]), _meetings(files[rank]), correct)
                if clock.knots:
                    clocks[node], is_progress = clock, True
                    open_ranks.remove(rank)
                    break
    return clocks | {nodes[rank]: NodeClock() for rank in open_ranks}


class _TraceWriter:
    def __init__(
        self,
        file: IO[str],
        run: RunFolder,
        files: dict[int, Path],
        nodes: dict[int, str],
        clocks: dict[str, NodeClock],
    ) -> None:
        self._file = file
        self._run = run
        self._files = files
        self._nodes = nodes
        self._clocks = clocks
        self._names = list(dict.fromkeys(nodes.values()))
        self._count = 0
        firsts = ((nodes[rank], next(_begins(path), None)) for rank, path in files.items())
        # The axis begins with the first event of any rank.
        self._zero = min(clocks[node].correct(time) for node, time in firsts if time is not None)

    def write(self) -> int:
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, name in enumerate(self._names):
            self._meta("process_name", number, 0, f"node {name}")
            self._meta("thread_name", number, _AGENT_THREAD, "agent")
        for rank in self._files:
            self._meta("thread_name", self._pid(rank), rank, f"rank {rank}")
            self._meta("thread_name", self._pid(rank), _NETWORK_THREADS + rank, f"rank {rank}: all-reduce")
        for rank, path in self._files.items():
            for event in read_events(path):
                if not (event["event"] == "step" and "tail_s" in event):
                    self._rank_event(rank, event)
        for event in self._measured_steps():
            self._step(event["rank"], event)
        for number, name in enumerate(self._names):
            self._node(number, name)
        for rank in self._files:
            self._profile(rank)
        clocks = {
            name: {"offset_s": round(clock.knots[-1][1], 6), "spread_s": round(clock.spread_s, 6)}
            for name, clock in self._clocks.items()
            if clock.knots
        }
        other = {"run": self._run.path.name, "began": round(self._zero, 6), "clocks": clocks}
        self._file.write(f'\n],"otherData":{json.dumps(other)}}}\n')
        return self._count

    def _measured_steps(self) -> Iterator[Event]:
        """Yield the steps of a measured script, with the end of an exchange divided into wait and communication."""

        def steps(path: Path) -> Iterator[tuple[int, int, Event]]:
            launch = 0
            for event in read_events(path):
                launch += event["event"] == "start"
                if event["event"] == "step" and "tail_s" in event and is_step(event["step"]):
                    yield launch, event["step"], event

        merged = heapq.merge(*map(steps, self._files.values()), key=lambda entry: entry[:2])
        for _, group in groupby(merged, key=lambda entry: entry[:2]):
            events = [event for _, _, event in group]
            ready_s = [event["ready_s"] for event in events if is_number(event.get("ready_s"))]
            for event in events:
                tail_s = as_float(event["tail_s"], 0.0)
                is_known = len(ready_s) == len(events) > 1
                wait_s, exposed_s = split_tail(event["ready_s"], tail_s, max(ready_s)) if is_known else (0.0, tail_s)
                compute_s = event["step_s"] - tail_s - as_float(event.get("optimizer_s"), 0.0)
                yield {**event, "backward_s": max(0.0, compute_s), "wait_s": wait_s, "exposed_s": exposed_s}

    def _rank_event(self, rank: int, event: Event) -> None:
        kind = event["event"]
        if not is_number(event["time"]):
            return
        if kind == "step":
            self._step(rank, event)
        elif kind == "checkpoint":
            write_s = as_float(event.get("write_s"), 0.0)
            self._slice(rank, "checkpoint", "checkpoint", event["time"] - write_s, write_s, {"step": event.get("step")})
        elif kind == "membership" and event.get("how") != "first":
            parts = {name: event[name] for name in _RECOVERY if is_number(event.get(name))}
            lost_s = sum(parts.values())
            about = {"generation": event.get("generation"), **parts}
            self._slice(rank, f"recovery ({event.get('how')})", "recovery", event["time"] - lost_s, lost_s, about)
        elif kind in _RANK_MOMENTS:
            self._moment(self._nodes[rank], rank, kind, str(event.get(_RANK_MOMENTS[kind])), event["time"])

    def _step(self, rank: int, event: Event) -> None:
        began, step_s = _began(event), float(event["step_s"])
        args = {name: event[name] for name in ("loss", "wire_bytes", "gc_s") if is_number(event.get(name))}
        self._slice(rank, f"step {event['step']}", "step", began, step_s, args)
        seconds = {phase: max(0.0, as_float(event.get(f"{phase}_s"), 0.0)) for phase in PHASES}
        at = 0.0
        exchange_s = sum(seconds[phase] for phase in _EXCHANGE)
        exchanged = as_float(event.get("exchanged_s"), sum(seconds[phase] for phase in _BEFORE) + exchange_s)
        exchanged = min(step_s, max(exchanged, exchange_s))
        for phase in (*_BEFORE, *_EXCHANGE, "optimizer"):
            if not seconds[phase]:
                continue
            if phase == "optimizer":
                at = max(at, exchanged if exchange_s else at)
            elif phase in _EXCHANGE:
                at = max(at, exchanged - seconds["exposed"] - (seconds["wait"] if phase == "wait" else 0.0))
            length = min(seconds[phase], max(0.0, step_s - at))
            name = {"exposed": "communication"}.get(phase, phase)
            self._slice(rank, name, _CATEGORIES[phase], began, length, after_s=at)
            at += length
        allreduce_s = as_float(event.get("allreduce_s"), 0.0)
        if allreduce_s > 0:
            length, thread = min(allreduce_s, exchanged), _NETWORK_THREADS + rank
            after_s = exchanged - length
            self._slice(rank, "all-reduce", "communication", began, length, thread=thread, after_s=after_s)

    def _node(self, number: int, name: str) -> None:
        """Write what a node's agent recorded, and its samples as counters."""
        with suppress(OSError, ShoalError):
            for event in read_events(self._run.journal(name)):
                if event["event"] in _AGENT_MOMENTS and is_number(event["time"]):
                    text = str(event.get(_AGENT_MOMENTS[event["event"]]))
                    self._moment(name, _AGENT_THREAD, event["event"], text, event["time"])
        with suppress(OSError, ShoalError):
            for sample in read_events(self._run.samples(name)):
                values = {key: sample[key] for key in _COUNTERS if is_number(sample.get(key))}
                if is_number(sample.get("time")) and values:
                    ts = self._ts(name, sample["time"])
                    self._put({"name": "machine", "ph": "C", "ts": ts, "pid": number, "tid": 0, "args": values})

    def _profile(self, rank: int) -> None:
        """Add what torch.profiler recorded of a rank. Its length follows from the profiled steps, not from the run."""
        try:
            document = json.loads(self._run.profile(rank).read_text(encoding="utf-8", errors="replace"))
            base_s, events = float(document.get("baseTimeNanoseconds", 0)) / 1e9, document["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        threads: dict[object, int] = {}
        for event in events if isinstance(events, list) else ():
            if not isinstance(event, dict) or event.get("ph") != "X" or not is_number(event.get("ts")):
                continue
            key = str(event.get("tid"))
            if key not in threads and len(threads) < _MOST_PROFILE_THREADS:
                threads[key] = _PROFILE_THREADS + rank * _MOST_PROFILE_THREADS + len(threads)
                self._meta("thread_name", self._pid(rank), threads[key], f"rank {rank}: profile, thread {key}")
            length_s, args = as_float(event.get("dur"), 0.0) / 1e6, event.get("args")
            self._slice(
                rank,
                str(event.get("name")),
                "profile",
                base_s + event["ts"] / 1e6,
                length_s,
                args if isinstance(args, dict) else None,
                threads.get(key, rank),
            )

    def _pid(self, rank: int) -> int:
        return self._names.index(self._nodes[rank])

    def _slice(
        self,
        rank: int,
        name: str,
        category: str,
        begin: float,
        seconds: float,
        args: dict[str, Any] | None = None,
        thread: int | None = None,
        after_s: float = 0.0,
    ) -> None:
        """Write a slice that begins `after_s` after `begin`. A clock's time is less exact than a part of a step, and
        slices of a thread must not overlap."""
        record = {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": round(self._ts(self._nodes[rank], begin) + 1e6 * after_s, 3),
            "dur": round(1e6 * max(0.0, seconds), 3),
            "pid": self._pid(rank),
            "tid": rank if thread is None else thread,
        }
        self._put(record | ({"args": args} if args else {}))

    def _moment(self, node: str, thread: int, name: str, text: str, time: float) -> None:
        record = {"name": name, "cat": "event", "ph": "i", "s": "t", "ts": self._ts(node, time)}
        self._put({**record, "pid": self._names.index(node), "tid": thread, "args": {"text": text}})

    def _meta(self, kind: str, pid: int, thread: int, name: str) -> None:
        self._put({"name": kind, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}})

    def _ts(self, node: str, time: float) -> float:
        """Return microseconds since the beginning of the axis."""
        return round(1e6 * max(0.0, self._clocks[node].correct(time) - self._zero), 3)

    def _put(self, record: dict[str, Any]) -> None:
        self._file.write(",\n" if self._count else "")
        self._file.write(json.dumps(_finite(record), separators=(",", ":"), ensure_ascii=True, allow_nan=False))
        self._count += 1


def _begins(path: Path) -> Iterator[float]:
    """Yield when the events of a rank began."""
    for event in read_events(path):
        if is_number(event["time"]):
            yield float(event["time"]) - as_float(event.get("step_s"), 0.0)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON has not: a loss may be either."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not float("-inf") < value < float("inf") else value
