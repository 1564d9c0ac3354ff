"""How the ranks of a new generation become equal: find the replica that is ahead, copy its state, reconcile the ledger.

The decisions are pure functions. The exchanges are a few small collectives that every rank takes part in.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.control.rank_messages import AbandonCommits
from shoal.engine import recorder
from shoal.engine.recorder import Record
from shoal.engine.replica import Replica
from shoal.engine.training_state import StateTree, allocate, described_bytes
from shoal.errors import RunFailed
from shoal.events import EventLog
from shoal.host.memory import available_bytes
from shoal.sync.interruptible import await_work
from shoal.sync.replicas import broadcast_integers, broadcast_tensors, gather_integers
from shoal.sync.world import World
from shoal.units import format_si, format_spans

# Records of the ledger in one exchange: some megabytes, seconds on any link.
_RECORDS_PER_EXCHANGE = 20_000


@dataclass(frozen=True)
class ReplicaState:
    """One rank's state, as the others need to know it."""

    has_state: bool
    step: int
    digest: int
    unsettled: int = 0  # Steps of which the rank has not learned the world's loss.


@dataclass(frozen=True)
class TransferPlan:
    source: int  # The rank whose state all ranks continue from.
    step: int
    behind: tuple[int, ...]  # The ranks that have another state, or none.


class NoSurvivingState(RunFailed):
    """No rank of this generation has a state: the agents agree on the next one, which returns to a checkpoint."""


def plan_transfer(states: Sequence[ReplicaState]) -> TransferPlan:
    """Choose the state to continue from: the furthest, and of several such the one that most ranks have.

    Among the ranks that have it, the source is the one that knows the world's loss of most steps.
    """
    holders = [rank for rank, state in enumerate(states) if state.has_state]
    if not holders:
        raise NoSurvivingState(
            "no rank of this generation has a state to continue from",
            why="the ranks that had it were lost while it was being copied",
            fix="resume from the last checkpoint: shoal train --resume RUN",
        )
    step = max(states[rank].step for rank in holders)
    furthest = [rank for rank in holders if states[rank].step == step]
    # `most_common` keeps the order of first occurrence: of two digests with as many ranks, that of the lower rank.
    digest = Counter(states[rank].digest for rank in furthest).most_common(1)[0][0]
    agreeing = [rank for rank in furthest if states[rank].digest == digest]
    source = min(agreeing, key=lambda rank: (states[rank].unsettled, rank))
    behind = tuple(rank for rank in range(len(states)) if rank not in agreeing)
    return TransferPlan(source, step, behind)


def agree_on_source(world: World, own: ReplicaState) -> TransferPlan:
    rows = gather_integers(world, [own.has_state, own.step, own.digest, own.unsettled])
    return plan_transfer([ReplicaState(bool(has_state), *numbers) for has_state, *numbers in rows])


@dataclass(frozen=True)
class JoinerInfo:
    """What must be equal on all ranks beside the state itself, or some would start an exchange that others do not."""

    cursor: int
    global_batch: int
    micro_batch: int
    periodic_done_step: int
    tasks_done: Mapping[str, int]
    reported_step: int  # See `PeriodicProgress`.
    last_step: int  # Of the training, as agreed.
    has_fixed_shapes: bool
    sync: Sequence[int]  # The sync choice as numbers, see `SyncChooser`.
    speeds: Mapping[str, float]  # The measured speeds by rank id, see `Balance`.
    left_out: Mapping[str, int]  # The ids of ranks that were left out as too slow, see `Balance`.
    history: Sequence[tuple[str, int]]  # The lineages before this launch's first one.

    def broadcast(self, world: World, source: int) -> JoinerInfo:
        """Return the source's values. JSON keeps every bit of a float."""
        return JoinerInfo(**broadcast_json(world, source, asdict(self)))


@dataclass(frozen=True)
class CopiedState:
    """The state of a replica, on its way to others."""

    weights: dict[str, Tensor]
    outer_momentum: dict[str, Tensor]
    optimizer: StateTree


@dataclass(frozen=True)
class ReplicaShape:
    """The source's state without its contents. A new rank has no optimizer state yet."""

    outer_momentum: dict[str, Any]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class Transfer:
    """Copies the source's state to all ranks of a new generation.

    A rank that has a state receives into spare memory: at most one further copy of what is sent, freed after the swap.
    It keeps its own state until the last piece has arrived, so that losing the source in between costs no state. A rank
    without a state receives into its model. A rank that agrees with the source takes part and drops what arrives of the
    common part: weights and outer momentum. The optimizers' state belongs to the common part unless the mode
    `is_outer`.
    """

    world: World
    plan: TransferPlan
    is_outer: bool

    @property
    def sends_common(self) -> bool:
        return bool(self.plan.behind)

    @property
    def sends_optimizer(self) -> bool:
        """Whether the optimizers' state is sent. It differs between replicas in outer modes: all take the source's."""
        return bool(self.plan.behind) or self.is_outer

    @property
    def _agrees(self) -> bool:
        return self.world.rank not in self.plan.behind

    @property
    def _is_source(self) -> bool:
        return self.world.rank == self.plan.source

    def broadcast_shape(self, own: CopiedState) -> ReplicaShape:
        shape = ReplicaShape(StateTree(own.outer_momentum, None).describe(), own.optimizer.describe())
        return ReplicaShape(**broadcast_json(self.world, self.plan.source, asdict(shape) if self._is_source else {}))

    def count_bytes(self, own: CopiedState, shape: ReplicaShape, common: bool = True, optimizer: bool = True) -> int:
        """Count the bytes from the source to each other rank, of the parts that are asked for."""
        if self.world.size == 1:
            return 0
        common_bytes = sum(tensor.nbytes for tensor in own.weights.values()) + described_bytes(shape.outer_momentum)
        optimizer_bytes = described_bytes(shape.optimizer)
        return common_bytes * (common and self.sends_common) + optimizer_bytes * (optimizer and self.sends_optimizer)

    def allocate(self, own: CopiedState, shape: ReplicaShape, has_state: bool) -> CopiedState:
        """Return the tensors to receive into. Raise MemoryError if a second copy does not fit."""
        if self._is_source or self.world.size == 1:
            return own
        takes_common = self.sends_common and not self._agrees
        takes_optimizer = self.sends_optimizer and (not self._agrees or self.is_outer)
        if has_state:
            _check_memory(self.count_bytes(own, shape, takes_common, takes_optimizer), self.world)
        with _as_memory_error():
            weights, outer_momentum, optimizer = own.weights, own.outer_momentum, own.optimizer
            if takes_common:
                outer_momentum = dict(allocate(shape.outer_momentum, self.world.device).tensors)
                if has_state:
                    weights = {name: torch.empty_like(tensor) for name, tensor in own.weights.items()}
            if takes_optimizer:
                is_in_place = not has_state and optimizer.is_described_by(shape.optimizer)
                if is_in_place:
                    optimizer = StateTree(optimizer.tensors, shape.optimizer["values"])
                else:
                    optimizer = allocate(shape.optimizer, self.world.device)
        return CopiedState(weights, outer_momentum, optimizer)

    def run(self, target: CopiedState) -> None:
        """Send or receive: every rank handles the same pieces in the same order."""
        if self.world.size == 1:
            return
        if self.sends_common:
            tensors = [*target.weights.values(), *target.outer_momentum.values()]
            broadcast_tensors(self.world, self.plan.source, tensors, keep=not self._agrees)
        if self.sends_optimizer:
            keep = not self._agrees or self.is_outer
            broadcast_tensors(self.world, self.plan.source, target.optimizer.tensors.values(), keep)

    def sent_tensors(self, target: CopiedState) -> dict[str, Tensor]:
        """Return the tensors that must have the same bits on every rank after `run`."""
        common = {**target.weights, **target.outer_momentum} if self.sends_common else {}
        return {**common, **(target.optimizer.tensors if self.sends_optimizer else {})}


def broadcast_state(world: World, source: int, state: StateTree | None) -> StateTree:
    """Return the source's state; `state` is None on the other ranks."""
    description = broadcast_json(world, source, {} if state is None else state.describe())
    if world.rank != source or state is None:
        state = allocate(description, world.device)
    broadcast_tensors(world, source, state.tensors.values())
    return state


def _check_memory(needed_bytes: int, world: World) -> None:
    """Raise MemoryError before Linux grants memory that it does not have and kills a process later.

    The ranks of one machine copy at the same time, so each may use its part of the free memory.
    """
    if world.device.type == "cpu":
        free_bytes = available_bytes() // world.local_size
    else:
        free_bytes = torch.cuda.mem_get_info(world.device)[0]
    if needed_bytes > free_bytes:
        raise MemoryError(f"{format_si(needed_bytes, 'B')} needed, {format_si(free_bytes, 'B')} free")


@contextmanager
def _as_memory_error() -> Iterator[None]:
    """Convert torch's errors: its CPU allocator raises a plain RuntimeError, without a class of its own."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError(str(error).split("\n")[0]) from None
        raise


def broadcast_json(world: World, source: int, document: Any) -> Any:
    """Send a document from one rank to all; return it."""
    payload = json.dumps(document).encode() if world.rank == source else b""
    [size] = broadcast_integers(world, source, [len(payload)])
    block = torch.zeros(size, dtype=torch.uint8, device=world.control_device)
    if world.rank == source:
        block.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    await_work(dist.broadcast(block, src=source, group=world.group, async_op=True), world.release)
    return json.loads(block.cpu().numpy().tobytes())


def gather_json(world: World, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the small documents of all ranks, in order of rank."""
    payload = json.dumps(document).encode()
    longest = max(size for [size] in gather_integers(world, [len(payload)]))
    block = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8).to(world.control_device)
    blocks = [torch.empty_like(block) for _ in range(world.size)]
    await_work(dist.all_gather(blocks, block, group=world.group, async_op=True), world.release)
    return [json.loads(received.cpu().numpy().tobytes()) for received in blocks]


def share_pending(replica: Replica, path: Path, own_step: int, world: World, plan: TransferPlan) -> list[Record]:
    """Return the steps that all ranks have now and that this rank, or its ledger, has not committed.

    What a lost rank knew of the last step's loss is lost with it: then the record has the source's own loss and is
    marked `partial`. Changes nothing here: the generation may break before this rank has the state of these steps.
    `own_step` is the step of this rank's state.
    """
    # A rank that is behind keeps only what it shares: later steps belong to a generation that continued without it.
    shared_step = min(plan.step, own_step)
    pending = [record for record in replica.recorder.pending if record["step"] <= shared_step]
    # A rank that keeps a ledger may not have learned of these commits, or may have died before it wrote them.
    committed = replica.recorder.committed
    is_source = world.rank == plan.source
    sent = committed + pending + _own_losses(replica, pending, own_step) if is_source else []
    received: list[Record] = broadcast_json(world, plan.source, sent)
    if world.rank in plan.behind:
        committed = []
    by_step = {record["step"]: record for record in (*committed, *pending, *received)}
    records = [by_step[step] for step in sorted(by_step)]
    if world.keeps_files:
        return recorder.missing_records(path, records)
    known = {recorder.record_key(record) for record in committed}
    return [record for record in records if recorder.record_key(record) not in known]


def _own_losses(replica: Replica, pending: list[Record], own_step: int) -> list[Record]:
    """Return records with this rank's own loss, of steps whose world loss it has not learned."""
    known = {record["step"] for record in pending}
    return [
        replica.recorder.describe(
            began.step + 1, began.cursor, plan, loss * plan.global_batch / plan.shares[replica.world.rank]
        )
        | {"partial": True}
        # There may be one loss more than steps: that of a step which was never applied.
        for (began, plan), loss in zip(replica.steps.unsettled, replica.exchanges.steps.own_losses(), strict=False)
        if began.step < own_step and began.step + 1 not in known
    ]


def sync_ledgers(
    world: World,
    is_behind: bool,
    path: Path,
    abandoned: Sequence[AbandonCommits],
    open_ledger: Callable[[], EventLog],
) -> list[AbandonCommits]:
    """Bring every copy of the ledger up to date; return the abandoned lineages that any rank knows of.

    A copy that is behind gets the missing records from the lowest rank with a complete copy. Every copy gets the
    records of abandoned lineages, from any rank that knows of them.
    """
    documents = gather_json(world, {"abandoned": [commits.model_dump_json() for commits in abandoned]})
    all_abandoned = {
        AbandonCommits.model_validate_json(text) for document in documents for text in document["abandoned"]
    }
    if world.keeps_files:
        recorder.mark_abandoned(open_ledger(), sorted(all_abandoned, key=lambda commits: commits.lineage))
    is_behind &= world.keeps_files
    own_step = min([recorder.last_step(path), *(c.shared_step for c in all_abandoned)]) if is_behind else 0
    copies = gather_integers(world, [is_behind, world.keeps_files and not is_behind, own_step])
    steps_behind = [step for is_copy_behind, _, step in copies if is_copy_behind]
    sources = [rank for rank, (_, is_complete, _) in enumerate(copies) if is_complete]
    if steps_behind and sources:
        kept = open_ledger().kept_events() if world.keeps_files else []
        records = _broadcast_records(world, sources[0], recorder.records_after(path, min(steps_behind), kept))
        if is_behind:
            recorder.add_missing(open_ledger(), records)
        else:
            deque(records, maxlen=0)
    return list(all_abandoned)


def fill_ledger_gaps(replica: Replica, path: Path) -> None:
    """Fill in the steps before a resumed run's checkpoint that a copy of the ledger lacks, from the other copies.

    A ledger can be cut by a disk that lost synced data, or by hand. Steps that no copy has are recorded as a hole, with
    a warning: nothing can prove any more which samples they took.
    """
    world, step = replica.world, replica.progress.step
    gaps = recorder.find_gaps(path, step) if world.keeps_files else []
    copies = gather_integers(world, [world.keeps_files, gaps[0][0] if gaps else 0])
    first_gaps = [first for _, first in copies if first]
    if not first_gaps:
        return
    complete = [rank for rank, (keeps_files, first) in enumerate(copies) if keeps_files and not first]
    for source in complete[:1] or [rank for rank, (keeps_files, _) in enumerate(copies) if keeps_files]:
        records = _broadcast_records(world, source, recorder.records_after(path, min(first_gaps) - 1))
        if gaps and world.rank != source:
            recorder.add_missing(replica.recorder.open_ledger(), records)
        else:
            deque(records, maxlen=0)
    if gaps and (lost := recorder.find_gaps(path, step, replica.recorder.open_ledger().kept_events())):
        recorder.record_holes(replica.recorder.open_ledger(), lost)
        replica.recorder.warn(
            RunFailed(
                f"{path} lacks the lines of the steps {format_spans(lost, most=100)}, which are before the checkpoint "
                f"of step {step}",
                why="the file was cut or damaged since; no other machine of this run has these lines",
                fix="the training continues; shoal verify will report that these steps cannot be proven",
            )
        )


def _broadcast_records(world: World, source: int, records: Iterator[Record]) -> Iterator[Record]:
    """Send records from one rank to all in several exchanges: a ledger can be long, and an exchange has a timeout."""
    while True:
        block = list(islice(records, _RECORDS_PER_EXCHANGE)) if world.rank == source else []
        received = broadcast_json(world, source, block)
        if not received:
            return
        yield from received
