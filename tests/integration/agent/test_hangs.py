"""A rank that hangs in the user's loop is named with its line, restarted, and given up when it hangs again.

Exercises agent.hung_ranks.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.programs import events_of, read_jsonl, shoal
from tests.support.runs import ended_afterwards

SCRIPT = """
import os
import time
from pathlib import Path

import torch
import shoal

MARK = Path(os.environ["MARK"])


def hang(number):
    if os.environ["RANK"] != "1" or number < 3 or (MARK.exists() and os.environ["ONCE"]):
        return
    MARK.touch()
    time.sleep(10000)


session = shoal.Session(steps=10**6, global_batch=8)
model = torch.nn.Linear(4, 1)
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
data = (torch.ones(64, 4), torch.ones(64, 1))
for step in session:
    with step:
        hang(step.number)
        time.sleep(0.02)
        for inputs, targets in step.batches(data):
            step.backward(((model(inputs) - targets) ** 2).sum())
        step.update()
    if step.number > 3 and session.world_size == 2:
        # Rank 1 is back.
        session.stop()
"""
LINE = SCRIPT.splitlines().index("    time.sleep(10000)") + 1


def run_loop(folder: Path, on: str, *words: str, once: bool = False) -> tuple[Path, subprocess.CompletedProcess[str]]:
    script, run = folder / "loop.py", folder / "run"
    script.write_text(SCRIPT)
    # On a lab ranks import torch, and one may be much later than the other.
    join_s = 20 if on.startswith("lab") else 8
    settings = ("--set", "sync.timeout_s=4", "--set", f"sync.join_timeout_s={join_s}")
    with ended_afterwards(run):
        words = ("run", "--on", on, "--out", str(run), *settings, *words, str(script))
        done = shoal(*words, timeout_s=170, MARK=str(folder / "mark"), ONCE="1" if once else "")
    return run, done


def notes_of(run: Path) -> list[str]:
    return [event["text"] for event in read_jsonl(run / "supervisor.jsonl") if event["event"] == "note"]


def check_named(folder: Path, run: Path) -> None:
    notes = [note for note in notes_of(run) if "keeps the others waiting" in note]
    assert len(notes) == 2, notes_of(run)
    for note in notes:
        assert ": rank 1 keeps the others waiting: it has done nothing for " in note
        assert f"since step 2. It is at {folder}/loop.py:{LINE}, in hang: time.sleep(10000)." in note
        assert note.endswith(f"The stacks of all ranks: shoal stacks {run}")
    assert "If it causes 1 more timeout, it is killed and started again (members.hung_tries)" in notes[0]
    assert "It has caused 2 timeouts and is killed and started again (members.hung_tries)" in notes[1]


@pytest.mark.parametrize("on", ["local:2", pytest.param("lab:2", marks=pytest.mark.long)])
def test_a_rank_that_hangs_once_is_named_restarted_and_finishes(on: str, tmp_path: Path) -> None:
    run, done = run_loop(tmp_path, on, once=True)
    assert done.returncode == 0, done.stderr
    check_named(tmp_path, run)
    [end] = events_of(run, "end", 1)
    assert end["step"] == events_of(run, "end", 0)[-1]["step"] > 3
    assert "none skipped or used twice" in shoal("verify", run).stdout


def check_hangs_again(folder: Path) -> None:
    _, done = run_loop(folder, "local:2", "--set", "members.hung_tries=1")
    assert done.returncode == 3, done.stderr
    assert "error: rank 1 on local hangs after step " in done.stderr
    assert f"at {folder}/loop.py:{LINE}, in hang: time.sleep(10000)" in done.stderr
    assert "--set sync.timeout_s=" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_hangs_again_ends_the_run(tmp_path: Path) -> None:
    check_hangs_again(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(10))
def test_ten_hangs_are_named_each_time(number: int, tmp_path: Path) -> None:
    run, done = run_loop(tmp_path, "local:2", once=True)
    assert done.returncode == 0, done.stderr
    check_named(tmp_path, run)
    again = tmp_path / "again"
    again.mkdir()
    check_hangs_again(again)
