"""The source of a copy is lost at every point of a regroup: real gloo ranks, whole memberships, one process each.

Every rank comes with a state of its own, so all but the source copy. The lowest rank is the source, and dies before its
k-th exchange; the others regroup without it, the next one dies at another k, and so on until two are left. After each
death every rank must have either exactly what it came with or exactly what the source sent.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from shoal.config.load import build_config, load_config
from shoal.control.membership.types import Ballot, Lineage, State
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import EnterGeneration, LeaseRenewed, LeaveGeneration, ToRank, to_frame
from shoal.data.prepare import create_run
from shoal.host.facts import boot_clock
from shoal.run_folder import RunFolder
from shoal.sync import replicas
from shoal.sync.membership_client import AgentConnection, MembershipClient
from shoal.sync.process_groups import drop_groups
from shoal.sync.replicas import combine_digests, tensor_digests
from shoal.sync.world import RankIdentity, World, unjoined_world
from shoal.tools.report.commit_log import check_ledger
from shoal.train import worker
from shoal.train.auto_sync import SyncChooser
from shoal.train.build import make_trainer
from shoal.train.checkpoint import moments, weights
from shoal.train.recorder import Recorder
from shoal.train.recover import GenerationChanger
from shoal.train.state_transfer import Replica, Transfer, TransferPlan
from shoal.train.trainer import StopRequest
from tests.support.programs import TINY, read_jsonl
from tests.support.ranks import run_ranks

WAYS = {
    "ddp": ("sync.inside=gloo",),
    "stock": ("sync.mode=stock",),
    "accumulate": ("sync.accumulate=2",),
    "local": ("sync.mode=local", "sync.every=4"),
    "diloco": ("sync.mode=diloco", "sync.every=4"),
    "streaming": ("sync.mode=streaming", "sync.every=4", "sync.fragments=2", "sync.overlap=1"),
}
SETTINGS = ("train.global_batch=8", "train.steps=1000", "train.eval_every=1000", "train.checkpoint_every=1000")
TRAINED = 5
# More exchanges than a regroup of any mode has with pieces of this size.
MOST_EXCHANGES = 32
PIECE_BYTES = 8 << 10
DYING = 6


def folder_of(tmp_path: Path, way: str, ranks: int) -> Path:
    sets = [*TINY, *SETTINGS, f"run.on=local:{ranks}", *WAYS[way]]
    return create_run(build_config("grammar", None, sets=sets), tmp_path / "run", ranks).path


class Agent:
    """The other end of one rank's line: sends orders, and halts the rank when a peer reports a failure."""

    def __init__(self, folder: Path) -> None:
        ours, self._end = socket.socketpair()
        self.member = MembershipClient(AgentConnection(ours.detach()))
        self._folder = folder
        self._generation = Ballot(0, 0)
        threading.Thread(target=self._watch, daemon=True).start()
        threading.Thread(target=self._drain, daemon=True).start()

    def enter(self, ids: tuple[int, ...], me: int, step: int, first: bool = False) -> EnterGeneration:
        self._generation = Ballot(self._generation.number + 1, 0)
        order = EnterGeneration(
            generation=self._generation,
            lineage=Lineage(name=Ballot(1, 0)),
            rank=ids.index(me),
            local_rank=ids.index(me),
            local_size=len(ids),
            ids=ids,
            nodes=("local",) * len(ids),
            state=State(step=step),
            source=0,
            first=first,
            has_state=True,
            keeps_files=ids[0] == me,
            launched=len(ids),
        )
        self._send(order)
        enter = self.member.await_enter()
        # Not before: a lease of a generation that the rank has not entered counts for nothing.
        self._send(LeaseRenewed(generation=self._generation, at_s=boot_clock() + 600))
        return enter

    def report(self) -> None:
        """This generation is broken."""
        self._mark(self._generation).touch()

    def await_end(self) -> None:
        while not self.member.fence.is_over:
            time.sleep(0.02)

    def _mark(self, generation: Ballot) -> Path:
        return self._folder / f"broken-{generation}"

    def _watch(self) -> None:
        left = Ballot(0, 0)
        while True:
            time.sleep(0.02)
            current = self._generation
            if current != left and self._mark(current).exists():
                left = current
                self._send(LeaveGeneration(generation=current, after_step=False))

    def _drain(self) -> None:
        while self._end.recv(1 << 16):
            pass

    def _send(self, message: ToRank) -> None:
        self._end.sendall(to_frame(message))


def die_before(k: int, last_act: Callable[[], None]) -> None:
    """Ends this process before its k-th exchange from now on."""
    left = iter(range(k))

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                last_act()
                os._exit(9)
            return exchange(*arguments, **options)

        return count

    for name in ("broadcast", "all_gather", "barrier"):
        setattr(dist, name, counted(getattr(dist, name)))


def standing(membership: GenerationChanger) -> dict[str, Any]:
    """Everything that the next generation is told of a rank, or that it trains on with."""
    trainer = membership.trainer
    position = membership.member.fence.position()
    return {
        "held": position is not None and position.step,
        "has_state": membership.has_state,
        "weights": combine_digests(tensor_digests(weights(trainer.model))),
        "outer momentum": combine_digests(tensor_digests(membership._outer_momentum)),
        "moments": combine_digests(tensor_digests(moments(trainer.model, trainer.optimizer))),
        "counted": sorted({float(state["step"]) for state in trainer.optimizer.state.values()}),
        "progress": (trainer.progress.step, trainer.progress.cursor, membership._state_step),
        "history": trainer.history,
        "peak_lr": trainer.peak_lr,
        "sync": membership.chooser.as_numbers(),
        "known": sorted({record["step"] for record in (*trainer.recorder.pending, *trainer.recorder.committed)}),
        "unknown": len(trainer.unsettled_steps()),
    }


def live(world: World, folder: Path, deaths: list[int]) -> dict[str, Any]:
    """One rank's life: it trains, then regroups until it is its turn to die or it is one of the last two."""
    me, size = world.rank, world.size
    drop_groups()
    replicas._CHUNK_BYTES = PIECE_BYTES
    run = RunFolder(folder)
    config = load_config(run.config)
    agent = Agent(folder)
    here = unjoined_world(Placement(me, size, me, size, launcher="shoal"), world.device)
    recorder = Recorder(run, here, agent.member)
    trainer = make_trainer(config, run, here, recorder, StopRequest(), agent.member.fence)
    store = dist.FileStore(str(folder / "keys"), size)
    place = RankIdentity("local", world.device, "lo", None, agent.member.release)
    membership = GenerationChanger(agent.member, store, place, trainer, SyncChooser(trainer, config.sync), run)
    worker.enter_first_generation(membership, agent.enter(tuple(range(size)), me, 0, first=True), resume=False)
    for _ in range(TRAINED):
        trainer.step()
    # Through files: the first rank that leaves a barrier would halt those that are still in it.
    (folder / f"trained-{me}").touch()
    while len(list(folder.glob("trained-*"))) < size:
        time.sleep(0.02)
    agent.report()
    agent.await_end()
    membership.release_group()
    with torch.no_grad():
        for tensor in (*weights(trainer.model).values(), *moments(trainer.model, trainer.optimizer).values()):
            tensor.add_(1 + me)
    seen = [standing(membership)]
    for turn, k in enumerate(deaths):
        enter = agent.enter(tuple(range(turn, size)), me, membership._state_step)
        if turn == me:
            die_before(k, agent.report)
            membership.try_to_enter(enter, time.perf_counter())
            # It got through: then it dies as soon as it could train.
            agent.report()
            os._exit(9)
        if membership.try_to_enter(enter, time.perf_counter()):
            agent.await_end()
        membership.release_group()
        seen.append(standing(membership))
    last = tuple(range(len(deaths), size))
    assert membership.try_to_enter(agent.enter(last, me, membership._state_step), time.perf_counter())
    for _ in range(3):
        trainer.step()
    trainer.settle()
    recorder.commit(trainer.outer.common_step(trainer.progress.step))
    with trainer.outer.common():
        ended = combine_digests(tensor_digests(weights(trainer.model)))
    return {"seen": seen, "ended": ended, "step": trainer.progress.step}


def check_chain(tmp_path: Path, way: str, deaths: list[int]) -> None:
    size = len(deaths) + 2
    folder = folder_of(tmp_path, way, size)
    dying = range(len(deaths))
    lives = run_ranks(live, size, tmp_path, folder, deaths, deadline_s=240.0, dying=dying)
    survivors = [life for life in lives if life is not None]
    assert len(survivors) == 2
    assert len({(life["ended"], life["step"]) for life in survivors}) == 1
    begun = survivors[0]["seen"][0]["progress"][2]
    assert survivors[0]["step"] == begun + 3
    for life in survivors:
        for before, after in zip(life["seen"], life["seen"][1:], strict=False):
            assert after["has_state"]
            assert after["held"] == before["held"]
            # Copied moments belong to copied weights: a rank is never half of one and half of another.
            own = [after[name] == before[name] for name in ("weights", "moments", "outer momentum")]
            changed = after["weights"] != before["weights"]
            assert after == before if not changed else not own[1], (before, after)
    ledger = check_ledger(read_jsonl(folder / "commits.jsonl"))
    assert ledger.ok, ledger
    assert ledger.steps >= begun


def transfer_to(world: World, has_memory: bool) -> dict[str, Any]:
    """Rank 0 sends; rank 1 has another state, rank 2 the same one."""
    verdict = TransferPlan(source=0, step=5, behind=(1,))
    own = Replica(named("model.", world.rank % 2), {}, named("optimizer.", world.rank % 2))
    before = digest_of(own)
    transfer = Transfer(world, verdict, False, True, lambda: named("optimizer.", 7))
    if not has_memory:
        setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))  # noqa: B010 - mypy minds the rest
    refused = False
    try:
        room = transfer.allocate(own, {}, has_state=True)
    except MemoryError:
        refused = True
        room = transfer.allocate(own, {}, has_state=False)
    transfer.run(room)
    return {"refused": refused, "before": before, "own": digest_of(own), "received": digest_of(room)}


def named(prefix: str, value: int) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": torch.full((size,), float(value)) for name, size in (("a", 1000), ("b", 70_000))}


def digest_of(replica: Replica) -> int:
    return combine_digests(tensor_digests({**replica.weights, **replica.moments}))


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_second_copy_is_taken_only_where_a_state_would_be_lost_and_memory_suffices(
    has_memory: bool, tmp_path: Path
) -> None:
    source, behind, same = run_ranks(transfer_to, 3, tmp_path, has_memory)
    assert source["received"] == behind["received"] == same["received"] == source["before"]
    assert (behind["own"] == behind["before"]) == has_memory, "its own state is kept unless there is no room"
    # Neither the source nor a rank with the same bits needs memory.
    assert [life["refused"] for life in (source, behind, same)] == [False, not has_memory, False]


# A dying rank before each of these exchanges: a regroup of the tiny model has about 25.
def deaths_of(part: int) -> list[int]:
    return list(range(MOST_EXCHANGES))[part :: MOST_EXCHANGES // DYING + 1]


PARTS = range(MOST_EXCHANGES // DYING + 1)
LONG = (("streaming", 4), ("ddp", 2))


@pytest.mark.parametrize(
    ("way", "part"),
    [
        pytest.param(way, part, marks=pytest.mark.long if (way, part) in LONG else pytest.mark.exhaustive)
        for way in WAYS
        for part in PARTS
    ],
)
@pytest.mark.timeout(300)
def test_a_lost_source_leaves_every_rank_with_a_whole_state(way: str, part: int, tmp_path: Path) -> None:
    check_chain(tmp_path, way, deaths_of(part))
