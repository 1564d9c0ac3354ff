"""`shoal run`: unmodified scripts on local ranks and on emulated nodes.

Exercises `shoal run`, launch.launcher.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import socket
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.labs import need_lab
from tests.support.paths import SCRIPTS
from tests.support.programs import shoal, shoal_command

# Scripts as in a tutorial, without shoal. All three train the same model on the same data.
SAMPLES = 120
LINE = re.compile(r"\[(\d)] rank (\d) of (\d) on (\S+): samples (\d+) loss (\S+) weights (\w+)")


def script(folder: Path, text: str) -> Path:
    file = folder / "my script.py"
    file.write_text(text)
    return file


def run_script(folder: Path, on: str, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return shoal("run", "--on", on, "--out", folder / "run", script(folder, (SCRIPTS / name).read_text()), *words)


@cache
def loss_of_one_process() -> float:
    """Return the last loss of the scripts in one process, which has every batch whole."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 48).reshape(24, 2)
    targets = inputs.prod(dim=1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 12) * 5:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[start : start + 12]), targets[start : start + 12]).backward()
        optimizer.step()
    return torch.nn.functional.mse_loss(model(inputs), targets).item()


@pytest.mark.parametrize(
    ("name", "on", "words"),
    [
        ("plain_ddp.py", "local:2", ["--epochs", "3"]),
        pytest.param("plain_ddp.py", "lab:3", ["--epochs", "3"], marks=pytest.mark.exhaustive),
        pytest.param("accelerate_train.py", "local:2", [], marks=pytest.mark.exhaustive),
        pytest.param("accelerate_train.py", "lab:3", [], marks=pytest.mark.long),
        pytest.param("fabric_train.py", "local:2", ["--devices", "2"], marks=pytest.mark.long),
        pytest.param("fabric_train.py", "lab:3", ["--num-nodes", "3"], marks=pytest.mark.exhaustive),
    ],
)
def test_an_unmodified_script_trains_in_one_world(name: str, on: str, words: list[str], tmp_path: Path) -> None:
    if on.startswith("lab"):
        need_lab()
    ranks = int(on[-1])
    hosts = [f"node{rank + 1}" for rank in range(ranks)] if on.startswith("lab") else [socket.gethostname()] * ranks
    done = run_script(tmp_path, on, name, *words)
    assert done.returncode == 0, done.stderr
    lines = sorted(match.groups() for match in LINE.finditer(done.stdout))
    expected = [(str(rank), str(rank), str(ranks), hosts[rank], str(SAMPLES // ranks)) for rank in range(ranks)]
    assert [line[:5] for line in lines] == expected
    assert len({weights for *_, weights in lines}) == 1, "replicas differ"
    # Each rank had only its share of every batch, so this holds only if they exchanged gradients.
    assert float(lines[0][5]) == pytest.approx(loss_of_one_process(), abs=2e-6)
    if name == "plain_ddp.py":
        assert done.stdout.count(f"was asked for {' '.join(words)}\n") == ranks


@pytest.mark.long
def test_fabric_gets_the_world_size(tmp_path: Path) -> None:
    """A script for three ranks that is started as two is refused at once; it would wait for a third."""
    done = run_script(tmp_path, "local:2", "fabric_train.py", "--devices", "3")
    assert done.returncode == 1
    assert "does not match the world size (2)" in done.stdout


@pytest.mark.long
def test_shoal_run_ends_with_the_exit_code_of_the_first_rank_to_fail(tmp_path: Path) -> None:
    file = script(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)\n")
    done = shoal("run", "--out", tmp_path / "run", file, timeout_s=55)
    assert done.returncode == 7
    assert "error: rank 1 on local ended with exit code 7" in done.stderr


def test_all_output_of_a_script_is_printed_and_logged(tmp_path: Path) -> None:
    """Both streams, a long line, and a last line without a newline."""
    text = "import sys\nprint('x' * 5000)\nprint('to stderr', file=sys.stderr)\nsys.stdout.write('last line')\n"
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0] " + "x" * 5000, "[0] to stderr", "[0] last line"]
    assert "last line" in (tmp_path / "run/logs/local/rank-0.log").read_text()


BAR = """
import sys, time
for percent in range(0, 101, 4):
    sys.stderr.write(f"\\r{percent}%")
    sys.stderr.flush()
    time.sleep(0.06)
sys.stderr.write("\\n")
"""


@pytest.mark.long
def test_a_progress_bar_moves_on_a_terminal(tmp_path: Path) -> None:
    terminal_fd, command_fd = pty.openpty()
    command = shoal_command("run", "--on", "local:1", "--out", tmp_path / "run", script(tmp_path, BAR))
    with subprocess.Popen(
        command, stdin=command_fd, stdout=command_fd, stderr=command_fd, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(command_fd)
        output = b""
        # Reading from a terminal that no process has open any more is an error.
        with contextlib.suppress(OSError):
            while block := os.read(terminal_fd, 1 << 16):
                output += block
        os.close(terminal_fd)
        assert process.wait(20) == 0, output
    states = re.findall(r"\[0\] (\d+)%\r\n\x1b\[1A\r\x1b\[J", output.decode())
    assert len(states) > 3, output
    assert list(map(int, states)) == sorted(map(int, states))
    assert "100%\r\nrun folder: " in output.decode(), "the last state of the bar stays as a line"


def test_a_module_runs_too(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", "-m", "platform")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[0] Linux")


@pytest.mark.parametrize("words", [("no.py",), ("-m",)])
def test_a_missing_script_or_module_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    done = shoal("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "next: " in done.stderr
    assert not (tmp_path / "runs").exists()


LOADING = """
import os, signal, tempfile, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset

batches = iter(DataLoader(TensorDataset(torch.arange(8.0)), num_workers=2))
next(batches), next(batches)
folder = Path(tempfile.gettempdir())
while len(list(folder.glob("pymp-*/listener-*"))) < 4:
    time.sleep(0.02)
(folder / f"loaded-{os.environ['RANK']}").touch()
while len(list(folder.glob("loaded-*"))) < 2:
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN)
time.sleep(600)
"""


def test_killed_ranks_leave_no_folders_of_their_loaders(tmp_path: Path) -> None:
    """Rank 1 is killed from outside, and rank 0 by its agent. The name of a socket may have 107 characters."""
    with tempfile.TemporaryDirectory() as folder:
        done = shoal("run", "--grace", "1", "--out", tmp_path / "run", script(tmp_path, LOADING), TMPDIR=folder)
        assert "rank 1 on local was killed (SIGKILL)" in done.stderr
        assert not list(Path(folder).glob("pymp-*"))
        assert {path.name for path in Path(folder).glob("loaded-*")} == {"loaded-0", "loaded-1"}
