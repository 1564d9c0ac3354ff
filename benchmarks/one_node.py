"""One process: shoal's step against nanoGPT's loop, eager and compiled, and all of them against the matrix rate.

    .venv/bin/python benchmarks/one_node.py                                 # 10.77M parameters, one thread
    .venv/bin/python benchmarks/one_node.py --threads 16 --batch 64 --dropout 0.2
    .venv/bin/python benchmarks/one_node.py --model gpt2-124m --rounds 3 --steps 1
    .venv/bin/python benchmarks/one_node.py --model shakespeare-char --rounds 7 --steps 40
    .venv/bin/python benchmarks/one_node.py --quick

Every variant lives in a process of its own, so that its peak memory is its own too; only one of them works at a time.
`shoal` is as it chooses itself, by a trial on this machine. `--ours name:SETTING,…` adds a variant with other settings.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from _common import median_ratio, options, rounds
from _gpt import STEPS_ONLY, PlainBatches, make_step
from rivals.nano_gpt import NanoGPT, make_cpu_step
from shoal.config.load import build_config, load_config
from shoal.control.rank_env import Placement
from shoal.cost.model_size import flops_per_token
from shoal.data.prepare import create_run
from shoal.engine.recorder import last_event
from shoal.launch.plan import KEEP_MEMORY
from shoal.sync.world import join_world
from shoal.train.autotune import has_compiler

NANO, COMPILED_NANO = "nanoGPT", "nanoGPT, compiled"
SHOAL, EAGER_SHOAL = "shoal", "shoal, eager"
PEAK = "peak"
# The shapes on the built-in text: nothing has to be fetched.
NANO_CHAR = ("layers=6", "heads=6", "width=384", "seq_len=256", "vocab_size=65")
SHAKESPEARE = ("layers=4", "heads=4", "width=128", "seq_len=64", "vocab_size=128")
# Preset, settings, sequences in a batch.
MODELS = {
    # nanoGPT's config/train_shakespeare_char.py, but for its batch of 64 and its dropout of 0.2: --batch, --dropout.
    "nanogpt-char": ("grammar", [*(f"model.{part}" for part in NANO_CHAR), "data.tokenizer=char"], 12),
    "shakespeare-char": ("grammar", [*(f"model.{part}" for part in SHAKESPEARE), "data.tokenizer=char"], 12),
    "gpt2-124m": ("gpt2-124m", ["model.seq_len=512"], 1),
}
_SIDE = 1536
_PRODUCTS = 4


def make_variant(chosen: argparse.Namespace, folder: Path) -> tuple[Callable[[], object], float, Callable[[], str]]:
    """The step, its floating-point operations, and what our training chose, once it has done a step."""
    name, sets, _ = MODELS[chosen.model]
    batch = [f"train.global_batch={chosen.batch}", f"train.micro_batch={chosen.batch}"]
    sets = [*sets, *batch, f"model.dropout={chosen.dropout}", "train.device=cpu", *STEPS_ONLY, *chosen.settings]
    run = create_run(build_config(name, sets=sets), folder / "run", world_size=1)
    config = load_config(run.config)
    model = config.model
    flops = flops_per_token(model) * chosen.batch * model.seq_len
    if chosen.child in (NANO, COMPILED_NANO):
        torch.manual_seed(config.train.seed)
        nano = NanoGPT(model.layers, model.heads, model.width, model.seq_len, model.vocab_size, model.dropout)
        batches = PlainBatches(config, run)
        is_compiled = chosen.child == COMPILED_NANO
        return make_cpu_step(nano, lambda: next(batches.next_step()), is_compiled), flops, lambda: ""
    step = make_step(config, run, join_world(Placement(0, 1, 0, 1), torch.device("cpu")))
    return step, flops, lambda: str(last_event(run.events(0), "start")["compute_why"])


def peak_memory_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


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
        step, flops, choice = make_variant(chosen, Path(folder))
        # The first makes the optimizer's moments.
        step()
        print(json.dumps({"flops": flops, "chose": choice()}), flush=True)
        for _ in sys.stdin:
            faults = page_faults()
            seconds = statistics.median(timed(step, clock) for _ in range(chosen.steps))
            faults = (page_faults() - faults) // chosen.steps
            print(json.dumps({"seconds": seconds, "faults": faults, "peak_bytes": peak_memory_bytes()}), flush=True)


class Variant:
    def __init__(self, name: str, settings: list[str], chosen: argparse.Namespace) -> None:
        flags = [f"--{flag}={getattr(chosen, flag)}" for flag in ("model", "steps", "threads", "batch", "dropout")]
        words = [sys.executable, __file__, "--child", name, *flags, "--settings", *settings]
        # Where there is a GPU, it is not used.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **({} if name in (NANO, COMPILED_NANO, PEAK) else KEEP_MEMORY)}
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


def wanted_variants(chosen: argparse.Namespace) -> dict[str, list[str]]:
    """Settings of shoal by variant."""
    wanted: dict[str, list[str]] = {NANO: [], COMPILED_NANO: [], EAGER_SHOAL: ["train.compile=off"], SHOAL: []}
    if chosen.compile == "off" or not has_compiler():
        print("nanoGPT is not compiled: " + ("as --compile says" if chosen.compile == "off" else "there is no g++"))
        del wanted[COMPILED_NANO]
        wanted[SHOAL] = [f"train.compile={chosen.compile}"]
    return wanted | {name: settings.split(",") for name, _, settings in (each.partition(":") for each in chosen.ours)}


def measure(chosen: argparse.Namespace) -> dict[str, object]:
    variants = {name: Variant(name, settings, chosen) for name, settings in wanted_variants(chosen).items()}
    peak = Variant(PEAK, [], chosen)
    peaks: list[float] = []

    def after_peak() -> float:
        peaks.append(peak.ask()["gflops"])
        return variants[NANO].seconds()

    found = rounds({name: variant.seconds for name, variant in variants.items()} | {NANO: after_peak}, chosen.rounds)
    gflops = statistics.median(peaks)
    rivals = [found[name] for name in (NANO, COMPILED_NANO) if name in found]
    better = min(rivals, key=statistics.median)
    rows = {
        name: {
            "ms": round(1e3 * statistics.median(times), 1),
            "against_better_nanogpt": round(median_ratio(better, times), 3),
            "of_peak": round(1e-9 * variants[name].first["flops"] / statistics.median(times) / gflops, 3),
            "faults_a_step": variants[name].last["faults"],
            "peak_mb": round(variants[name].last["peak_bytes"] / 1e6),
            "chose": variants[name].first["chose"],
        }
        for name, times in found.items()
    }
    for variant in [*variants.values(), peak]:
        variant.end()
    return {"peak_gflops": round(gflops, 1), **rows}


def main() -> None:
    parser = options(
        __doc__, rounds_=3, steps=2, quick={"steps": 1, "batch": 2, "compile": "off", "model": "shakespeare-char"}
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="nanogpt-char")
    parser.add_argument("--batch", type=int, help="sequences in a step")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME:SETTING,…")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="*", default=[], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen)
        return
    chosen.batch = chosen.batch or MODELS[chosen.model][2]
    # The trial that chooses is part of what is measured: it must not be known from before.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        rows = measure(chosen)
    workload = {name: getattr(chosen, name) for name in ("model", "batch", "dropout", "threads")}
    print(json.dumps({**workload, "torch": torch.__version__, **rows}, indent=1))


if __name__ == "__main__":
    main()
