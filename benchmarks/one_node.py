"""One rank's step: ours against a plain eager loop with unfused AdamW and full logits; both against the matmul peak.

    .venv/bin/python benchmarks/one_node.py --model gpt2-124m --rounds 3 --steps 1
    .venv/bin/python benchmarks/one_node.py --model shakespeare-char --rounds 7 --steps 40

Every variant lives in a process of its own, so that its peak memory is its own too; only one of them works at a time.
`--ours name:SETTING,…` adds a variant of ours with other settings.
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
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from _common import median_ratio, options, rounds
from _gpt import STEPS_ONLY, PlainBatches, make_step
from shoal.config.load import build_config, load_config
from shoal.config.schema import Config
from shoal.control.rank_env import Placement
from shoal.cost.model_size import flops_per_token
from shoal.data.prepare import create_run
from shoal.engine.recorder import last_event
from shoal.launch.plan import KEEP_MEMORY
from shoal.model import kernels
from shoal.model.gpt import GPT
from shoal.sync.world import join_world

PLAIN = "plain"
PEAK = "peak"
# The shape of the preset, on the built-in text: nothing has to be fetched.
SHAKESPEARE = ("layers=4", "heads=4", "width=128", "seq_len=64", "vocab_size=128")
MODELS = {
    "gpt2-124m": ("gpt2-124m", ["model.seq_len=512", "train.global_batch=1", "train.micro_batch=1"]),
    "shakespeare-char": (
        "grammar",
        [*(f"model.{part}" for part in SHAKESPEARE), "data.tokenizer=char", "train.global_batch=12"],
    ),
}
_SIDE = 1536
_PRODUCTS = 4


class PlainGPT(GPT):
    """The same model as a tutorial writes it: embedding, blocks with torch's own kernels, all logits at once."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        assert targets is not None
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Plain:
    """Forward, backward, clip, `AdamW(foreach=False, fused=False)`, nothing measured."""

    def __init__(self, config: Config, batches: PlainBatches) -> None:
        train = config.train
        torch.manual_seed(train.seed)
        self.model = PlainGPT(config.model)
        groups = self.model.decay_groups(train.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), foreach=False, fused=False)
        self.batches = batches
        self.clip = train.clip

    def step(self) -> None:
        for inputs, targets in self.batches.next_step():
            loss = self.model(inputs, targets) / targets.numel()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def make_variant(
    variant: str, model: str, settings: list[str], folder: Path
) -> tuple[Callable[[], object], float, Callable[[], str]]:
    """The step, its floating-point operations, and what our training chose, once it has done a step."""
    name, sets = MODELS[model]
    run = create_run(build_config(name, sets=[*sets, *STEPS_ONLY, *settings]), folder / "run", world_size=1)
    config = load_config(run.config)
    flops = flops_per_token(config.model) * config.train.global_batch * config.model.seq_len
    if variant == PLAIN:
        kernels.torch_is_slow_here = lambda: False  # type: ignore[assignment]
        return Plain(config, PlainBatches(config, run)).step, flops, lambda: "plain"
    step = make_step(config, run, join_world(Placement(0, 1, 0, 1), torch.device("cpu")))
    return step, flops, lambda: str(last_event(run.events(0), "start")["compute_why"])


def peak_memory_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    call()
    return clock() - began


def peak_gflops(clock: Callable[[], float]) -> float:
    one, other = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    return 2e-9 * _SIDE**3 / min(timed(lambda: torch.mm(one, other), clock) for _ in range(_PRODUCTS))


def child(chosen: argparse.Namespace) -> None:
    """Answers every line on stdin with one of JSON: first what it is, then seconds a step, at the end its memory."""
    torch.set_num_threads(chosen.threads)
    # One thread's own time: what else runs on the machine then takes less of the measurement.
    clock = time.process_time if chosen.threads == 1 else time.perf_counter
    if chosen.child == PEAK:
        print(json.dumps({}), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"gflops": peak_gflops(clock)}), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        step, flops, choice = make_variant(chosen.child, chosen.model, chosen.settings, Path(folder))
        # The first makes the optimizer's moments.
        step()
        print(json.dumps({"flops": flops, "chose": choice()}), flush=True)
        for _ in sys.stdin:
            seconds = statistics.median(timed(step, clock) for _ in range(chosen.steps))
            print(json.dumps({"seconds": seconds, "peak_bytes": peak_memory_bytes()}), flush=True)


class Variant:
    def __init__(self, name: str, settings: list[str], chosen: argparse.Namespace) -> None:
        flags = ["--child", name, "--model", chosen.model, "--steps", str(chosen.steps)]
        words = [sys.executable, __file__, *flags, "--threads", str(chosen.threads), "--settings", *settings]
        env = {**os.environ, **({} if name in (PLAIN, PEAK) else KEEP_MEMORY)}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.first = self._read()
        self.last: dict[str, float] = {}

    def ask(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.last = self._read()
        return self.last

    def seconds(self) -> float:
        return self.ask()["seconds"]

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit("a variant ended early; its error stands above")


def main() -> None:
    parser = options(__doc__.split("\n")[0], rounds_=3, steps=1)
    parser.add_argument("--model", choices=sorted(MODELS), default="shakespeare-char")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ours", action="append", default=[], metavar="NAME:SETTING,…")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="*", default=[], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen)
        return
    wanted = {PLAIN: [], "ours, eager": ["train.compile=off"]}
    wanted |= {name: settings.split(",") for name, _, settings in (each.partition(":") for each in chosen.ours)}
    variants = {name: Variant(name, settings, chosen) for name, settings in wanted.items()}
    peak = Variant(PEAK, [], chosen)
    peaks: list[float] = []

    def plain_after_peak() -> float:
        peaks.append(peak.ask()["gflops"])
        return variants[PLAIN].seconds()

    measures = {name: variant.seconds for name, variant in variants.items()} | {PLAIN: plain_after_peak}
    found = rounds(measures, chosen.rounds)
    gflops = statistics.median(peaks)
    rows = {
        name: {
            "seconds": statistics.median(times),
            "against_plain": round(median_ratio(found[PLAIN], times), 3),
            "of_peak": round(1e-9 * variants[name].first["flops"] / statistics.median(times) / gflops, 3),
            "peak_mb": round(variants[name].last["peak_bytes"] / 1e6),
            "chose": variants[name].first["chose"],
        }
        for name, times in found.items()
    }
    for variant in [*variants.values(), peak]:
        variant.end()
    print(json.dumps({"model": chosen.model, "threads": chosen.threads, "peak_gflops": round(gflops, 1), **rows}))


if __name__ == "__main__":
    main()
