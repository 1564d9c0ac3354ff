"""A machine comes into a training with the commands that a person types, on emulated nodes."""

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

from shoal.cluster.lab.lab import Lab
from shoal.control.processes import find_processes
from shoal.runs.manage import end_processes
from tests.support.labs import standing_lab
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, shoal_command
from tests.support.runs import wait_until

INVITATION = re.compile(r"shoal join (\S+)\n.*works once: (\S+)")


class Typed:
    """A command at a node; each has a cache of its own, as machines do. `code` is what it reads on standard input."""

    def __init__(self, lab: Lab, folder: Path, node: str, *words: str | Path, code: str = "") -> None:
        self._paths = [folder / f"{node}-{words[0]}-{len(list(folder.iterdir()))}.{kind}" for kind in ("out", "err")]
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            env = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache-{node}")}
            command = lab.command(node, shoal_command(*words))
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=env)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{code}\n".encode())
        self.process.stdin.close()

    def said(self) -> str:
        return "\n".join(path.read_text() for path in self._paths)

    def invitation(self) -> tuple[str, str]:
        """The address to type, and the code that is asked for."""
        place, code = wait_until(lambda: INVITATION.findall(self.said()), 60, why=self.said)[-1]
        return place, code

    def await_words(self, words: str) -> None:
        wait_until(lambda: words in self.said(), 90, why=self.said)

    def code(self) -> int:
        return self.process.wait(200)


@contextlib.contextmanager
def typing(lab: Lab, folder: Path, *runs: Path) -> Iterator[Any]:
    typed: list[Typed] = []

    def type_at(node: str, *words: str | Path, code: str = "") -> Typed:
        typed.append(Typed(lab, folder, node, *words, code=code))
        return typed[-1]

    try:
        yield type_at
    finally:
        end_processes([found for run in runs for found in find_processes(run)])
        for each in typed:
            each.process.kill()
            each.process.wait()


def ids(run: Path, rank: int) -> list[int]:
    entered = [event for event in read_jsonl(run / f"events/rank-{rank}.jsonl") if event["event"] == "membership"]
    last: list[int] = entered[-1]["ids"]
    return last


def steps(run: Path, rank: int) -> int:
    path = run / f"events/rank-{rank}.jsonl"
    return sum(event["event"] == "step" for event in read_jsonl(path)) if path.exists() else 0


def verified(run: Path) -> dict[str, Any]:
    done = shoal("verify", run, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "sponsor", [pytest.param("node1", marks=pytest.mark.exhaustive), pytest.param("node2", marks=pytest.mark.long)]
)
def test_a_third_machine_comes_while_two_train(tmp_path: Path, sponsor: str) -> None:
    """Invited where the run was launched, or by a machine that joined it itself."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    # The delay makes a step take long enough that there is a middle of the run to come in.
    with standing_lab(3, delay="15ms") as lab, typing(lab, tmp_path, first, second, third) as type_at:
        host = type_at("node1", "host", "--steps", "200", "--out", first, *set_flags(*TINY, "train.compile=off"))
        place, code = host.invitation()
        other = type_at("node2", "join", place, "--out", second, code=code)
        wait_until(lambda: steps(first, 0) > 5, 60, why=host.said)
        door = type_at(sponsor, "host", first if sponsor == "node1" else second)
        place, code = door.invitation()
        guest = type_at("node3", "join", place, "--out", third, code=code)
        assert door.code() == 0, door.said()
        assert "node3 takes part: node1, node2, node3 train on from step " in door.said()
        assert [each.code() for each in (host, other, guest)] == [0, 0, 0], host.said() + guest.said()
    (number,) = (int(path.stem.removeprefix("rank-")) for path in (third / "events").iterdir())
    assert ids(first, 0) == ids(third, number) == [0, 1, number]
    ours, theirs, joined = verified(first), verified(third), verified(second)
    assert joined["digests"] == {"1": ours["digests"]["1"]}
    assert set(ours["digests"].values()) == set(theirs["digests"].values())
    assert (ours["elsewhere"], theirs["elsewhere"]) == ([number], [0, 1])
    assert ours["ledger"]["steps"] == theirs["ledger"]["steps"] == 200
    for run in (first, third):
        assert json.loads((run / "manifest.json").read_text())["status"] == "finished"
