"""`shoal run --measure`: unmodified scripts are measured, and run exactly as Python would run them.

Exercises `shoal run`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs.test_run_script import LINE, loss_of_one_process, script
from tests.support.paths import SCRIPTS
from tests.support.programs import read_jsonl, shoal, steps_of

STEPS = 10


def measure(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    return shoal("run", "--measure", "--on", "local:2", "--out", folder / "run", script(folder, text), *words)


def end_of(run: Path, rank: int = 0) -> dict[str, object]:
    event: dict[str, object] = read_jsonl(run / "events" / f"rank-{rank}.jsonl")[-1]
    return event


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain_ddp.py", []),
        pytest.param("accelerate_train.py", [], marks=pytest.mark.long),
        pytest.param("fabric_train.py", ["--devices", "2"], marks=pytest.mark.long),
    ],
)
def test_an_unmodified_script_is_measured(name: str, words: list[str], tmp_path: Path) -> None:
    done = measure(tmp_path, (SCRIPTS / name).read_text(), *words)
    assert done.returncode == 0, done.stderr
    lines = sorted(match.groups() for match in LINE.finditer(done.stdout))
    assert float(lines[0][5]) == pytest.approx(loss_of_one_process(), abs=2e-6), "the training itself has changed"
    run = tmp_path / "run"
    for rank in range(2):
        steps = steps_of(run, rank)
        assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
        assert all(event["allreduce_s"] > 0 and event["grad_bytes"] == 33 * 4 for event in steps)
        assert end_of(run, rank)["exchanges"] == STEPS
    waits = [row["wait_s"] for row in read_jsonl(run / "timings.jsonl") if "wait_s" in row]
    assert len(waits) == 2 * (STEPS - 1)
    assert "parameters of 2 ranks at the end: equal to the bit" in done.stderr
    verified = shoal("verify", "--json", run)
    assert verified.returncode == 0, verified.stdout
    verdict = json.loads(verified.stdout)
    assert (verdict["byte_equivalent"], verdict["ranks"], verdict["findings"]) == (True, 2, [])
    assert shoal("report", run).returncode == 0
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["status"], manifest["steps"], manifest["world_size"]) == ("finished", STEPS, 2)
    assert manifest["allreduce_p50_ms"] > 0


OWN_HOOK = """
model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model.register_comm_hook(None, fp16_compress_hook)
"""
DDP_LINE = "model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)))\n"


@pytest.mark.long
def test_the_own_communication_hook_of_a_script_is_used_and_timed(tmp_path: Path) -> None:
    text = (SCRIPTS / "plain_ddp.py").read_text()
    assert DDP_LINE in text
    done = measure(tmp_path, text.replace(DDP_LINE, OWN_HOOK))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    start = read_jsonl(run / "events" / "rank-0.jsonl")[0]
    assert start["comm_hook"] == "fp16_compress_hook"
    assert all(event["allreduce_s"] > 0 for event in steps_of(run))
    losses = {match.groups()[5] for match in LINE.finditer(done.stdout)}
    assert float(losses.pop()) != pytest.approx(loss_of_one_process(), abs=1e-9), "gradients were not rounded"
    assert shoal("verify", run).returncode == 0


@pytest.mark.long
def test_ranks_that_never_exchange_are_found(tmp_path: Path) -> None:
    """With the same data they end equal: only the number of exchanges shows that each trained alone."""
    text = (SCRIPTS / "plain_ddp.py").read_text().replace("sampler=DistributedSampler(data, shuffle=False)", "")
    text = text.replace("loss = mse_loss(model(x), y)", "with model.no_sync(): loss = mse_loss(model(x), y)")
    done = measure(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "took part in no all-reduce of DDP, and so trained alone" in done.stderr
    verified = shoal("verify", tmp_path / "run")
    assert verified.returncode == 1
    assert "identical" in verified.stdout
    assert "rank 0, 1 took part in no all-reduce" in " ".join(verified.stdout.split())


@pytest.mark.long
def test_a_script_without_ddp_has_step_times_and_digests(tmp_path: Path) -> None:
    text = (SCRIPTS / "plain_ddp.py").read_text().replace(DDP_LINE, DDP_LINE.replace("DistributedDataParallel", ""))
    done = measure(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "does not use DistributedDataParallel: its exchanges are not counted" in done.stderr
    assert "parameters of 2 ranks at the end: DIFFERENT" in done.stderr
    assert len(steps_of(tmp_path / "run")) == STEPS
    assert shoal("verify", tmp_path / "run").returncode == 1


@pytest.mark.long
def test_a_script_that_trains_nothing(tmp_path: Path) -> None:
    done = measure(tmp_path, "print('hello')\n")
    assert done.returncode == 0, done.stderr
    assert "nothing was measured" in done.stderr


SHOW = """'''Shows what it was given.'''
import sys
print(__name__, __doc__, __file__, __spec__ and __spec__.name, __package__, sorted(globals()))
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals(), "torch" in sys.modules)
print(sys.stdin.read())
sys.exit(int(sys.argv[1]))
"""
FAIL = """
def outer():
    try:
        {}["key"]
    except KeyError as error:
        raise ValueError("bad news") from error
outer()
"""
SYNTAX = "x = 1\ndef (:\n"
HOOK = "import sys\nsys.excepthook = lambda kind, error, frames: print('mine', kind, frames.tb_lineno)\nint('x')\n"
CTRL_C = "import signal\nsignal.raise_signal(signal.SIGINT)\n"


@pytest.mark.parametrize("text", [SHOW, FAIL, SYNTAX, HOOK, CTRL_C, "raise SystemExit('message')\n"])
@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_runs_as_python_would_run_it(text: str, as_module: bool, tmp_path: Path) -> None:
    """Output, traceback, exit code or signal, arguments, standard input, names in `__main__`."""
    (tmp_path / "mine.py").write_text(text)
    words = ["-m", "mine", "3", "-m", "x"] if as_module else ["mine.py", "3", "-m", "x"]
    env = {**os.environ, "SHOAL_RUN": str(tmp_path)}

    def run(*prefix: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *prefix, *words], cwd=tmp_path, env=env, input="typed", capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    assert run("-P", "-m", "shoal.engine.measure") == run()
    assert not (tmp_path / "events").exists()


@pytest.mark.parametrize("words", [["missing.py"], ["-m", "missing"]])
def test_a_script_that_is_not_there(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "shoal.engine.measure", *words]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "SHOAL_RUN": "x"}, capture_output=True, text=True)
    plain = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == plain.returncode
    assert "missing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_python_without_shoal_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$2" in *shoal*) exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = shoal("run", "--measure", "--python", python, "--out", tmp_path / "run", script(tmp_path, "pass"))
    assert done.returncode == 2
    assert "has no shoal" in done.stderr
    assert not (tmp_path / "run").exists()
