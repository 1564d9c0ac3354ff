"""Lose a node of a plain DDP loop by death and by silence, and of the same loop with shoal.Session by death."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.errors import RunFailed
from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

HERE = Path(__file__).parent
TIMEOUT_S = 8.0
STEPS_BEFORE = 10
# Importing torch twice takes long on a busy machine.
START_S = 150.0
PORTS = {"kill": 29510, "freeze": 29511}


def run(experiment: Experiment) -> Result:
    name = f"learn-11-{os.getpid()}"
    steps = int(experiment.steps(120, quick=60))
    for script in ("plain_ddp.py", "session_loop.py"):
        (experiment.folder / script).write_text((HERE / script).read_text())
    experiment.at_end("lab", "down", "--name", name)
    experiment.shoal("lab", "up", "2", "--name", name)
    kill = lose_node_of_ddp(experiment, name, "kill")
    experiment.shoal("lab", "start", "node2", "--name", name)
    freeze = lose_node_of_ddp(experiment, name, "freeze")
    experiment.shoal("lab", "thaw", "node2", "--name", name)
    times = lose_node_of_session(experiment, name, steps)
    verified = experiment.shoal("verify", "session", "--json", codes=(0, 1)).json()
    lost = len(set(range(1, steps + 1)) - times.keys())
    pause_s, following = longest_pause(times)
    return Result(
        theory={"kill": "at once", "freeze": "timeout", "session": "continues"},
        measured={
            "kill": kind_of_end(kill),
            "freeze": kind_of_end(freeze),
            "session": "continues" if steps in times else "hangs",
        },
        checks=[
            Check("plain DDP made no step after node2 was killed", kill["after"] == 0, kill["error"]),
            Check("plain DDP made no step after node2 froze", freeze["after"] == 0, freeze["error"]),
            Check("the session lost no step", lost == 0, f"{len(times)} of {steps} steps"),
            Check(
                "it continued in a second generation of ranks",
                verified["ledger"]["generations"] == 2,
                f"{verified['ledger']['generations']}",
            ),
            Check("the ledger is complete, and verify is content", bool(verified["ok"] and verified["ledger"]["ok"])),
        ],
        figures={
            "kill_s": kill["error_after_s"] or 0.0,
            "freeze_s": freeze["error_after_s"] or 0.0,
            "pause_s": pause_s,
            "last": following - 1,
            "next": following,
            "lost": lost,
        },
        picture=Bars(
            "How long node1 waited for node2",
            "seconds",
            ["DDP, killed", "DDP, frozen", "Session, killed"],
            {"until an error, or the next step": [kill["error_after_s"] or 0, freeze["error_after_s"] or 0, pause_s]},
        ),
    )


def lose_node_of_ddp(experiment: Experiment, lab: str, fault: str) -> dict[str, Any]:
    """Start the plain loop on both nodes, then lose node2; return what node1 saw."""
    out = experiment.folder / f"{fault}.json"
    made = out.with_suffix(".steps")
    for rank, node in enumerate(("node1", "node2")):
        variables = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT={PORTS[fault]}"
        line = f"{variables} {sys.executable} plain_ddp.py {out.name} {TIMEOUT_S:g} >{fault}-{rank}.log 2>&1 &"
        experiment.shoal("lab", "exec", node, "--name", lab, "--", "sh", "-c", line)
    experiment.wait_until(f"{STEPS_BEFORE} steps of plain DDP", lambda: count(made) >= STEPS_BEFORE, START_S)
    experiment.shoal("lab", fault, "node2", "--name", lab)
    # A step may have ended while the command ran.
    before = count(made)
    with contextlib.suppress(RunFailed):
        experiment.wait_until("an error", out.is_file, 4 * TIMEOUT_S)
    seen: dict[str, Any] = {"error_after_s": None, "error": "no error"}
    if out.is_file():
        seen = json.loads(out.read_text())
    return {**seen, "after": count(made) - before}


def lose_node_of_session(experiment: Experiment, lab: str, steps: int) -> dict[int, float]:
    """Start the session on both nodes, then kill node2; return when node1 had made each step."""
    words = ("run", "--on", f"lab:{lab}", "--detach", "--out", "session", "session_loop.py", str(steps))
    experiment.shoal(*words)
    events = experiment.folder / "session" / "events" / "rank-0.jsonl"

    def read_steps() -> dict[int, float]:
        lines = events.read_text().splitlines() if events.is_file() else []
        made = [json.loads(line) for line in lines if line.endswith("}")]
        return {event["step"]: event["time"] for event in made if event["event"] == "step"}

    experiment.wait_until(f"{STEPS_BEFORE} steps of the session", lambda: len(read_steps()) >= STEPS_BEFORE, START_S)
    experiment.shoal("lab", "kill", "node2", "--name", lab)
    experiment.shoal("attach", "session")
    return read_steps()


def kind_of_end(seen: dict[str, Any]) -> str:
    """Return what node1 saw of plain DDP, as one of the answers."""
    seconds = seen["error_after_s"]
    if seconds is None:
        return "continues" if seen["after"] > 1 else "hangs"
    return "at once" if seconds < TIMEOUT_S / 2 else "timeout"


def longest_pause(times: dict[int, float]) -> tuple[float, int]:
    """Return the longest time between two steps, and the number of the second one."""
    order = sorted(times)
    return max((times[after] - times[before], after) for before, after in pairwise(order))


def count(file: Path) -> int:
    return int(file.read_text() or 0) if file.is_file() else 0
