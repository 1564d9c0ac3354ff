"""The public API in user scripts, and its timer and learning rate schedule.

Exercises sync.public_api.
"""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import shoal
from shoal.config.schema import TrainConfig
from shoal.control.rank_env import Placement
from shoal.cost.batch_plan import learning_rate, scaled_lr
from shoal.errors import UsageError
from shoal.sync.step_stats import StepTimer, WholeStepTimer
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "own_script.py"


@pytest.mark.parametrize(
    "launch",
    [
        [],
        pytest.param(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], marks=pytest.mark.long),
    ],
)
def test_the_example_script_runs(launch: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, *launch, str(EXAMPLE)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    ranks = 2 if launch else 1
    assert sum(line.startswith("rank") for line in done.stdout.splitlines()) == ranks
    assert done.stdout.count("step 60: loss") == 1
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.long
def test_a_world_of_one_needs_no_launcher() -> None:
    script = (
        "import torch, shoal\n"
        "world = shoal.init_distributed()\n"
        "rank, size = world\n"
        "assert (rank, size, world.backend) == (0, 1, 'gloo'), world\n"
        "assert shoal.is_main_process()\n"
        "model = shoal.wrap_for_ddp(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "shoal.barrier(); shoal.cleanup(); shoal.cleanup(); shoal.barrier()\n"
        "assert shoal.is_main_process()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_a_world_that_does_not_form_names_the_missing_rank() -> None:
    """Start only rank 0 of 2: it fails after the deadline and never trains alone."""
    script = (
        "import torch\n"
        "from shoal.cluster.node import reserve_port\n"
        "from shoal.control.rank_env import Placement\n"
        "from shoal.sync.world import join_world\n"
        "holder = reserve_port('127.0.0.1', 0)\n"
        "place = Placement(0, 2, 0, 2, master_addr='127.0.0.1', master_port=holder.getsockname()[1])\n"
        "join_world(place, torch.device('cpu'), join_timeout_s=1.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "the world did not form: rank 1 of 2 did not come within 1 s" in done.stderr


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match="no backend 'mpi'"):
        shoal.init_distributed(backend="mpi")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not set"),
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=3 does not fit"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero', not a number"),
        ({"RANK": "0"}, "WORLD_SIZE is None, not a number"),
    ],
)
def test_invalid_placement_variables_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Placement.from_env(variables)


def test_a_placement_round_trips_through_the_environment() -> None:
    place = Placement(1, 3, 1, 2, "attic", 1, "10.0.0.2", 4242, 7, False, 0, "shoal")
    assert Placement.from_env(place.to_env()) == place


def test_the_timer_covers_the_step() -> None:
    timer = StepTimer()
    timer.start()
    with timer.phase("forward"):
        time.sleep(0.02)
    with timer.phase("forward"):
        time.sleep(0.01)
    with timer.phase("backward"):
        time.sleep(0.01)
    timer.move("backward", "wait", 0.005)
    seconds = timer.finish()
    assert seconds["forward"] >= 0.03
    assert seconds["wait"] == 0.005
    assert sum(value for name, value in seconds.items() if name != "step") == pytest.approx(seconds["step"])
    timer.start()
    assert "forward" not in timer.finish()


def test_a_disabled_timer_measures_only_the_step() -> None:
    timer = WholeStepTimer()
    timer.start()
    with timer.phase("forward"):
        time.sleep(0.01)
    assert timer.finish().keys() == {"step"}


def test_the_learning_rate_warms_up_then_falls() -> None:
    train = TrainConfig(steps=100, warmup_steps=10, min_lr_fraction=0.1)
    rates = [learning_rate(step, 1.0, train) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)


def test_the_learning_rate_scales_with_the_real_batch() -> None:
    train = TrainConfig(lr=1e-3, global_batch=24, base_batch=12)
    assert scaled_lr(train, 2) == pytest.approx(2e-3)
    weak = TrainConfig(lr=1e-3, global_batch=12, base_batch=12, scaling="weak")
    assert scaled_lr(weak, 4) == pytest.approx(4e-3)
