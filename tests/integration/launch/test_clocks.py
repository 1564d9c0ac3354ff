"""A machine whose clock is wrong, or jumps, trains like any other: no deadline and no decision reads it.

Exercises agent.mesh, control.membership, launch.launcher.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.support.labs import own_clock, running_lab
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, shoal_command, steps_of
from tests.support.runs import ended_afterwards
from tests.support.waiting import wait_until

# Only the wall clock is shifted, not the monotonic one. The offset is read again with every call.
OTHER_CLOCK = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_NO_CACHE": "1"}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_clock_that_is_wrong_and_jumps_has_no_effect(tmp_path: Path) -> None:
    run, offsets = tmp_path / "run", ("+3600", "-40", "-3600", "+40")
    with running_lab(2) as lab, own_clock(lab, "node2", tmp_path / "etc", offsets[0]) as clock:
        on = ("--on", f"lab:{lab.name}", "--steps", "200", "--out", run)
        command = shoal_command("train", *on, *set_flags(*TINY, "train.checkpoint_every=50"))
        with ended_afterwards(run), (tmp_path / "output").open("wb") as output:
            training = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **OTHER_CLOCK})
            for number, offset in enumerate(offsets):
                clock.write_text(f"{offset}\n")
                wait_until(partial(has_done, run, 40 * (number + 1)), 120)
            assert training.wait(120) == 0, (tmp_path / "output").read_text()
    assert shoal("verify", run).returncode == 0
    commits = read_jsonl(run / "commits.jsonl")
    assert len({record["generation"] for record in commits}) == 1, "no rank was reported lost"
    assert len(commits) == 200
    offsets_seen = {
        round(node2_time - node1_time)
        for node1_time, node2_time in zip(times_of(run, 0), times_of(run, 1), strict=True)
    }
    assert offsets_seen >= {int(offset) for offset in offsets}, "the clock of node2 was never shifted"


def has_done(run: Path, steps: int) -> bool:
    return len(times_of(run, 1)) >= steps


def times_of(run: Path, rank: int) -> list[float]:
    return [event["time"] for event in steps_of(run, rank)]
