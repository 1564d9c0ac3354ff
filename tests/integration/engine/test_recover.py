"""Ranks that move from one generation to the next in their own process: real workers, real gloo, a scripted agent.

Exercises engine.recover, sync.membership_client.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config.load import build_config
from shoal.control.rank_messages import RankReady
from shoal.data.prepare import create_run
from shoal.engine.recover import GenerationChanger
from shoal.errors import RunFailed
from shoal.records.commit_log import check_ledger
from shoal.records.final_states import compare_replicas
from shoal.records.summary import summarize
from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder
from shoal.sync.world import World
from tests.support.needs import need_tool
from tests.support.programs import TINY, read_jsonl
from tests.support.ranks import run_ranks
from tests.support.scripted_agent import ScriptedAgent
from tests.support.waiting import wait_until

STEPS = 60
COMMON = (*TINY, f"train.steps={STEPS}", "train.global_batch=12", "train.eval_every=1000", "train.checkpoint_every=20")


def make_run(folder: Path, *sets: str, ranks: int = 3) -> Path:
    run = create_run(build_config("grammar", None, sets=[*COMMON, f"run.on=local:{ranks}", *sets]), folder, ranks)
    return run.path


def check_run(run: Path, ids: tuple[int, ...], steps: int = STEPS) -> None:
    """Check that every step and sample is there once and that all ranks have the same bits."""
    ledger = check_ledger(read_jsonl(run / "commits.jsonl"))
    assert ledger.ok, ledger
    assert (ledger.steps, ledger.samples) == (steps, 12 * steps)
    states = RunFolder(run).state_files()
    assert compare_replicas({number: states[number] for number in ids}).byte_equivalent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[ScriptedAgent]:
    run = make_run(tmp_path / "run", "sync.inside=gloo")
    with ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        yield agent


def test_survivors_continue_and_lose_no_step(agent: ScriptedAgent) -> None:
    agent.await_step(0, 5)
    agent.kill(2)
    agent.regroup((0, 1))
    agent.await_end((0, 1))
    check_run(agent.run.path, (0, 1))
    [_, event] = agent.events(1, "membership")
    assert (event["how"], event["size"], event["ids"]) == ("regrouped", 2, [0, 1])


@pytest.mark.long
def test_a_restarted_rank_copies_the_state_and_continues(agent: ScriptedAgent) -> None:
    agent.await_step(0, 5)
    agent.kill(0)
    agent.regroup((1, 2))
    agent.await_step(1, 10)
    agent.start(0)
    agent.regroup((0, 1, 2), joining=(0,), after_step=True)
    agent.await_end((0, 1, 2))
    check_run(agent.run.path, (0, 1, 2))
    assert agent.events(0, "membership")[-1]["how"] == "joined"


@pytest.mark.long
def test_a_machine_that_joins_with_its_own_disk_writes_every_line_once(tmp_path: Path) -> None:
    """It copies the ledger of another machine and also receives the newest steps."""
    run = make_run(tmp_path / "run", "sync.inside=gloo", "run.on=join:2")
    own = make_run(tmp_path / "own", "sync.inside=gloo", "run.on=local:1")
    with ScriptedAgent(run, 3) as agent:
        agent.own_folders[2] = RunFolder(own)
        agent.start(0, 1)
        agent.form((0, 1))
        agent.start(2)
        agent.await_step(0, 10)
        agent.regroup((0, 1, 2), joining=(2,), after_step=True)
        agent.await_end((0, 1, 2))
    check_run(run, (0, 1))
    for folder in (run, own):
        steps = [record["step"] for record in read_jsonl(folder / "commits.jsonl")]
        assert steps == list(range(1, STEPS + 1))
        verdict = verify_run(RunFolder(folder))
        assert verdict.ok, verdict.findings


@pytest.mark.long
def test_lines_missing_after_the_ledger_writer_died_are_written_by_the_next(agent: ScriptedAgent) -> None:
    """The ledger is one step behind if its writer dies between an exchange and the line that follows."""
    agent.await_step(0, 5)
    agent.kill(0)
    path = agent.run.commits
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    agent.regroup((1, 2))
    agent.await_end((1, 2))
    check_run(agent.run.path, (1, 2))
    steps = [record["step"] for record in read_jsonl(path)]
    assert steps == sorted(set(steps))


@pytest.mark.long
def test_a_frozen_rank_commits_nothing_and_rejoins(agent: ScriptedAgent) -> None:
    agent.await_step(0, 5)
    agent.kill(1, signal.SIGSTOP)
    agent.regroup((0, 2))
    agent.await_step(0, 20)
    agent.kill(1, signal.SIGCONT)
    agent.regroup((0, 1, 2), joining=(1,))
    agent.await_end((0, 1, 2))
    check_run(agent.run.path, (0, 1, 2))


WAYS = {
    "shared": ("sync.inside=shared",),
    "copies": ("sync.inside=copies",),
    "stock": ("sync.mode=stock",),
    "barrier": ("sync.measure=barrier", "sync.inside=gloo"),
    "fp16": ("sync.wire=fp16", "sync.inside=gloo"),
    "int8": ("sync.wire=int8", "sync.inside=gloo"),
    "powersgd": ("sync.wire=powersgd:2", "sync.inside=gloo"),
    "accumulate": ("sync.accumulate=2", "train.global_batch=6"),
    "local": ("sync.mode=local", "sync.every=4"),
    "diloco": ("sync.mode=diloco", "sync.every=5"),
    "diloco-int8": ("sync.mode=diloco", "sync.every=5", "sync.wire=int8"),
    "streaming": ("sync.mode=streaming", "sync.every=8", "sync.fragments=2", "sync.overlap=2"),
    "auto": ("sync.mode=auto",),
    "weights": ("run.weights=1/2/1",),
}


# One of every kind is marked long; the others differ in the wire format, not in the membership.
LONG = ("shared", "int8", "streaming")


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.long if way in LONG else pytest.mark.exhaustive) for way in WAYS],
)
def test_every_way_of_exchanging_survives_a_loss_and_a_rejoin(way: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *WAYS[way])
    with ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        agent.await_step(0, 7)
        agent.kill(1)
        agent.regroup((0, 2))
        agent.start(1)
        agent.await_step(0, 12)
        agent.regroup((0, 1, 2), joining=(1,), after_step=True)
        agent.await_end((0, 1, 2))
    check_run(run, (0, 1, 2))


def lose_all(agent: ScriptedAgent, at_step: int, ids: tuple[int, ...]) -> None:
    """Kill every rank and start it again without its state."""
    agent.await_step(0, at_step)
    for number in ids:
        agent.kill(number)
    agent.start(*ids)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("diloco", marks=pytest.mark.long),
        *(
            pytest.param(w, marks=pytest.mark.exhaustive)
            for w in ("shared", "accumulate", "local", "streaming", "auto")
        ),
    ],
)
@pytest.mark.timeout(400)
def test_without_a_state_all_ranks_return_to_the_newest_checkpoint(way: str, tmp_path: Path) -> None:
    """Do so twice: the second checkpoint belongs to the lineage of the first return."""
    run = make_run(tmp_path / "run", *WAYS[way], "train.checkpoint_every=10", ranks=2)
    with ScriptedAgent(run, 2) as agent:
        agent.start(0, 1)
        agent.form((0, 1))
        lose_all(agent, 13, (0, 1))
        agent.recover((0, 1))
        lose_all(agent, 33, (0, 1))
        agent.recover((0, 1))
        agent.await_end((0, 1))
        first, second = agent.events(0, "recovery")
        warned = [event["seen"] for event in agent.events(0, "warning")]
    assert (first["step"], second["step"]) == (10, 30)
    # With outer steps only whole rounds are committed.
    assert first["redone"] == first["lost_step"] - 10 >= (0 if WAYS[way][0].startswith("sync.mode") else 2)
    assert any(f"from the checkpoint of step 10, and {first['redone']} step" in seen for seen in warned)
    check_run(run, (0, 1))
    # A later resume must find one training in this run.
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept[-1] == f"step-{STEPS:08d}"
    history = json.loads((run / "checkpoints" / kept[-1] / "state.json").read_text())["history"]
    assert [step for _, step in history] == [10, 30]
    # The report must contain the steps before the return too.
    events = [event for rank in (0, 1) for event in read_jsonl(run / "events" / f"rank-{rank}.jsonl")]
    assert [event["how"] for event in events if event["event"] == "membership"] == ["first", *["recovered"] * 2] * 2
    assert len(summarize(events).loss) == STEPS
    verdict = verify_run(RunFolder(run))
    assert verdict.ok, verdict.findings


@pytest.mark.long
@pytest.mark.timeout(300)
def test_before_the_first_checkpoint_the_training_starts_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.checkpoint_every=40", ranks=2)
    with ScriptedAgent(run, 2) as agent:
        agent.start(0, 1)
        agent.form((0, 1))
        lose_all(agent, 9, (0, 1))
        agent.recover((0, 1))
        agent.await_end((0, 1))
        [event] = agent.events(0, "recovery")
    assert event["step"] == 0
    check_run(run, (0, 1))
    losses = {event["step"]: event["loss"] for event in read_jsonl(run / "commits.jsonl")}
    assert losses[STEPS] < losses[1]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_whose_checkpoints_are_gone_ends_with_an_error(tmp_path: Path) -> None:
    """Starting over would silently discard more steps than a failure may cost."""
    run = make_run(tmp_path / "run", "train.checkpoint_every=10", ranks=2)
    with ScriptedAgent(run, 2) as agent:
        agent.start(0, 1)
        agent.form((0, 1))
        agent.await_step(0, 15)
        lose_all(agent, 15, (0, 1))
        shutil.rmtree(run / "checkpoints")
        with pytest.raises(AssertionError, match="no GroupFormed"):
            agent.recover((0, 1))
        assert [agent.ranks[number].process.wait(30) for number in (0, 1)] == [3, 3]
        [fault] = agent.events(0, "fault")
    assert "no machine has a checkpoint" in fault["seen"]
    assert "shoal train --resume" in fault["fix"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fewer_ranks_resume_with_the_batch_and_learning_rate_of_the_launch(tmp_path: Path) -> None:
    """Two of three weighted ranks return, with a batch of four per rank. A damaged checkpoint is reported."""
    settings = ("run.weights=2/1/1", "train.scaling=weak", "train.global_batch=4", "train.checkpoint_every=10")
    run = make_run(tmp_path / "run", *settings, "train.micro_batch=1")
    with ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        lose_all(agent, 23, (0, 1, 2))
        agent.kill(1)
        newest = run / "checkpoints" / "step-00000020" / "model.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1])
        agent.recover((0, 2))
        agent.await_end((0, 2))
        first, again = agent.events(0, "start")
        warned = [event["seen"] for event in agent.events(0, "warning")]
    assert (again["global_batch"], again["lr"]) == (first["global_batch"], first["lr"]) == (12, first["lr"])
    assert again["share"] == 8
    assert again["resumed_from"] == 10
    assert any("step-00000020/model.safetensors is damaged" in seen for seen in warned)
    check_run(run, (0, 2))


def recover_without_checkpoint(world: World, folder: Path) -> list[str]:
    """Return the errors of six recoveries without a checkpoint and with fifteen steps in the ledger."""
    run = RunFolder(folder)
    run.commits.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 16)))
    replica: Any = SimpleNamespace(
        config=build_config("grammar", None, sets=["train.checkpoint_every=10"]),
        division=SimpleNamespace(has_fixed_shapes=False),
        recorder=SimpleNamespace(),
    )
    member: Any = SimpleNamespace(fence=SimpleNamespace(mark_overwritten=lambda: None))
    nothing: Any = None
    membership = GenerationChanger(member, world.store, nothing, replica, nothing, run)
    seen = []
    for _ in range(6):
        try:
            membership._return_to_checkpoint(replace(world, keeps_files=True), launched=1)
        except RunFailed as error:
            seen.append(error.seen)
    return seen


def test_repeatedly_failing_recoveries_end_the_run(tmp_path: Path) -> None:
    [[*broken, last]] = run_ranks(recover_without_checkpoint, 1, tmp_path, tmp_path)
    assert len(broken) == 5
    assert all("no machine has a checkpoint" in seen for seen in broken)
    assert "went back to a checkpoint 5 times" in last


@pytest.mark.long
def test_the_ledger_writer_gets_missing_steps_from_the_furthest_rank(tmp_path: Path) -> None:
    """With outer steps a replica may be eight steps ahead and know earlier which steps are committed."""
    run = make_run(tmp_path / "run", *WAYS["streaming"])
    with ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        agent.await_step(0, 11)
        agent.kill(0, signal.SIGSTOP)
        agent.await_standstill(2)
        agent.kill(1)
        threading.Timer(0.3, agent.kill, (0, signal.SIGCONT)).start()
        agent.regroup((0, 2))
        agent.await_end((0, 2))
    check_run(run, (0, 2))


@pytest.mark.parametrize(
    "inside", [pytest.param("gloo", marks=pytest.mark.long), pytest.param("shared", marks=pytest.mark.exhaustive)]
)
def test_ranks_continue_together_after_a_break_at_any_point(inside: str, tmp_path: Path) -> None:
    """Work is due after every step, so that some ranks have done it and others have not."""
    due = ("train.checkpoint_every=1", "train.eval_every=2", "train.gc_every=3", "members.digest_every=2")
    run = make_run(tmp_path / "run", *due, "train.steps=100000", f"sync.inside={inside}")
    pauses = random.Random(7)
    with ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        for _ in range(15):
            last = max(record["step"] for record in read_jsonl(run / "commits.jsonl") or [{"step": 0}])
            agent.await_step(0, last + 2)
            time.sleep(pauses.random() * 0.2)
            agent.regroup((0, 1, 2))
    assert check_ledger(read_jsonl(run / "commits.jsonl")).ok


@pytest.mark.exhaustive
def test_a_rejoining_rank_compiles_before_the_others_wait_for_it(tmp_path: Path) -> None:
    need_tool("g++")
    run = make_run(tmp_path / "run", "train.compile=on", "train.steps=100000", ranks=2)
    with ScriptedAgent(run, 2) as agent:
        agent.start(0, 1)
        agent.form((0, 1))
        agent.await_step(0, 5)
        agent.kill(1)
        agent.regroup((0,))
        began = time.monotonic()
        agent.start(1)
        agent.ranks[1].receive(RankReady)
        ready_s = time.monotonic() - began
        agent.regroup((0, 1), joining=(1,), after_step=True)
        _, joined = wait_until(lambda: agent.events(1, "membership")[1:] and agent.events(1, "membership"))
        agent.await_step(1, joined["step"] + 1)
        first = next(event for event in agent.events(1, "step") if event["step"] == joined["step"] + 1)
    assert agent.events(1, "start")[-1]["compiled"] is True
    # It compiled before it was ready: a step with the compiling would take most of that time again.
    assert first["forward_s"] + first["backward_s"] < 0.5 * ready_s
