"""The simulator against real runs: speed of each run of a kept grid, simulated from its prediction and its stragglers.

    .venv/bin/python benchmarks/plan_grid.py --keep grid -o grid.json
    .venv/bin/python benchmarks/simulate_runs.py grid
    .venv/bin/python benchmarks/simulate_runs.py                # makes a grid of its own first

Simulated: the step as predicted from the profile, without its own guess at waiting, and the slowest of N ranks drawn
from the spread of the run's own steps. Measured: tokens by the mean step of the run's second half.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import options
from shoal.errors import ConfigError
from shoal.records.manifest import read_prediction
from shoal.records.rank_log import step_time_factors
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder
from shoal.tools.plan.scenario import (
    Checkpoints,
    Failures,
    RecoveryModel,
    SimulatedCluster,
    SimulationScenario,
    fit_stragglers,
)
from shoal.tools.plan.simulation import simulate


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("grid", type=Path, nargs="?", help="the folder that plan_grid.py --keep wrote")
    chosen = parser.parse_args()
    if chosen.grid:
        compare(chosen.grid)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = ("--keep", folder, *(["--quick"] if chosen.quick else []))
        subprocess.run([sys.executable, str(Path(__file__).with_name("plan_grid.py")), *words], check=True)
        compare(Path(folder))


def compare(folder: Path) -> None:
    found = [error(RunFolder(path.parent)) for path in sorted(folder.glob("*/*/prediction.json"))]
    errors = [each for each in found if each is not None]
    sizes = [abs(each) for each in errors]
    print(
        json.dumps(
            {
                "runs": len(errors),
                "with too few steps": len(found) - len(errors),
                "median error %": round(100 * statistics.median(sizes), 1),
                "worst error %": round(100 * max(sizes), 1),
                "mean error %": round(100 * statistics.mean(errors), 1),
            }
        )
    )


def error(run: RunFolder) -> float | None:
    """None for a run with too few steps to know its spread."""
    summary, prediction = summarize(run.read_all_events()), read_prediction(run)
    assert prediction is not None
    assert summary.step_s is not None
    try:
        straggling = fit_stragglers(step_time_factors(run.read_all_events()))
    except ConfigError:
        return None
    steady_s, tokens = prediction.step_s - prediction.wait_s, (prediction.tokens_per_s or 0.0) * prediction.step_s
    cluster = SimulatedCluster(nodes=summary.world_size, step_s=lambda _: steady_s, tokens_per_step=tokens)
    scenario = SimulationScenario(
        cluster,
        Failures(float("inf")),
        RecoveryModel("live", 1.0, 1.0, 1.0, 1.0, 60.0),
        Checkpoints(None, 1.0),
        2000 * steady_s,
        straggling,
    )
    simulated = simulate(scenario, seeds=20).tokens.median / scenario.horizon_s
    return simulated * summary.step_s.mean / tokens - 1


if __name__ == "__main__":
    main()
