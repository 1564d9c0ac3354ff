"""The memory of a rank: what `shoal plan` and `shoal train` predict, beside the peak that was measured.

    .venv/bin/python benchmarks/memory_plan.py
    .venv/bin/python benchmarks/memory_plan.py --only ddp,zero3 --ranks 2 --preset gpt2-350m --set train.recompute=true

Trains a preset on this machine with each sync method, as `shoal train` does. The peak is that of the rank with most:
resident memory, code of torch that its processes share included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import options
from shoal.config.load import load_config
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.cost.memory import MemoryNeed, needed
from shoal.cost.strategy import strategy_of_config
from shoal.cost.workload import workload_of
from shoal.run_folder import RunFolder

MODES = ("ddp", "zero1", "zero2", "zero3")
SHORT = ("model.seq_len=128", "data.sentences=2000", "train.eval_every=1000000", "train.compile=off", "run.threads=1")


def train(preset: str, mode: str, ranks: int, steps: int, sets: list[str], folder: Path) -> RunFolder:
    words = ["train", preset, "--on", f"local:{ranks}", "--sync", mode, "--steps", str(steps), "--out", str(folder)]
    settings = [word for setting in [*SHORT, *sets] for word in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words, *settings], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{mode} on {ranks} ranks ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return RunFolder.open(folder)


def predicted(run: RunFolder, ranks: int) -> MemoryNeed:
    config = load_config(run.config)
    size = micro_batch(config.train, rank_weights(config.run, ranks))
    return needed(workload_of(config), strategy_of_config(config.sync), size, ranks)


def measured_bytes(run: RunFolder) -> int:
    lines = [line for file in run.path.glob("events/rank-*.jsonl") for line in file.read_text().splitlines()]
    ends = [event for event in map(json.loads, lines) if event["event"] == "end"]
    return max(int(event["peak_memory_bytes"]) for event in ends)


def main() -> None:
    quick = {"preset": "grammar", "only": ["zero1"], "ranks": [2], "steps": 2}
    parser = options(__doc__, steps=4, quick=quick, trains=True)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(MODES), help="sync methods")
    parser.add_argument("--ranks", type=int, action="append", help="numbers of ranks; by default 2 and 3")
    chosen = parser.parse_args()
    print(f"{'':16}{'predicted':>10}{'measured':>10}{'ratio':>7}   predicted parts")
    for ranks in chosen.ranks or (2, 3):
        for mode in chosen.only:
            with tempfile.TemporaryDirectory() as folder:
                run = train(chosen.preset, mode, ranks, chosen.steps, chosen.sets, Path(folder) / "run")
                need, peak = predicted(run, ranks), measured_bytes(run)
            parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in vars(need).items() if name != "total")
            ratio = peak / need.total
            print(
                f"{mode:6} {ranks} ranks  {need.total / 1e6:7.0f} MB{peak / 1e6:7.0f} MB{ratio:7.2f}   {parts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
