"""How long a simulation takes, and what it finds where others have measured.

    .venv/bin/python benchmarks/simulate.py --rounds 3

Both policies, 20 seeds each unless told otherwise, stragglers included, as `shoal simulate` does it. Prints the
seconds of each round, and each published figure beside the simulated one with its source and what was assumed, as JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

from _common import options
from _published import LLAMA_DAYS, LLAMA_STEP_S, LLAMA_STEP_TOKENS, llama_mtbf_s, validation
from shoal.tools.plan.scenario_file import ScenarioFile, simulate

CASES = {
    "1,024 nodes for a day": ScenarioFile(1024, 0.5, 4e6, straggler="lognormal:0.05"),
    "1,024 nodes for a day, each failing daily": ScenarioFile(
        1024, 0.5, 4e6, mtbf_hours=24.0, straggler="lognormal:0.05"
    ),
    "16,384 accelerators for 54 days": ScenarioFile(
        2048,
        LLAMA_STEP_S,
        LLAMA_STEP_TOKENS,
        hours=24.0 * LLAMA_DAYS,
        ranks_per_node=8,
        mtbf_hours=llama_mtbf_s() / 3600,
        straggler="lognormal:0.05",
    ),
}


def main() -> None:
    parser = options(__doc__, rounds_=3, quick={"seeds": 2})
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    took_s: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(1, chosen.rounds + 1):
        for name, case in CASES.items():
            began = time.perf_counter()
            simulate(replace(case, seeds=chosen.seeds))
            took_s[name].append(round(time.perf_counter() - began, 3))
            print(f"round {number}/{chosen.rounds}  {name:44} {took_s[name][-1]:6.2f} s", flush=True)
    rows = [row.as_dict() for row in validation(chosen.seeds)]
    medians = {name: statistics.median(seconds) for name, seconds in took_s.items()}
    print(json.dumps({"median_s": medians, "rounds_s": took_s, "published": rows}, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
