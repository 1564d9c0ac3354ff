"""What the benchmarks share: their options, and medians over alternating rounds."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# A benchmark is started by its path: only its own folder is on the search path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.waiting import NotInTime, wait_until

__all__ = ["NotInTime", "find_gpu", "median_ratio", "options", "rounds", "seconds_per_call", "wait_until"]


def rounds(variants: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Runs all variants in turn, `count` times over: a noisy minute on a shared machine then hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(1, count + 1):
        for name, measure in variants.items():
            found[name].append(measure())
            print(f"round {number}/{count}  {name:24} {found[name][-1] * 1e3:8.2f} ms a step", flush=True)
    return found


def median_ratio(baseline: Sequence[float], ours: Sequence[float]) -> float:
    """The median over rounds of baseline ÷ ours, each pair measured side by side."""
    return statistics.median(base / our for base, our in zip(baseline, ours, strict=True))


def seconds_per_call(function: Callable[[], object], calls: int) -> float:
    """The median of single calls; the mean would report the machine's worst moment."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


TINY = [
    *("model.layers=1", "model.heads=2", "model.width=16", "model.seq_len=16"),
    *("data.sentences=400", "train.compile=off"),
]


class _Quick(argparse.Action):
    """Sets the options that were not given to the values of a run of seconds."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object) -> None:
        namespace.quick = True
        for name, value in self.const.items():
            if getattr(namespace, name) == parser.get_default(name):
                setattr(namespace, name, value)


def options(
    doc: str | None,
    rounds_: int | None = None,
    steps: int | None = None,
    quick: Mapping[str, object] | None = None,
    trains: bool = False,
) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with the first line of its docstring.

    `quick` are values of options, also of those that the benchmark adds: --quick takes them, and one round, in place of
    the defaults. A benchmark that `trains` a GPT has --set, and with --quick a tiny one. A test starts every benchmark
    with --quick, so it must run to its end in seconds.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    for name, count in (("rounds", rounds_), ("steps", steps)):
        if count is not None:
            parser.add_argument(f"--{name}", type=int, default=count)
    if trains:
        parser.add_argument("--set", action="append", default=[], dest="sets", help="a setting of shoal")
    values = {**({} if rounds_ is None else {"rounds": 1}), **({"sets": TINY} if trains else {}), **(quick or {})}
    meaning = ", ".join(f"{name} {value}" for name, value in values.items())
    parser.add_argument(
        "--quick", action=_Quick, nargs=0, const=values, default=False, help=f"does it run? As with {meaning}"
    )
    return parser


def find_gpu() -> bool:
    """Return whether torch can use a GPU; print why not."""
    import torch

    if not torch.cuda.is_available():
        print(f"nothing measured: torch {torch.__version__} finds no GPU; next: shoal doctor --on local:1")
    return torch.cuda.is_available()
