"""Inject the causes of slow steps on an emulated node, one after the other, and see what the run reports.

    sudo .venv/bin/python benchmarks/causes.py
    sudo .venv/bin/python benchmarks/causes.py --cause quota --cause loss
    sudo .venv/bin/python benchmarks/causes.py --threads 2     # ranks of several threads
    sudo .venv/bin/python benchmarks/causes.py --quick         # slow data only

A small model trains on a lab, with its ranks on cores of their own: two nodes, and three for causes of the network.
Each cause begins in mid-training and is taken away after its verdict. Printed are, for each: whether the right rank
and the right cause were named, after how many seconds, and the sentence itself. The healthy time before the first
cause must pass without a verdict, but that of too many threads where ranks have more of them than there are cores: the
causes must be named also then. Slow data, garbage and a slow disk are made inside the second node's process: its
dataset sleeps, it collects a large heap, and its fsync takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from _common import options, wait_until
from shoal.control.processes import find_processes
from shoal.events import Event, EventTail
from shoal.host.topology import this_topology
from shoal.run_folder import RunFolder
from shoal_lab.lab import Lab, remove_lab
from shoal_lab.spec import make_spec

VERDICT_S = 90.0
# Stragglers count as gone after a hundred steps without them.
CALM_STEPS = 140
SLOW_NODE = "node2"
SLOW_RATE = "20mbit"

SCRIPT = """
import gc, mmap, os, pathlib, random, sys, threading, time
import torch, shoal

trouble = pathlib.Path(sys.argv[1])
session = shoal.Session(steps=1_000_000, global_batch=64, micro_batch=16, checkpoint_every=40, out=None)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
session.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3))
is_slow_node = session.rank == 1
heap = []
now, at = "", 0.0

def current():
    global now, at
    if time.monotonic() - at > 0.5:
        at, now = time.monotonic(), trouble.read_text() if trouble.exists() else ""
    return now

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        if is_slow_node and current() == "data":
            time.sleep(0.004)
        return torch.full((512,), index / 4096)

def multiply():
    # Beside the training, as a program's own pool of threads would.
    square = torch.randn(512, 512)
    while current() == "threads":
        square @ square

real_fsync = os.fsync
def fsync(fd):
    if current() == "disk":
        time.sleep(0.7)
    real_fsync(fd)
os.fsync = fsync

# A file of this rank's own, of which each step reads some pages: they stay in memory while there is enough.
pages = pathlib.Path(f"{trouble}.pages-{session.rank}")
pages.write_bytes(bytes(48 << 20))
has_moved = False

def open_table():
    with pages.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        table = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table.madvise(mmap.MADV_RANDOM)
    return table

table = open_table()

data = Data()
for step in session:
    with step:
        if is_slow_node and current() == "memory" and not has_moved:
            # Pages that are in memory already do not count in a control group that the process enters.
            table.close()
            table, has_moved = open_table(), True
        if is_slow_node and current() == "threads" and threading.active_count() < 12:
            threading.Thread(target=multiply, daemon=True).start()
        for batch in step.batches(data):
            for _ in range(600):
                table[random.randrange(48 << 8) << 12]
            for _ in range(12):
                loss = (model(batch) - batch).square().mean(dim=1).sum()
            step.backward(loss)
        if is_slow_node and current() == "gc":
            # Made now: what was there before the first step is frozen, and not scanned again.
            heap = heap or [[i] for i in range(400_000)]
            gc.collect()
        step.update()
"""


class Bench:
    """A training in a lab, and the verdicts that it reports."""

    def __init__(self, folder: Path, lab: Lab, nodes: int, threads: int) -> None:
        self.folder = folder
        self.lab = lab
        self.nodes = nodes
        self.trouble = folder / "trouble"
        script = folder / "steps.py"
        script.write_text(SCRIPT)
        self.run = RunFolder(folder / "run")
        words = ("run", "--on", f"lab:{lab.name}", "--threads", str(threads), "--out", str(self.run.path), "--detach")
        command = [str(Path(sys.executable).with_name("shoal")), *words, str(script), str(self.trouble)]
        subprocess.run(command, check=True, capture_output=True)
        self._tails = [EventTail(self.run.events(rank)) for rank in range(nodes)]
        self.starts: dict[int, Event] = {}
        self.last: dict[int, Event] = {}  # times of the last step by rank
        self.worlds: list[Event] = []  # changes of the world, as each rank recorded them
        self.step = 0
        self.step_s = 0.0

    def poll(self) -> list[Event]:
        """Return the verdicts since the last call."""
        verdicts = []
        for tail in self._tails:
            for event in tail.poll():
                if event["event"] == "membership":
                    self.worlds.append(event)
                elif event["event"] == "start":
                    self.starts[event["rank"]] = event
                elif event["event"] == "step":
                    self.step, self.step_s = max(self.step, event["step"]), event["step_s"]
                    self.last[event["rank"]] = {k: v for k, v in event.items() if k.endswith("_s")}
                elif event["event"] == "warning" and "cause" in event:
                    verdicts.append(event)
        return verdicts

    def wait_for_step(self, step: int, timeout_s: float = 240.0) -> list[Event]:
        verdicts: list[Event] = []

        def is_reached() -> bool:
            verdicts.extend(self.poll())
            return self.step >= step

        wait_until(is_reached, timeout_s, why=lambda: f"only {self.step} steps: see {self.run.path}", every_s=0.2)
        return verdicts

    def rank_pid(self) -> int:
        return next(process.pid for process in find_processes(self.run.path) if process.part == "rank-1")


@contextmanager
def quota(bench: Bench) -> Iterator[None]:
    bench.lab.node(SLOW_NODE).set_cpu(0.2)
    yield
    bench.lab.node(SLOW_NODE).set_cpu(None)


@contextmanager
def neighbour(bench: Bench) -> Iterator[None]:
    """Let three programs of another user of the slow node compute on the cores of its rank."""
    cpus = bench.starts[1].get("cpus") or [1]
    words = ["taskset", "-c", ",".join(map(str, cpus)), "sh", "-c", "while :; do :; done"]
    command = bench.lab.command(SLOW_NODE, words)
    programs = [subprocess.Popen(command, start_new_session=True) for _ in range(3)]
    try:
        yield
    finally:
        for program in programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, 9)
            program.wait()
        for pid, text in bench.lab.processes(SLOW_NODE):
            if "while :" in text:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)


def _link(nodes: tuple[str, ...], **change: str) -> Callable[[Bench], AbstractContextManager[None]]:
    @contextmanager
    def inject(bench: Bench) -> Iterator[None]:
        for node in nodes:
            bench.lab.node(node).set_link(**change)
        yield
        for node in nodes:
            bench.lab.node(node).set_link(rate="1gbit", loss="0%")

    return inject


@contextmanager
def memory(bench: Bench) -> Iterator[None]:
    """Give the rank too little memory for the pages of its file: they are dropped, and read again and again."""
    group = Path("/sys/fs/cgroup/memory") / f"shoal-causes-{os.getpid()}"
    group.mkdir()
    pid = str(bench.rank_pid())
    (group / "cgroup.procs").write_text(pid)
    (group / "memory.limit_in_bytes").write_text(str(16 << 20))
    bench.trouble.write_text("memory")
    yield
    bench.trouble.unlink()
    (group / "memory.limit_in_bytes").write_text("-1")
    (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


@contextmanager
def freezes(bench: Bench) -> Iterator[None]:
    end = threading.Event()

    def freeze() -> None:
        while not end.wait(1.2):
            bench.lab.node(SLOW_NODE).freeze()
            time.sleep(0.7)
            bench.lab.node(SLOW_NODE).thaw()

    thread = threading.Thread(target=freeze)
    thread.start()
    yield
    end.set()
    thread.join()


def _inside(kind: str) -> Callable[[Bench], AbstractContextManager[None]]:
    @contextmanager
    def inject(bench: Bench) -> Iterator[None]:
        bench.trouble.write_text(kind)
        yield
        bench.trouble.unlink()

    return inject


@dataclass(frozen=True)
class Trouble:
    title: str
    inject: Callable[[Bench], AbstractContextManager[None]]
    causes: tuple[str, ...]
    rank: int | None = 1
    place: str = SLOW_NODE  # in the sentence
    nodes: int = 2

    def is_place(self, verdict: Event) -> bool:
        return self.place in verdict["seen"] and self.rank in (None, verdict["rank"])

    def is_cause(self, verdict: Event) -> bool:
        return self.is_place(verdict) and verdict["cause"] in self.causes


TROUBLES = {
    "quota": Trouble("CPU quota", quota, ("CPU quota",)),
    "neighbour": Trouble("busy neighbour process", neighbour, ("other programs",)),
    "data": Trouble("slow data", _inside("data"), ("data",)),
    "threads": Trouble("own threads beside it", _inside("threads"), ("oversubscription",)),
    "gc": Trouble("garbage collection", _inside("gc"), ("garbage collection",)),
    "freezes": Trouble("short freezes", freezes, ("freezes",)),
    "memory": Trouble("memory pressure", memory, ("memory",)),
    # The first rank writes the checkpoints of a folder that all nodes share.
    "disk": Trouble("slow disk at checkpoints", _inside("disk"), ("disk",), rank=0, place="node1"),
    "link": Trouble("slow link", _link((SLOW_NODE,), rate=SLOW_RATE), ("link",), rank=None, nodes=3),
    "loss": Trouble("packet loss", _link((SLOW_NODE,), loss="2%"), ("packet loss",), rank=None, nodes=3),
    "switch": Trouble(
        "overloaded switch",
        _link(("node1", "node2", "node3"), rate=SLOW_RATE),
        ("link",),
        rank=None,
        place="the whole network",
        nodes=3,
    ),
}


@contextmanager
def training(nodes: int, threads: int = 1) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab.build(make_spec(nodes, name=f"causes-{os.getpid()}", link="1gbit"), owner=os.getpid())
        bench = None
        try:
            bench = Bench(Path(folder), lab, nodes, threads)
            yield bench
        finally:
            if bench is not None:
                shoal = str(Path(sys.executable).with_name("shoal"))
                subprocess.run([shoal, "stop", str(bench.run.path)], check=False, capture_output=True)
            remove_lab(lab.name)


def try_cause(bench: Bench, trouble: Trouble) -> dict[str, object]:
    """Inject a cause; return what the run reported about it. Other verdicts in this time are counted."""
    bench.poll()
    began = time.monotonic()
    verdicts: list[Event] = []
    right: Event = {}
    with trouble.inject(bench):
        while not right and time.monotonic() - began < VERDICT_S:
            time.sleep(0.2)
            verdicts += bench.poll()
            right = next((verdict for verdict in verdicts if trouble.is_cause(verdict)), {})
        after_s = time.monotonic() - began
    if not right:
        print(f"no verdict; the last step: {bench.last}; the worlds: {bench.worlds[bench.nodes :]}", file=sys.stderr)
    named = right or next(filter(trouble.is_place, verdicts), {}) or next(iter(verdicts), {})
    return {
        "cause": trouble.title,
        "rank": bool(named) and trouble.is_place(named),
        "verdict": bool(right),
        "after_s": round(after_s, 1) if right else None,
        "others": len(verdicts) - bool(right),
        "seen": named.get("seen", "no verdict"),
    }


def main() -> None:
    parser = options(__doc__, quick={"healthy_s": 3.0, "cause": ["data"]})
    parser.add_argument("--cause", action="append", choices=TROUBLES, help="only this one; may be repeated")
    parser.add_argument("--threads", type=int, default=1, help="of every rank")
    parser.add_argument("--healthy-s", type=float, default=30.0, help="without a cause, before the first")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    chosen = [TROUBLES[name] for name in given.cause or TROUBLES]
    rows: list[dict[str, object]] = []
    for nodes in sorted({trouble.nodes for trouble in chosen}):
        with training(nodes, given.threads) as bench:
            bench.wait_for_step(40)
            began, seen = time.monotonic(), 0
            has_too_many = nodes * given.threads > this_topology().usable and given.threads > 1
            while time.monotonic() - began < given.healthy_s:
                time.sleep(0.5)
                for verdict in bench.poll():
                    seen += not (has_too_many and verdict["cause"] == "oversubscription")
                    print(f"healthy, {nodes} nodes: {verdict['seen']}", file=sys.stderr)
            rows.append({"cause": f"none, {nodes} nodes", "rank": not seen, "verdict": not seen, "seen": ""})
            for number, trouble in enumerate(one for one in chosen if one.nodes == nodes):
                if number:
                    bench.wait_for_step(bench.step + CALM_STEPS)
                rows.append(try_cause(bench, trouble))
                print(f"{rows[-1]} (step {bench.step}, {1e3 * bench.step_s:.0f} ms)", file=sys.stderr)
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'cause':28}{'rank':>7}{'cause':>7}{'after':>10}{'others':>8}  sentence")
    for row in rows:
        marks = ["right" if row[name] else "wrong" for name in ("rank", "verdict")]
        after, others = row.get("after_s") or "–", row.get("others", 0)
        print(f"{row['cause']!s:28}{marks[0]:>7}{marks[1]:>7}{after!s:>8} s{others!s:>8}  {row['seen']}")


if __name__ == "__main__":
    main()
