"""Checkpoints are saved whole or not at all, and every flipped bit is detected."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from shoal.config.schema import ModelConfig
from shoal.engine import resume
from shoal.engine.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    DamagedCheckpoint,
    Progress,
    RankShards,
    Shares,
    read_checkpoint,
    read_progress,
    read_shard,
    write_shard,
)
from shoal.engine.training_state import StateTree, TrainingState
from shoal.errors import CheckpointError
from shoal.events import FileMark
from shoal.model.gpt import GPT
from shoal.sync.world import World
from tests.support.ranks import FORKSERVER

SHAPE = ModelConfig(layers=1, heads=1, width=8, seq_len=4, vocab_size=11)


def fresh_state() -> TrainingState:
    model = GPT(SHAPE)
    return TrainingState(model, [AdamW(model.decay_groups(0.1), fused=True)])


def trained(steps: int = 3) -> TrainingState:
    torch.manual_seed(0)
    state = fresh_state()
    model, [optimizer] = state.model, state.optimizers
    for _ in range(steps):
        model(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 5]])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state


def save(folder: CheckpointFolder, step: int) -> Path:
    return folder.save(checkpoint_of(Progress(step, 10 * step)))


def checkpoint_of(progress: Progress) -> Checkpoint:
    state = trained()
    return Checkpoint(progress, state.weights(), state.optimizer_state())


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, keep=3)


def test_a_saved_checkpoint_is_loaded_unchanged(folder: CheckpointFolder) -> None:
    save(folder, 5)
    saved = trained()
    loaded = folder.load_latest()
    assert loaded.progress == Progress(5, 50)
    fresh = fresh_state()
    fresh.load_weights(loaded.model)
    fresh.load_optimizer_state(loaded.optimizer)
    for name, tensor in saved.weights().items():
        assert torch.equal(tensor, fresh.weights()[name]), name
    assert fresh.optimizer_state().values == saved.optimizer_state().values
    assert fresh.digest() == saved.digest()


def test_three_checkpoints_are_kept(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(folder, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (3, 4, 5)]


def test_the_leftover_of_a_killed_save_is_removed_and_never_loaded(folder: CheckpointFolder, tmp_path: Path) -> None:
    save(folder, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.tmp")
    assert folder.load_latest().progress.step == 1
    save(folder, 3)
    assert not list(tmp_path.glob(".step-*"))


def test_saving_the_same_step_again_replaces_it(folder: CheckpointFolder) -> None:
    assert save(folder, 1) == save(folder, 1)
    assert folder.load_latest().progress.step == 1


@pytest.mark.parametrize("damage", ["truncate", "zero", "remove", "manifest gone", "empty manifest"])
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_loaded(
    folder: CheckpointFolder, tmp_path: Path, damage: str
) -> None:
    save(folder, 1)
    newest = save(folder, 2)
    victim = newest / ("manifest.json" if "manifest" in damage else "optimizer.safetensors")
    match damage:
        case "truncate":
            victim.write_bytes(victim.read_bytes()[:-7])
        case "zero":
            victim.write_bytes(bytes(victim.stat().st_size))
        case "empty manifest":
            victim.write_text("{}")
        case _:
            victim.unlink()
    assert folder.load_latest().progress.step == 1
    assert newest.exists(), "a reader renames nothing"
    assert folder.load_latest(set_aside=True).progress.step == 1
    assert (tmp_path / "step-00000002.corrupt").is_dir()
    assert not newest.exists()


def test_any_flipped_bit_is_detected(folder: CheckpointFolder) -> None:
    """Flip two hundred random bits in all four files."""
    path = save(folder, 1)
    files = sorted(path.iterdir())
    rng = random.Random(7)
    for _ in range(200):
        victim = rng.choices(files, weights=[file.stat().st_size for file in files])[0]
        good = victim.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        victim.write_bytes(bad)
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
        victim.write_bytes(good)
    assert read_checkpoint(path).progress.step == 1


@pytest.mark.long
def test_every_flipped_bit_of_the_manifest_is_detected(folder: CheckpointFolder) -> None:
    path = save(folder, 1)
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            manifest.write_bytes(bad)
            with pytest.raises(CheckpointError):
                read_checkpoint(path)


def test_a_changed_mark_of_the_ledger_is_detected(folder: CheckpointFolder) -> None:
    folder.begin(2)
    path = folder.complete(checkpoint_of(Progress(2, 20)), ledger=FileMark(10, "ab"))
    read_checkpoint(path)
    (path / "ledger.json").write_text((path / "ledger.json").read_text().replace("10", "11"))
    with pytest.raises(DamagedCheckpoint, match=r"ledger\.json is damaged"):
        read_checkpoint(path)


def test_a_state_of_another_step_than_its_folder_is_refused(folder: CheckpointFolder, tmp_path: Path) -> None:
    """Its sums are right: they were written anew."""
    before, path = save(folder, 2), save(folder, 4)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "step": 10**12}))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="it is of step 1000000000000"):
        read_checkpoint(path)
    newest_whole = CheckpointFolder(tmp_path, keep=3).newest_whole()
    assert newest_whole is not None
    assert newest_whole.step == 2
    assert before.is_dir()


def test_a_folder_with_only_damaged_checkpoints_is_an_error(folder: CheckpointFolder) -> None:
    (save(folder, 1) / "state.json").write_text("not json")
    with pytest.raises(CheckpointError, match="no checkpoint to resume from") as caught:
        folder.load_latest()
    assert "state.json is damaged" in caught.value.why


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        CheckpointFolder(tmp_path / "nothing", keep=3).load_latest()


def test_a_checkpoint_of_another_model_is_refused_with_the_tensor_name(folder: CheckpointFolder) -> None:
    save(folder, 1)
    other = GPT(SHAPE.model_copy(update={"width": 16}))
    with pytest.raises(CheckpointError, match=r"model\.token\.weight"):
        TrainingState(other).load_weights(folder.load_latest().model)


def test_a_checkpoint_of_another_format_is_skipped_and_kept(folder: CheckpointFolder) -> None:
    """A later version of shoal may have written it."""
    save(folder, 1)
    newest = save(folder, 2)
    manifest = newest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert folder.load_latest(set_aside=True).progress.step == 1
    assert newest.exists()


# Shards of ranks

SHARDS = RankShards(ranks=2, mark=7, step=4, cursor=40, in_flight=1)


def save_with_shards(folder: CheckpointFolder, step: int, mark: int = 7) -> Path:
    folder.begin(step)
    for rank in range(2):
        write_shard(
            folder.unfinished(step), rank, StateTree({"model.w": torch.full((3,), float(rank))}, {"rank": rank}), mark
        )
    tensors = {"model.w": torch.ones(3)}
    return folder.complete(Checkpoint(Progress(step, 10 * step), tensors, StateTree({}, None), SHARDS))


def test_saved_shards_are_loaded_unchanged(folder: CheckpointFolder) -> None:
    path = save_with_shards(folder, 5)
    assert folder.load_latest().shards == SHARDS
    shards = [read_shard(path, rank, 7) for rank in range(2)]
    assert [shard.tensors["model.w"].tolist() for shard in shards] == [[0.0] * 3, [1.0] * 3]
    assert [shard.values for shard in shards] == [{"rank": 0}, {"rank": 1}]


def test_any_flipped_bit_of_a_shard_is_detected(folder: CheckpointFolder) -> None:
    path = save_with_shards(folder, 5)
    victim = path / "rank-1.safetensors"
    good = victim.read_bytes()
    for position in range(len(good)):
        victim.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            read_shard(path, 1, 7)
    assert read_checkpoint(path).progress.step == 5, "the files that all ranks share are undamaged"


def test_a_shard_of_another_save_or_a_missing_one_is_refused(folder: CheckpointFolder) -> None:
    path = save_with_shards(folder, 5, mark=8)
    with pytest.raises(CheckpointError, match="another save"):
        read_shard(path, 0, 7)
    with pytest.raises(CheckpointError, match=r"rank-2\.safetensors is missing"):
        read_shard(path, 2, 7)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_shard(path, 0, 8)


def test_a_shard_that_cannot_be_written_is_an_error(folder: CheckpointFolder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="part of rank 3"):
        write_shard(tmp_path / "nowhere", 3, StateTree({}, None), 7)


def test_newer_checkpoints_are_set_aside(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (3, 5, 7):
        save(folder, step)
    folder.set_aside_newer(3)
    assert folder.load_latest().progress.step == 3
    assert {path.name for path in tmp_path.iterdir() if path.name.endswith("superseded")} == {
        "step-00000005.superseded",
        "step-00000007.superseded",
    }


def test_the_shared_checkpoints_of_an_abandoned_lineage_are_kept(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder.save(checkpoint_of(Progress(step, 10 * step, "1-0", "1-0")))
    folder.set_aside_lineage("1-0", after=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001", "step-00000002", "step-00000003.abandoned",
    ]  # fmt: skip


def test_only_as_many_abandoned_checkpoints_are_kept_as_configured(folder: CheckpointFolder, tmp_path: Path) -> None:
    """A run whose machines fork and rejoin for weeks must not fill the disk."""
    for step in range(1, 8):
        folder.save(checkpoint_of(Progress(step, 10 * step, "1-0", f"{step}-0")))
        folder.set_aside_lineage(f"{step}-0", after=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}.abandoned" for step in (5, 6, 7)]


@contextmanager
def parent_of_savers() -> Iterator[Connection]:
    """Start a process that has its imports done and forks a saving process for each order."""
    orders, child_end = FORKSERVER.Pipe()
    parent = FORKSERVER.Process(target=fork_savers, args=(child_end,))
    parent.start()
    child_end.close()
    try:
        yield orders
        orders.send(None)
        parent.join(10)
    finally:
        parent.kill()
        parent.join()
        parent.close()
        orders.close()


def fork_savers(orders: Connection) -> None:
    """Answer each order with the pid of the saving process, then with its exit code."""
    while order := orders.recv():
        pid = os.fork()
        if pid == 0:
            save_forever(*order)
        orders.send(pid)
        orders.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def save_forever(path: Path, step: int) -> None:
    folder = CheckpointFolder(path, keep=3)
    state = trained()
    while True:
        step += 1
        folder.save(Checkpoint(Progress(step, 10 * step), state.weights(), state.optimizer_state()))


def newest(path: Path) -> int:
    return max((int(entry.name[5:13]) for entry in path.glob("step-????????")), default=0)


# Power failures and kills


def test_every_file_is_synced_before_the_rename(folder: CheckpointFolder, tmp_path: Path, monkeypatch: Any) -> None:
    operations: list[str] = []
    sync, rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        operations.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().relative_to(tmp_path)}")
        sync(fd)

    def recorded_rename(path: Path, target: Path) -> Path:
        operations.append(f"rename {path.name} {target.name}")
        return rename(path, target)

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=1)
    folder.begin(3)
    folder.complete(checkpoint_of(Progress(3, 30)), ledger=FileMark(7, "ab"))
    hidden = "checkpoints/.step-00000003.tmp"
    files = ("model.safetensors", "optimizer.safetensors", "state.json", "ledger.json", "manifest.json")
    rename_index = operations.index("rename .step-00000003.tmp step-00000003")
    assert {f"sync {hidden}/{name}" for name in files} | {f"sync {hidden}"} <= set(operations[:rename_index])
    assert operations[rename_index + 1 :] == ["sync checkpoints"]
    mark = json.loads((tmp_path / "checkpoints" / "step-00000003" / "ledger.json").read_text())
    assert mark == {"size": 7, "sha256": "ab"}


@pytest.mark.parametrize("broken_at", [".step-00000003.tmp", "step-00000003"])
def test_a_kill_between_two_renames_leaves_the_only_checkpoint(
    tmp_path: Path, monkeypatch: Any, broken_at: str
) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 3)
    rename = Path.rename

    def interrupted_rename(path: Path, target: Path) -> Path:
        if path.name == broken_at:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted_rename)
    with pytest.raises(KeyboardInterrupt):
        save(folder, 3)
    monkeypatch.undo()
    reopened = CheckpointFolder(tmp_path, keep=1)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert reopened.load_latest().progress.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == before, (
        "a reader renames nothing: a training may be writing"
    )
    save(reopened, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_newest_whole_skips_a_checkpoint_with_a_wrong_checksum(folder: CheckpointFolder, tmp_path: Path) -> None:
    for step in (1, 2):
        save(folder, step)
    newest = tmp_path / "step-00000002" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    errors: list[str] = []
    whole = folder.newest_whole(lambda error: errors.append(error.seen))
    assert whole == Progress(1, 10)
    assert errors == [f"{newest} is damaged: its SHA-256 is not the one written"]
    assert (tmp_path / "step-00000002.corrupt").is_dir()


def choose(world: World, folders: Path) -> tuple[int, int]:
    """Choose a checkpoint of two machines: the first has a damaged one of step 3 and one of step 1, the second has one
    of step 2."""
    own = CheckpointFolder(folders / str(world.rank), keep=3)
    for step in (1, 3) if world.rank == 0 else (2,):
        save(own, step)
    if world.rank == 0:
        (folders / "0" / "step-00000003" / "optimizer.safetensors").write_bytes(b"damaged")
    recorder: Any = SimpleNamespace(warn=lambda error: None)
    world = replace(world, keeps_files=True)
    newest = resume.find_newest(world, recorder, own)
    source, kept = resume.gather_checkpoints(world, own, "", newest)
    return source, kept[source].progress.step


def test_the_shares_of_the_next_step_are_saved(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    shares = Shares(4, (0, 2), (3, 1), {0: 1.0, 2: 0.33})
    folder.save(checkpoint_of(Progress(5, 50, shares=shares)))
    assert folder.load_latest().progress == Progress(5, 50, shares=shares)


def test_shares_of_older_checkpoints_were_counts_of_micro_batches() -> None:
    older = {"micro_batch": 4, "ids": [0, 2], "micro_batches": [3, 1], "speeds": {"0": 1.0, "2": 0.33}}
    progress = read_progress({"step": 5, "cursor": 50, "shares": older})
    assert progress.shares == Shares(4, (0, 2), (12, 4), {0: 1.0, 2: 0.33})


@pytest.mark.parametrize("wrong", [{"shares": [3]}, {"shares": [3, 0]}, {"speeds": {"0": 0.0}}])
def test_shares_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    shares = {"micro_batch": 4, "ids": [0, 2], "shares": [12, 4], "speeds": {"0": 1.0, "2": 0.5}, **wrong}
    with pytest.raises(ValueError, match="these are no shares"):
        read_progress({"step": 5, "cursor": 50, "shares": shares})
