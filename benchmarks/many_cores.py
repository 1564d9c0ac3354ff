"""Ranks with several threads on one machine: shoal's default against stock DDP and against one process.

    .venv/bin/python benchmarks/many_cores.py                    the whole table, about five minutes
    .venv/bin/python benchmarks/many_cores.py --rounds 5         medians of five alternating rounds
    .venv/bin/python benchmarks/many_cores.py --only grammar --extra grammar:2:passive:OMP_WAIT_POLICY=passive

A row is a world of its own: its ranks are started once, with the variables that shoal's launcher gives them, and wait
while the others are measured. Rows with more ranks than this machine has cores are left out. `stock` is torch's DDP as
torchrun would run it: gloo, not pinned, the same threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from _common import median_ratio, options
from shoal.cluster.node import Rendezvous, local_node, reserve_port
from shoal.config.load import build_config, load_config
from shoal.data.prepare import create_run
from shoal.host.facts import cpu_name
from shoal.host.topology import this_topology
from shoal.launch.plan import plan_ranks
from shoal.run_folder import RunFolder

STEPS_ONLY = (
    "train.steps=1000000",
    "train.eval_every=1000000",
    "train.checkpoint_every=1000000",
    "members.digest_every=1000000",
    "train.device=cpu",
    "train.compile=off",
)
# The shape of the preset, on the built-in text: nothing has to be fetched.
SHAKESPEARE = (
    *("model.layers=4", "model.heads=4", "model.width=128", "model.seq_len=64", "model.vocab_size=128"),
    *("data.tokenizer=char", "train.global_batch=64"),
)
GRAMMAR = ("train.global_batch=16",)
IMAGES = ("train.global_batch=64",)
MODELS = {"grammar": GRAMMAR, "shakespeare": SHAKESPEARE, "resnet": IMAGES}
RANKS = {"grammar": (2, 4, 8), "shakespeare": (2,), "resnet": (2, 4)}
SEARCHED = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


@dataclass
class Row:
    model: str
    ranks: int
    name: str
    settings: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"{self.model} local:{self.ranks}"


def table(cores: int) -> Iterator[Row]:
    for model in MODELS:
        yield Row(model, 1, "default")
        for ranks in RANKS[model]:
            if ranks > cores:
                continue
            yield Row(model, ranks, "stock", ("sync.mode=stock", "train.pin=off", f"run.threads={cores // ranks}"))
            yield Row(model, ranks, "default")
            if model != "resnet":
                yield Row(model, ranks, "gloo", ("sync.inside=gloo",))
            if model == "grammar" and ranks == 2:
                yield Row(model, ranks, "not pinned", ("train.pin=off",))
            if model == "grammar" and ranks == 4:
                yield Row(model, ranks, "one thread", ("run.threads=1",))


# A rank: it does as many steps as each line of its standard input says, and answers with their median.


def rank_main(folder: Path, model: str) -> None:
    import torch

    from shoal.control.rank_env import Placement
    from shoal.engine.environment import SessionStart
    from shoal.engine.session import Session
    from shoal.sync.world import join_world
    from shoal.train.gpt_training import GptTrainer

    torch.set_flush_denormal(True)
    config, run = load_config(RunFolder.open(folder).config), RunFolder.open(folder)
    placement = Placement.from_env(os.environ)
    world = join_world(placement, torch.device("cpu"))
    session = Session.of(SessionStart(config, run, placement, sharding=config.data.sharding, world=world))
    steps = resnet_steps(session) if model == "resnet" else GptTrainer(session, config, run).steps()
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            began = time.perf_counter()
            next(steps)
            times.append(time.perf_counter() - began)
        print(json.dumps({"seconds": statistics.median(times)}), flush=True)
    os._exit(0)


def resnet_steps(session: Any) -> Iterator[int]:
    """Train a ResNet of 18 layers on images of 32 × 32 pixels, as a user's own loop does."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(1)
    model = make_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session.attach(model, optimizer)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(2048, 3, 32, 32, generator=generator), torch.randint(10, (2048,), generator=generator)
    for step in session:
        with step:
            for inputs, labels in step.batches(images):
                step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
            step.update()
        yield step.number


def make_resnet(width: int = 32) -> Any:
    from torch import Tensor, nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, before: int, channels: int, stride: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(before, channels, 3, stride, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
                nn.BatchNorm2d(channels),
            )
            same = stride == 1 and before == channels
            self.skip = nn.Identity() if same else nn.Conv2d(before, channels, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.skip(x) + self.layers(x))

    stages = [(width << max(0, stage - 1), width << stage, 1 + (stage > 0)) for stage in range(4)]
    blocks = [Block(before, after, stride) for before, after, stride in stages]
    seconds = [Block(after, after, 1) for _, after, _ in stages]
    body = [block for pair in zip(blocks, seconds, strict=True) for block in pair]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 3, 10))
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *body, *head)


class RowWorld:
    """The processes of one row."""

    def __init__(self, row: Row, sets: list[str], held: ExitStack) -> None:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        config = build_config("grammar", sets=[*MODELS[row.model], *STEPS_ONLY, *row.settings, *sets])
        run = create_run(config, folder / "run", world_size=row.ranks)
        node = local_node(row.ranks)
        holder = held.enter_context(reserve_port(node.address, 0))
        meeting = Rendezvous(node.address, holder.getsockname()[1])
        argv = [sys.executable, __file__, "--rank-of", str(run.path), "--model", row.model]
        self.log: IO[bytes] = held.enter_context((folder / "log").open("w+b"))
        self._ranks = [
            held.enter_context(
                subprocess.Popen(
                    argv,
                    # The ranks do not search the folder of their script by themselves.
                    env={**os.environ, **command.env, "PYTHONPATH": SEARCHED, **row.env},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.log,
                    text=True,
                )
            )
            for command in plan_ranks(config.run, lambda node: str(run.path), [node], meeting, resume=False)
        ]

    def ask(self, steps: int) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()

    def answer(self) -> float:
        """Return the slowest rank's median."""
        return max(self._read(rank) for rank in self._ranks)

    def _read(self, rank: subprocess.Popen[str]) -> float:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["seconds"])
        self.log.seek(0)
        sys.stderr.write(self.log.read().decode(errors="replace")[-4000:])
        raise SystemExit("a rank ended early; its error stands above")

    def end(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait()


def measure(rows: list[Row], rounds: int, seconds: float, warm_up: int, sets: list[str]) -> None:
    with ExitStack() as held:
        # Trials of earlier runs are not remembered here.
        os.environ["XDG_CACHE_HOME"] = held.enter_context(tempfile.TemporaryDirectory())
        worlds = [RowWorld(row, sets, held) for row in rows]
        steps = []
        # One world warms up at a time; the next ones import torch meanwhile.
        for row, world in zip(rows, worlds, strict=True):
            world.ask(warm_up)
            took = world.answer()
            steps.append(max(5, round(seconds / took)))
            print(f"{row.where:20} {row.name:20} ready: {took * 1e3:7.1f} ms a step", flush=True)
        for number in range(1, rounds + 1):
            for row, world, count in zip(rows, worlds, steps, strict=True):
                world.ask(count)
                row.seconds.append(world.answer())
            print(f"round {number} of {rounds} done", flush=True)
        for world in worlds:
            world.end()


def show(rows: list[Row]) -> list[dict[str, object]]:
    """Print the table and a verdict; return the rows for programs."""
    baselines = {row.where: row for row in rows if row.name == "stock"}
    alone = {row.model: row for row in rows if row.ranks == 1}
    found: list[dict[str, object]] = []
    print(f"\n{'':20} {'':20} {'step':>10} {'of stock':>9} {'of one process':>15}")
    for row in rows:
        median = statistics.median(row.seconds)
        stock, one = baselines.get(row.where), alone.get(row.model)
        of_stock = None if stock is None else 1 / median_ratio(stock.seconds, row.seconds)
        of_one = None if one is None else 1 / median_ratio(one.seconds, row.seconds)
        texts = [f"{ratio:.2f}×" if ratio else "" for ratio in (of_stock, of_one)]
        print(f"{row.where:20} {row.name:20} {median * 1e3:7.1f} ms {texts[0]:>9} {texts[1]:>15}")
        found.append({"where": row.where, "name": row.name, "s": median, "of_stock": of_stock, "of_one": of_one})
    slower = [each for each in found if each["name"] == "default" and (each["of_stock"] or 0) > 1.0]  # type: ignore[operator]
    worst = ", ".join(f"{each['where']} {each['of_stock']:.2f}×" for each in slower)
    print("verdict: " + (f"slower than stock DDP by default: {worst}" if slower else "no default is slower than stock"))
    return found


def parse_extra(text: str) -> Row:
    """Read MODEL:RANKS:NAME[:SETTING or VARIABLE=VALUE,…]."""
    model, ranks, name, *words = text.split(":", 3)
    parts = [part for part in ",".join(words).split(",") if part]
    env = dict(part.split("=", 1) for part in parts if part.split("=")[0].isupper())
    return Row(model, int(ranks), name, tuple(part for part in parts if part.split("=")[0] not in env), env)


def main() -> None:
    parser = options(
        __doc__,
        rounds_=3,
        quick={"seconds": 0.1, "warm_up": 3, "only": ["grammar"], "ranks": [2], "row": ["stock", "default"]},
        trains=True,
    )
    parser.add_argument("--seconds", type=float, default=0.7, help="of one row in one round")
    parser.add_argument("--warm-up", type=int, default=48, help="steps before; the trials of a run are over by then")
    parser.add_argument("--only", action="append", choices=sorted(MODELS), help="this model alone")
    parser.add_argument("--ranks", type=int, action="append", help="these numbers of ranks alone, and one process")
    parser.add_argument("--row", action="append", help="rows of this name alone, such as default")
    parser.add_argument("--extra", action="append", default=[], type=parse_extra, metavar="MODEL:RANKS:NAME:SETTINGS")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_of:
        rank_main(chosen.rank_of, chosen.model)
        return
    cores = this_topology().usable
    models = chosen.only or list(MODELS)
    ranks = {1, *chosen.ranks} if chosen.ranks else {1, 2, 4, 8}
    rows = [row for row in [*table(cores), *chosen.extra] if row.model in models and row.ranks in ranks]
    rows = [row for row in rows if not chosen.row or row.name in chosen.row]
    print(f"{cpu_name()}, {cores} cores")
    began = time.monotonic()
    measure(rows, chosen.rounds, chosen.seconds, chosen.warm_up, chosen.sets)
    found = show(rows)
    print(f"{time.monotonic() - began:.0f} s")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
