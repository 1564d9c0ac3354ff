"""A session without shoal's launcher: alone and under torchrun it shows its progress, sums up, and can be reported.

Exercises engine.session.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engine.environment import choose_folder
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal

STEPS = 6


def small_example(folder: Path) -> Path:
    """Write examples/images.py with few steps and few images."""
    text = (ROOT / "examples" / "images.py").read_text()
    for long, short in (("steps=60", f"steps={STEPS}"), ("every(20)", "every(3)"), ("2000, seed", "96, seed")):
        assert long in text
        text = text.replace(long, short)
    script = folder / "images.py"
    script.write_text(text)
    return script


def run_program(folder: Path, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=folder,
        env={**outside, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def check_run(folder: Path, done: subprocess.CompletedProcess[str], ranks: int, launcher: str) -> None:
    assert done.returncode == 0, done.stderr
    [run] = (folder / "runs").iterdir()
    lines = done.stderr.splitlines()
    assert any(
        re.match(rf"step {STEPS}/{STEPS}  loss \d\.\d+  [\d,.]+ samples/s  waiting \d+%$", line) for line in lines
    )
    summary = [
        line for line in lines if line.startswith(("images: ", "speed: ", "replicas: ", "run folder: ", "next: "))
    ]
    assert summary[0].startswith(f"images: finished {STEPS} steps on {ranks} rank")
    assert f"run folder: runs/{run.name}" in summary
    assert summary[-1].endswith(f"shoal report runs/{run.name}")
    assert ("replicas:   identical to the bit" in summary) == (ranks > 1)
    # The program's stdout is its own.
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 3", f"step {STEPS}"]

    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["status"], manifest["trains"], manifest["launcher"]) == ("finished", "script", launcher)
    assert (manifest["byte_equivalent"], manifest["tokens_per_sec"]) == (True if ranks > 1 else None, {})
    assert manifest["samples_per_sec"].keys() == {str(ranks)}
    assert manifest["logged"].keys() == {"accuracy"}
    assert len((run / "timings.jsonl").read_text().splitlines()) == STEPS * ranks

    attached = shoal("attach", run)
    assert attached.returncode == 0, attached.stderr
    assert "samples/s" in attached.stdout
    verified = shoal("verify", run)
    assert (verified.returncode, "one replica: there is no other" in verified.stdout) == (0, ranks == 1)
    assert shoal("report", run).returncode == 0
    page = (run / "report.html").read_text()
    assert "samples per second" in page
    assert "accuracy" in page
    refused = shoal("sample", run)
    assert refused.returncode == 2
    assert "has no GPT of shoal" in refused.stderr


def test_a_script_alone_is_shown_and_reported(tmp_path: Path) -> None:
    check_run(tmp_path, run_program(tmp_path, small_example(tmp_path)), ranks=1, launcher="python")


@pytest.mark.long
def test_a_script_under_torchrun_is_shown_and_reported(tmp_path: Path) -> None:
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
    done = run_program(tmp_path, *words, "--rdzv-endpoint=localhost:0", small_example(tmp_path))
    check_run(tmp_path, done, ranks=2, launcher="torchrun")


@pytest.mark.long
def test_workers_that_torchrun_starts_again_continue_in_the_same_folder(tmp_path: Path) -> None:
    script = small_example(tmp_path)
    dies = 'if session.step == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n        os._exit(7)\n'
    text = script.read_text().replace("for step in session:\n", f"for step in session:\n    {dies}")
    text = text.replace(f"steps={STEPS}", f"steps={STEPS}, checkpoint_every=2")
    script.write_text(text.replace("import torch\n", "import os\n\nimport torch\n", 1))
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = run_program(tmp_path, *words, script)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").iterdir()
    commits = read_jsonl(run / "commits.jsonl")
    assert [commit["step"] for commit in commits] == list(range(1, STEPS + 1))
    starts = [event for event in read_jsonl(run / "events" / "rank-0.jsonl") if event["event"] == "start"]
    assert [event["resumed_from"] for event in starts] == [0, 4]


def test_an_attempt_without_a_checkpoint_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    def choose(attempt: int, out: Path | None = None) -> Path:
        return choose_folder("net", out, {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": str(attempt)})

    first = choose(0)
    assert re.fullmatch(r"runs/net-\d{8}-\d{6}", str(first))
    assert [choose(1), choose(2)] == [Path(f"{first}-1"), Path(f"{first}-2")]
    out = tmp_path / "out"
    (tmp_path / "out-1" / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert [choose(attempt, out).name for attempt in range(4)] == ["out", "out-1", "out-1", "out-1"]


def test_a_value_may_not_have_the_name_of_a_field(tmp_path: Path) -> None:
    script = small_example(tmp_path)
    script.write_text(script.read_text().replace("session.log(accuracy=", "session.log(rank="))
    done = run_program(tmp_path, script)
    assert done.returncode == 2
    assert "session.log cannot record a value named rank" in done.stderr
    [run] = (tmp_path / "runs").iterdir()
    attached = shoal("attach", run)
    assert attached.returncode == 2
    assert "cannot record a value named rank" in attached.stderr


@pytest.mark.long
def test_the_advice_of_an_error_names_the_run_folder(tmp_path: Path) -> None:
    script = small_example(tmp_path)
    text = script.read_text()
    assert "F.cross_entropy(model" in text
    # From the fourth step on: there is a checkpoint by then.
    broken = "(float('nan') ** (session.rank * (session.step > 3))) * F.cross_entropy(model"
    text = text.replace(f"steps={STEPS}", f"steps={STEPS}, checkpoint_every=2")
    script.write_text(text.replace("F.cross_entropy(model", broken))
    done = run_program(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script)
    assert done.returncode != 0
    [run] = (tmp_path / "runs").iterdir()
    assert f"--resume {run}" in done.stderr
