"""A machine that is too slow is left out, and comes back when another one is lost; on emulated nodes.

Exercises agent.membership, control.membership, engine.balance.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shoal.control.processes import find_processes
from shoal.records.commit_log import check_ledger
from shoal.runs.manage import end_processes
from tests.support.labs import need_lab
from tests.support.programs import events_of, read_jsonl, set_flags, shoal, shoal_command
from tests.support.waiting import wait_until

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import shoal
folder = Path(sys.argv[1])
session = shoal.Session(steps=600, global_batch=12, checkpoint_every=100)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
inputs = torch.randn(60, 4)
node = os.environ["SHOAL_NODE"]
for step in session:
    if node == "node2" and (folder / "lose").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    with step:
        for x, y in step.batches((inputs, inputs.sum(1, keepdim=True))):
            # Each micro-batch takes one node ten times as long as the others, until the test is done.
            time.sleep(0 if (folder / "end").exists() else 0.1 if node == "node3" else 0.01)
            step.backward((model(x) - y).square().sum())
        step.update()
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_machine_that_is_too_slow_is_left_out_and_comes_back_when_another_is_lost(tmp_path: Path) -> None:
    need_lab()
    script, run, output = tmp_path / "slow.py", tmp_path / "run", tmp_path / "output"
    script.write_text(SCRIPT)
    settings = set_flags("train.micro_batch=1", "members.restarts=0")
    words: tuple[str | Path, ...] = (
        "--on",
        "lab:3",
        "--out",
        run,
        "--drop-slower-than",
        "0.5",
        *settings,
        script,
        tmp_path,
    )
    with output.open("wb") as file:
        process = subprocess.Popen(shoal_command("run", *words), stdout=file, stderr=file)
    try:
        [note] = wait_until(lambda: events_of(run, "note"), 120, why=output.read_text)
        assert note["text"].startswith("node3 is left out: it computes at 0.1")
        assert "which is less than 0.5 (--drop-slower-than); computing takes about" in note["text"]
        wait_until(lambda: [0, 1] in [line["members"] for line in read_jsonl(run / "commits.jsonl")], 60)
        wait_until(lambda: "node3 is left out, because it is too slow" in output.read_text(), 20)
        (tmp_path / "lose").touch()
        wait_until(lambda: events_of(run, "membership", 2)[-1]["ids"] == [0, 2], 60, why=output.read_text)
        (tmp_path / "end").touch()
        assert process.wait(120) == 0, output.read_text()
    finally:
        end_processes(find_processes(run))
        process.kill()
        process.wait()
    # It is not left out a second time: there are fewer machines than then.
    assert len(events_of(run, "note")) == 1
    ledger = read_jsonl(run / "commits.jsonl")
    assert check_ledger(ledger).ok
    assert {tuple(record["members"]) for record in ledger} >= {(0, 1, 2), (0, 1), (0, 2)}
    done = shoal("verify", run)
    assert done.returncode == 0, done.stdout + done.stderr
