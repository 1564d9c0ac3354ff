"""Whole trainings with outer steps through the command line: replicas agree, no sample is lost, resuming is exact.

Exercises sync.outer, `shoal train`.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shoal.records.rank_log import read_rank_logs
from shoal.run_folder import RunFolder
from tests.support.programs import TINY, events_of, read_jsonl, set_flags, shoal, steps_of, train_tiny
from tests.support.runs import ended_afterwards, front
from tests.support.waiting import wait_until

STEPS = 30
# Step 13 is inside a round of every mode, with a fragment in flight that was sent after step 12.
SAVED = 13
COMMON = (f"train.steps={STEPS}", "train.global_batch=12", "train.eval_every=10", f"train.checkpoint_every={SAVED}")
MODES: dict[str, tuple[str, ...]] = {
    "local": ("sync.mode=local", "sync.every=4"),
    "diloco": ("sync.mode=diloco", "sync.every=10"),
    "streaming": ("sync.mode=streaming", "sync.every=8", "sync.fragments=2", "sync.overlap=3"),
}
Run = tuple[str, Path, dict[str, Any]]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the same training with gradients exchanged in every step."""
    return train_tiny(tmp_path_factory.mktemp("exact") / "run", "--on", "local:2", sets=(*COMMON, "sync.inside=gloo"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("local", marks=pytest.mark.exhaustive),
        "diloco",
        pytest.param("streaming", marks=pytest.mark.long),
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    mode: str = request.param
    folder = tmp_path_factory.mktemp(mode) / "run"
    # Unequal shares, as of a fast and a slow machine.
    sets = (*COMMON, *MODES[mode], "run.weights=1/0.5")
    return mode, folder, train_tiny(folder, "--on", "local:2", sets=sets)


def test_the_training_ends_with_equal_replicas(run: Run) -> None:
    mode, folder, manifest = run
    assert (manifest["status"], manifest["sync"], manifest["byte_equivalent"]) == ("finished", mode, True)
    states = {(folder / f"state-rank-{rank}.safetensors").read_bytes() for rank in range(2)}
    assert len(states) == 1
    assert shoal("verify", folder).returncode == 0


@pytest.mark.long
def test_the_loss_is_close_to_that_of_ddp(run: Run, exact: dict[str, Any]) -> None:
    manifest = run[2]
    first = steps_of(run[1])[0]["loss"]
    assert manifest["val_loss"] < first - 0.5 * (first - exact["val_loss"])


def test_shares_are_unequal(run: Run) -> None:
    assert [events_of(run[1], "start", rank)[0]["share"] for rank in range(2)] == [8, 4]


def test_the_ledger_has_every_step_and_sample(run: Run) -> None:
    commits = read_jsonl(run[1] / "commits.jsonl")
    assert [commit["step"] for commit in commits] == list(range(1, STEPS + 1))
    assert [commit["samples"] for commit in commits] == [[12 * step, 12 * step + 12] for step in range(STEPS)]


def test_the_loss_of_the_world_is_the_same_on_every_rank(run: Run) -> None:
    logs = read_rank_logs(RunFolder.open(run[1]).read_all_events())
    ledger = [commit["loss"] for commit in read_jsonl(run[1] / "commits.jsonl")]
    assert logs[0].steps.column("loss").tolist() == logs[1].steps.column("loss").tolist() == ledger
    own = [[step["loss"] for step in steps_of(run[1], rank)] for rank in range(2)]
    for step, (zero, one) in enumerate(zip(*own, strict=True)):
        assert ledger[step] == pytest.approx((2 * zero + one) / 3)
    assert own[0] != own[1]


def test_theoretical_bytes_are_averaged_over_a_round(run: Run) -> None:
    """Use the theoretical value: the loopback counter also counts other programs."""
    mode, _, manifest = run
    every = {"local": 4, "diloco": 10, "streaming": 8}[mode]
    assert manifest["theoretical_bytes_per_step"] == pytest.approx(4 * manifest["model_params"] / every)


def test_phases_add_up_to_the_step(run: Run) -> None:
    times = ("data_s", "forward_s", "backward_s", "exposed_s", "wait_s", "optimizer_s", "other_s")
    steps = steps_of(run[1], rank=1)
    for step in steps:
        assert sum(step[name] for name in times) == pytest.approx(step["step_s"], abs=1e-5)
        assert min(step[name] for name in times) > -1e-5
    with_exchange = [step["step"] for step in steps if "allreduce_s" in step]
    every = {"local": [*range(4, 29, 4), 30], "diloco": [10, 20, 30], "streaming": [*range(7, 28, 4), 30]}
    assert with_exchange == every[run[0]]


def test_the_common_parameters_are_evaluated(run: Run) -> None:
    evaluated_steps = [event.get("common_step", event["step"]) for event in events_of(run[1], "eval")]
    assert evaluated_steps == {"local": [8, 20, 30], "diloco": [10, 20, 30], "streaming": [10, 20, 30]}[run[0]]
    losses = [[event["val_loss"] for event in events_of(run[1], "eval", rank)] for rank in range(2)]
    assert losses[0] == losses[1]


def figures(folder: Path, rank: int) -> list[tuple[Any, ...]]:
    return [tuple(step[name] for name in ("step", "loss", "grad_norm", "lr")) for step in steps_of(folder, rank)]


def back_to(folder: Path, saved: int) -> None:
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name[5:]) > saved:
            shutil.rmtree(checkpoint)


@pytest.mark.long
def test_resuming_inside_a_round_repeats_the_same_bits(run: Run, tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(run[1], first)
    state = (first / "state-rank-1.safetensors").read_bytes()
    back_to(first, SAVED)
    done = shoal("train", "--resume", first)
    assert done.returncode == 0, done.stderr
    assert f"continues after step {SAVED}" in done.stderr
    for rank in range(2):
        steps = figures(first, rank)
        assert steps[STEPS:] == steps[SAVED:STEPS]
        assert not events_of(first, "warning", rank)
    assert (first / "state-rank-1.safetensors").read_bytes() == state
    assert shoal("verify", first).returncode == 0


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param("missing", marks=pytest.mark.long),
        pytest.param("damaged", marks=pytest.mark.exhaustive),
        pytest.param("older shard", marks=pytest.mark.exhaustive),
    ],
)
def test_a_lost_shard_is_reported_and_costs_part_of_a_round(run: Run, loss: str, tmp_path: Path) -> None:
    if loss != "missing" and run[0] != "diloco":
        pytest.skip("the same for all")
    mode, folder, _ = run
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    newest = SAVED if loss != "older shard" else 2 * SAVED
    back_to(again, newest)
    part = again / "checkpoints" / f"step-{newest:08d}" / "rank-1.safetensors"
    match loss:
        case "missing":
            part.unlink()
        case "damaged":
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        case _:
            insert_older_shard(again, part)
    done = shoal("train", "--resume", again)
    assert done.returncode == 0, done.stderr
    common = {"local": 12, "diloco": 10 * (newest // 10), "streaming": 13}[mode]
    assert f"continues after step {common}" in done.stderr
    for rank in range(2):
        [warning] = events_of(again, "warning", rank)
        assert f"their common state of step {common}" in warning["seen"]
        assert "rank 1 has no part of it" in warning["why"]
    assert [step["step"] for step in steps_of(again)][STEPS:] == list(range(common + 1, STEPS + 1))
    verified = shoal("verify", again)
    assert verified.returncode == 0, verified.stdout


def insert_older_shard(run: Path, part: Path) -> None:
    """Insert the shard that rank 1 saved at an earlier step with a valid checksum: only its mark differs."""
    earlier = part.parent.parent / f"step-{SAVED:08d}"
    shutil.copy(earlier / part.name, part)
    sums = [json.loads((folder / "manifest.json").read_text()) for folder in (part.parent, earlier)]
    sums[0]["sha256"][part.name] = sums[1]["sha256"][part.name]
    (part.parent / "manifest.json").write_text(json.dumps(sums[0]))


@pytest.mark.long
def test_a_checkpoint_of_another_world_size_can_be_resumed(run: Run, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run[1], again)
    back_to(again, SAVED)
    (again / "state-rank-1.safetensors").unlink()
    config = again / "config.toml"
    config.write_text(config.read_text().replace("local:2", "local:1").replace('weights = "1/0.5"\n', ""))
    done = shoal("train", "--resume", again)
    assert done.returncode == 0, done.stderr
    [warning] = events_of(again, "warning")
    assert "it was saved by 2 ranks, now there are 1" in warning["why"]
    assert shoal("verify", again).returncode == 0


@pytest.mark.exhaustive
def test_an_interrupt_inside_a_round_stops_every_rank_at_one_step(tmp_path: Path) -> None:
    """The resumed run ends like one that was not interrupted."""
    lengths = ("train.steps=400", "train.global_batch=12", "train.eval_every=400", "train.checkpoint_every=400")
    sets = (*TINY, *lengths, "sync.mode=diloco", "sync.every=150")
    out = tmp_path / "run"
    with ended_afterwards(out), front(tmp_path, "train", "--out", out, "--on", "local:2", *set_flags(*sets)) as started:
        wait_until(lambda: len(steps_of(out, 1)) > 5, within_s=60)
        started.process.send_signal(signal.SIGINT)
        assert started.code() == 130, started.err
    done = [len(steps_of(out, rank)) for rank in range(2)]
    assert done[0] == done[1] < 400
    assert [commit["step"] for commit in read_jsonl(out / "commits.jsonl")] == list(range(1, done[0] + 1))
    again = shoal("train", "--resume", out, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["byte_equivalent"] is True
    whole = train_tiny(tmp_path / "whole", "--on", "local:2", sets=sets[len(TINY) :])
    assert whole["status"] == "finished"
    for rank in range(2):
        assert figures(out, rank) == figures(tmp_path / "whole", rank)
    states = {(folder / "state-rank-0.safetensors").read_bytes() for folder in (out, tmp_path / "whole")}
    assert len(states) == 1


@pytest.mark.long
def test_a_longer_training_continues_after_an_end_inside_a_round(run: Run, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(run[1], longer)
    done = shoal("train", "--resume", longer, "--steps", str(STEPS + 5), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["byte_equivalent"] is True
    assert not events_of(longer, "warning")


@pytest.mark.exhaustive
def test_local_steps_of_one_rank_equal_plain_training(tmp_path: Path) -> None:
    sets = (*COMMON, "train.steps=12")
    plain = train_tiny(tmp_path / "plain", "--on", "local:1", sets=sets)
    local = train_tiny(tmp_path / "local", "--on", "local:1", "--sync", "local", "--every", "4", sets=sets)
    assert figures(tmp_path / "local", 0) == figures(tmp_path / "plain", 0)
    assert local["val_loss"] == plain["val_loss"]


@pytest.mark.exhaustive
def test_accumulation_multiplies_batch_and_rate(tmp_path: Path, exact: dict[str, Any]) -> None:
    sets = (*COMMON, "train.steps=3", "train.micro_batch=6")
    manifest = train_tiny(tmp_path / "run", "--on", "local:2", "--sync", "accumulate", sets=sets)
    assert (manifest["sync"], manifest["global_batch"], manifest["micro_batch"]) == ("ddp", 48, 6)
    assert manifest["strategy"]["accumulation"] == 4
    start = events_of(tmp_path / "run", "start")[0]
    assert start["lr"] == pytest.approx(2e-3 * 48 / 16)
    assert "accumulate = 4" in (tmp_path / "run" / "config.toml").read_text()
    assert exact["global_batch"] == 12
