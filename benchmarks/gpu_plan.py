"""How well a plan predicts a step on a GPU: probe the card, predict a training, train, and compare.

    PYTHONPATH=src python3 benchmarks/gpu_plan.py                # gpt2-124m, 32 × 1,024 tokens, bf16 and fp32
    PYTHONPATH=src python3 benchmarks/gpu_plan.py --batch 8 --precision bf16 --compile on

One line of JSON for each precision: predicted and measured seconds of a step and of its parts, and predicted/measured
as a ratio; the goal is 0.9 to 1.1. The probe times the model without compiling.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import find_gpu, options
from shoal.config.load import read_profile
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder


def shoal(*words: object) -> None:
    argv = [sys.executable, "-m", "shoal", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def compare(run: RunFolder) -> dict[str, object]:
    """Return the prediction that was stored before the run, and what the run measured."""
    predicted = json.loads(run.prediction.read_text())
    summary = summarize(run.read_all_events())
    if summary.step_s is None:
        sys.exit(f"{run.path} has no measured steps")
    phases = summary.phases
    measured_s = summary.step_s.median
    return {
        "predicted_ms": round(1e3 * predicted["step_s"], 2),
        "measured_ms": round(1e3 * measured_s, 2),
        "ratio": round(predicted["step_s"] / measured_s, 3),
        "compute": [
            round(1e3 * predicted["compute_s"], 2),
            round(1e3 * (phases.get("forward", 0.0) + phases.get("backward", 0.0)), 2),
        ],
        "optimizer": [round(1e3 * predicted["optimizer_s"], 2), round(1e3 * phases.get("optimizer", 0.0), 2)],
        "other": [
            round(1e3 * predicted["other_s"], 2),
            round(1e3 * (phases.get("data", 0.0) + phases.get("other", 0.0)), 2),
        ],
        "steps": summary.steps_done,
    }


def main() -> None:
    parser = options(__doc__, steps=60, quick={"preset": "grammar", "budget": 10.0, "precision": "bf16"})
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of the probe")
    parser.add_argument("--precision", default="bf16,fp32")
    parser.add_argument("--compile", choices=("on", "off"), default="off")
    chosen = parser.parse_args()
    if not find_gpu():
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.toml"
        shoal("probe", "--on", "local:1", "--budget", chosen.budget, "--model", chosen.preset, "-o", file)
        profile = read_profile(file)
        print(json.dumps({**profile.nodes[0].gpus[0].model_dump(), "probe_s": profile.took_s}), flush=True)
        for precision in chosen.precision.split(","):
            run = RunFolder(Path(folder) / precision)
            batch = ("--global-batch", chosen.batch, "--micro-batch", chosen.batch)
            settings = (f"train.precision={precision}", f"train.compile={chosen.compile}", "train.eval_every=1000000")
            sets = [word for setting in settings for word in ("--set", setting)]
            where = ("--on", "local:1", "--device", "cuda", "--profile", file, "--out", run.path)
            shoal("train", chosen.preset, *where, "--steps", chosen.steps, *batch, *sets)
            labels = {"preset": chosen.preset, "batch": chosen.batch, "precision": precision, "compile": chosen.compile}
            print(json.dumps({**labels, **compare(run)}), flush=True)


if __name__ == "__main__":
    main()
