"""What it costs, when nobody leaves, that anybody may: `members.on_loss=go-on` against `end`, in whole trainings.

    .venv/bin/python benchmarks/membership.py --rounds 7

Both train the same steps on the same cluster, in turns, so that noise hits them alike. Counted is the time from the
first commit to the last, everything in it: heartbeats, leases, the line to the agent, and for `go-on` and `end` alike
the comparison of replicas every 50 steps, which is also shown alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import options
from shoal.events import read_events
from shoal.run_folder import RunFolder

VARIANTS = {
    "end": ("members.on_loss=end",),
    "go-on": ("members.on_loss=go-on",),
    "end, never compared": ("members.on_loss=end", "members.digest_every=1000000"),
}
# The first steps of a process take longer, half of them at most.
_WARM_STEPS = 20


def seconds_a_step(on: str, preset: str, steps: int, sets: tuple[str, ...]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "shoal", "train", preset, "--on", on, "--steps", str(steps), "--out", str(out)]
        for each in (*sets, "train.eval_every=1000000", "train.checkpoint_every=1000000"):
            command += ["--set", each]
        subprocess.run(command, check=True, capture_output=True)
        times = {record["step"]: record["time"] for record in read_events(RunFolder(out).commits)}
        warm = min(_WARM_STEPS, steps // 2)
        return float(times[steps] - times[warm]) / (steps - warm)


def main() -> None:
    parser = options(__doc__, rounds_=5, steps=220, quick={"steps": 6}, trains=True)
    parser.add_argument("--preset", default="grammar")
    parser.add_argument("--on", default="local:2")
    chosen = parser.parse_args()
    found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for number in range(1, chosen.rounds + 1):
        for variant, sets in VARIANTS.items():
            found[variant].append(seconds_a_step(chosen.on, chosen.preset, chosen.steps, (*sets, *chosen.sets)))
        print(f"round {number}: " + ", ".join(f"{name} {1e3 * each[-1]:.2f} ms" for name, each in found.items()))
    base = statistics.median(found["end, never compared"])
    costs = {name: round(statistics.median(each) / base - 1, 4) for name, each in found.items()}
    print(json.dumps({"on": chosen.on, "cost_against_never_compared": costs, "step_ms": round(1e3 * base, 2)}))


if __name__ == "__main__":
    main()
