"""Hand-written run folders as a training leaves them, for the tests of the readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shoal.config.load import build_config, to_toml, validate_session
from shoal.events import Event
from shoal.records.scaling import ScalingPoint
from shoal.run_folder import RunFolder

GRAD_BYTES = 5_400_000
TOKENS = 1536


def start(rank: int = 0, world_size: int = 2, **more: Any) -> Event:
    facts = {
        "world_size": world_size, "node": "here", "generation": 0, "pid": 100 + rank, "device": "cpu",
        "backend": "gloo", "launcher": "shoal", "threads": 1, "params": 1_350_000, "grad_bytes": GRAD_BYTES,
        "global_batch": 24, "micro_batch": 12, "share": 12, "micro_batches": 1, "tokens_per_step": TOKENS,
        "lr": 3e-3, "seed": 35_000,
        "versions": {"python": "3.12.3", "torch": "2.13.0", "shoal": "0.1.0", "numpy": "2.4.6"},
        "hardware": {"cpu": "Some CPU", "cores": 2, "memory_bytes": 8 * 2**30, "arch": "x86_64", "os": "Linux"},
        "interface": "lo", "link_mbps": None, "resumed_from": 0,
    }  # fmt: skip
    return {"event": "start", "rank": rank, "time": 1_790_000_000.0 + rank, **facts, **more}


def step(number: int, rank: int = 0, **more: Any) -> Event:
    """Return a step of about 100 ms with 20 ms all-reduce, of which 12 ms are exposed and 6 ms hidden."""
    wobble = 0.003 * math.sin(number * 1.7 + rank)
    times = {
        "data_s": 0.001, "forward_s": 0.025 + wobble, "backward_s": 0.048 - wobble / 2, "exposed_s": 0.012,
        "wait_s": 0.002 + 0.004 * rank, "optimizer_s": 0.008, "other_s": 0.001, "allreduce_s": 0.020 + abs(wobble),
        "hidden_s": 0.006,
    }  # fmt: skip
    total = sum(times.values()) - times["allreduce_s"] - times["hidden_s"]
    loss = 0.9 + 3.2 * math.exp(-number / 25) + 0.02 * math.sin(number * 2.1)
    fields = {"loss": loss, "tokens": TOKENS, "lr": 3e-3, "grad_norm": 0.8, "step_s": total, **times}
    wire = {"wire_bytes": 2 * GRAD_BYTES + 40_000} if rank == 0 else {}
    return {"event": "step", "rank": rank, "time": 1_790_000_001.0 + number, "step": number, **fields, **wire, **more}


def end(rank: int = 0, number: int = 100, status: str = "finished") -> Event:
    return {"event": "end", "rank": rank, "time": 1_790_000_200.0, "step": number, "status": status}


def rank_events(rank: int, world_size: int = 2, steps: int = 100) -> list[Event]:
    shard = {
        "event": "shard",
        "rank": rank,
        "time": 1_790_000_000.5,
        "size": 18_000,
        "total": 36_000,
        "sharding": "cursor",
    }
    shard["first"] = ["She has not been singing.", "Do they go?"][rank % 2]
    evals = [
        {
            "event": "eval",
            "rank": rank,
            "time": 1_790_000_001.0 + at,
            "step": at,
            "val_loss": 1 + 3 * math.exp(-at / 25),
        }
        for at in range(50, steps + 1, 50)
    ]
    numbered = [step(number, rank) for number in range(1, steps + 1)]
    return [start(rank, world_size), shard, *numbered, *evals, end(rank, steps)]


def all_events(world_size: int = 2, steps: int = 100) -> list[Event]:
    return [event for rank in range(world_size) for event in rank_events(rank, world_size, steps)]


def make_run(folder: Path, events: list[Event] | None = None, *sets: str) -> RunFolder:
    """Create a run folder with these events (by default a finished run of two ranks)."""
    run = RunFolder.create(folder)
    run.config.write_text(to_toml(build_config(sets=sets)), encoding="utf-8")
    for event in all_events() if events is None else events:
        with run.events(event["rank"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
    return run


def session_events(world_size: int = 2, steps: int = 20, status: str = "finished") -> list[Event]:
    """Return the events of a user's training: samples and no tokens, values of its own, no shard and no evaluation."""
    events: list[Event] = []
    for rank in range(world_size):
        began = start(rank, world_size, launcher="torchrun", global_batch=48, micro_batch=24, steps=steps)
        events.append({name: value for name, value in began.items() if name not in ("tokens_per_step", "lr")})
        for number in range(1, steps + 1):
            done = step(number, rank, samples=48)
            events.append({name: value for name, value in done.items() if name not in ("tokens", "lr")})
            if number % 10 == 0:
                log = {"event": "log", "rank": rank, "time": done["time"], "step": number}
                # Each rank may record values of its own: the lowest rank's count.
                events.append({**log, "accuracy": number / 100 + rank, "spread": 0.5})
        events.append(end(rank, steps, status))
    return events


def make_session_run(folder: Path, events: list[Event] | None = None, steps: int = 20) -> RunFolder:
    """Create the run folder of a user's script `images`, as a session under torchrun leaves it."""
    run = RunFolder.create(folder, is_training=False)
    settings = {"train": {"steps": steps, "global_batch": 48}, "run": {"preset": "images", "launcher": "torchrun"}}
    run.config.write_text(to_toml(validate_session(settings)), encoding="utf-8")
    for event in session_events(steps=steps) if events is None else events:
        with run.events(event["rank"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
    return run


def point(ranks: int, step_ms: float, threads: int = 1, tokens: int = TOKENS, **phases_ms: float) -> ScalingPoint:
    """Return a point of a scaling curve, in milliseconds; `allreduce` and `hidden` are taken from the phases."""
    allreduce, hidden = phases_ms.pop("allreduce", None), phases_ms.pop("hidden", None)
    return ScalingPoint(
        ranks=ranks,
        threads=threads,
        cores=2,
        tokens_per_s=tokens / step_ms * 1e3,
        tokens_per_step=tokens,
        step_s=step_ms / 1e3,
        phases={phase: value / 1e3 for phase, value in phases_ms.items()},
        allreduce_s=None if allreduce is None else allreduce / 1e3,
        hidden_s=None if hidden is None else hidden / 1e3,
    )


def demo_points() -> list[ScalingPoint]:
    one = point(1, 150, 2, data=1, forward=50, backward=88, exposed=0, wait=0, optimizer=9, other=2, allreduce=0)
    two = point(2, 98, 1, data=1, forward=25, backward=46, exposed=12, wait=4, optimizer=9, other=1, allreduce=20)
    four = point(4, 92, 1, data=1, forward=20, backward=34, exposed=19, wait=8, optimizer=9, other=1, allreduce=30)
    return [one, two, four]
