"""`shoal verify` on damaged run folders: every kind of damage is detected, reported with its file, and exits with 1.

Two real runs are made once: an uninterrupted one, and one with a killed rank that was resumed. Every test damages a
copy of one of them.

Exercises `shoal verify`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file, save_file

from shoal.cli.main import run
from shoal.records import verify as reading
from shoal.run_folder import RunFolder
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, steps_of
from tests.support.runs import ended_afterwards, parts_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SETTINGS = set_flags(*TINY, "train.compile=off", "train.checkpoint_every=20", "train.eval_every=1000")
STEPS = 60


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two ranks for sixty steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    done = shoal("train", "--out", folder, "--steps", str(STEPS), *SETTINGS, timeout_s=180)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train another run of the same shape with another seed."""
    folder = tmp_path_factory.mktemp("other") / "run"
    words = ("--steps", str(STEPS), *SETTINGS, "--set", "train.seed=7")
    assert shoal("train", "--out", folder, *words, timeout_s=180).returncode == 0
    return folder


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill a rank while the other continues, then kill all processes, and resume the run to its end."""
    folder = tmp_path_factory.mktemp("eventful") / "run"
    with ended_afterwards(folder):
        assert shoal("train", "--detach", "--out", folder, "--steps", "1000", *SETTINGS).returncode == 0
        wait_until(lambda: len(steps_of(folder)) >= 40, 90)
        os.kill(parts_of(folder)["rank-1"].pid, signal.SIGKILL)
        wait_until(lambda: len(_generations(folder)) >= 2, 90)
        for process in parts_of(folder).values():
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not parts_of(folder), 20)
    verdict = verify(folder)
    assert verdict.exit_code == 0, f"killed and not yet resumed: {verdict.output}"
    assert "unfinished: verified up to step" in verdict.output
    # This makes sure that some steps are done again.
    shutil.rmtree(newest_checkpoint(folder))
    last = read_jsonl(folder / "commits.jsonl")[-1]["step"]
    done = shoal("train", "--resume", folder, "--steps", str(last + STEPS), timeout_s=240)
    assert done.returncode == 0, done.stderr
    return folder


def _generations(folder: Path) -> set[str]:
    return {str(record.get("generation")) for record in read_jsonl(folder / "commits.jsonl")}


class Verdict(NamedTuple):
    exit_code: int
    output: str


def verify(folder: Path) -> Verdict:
    """Run `shoal verify`."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        code = run(["verify", str(folder)], debug=False)
    return Verdict(code, output.getvalue())


# Ways to damage a run folder. Every function returns the file that the message must name.

Harm = Callable[[Path, Path], str]
LEDGER = "commits.jsonl"
HARMS: dict[str, Harm] = {}


def harm(function: Harm) -> Harm:
    HARMS[function.__name__] = function
    return function


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def edit_line(path: Path, number: int, **changes: Any) -> None:
    lines = lines_of(path)
    lines[number] = json.dumps(json.loads(lines[number]) | changes, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def keep_lines(run: Path, name: str, chosen: slice) -> str:
    path = run / name
    path.write_bytes(b"".join(lines_of(path)[chosen]))
    return name


def drop_events(run: Path, name: str, kind: str) -> str:
    path = run / name
    path.write_bytes(b"".join(line for line in lines_of(path) if json.loads(line)["event"] != kind))
    return name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


def newest_checkpoint(run: Path) -> Path:
    return max(run.glob("checkpoints/step-????????"))


def relative(run: Path, path: Path) -> str:
    return str(path.relative_to(run))


@harm
def ledger_loses_its_start(run: Path, other: Path) -> str:
    return keep_lines(run, LEDGER, slice(10, None))


@harm
def ledger_loses_its_middle(run: Path, other: Path) -> str:
    lines = lines_of(run / LEDGER)
    (run / LEDGER).write_bytes(b"".join(lines[:20] + lines[30:]))
    return LEDGER


@harm
def ledger_loses_its_end(run: Path, other: Path) -> str:
    return keep_lines(run, LEDGER, slice(None, 40))


@harm
def ledger_loses_its_last_line(run: Path, other: Path) -> str:
    return keep_lines(run, LEDGER, slice(None, -1))


@harm
def ledger_loses_one_line(run: Path, other: Path) -> str:
    lines = lines_of(run / LEDGER)
    (run / LEDGER).write_bytes(b"".join(lines[:25] + lines[26:]))
    return LEDGER


@harm
def ledger_has_a_line_twice(run: Path, other: Path) -> str:
    lines = lines_of(run / LEDGER)
    (run / LEDGER).write_bytes(b"".join([*lines[:26], lines[25], *lines[26:]]))
    return LEDGER


@harm
def ledger_has_its_last_line_twice(run: Path, other: Path) -> str:
    with (run / LEDGER).open("ab") as file:
        file.write(lines_of(run / LEDGER)[-1])
    return LEDGER


@harm
def ledger_has_two_lines_swapped(run: Path, other: Path) -> str:
    lines = lines_of(run / LEDGER)
    lines[25], lines[26] = lines[26], lines[25]
    (run / LEDGER).write_bytes(b"".join(lines))
    return LEDGER


@harm
def ledger_line_has_another_step(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, step=700)
    return LEDGER


@harm
def ledger_line_has_other_samples(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, samples=[0, 16])
    return LEDGER


@harm
def ledger_line_has_fewer_samples(run: Path, other: Path) -> str:
    first, end = json.loads(lines_of(run / LEDGER)[-1])["samples"]
    edit_line(run / LEDGER, -1, samples=[first, end - 1])
    return LEDGER


@harm
def ledger_line_has_other_shares(run: Path, other: Path) -> str:
    shares = json.loads(lines_of(run / LEDGER)[25])["shares"]
    edit_line(run / LEDGER, 25, shares=[shares[0] + 1, *shares[1:]])
    return LEDGER


@harm
def ledger_line_has_an_empty_share(run: Path, other: Path) -> str:
    shares = json.loads(lines_of(run / LEDGER)[-1])["shares"]
    edit_line(run / LEDGER, -1, shares=[sum(shares), *(0 for _ in shares[1:])])
    return LEDGER


@harm
def ledger_line_has_another_loss(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, loss=1.0)
    return LEDGER


@harm
def ledger_line_has_another_member(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, members=[0, 1, 5])
    return LEDGER


@harm
def ledger_line_lacks_a_member(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, members=[0])
    return LEDGER


@harm
def ledger_line_has_another_generation(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, generation="1-9")
    return LEDGER


@harm
def ledger_line_has_another_lineage(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, lineage="1-9")
    return LEDGER


@harm
def ledger_line_has_another_time(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, time=1.0)
    return LEDGER


@harm
def ledger_line_is_no_step(run: Path, other: Path) -> str:
    edit_line(run / LEDGER, 25, step="x")
    return LEDGER


@harm
def ledger_claims_an_abandoned_lineage(run: Path, other: Path) -> str:
    """Claim the last lineage: an earlier one may have been superseded from before step 30."""
    lineage = json.loads(lines_of(run / LEDGER)[-1])["lineage"]
    with (run / LEDGER).open("a") as file:
        file.write(json.dumps({"abandoned": lineage, "standing": "9-0", "after": 30}) + "\n")
    return LEDGER


@harm
def ledger_is_empty(run: Path, other: Path) -> str:
    (run / LEDGER).write_bytes(b"")
    return LEDGER


@harm
def ledger_is_missing(run: Path, other: Path) -> str:
    (run / LEDGER).unlink()
    return LEDGER


@harm
def ledger_is_garbage(run: Path, other: Path) -> str:
    (run / LEDGER).write_bytes(random.Random(1).randbytes(5000))
    return LEDGER


@harm
def ledger_has_garbage_inside(run: Path, other: Path) -> str:
    lines = lines_of(run / LEDGER)
    (run / LEDGER).write_bytes(b"".join([*lines[:25], b"\xff\x00garbage\n", *lines[25:]]))
    return LEDGER


@harm
def ledger_ends_with_half_a_line(run: Path, other: Path) -> str:
    (run / LEDGER).write_bytes((run / LEDGER).read_bytes()[:-30])
    return LEDGER


@harm
def ledger_ends_with_zeros(run: Path, other: Path) -> str:
    """Append what a power cut leaves of bytes that never reached the disk."""
    content = (run / LEDGER).read_bytes()
    (run / LEDGER).write_bytes(content[:2000] + bytes(len(content) - 2000))
    return LEDGER


@harm
def ledger_is_of_another_run(run: Path, other: Path) -> str:
    shutil.copy(other / LEDGER, run / LEDGER)
    return LEDGER


@harm
def first_state_is_cut(run: Path, other: Path) -> str:
    path = run / "state-rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


@harm
def second_state_is_cut(run: Path, other: Path) -> str:
    path = run / "state-rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    return path.name


@harm
def first_state_is_missing(run: Path, other: Path) -> str:
    (run / "state-rank-0.safetensors").unlink()
    return "state-rank-0.safetensors"


@harm
def second_state_is_missing(run: Path, other: Path) -> str:
    (run / "state-rank-1.safetensors").unlink()
    return "state-rank-1.safetensors"


@harm
def first_state_has_a_flipped_bit(run: Path, other: Path) -> str:
    flip(run / "state-rank-0.safetensors")
    return "state-rank-0.safetensors"


@harm
def second_state_has_a_flipped_bit(run: Path, other: Path) -> str:
    flip(run / "state-rank-1.safetensors")
    return "state-rank-1.safetensors"


@harm
def both_states_have_the_same_flipped_bit(run: Path, other: Path) -> str:
    for rank in (0, 1):
        flip(run / f"state-rank-{rank}.safetensors")
    return "state-rank-0.safetensors"


@harm
def both_states_are_of_another_run(run: Path, other: Path) -> str:
    for rank in (0, 1):
        shutil.copy(other / f"state-rank-{rank}.safetensors", run)
    return "state-rank-1.safetensors"


@harm
def both_states_are_of_an_earlier_step(run: Path, other: Path) -> str:
    earlier = min(run.glob("checkpoints/step-????????"))
    tensors = load_file(earlier / "model.safetensors") | load_file(earlier / "optimizer.safetensors")
    for rank in (0, 1):
        save_file(tensors, run / f"state-rank-{rank}.safetensors")
    return "state-rank-0.safetensors"


@harm
def both_states_have_another_tensor_name(run: Path, other: Path) -> str:
    for rank in (0, 1):
        path = run / f"state-rank-{rank}.safetensors"
        tensors = load_file(path)
        name = min(tensors)
        tensors[name + ".old"] = tensors.pop(name)
        save_file(tensors, path)
    return "state-rank-0.safetensors"


@harm
def a_state_of_no_rank_is_there(run: Path, other: Path) -> str:
    shutil.copy(run / "state-rank-0.safetensors", run / "state-rank-7.safetensors")
    return "state-rank-7.safetensors"


@harm
def checkpoint_model_has_a_flipped_bit(run: Path, other: Path) -> str:
    path = newest_checkpoint(run) / "model.safetensors"
    flip(path)
    return relative(run, path)


@harm
def checkpoint_optimizer_is_missing(run: Path, other: Path) -> str:
    path = newest_checkpoint(run) / "optimizer.safetensors"
    path.unlink()
    return relative(run, path)


@harm
def checkpoint_state_is_edited(run: Path, other: Path) -> str:
    path = newest_checkpoint(run) / "state.json"
    edit_json(path, cursor=1)
    return relative(run, path)


@harm
def checkpoint_manifest_is_edited(run: Path, other: Path) -> str:
    path = newest_checkpoint(run) / "manifest.json"
    sums = json.loads(path.read_text())["sha256"]
    edit_json(path, sha256=sums | {"model.safetensors": "0" * 64})
    return relative(run, path.with_name("model.safetensors"))


@harm
def checkpoint_manifest_is_missing(run: Path, other: Path) -> str:
    path = newest_checkpoint(run) / "manifest.json"
    path.unlink()
    return relative(run, path)


@harm
def newest_checkpoint_is_missing(run: Path, other: Path) -> str:
    path = newest_checkpoint(run)
    shutil.rmtree(path)
    return relative(run, path)


@harm
def older_checkpoint_has_a_flipped_bit(run: Path, other: Path) -> str:
    path = min(run.glob("checkpoints/step-????????")) / "model.safetensors"
    flip(path)
    return relative(run, path)


@harm
def checkpoint_is_of_another_run(run: Path, other: Path) -> str:
    path = newest_checkpoint(run)
    shutil.rmtree(path)
    shutil.copytree(newest_checkpoint(other), path)
    return LEDGER


@harm
def first_events_are_missing(run: Path, other: Path) -> str:
    (run / "events" / "rank-0.jsonl").unlink()
    return "events/rank-0.jsonl"


@harm
def second_events_are_missing(run: Path, other: Path) -> str:
    (run / "events" / "rank-1.jsonl").unlink()
    return "events/rank-1.jsonl"


@harm
def events_folder_is_empty(run: Path, other: Path) -> str:
    shutil.rmtree(run / "events")
    (run / "events").mkdir()
    return "events"


@harm
def events_lose_their_end(run: Path, other: Path) -> str:
    return keep_lines(run, "events/rank-1.jsonl", slice(None, 30))


@harm
def events_lose_their_middle(run: Path, other: Path) -> str:
    path = run / "events" / "rank-1.jsonl"
    lines = lines_of(path)
    path.write_bytes(b"".join(lines[:20] + lines[25:]))
    return "events/rank-1.jsonl"


@harm
def events_are_garbled(run: Path, other: Path) -> str:
    path = run / "events" / "rank-1.jsonl"
    lines = lines_of(path)
    lines[20] = lines[20][:40] + b"\x00\x01" + lines[20][42:]
    path.write_bytes(b"".join(lines))
    return "events/rank-1.jsonl"


@harm
def events_are_of_another_rank(run: Path, other: Path) -> str:
    shutil.copy(run / "events" / "rank-0.jsonl", run / "events" / "rank-1.jsonl")
    return "events/rank-1.jsonl"


@harm
def end_event_is_removed(run: Path, other: Path) -> str:
    return drop_events(run, "events/rank-1.jsonl", "end")


@harm
def both_end_events_are_removed(run: Path, other: Path) -> str:
    drop_events(run, "events/rank-0.jsonl", "end")
    return drop_events(run, "events/rank-1.jsonl", "end")


@harm
def digest_event_is_removed(run: Path, other: Path) -> str:
    return drop_events(run, "events/rank-0.jsonl", "digest")


@harm
def manifest_has_other_steps(run: Path, other: Path) -> str:
    edit_json(run / "manifest.json", steps=30)
    return "manifest.json"


@harm
def manifest_has_another_loss(run: Path, other: Path) -> str:
    edit_json(run / "manifest.json", final_loss=0.5)
    return "manifest.json"


@harm
def manifest_is_broken(run: Path, other: Path) -> str:
    (run / "manifest.json").write_text("{")
    return "manifest.json"


@harm
def manifest_is_missing(run: Path, other: Path) -> str:
    (run / "manifest.json").unlink()
    return "manifest.json"


def _edit_config(run: Path, old: str, new: str) -> str:
    text = (run / "config.toml").read_text()
    assert old in text
    (run / "config.toml").write_text(text.replace(old, new))
    return "config.toml"


@harm
def config_has_another_batch(run: Path, other: Path) -> str:
    return _edit_config(run, "global_batch = 16", "global_batch = 32")


@harm
def config_has_other_steps(run: Path, other: Path) -> str:
    return _edit_config(run, "\nsteps = ", "\nsteps = 9")


@harm
def config_has_another_seed(run: Path, other: Path) -> str:
    return _edit_config(run, "seed = 35000", "seed = 1")


@harm
def config_is_broken(run: Path, other: Path) -> str:
    (run / "config.toml").write_text("[train\n")
    return "config.toml"


@harm
def journal_has_garbage(run: Path, other: Path) -> str:
    with (run / "agents" / "local.jsonl").open("ab") as file:
        file.write(b"\x00\x00\x00\n")
    return "agents/local.jsonl"


@harm
def supervisor_has_garbage(run: Path, other: Path) -> str:
    lines = lines_of(run / "supervisor.jsonl")
    (run / "supervisor.jsonl").write_bytes(b"".join([lines[0], b"{{{\n", *lines[1:]]))
    return "supervisor.jsonl"


@harm
def supervisor_is_emptied(run: Path, other: Path) -> str:
    return keep_lines(run, "supervisor.jsonl", slice(0))


@harm
def supervisor_is_missing(run: Path, other: Path) -> str:
    (run / "supervisor.jsonl").unlink()
    return "supervisor.jsonl"


@harm
def journal_is_emptied(run: Path, other: Path) -> str:
    return keep_lines(run, "agents/local.jsonl", slice(0))


@harm
def all_journals_are_missing(run: Path, other: Path) -> str:
    shutil.rmtree(run / "agents")
    return "agents/local.jsonl"


def test_at_least_thirty_kinds_of_damage_are_tested() -> None:
    assert len(HARMS) >= 30


@pytest.mark.parametrize("name", sorted(HARMS))
@pytest.mark.parametrize("kind", ["plain", "eventful"])
def test_damage_is_detected(kind: str, name: str, plain: Path, eventful: Path, other: Path, tmp_path: Path) -> None:
    run = shutil.copytree(plain if kind == "plain" else eventful, tmp_path / "run")
    file = HARMS[name](run, other)
    verdict = verify(run)
    assert verdict.exit_code == 1, verdict.output
    assert any(file in line and line.startswith("wrong") for line in verdict.output.splitlines()), verdict.output
    again = verify(run)
    assert again.exit_code == 1, f"the first verify has hidden the damage: {again.output}"


# Changes that are not damage.


@pytest.mark.parametrize("kind", ["plain", "eventful"])
def test_an_undamaged_run_passes(kind: str, plain: Path, eventful: Path, tmp_path: Path) -> None:
    original = plain if kind == "plain" else eventful
    assert verify(original).exit_code == 0, verify(original).output
    copy = shutil.copytree(original, tmp_path / "moved" / "elsewhere")
    (copy / "notes.txt").write_text("user data")
    (copy / "checkpoints" / "README").write_text("user data")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    verdict = verify(copy)
    assert verdict.exit_code == 0, verdict.output
    assert "wrong" not in verdict.output
    assert "identical: 2 replicas" in verdict.output
    assert "complete: " in verdict.output


def test_redone_steps_are_counted_and_pass(eventful: Path) -> None:
    verdict = verify(eventful)
    assert verdict.exit_code == 0
    assert "redone" in verdict.output
    assert "generations" in verdict.output


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_may_do_steps_while_its_files_are_read(
    goes_on: bool, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is read first; a busy machine took so long that the ranks were 18 steps further then."""
    copy = tmp_path / "run"
    shutil.copytree(plain, copy)
    for rank in (0, 1):
        drop_events(copy, f"events/rank-{rank}.jsonl", "end")
    ledger, read = lines_of(copy / LEDGER), RunFolder.event_files
    keep_lines(copy, LEDGER, slice(0, -20))

    def event_files(folder: RunFolder) -> dict[int, Path]:
        if goes_on:
            (copy / LEDGER).write_bytes(b"".join(ledger))
        return read(folder)

    monkeypatch.setattr(RunFolder, "event_files", event_files)
    findings = [finding.text for finding in reading.verify_run(RunFolder(copy)).findings if finding.is_wrong]
    assert ("the ranks have done step 60" in " ".join(findings)) is not goes_on
