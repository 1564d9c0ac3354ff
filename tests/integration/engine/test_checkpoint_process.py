"""Checkpoints of processes that are killed while they save.

Exercises engine.checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from shoal.engine.checkpoint import CheckpointFolder
from shoal.errors import CheckpointError
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until
from tests.unit.engine.test_checkpoint import choose, newest, parent_of_savers, save


def test_a_damaged_checkpoint_does_not_hide_another_machines_good_one(tmp_path: Path) -> None:
    assert run_ranks(choose, 2, tmp_path, tmp_path) == [(1, 2), (1, 2)]


def is_newer(path: Path, step: int) -> bool:
    return newest(path) > step


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fifty_kills_during_saves_always_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    """Kill a process that only saves within 0.1 s after a save; the next process continues in the same folder."""
    path, draw, reached, torn = tmp_path / "checkpoints", random.Random(13), 0, 0
    with parent_of_savers() as orders:
        for _ in range(50):
            orders.send((path, reached))
            saving: int = orders.recv()
            try:
                wait_until(partial(is_newer, path, reached), 30, every_s=0.001)
                time.sleep(draw.random() * 0.1)
            finally:
                os.kill(saving, signal.SIGKILL)
                assert orders.recv() == -signal.SIGKILL
            torn += len(list(path.glob(".step-*")))
            refused: list[CheckpointError] = []
            reached = CheckpointFolder(path, keep=3).load_latest(on_error=refused.append).progress.step
            assert refused == []
            assert reached == newest(path)
    assert torn, "no kill happened during a save"
    save(CheckpointFolder(path, keep=3), reached + 1)
    assert not list(path.glob(".step-*"))
