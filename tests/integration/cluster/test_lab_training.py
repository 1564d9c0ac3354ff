"""Training on emulated nodes: the same command, the same result, and no lab left afterwards.

Exercises `shoal lab`, `shoal train`, launch.plan.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cluster.cluster import planned_nodes
from shoal.cluster.node import Rendezvous
from shoal.cluster.target import ExistingLab, LocalSpec, parse_on, rank_count
from shoal.config.schema import RunConfig
from shoal.control.processes import find_processes, find_supervisor
from shoal.errors import ConfigError, UsageError
from shoal.launch.plan import plan_ranks
from shoal.runs.manage import end_processes
from shoal_lab import state
from tests.support.labs import need_lab, new_labs, running_lab
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, shoal_command, train_tiny
from tests.support.waiting import wait_until

RENDEZVOUS = Rendezvous("10.77.0.1", 4242)


def test_on_is_parsed_into_a_cluster() -> None:
    assert parse_on("local:3") == LocalSpec(3)
    assert parse_on("lab") == ExistingLab(None)
    assert parse_on("lab:attic") == ExistingLab("attic")
    assert rank_count(parse_on("lab:3,link=100mbit")) == 3
    assert rank_count(parse_on("lab:3,slots=2/1/1")) == 4
    for wrong in ("moon:3", "local:x", "lab:0", "lab:3,speed=1"):
        with pytest.raises(UsageError):
            parse_on(wrong)


def test_the_plan_numbers_ranks_across_the_nodes() -> None:
    nodes = planned_nodes("lab:3,link=1gbit/1gbit/100mbit,cpu=0.5")
    commands = plan_ranks(RunConfig(), lambda node: "run", nodes, RENDEZVOUS, resume=False)
    assert [command.node.name for command in commands] == ["node1", "node2", "node3"]
    assert [command.env["RANK"] for command in commands] == ["0", "1", "2"]
    assert {command.env["LOCAL_RANK"] for command in commands} == {"0"}
    assert [command.env["GROUP_RANK"] for command in commands] == ["0", "1", "2"]
    assert {command.env["MASTER_ADDR"] for command in commands} == {"10.77.0.1"}
    assert {command.env["GLOO_SOCKET_IFNAME"] for command in commands} == {"eth0"}
    assert [command.env["SHOAL_LINK_MBPS"] for command in commands] == ["1000", "1000", "100"]
    assert all(command.uses_agent_store for command in commands)


def test_the_plan_numbers_the_ranks_of_a_node_with_two_slots() -> None:
    nodes = planned_nodes("lab:3,cpu=2,slots=2/1/2")
    commands = plan_ranks(RunConfig(), lambda node: "run", nodes, RENDEZVOUS, resume=False)
    assert [command.node.name for command in commands] == ["node1", "node1", "node2", "node3", "node3"]
    assert [command.env["RANK"] for command in commands] == ["0", "1", "2", "3", "4"]
    assert [command.env["LOCAL_RANK"] for command in commands] == ["0", "1", "0", "0", "1"]
    assert [command.env["LOCAL_WORLD_SIZE"] for command in commands] == ["2", "2", "1", "2", "2"]
    assert {command.env["WORLD_SIZE"] for command in commands} == {"5"}


def test_other_launchers_are_refused_on_several_nodes() -> None:
    with pytest.raises(ConfigError, match="this cluster has 3"):
        plan_ranks(RunConfig(launcher="torchrun"), lambda node: "run", planned_nodes("lab:3"), RENDEZVOUS, resume=False)


@pytest.fixture
def no_lab_left() -> Iterator[None]:
    need_lab()
    before = set(state.list_labs())
    yield
    wait_until(lambda: not new_labs(before), 30, why=lambda: f"left labs: {new_labs(before)}")


@pytest.mark.long
@pytest.mark.usefixtures("no_lab_left")
def test_three_nodes_train_to_identical_replicas(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("train.steps=12", "train.global_batch=12", "train.checkpoint_every=5")
    manifest = train_tiny(run, "--on", "lab:3,link=1gbit", sets=settings)
    assert manifest["byte_equivalent"] is True
    assert [(node["name"], node["link_mbps"]) for node in manifest["nodes"]] == [
        ("node1", 1000),
        ("node2", 1000),
        ("node3", 1000),
    ]
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["node1", "node2", "node3"]
    assert [commit["step"] for commit in read_jsonl(run / "commits.jsonl")] == list(range(1, 13))
    # The wire bytes include the headers of every packet.
    assert manifest["theoretical_bytes_per_step"] < manifest["wire_bytes_per_step"]
    assert shoal("verify", run).returncode == 0
    assert shoal("train", "--resume", run, "--steps", "14").returncode == 0


@pytest.mark.long
def test_a_node_that_stands_still_while_its_rank_starts_is_awaited(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", set_flags(*TINY, "train.steps=6", "train.compile=off")

    def generations() -> list[str]:
        path = run / "agents/node1.jsonl"
        events = read_jsonl(path) if path.exists() else []
        return [event["id"] for event in events if event["event"] == "generation"]

    # With a tenth of a core a rank takes seconds to start: the node stands still before it has.
    with running_lab(2, cpu="none/0.1") as lab:
        assert shoal("train", "--on", f"lab:{lab.name}", "--out", run, "--detach", *flags).returncode == 0
        try:
            wait_until(generations)
            lab.node("node2").freeze()
            time.sleep(5)
            lab.node("node2").thaw()
            wait_until(lambda: find_supervisor(run) is None, 90)
        finally:
            end_processes(find_processes(run))
    assert [event["status"] for event in read_jsonl(run / "events/rank-1.jsonl") if event["event"] == "end"] == [
        "finished"
    ]
    assert generations() == ["1-0"]


@pytest.mark.usefixtures("no_lab_left")
@pytest.mark.parametrize(
    "victim", [pytest.param("node", marks=pytest.mark.exhaustive), pytest.param("supervisor", marks=pytest.mark.long)]
)
def test_the_lab_of_a_run_ends_with_it(victim: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = set_flags(*TINY, "members.on_loss=end", "train.compile=off")
    command = shoal_command("train", "--on", "lab:2", "--out", run, "--steps", "1000000", *flags)
    with (tmp_path / "stderr").open("wb") as stderr:
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        wait_for_ledger(run, training)
        supervisor = find_supervisor(run)
        assert supervisor is not None
        if victim == "supervisor":
            os.kill(supervisor.pid, signal.SIGKILL)
            seen = f"error: the supervisor of the run {run} was killed"
        else:
            lab = f"run-{supervisor.pid}"
            subprocess.run(shoal_command("lab", "kill", "node2", "--name", lab), check=True, capture_output=True)
            seen = "error: node2 is gone, and rank 1 with it"
        assert training.wait(30) == 3
    finally:
        end_processes(find_processes(run))
        if training.poll() is None:
            training.kill()
            training.wait()
    assert seen in (tmp_path / "stderr").read_text()


def wait_for_ledger(run: Path, training: subprocess.Popen[bytes]) -> None:
    ledger = run / "commits.jsonl"

    def has_commits() -> bool:
        assert training.poll() is None
        return ledger.exists() and ledger.stat().st_size > 0

    wait_until(has_commits, 120)
