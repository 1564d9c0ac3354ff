"""Train on a fast and a slow node, with equal shares and with shares that follow their speed."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

FAST, SLOW = 1.0, 0.33
# Large enough to be divided in the ratio of the speeds.
BATCH = 32


def run(experiment: Experiment) -> Result:
    nodes = f"lab:2,cpu={FAST:g}/{SLOW:g}"
    batch = ("--threads", "1", "--global-batch", str(BATCH))
    steps = experiment.steps(24, quick=4), experiment.steps(60, quick=24)
    equal = experiment.train("equal", "--on", nodes, *batch, "--balance", "off", "--steps", steps[0])
    shared = experiment.train("shared", "--on", nodes, *batch, "--balance", "live", "--steps", steps[1])
    verified = experiment.shoal("verify", "shared", "--json", codes=(0, 1)).json()
    speeds = [run.summary.tokens_per_s or 0.0 for run in (equal, shared)]
    waits = equal.summary.ranks[0].typical
    idle = 100 * waits.get("wait", 0.0) / sum(waits.values())
    gain = speeds[1] / speeds[0]
    first, last = (read_shares(run.path)[place] for run, place in ((equal, 0), (shared, -1)))
    return Result(
        theory={"idle": 100 * (1 - SLOW / FAST), "gain": (FAST + SLOW) / (2 * SLOW)},
        measured={"idle": idle, "gain": gain},
        checks=[
            Check("equal shares: each node had half of the batch", first == [BATCH // 2] * 2, f"{first}"),
            Check(
                "shares that follow the speed: the first node had more", last[0] > last[1], f"{last}", is_timing=True
            ),
            Check("the training became at least 1.3 times as fast", gain >= 1.3, f"{gain:.2f}×", is_timing=True),
            Check(
                "the replicas are equal to the bit, and no sample was lost or used twice",
                bool(verified["byte_equivalent"] and verified["ledger"]["ok"]),
            ),
        ],
        figures={"idle": idle, "gain": gain, "shares": f"{last[0]} and {last[1]} of {BATCH}"},
        picture=Bars(
            "Tokens per second of a fast and a slow node", "tokens/s", ["equal shares", "by speed"], {"both": speeds}
        ),
    )


def read_shares(run: Path) -> list[list[int]]:
    """Return from the ledger how many samples each node had, step by step."""
    return [json.loads(line)["shares"] for line in (run / "commits.jsonl").read_text().splitlines()]
