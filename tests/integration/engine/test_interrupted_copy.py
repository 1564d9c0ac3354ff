"""The source of a state copy is lost at every point of a regroup: real gloo ranks, one process per rank.

Every rank has its own state, so all ranks but the source copy. The lowest rank is the source and dies before its k-th
exchange; the others regroup without it, the next one dies at another k, and so on until two are left. After every death
a rank must have either exactly its own state or exactly the state of the source.

Exercises engine.state_transfer, engine.recover.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

from shoal.config.load import build_config, load_config
from shoal.control.membership.types import Ballot, Lineage, State
from shoal.control.rank_env import Placement
from shoal.control.rank_messages import EnterGeneration, LeaseRenewed, LeaveGeneration, ToRank, to_frame
from shoal.data.prepare import create_run, read_data_facts
from shoal.data.tokens import TokenWindows, open_tokens
from shoal.engine import state_transfer
from shoal.engine.entry import Attached, ElasticEntry, Entry, Hooks
from shoal.engine.environment import SessionStart
from shoal.engine.loop import StepOutcome
from shoal.engine.recorder import Recorder
from shoal.engine.recover import GenerationChanger
from shoal.engine.replica import InitialState
from shoal.engine.session import Session, Step
from shoal.engine.state_transfer import CopiedState, Transfer, TransferPlan
from shoal.engine.training_state import StateTree, TrainingState
from shoal.host.facts import boot_clock
from shoal.model.gpt import GPT
from shoal.records.commit_log import check_ledger
from shoal.run_folder import RunFolder
from shoal.sync import replicas
from shoal.sync.membership_client import AgentConnection, MembershipClient
from shoal.sync.process_groups import drop_groups
from shoal.sync.replicas import combine_digests, tensor_digests
from shoal.sync.world import RankIdentity, World, unjoined_world
from shoal.train.gpt_training import TextSource, make_optimizer, split_inputs_targets
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
# More exchanges than a regroup of any mode needs with pieces of this size.
MOST_EXCHANGES = 32
PIECE_BYTES = 8 << 10
DYING = 6


def folder_of(tmp_path: Path, way: str, ranks: int) -> Path:
    sets = [*TINY, *SETTINGS, f"run.on=local:{ranks}", *WAYS[way]]
    return create_run(build_config("grammar", None, sets=sets), tmp_path / "run", ranks).path


class Agent:
    """The agent's end of one rank's connection: sends orders, and stops the rank when a peer reports a failure."""

    def __init__(self, folder: Path) -> None:
        rank_end, self._end = socket.socketpair()
        self.member = MembershipClient(AgentConnection(rank_end.detach()))
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
        # Not earlier: a lease of a generation that the rank has not entered is ignored.
        self._send(LeaseRenewed(generation=self._generation, at_s=boot_clock() + 600))
        return enter

    def report(self) -> None:
        """Mark this generation as broken."""
        self._mark(self._generation).touch()

    def await_end(self) -> None:
        while not self.member.fence.is_over:
            time.sleep(0.02)

    def _mark(self, generation: Ballot) -> Path:
        return self._folder / f"broken-{generation}"

    def _watch(self) -> None:
        halted = Ballot(0, 0)
        while True:
            time.sleep(0.02)
            current = self._generation
            if current != halted and self._mark(current).exists():
                halted = current
                self._send(LeaveGeneration(generation=current, after_step=False))

    def _drain(self) -> None:
        while self._end.recv(1 << 16):
            pass

    def _send(self, message: ToRank) -> None:
        self._end.sendall(to_frame(message))


def die_before(k: int, before_exit: Callable[[], None]) -> None:
    """End this process before its k-th exchange from now on."""
    left = iter(range(k))

    def counted(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                before_exit()
                os._exit(9)
            return exchange(*arguments, **options)

        return count

    for name in ("broadcast", "all_gather", "barrier"):
        setattr(dist, name, counted(getattr(dist, name)))


class Member:
    """A rank of the GPT's training that is moved from generation to generation by hand."""

    def __init__(self, world: World, run: RunFolder, agent: Agent) -> None:
        config = load_config(run.config)
        placement = Placement(world.rank, world.size, world.rank, world.size, launcher="shoal")
        unjoined = unjoined_world(placement, world.device)
        torch.manual_seed(config.train.seed)
        self.model = GPT(config.model)
        self._optimizer: AdamW = make_optimizer(self.model, config.train)
        self.state = TrainingState(self.model, [self._optimizer])
        windows = TokenWindows(open_tokens(Path(read_data_facts(run).train)).tokens, config.model.seq_len)
        self._text = TextSource(windows)
        recorder = Recorder(run, unjoined, agent.member)
        # As an elastic entry makes itself, but with this test's agent and store.
        start, initial, fence = SessionStart(config, run, placement), InitialState(), agent.member.fence
        self.entry = ElasticEntry.__new__(ElasticEntry)
        Entry.__init__(self.entry, start, Attached(self.state), Hooks(), unjoined, recorder, initial, fence)
        self.replica = self.entry.replica
        store = dist.FileStore(str(run.path / "keys"), world.size)
        place = RankIdentity("local", world.device, "lo", None, agent.member.release)
        self.changer = GenerationChanger(agent.member, store, place, self.replica, self.entry.chooser, run)
        self.entry.membership = self.changer
        self._session = Session.of(start)
        self._session._entry = self.entry

    def enter_first(self, enter: EnterGeneration) -> None:
        self.entry._enter_first_generation(enter)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with Step(self._session, StepOutcome()) as step:
                for rows in step.batches(self._text):
                    step.backward(self.model(*split_inputs_targets(rows)))
                step.update(clip=1.0)

    def snapshot(self) -> dict[str, Any]:
        """Return everything of a rank that the next generation receives or continues with."""
        replica, changer = self.replica, self.changer
        position = changer.member.fence.position()
        optimizer = self.state.optimizer_state()
        return {
            "held": position is not None and position.step,
            "has_state": changer.has_state,
            "weights": combine_digests(tensor_digests(self.state.weights())),
            "lasting": combine_digests(tensor_digests(changer._outer_momentum)),
            "moments": combine_digests(tensor_digests(optimizer.tensors)),
            "counted": sorted({float(state["step"]) for state in self._optimizer.state.values()}),
            "settings": optimizer.values,
            "progress": (replica.progress.step, replica.progress.cursor, changer._state_step),
            "history": replica.history,
            "sync": changer.chooser.as_numbers(),
            "known": sorted({record["step"] for record in (*replica.recorder.pending, *replica.recorder.committed)}),
            "unknown": len(replica.steps.unsettled),
        }


def run_rank(world: World, folder: Path, deaths: list[int]) -> dict[str, Any]:
    """Train, then regroup until it is this rank's turn to die or it is one of the last two."""
    me, size = world.rank, world.size
    drop_groups()
    replicas._CHUNK_BYTES = PIECE_BYTES
    agent = Agent(folder)
    member = Member(world, RunFolder(folder), agent)
    replica, changer = member.replica, member.changer
    member.enter_first(agent.enter(tuple(range(size)), me, 0, first=True))
    member.train(TRAINED)
    # Through files: the first rank that leaves a barrier would stop those that are still in it.
    (folder / f"trained-{me}").touch()
    while len(list(folder.glob("trained-*"))) < size:
        time.sleep(0.02)
    agent.report()
    agent.await_end()
    changer.release_group()
    with torch.no_grad():
        for tensor in (*member.state.weights().values(), *member.state.optimizer_state().tensors.values()):
            tensor.add_(1 + me)
    seen = [member.snapshot()]
    for turn, k in enumerate(deaths):
        enter = agent.enter(tuple(range(turn, size)), me, changer._state_step)
        if turn == me:
            die_before(k, agent.report)
            changer.try_to_enter(enter, time.perf_counter())
            # The regroup succeeded: die before the first training step.
            agent.report()
            os._exit(9)
        if changer.try_to_enter(enter, time.perf_counter()):
            agent.await_end()
        changer.release_group()
        seen.append(member.snapshot())
    last = tuple(range(len(deaths), size))
    assert changer.try_to_enter(agent.enter(last, me, changer._state_step), time.perf_counter())
    member.train(3)
    member.entry.step.settle()
    replica.recorder.commit(replica.outer.common_step(replica.progress.step))
    with replica.outer.common():
        ended = combine_digests(tensor_digests(member.state.weights()))
    return {"seen": seen, "ended": ended, "step": replica.progress.step}


def check_chain(tmp_path: Path, way: str, deaths: list[int]) -> None:
    size = len(deaths) + 2
    folder = folder_of(tmp_path, way, size)
    dying = range(len(deaths))
    results = run_ranks(run_rank, size, tmp_path, folder, deaths, deadline_s=240.0, dying=dying)
    survivors = [result for result in results if result is not None]
    assert len(survivors) == 2
    assert len({(result["ended"], result["step"]) for result in survivors}) == 1
    begun = survivors[0]["seen"][0]["progress"][2]
    assert survivors[0]["step"] == begun + 3
    for result in survivors:
        for before, after in zip(result["seen"], result["seen"][1:], strict=False):
            assert after["has_state"]
            assert after["held"] == before["held"]
            # Copied moments belong to copied weights: a rank never mixes two states.
            own = [after[name] == before[name] for name in ("weights", "moments", "lasting")]
            changed = after["weights"] != before["weights"]
            assert after == before if not changed else not own[1], (before, after)
    ledger = check_ledger(read_jsonl(folder / "commits.jsonl"))
    assert ledger.ok, ledger
    assert ledger.steps >= begun


def transfer_to(world: World, has_memory: bool) -> dict[str, Any]:
    """Transfer the state of rank 0; rank 1 has another state, rank 2 the same one."""
    plan = TransferPlan(source=0, step=5, behind=(1,))
    value = world.rank % 2
    own = CopiedState(make_tensors("model.", value), {}, StateTree(make_tensors("optimizer.", value), {"lr": value}))
    before = digest_of(own)
    transfer = Transfer(world, plan, is_outer=False)
    if not has_memory:
        vars(state_transfer)["available_bytes"] = lambda: 0
    shape = transfer.broadcast_shape(own)
    refused = False
    try:
        room = transfer.allocate(own, shape, has_state=True)
    except MemoryError:
        refused = True
        room = transfer.allocate(own, shape, has_state=False)
    transfer.run(room)
    is_in_place = room.optimizer.tensors is own.optimizer.tensors
    return {
        "refused": refused,
        "before": before,
        "own": digest_of(own),
        "received": digest_of(room),
        "is_in_place": is_in_place,
        "settings": room.optimizer.values,
    }


def make_tensors(prefix: str, value: int) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": torch.full((size,), float(value)) for name, size in (("a", 1000), ("b", 70_000))}


def digest_of(state: CopiedState) -> int:
    return combine_digests(tensor_digests({**state.weights, **state.optimizer.tensors}))


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_second_copy_is_made_only_to_keep_a_state_and_with_enough_memory(has_memory: bool, tmp_path: Path) -> None:
    source, behind, same = run_ranks(transfer_to, 3, tmp_path, has_memory)
    assert source["received"] == behind["received"] == same["received"] == source["before"]
    assert (behind["own"] == behind["before"]) == has_memory, "the own state must be kept if there is enough memory"
    assert behind["is_in_place"] != has_memory
    assert behind["settings"] == {"lr": 0}
    # Neither the source nor a rank with the same bits needs memory.
    assert [result["refused"] for result in (source, behind, same)] == [False, not has_memory, False]


# One rank dies before every one of these exchanges: a regroup of the tiny model has about 25.
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
def test_a_lost_source_leaves_every_rank_with_a_complete_state(way: str, part: int, tmp_path: Path) -> None:
    check_chain(tmp_path, way, deaths_of(part))
