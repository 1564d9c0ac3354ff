"""The figures of a run as Prometheus reads them: the text exposition format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from shoal.tools.watch.figures import summarize
from shoal.tools.watch.run_state import LiveState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "running", "regrouping", "finished", "interrupted", "failed", "unfinished", "lost")
# Kinds of marks on the time line that are counted.
_KINDS = ("verdict", "warning", "fault", "checkpoint")
_PARTS = {"compute": "compute_s", "communication": "exposed_s", "wait": "wait_s"}

Labels = Mapping[str, object]
Sample = tuple[Labels, float | None]


class Metric(NamedTuple):
    name: str
    kind: str  # gauge or counter
    text: str
    samples: Iterable[Sample]  # those without a value are left out


def format_metrics(state: LiveState) -> str:
    """Return the newest figures of a run. Metrics without any value are left out."""
    lines: list[str] = []
    for metric in _metrics(state, summarize(state)):
        values = [(labels, value) for labels, value in metric.samples if value is not None]
        if values:
            text = metric.text.replace("\\", r"\\").replace("\n", r"\n")
            lines += [f"# HELP {metric.name} {text}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{metric.name}{_format_labels(labels)} {_format_value(value)}" for labels, value in values]
    return "\n".join([*lines, ""])


def _metrics(state: LiveState, summary: dict[str, Any]) -> Iterator[Metric]:
    ranks: list[dict[str, Any]] = summary["ranks"]
    present = [rank for rank in ranks if rank["is_present"]]
    info = {name: summary[name] or "" for name in ("name", "what", "on", "sync", "wire", "device")}

    def gauge(name: str, text: str, value: float | None) -> Metric:
        return Metric(f"shoal_{name}", "gauge", text, [({}, value)])

    def by_rank(name: str, text: str, value: str) -> Metric:
        samples = [(_labels(rank), rank[value]) for rank in present]
        return Metric(f"shoal_rank_{name}", "gauge", text, samples)

    yield Metric("shoal_run_info", "gauge", "What is trained, where and how; always 1.", [(info, 1)])
    states = [({"state": name}, int(name == summary["status"])) for name in STATES]
    yield Metric("shoal_run_state", "gauge", "1 for the state that the run is in, 0 for the others.", states)
    yield gauge("step", "The last step that is done.", summary["step"])
    yield gauge("steps", "The steps that the run is to do.", summary["steps"])
    yield gauge("loss", "The training loss of the last step.", summary["loss"])
    yield gauge("val_loss", "The loss of the last evaluation.", summary["val_loss"])
    unit = str(summary["unit"])
    yield gauge(
        f"{unit}_per_second", f"How many {unit} all ranks train per second, over the last 20 steps.", summary["speed"]
    )
    yield gauge("step_seconds", "The duration of a step, over the last 20 steps.", summary["step_s"] or None)
    yield by_rank("step", "The last step that the rank has done.", "step")
    yield by_rank("step_seconds", "The duration of the rank's steps, over the last 20.", "step_s")
    parts = [({**_labels(rank), "part": part}, rank[name]) for rank in present for part, name in _PARTS.items()]
    text = "The parts of the rank's steps, over the last 20; they add up to shoal_rank_step_seconds."
    yield Metric("shoal_rank_step_part_seconds", "gauge", text, parts)
    text = "How much longer the rank computes than the median rank, where that is 1.15 times or more."
    yield by_rank("slow_ratio", text, "slow")
    yield gauge("members", "The ranks that take part.", len(present))
    nodes = [node for node in summary["nodes"] if node["is_present"]]
    yield gauge("nodes", "The machines that take part.", len(nodes))
    for part, text in (("cpu", "processors that is busy"), ("memory", "memory that is in use")):
        used = [({"node": node["name"]}, node["sample"].get(part)) for node in nodes]
        yield Metric(f"shoal_node_{part}_used", "gauge", f"The part of the machine's {text}.", used)
    generation = state.members.generation
    yield gauge(
        "generation", "The number of the generation: it grows with every change of the members.", generation.number
    )
    text = "Changes of the members while the run went on: a machine was lost, left or joined."
    yield Metric("shoal_recoveries_total", "counter", text, [({}, len(state.members.changes))])
    kinds = [({"kind": kind}, state.time_line.counts[kind]) for kind in _KINDS]
    text = "What happened: verdicts (a sync method was chosen), warnings, faults, checkpoints."
    yield Metric("shoal_events_total", "counter", text, kinds)
    values = [({"name": name}, value) for name, value in summary["values"].items()]
    yield Metric("shoal_value", "gauge", "The last value that the program has recorded under this name.", values)
    yield gauge(
        "last_event_timestamp_seconds",
        "When the newest event was written, by its machine's clock.",
        summary["last_time"],
    )
    text = "Lines of the run folder that could not be read."
    yield Metric("shoal_unreadable_lines_total", "counter", text, [({}, summary["unreadable"])])


def _labels(rank: dict[str, Any]) -> Labels:
    return {"rank": rank["rank"], "node": rank["node"]}


def _format_labels(labels: Labels) -> str:
    pairs = [f'{name}="{_escape(str(value))}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _format_value(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
