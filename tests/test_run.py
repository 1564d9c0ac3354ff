"""`shoal run`: other people's scripts, unmodified, on local ranks and on emulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab_checks import need_lab
from tests.programs import shoal

# What a tutorial has: nothing of shoal in it.
PLAIN_DDP = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = (model(torch.full((2, 4), float(dist.get_rank()))) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weight = next(model.parameters()).sum().item()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {os.uname().nodename}: {weight:.6f} {sys.argv[1:]}")
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> Path:
    file = folder / "my script.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize("on", ["local:2", "lab:3"])
def test_a_plain_ddp_script_runs_as_it_is(on: str, tmp_path: Path) -> None:
    if on.startswith("lab"):
        need_lab()
    ranks = int(on[-1])
    file = script(tmp_path, PLAIN_DDP)
    done = shoal("run", "--on", on, "--out", tmp_path / "run", file, "--epochs", "3", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "rank" in line]
    assert sorted(line[:3] for line in lines) == [f"[{rank}]" for rank in range(ranks)]
    assert all(line.endswith("['--epochs', '3']") for line in lines)
    assert len({line.split(": ")[1] for line in lines}) == 1, "replicas differ"
    if on.startswith("lab"):
        assert [f"on node{rank + 1}:" in line for rank, line in enumerate(sorted(lines))] == [True] * ranks


def test_it_ends_with_the_code_of_the_first_rank_to_fail(tmp_path: Path) -> None:
    file = script(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n")
    done = shoal("run", "--out", tmp_path / "run", file, timeout_s=20)
    assert done.returncode == 7
    assert "error: rank 1 on local ended with exit code 7" in done.stderr


def test_nothing_that_is_printed_is_lost(tmp_path: Path) -> None:
    """Both streams, a long line whole, and last words without a line's end."""
    text = "import sys\nprint('x' * 5000)\nprint('to stderr', file=sys.stderr)\nsys.stdout.write('last words')\n"
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0] " + "x" * 5000, "[0] to stderr", "[0] last words"]
    assert "last words" in (tmp_path / "run/logs/local/rank-0.log").read_text()


def test_a_module_runs_too(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", "-m", "platform")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0] Linux")


@pytest.mark.parametrize("words", [("no.py",), ("-m",)])
def test_what_cannot_be_started_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    done = shoal("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "next: " in done.stderr
    assert not (tmp_path / "runs").exists()
