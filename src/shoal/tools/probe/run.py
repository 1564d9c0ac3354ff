"""Measuring a cluster: its links by gauges without torch, then gloo and each machine by ranks like a training's."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from shoal.cluster.cluster import NodePrograms, open_cluster, visit
from shoal.cluster.node import Node, RunFiles
from shoal.config.profile import (
    SMALL_GPT,
    WIDE_GPT,
    CollectivePoint,
    CollectiveProfile,
    ComputeProfile,
    ConnectionTrial,
    HeldOut,
    LinkProfile,
    ModelPace,
    NodeProfile,
    Op,
    Profile,
    ProfileSummary,
    TrainingPoint,
    operation_label,
)
from shoal.config.schema import ModelConfig, RunConfig
from shoal.cost.machines import Roofline
from shoal.cost.network import algorithm_gbps, bus_gbps, fit, median_error, size_text
from shoal.errors import ControlError, RunFailed
from shoal.events import Event, EventLog, EventTail
from shoal.launch.launcher import run_module
from shoal.run_folder import RunFolder
from shoal.tools.probe.links import GAUGE, Say, measure_links, plan_flows
from shoal.tools.report.summary import cores_of_others
from shoal.units import format_duration, warn_of_other_programs

# SECTION trials/measured
# From what the gauges and ranks of a probe wrote down to the profile of a cluster. Pure.


# More connections cost threads and buffers: they must gain more than noise.
_WORTH_IT = 0.9
_SHARED_RATIO = 0.8


@dataclass(frozen=True)
class ProbeData:
    """`facts` by node are the gauge's, `events` all ranks' own."""

    on: str
    nodes: Sequence[Node]
    facts: Mapping[str, Mapping[str, Any]]
    links: Sequence[LinkProfile]
    events: Sequence[Event]
    notes: Sequence[str] = field(default_factory=tuple)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def assemble(found: ProbeData, created: str, budget_s: float, took_s: float) -> Profile:
    collectives = tuple(_collectives(found))
    trials = tuple(
        ConnectionTrial(connections=event["count"], seconds=event["seconds"]) for event in found.of_kind("connections")
    )
    nodes = tuple(_node(node, found) for node in found.nodes)
    return Profile(
        created=created,
        on=found.on,
        world_size=sum(node.slots for node in found.nodes),
        budget_s=budget_s,
        took_s=took_s,
        notes=(*found.notes, *_notes(found, nodes)),
        nodes=nodes,
        links=tuple(found.links),
        collectives=collectives,
        connections=trials,
        summary=summarize(nodes, found.links, collectives, trials),
    )


def summarize(
    nodes: Sequence[NodeProfile],
    links: Sequence[LinkProfile],
    collectives: Sequence[CollectiveProfile],
    trials: Sequence[ConnectionTrial],
) -> ProfileSummary:
    wires = [link.together_gbps for link in links if link.together_gbps]
    reduce_ = next((entry for entry in collectives if entry.op == "all-reduce"), None)
    if not wires or reduce_ is None:
        return ProfileSummary(nodes=len(nodes))
    largest = max(reduce_.points, key=lambda point: point.bytes)
    # Where even the largest buffer mostly waits, its figure tells of latency.
    is_bandwidth = reduce_.beta_s_per_byte * largest.bytes >= reduce_.alpha_s
    return ProfileSummary(
        wire_gbps=min(wires),
        bus_gbps=largest.bus_gbps,
        stack_efficiency=largest.bus_gbps / min(wires) if is_bandwidth else None,
        connections=fastest(trials) if trials else None,
        nodes=len(nodes),
    )


def fastest(trials: Sequence[ConnectionTrial]) -> int:
    """The fewest connections that nothing beats by more than noise."""
    best = min(trial.seconds for trial in trials)
    return min(trial.connections for trial in trials if _WORTH_IT * trial.seconds <= best)


def _collectives(found: ProbeData) -> list[CollectiveProfile]:
    events = found.of_kind("collective")
    held_out = {_kind(event): event for event in found.of_kind("held-out")}
    kinds = sorted({_kind(event) for event in events}, key=lambda kind: (get_args(Op).index(kind[0]), -kind[1]))
    return [_collective(kind, [each for each in events if _kind(each) == kind], held_out.get(kind)) for kind in kinds]


def _kind(event: Event) -> tuple[Op, int]:
    return event["op"], event["element_bytes"]


def _collective(kind: tuple[Op, int], events: Sequence[Event], held_out: Event | None) -> CollectiveProfile:
    op, element_bytes = kind
    samples = [(int(event["bytes"]), float(event["seconds"])) for event in events]
    line = fit(samples)
    world_size = int(events[0]["world_size"])
    return CollectiveProfile(
        op=op,
        element_bytes=element_bytes,
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


def _node(node: Node, found: ProbeData) -> NodeProfile:
    facts = found.facts[node.name]
    said = next((event for event in found.of_kind("facts") if event["node"] == node.name), None)
    compute = next((event for event in found.of_kind("compute") if event["node"] == node.name), None)
    if said is None or compute is None:
        raise RunFailed(
            f"the ranks on {node.name} ended without their figures",
            why="its disk may be full, or its clock jumped",
            fix=f"look at that machine: shoal doctor --on {found.on}",
        )
    versions = {**said["versions"], **({"iperf3": facts["iperf3"]} if facts.get("iperf3") else {})}
    return NodeProfile(
        name=node.name,
        address=node.address,
        interface=node.interface or said["interface"],
        ranks=node.slots,
        cores=said["hardware"]["cores"],
        memory_bytes=facts["memory_bytes"],
        cpu=said["hardware"]["cpu"],
        arch=facts["arch"],
        os=facts["os"],
        machine=facts["machine"],
        versions=versions,
        compute=_compute(compute),
        paces=tuple(_paces(node.name, found)),
        fp16_s_per_parameter=max(
            (event["fp16_s_per_parameter"] for event in found.of_kind("halving") if event["node"] == node.name),
            default=None,
        ),
        other_programs_cores=_cores_of_others(node, found),
    )


def _cores_of_others(node: Node, found: ProbeData) -> float | None:
    """Of the node's machine: what its kernel counted, less all ranks on it."""
    machine = found.facts[node.name]["machine"]
    here = [name for name, facts in found.facts.items() if facts["machine"] == machine]
    return cores_of_others([event for event in found.of_kind("load") if event["node"] in here])


def _paces(node: str, found: ProbeData) -> Iterator[ModelPace]:
    """Of the node's ranks, its slowest: the others wait for it."""
    said = [event for event in found.of_kind("pace") if event["node"] == node]
    for key in dict.fromkeys((event["name"], event["micro_batch"]) for event in said):
        ranks = [event for event in said if (event["name"], event["micro_batch"]) == key]
        slowest = max(ranks, key=lambda event: float(event["forward_s"] + event["backward_s"]))
        yield ModelPace(**{name: slowest[name] for name in ModelPace.model_fields})


def _compute(event: Event) -> ComputeProfile:
    training = tuple(TrainingPoint(**point) for point in event["training"])
    best = max(training, key=lambda point: point.tokens_per_s)
    roof = Roofline(event["fp32_gflops"], event["memory_gbytes_per_s"])
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


def _notes(found: ProbeData, nodes: Sequence[NodeProfile]) -> list[str]:
    notes = []
    if cuts := found.of_kind("cut"):
        left_out = ", ".join(map(_say_cut, cuts))
        notes.append(f"left out for lack of time, a larger --budget has room for them: {left_out}")
    if len({node.machine for node in nodes}) < len(nodes):
        notes.append("nodes share a machine: each was computing alone, one after another; together they will be slower")
    ratios = [link.together_ratio for link in found.links if link.together_ratio]
    if ratios and min(ratios) < _SHARED_RATIO:
        notes.append(
            f"links get in each other's way: together they reach {min(ratios):.0%} of alone. They share something: "
            "a switch's uplink, a daisy chain, the air, or the cores of one machine"
        )
    if warning := warn_of_other_programs({f"on {node.name}": node.other_programs_cores for node in nodes}):
        notes.append(warning)
    return notes


def _say_cut(event: Event) -> str:
    takes = f" ({format_duration(event['once_s'])} a time)" if event["once_s"] else ""
    return f"{operation_label(event['op'], event['element_bytes'])} from {size_text(event['bytes'])} on{takes}"


RANKS = "shoal.tools.probe.worker"
SMALL = {"small": SMALL_GPT}
STANDARD = {**SMALL, "wide": WIDE_GPT}
_LINKS_PART = 0.35
# From a rank's last figure until its agent has gone.
_ENDING_S = 2.0
_ANSWER_S = 20.0
_LOOK_EVERY_S = 0.2


def probe(on: str, budget_s: float, say: Say, models: Mapping[str, ModelConfig] | None = None) -> Profile:
    """`say` gets what is being done, to be shown to somebody who waits. `models` by name are those whose pace is
    wanted; without any, two from which that of others can be estimated."""
    began = time.monotonic()
    with visit(on, GAUGE) as found:
        _need_everybody(found)
        say("asking every machine what it is")
        facts = {name: talk.ask(_ANSWER_S, do="facts") for name, talk in found.talks.items()}
        plan = plan_flows(found.nodes, {name: said["iperf3"] for name, said in facts.items()}, _LINKS_PART * budget_s)
        try:
            links = measure_links(found, plan, say)
        except ControlError as error:
            raise ControlError(
                error.seen,
                why=error.why or "the machines do not reach each other, or one of them is gone",
                fix=f"find out why: shoal doctor --on {on}",
            ) from error
        say("starting ranks")
        left_s = budget_s - _ENDING_S - (time.monotonic() - began)
        events = _run_ranks(found.on, left_s, {**SMALL, **models} if models else STANDARD, say)
    measured = ProbeData(on, found.nodes, facts, links, events, plan.notes)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return assemble(measured, now, budget_s, time.monotonic() - began)


def _need_everybody(found: NodePrograms) -> None:
    for error in found.unreached.values():
        raise error


def _run_ranks(on: str, left_s: float, models: Mapping[str, ModelConfig], say: Say) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="shoal-probe-") as folder:
        run = RunFolder.create(Path(folder) / "probe")
        with contextlib.closing(EventLog(run.path / "supervisor.jsonl", 0)) as log, _following(run, say):
            shapes = {name: model.model_dump(mode="json") for name, model in models.items()}
            words = ("--budget-s", f"{max(0.0, left_s):.1f}", "--models", json.dumps(shapes))
            with open_cluster(on, RunFiles(stays=False), lambda text: None) as cluster:
                run_module(RunConfig(on=on), RANKS, words, run, cluster, log)
        return list(run.read_all_events())


@contextlib.contextmanager
def _following(run: RunFolder, say: Say) -> Iterator[None]:
    """Passes on what the ranks say they do, while somebody else waits for their end."""
    over = threading.Event()

    def follow() -> None:
        tails: dict[Path, EventTail] = {}
        while not over.wait(_LOOK_EVERY_S):
            for path in run.event_files().values():
                for event in tails.setdefault(path, EventTail(path)).poll():
                    if event["event"] == "doing":
                        say(event["text"])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
