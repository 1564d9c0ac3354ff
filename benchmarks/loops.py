"""The same training as a loop of shoal, Accelerate and torchft: how much code it is, and what it survives.

    .venv/bin/python benchmarks/loops.py
    sudo .venv/bin/python benchmarks/loops.py --faults --json loops.json

Code lines are those that are not blank, comment or docstring; changed lines are counted against the loop in one process
(`rivals/images_plain.py`). With `--faults`, `shoal run` starts each loop on three emulated nodes; Accelerate's has its
own checkpoints and `--restarts 3`. A fault is timed until a rank prints a step that none had printed before. torchft's
loop is only counted: see `recovery.py` for its times.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from _common import options
from rivals.images_task import SPOILED
from shoal.control.processes import find_processes, find_supervisor
from shoal.run_folder import RunFolder
from shoal.runs.manage import end_processes
from shoal_lab.lab import Lab

LOOPS = Path(__file__).parent / "rivals"
RIVALS = ("session", "accelerate", "torchft")
_NODES = "lab:3,link=1gbit"
_STRIKE_AT = 30
_START_S, _DEADLINE_S = 240.0, 120.0
# An epoch has 41 steps: so many with NaN mean that the weights have it.
_MANY = 60
_STEP = re.compile(r"^step (\d+): loss (\S+)$", re.MULTILINE)


def code_lines(source: str) -> list[str]:
    """Return the lines that have code: neither blank, nor comment, nor docstring."""
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    texts: set[int] = set()
    for scope in scopes:
        if ast.get_docstring(scope) is not None:
            first = scope.body[0]
            texts |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    numbered = enumerate(source.splitlines(), start=1)
    return [line for number, line in numbered if line.strip() and line.strip()[0] != "#" and number not in texts]


@dataclass(frozen=True)
class LoopSize:
    """One loop, and what differs from the loop in one process."""

    code: int
    added: int
    removed: int


def loop_size(rival: str) -> LoopSize:
    plain, loop = (code_lines((LOOPS / f"images_{name}.py").read_text()) for name in ("plain", rival))
    changes = list(difflib.ndiff(plain, loop))
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in ("+ ", "- "))
    return LoopSize(len(loop), added, removed)


@dataclass(frozen=True)
class Outcome:
    """What a loop did after a fault."""

    rival: str
    fault: str
    next_step_s: float | None  # until a step that had not been done; None: not within the deadline, or never
    redone: int  # steps that were done again
    over: str  # the exit code and the last message, where the job ended


class LoopRun:
    """One loop on three emulated nodes."""

    def __init__(self, rival: str, folder: Path, spoiled: bool) -> None:
        self.run = folder / "run"
        words = ["run", "--on", _NODES, "--threads", "1", "--out", str(self.run)]
        words += ["--restarts", "3"] if rival == "accelerate" else []
        env = {**os.environ, "PYTHONPATH": str(LOOPS.parent), "CHECKPOINT": str(folder / "checkpoint")}
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shoal", *words, str(LOOPS / f"images_{rival}.py")],
                env=env | ({SPOILED: "777"} if spoiled else {}),
                stdout=output,
                stderr=output,
            )
        self.output = folder / "output"

    def steps(self) -> list[list[tuple[int, float]]]:
        """Return the steps and losses that each rank has printed so far."""
        texts = [log.read_text(errors="replace") for log in sorted(self.run.glob("logs/*/rank-*.log"))]
        return [[(int(step), float(loss)) for step, loss in _STEP.findall(text)] for text in texts]

    def furthest(self) -> int:
        return max((step for rank in self.steps() for step, _ in rank), default=0)

    def redone(self) -> int:
        """Return the most steps that one rank has done twice."""
        return max((len(rank) - len({step for step, _ in rank}) for rank in self.steps()), default=0)

    def spoiled(self) -> int:
        """Return how many steps had a loss that is not a number, on some rank."""
        return len({step for rank in self.steps() for step, loss in rank if math.isnan(loss)})

    def wait(self, has_come: Callable[[], bool], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not has_come():
            if time.monotonic() > deadline or self.process.poll() is not None:
                return has_come()
            time.sleep(0.02)
        return True

    def kill_rank(self) -> None:
        ranks = [process for process in find_processes(self.run) if process.part == "rank-2"]
        os.kill(min(ranks, key=lambda process: process.started_at).pid, signal.SIGKILL)

    def lab(self) -> Lab:
        supervisor = find_supervisor(self.run)
        assert supervisor is not None
        return Lab.open(f"run-{supervisor.pid}")

    def end(self) -> str:
        """Return the exit code and the last error if the job is over; end what is left."""
        code = self.process.poll()
        end_processes(find_processes(RunFolder(self.run).path))
        if code is None:
            self.process.kill()
            self.process.wait()
            return ""
        errors = [line for line in self.output.read_text(errors="replace").splitlines() if line.startswith("error: ")]
        return f"exit {code}" + (f", {errors[-1][:200]}" if errors else "")


FAULTS: dict[str, Callable[[LoopRun], object]] = {
    "rank": LoopRun.kill_rank,
    "node": lambda loop: loop.lab().node("node3").kill(),
    "silent": lambda loop: loop.lab().node("node3").cut(),
}


def strike(rival: str, fault: str) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        loop = LoopRun(rival, Path(name), spoiled=False)
        try:
            if not loop.wait(lambda: loop.furthest() >= _STRIKE_AT, _START_S):
                return Outcome(rival, fault, None, 0, f"never reached step {_STRIKE_AT}; {loop.end()}")
            before, began = loop.furthest(), time.monotonic()
            FAULTS[fault](loop)
            # The step that was under way may still be printed by a survivor.
            is_back = loop.wait(lambda: loop.furthest() > before + 1, _DEADLINE_S)
            took_s = time.monotonic() - began if is_back else None
            return Outcome(rival, fault, None if took_s is None else round(took_s, 2), loop.redone(), loop.end())
        finally:
            loop.end()


def spoil(rival: str) -> Outcome:
    """Train with one image that is not a number, and report whether steps with such weights were taken."""
    with tempfile.TemporaryDirectory() as name:
        loop = LoopRun(rival, Path(name), spoiled=True)
        try:
            loop.wait(lambda: loop.spoiled() > _MANY, _START_S)
            seen = f"{loop.spoiled()} steps with a NaN loss"
            return Outcome(rival, "nan", None, 0, "; ".join(filter(None, (seen, loop.end()))))
        finally:
            loop.end()


def main() -> None:
    parser = options(__doc__, quick={"faults": True, "rival": "session", "fault": "rank"})
    parser.add_argument("--faults", action="store_true", help="play them too; minutes")
    parser.add_argument("--rival", default="session,accelerate")
    parser.add_argument("--fault", default=",".join([*FAULTS, "nan"]))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    sizes = {rival: loop_size(rival) for rival in ("plain", *RIVALS)}
    for rival, size in sizes.items():
        print(f"{rival:<11} {size.code:>3} lines of code, {size.added} added and {size.removed} removed")
    outcomes = []
    for fault in chosen.fault.split(",") if chosen.faults else ():
        for rival in chosen.rival.split(","):
            outcomes.append(spoil(rival) if fault == "nan" else strike(rival, fault))
            print(outcomes[-1], flush=True)
    if chosen.json:
        document = {"lines": {rival: asdict(size) for rival, size in sizes.items()}, "faults": [*map(asdict, outcomes)]}
        chosen.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
