"""A rank whose own threads want more processors than there are, for real: it is named, and an ordinary one is not.

Exercises engine.stragglers, cost.causes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.events import EventTail
from shoal.run_folder import RunFolder
from tests.support.programs import shoal
from tests.support.runs import ended_afterwards
from tests.support.waiting import wait_until

# Beside the training, as many threads as asked for multiply in a loop, all on one processor.
SCRIPT = """
import os, sys, threading, time
import torch, shoal

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
session = shoal.Session(steps=1_000_000, global_batch=8, out=None)
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
session.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3))
data = torch.utils.data.TensorDataset(torch.randn(64, 256))

def multiply():
    square = torch.randn(512, 512)
    while True:
        square @ square

for _ in range(int(sys.argv[1])):
    threading.Thread(target=multiply, daemon=True).start()
for step in session:
    with step:
        for (batch,) in step.batches(data):
            step.backward(model(batch).square().sum())
        step.update()
    time.sleep(0.01)
"""
# Of 10 ms and more each: longer than a verdict waits for its evidence.
ENOUGH_STEPS = 2000


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("extra", "named"), [(16, ["oversubscription"]), (0, [])])
def test_a_rank_that_slows_itself_down_is_named(extra: int, named: list[str], tmp_path: Path) -> None:
    script, run = tmp_path / "steps.py", tmp_path / "run"
    script.write_text(SCRIPT)
    tail = EventTail(RunFolder(run).events(0))
    verdicts: list[str] = []

    def has_verdict_or_enough_steps() -> bool:
        events = tail.poll()
        verdicts.extend(event["cause"] for event in events if event["event"] == "warning" and "cause" in event)
        return bool(verdicts) or any(event.get("step", 0) >= ENOUGH_STEPS for event in events)

    with ended_afterwards(run):
        started = shoal("run", "--on", "local:1", "--threads", "1", "--out", run, "--detach", script, str(extra))
        assert started.returncode == 0, started.stderr
        wait_until(has_verdict_or_enough_steps, 300.0)
        assert verdicts == named
