"""`shoal run --measure`: unmodified scripts are measured, and run exactly as Python would run them.

Exercises `shoal run`.
"""

from __future__ import annotations

import json
import os
import re
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
        assert not any("collectives" in event for event in steps[1:]), "an exchange of DDP was counted twice"
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
    assert not any("collectives" in event for event in steps_of(run)[1:]), "a collective of the hook was counted twice"
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
    assert f"{STEPS} steps" in done.stderr
    assert "each; no exchange between the ranks was seen" in done.stderr
    assert "no exchange between the ranks was seen: the script does not use Distributed" in done.stderr
    assert "0 ms" not in done.stderr
    assert "parameters of 2 ranks at the end: DIFFERENT" in done.stderr
    assert len(steps_of(tmp_path / "run")) == STEPS
    assert shoal("verify", tmp_path / "run").returncode == 1


def measure_sample(folder: Path, name: str, *words: object) -> subprocess.CompletedProcess[str]:
    done = measure(folder, (SCRIPTS / name).read_text(), *map(str, words))
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("name", "calls"), [("sgd", 1), pytest.param("lbfgs", 4, marks=pytest.mark.long)])
def test_backward_in_the_closure_of_the_optimizer(name: str, calls: int, tmp_path: Path) -> None:
    """One call of `optimizer.step(closure)` is one step, with the all-reduces of every backward in it."""
    done = measure_sample(tmp_path, "closure_ddp.py", name)
    assert f"closure called {STEPS * calls} times" in done.stdout
    steps = steps_of(tmp_path / "run")
    assert len(steps) == STEPS
    assert all(event["exchanges"] == calls and 0 < event["allreduce_s"] < event["step_s"] for event in steps)
    # What the optimizer itself needs is not known.
    assert not any("optimizer_s" in event for event in steps)
    assert re.search(r"10 steps, .* each; all-reduce (?!0 ms)", done.stderr)


def test_fsdp2_with_a_distributed_checkpoint(tmp_path: Path) -> None:
    """The step with which the checkpoint makes the optimizer's state does not count."""
    done = measure_sample(tmp_path, "fsdp_dcp.py", tmp_path / "checkpoint")
    assert re.search(
        r"80 steps, .* each; (reduce-scatter|all-gather) .*(reduce-scatter|all-gather) .*waiting", done.stderr
    )
    steps = steps_of(tmp_path / "run")
    assert [event["step"] for event in steps] == list(range(1, 81))
    # Two layers of 33 parameters, padded: gathered for forward and for backward.
    for event in steps[1:]:
        calls = {kind: (value["calls"], value["bytes"]) for kind, value in event["collectives"].items()}
        assert calls == {"all-gather": (4, 336), "reduce-scatter": (2, 168)}
        assert all(value["waited_s"] > 0 for value in event["collectives"].values())
        assert "allreduce_s" not in event
    assert shoal("verify", tmp_path / "run").returncode == 0


@pytest.mark.parametrize("how", ["work", pytest.param("future", marks=pytest.mark.long)])
def test_the_asynchronous_collectives_of_an_optimizer(how: str, tmp_path: Path) -> None:
    done = measure_sample(tmp_path, "divided_adamw.py", how, 0.02)
    plain = shoal("run", "--on", "local:2", "--out", tmp_path / "plain", SCRIPTS / "divided_adamw.py", how, "0")
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines()), "the training itself has changed"
    run = tmp_path / "run"
    for rank in range(2):
        for event in steps_of(run, rank)[1:]:
            calls = {kind: (value["calls"], value["bytes"]) for kind, value in event["collectives"].items()}
            assert calls == {"reduce-scatter": (2, 96), "all-reduce": (2, 36), "all-gather": (2, 96)}
            assert 0 < event["allreduce_s"] == event["collectives"]["all-reduce"]["waited_s"]
            assert event["optimizer_s"] < event["step_s"] - event["tail_s"]
    # The sleep of rank 1 is a part of its own, between two collectives.
    assert all(event["ready_s"] >= 0.02 for event in steps_of(run, 1)[1:])
    waits = [row["wait_s"] for row in read_jsonl(run / "timings.jsonl") if row["rank"] == 0 and "wait_s" in row]
    assert len(waits) == 39
    assert re.search(r"40 steps, .* each; .*(all-gather|reduce-scatter) .*; waiting", done.stderr)
    verified = shoal("verify", "--json", run)
    assert (verified.returncode, json.loads(verified.stdout)["findings"]) == (0, [])
    assert json.loads((run / "manifest.json").read_text())["collectives"]["all-gather"]["calls"] == 2


EVERY_KIND = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.new_group([0, 1])
weights = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(3):
    whole, part = torch.full((4,), 1.0 + rank), torch.zeros(2)
    dist.all_reduce(whole)
    assert whole.tolist() == [3.0] * 4
    dist.all_reduce(whole, group=group, async_op=True).get_future().wait()
    dist.broadcast(whole, 0)
    dist.reduce(whole, 0)
    dist.all_to_all_single(whole, whole.clone())
    dist.reduce_scatter_tensor(part, whole)
    dist.all_gather([torch.zeros(2), torch.zeros(2)], part)
    dist.all_gather_into_tensor(whole, part)
    dist.gather(part, [torch.zeros(2), torch.zeros(2)] if rank == 0 else None)
    dist.scatter(part, [torch.zeros(2), torch.zeros(2)] if rank == 0 else None)
    group.allreduce([whole]).wait()
    dist.barrier()
    weights.grad = torch.ones(4)
    optimizer.step()
dist.destroy_process_group()
"""


def test_every_kind_of_collective_is_counted(tmp_path: Path) -> None:
    done = measure(tmp_path, EVERY_KIND)
    assert done.returncode == 0, done.stderr
    for event in steps_of(tmp_path / "run"):
        assert {kind: (value["calls"], value["bytes"]) for kind, value in event["collectives"].items()} == {
            "all-reduce": (3, 48), "broadcast": (1, 16), "reduce": (1, 16), "all-to-all": (1, 16),
            "reduce-scatter": (1, 16), "all-gather": (2, 32), "gather": (1, 16), "scatter": (1, 16), "barrier": (1, 0),
        }  # fmt: skip
        assert all(value["waited_s"] > 0 for value in event["collectives"].values())


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
