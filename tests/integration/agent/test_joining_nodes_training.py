"""A machine joins a training run with the commands that a user types, on emulated nodes.

Exercises runs.invite, runs.join, agent.membership.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.control.processes import find_processes
from shoal.runs.manage import end_processes
from shoal_lab.lab import Lab
from tests.support.labs import running_lab
from tests.support.programs import TINY, events_of, set_flags, shoal, shoal_command, steps_of
from tests.support.waiting import wait_until

INVITATION = re.compile(r"shoal join (\S+)[^\n]*\n.*works once: (\S+)")

SCRIPT = """
import sys, time
from pathlib import Path
import torch
import shoal
session = shoal.Session(steps=400, global_batch=12, checkpoint_every=50)
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
session.attach(model, torch.optim.SGD(model.parameters(), lr=float(sys.argv[1])))
inputs = torch.randn(60, 4)
for step in session:
    with step:
        for x, y in step.batches((inputs, inputs.sum(1, keepdim=True))):
            step.backward((model(x) - y).square().sum())
        step.update()
    # Slowly, until all machines are there.
    time.sleep(0 if Path(sys.argv[2]).exists() else 0.2)
"""


class Command:
    """Run a command at a node, which has its own cache as a machine has. `code` is its standard input."""

    def __init__(self, lab: Lab, folder: Path, node: str, *words: str | Path, code: str = "") -> None:
        self._paths = [folder / f"{node}-{words[0]}-{len(list(folder.iterdir()))}.{kind}" for kind in ("out", "err")]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            env = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache-{node}")}
            command = lab.command(node, shoal_command(*words))
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=env)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code}\n".encode())
        self.process.stdin.close()

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self._paths)

    def invitation(self) -> tuple[str, str]:
        """Return the address to type and the code to enter."""
        place, code = wait_until(lambda: INVITATION.findall(self.output()), 60, why=self.output)[-1]
        return place, code

    def await_text(self, words: str) -> None:
        wait_until(lambda: words in self.output(), 90, why=self.output)

    def code(self) -> int:
        return self.process.wait(200)


@contextlib.contextmanager
def running_commands(lab: Lab, folder: Path, *runs: Path) -> Iterator[Any]:
    started: list[Command] = []

    def run_at(node: str, *words: str | Path, code: str = "") -> Command:
        started.append(Command(lab, folder, node, *words, code=code))
        return started[-1]

    try:
        yield run_at
    finally:
        end_processes([process for run in runs for process in find_processes(run)])
        for running in started:
            running.process.kill()
            running.process.wait()


def ids(run: Path, rank: int) -> list[int]:
    last: list[int] = events_of(run, "membership", rank)[-1]["ids"]
    return last


def verify_run(run: Path) -> dict[str, Any]:
    done = shoal("verify", run, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict


def listed_runs(folder: Path) -> dict[str, tuple[str, str, int]]:
    """Return what, where and last step of each run that `shoal runs` lists."""
    listing = json.loads(shoal("runs", "--in", folder, "--json").stdout)["runs"]
    return {Path(run["run"]).name: (run["what"], run["on"], run["step"]) for run in listing}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "inviter", [pytest.param("node1", marks=pytest.mark.exhaustive), pytest.param("node2", marks=pytest.mark.long)]
)
def test_a_third_node_joins_while_two_train(tmp_path: Path, inviter: str) -> None:
    """Its inviter is the node that launched the run, or a node that joined it."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    # The delay makes the steps long enough that the third node joins before the end.
    with running_lab(3, delay="15ms") as lab, running_commands(lab, tmp_path, first, second, third) as run_at:
        host = run_at("node1", "host", "--steps", "200", "--out", first, *set_flags(*TINY, "train.compile=off"))
        place, code = host.invitation()
        other = run_at("node2", "join", place, "--out", second, code=code)
        wait_until(lambda: len(steps_of(first, 0)) > 5, 60, why=host.output)
        invite = run_at(inviter, "host", first if inviter == "node1" else second)
        place, code = invite.invitation()
        guest = run_at("node3", "join", place, "--out", third, code=code)
        assert invite.code() == 0, invite.output()
        assert "node3 takes part: node1, node2, node3 train on from step " in invite.output()
        assert [command.code() for command in (host, other, guest)] == [0, 0, 0], host.output() + guest.output()
    (number,) = (int(path.stem.removeprefix("rank-")) for path in (third / "events").iterdir())
    assert ids(first, 0) == ids(third, number) == [0, 1, number]
    first_verdict, third_verdict, second_verdict = verify_run(first), verify_run(third), verify_run(second)
    assert second_verdict["digests"] == {"1": first_verdict["digests"]["1"]}
    assert set(first_verdict["digests"].values()) == set(third_verdict["digests"].values())
    assert (first_verdict["elsewhere"], third_verdict["elsewhere"]) == ([number], [0, 1])
    assert first_verdict["ledger"]["steps"] == third_verdict["ledger"]["steps"] == 200
    listed = listed_runs(tmp_path)
    assert listed["second"] == ("grammar", "joined 10.77.0.1", 200)
    assert listed["third"] == ("grammar", f"joined 10.77.0.{inviter[-1]}", 200)
    for run in (first, third):
        assert json.loads((run / "manifest.json").read_text())["status"] == "finished"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_machines_join_the_session_of_a_script(tmp_path: Path) -> None:
    """One before it starts, one while it trains: each with its own copy of the script, for no program is sent."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(SCRIPT)
    all_there = tmp_path / "all-there"
    words = ("--script", tmp_path / "there" / "net.py", "--", "0.01", all_there)
    with running_lab(3) as lab, running_commands(lab, tmp_path, first, second, third) as run_at:
        script = tmp_path / "here" / "net.py"
        host = run_at("node1", "run", "--on", "join:2,address=10.77.0.1", "--out", first, script, "0.01", all_there)
        place, code = host.invitation()
        assert f"shoal join {place} --script net.py -- 0.01 {all_there}\n" in host.output()
        other = run_at("node2", "join", place, "--out", second, *words, code=code)
        wait_until(lambda: len(steps_of(first, 0)) > 5, 90, why=lambda: host.output() + other.output())
        invite = run_at("node1", "host", first)
        place, code = invite.invitation()
        refused = run_at("node3", "join", place, "--out", third, code=code)
        assert refused.code() == 2, refused.output()
        assert "the run to join is that of a script, net.py" in refused.output()
        guest = run_at("node3", "join", place, "--out", third, *words, code=code)
        assert invite.code() == 0, invite.output() + guest.output()
        assert "node3 takes part: node1, node2, node3 train on from step " in invite.output()
        all_there.touch()
        assert [command.code() for command in (host, other, guest)] == [0, 0, 0], host.output() + guest.output()
    (number,) = (int(path.stem.removeprefix("rank-")) for path in (third / "events").iterdir())
    assert ids(first, 0) == ids(third, number) == [0, 1, number]
    first_verdict, third_verdict = verify_run(first), verify_run(third)
    assert set(first_verdict["digests"].values()) == set(third_verdict["digests"].values())
    assert first_verdict["ledger"]["steps"] == third_verdict["ledger"]["steps"] == 400
    assert listed_runs(tmp_path)["third"] == ("net", "joined 10.77.0.1", 400)
