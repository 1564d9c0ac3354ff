"""Sharded training: `--sync ddp|zero1|zero2|zero3` beside DDP, ZeroRedundancyOptimizer and FSDP2 on emulated nodes.

    sudo .venv/bin/python benchmarks/sharded.py --rounds 3
    sudo .venv/bin/python benchmarks/sharded.py --only fsdp2,zero3 --nodes 2 --links 1gbit --accumulate 1,2

Every way trains shoal's GPT of 25.8M parameters in fp32 with fused AdamW and clipping, one rank of one thread a node,
on as many samples. A measurement starts all ranks anew, and the ways take turns. The shoal ways are one script with
`shoal.Session` under `shoal run --sync …` on a lab, as with `--on lab:2`; the others get the variables of torchrun.

Printed are for each way: its step time ÷ that of stock DDP in the same round (median of rounds), the bytes that the
interface of a node sent in a step ÷ S, the bytes of all gradients (mean of the ranks, headers included), and the peak
memory in bytes a parameter, above what the process had before the model, activations included.

Memory has measurements of its own, in which malloc returns every block over 128 KiB at once, so that what is resident
is what is in use: the peak from before the model to the end of two steps (`start`), the `peak` of the steps after them,
and what is left `between` two steps. `resident` is the peak of the timed ranks: with glibc's malloc as it is, blocks
that were freed count too. All are of the rank with most. A way that fails prints its error and is left out; the exit
code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from _common import NotInTime, options, wait_until
from rivals.sharded_task import ShardedTask
from shoal.cost.model_size import parameter_count
from shoal_lab.lab import Lab
from shoal_lab.processes import NodeProcess
from shoal_lab.spec import INTERFACE, make_spec

BENCHMARKS = Path(__file__).resolve().parent
STOCK = "stock"
RIVALS = {STOCK: "sharded_ddp", "zero-opt": "sharded_zero_optimizer", "fsdp2": "sharded_fsdp2"}
SHOAL_MODES = ("ddp", "zero1", "zero2", "zero3")
WAYS = (*RIVALS, *SHOAL_MODES)
LINKS = {"100mbit": "100 Mbit", "1gbit": "1 Gbit", "none": "unlimited"}
PORT = 29_500
END_S = 20.0
# So that what is resident is what is in use: no threshold that grows, no heap of freed blocks.
TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
TINY = ShardedTask(layers=2, heads=2, width=64, seq_len=16, vocab_size=64, steps=2)


class Failed(Exception):
    """A way did not end as it should; the text is the end of its output."""


@dataclass(frozen=True)
class Setting:
    """Where a way is measured: a row of the table."""

    nodes: int
    link: str
    accumulate: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {LINKS.get(self.link, self.link):9}, K = {self.accumulate}"


@dataclass(frozen=True)
class Figures:
    """What the ranks of one measurement wrote. Memory is that of the rank with most of it."""

    step_s: float  # of the slowest rank, the median of its steps
    cpu_s: float  # of a rank in a step, the mean over ranks: what else runs here disturbs it less
    sent_bytes: float  # by a rank in a step, the mean over ranks
    most_sent_bytes: float  # by the rank that sent most
    peak_bytes: float
    start_peak_bytes: float  # in the warm-up and before
    between_bytes: float


# Start the ranks of a way, and wait for them


def run_rival(script: str, lab: Lab, task: ShardedTask, env: Mapping[str, str], deadline_s: float) -> None:
    """Start a rank on every node with the variables of torchrun."""
    nodes = lab.state.spec.nodes
    folder = Path(task.folder)
    world = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(PORT)}
    ranks: list[NodeProcess] = []
    try:
        for number, node in enumerate(nodes):
            place = {"RANK": str(number), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **world}
            variables = {**rank_variables(), "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", **place, **env}
            argv = [sys.executable, "-m", f"rivals.{script}", task.to_argument()]
            ranks.append(lab.start(node.name, argv, variables, folder / f"{number}.log"))
        # The others wait for a rank that failed.
        wait_until(lambda: has_all(folder, len(nodes)) or any(rank.poll() for rank in ranks), deadline_s, every_s=0.1)
        if not has_all(folder, len(nodes)):
            raise Failed(end_of_logs(folder))
        # How they end does not matter: gloo 2.13 sometimes aborts then, "terminate called without an active exception".
        with suppress(NotInTime):
            wait_until(lambda: all(rank.poll() is not None for rank in ranks), END_S, every_s=0.1)
    except NotInTime:
        raise Failed(f"not done within {deadline_s:.0f} s: {end_of_logs(folder)}") from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def has_all(folder: Path, world: int) -> bool:
    """Tell whether all ranks have left their figures."""
    return len(list(folder.glob("rank-*.json"))) == world


def run_session(mode: str, lab: Lab, task: ShardedTask, env: Mapping[str, str], deadline_s: float) -> None:
    """Start a script with `shoal.Session` as a user does."""
    script = BENCHMARKS / "rivals" / "sharded_session.py"
    world = len(lab.state.spec.nodes)
    words = ["run", "--on", f"lab:{lab.name}", "--threads", "1", "--sync", mode, "--out", f"{task.folder}/run"]
    argv = [sys.executable, "-m", "shoal", *words, str(script), task.to_argument(), str(world)]
    with subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **rank_variables(), **env},
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            raise Failed(f"not done within {deadline_s:.0f} s: {end_of(output)}") from None
        except BaseException:
            process.terminate()
            raise
    # A session that lost a rank may have continued without it.
    if process.returncode or not has_all(Path(task.folder), world):
        raise Failed(end_of(output))


def rank_variables() -> dict[str, str]:
    searched = [str(BENCHMARKS), str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, searched))}


def end_of_logs(folder: Path) -> str:
    """Return the end of the first log that has an error; the logs of its peers tell of a lost connection only."""
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.log"))]
    return end_of(next((log for log in logs if "Error" in log and "onnection" not in log), "".join(logs)))


def end_of(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-12:]) or "no output"


def measure(way: str, lab: Lab, task: ShardedTask, env: Mapping[str, str], deadline_s: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        own = replace(task, folder=folder)
        if way in RIVALS:
            run_rival(RIVALS[way], lab, own, env, deadline_s)
        else:
            run_session(way, lab, own, env, deadline_s)
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("rank-*.json"))]
    return Figures(
        step_s=max(statistics.median(rank["step_s"]) for rank in ranks),
        cpu_s=statistics.mean(rank["cpu_s"] for rank in ranks),
        sent_bytes=statistics.mean(rank["sent_bytes"] for rank in ranks),
        most_sent_bytes=max(rank["sent_bytes"] for rank in ranks),
        **{name: max(rank[name] for rank in ranks) for name in ("peak_bytes", "start_peak_bytes", "between_bytes")},
    )


@contextmanager
def open_lab(nodes: int, link: str) -> Iterator[Lab]:
    """Build a lab that is removed also when this process is killed."""
    lab = Lab.build(make_spec(nodes, name=f"sharded-{os.getpid()}", link=link), owner=os.getpid())
    try:
        yield lab
    finally:
        lab.close()


class Comparison:
    """Measures the ways in turns, and keeps what was measured."""

    def __init__(self, ways: Sequence[str], task: ShardedTask, deadline_s: float) -> None:
        self.ways = ways
        self.task = task
        self.deadline_s = deadline_s
        self.parameters = parameter_count(task.shape)
        self.timed: dict[Setting, dict[str, list[Figures]]] = {}
        self.memory: dict[tuple[int, int], dict[str, Figures]] = {}  # by nodes and accumulate
        self.failed: set[tuple[int, int, str]] = set()  # by nodes, accumulate and way

    @property
    def grad_bytes(self) -> int:
        return 4 * self.parameters

    def measure_memory(self, nodes: int, accumulate: int) -> None:
        title = f"memory    {nodes} nodes, K = {accumulate}"
        task = replace(self.task, accumulate=accumulate, steps=2)
        by_way = self.memory.setdefault((nodes, accumulate), {})
        with open_lab(nodes, "none") as lab:
            for way in self.ways:
                if (figures := self._try(title, way, lab, task, TIGHT_MALLOC)) is None:
                    continue
                by_way[way] = figures
                peak, between = figures.peak_bytes / self.parameters, figures.between_bytes / self.parameters
                print(f"{title}  {way:8} peak {peak:5.1f}, between {between:5.1f} bytes a parameter", flush=True)

    def measure_round(self, setting: Setting, title: str) -> None:
        task = replace(self.task, accumulate=setting.accumulate)
        by_way = self.timed.setdefault(setting, {})
        with open_lab(setting.nodes, setting.link) as lab:
            for way in self.ways:
                if (figures := self._try(f"{title}  {setting}", way, lab, task, {})) is None:
                    continue
                by_way.setdefault(way, []).append(figures)
                sent, most = figures.sent_bytes / self.grad_bytes, figures.most_sent_bytes / self.grad_bytes
                resident = figures.peak_bytes / self.parameters
                line = f"{figures.step_s:7.3f} s a step, {figures.cpu_s:.3f} s of CPU, {sent:.2f} S sent"
                line += f" (at most {most:.2f}), {resident:.1f} bytes a parameter; load {os.getloadavg()[0]:.1f}"
                print(f"{title}  {setting}  {way:8} {line}", flush=True)

    def _try(self, title: str, way: str, lab: Lab, task: ShardedTask, env: Mapping[str, str]) -> Figures | None:
        """Measure a way, unless it has failed with as many nodes before."""
        row = (len(lab.state.spec.nodes), task.accumulate, way)
        if row in self.failed:
            return None
        try:
            return measure(way, lab, task, env, self.deadline_s)
        except Failed as error:
            self.failed.add(row)
            print(f"{title}  {way:8} left out, it failed:\n{error}", flush=True)
            return None

    def ratio(self, setting: Setting, way: str) -> float | None:
        """Return the median over rounds of the way's step time ÷ that of stock DDP."""
        stock, own = (self.timed[setting].get(name, []) for name in (STOCK, way))
        # Fewer of a way that failed in a later round.
        ratios = [figures.step_s / base.step_s for base, figures in zip(stock, own, strict=False)]
        return statistics.median(ratios) if ratios else None

    def table(self) -> str:
        lines = ["each cell: step time ÷ stock DDP's, S sent, peak bytes a parameter"]
        lines.append(" " * 31 + "".join(f"{way:>18}" for way in self.ways))
        for setting, ways in self.timed.items():
            known = self.memory.get((setting.nodes, setting.accumulate), {})
            cells = [self._cell(setting, way, ways.get(way), known.get(way)) for way in self.ways]
            lines.append(f"{setting!s:31}" + "".join(f"{cell:>18}" for cell in cells))
        if self.memory:
            lines += ["", f"bytes a parameter{'start':>18}{'peak':>9}{'between':>9}{'resident':>9}"]
        for (nodes, accumulate), memory in self.memory.items():
            for way, figures in memory.items():
                numbers = self._memory_cells(nodes, accumulate, way, figures)
                lines.append(
                    f"{nodes} nodes, K = {accumulate}  {way:9}" + "".join(f"{number:>9}" for number in numbers)
                )
        return "\n".join(lines)

    def _cell(self, setting: Setting, way: str, timed: list[Figures] | None, memory: Figures | None) -> str:
        if not timed:
            return "–"
        ratio = self.ratio(setting, way)
        sent = statistics.median(figures.sent_bytes for figures in timed) / self.grad_bytes
        peak = "–" if memory is None else f"{memory.peak_bytes / self.parameters:.1f}"
        return f"{'–' if ratio is None else f'{ratio:.2f}×'} {sent:.2f} {peak:>4}"

    def _memory_cells(self, nodes: int, accumulate: int, way: str, figures: Figures) -> list[str]:
        resident = [
            timed.peak_bytes
            for setting, ways in self.timed.items()
            for timed in ways.get(way, [])
            if (setting.nodes, setting.accumulate) == (nodes, accumulate)
        ]
        numbers = [figures.start_peak_bytes, figures.peak_bytes, figures.between_bytes]
        numbers += [statistics.median(resident)] if resident else []
        return [f"{number / self.parameters:.1f}" for number in numbers]

    def to_json(self) -> dict[str, object]:
        return {
            "parameters": self.parameters,
            "task": asdict(self.task),
            "timed": [
                {
                    **asdict(setting),
                    "way": way,
                    "ratio": self.ratio(setting, way),
                    "rounds": [asdict(figures) for figures in rounds],
                }
                for setting, ways in self.timed.items()
                for way, rounds in ways.items()
            ],
            "memory": [
                {"nodes": nodes, "accumulate": accumulate, "way": way, **asdict(figures)}
                for (nodes, accumulate), memory in self.memory.items()
                for way, figures in memory.items()
            ],
        }


def list_of(known: Sequence[str] | None = None) -> Callable[[str], list[str]]:
    """Return a parser of words separated by commas, all of them known."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        if known and (unknown := [word for word in words if word not in known]):
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of: {', '.join(known)}")
        return words

    return parse


def main() -> None:
    quick = {"nodes": ["2"], "links": ["1gbit"], "only": ["fsdp2", "ddp"], "steps": 2, "skip_memory": True}
    parser = options(__doc__, rounds_=3, steps=4, quick=quick)
    parser.add_argument(
        "--only", type=list_of(WAYS), default=list(WAYS), help=f"of {','.join(WAYS)}; stock always runs"
    )
    parser.add_argument("--nodes", type=list_of(), default=["2", "3"], help="numbers of nodes: 2,3")
    parser.add_argument("--links", type=list_of(), default=list(LINKS), help="of the nodes: 100mbit,1gbit,none")
    parser.add_argument("--accumulate", type=list_of(), default=["1"], help="micro-batches of a rank in a step: 1,2")
    parser.add_argument("--skip-memory", action="store_true", help="without the measurements of memory")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="of one measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    task = TINY if chosen.quick else ShardedTask(steps=chosen.steps)
    comparison = Comparison([way for way in WAYS if way == STOCK or way in chosen.only], task, chosen.deadline_s)
    settings = [
        Setting(int(nodes), link, int(accumulate))
        for nodes in chosen.nodes
        for accumulate in chosen.accumulate
        for link in chosen.links
    ]
    print(f"{comparison.parameters:,} parameters; S = {comparison.grad_bytes / 1e6:.1f} MB", flush=True)
    began = time.monotonic()
    try:
        if not chosen.skip_memory:
            for nodes, accumulate in dict.fromkeys((setting.nodes, setting.accumulate) for setting in settings):
                comparison.measure_memory(nodes, accumulate)
        for number in range(1, chosen.rounds + 1):
            for setting in settings:
                comparison.measure_round(setting, f"round {number}/{chosen.rounds}")
    finally:
        # Also of a comparison that was interrupted.
        print(comparison.table())
        print(f"{time.monotonic() - began:.0f} s")
        if chosen.json:
            chosen.json.write_text(json.dumps(comparison.to_json(), indent=1) + "\n", encoding="utf-8")
    if comparison.failed:
        raise SystemExit(
            f"failed: {', '.join(f'{way} on {nodes} nodes' for nodes, _, way in sorted(comparison.failed))}"
        )


if __name__ == "__main__":
    main()
