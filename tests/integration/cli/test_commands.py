"""The command line: its output, on which stream, and its exit code.

Exercises cli.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shoal as package
from shoal.cli import report as sample_cli
from shoal.cli.main import main, take_debug
from shoal.config.load import load_config, to_toml
from shoal.errors import DataError
from shoal.records.final_states import compare_replicas
from shoal.run_folder import RunFolder
from shoal.runs.supervisor import training_files
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, shoal_command, steps_of, train_tiny
from tests.support.run_samples import make_run, start


@dataclass(frozen=True)
class Output:
    code: int
    out: str
    err: str


class Call:
    """Run `shoal WORDS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> Output:
        self._monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as system_exit:
            main()
        out, err = self._capsys.readouterr()
        assert isinstance(system_exit.value.code, int)
        return Output(system_exit.value.code, out, err)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a finished run of two ranks and its manifest as `--json` printed it."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    return folder, train_tiny(folder, "--steps", "4")


# Wrong usage


@pytest.mark.parametrize(
    ("words", "seen", "next_step"),
    [
        (["trian"], "there is no command 'trian'", "shoal --help"),
        (["bench", "scalign"], "did you mean 'scaling'?", "shoal bench --help"),
        (["train", "--bogus"], "No such option: --bogus", "shoal train --help"),
        (["train", "--steps", "many"], "--steps is a whole number from 1; 'many' was given\n", "shoal train --help"),
        (["train", "--steps", "0"], "--steps is a whole number from 1; '0' was given", "shoal train --help"),
        (["train", "--set", "steps"], "not of the form section.key=value", "--set train.steps=200"),
        (["train", "--on", "moon:3"], "--on 'moon:3' names no cluster", "--on local:2"),
        (["train", "--steps"], "Option '--steps' requires an argument.", "shoal train --help"),
        (["lab", "up", "--link"], "Option '--link' requires an argument.", "shoal lab up --help"),
        (["verify"], "Missing argument RUN\n", "shoal runs"),
        (["report"], "Missing argument RUN\n", "shoal runs"),
        (["bench", "levers", "--on", "local:1"], "--on local:1 is one rank", "--on local:2"),
        (["bench", "levers", "--levers", "ddp,dilco:50"], "did you mean 'diloco'?", "--levers stock,ddp"),
        (["bench", "levers", "--levers", "stock+int8"], "stock DDP sends fp32", "--levers stock,ddp,int8"),
        (["bench", "scaling", "--ranks", "1,two"], "--ranks '1,two' is not a list of numbers", "--ranks 1,2,4"),
        (["bench", "scaling", "--ranks", "0,1"], "cannot measure on 0, 1 ranks", "--ranks 1,2,4"),
        (
            ["bench", "scaling", "--ranks", "1,99"],
            "99 ranks cannot share a global batch",
            "--set train.global_batch=99",
        ),
        (["run", "--on", "join:2", "-m", "x"], "-m x does not go with --on join:2", "start a script file"),
        (["run", "--plan", "a", "--measure", "x.py"], "--plan does not go with --measure", "--plan runs/alone"),
        (["run", "--plan", "a", "--resume", "b"], "--plan does not go with --resume", "--plan runs/alone"),
        (["run", "--profile", "p.toml", "x.py"], "--profile does not go with a run without", "--plan runs/alone"),
        (["sample", "nowhere"], "nowhere is not a run folder", "shoal runs"),
    ],
)
def test_wrong_usage_is_refused_with_a_next_step(call: Call, words: list[str], seen: str, next_step: str) -> None:
    output = call(*words)
    assert (output.code, output.out) == (2, "")
    assert output.err.startswith("error: ")
    assert seen in output.err
    assert next_step in output.err.rpartition("  next: ")[2]
    assert "Traceback" not in output.err


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "scaling", "--ranks", "200"],
        ["bench", "levers", "--on", "local:99"],
        ["demo", "--set", "train.global_batch=1"],
        ["emit", "slurm", "--on", "local:99"],
        ["train", "--on", "local:99"],
        ["train", "--on", "local:2", "--global-batch", "10", "--micro-batch", "4"],
        ["plan", "--params", "1e8", "--nodes", "4", "--global-batch", "2"],
        ["plan", "--nodes", "4", "--global-batch", "2"],
    ],
    ids=" ".join,
)
def test_every_advised_option_exists(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    """A verb that takes `--set` for one model refuses it for another."""
    monkeypatch.chdir(tmp_path)
    output = call(*words)
    assert output.code == 2
    verb = words[: 2 if words[0] in ("bench", "emit") else 1]
    advised = re.findall(r"--[a-z-]+", output.err.rpartition("  next: ")[2])
    offered = call(*verb, "--help").out
    assert [option for option in advised if option not in offered] == []
    assert not ("--params" in words and "--set" in advised)
    assert list(tmp_path.iterdir()) == []


# Options without effect


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("bench scaling --set run.on=lab:3", "--set run.on has no effect on shoal bench scaling"),
        ("bench scaling --steps 5 --set train.steps=6", "train.steps is given twice: with --steps and with --set"),
        ("bench levers --on local:3 --set run.on=local:2", "run.on is given twice: with --on and with --set"),
        ("demo --set run.on=local:3", "--set run.on has no effect on shoal demo"),
        ("demo --set run.threads=3", "--set run.threads has no effect on shoal demo"),
        ("host --set run.on=local:2", "--set run.on does not go with shoal host"),
        ("host --steps 5 --set train.steps=6", "train.steps is given twice: with --steps and with --set"),
        ("train --every 8", "--every has no effect here"),
        ("train --sync stock --set sync.bucket_mb=4", "sync.bucket_mb has no effect here"),
        ("train --sync local --set sync.outer_lr=0.5", "sync.outer_lr has no effect here"),
        ("train --sync diloco --set sync.fragments=2", "sync.fragments has no effect here"),
        ("train --tokenizer byte --set data.bpe_vocab=300", "data.bpe_vocab has no effect here"),
        ("train --data my.txt --set data.sentences=300", "data.sentences has no effect here"),
        ("train --launcher torchrun --on-silent-tie pause", "--on-silent-tie has no effect here"),
        ("train --set run.preset=gpt2-124m", "run.preset has no effect here"),
        ("train --steps 3 --set train.steps=4", "train.steps is given twice: with --steps and with --set"),
        ("train --dry-run --plan", "--plan does not go with --dry-run"),
        ("plan --calibrate runs/one --profile p.toml --nodes 3", "--nodes has no effect with --calibrate"),
        ("plan --tokens 4096 --global-batch 4", "--tokens does not go with --global-batch"),
        ("stop runs/one --now --wait 3", "--wait has no effect with --now"),
        ("doctor --json --fix-commands", "--fix-commands does not go with --json"),
        ("setup hosts.toml --project . --no-project", "--no-project does not go with --project"),
        ("lab up 2 --dry-run --json", "--json does not go with --dry-run"),
        ("lab firewall node1 --off --allow 22", "--allow does not go with --off"),
        ("run --resume runs/one --on local:3", "--on has no effect with --resume"),
        ("run --resume runs/one --restarts 2", "--restarts has no effect with --resume"),
        ("run --sync ddp --set sync.every=4 -m x", "sync.every has no effect here"),
        ("run --steps 3 --set train.steps=4 -m x", "train.steps is given twice: with --steps and with --set"),
        ("join 192.0.2.1:4000 --node node2", "--node goes with a run folder"),
        ("join . --out elsewhere", "--out does not go with a run folder"),
    ],
)
def test_an_option_without_effect_is_refused(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, seen: str
) -> None:
    monkeypatch.chdir(tmp_path)
    output = call(*words.split())
    assert (output.code, output.out) == (2, "")
    assert output.err.startswith(f"error: {seen}")
    assert "  next: " in output.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        "--sync diloco --every 8",
        "--sync auto --every 8",
        "--sync streaming --set sync.fragments=2",
        "--launcher torchrun --set members.digest_every=5",
        "--data my.txt --tokenizer bpe --set data.bpe_vocab=300",
        "--set data.sentences=300",
    ],
)
def test_an_option_with_an_effect_is_accepted(call: Call, tmp_path: Path, words: str) -> None:
    assert call("train", *words.split(), "--out", tmp_path / "run", "--dry-run").code == 0


def test_a_config_file_may_have_settings_of_several_modes(call: Call, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[sync]\nevery = 20\n")
    words = ("train", "--config", tmp_path / "my.toml", "--out", tmp_path / "run", "--dry-run")
    assert call(*words).code == 0


def test_a_plan_takes_the_sync_mode_from_the_settings(call: Call, tmp_path: Path) -> None:
    by_flags = call("plan", "--nodes", "2", "--sync", "diloco:20", "--accumulate", "2", "--json")
    by_sets = call(
        "plan", "--nodes", "2", *set_flags("sync.mode=diloco", "sync.every=20", "sync.accumulate=2"), "--json"
    )
    assert json.loads(by_sets.out) == json.loads(by_flags.out)
    assert "diloco every 20 steps" in json.loads(by_sets.out)["strategy"]


def test_an_unknown_verb_is_refused_with_the_nearest_one(call: Call) -> None:
    assert "did you mean 'train'?" in call("trian").err


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_verb_prints_only_the_help(call: Call, words: list[str]) -> None:
    output = call(*words)
    assert (output.code, output.err) == (2, "")
    assert "Usage: shoal" in output.out


def test_debug_adds_the_traceback_and_changes_nothing_else(call: Call) -> None:
    plain, debug = call("verify", "nowhere"), call("verify", "nowhere", "--debug")
    assert debug.code == plain.code == 2
    assert debug.err.startswith("Traceback")
    assert debug.err.endswith(plain.err)


def test_debug_after_two_dashes_belongs_to_the_script() -> None:
    assert take_debug(["run", "--debug", "--", "a", "--debug"]) == (["run", "--", "a", "--debug"], True)
    assert take_debug(["run", "--", "--debug"]) == (["run", "--", "--debug"], False)


def test_an_unexpected_exception_is_reported_as_a_bug(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("unexpected")

    monkeypatch.setattr("shoal.config.load.build_config", fail)
    output = call("train")
    assert output.code == 3
    assert "shoal failed unexpectedly: ZeroDivisionError: unexpected" in output.err
    assert "--debug" in output.err


def test_version_is_printed(call: Call) -> None:
    assert call("--version") == Output(0, f"shoal {package.__version__}\n", "")


# verify, report and sample without a run


@pytest.mark.parametrize("verb", ["verify", "report", "sample"])
def test_a_missing_folder_and_one_that_is_no_run_are_refused(call: Call, tmp_path: Path, verb: str) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        output = call(verb, folder)
        assert output.code == 2
        assert output.err.startswith(f"error: {folder} is not a run folder: it has neither config.toml nor job.json\n")
    assert list(tmp_path.iterdir()) == []


# --resume and --dry-run


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--depth", "0"], "--depth"),
        (["--config", "my.toml"], "--config"),
        (["--out", "elsewhere"], "--out"),
        (["--dry-run"], "--dry-run"),
        (["shakespeare-char"], "shakespeare-char"),
    ],
)
def test_resume_takes_no_other_settings(call: Call, tmp_path: Path, words: list[str], named: str) -> None:
    output = call("train", *words, "--resume", tmp_path / "run")
    assert output.code == 2
    assert output.err.startswith(f"error: {named} does not go with --resume\n")


@pytest.mark.parametrize("option", ["--lineage 1-0", "--json"])
def test_the_run_of_a_script_takes_no_option_of_a_training(call: Call, tmp_path: Path, option: str) -> None:
    (tmp_path / "job.json").write_text('{"script": ["/a/b.py"], "on": "local:2"}')
    output = call("train", "--resume", tmp_path, *option.split())
    assert (output.code, output.out) == (2, "")
    assert output.err.startswith(f"error: {option.split()[0]} does not go with the run of a script\n")
    assert f"shoal run --resume {tmp_path}" in output.err


@pytest.mark.parametrize(
    ("words", "seen", "why"),
    [
        (["--global-batch", "48"], "--global-batch cannot be changed", "another training"),
        (["--set", "train.lr=1"], "train.lr cannot be changed", "another training"),
        (["--sync", "diloco"], "--sync cannot be changed", "the checkpoint holds"),
        (["--set", "model.layers=2"], "model.layers cannot be changed", "a model of this shape"),
        (["--data", "my.txt"], "--data cannot be changed", "order of the samples"),
        (["--set", "run.on=lab:2"], "run.on cannot be changed", "this cluster"),
        (["--set", "run.lineage=1-1"], "run.lineage cannot be changed", "--lineage"),
        (["--threads", "0"], "--threads 0", "greater than or equal to 1"),
        (["--set", "run.thread=1"], "unknown setting run.thread", "did you mean 'run.threads'?"),
        (["--set", "run.weights=1/1/1"], "run.weights=1/1/1 does not fit 2 ranks", "one number"),
        (["--set", "train.steps=7", "--steps", "8"], "train.steps is given twice", "only one"),
        (["--steps", "3"], "has done 4 steps already, more than 3", "never goes back"),
        ([], "is finished: it has done its 4 steps", "nothing left to train"),
        (["--json"], "is finished: it has done its 4 steps", "nothing left to train"),
    ],
    ids=str,
)
def test_settings_that_a_resume_cannot_change_are_refused_with_the_reason(
    run: tuple[Path, dict[str, Any]], call: Call, words: list[str], seen: str, why: str
) -> None:
    folder = run[0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    output = call("train", "--resume", folder, *words)
    assert (output.code, output.out) == (2, "")
    assert seen in output.err
    assert why in output.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_finished_run_is_continued_with_more_steps(run: tuple[Path, dict[str, Any]], call: Call) -> None:
    assert f"shoal train --resume {run[0]} --steps 8\n" in call("train", "--resume", run[0]).err


@pytest.mark.long
def test_changed_settings_apply_to_the_rest_of_a_run(run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Give a finished run more steps and one rank less work; the next resume keeps both."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    words = set_flags("run.weights=1/0.34", "members.digest_every=2", "train.eval_every=1")
    longer = shoal("train", "--resume", folder, "--steps", "6", *words)
    assert longer.returncode == 0, longer.stderr
    assert "train.steps: 4 → 6; train.eval_every: 50 → 1; run.weights: unset → 1/0.34" in longer.stderr
    assert "the learning rate follows one schedule over 6 steps from here on: at step 5 it is" in longer.stderr
    assert "continues after step 4" in longer.stderr
    [event] = [event for event in read_jsonl(folder / "supervisor.jsonl") if event["event"] == "config"]
    assert "run.weights: unset → 1/0.34" in event["changed"]
    again = shoal("train", "--resume", folder, "--steps", "8")
    assert again.returncode == 0, again.stderr
    config = load_config(folder / "config.toml")
    assert (config.run.weights, config.train.steps, config.members.digest_every) == ("1/0.34", 8, 2)
    starts = [
        [event["share"] for event in read_jsonl(folder / f"events/rank-{rank}.jsonl") if event["event"] == "start"]
        for rank in (0, 1)
    ]
    # Samples per rank: equal at first, unequal from the first resume on.
    assert [one > other for one, other in zip(*starts, strict=True)] == [False, True, True]
    assert [step["step"] for step in steps_of(folder)] == list(range(1, 9))
    verified = shoal("verify", folder)
    assert verified.returncode == 0, verified.stdout
    assert "complete: 8 steps" in verified.stdout
    assert shoal("report", folder).returncode == 0
    # Every machine receives the current settings.
    assert training_files(RunFolder(folder)).texts(defaultdict(str))["config.toml"] == to_toml(config)


@pytest.mark.parametrize(
    ("launcher", "names", "module"),
    [
        ("shoal", ["rank-0", "rank-1", "rank-2"], "shoal.train.worker"),
        ("torchrun", ["torchrun"], "torch.distributed.run"),
        ("spawn", ["spawn"], "shoal.train.spawn"),
    ],
)
def test_a_dry_run_prints_the_commands_and_starts_nothing(
    call: Call, tmp_path: Path, launcher: str, names: list[str], module: str
) -> None:
    out = tmp_path / "it's here"
    output = call("train", "--on", "local:3", "--launcher", launcher, "--out", out, "--dry-run")
    blocks = [block.split("\n") for block in output.out.strip().split("\n\n")]
    assert output.code == 0
    assert [title for title, _ in blocks] == [f"# {name} on local" for name in names]
    for _, command in blocks:
        words = shlex.split(command)
        assert {module, str(out)} <= set(words)
        assert "GLOO_SOCKET_IFNAME=lo" in words
    assert not out.exists()


def test_a_dry_run_shows_the_placement_of_every_rank(call: Call, tmp_path: Path) -> None:
    output = call("train", "--on", "local:2", "--out", tmp_path / "run", "--dry-run")
    first, second = (shlex.split(line) for line in output.out.splitlines() if " -m " in line)
    assert {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"} <= set(first)
    assert {"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"} <= set(second)


def test_a_dry_run_is_printed_as_json(call: Call, tmp_path: Path) -> None:
    output = call("train", "--on", "local:2", "--steps", "7", "--out", tmp_path / "run", "--dry-run", "--json")
    document = json.loads(output.out)
    assert [command["env"]["RANK"] for command in document["commands"]] == ["0", "1"]
    assert [command["name"] for command in document["commands"]] == ["rank-0", "rank-1"]
    assert "shoal.train.worker" in document["commands"][0]["argv"]
    assert (document["run"], document["config"]["train"]["steps"]) == (str(tmp_path / "run"), 7)
    assert not (tmp_path / "run").exists()


# A run that has just started


def test_a_running_run_without_a_checkpoint_is_not_reported_as_ended(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", [start(0), start(1)], "train.checkpoint_every=40")
    monkeypatch.setattr(sample_cli, "find_processes", lambda run: ["a process"])
    output = call("sample", folder.path)
    assert output.code == 2
    assert "has no checkpoint yet" in output.err
    assert "it is running and writes its first checkpoint after step 40" in output.err
    assert f"logs -f {folder.path}\n" in output.err


def test_the_fix_of_a_rank_error_names_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "my run")
    named = run.name_in("end the run and resume it: shoal stop RUN; shoal train --resume RUN")
    assert named == f"end the run and resume it: shoal stop '{run.path}'; shoal train --resume '{run.path}'"
    with pytest.raises(DataError) as missing:
        compare_replicas({}, [0, 1], run.path)
    assert missing.value.fix == f"finish it, then verify again: shoal train --resume '{run.path}'"


# Pipes


def run_into_closed_pipe(*words: str | Path) -> tuple[int, str]:
    """Run with Python's default buffering: output is written at exit, when no handler can catch an error."""
    reader, writer = os.pipe()
    os.close(reader)
    variables = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        shoal_command(*words), env=variables, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--dry-run", "--out", "never"]])
def test_a_closed_pipe_ends_the_command_without_a_message(words: list[str]) -> None:
    """141 is the usual exit code of a program with a closed pipe; 0 and 1 would be verdicts."""
    assert run_into_closed_pipe(*words) == (141, "")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_verify_into_a_closed_pipe_exits_without_a_verdict(run: tuple[Path, dict[str, Any]], more: list[str]) -> None:
    assert run_into_closed_pipe("verify", run[0], *more) == (141, "")


def test_a_closed_terminal_ends_the_command_as_its_signal_would() -> None:
    """A write to a closed terminal fails a moment before the kernel sends SIGHUP; 1 would be a verdict."""
    screen, terminal = os.openpty()
    os.close(screen)
    # The tests themselves may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        done = subprocess.run(shoal_command("no-such-command"), stdout=terminal, stderr=terminal, timeout=60)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(terminal)
    assert done.returncode == -signal.SIGHUP


def test_a_reader_that_closes_early_gets_the_first_line() -> None:
    with subprocess.Popen(shoal_command("train", "--dry-run", "--out", "never"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"# rank-0 on local\n"
        process.stdout.close()
        assert process.wait(30) in (0, 141)


# Results


def test_train_json_is_the_written_manifest(run: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = run
    assert manifest == json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["world_size"] == 2
    assert manifest["byte_equivalent"] is True
    assert len(steps_of(folder)) == manifest["steps"] == 4


def test_a_finished_run_verifies(call: Call, run: tuple[Path, dict[str, Any]]) -> None:
    output = call("verify", run[0])
    assert (output.code, output.err) == (0, "")
    assert output.out.startswith("identical: 2 replicas")
    assert "complete: 4 steps, 64 samples" in output.out


def test_verify_json_is_one_document(call: Call, run: tuple[Path, dict[str, Any]]) -> None:
    output = call("verify", run[0], "--json")
    verdict = json.loads(output.out)
    assert (output.code, output.err) == (0, "")
    assert (verdict["byte_equivalent"], verdict["ranks"], verdict["ledger"]["ok"]) == (True, 2, True)


def test_verify_fails_when_one_bit_differs(call: Call, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    copy = shutil.copytree(run[0], tmp_path / "copy")
    state = copy / "state-rank-1.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    output = call("verify", copy)
    assert output.code == 1
    assert output.out.startswith("different: rank 1 differs from rank 0")
    assert json.loads(call("verify", copy, "--json").out)["differing_ranks"] == [1]


def test_verify_reports_a_missing_state(call: Call, run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    copy = shutil.copytree(run[0], tmp_path / "copy")
    (copy / "state-rank-1.safetensors").unlink()
    output = call("verify", copy)
    assert output.code == 1
    assert "wrong: state-rank-1.safetensors: is missing: rank 1 wrote it when it finished" in output.out


def test_report_json_names_the_page(call: Call, run: tuple[Path, dict[str, Any]]) -> None:
    output = call("report", run[0], "--json")
    page = Path(json.loads(output.out)["report"])
    assert (output.code, output.err) == (0, "")
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")


@pytest.mark.exhaustive
def test_bench_scaling_json_is_one_document(tmp_path: Path) -> None:
    done = shoal("bench", "scaling", "--ranks", "2,1", "--steps", "4", "--json", "--out", tmp_path, *set_flags(*TINY))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    one, two = document["rows"]
    assert (one["ranks"], two["ranks"], one["speedup"]) == (1, 2, 1.0)
    assert two["speedup"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"])
    assert set(document["runs"]) == {"1", "2"}
    assert Path(document["picture"]).is_file()
    assert Path(document["report"]).is_file()
    assert document["explanation"]
