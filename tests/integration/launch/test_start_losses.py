"""Kill a rank or a whole node while a run starts: the others begin without it, and what was killed returns.

Exercises launch.launcher, agent.membership.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.control.processes import AGENT, RunProcess, find_processes, kill_processes
from tests.support.labs import need_lab
from tests.support.programs import TINY, read_jsonl, set_flags, shoal
from tests.support.runs import ended_afterwards
from tests.support.waiting import wait_until

Started = Future[subprocess.CompletedProcess[str]]
STEPS = 12
SYNCS = {
    "ddp": (),
    "accumulate": ("sync.accumulate=2",),
    "local": ("sync.mode=local", "sync.every=3"),
    "diloco": ("sync.mode=diloco", "sync.every=3"),
    "streaming": ("sync.mode=streaming", "sync.every=4", "sync.fragments=2"),
}
SCRIPT = f"""
import shoal, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(inputs, targets)
session = shoal.Session(steps={STEPS}, global_batch=12)
session.attach(model, optimizer)
for step in session:
    with step:
        for inputs, targets in step.batches(data):
            step.backward(((model(inputs) - targets) ** 2).sum())
        step.update()
"""


def command(kind: str, sync: str, on: str, folder: Path) -> list[str | Path]:
    common: list[str | Path] = ["--out", folder / "run", "--on", on]
    if kind == "gpt":
        lengths = (f"train.steps={STEPS}", "train.global_batch=12", "train.eval_every=100")
        return ["train", "grammar", *common, *set_flags(*TINY, *lengths, *SYNCS[sync])]
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return ["run", *common, *set_flags(*SYNCS[sync]), script]


def time_to_step_3(words: list[str | Path], folder: Path) -> float:
    """Return the seconds from the command to the third step of a run that loses nothing."""
    began = time.monotonic()
    events = folder / "run/events/rank-0.jsonl"
    with ended_afterwards(folder / "run"), ThreadPoolExecutor() as pool:
        started = pool.submit(shoal, *words)
        wait_until(lambda: events.exists() and '"step":3,' in events.read_text().replace(" ", ""), 120)
        seconds = time.monotonic() - began
        assert started.result().returncode == 0, started.result().stderr
    return seconds


def victims(run: Path, number: int, node: str | None) -> list[RunProcess]:
    """Return the process of a rank, or the agent of a node: its ranks end with it."""
    processes = find_processes(run)
    if node is not None:
        return [process for process in processes if (process.part, process.node) == (AGENT, node)]
    return [process for process in processes if process.part == f"rank-{number}"][:1]


def kill_when(started: Started, run: Path, has_come: Callable[[], bool], number: int, node: str | None) -> bool:
    """Kill at this moment, or as soon as there is something to kill. False: the run had ended before."""
    while not started.done():
        if has_come() and (found := victims(run, number, node)):
            kill_processes(found)
            return True
        time.sleep(0.005)
    return False


def check_survived(started: Started, run: Path) -> list[str]:
    problems, done = [], started.result()
    if done.returncode:
        return [f"exit code {done.returncode}: {done.stderr[-1500:]}"]
    steps = [record["step"] for record in read_jsonl(run / "commits.jsonl") if "step" in record]
    if sorted(set(steps)) != list(range(1, STEPS + 1)):
        problems.append(f"committed {steps}")
    verified = shoal("verify", run)
    if verified.returncode:
        problems.append(f"verify: {verified.stdout[-1500:]}{verified.stderr[-1500:]}")
    if "error" in done.stderr.lower() or "every rank that had" in done.stderr:
        problems.append(f"said: {done.stderr[-1500:]}")
    return problems


def run_cell(kind: str, sync: str, on: str, tmp_path: Path, moments: int, nodes: tuple[str, ...] = ()) -> None:
    """Kill each rank, and each node, in turn, at moments between the launch and the third step."""
    whole = tmp_path / "whole"
    whole.mkdir()
    until_s = time_to_step_3(command(kind, sync, on, whole), whole)
    targets: Iterator[tuple[int, str | None]] = itertools.cycle([(n, None) for n in range(3)] + [(0, n) for n in nodes])
    problems: list[str] = []
    for moment, (number, node) in zip(range(moments), targets, strict=False):
        folder = tmp_path / f"moment-{moment}"
        folder.mkdir()
        run = folder / "run"
        with ended_afterwards(run), ThreadPoolExecutor() as pool:
            started = pool.submit(shoal, *command(kind, sync, on, folder), timeout_s=120)
            due = time.monotonic() + (moment_s := until_s * moment / moments)
            if kill_when(started, run, lambda due=due: time.monotonic() > due, number, node):  # type: ignore[misc]
                what = node or f"rank {number}"
                problems += [f"{what} after {moment_s:.2f} s: {problem}" for problem in check_survived(started, run)]
    assert not problems, "\n".join(problems)


def kill_once(kind: str, on: str, folder: Path, has_come: Callable[[Path], bool], node: str | None = None) -> str:
    """Kill rank 1, or a node, at this moment of the start; return what the command said to the user."""
    run = folder / "run"
    with ended_afterwards(run), ThreadPoolExecutor() as pool:
        started = pool.submit(shoal, *command(kind, "ddp", on, folder), timeout_s=120)
        assert kill_when(started, run, lambda: has_come(run), 1, node)
        assert not check_survived(started, run)
    return started.result().stderr


def has_generation(run: Path) -> bool:
    return any('"generation"' in journal.read_text() for journal in run.glob("agents/*.jsonl"))


def test_a_rank_of_a_session_killed_before_the_first_step_is_restarted(tmp_path: Path) -> None:
    said = kill_once("session", "local:3", tmp_path, has_generation)
    assert "before the first step. local begins with the 2 ranks that are left, as generation 2" in " ".join(
        said.split()
    )


def test_a_rank_killed_before_its_session_begins_is_restarted(tmp_path: Path) -> None:
    kill_once("session", "local:3", tmp_path, lambda run: True)
    names = [event["name"] for event in read_jsonl(tmp_path / "run/agents/local.jsonl") if event["event"] == "restart"]
    assert names == ["rank-1"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["session", "gpt"])
def test_a_node_killed_before_the_first_step_is_left_out(kind: str, tmp_path: Path) -> None:
    need_lab()
    said = kill_once(kind, "lab:3", tmp_path, has_generation, node="node2")
    assert "node1 and node3 begin with the 2 ranks that are left" in " ".join(said.split())


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("kind", ["session", "gpt"])
def test_a_rank_killed_at_any_moment_of_the_start(kind: str, sync: str, tmp_path: Path) -> None:
    run_cell(kind, sync, "local:3", tmp_path, moments=20)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("kind", ["session", "gpt"])
def test_a_rank_or_node_killed_at_any_moment_of_the_start_on_three_nodes(kind: str, sync: str, tmp_path: Path) -> None:
    need_lab()
    run_cell(kind, sync, "lab:3", tmp_path, moments=20, nodes=("node1", "node2", "node3"))
