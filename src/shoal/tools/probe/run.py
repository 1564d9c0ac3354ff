"""Measure a cluster: its links by meters without torch, then gloo and each machine by ranks like a training's."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from shoal.cluster.cluster import NodePrograms, open_cluster, start_on_nodes, temporary_parent
from shoal.cluster.node import Node, RunFiles
from shoal.config.profile import (
    SMALL_GPT,
    WIDE_GPT,
    Backend,
    CollectivePoint,
    CollectiveProfile,
    ComputeProfile,
    ConnectionTrial,
    GpuProfile,
    HeldOut,
    LinkProfile,
    ModelTiming,
    NodeProfile,
    Op,
    Profile,
    ProfileSummary,
    TrainingPoint,
    operation_label,
)
from shoal.config.schema import ModelConfig, RunConfig
from shoal.cost.machines import Roofline
from shoal.cost.network import algorithm_gbps, bus_gbps, fit_alpha_beta, format_buffer_size, median_error
from shoal.errors import ControlError, RunFailed
from shoal.events import Event, EventLog
from shoal.host.facts import boot_id
from shoal.host.memory import total_bytes
from shoal.launch.launcher import run_module
from shoal.records.run_tails import RunTails
from shoal.records.summary import busy_cores_of_others
from shoal.run_folder import RunFolder
from shoal.units import format_duration, format_number, format_percent, format_si, warn_of_other_programs

RANKS, LINK_METER = "shoal.tools.probe.worker", "shoal.tools.probe.link_meter"
Pair = tuple[str, str]
Report = Callable[[str], None]
SMALL = {"small": SMALL_GPT}
STANDARD = {**SMALL, "wide": WIDE_GPT}
_LINKS_SHARE = 0.35
# From a rank's last figure until its agent has exited.
_ENDING_S = 2.0
_ANSWER_S = 20.0
_POLL_S = 0.2


def probe(on: str, budget_s: float, report: Report, models: Mapping[str, ModelConfig] | None = None) -> Profile:
    """Measure the cluster `on` within the budget.

    `report` receives the current activity, for display. `models` by name are those to be timed; without any, two from
    which the times of others can be estimated.
    """
    began = time.monotonic()
    with start_on_nodes(on, LINK_METER) as started:
        for error in started.unreached.values():
            raise error
        report("asking every machine for its facts")
        facts = {name: program.ask(_ANSWER_S, do="facts") for name, program in started.programs.items()}
        plan = plan_flows(started.nodes, _LINKS_SHARE * budget_s)
        try:
            links = measure_links(started, plan, report)
        except ControlError as error:
            raise ControlError(
                error.seen,
                why=error.why or "the machines do not reach each other, or one of them is gone",
                fix=f"find out why: shoal doctor --on {on}",
            ) from error
        report("starting ranks")
        left_s = budget_s - _ENDING_S - (time.monotonic() - began)
        events = _run_ranks(started.on, left_s, {**SMALL, **models} if models else STANDARD, report)
    data = ProbeData(on, started.nodes, facts, links, events, plan.notes)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return assemble(data, now, budget_s, time.monotonic() - began)


def _run_ranks(on: str, left_s: float, models: Mapping[str, ModelConfig], report: Report) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="shoal-probe-", dir=temporary_parent(on)) as folder:
        run = RunFolder.create(Path(folder) / "probe")
        with contextlib.closing(EventLog(run.path / "supervisor.jsonl", 0)) as log, _reporting(run, report):
            shapes = {name: model.model_dump(mode="json") for name, model in models.items()}
            options = ("--budget-s", f"{max(0.0, left_s):.1f}", "--models", json.dumps(shapes))
            with open_cluster(on, RunFiles(keeps_files=False), lambda text: None) as cluster:
                run_module(RunConfig(on=on), RANKS, options, run, cluster, log)
        return list(run.read_all_events())


@contextlib.contextmanager
def _reporting(run: RunFolder, report: Report) -> Iterator[None]:
    """Pass the ranks' `doing` events to `report` in the background."""
    is_over = threading.Event()

    def follow() -> None:
        tails = RunTails(run, "rank")
        while not is_over.wait(_POLL_S):
            for _, events in tails.poll():
                for event in events:
                    if event["event"] == "doing":
                        report(event["text"])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# More connections cost threads and buffers: they must gain more than noise.
_WORTH_IT = 0.9
# Below this share of their own rate, links that are used together share something.
_SHARED_RATIO = 0.8


@dataclass(frozen=True)
class ProbeData:
    """What the meters and ranks of a probe measured."""

    on: str
    nodes: Sequence[Node]
    facts: Mapping[str, Mapping[str, Any]]  # by node, of its meter
    links: Sequence[LinkProfile]
    events: Sequence[Event]  # of all ranks
    notes: Sequence[str] = field(default_factory=tuple)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def assemble(data: ProbeData, created: str, budget_s: float, took_s: float) -> Profile:
    collectives = tuple(_collectives(data))
    trials = tuple(
        ConnectionTrial(connections=event["count"], seconds=event["seconds"]) for event in data.of_kind("connections")
    )
    nodes = tuple(_node(node, data) for node in data.nodes)
    return Profile(
        created=created,
        on=data.on,
        world_size=sum(node.slots for node in data.nodes),
        budget_s=budget_s,
        took_s=took_s,
        notes=(*data.notes, *_notes(data, nodes)),
        nodes=nodes,
        links=tuple(data.links),
        collectives=collectives,
        connections=trials,
        summary=summarize(nodes, data.links, collectives, trials),
    )


def summarize(
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    collectives: Sequence[CollectiveProfile],
    trials: Sequence[ConnectionTrial],
) -> ProfileSummary:
    wires = [link.together_gbps for link in links if link.together_gbps]
    reduce_ = next((entry for entry in collectives if (entry.op, entry.backend) == ("all-reduce", "gloo")), None)
    if not wires or reduce_ is None:
        return ProfileSummary(nodes=len(nodes))
    largest = max(reduce_.points, key=lambda point: point.bytes)
    # Where even the largest buffer mostly waits, its figure shows latency, not bandwidth.
    is_bandwidth = reduce_.beta_s_per_byte * largest.bytes >= reduce_.alpha_s
    return ProfileSummary(
        wire_gbps=min(wires),
        bus_gbps=largest.bus_gbps,
        stack_efficiency=largest.bus_gbps / min(wires) if is_bandwidth else None,
        connections=fastest(trials) if trials else None,
        nodes=len(nodes),
    )


def fastest(trials: Sequence[ConnectionTrial]) -> int:
    """Return the fewest connections that no other count beats by more than noise."""
    best = min(trial.seconds for trial in trials)
    return min(trial.connections for trial in trials if _WORTH_IT * trial.seconds <= best)


def _collectives(data: ProbeData) -> list[CollectiveProfile]:
    events = data.of_kind("collective")
    held_out = {_kind(event): event for event in data.of_kind("held-out")}
    kinds = sorted(
        {_kind(event) for event in events},
        key=lambda kind: (get_args(Backend).index(kind[2]), get_args(Op).index(kind[0]), -kind[1]),
    )
    return [
        _collective(kind, [event for event in events if _kind(event) == kind], held_out.get(kind)) for kind in kinds
    ]


def _kind(event: Event) -> tuple[Op, int, Backend]:
    return event["op"], event["element_bytes"], event["backend"]


def _collective(kind: tuple[Op, int, Backend], events: Sequence[Event], held_out: Event | None) -> CollectiveProfile:
    op, element_bytes, backend = kind
    samples = [(int(event["bytes"]), float(event["seconds"])) for event in events]
    line = fit_alpha_beta(samples)
    world_size = int(events[0]["world_size"])
    return CollectiveProfile(
        op=op,
        element_bytes=element_bytes,
        backend=backend,
        world_size=world_size,
        cores=max(events, key=lambda event: int(event["bytes"]))["cores"],
        alpha_s=line.alpha_s,
        beta_s_per_byte=line.beta_s_per_byte,
        fit_error=median_error(line, samples),
        points=tuple(
            CollectivePoint(
                bytes=event["bytes"],
                seconds=event["seconds"],
                algorithm_gbps=algorithm_gbps(event["bytes"], event["seconds"]),
                bus_gbps=bus_gbps(op, world_size, event["bytes"], event["seconds"]),
                rounds=event["rounds"],
            )
            for event in events
        ),
        held_out=held_out
        and HeldOut(
            bytes=held_out["bytes"],
            measured_s=held_out["seconds"],
            predicted_s=line.seconds(held_out["bytes"]),
        ),
    )


def _node(node: Node, data: ProbeData) -> NodeProfile:
    facts = data.facts[node.name]
    rank_facts = next((event for event in data.of_kind("facts") if event["node"] == node.name), None)
    compute = next((event for event in data.of_kind("compute") if event["node"] == node.name), None)
    if rank_facts is None or compute is None:
        raise RunFailed(
            f"the ranks on {node.name} ended without writing their figures",
            why="its disk may be full, or its clock jumped",
            fix=f"look at that machine: shoal doctor --on {data.on}",
        )
    # The load of other programs is that of the whole machine, less all ranks on it.
    same_machine = [name for name, other in data.facts.items() if other["machine"] == facts["machine"]]
    return NodeProfile(
        name=node.name,
        address=node.address,
        interface=node.interface or rank_facts["interface"],
        ranks=node.slots,
        cores=rank_facts["hardware"]["cores"],
        memory_bytes=facts["memory_bytes"],
        # All nodes of a lab run on this machine.
        has_own_memory=facts["machine"] == boot_id() and facts["memory_bytes"] < total_bytes(),
        cpu=rank_facts["hardware"]["cpu"],
        arch=facts["arch"],
        os=facts["os"],
        machine=facts["machine"],
        versions=rank_facts["versions"],
        compute=_compute(compute),
        timings=tuple(_timings(node.name, data)),
        fp16_s_per_parameter=max(
            (event["fp16_s_per_parameter"] for event in data.of_kind("fp16-conversion") if event["node"] == node.name),
            default=None,
        ),
        gpus=tuple(
            GpuProfile(**{name: event[name] for name in GpuProfile.model_fields})
            for event in data.of_kind("gpu")
            if event["node"] == node.name
        ),
        other_programs_cores=busy_cores_of_others(
            [event for event in data.of_kind("load") if event["node"] in same_machine]
        ),
    )


def _timings(node: str, data: ProbeData) -> Iterator[ModelTiming]:
    """Take the times of the node's slowest rank: the others wait for it."""
    events = [event for event in data.of_kind("model-time") if event["node"] == node]

    def key_of(event: Event) -> tuple[Any, ...]:
        return event["device"], event["precision"], event["name"], event["micro_batch"]

    for key in dict.fromkeys(map(key_of, events)):
        ranks = [event for event in events if key_of(event) == key]
        slowest = max(ranks, key=lambda event: float(event["forward_s"] + event["backward_s"]))
        yield ModelTiming(**{name: slowest[name] for name in ModelTiming.model_fields})


def _compute(event: Event) -> ComputeProfile:
    training = tuple(TrainingPoint(**point) for point in event["training"])
    best = max(training, key=lambda point: point.tokens_per_s)
    roof = Roofline(event["fp32_gflops"], event["memory_gbytes_per_s"])
    if not roof.is_plausible(best.gflops):
        raise RunFailed(
            f"the figures of {event['node']} cannot be right: its training reached {format_number(best.gflops)} "
            f"GFLOP/s, products of large matrices alone {format_number(roof.peak_gflops)}",
            why="other programs had its processors while the products were measured, three times",
            fix="end them, or wait until they have ended (top), and probe again: no profile was written",
        )
    return ComputeProfile(
        threads=event["threads"],
        fp32_gflops=event["fp32_gflops"],
        bf16_gflops=event["bf16_gflops"],
        memory_gbytes_per_s=event["memory_gbytes_per_s"],
        parameters=event["parameters"],
        tokens_per_step=event["tokens_per_step"],
        intensity=event["intensity"],
        training=training,
        bound=roof.bound(event["intensity"], best.gflops),
    )


def _notes(data: ProbeData, nodes: Sequence[NodeProfile]) -> list[str]:
    notes = []
    if cuts := data.of_kind("size-skipped"):
        left_out = ", ".join(map(_describe_cut, cuts))
        notes.append(f"left out for lack of time, a larger --budget has room for them: {left_out}")
    if len({node.machine for node in nodes}) < len(nodes):
        notes.append("nodes share a machine: each computed alone, one after another; together they will be slower")
    ratios = [link.together_ratio for link in data.links if link.together_ratio]
    if ratios and min(ratios) < _SHARED_RATIO:
        notes.append(
            f"links slow each other down: together they reach {format_percent(min(ratios))} of alone. "
            "They share something: a switch's uplink, a daisy chain, the air, or the cores of one machine"
        )
    notes += [
        f"a GPU of {event['node']} was left out: it has {format_si(event['free_bytes'], 'B')} of free memory"
        for event in data.of_kind("gpu-skipped")
    ]
    if any(node.gpus for node in nodes) and not any(event["backend"] == "nccl" for event in data.of_kind("collective")):
        notes.append(
            "NCCL was not measured: it needs two ranks or more, each with a GPU of its own. Ranks that share a GPU, or "
            "have none, exchange by gloo through pinned memory"
        )
    if warning := warn_of_other_programs({f"on {node.name}": node.other_programs_cores for node in nodes}):
        notes.append(warning)
    return notes


def _describe_cut(event: Event) -> str:
    takes = f" ({format_duration(event['once_s'])} a time)" if event["once_s"] else ""
    return f"{operation_label(*_kind(event))} from {format_buffer_size(event['bytes'])} on{takes}"


# Links: round trips, and TCP rates alone and together, through the meters on the nodes

STREAMS = (1, 4)
# The ring lasts longer than a single flow: links that start late must overlap the others.
RING_TIMES = 2
_LONGEST_FLOW_S = 2.0
_SHORTEST_FLOW_S = 0.3
# For starting and ending one flow.
_OVERHEAD_S = 0.15


@dataclass(frozen=True)
class FlowPlan:
    seconds: float  # of one flow
    pairs: tuple[Pair, ...]
    ring: tuple[Pair, ...]  # the links that a ring of all nodes uses at the same time
    notes: tuple[str, ...] = ()  # for the readers of the figures

    @property
    def directions(self) -> list[Pair]:
        both = (way for one, other in self.pairs for way in ((one, other), (other, one)))
        return list(dict.fromkeys(both))

    @property
    def flows(self) -> int:
        """Count the flows in sequence: each direction with one stream and with four, then the ring, which is longer."""
        return len(self.directions) * len(STREAMS) + (RING_TIMES if self.ring else 0)


def plan_flows(nodes: Sequence[Node], budget_s: float) -> FlowPlan:
    """Measure all pairs; where the time is too short for that, only those of the ring."""
    ring = ring_of(nodes)
    names = [node.name for node in nodes]
    every = tuple(itertools.combinations(names, 2)) if len(nodes) > 1 else tuple(dict.fromkeys(ring))

    def flow_s(pairs: tuple[Pair, ...]) -> float:
        return budget_s / max(1, FlowPlan(0, pairs, ring).flows) - _OVERHEAD_S

    pairs = every
    notes: tuple[str, ...] = ()
    if flow_s(every) < _SHORTEST_FLOW_S:
        # A ring of two uses the same pair in both directions.
        pairs = tuple(pair for pair in every if pair in ring or pair[::-1] in ring)
    if pairs != every:
        notes = (
            f"{len(every)} pairs are too many for the time: only the {len(pairs)} links of the ring were measured",
        )
    return FlowPlan(max(_SHORTEST_FLOW_S, min(_LONGEST_FLOW_S, flow_s(pairs))), pairs, ring, notes)


def ring_of(nodes: Sequence[Node]) -> tuple[Pair, ...]:
    """Connect each node to the next; on one machine every rank to the next, all over its loopback."""
    if len(nodes) == 1:
        name, slots = nodes[0].name, nodes[0].slots
        return ((name, name),) * slots if slots > 1 else ()
    names = [node.name for node in nodes]
    return tuple(zip(names, [*names[1:], names[0]], strict=True))


_METER_S = 10.0
_FLOW_SLACK_S = 20.0
_ROUND_TRIPS = 300
_ROUND_TRIPS_S = 0.4


class LinkMeters:
    """The meters of all nodes, each listening at its own port for the others."""

    def __init__(self, started: NodePrograms) -> None:
        self._programs = started.programs
        self._addresses = {node.name: node.address for node in started.nodes}
        self._token = secrets.token_hex(16)
        self._sessions = itertools.count()
        self._ports = {
            name: int(program.ask(_METER_S, do="listen", address=self._addresses[name], token=self._token)["port"])
            for name, program in self._programs.items()
        }

    def round_trip_s(self, source: str, target: str) -> float:
        request = {"count": _ROUND_TRIPS, "seconds": _ROUND_TRIPS_S, **self._place(target)}
        return float(self._programs[source].ask(_METER_S, do="round_trip", **request)["median_s"])

    def flows_gbps(self, pairs: Sequence[Pair], streams: int, seconds: float) -> list[float]:
        """Run all flows at the same time; return the rate of each pair, counted by its receiver."""
        requests = [
            {"session": str(next(self._sessions)), "streams": streams, "seconds": seconds, **self._place(target)}
            for _, target in pairs
        ]
        for (_, target), request in zip(pairs, requests, strict=True):
            self._programs[target].ask(_METER_S, do="expect", **request)
        sources, targets = zip(*pairs, strict=True)
        self._ask_all(sources, requests, "send")
        self._ask_all(sources, requests, "sent")
        return [1e-9 * float(answer["bps"]) for answer in self._ask_all(targets, requests, "received")]

    def _ask_all(self, names: Sequence[str], requests: list[dict[str, Any]], step: str) -> list[dict[str, Any]]:
        """Send all requests, then wait for the answers in turn."""
        for name, request in zip(names, requests, strict=True):
            self._programs[name].send(do=step, **request)
        return [self._programs[name].receive_answer(requests[0]["seconds"] + _FLOW_SLACK_S, step) for name in names]

    def _place(self, target: str) -> dict[str, Any]:
        return {"address": self._addresses[target], "port": self._ports[target], "token": self._token}


def measure_links(started: NodePrograms, plan: FlowPlan, report: Report) -> list[LinkProfile]:
    if not plan.pairs:
        return []
    meters = LinkMeters(started)
    round_trips_s: dict[Pair, float] = {}
    for source, target in plan.pairs:
        report(f"round trip {source} ↔ {target}")
        trip_s = meters.round_trip_s(source, target)
        round_trips_s |= {(source, target): trip_s, (target, source): trip_s}
    alone: dict[Pair, list[float]] = {}
    for number, pair in enumerate(plan.directions, 1):
        report(f"raw bandwidth {pair[0]} → {pair[1]} ({number} of {len(plan.directions)})")
        alone[pair] = [meters.flows_gbps([pair], streams, plan.seconds)[0] for streams in STREAMS]
    report(f"all {len(plan.ring)} links of the ring at once")
    together = dict(zip(plan.ring, meters.flows_gbps(plan.ring, STREAMS[-1], RING_TIMES * plan.seconds), strict=True))
    return [
        LinkProfile(
            source=source,
            target=target,
            tool="shoal",
            latency_s=round_trips_s[source, target],
            gbps=one_stream,
            gbps_4_streams=four_streams,
            together_gbps=together.get((source, target)),
        )
        for (source, target), (one_stream, four_streams) in alone.items()
    ]
