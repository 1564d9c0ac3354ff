"""`shoal emit`: the scripts it prints, and its errors."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import __version__
from shoal.cluster.cluster import planned_nodes
from shoal.cluster.node import Node
from shoal.config.defaults import MOUNT
from shoal.config.load import build_config, to_toml
from shoal.config.presets import PRESETS
from shoal.config.schema import Config
from shoal.errors import ConfigError
from shoal.launch.emit import (
    EmitJob,
    make_job,
    torchrun_commands,
    torchrun_text,
    worker_words,
)
from shoal.launch.emit_slurm import slurm_text, training_job
from tests.integration.cli.test_commands import Call
from tests.support.paths import GOLDEN, ROOT

# A node with two ranks, a node with one, and a node whose interface and cores are not known yet.
NODES = (
    Node("big", "10.0.0.1", "eno1", 2, 8, 1000),
    Node("small", "10.0.0.2", "wlan0", 1, 2),
    Node("far", "10.0.0.3", "", 1, 0),
)
EQUAL = tuple(Node(name, "", None, 2, 8) for name in ("one", "two"))
SHAKESPEARE = ("data.path=texts/tiny shakespeare.txt", "train.steps=500", "train.global_batch=16")


def job(*sets: str, preset: str = "grammar", nodes: tuple[Node, ...] = NODES, out: str = "runs/mine") -> EmitJob:
    return make_job(build_config(preset, sets=sets), nodes, Path(out), "python3")


def assert_golden(name: str, text: str) -> None:
    """Compare with the golden file. After an intended change SHOAL_WRITE_GOLDEN=1 rewrites it; check the diff."""
    if os.environ.get("SHOAL_WRITE_GOLDEN") == "1":
        (GOLDEN / name).write_text(text, encoding="utf-8")
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_the_torchrun_commands_match_the_golden_file() -> None:
    assert_golden("torchrun.txt", torchrun_text(job(*SHAKESPEARE, preset="shakespeare-char"), 29500))


def test_the_slurm_script_matches_the_golden_file() -> None:
    training = training_job(job(*SHAKESPEARE, preset="shakespeare-char", nodes=EQUAL), new_folder=True)
    assert_golden("slurm.sbatch", slurm_text(training))


# The settings


values = st.fixed_dictionaries(
    {},
    optional={
        "model.dropout": st.floats(0, 0.99),
        "train.lr": st.floats(1e-12, 1e3),
        "train.steps": st.integers(1, 10**12),
        "train.micro_batch": st.just(1),
        "train.scaling": st.sampled_from(["strong", "weak"]),
        "data.tokenizer": st.sampled_from(["char", "byte", "bpe"]),
        "data.path": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        "data.cache_dir": st.sampled_from(["1.5", "true", "it's", '"x"', "a b", "a\nb", " x", "\x7f", "ü"]),
        "run.threads": st.integers(1, 64),
        "run.preset": st.sampled_from([*PRESETS, "mine"]),
    },
)


@given(st.sampled_from(sorted(PRESETS)), values)
def test_the_worker_arguments_give_the_same_configuration(preset: str, chosen: dict[str, Any]) -> None:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in chosen.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    config = build_config(preset, flags=sections)
    name, *settings = worker_words(EmitJob(config, NODES[:1], Path("runs/mine"), "python3"))
    assert set(settings[::2]) <= {"--set"}
    assert without_placement(build_config(name, sets=settings[1::2])) == without_placement(config)


def without_placement(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"threads": None})})


def test_settings_equal_to_the_preset_are_left_out() -> None:
    assert worker_words(job("train.lr=0.5", preset="gpt2-124m", nodes=NODES[:1])) == [
        "gpt2-124m",
        "--set",
        "train.lr=0.5",
    ]


def test_several_nodes_share_one_cache_folder_and_a_single_node_needs_none() -> None:
    assert "data.cache_dir=runs/.cache" in worker_words(job())
    assert "data.cache_dir=/scratch" in worker_words(job("data.cache_dir=/scratch"))
    assert worker_words(job(nodes=NODES[:1])) == ["grammar"]


def test_a_job_that_cannot_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot share a global batch of 3") as shares:
        job("train.global_batch=3")
    assert "--set train.global_batch=" in shares.value.fix


@pytest.mark.parametrize("form", ["torchrun", "slurm"])
def test_a_file_name_with_a_newline_stays_inside_its_comment(form: str) -> None:
    strange = job('data.path="a\\ntouch stolen"', nodes=EQUAL)
    text = torchrun_text(strange, 1) if form == "torchrun" else slurm_text(training_job(strange, new_folder=True))
    assert not [line for line in text.splitlines() if line.startswith("touch")]
    assert "the text a touch stolen" in text


# torchrun


def test_each_node_gets_its_own_rank_and_slots() -> None:
    commands = [shlex.split(node_command.command) for node_command in torchrun_commands(job(), 4242)]
    assert [node_command.node for node_command in torchrun_commands(job(), 4242)] == ["big", "small", "far"]
    for number, (slots, words) in enumerate(zip((2, 1, 1), commands, strict=True)):
        assert {"--nnodes=3", f"--node-rank={number}", f"--nproc-per-node={slots}"} <= set(words)
        assert {"--master-addr=10.0.0.1", "--master-port=4242"} <= set(words)
    assert ["SHOAL_KEEPS_FILES=0" in words for words in commands] == [False, True, True]
    assert [[word for word in words if "threads=" in word] for words in commands] == [
        ["run.threads=4"],
        ["run.threads=2"],
        [],
    ]
    assert "OMP_NUM_THREADS=4" in commands[0]
    assert "NCCL_SOCKET_IFNAME=wlan0" in commands[1]


def test_threads_of_a_hosts_file_are_used() -> None:
    node = Node("big", "10.0.0.1", "eno1", 2, 8, threads=3)
    [command] = torchrun_commands(job(nodes=(node,)), 4242)
    assert "OMP_NUM_THREADS=3 " in command.command
    assert command.command.endswith("--set run.threads=3")


# Slurm


def options_of(text: str) -> list[str]:
    """Return the options of sbatch; Slurm stops reading at the first line that is a command."""
    lines = text.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == [f"#SBATCH {option}" for option in options]
    return options


def test_slurm_is_asked_for_what_the_ranks_need() -> None:
    options = options_of(slurm_text(training_job(job("train.device=cuda", nodes=EQUAL), new_folder=True)))
    assert {"--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4", "--gpus-per-node=2", "--no-kill"} <= set(options)


def test_slurm_is_asked_for_what_on_says() -> None:
    asked = job("run.on=slurm:3,partition=gpu,gpus=4", nodes=EQUAL)
    options = options_of(slurm_text(training_job(asked, new_folder=True)))
    assert {"--partition=gpu", "--nodes=3", "--gpus-per-node=4", "--ntasks-per-node=4"} <= set(options)


def test_nodes_with_different_numbers_of_ranks_are_no_job_of_slurm() -> None:
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        training_job(job(), new_folder=True)


def test_a_script_becomes_a_job_too(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "my_train.py"
    script.touch()
    monkeypatch.chdir(tmp_path)
    text = "a --set b"
    result = call("emit", "slurm", "--on", "slurm:2,gpus=4", "--set", "train.steps=9", "my_train.py", "--lr", text)
    assert result.code == 0, result.err
    assert "--gpus-per-node=4" in options_of(result.out)
    command = result.out.rpartition("\nexec ")[2]
    assert shlex.split(command.replace("\\\n", "")) == [
        *("$python", "-P", "-m", "shoal", "run", "--on", "slurm", "--out", "runs/my-train-$SLURM_JOB_ID"),
        *("--set", "train.steps=9", str(script), "--lr", text),
    ]


# The command line


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


def test_json_is_one_document(call: Call) -> None:
    commands = json.loads(call("emit", "torchrun", "--on", "lab:3", "--out", "runs/x", "--json").out)
    assert commands["format"] == "torchrun"
    assert [(command["node"], command["address"]) for command in commands["commands"]] == [
        ("node1", "10.77.0.1"),
        ("node2", "10.77.0.2"),
        ("node3", "10.77.0.3"),
    ]
    files = json.loads(call("emit", "k8s", "--out", "runs/My Run", "--json").out)
    assert files["format"] == "k8s"
    assert list(files["files"]) == ["shoal-my-run.yaml"]


def test_settings_come_from_a_file_or_a_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(build_config("gpt2-124m", sets=["train.steps=7"])))
    for source in (tmp_path, tmp_path / "config.toml"):
        result = call("emit", "torchrun", source, "--set", "train.lr=0.25", "--on", "local:1")
        assert result.code == 0, result.err
        words = shlex.split(result.out.splitlines()[-1])
        assert words[words.index("shoal.train.worker") + 1 :][:5] == [
            *("gpt2-124m", "--set", "train.steps=7"),
            *("--set", "train.lr=0.25"),
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(
    ("words", "seen", "next_step"),
    [
        (["slrum"], "shoal emit has no command 'slrum'", "shoal emit --help"),
        (["torchrun", "gramar"], "'gramar' is not a preset, and there is no such file", "grammar, shakespeare-char"),
        (["slurm", "no/such.toml"], "'no/such.toml' is not a preset, and there is no such file", "shoal runs"),
        (["slurm", "."], ". is not a run folder", "shoal runs"),
        (["slurm", "broken.toml"], "broken.toml is not valid TOML", "toml.io"),
        (["torchrun", "--on", "moon:2"], "--on 'moon:2' names no cluster", "--on local:2"),
        (["torchrun", "--set", "train.stpes=2"], "unknown setting train.stpes", "shoal config show train"),
        (
            ["torchrun", "--port", "0"],
            "--port is a whole number from 1 to 65,535; '0' was given",
            "shoal emit torchrun --help",
        ),
        (["torchrun", "--image", "x"], "No such option: --image", "shoal emit torchrun --help"),
        (["k8s", "--out", "/elsewhere"], "/elsewhere is outside the volume", "--out runs/NAME"),
    ],
)
def test_wrong_usage_is_refused_with_the_next_step(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], seen: str, next_step: str
) -> None:
    (tmp_path / "broken.toml").write_text("[train\n")
    monkeypatch.chdir(tmp_path)
    result = call("emit", *words)
    assert (result.code, result.out) == (2, "")
    assert seen in result.err
    assert next_step in result.err.rpartition("  next: ")[2]


def test_commands_for_a_lab_use_its_interface() -> None:
    shape = make_job(build_config(), planned_nodes("lab:2,cpu=1"), Path("run"), "python3")
    assert [node_command.command.split()[0] for node_command in torchrun_commands(shape, 29500)] == [
        "GLOO_SOCKET_IFNAME=eth0"
    ] * 2


def test_the_dockerfile_names_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    copied = [path for first, *paths in words if first == "COPY" for path in paths[:-1]]
    assert copied
    assert not [path for path in copied if not (ROOT / path).exists()]
    # The build backend reads these too.
    assert {project["readme"], *project["license-files"], "pyproject.toml", "src", "constraints.txt"} == set(copied)
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{path}" for path in copied} <= set(kept)
    [entry] = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in text.splitlines() if "ENTRYPOINT" in line]
    assert entry[0] in project["scripts"]
    assert re.search(r"(?m)^torch==\d", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    [python] = re.findall(r"(?m)^FROM python:(\S+)-slim$", text)
    assert project["requires-python"] == f">={python}"
    assert [first for first in words if first[0] == "WORKDIR"][-1] == ["WORKDIR", str(MOUNT)]
    assert f"docker build -t shoal:{__version__} ." in text, "the default of emit k8s --image"
