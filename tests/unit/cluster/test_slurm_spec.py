"""What `--on slurm…` asks for, and what it finds in the variables of a job.

Exercises shoal.cluster.slurm.spec.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cluster.slurm.spec import SlurmSpec, in_allocation, node_lists, parse_slurm, restart_count
from shoal.cluster.target import absolute_on, first_nodes, parse_on, rank_count
from shoal.errors import UsageError


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOB_ID", "HET_SIZE", "RESTART_COUNT", "NTASKS", "NTASKS_PER_NODE"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)


def enter_job(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in {"JOB_ID": "12", **variables}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_slurm_is_a_cluster() -> None:
    assert parse_on("slurm") == SlurmSpec()
    assert parse_on("slurm:2,partition=main,time=2:00:00") == SlurmSpec(2, (("partition", "main"), ("time", "2:00:00")))
    assert rank_count(parse_on("slurm:3,gpus=4")) == 12
    assert rank_count(parse_on("slurm:3,gpus=4,slots=1")) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slurm:0", "slurm:NODES"),
        ("slurm:x", "slurm:NODES"),
        ("slurm:2,partitoin=main", "did you mean 'partition'"),
        ("slurm:2,gpus=many", "a number of 1 or more"),
        ("slurm:2,gpus=0", "a number of 1 or more"),
        ("slurm:2,time=", "has no value"),
        ("slurm:2,time=1,time=2", "given twice"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_slurm(text)
    assert why in refused.value.why


def test_a_file_may_begin_with_the_word() -> None:
    with pytest.raises(UsageError, match=r"slurm\.toml"):
        parse_on("slurm.toml")


def test_outside_an_allocation_nodes_have_a_number() -> None:
    assert not in_allocation()
    with pytest.raises(UsageError, match="no number of nodes"):
        rank_count(parse_on("slurm"))


def test_the_options_of_a_job() -> None:
    words = parse_slurm("slurm:2,partition=main,gpus=4,memory=64G").options()
    assert words == [
        "--partition=main",
        "--gpus-per-node=4",
        "--mem=64G",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--no-kill",
    ]
    # Without a number of cores and without GPUs a rank has all cores of its node.
    assert {"--exclusive", "--mem=0"} <= set(parse_slurm("slurm:2").options())
    assert "--mem=0" not in parse_slurm("slurm:2,memory=8G").options()
    assert "--cpus-per-task=8" in parse_slurm("slurm:2,cpus=16,slots=2").options()


def test_an_allocation_has_the_nodes_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_job(monkeypatch, JOB_NUM_NODES="4", TASKS_PER_NODE="2(x3),1", JOB_NODELIST="n[1-4]", NTASKS="7")
    assert rank_count(parse_on("slurm")) == 7
    assert rank_count(parse_on("slurm:2")) == 4
    assert rank_count(parse_on("slurm,slots=3")) == 12
    assert absolute_on("slurm,interface=ib0") == "slurm:4,interface=ib0"
    with pytest.raises(UsageError, match="asks for 5 nodes, and job 12 has 4"):
        rank_count(parse_on("slurm:5"))


def test_a_step_says_nothing_about_the_nodes_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_job(monkeypatch, JOB_NUM_NODES="2", TASKS_PER_NODE="8", NTASKS="8")
    assert rank_count(parse_on("slurm")) == 2


def test_the_cores_of_whole_nodes_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_job(monkeypatch, JOB_NUM_NODES="4", TASKS_PER_NODE="64(x4)", JOB_NODELIST="n[1-4]")
    assert rank_count(parse_on("slurm")) == 4


def test_a_heterogeneous_job_has_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "HET_SIZE": "2",
        "JOB_NODELIST_HET_GROUP_0": "big1",
        "JOB_NODELIST_HET_GROUP_1": "small[1-2]",
        "JOB_NUM_NODES_HET_GROUP_0": "1",
        "JOB_NUM_NODES_HET_GROUP_1": "2",
        "TASKS_PER_NODE_HET_GROUP_0": "4",
        "NTASKS_HET_GROUP_0": "4",
        "NTASKS_HET_GROUP_1": "2",
        "TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
    }
    enter_job(monkeypatch, **variables)
    env = {f"SLURM_{name}": value for name, value in variables.items()}
    assert node_lists(env) == [("big1", 0), ("small[1-2]", 1)]
    assert SlurmSpec().places() == [(4, 0), (1, 1), (1, 1)]


def test_the_first_nodes_of_slurm(tmp_path: Path) -> None:
    spec = parse_on("slurm:4,partition=main")
    assert first_nodes(spec, 2, tmp_path) == "slurm:2,partition=main"


def test_how_often_slurm_started_the_job_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart_count() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert restart_count() == 2
