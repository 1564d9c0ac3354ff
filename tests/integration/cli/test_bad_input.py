"""Bad input to a training: a clear message, the right exit code, and nothing left behind.

Exercises `shoal train`, config.load, errors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import need_tool
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, shoal_command, steps_of, train_tiny

TINY_FLAGS = set_flags(*TINY)
EVERY_STEP = set_flags("train.checkpoint_every=1", "train.eval_every=1000", "train.gc_every=1000")


# Errors before any process starts


def refuse_train(out: Path, *words: str | Path, **options: Any) -> str:
    """Return the message of a command that must be refused before it creates any file."""
    done = shoal("train", "--out", out, "--steps", "2", *words, **options)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    # Leftover processes of another run on this machine may be reported first.
    assert re.search(r"^error: ", done.stderr, re.MULTILINE)
    assert "\n  next: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists(), "the folder blocks the next try"
    return done.stderr


def text_file(folder: Path, content: bytes) -> Path:
    file = folder / "text.txt"
    file.write_bytes(content)
    return file


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    message = refuse_train(tmp_path / "run", "--data", tmp_path / "no.txt")
    assert f"there is no text at {tmp_path / 'no.txt'}" in message


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_text_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "holds no text: it is empty or only whitespace" in refuse_train(
        tmp_path / "run", "--data", text_file(tmp_path, content)
    )


def test_a_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    message = refuse_train(
        tmp_path / "run", "--data", text_file(tmp_path, "She sang at the café. ".encode("latin-1") * 200)
    )
    assert "is not UTF-8: byte 0xe9 at offset 19" in message
    assert "iconv -f ISO-8859-1 -t UTF-8" in message


def test_a_corpus_shorter_than_one_batch_is_refused(tmp_path: Path) -> None:
    file = text_file(tmp_path, b"She sings.\n" * 40)
    message = refuse_train(
        tmp_path / "run", "--data", file, "--tokenizer", "byte", "--seq-len", "16", "--global-batch", "99"
    )
    assert "the training text has 24 sequences of 16 tokens, 99 are needed" in message
    assert "shorter than one batch" in message
    assert "use --global-batch 24, or more text: --data LONGER.txt" in message


def test_an_unknown_key_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[train]\nglobal_bach = 3\n")
    message = refuse_train(tmp_path / "run", "--config", file)
    assert f"unknown setting train.global_bach in {file}" in message
    assert "did you mean 'train.global_batch'?" in message


@pytest.mark.parametrize(
    ("words", "seen", "hint"),
    [
        ("gramar", "there is no preset 'gramar'", "did you mean 'grammar'?"),
        ("--set train.stesp=3", "unknown setting train.stesp", "did you mean 'train.steps'?"),
        ("--on local:0", "a world needs at least one rank", "--on local:2"),
        ("--on local:-1", "a world needs at least one rank", "--on local:2"),
        ("--on local:5 --global-batch 4", "5 ranks cannot share a global batch of 4 sequences", "--global-batch 5"),
        ("--global-batch 24 --micro-batch 5", "by 2 ranks in micro-batches of 5", "--micro-batch 4"),
        ("--tokenizer byte --set model.vocab_size=100", "the byte tokenizer has 256 tokens", "model.vocab_size"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, words: str, seen: str, hint: str) -> None:
    message = refuse_train(tmp_path / "run", *words.split())
    assert seen in message
    assert hint in message


def test_an_output_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("user data")
    done = shoal("train", "--out", tmp_path, "--steps", "2", *TINY_FLAGS)
    assert done.returncode == 2
    assert f"the output folder {tmp_path} already exists and is not empty" in done.stderr
    # There is no run to resume.
    assert "--resume" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("user data")
    done = shoal("train", "--out", tmp_path / "file", "--steps", "2", *TINY_FLAGS)
    assert done.returncode == 2
    assert f"cannot create the output folder {tmp_path / 'file'}: File exists" in done.stderr
    assert (tmp_path / "file").read_text() == "user data"


# Disks: a private file system in a mount namespace that ends with the command


def mount_prefix() -> list[str]:
    """Return a command prefix that may mount: as root, or as root of a user namespace."""
    for flags in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        prefix = [need_tool("unshare"), *flags]
        if subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True).returncode == 0:
            return prefix
    pytest.skip("the kernel does not allow mounting in a new namespace")


def run_on_tmpfs(folder: Path, options: str, *words: str | Path, then: str = "") -> subprocess.CompletedProcess[str]:
    """Run `shoal WORDS` with a tmpfs at `folder`; root ignores permission bits, but not a read-only mount."""
    unshare = mount_prefix()
    folder.mkdir()
    script = (
        f'disk=$1; shift; mount -t tmpfs -o {options} none "$disk" && {{ "$@"; code=$?; }}; {then or ":"}; exit $code'
    )
    command = [*unshare, "sh", "-c", script, "sh", str(folder), *shoal_command(*words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    done = run_on_tmpfs(tmp_path / "disk", "ro", "train", "--out", tmp_path / "disk" / "run", *TINY_FLAGS)
    assert done.returncode == 2
    assert f"error: cannot create the output folder {tmp_path / 'disk' / 'run'}: Read-only file system" in done.stderr
    assert "--out FOLDER" in done.stderr


def test_a_read_only_cache_is_refused(tmp_path: Path) -> None:
    cache = f"data.cache_dir={tmp_path / 'disk' / 'cache'}"
    done = run_on_tmpfs(tmp_path / "disk", "ro", "train", "--out", tmp_path / "run", *TINY_FLAGS, *set_flags(cache))
    assert done.returncode == 2
    assert "error: cannot write the encoded text to" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_disk_too_small_to_start_leaves_no_folder(tmp_path: Path) -> None:
    disk, left = tmp_path / "disk", tmp_path / "left"
    keep = f'cp -r "$disk"/. {left}'
    done = run_on_tmpfs(disk, "size=8k", "train", "--out", disk / "run", *TINY_FLAGS, then=keep)
    assert done.returncode == 2
    assert "error: cannot write into" in done.stderr
    assert "No space left on device" in done.stderr
    assert list(left.iterdir()) == []


@pytest.mark.long
def test_a_full_disk_damages_no_older_checkpoint(tmp_path: Path) -> None:
    """The disk has room for at most six checkpoints of 150 kB: the others and the final state fail."""
    disk, left = tmp_path / "disk", tmp_path / "left"
    settings = (*TINY_FLAGS, *EVERY_STEP, *set_flags("train.keep_checkpoints=9"))
    keep = f'cp -r "$disk"/run {left}'
    done = run_on_tmpfs(disk, "size=1m", "train", "--out", disk / "run", "--steps", "9", *settings, then=keep)
    checkpoints = sorted((left / "checkpoints").iterdir())
    events = read_jsonl(left / "events" / "rank-0.jsonl")
    warnings = [event for event in events if event["event"] == "warning" and event["error"] == "CheckpointError"]
    assert len(steps_of(left)) == 9, "the training stopped"
    assert len(checkpoints) + len(warnings) == 9
    assert [path.name for path in checkpoints] == [f"step-{number:08d}" for number in range(1, len(checkpoints) + 1)]
    assert all(is_whole(path) for path in checkpoints)
    assert 0 < done.stderr.count("warning: cannot write the checkpoint") <= len(warnings)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr.partition("error: ")[2]


def is_whole(checkpoint: Path) -> bool:
    sums = json.loads((checkpoint / "manifest.json").read_text())["sha256"]
    return all(hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == sums[name] for name in sums)


# Checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three steps on two ranks with a checkpoint after every step."""
    folder = tmp_path_factory.mktemp("bad") / "run"
    train_tiny(folder, "--steps", "3", *EVERY_STEP)
    return folder


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.long
def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_used(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    truncate(run / "checkpoints" / "step-00000003" / "model.safetensors")
    done = shoal("train", "--resume", run, "--json")
    assert done.returncode == 0, done.stderr
    assert "continues after step 2" in done.stderr
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"step-00000001", "step-00000002", "step-00000003", "step-00000003.corrupt"}
    first, again = [step for step in steps_of(run) if step["step"] == 3]
    assert first["loss"] == again["loss"]
    assert shoal("verify", run).returncode == 0


@pytest.mark.long
def test_a_resume_with_only_damaged_checkpoints_fails(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for folder in list((run / "checkpoints").iterdir()):
        truncate(folder / "model.safetensors")
    done = shoal("train", "--resume", run)
    assert done.returncode == 3
    assert f"error: no checkpoint to resume from in {run / 'checkpoints'}\n" in done.stderr
    assert "step-00000001/model.safetensors is damaged" in done.stderr
    assert {path.suffix for path in (run / "checkpoints").iterdir()} == {".corrupt"}, "a checkpoint was deleted"


@pytest.mark.long
def test_a_resume_on_another_text_is_refused(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    facts = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**facts, "digest": "0" * 64}))
    done = shoal("train", "--resume", run, "--steps", "4")
    assert done.returncode == 2
    assert f"error: the text of {run} has changed since the run began" in done.stderr


@pytest.mark.long
def test_a_damaged_cache_is_rebuilt_by_a_resume(finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    tokens = Path(json.loads((run / "data.json").read_text())["train"])
    whole = tokens.read_bytes()
    truncate(tokens)
    done = shoal("train", "--resume", run, "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert tokens.read_bytes() == whole
