"""`session.on_step`: each step once and in order, with the loss of all ranks, also after a loss and when resumed.

Exercises engine.step_callbacks, engine.loggers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.engine.session import Session
from shoal.engine.step_callbacks import StepRecord
from shoal.sync.world import World
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.sessions import make_folder, open_session
from tests.unit.test_tensorboard import read_scalars

SCRIPT = ROOT / "tests/support/scripts/followed.py"
DATA = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))


def settings(**sync: Any) -> dict[str, Any]:
    return {"train": {"steps": 10, "global_batch": 12, "checkpoint_every": 4, "pin": "off"}, "sync": sync}


def follow(world: World, path: Path, sync: dict[str, Any], stop_after: int | None, fails: bool = False) -> list[Any]:
    session: Session = open_session(world, path, settings(**sync))
    torch.manual_seed(1)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.attach(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5))
    records: list[StepRecord] = []
    session.on_step(records.append)

    @session.on_step
    def fail(record: StepRecord) -> None:
        if fails and record.step == 3:
            raise KeyError("my own mistake")

    try:
        for step in session:
            if step.number == stop_after:
                session.stop()
            with step:
                for inputs in step.batches(DATA):
                    step.backward(model(inputs).square().sum())
                step.update(mine=step.number)
    except KeyError as error:
        return [str(error), session.step]
    return [(record.step, record.loss, record.lr, record.samples, record.values) for record in records]


@pytest.mark.parametrize("sync", [{}, {"mode": "diloco", "every": 3}], ids=["every step", "rounds"])
def test_each_step_is_reported_once_in_order_also_when_resumed(sync: dict[str, Any], tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings(**sync))
    first, others = run_ranks(follow, 2, tmp_path, path, sync, 5)
    assert others == []
    first += run_ranks(follow, 2, tmp_path, path, sync, None)[0]
    ledger = [(record["step"], record["loss"]) for record in read_jsonl(path / "commits.jsonl")]
    assert [record[:2] for record in first] == ledger
    assert [step for step, *_ in first] == list(range(1, 11))
    # The rate of the step itself, and not the one that the scheduler has set after it.
    assert [record[2] for record in first] == pytest.approx([0.1] * 4 + [0.05] * 4 + [0.025] * 2)
    assert [record[3:] for record in first] == [(12, {"mine": step}) for step in range(1, 11)]


def test_an_error_in_a_function_ends_the_training(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings())
    [result] = run_ranks(follow, 1, tmp_path, path, {}, None, True)
    # Step 3 was reported in the update of step 4, which was not done.
    assert result == ["'my own mistake'", 3]


def test_the_next_main_rank_continues_where_the_lost_one_stopped(tmp_path: Path) -> None:
    run, lines = tmp_path / "run", tmp_path / "lines.jsonl"
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:3", "--out", run, SCRIPT, lines, "die")
    assert done.returncode == 0, done.stderr
    assert lines.with_suffix(".killed").exists(), "no rank was killed"
    records = read_jsonl(lines)
    ledger = read_jsonl(run / "commits.jsonl")
    assert [record["step"] for record in records] == list(range(1, 17))
    assert [record["loss"] for record in records] == [record["loss"] for record in ledger]
    assert len({record["pid"] for record in records}) > 1
    assert [record["checked"] for record in records if "checked" in record] == [4, 8, 12, 16]
    assert all(record["mine"] == record["step"] / 2 and record["step_s"] > 0 for record in records)
    files = sorted(lines.with_suffix(".board").iterdir())
    assert len(files) == len({record["pid"] for record in records})
    steps = sorted(step for file in files for step, _, _ in read_scalars(file)["loss"])
    assert steps == list(range(1, 17))
