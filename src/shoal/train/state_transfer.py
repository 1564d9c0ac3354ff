"""What ranks of a new generation tell each other before they train: who is ahead, and what whoever comes needs to know.

Decisions are pure; the exchanges themselves are a handful of small collectives that every rank goes through alike.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.control.rank_messages import AbandonCommits
from shoal.errors import RunFailed
from shoal.events import EventLog
from shoal.sync.interruptible import await_work
from shoal.sync.replicas import copy_from, gather, tell_all
from shoal.sync.world import World
from shoal.train import recorder
from shoal.train.recorder import Record
from shoal.train.trainer import Trainer
from shoal.units import format_spans


@dataclass(frozen=True)
class ReplicaState:
    """Where one rank's replica stands. `unknown`: steps of which it has not learned the world's loss."""

    holds: bool
    step: int
    digest: int
    unknown: int = 0


@dataclass(frozen=True)
class TransferPlan:
    """`source` has the state that all go on from; `behind` are the ranks that have another one, or none."""

    source: int
    step: int
    behind: tuple[int, ...]


class NoSurvivingState(RunFailed):
    """No rank of this generation has a state: the agents have to agree on another one, which goes back to a
    checkpoint."""


def judge(standings: Sequence[ReplicaState]) -> TransferPlan:
    """The furthest state counts; where ranks that are equally far differ, what most of them have. Among those that
    have it, whoever knows most of the last step speaks."""
    holding = [rank for rank, each in enumerate(standings) if each.holds]
    if not holding:
        raise NoSurvivingState(
            "no rank of this generation has a state to train on from",
            why="the ranks that had it were lost while it was being copied",
            fix="go on from the last checkpoint: shoal train --resume RUN",
        )
    step = max(standings[rank].step for rank in holding)
    furthest = [rank for rank in holding if standings[rank].step == step]
    votes = Counter(standings[rank].digest for rank in furthest)
    # Of two digests with as many votes, the one that a lower rank has.
    digest = max(votes, key=lambda each: (votes[each], -_first(standings, furthest, each)))
    agreeing = [rank for rank in furthest if standings[rank].digest == digest]
    source = min(agreeing, key=lambda rank: (standings[rank].unknown, rank))
    behind = tuple(rank for rank in range(len(standings)) if rank not in agreeing)
    return TransferPlan(source, step, behind)


def _first(standings: Sequence[ReplicaState], ranks: Sequence[int], digest: int) -> int:
    return next(rank for rank in ranks if standings[rank].digest == digest)


def compare(world: World, mine: ReplicaState) -> TransferPlan:
    told = gather(world, [mine.holds, mine.step, mine.digest, mine.unknown])
    return judge([ReplicaState(bool(holds), step, digest, unknown) for holds, step, digest, unknown in told])


@dataclass(frozen=True)
class JoinerInfo:
    """What all ranks must know alike beside the state itself, or some would exchange what others don't. `sync` are the
    chooser's numbers."""

    cursor: int
    global_batch: int
    micro_batch: int
    peak_lr: float
    tended_step: int
    evaluated_step: int
    has_moments: bool
    compiled: bool
    bf16: bool
    sync: tuple[int, ...]

    def tell(self, world: World, source: int) -> JoinerInfo:
        counts = [self.cursor, self.global_batch, self.micro_batch, self.tended_step, self.evaluated_step]
        flags = [self.has_moments, self.compiled, self.bf16]
        told = tell_all(world, source, [*counts, _as_int(self.peak_lr), *flags, *self.sync])
        cursor, batch, micro, tended, evaluated, lr, has_moments, compiled, bf16, *sync = told
        return JoinerInfo(
            cursor=cursor,
            global_batch=batch,
            micro_batch=micro,
            peak_lr=_as_float(lr),
            tended_step=tended,
            evaluated_step=evaluated,
            has_moments=bool(has_moments),
            compiled=bool(compiled),
            bf16=bool(bf16),
            sync=tuple(sync),
        )


@dataclass(frozen=True)
class Replica:
    """The tensors of one replica by name. `lasting`: outer momentum."""

    weights: dict[str, Tensor]
    lasting: dict[str, Tensor]
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class Transfer:
    """The source's state on its way to all ranks of a new generation.

    A rank that has a state receives into spare memory: at most one further copy of what is sent, freed after the swap.
    It keeps its own until the last piece has arrived, so that a source that is lost in between costs no state. A rank
    that has none receives into its model. A rank that agrees with the source drops what arrives of the common part:
    weights, and outer momentum. Inner moments belong to the common part unless the mode `is_outer`.
    """

    world: World
    verdict: TransferPlan
    is_outer: bool
    has_moments: bool
    new_moments: Callable[[], dict[str, Tensor]]

    @property
    def sends_common(self) -> bool:
        return bool(self.verdict.behind)

    @property
    def sends_moments(self) -> bool:
        """Those of replicas that parted differ anyway: all go on with the source's."""
        return self.has_moments and (bool(self.verdict.behind) or self.is_outer)

    @property
    def _agrees(self) -> bool:
        return self.world.rank not in self.verdict.behind

    @property
    def _is_source(self) -> bool:
        return self.world.rank == self.verdict.source

    def tell_shapes(self, own: Replica) -> dict[str, list[int]]:
        """Of the source's outer momentum: a rank that comes from another mode, or is new, has none."""
        shapes = {name: list(tensor.shape) for name, tensor in own.lasting.items()} if self._is_source else {}
        told: dict[str, list[int]] = tell_document(self.world, self.verdict.source, shapes)
        return told

    def sent_bytes(
        self, own: Replica, shapes: Mapping[str, Sequence[int]], common: bool = True, moments: bool = True
    ) -> int:
        """From the source to each other rank; the parts of it that are asked for."""
        if self.world.size == 1:
            return 0
        model_bytes = sum(tensor.nbytes for tensor in own.weights.values())
        common_bytes = model_bytes + sum(4 * math.prod(shape) for shape in shapes.values())
        return common_bytes * (common and self.sends_common) + 2 * model_bytes * (moments and self.sends_moments)

    def make_room(self, own: Replica, shapes: Mapping[str, Sequence[int]], has_state: bool) -> Replica:
        """Where each tensor is received. Raises MemoryError where there is none left for a second copy."""
        if self._is_source or self.world.size == 1:
            return own
        takes_common = self.sends_common and not self._agrees
        takes_moments = self.sends_moments and (not self._agrees or self.is_outer)
        if has_state:
            _refuse_without_memory(self.sent_bytes(own, shapes, takes_common, takes_moments), self.world)
        with _as_memory_error():
            weights, lasting, moments = own.weights, own.lasting, own.moments
            if takes_common:
                some = next(iter(own.weights.values()))
                lasting = {name: some.new_empty(tuple(shape)) for name, shape in shapes.items()}
                if has_state:
                    weights = {name: torch.empty_like(tensor) for name, tensor in own.weights.items()}
            if (self.sends_moments and not moments) or (takes_moments and has_state):
                moments = self.new_moments()
        return Replica(weights, lasting, moments)

    def run(self, room: Replica) -> None:
        """Every rank sends or receives the same pieces in the same order."""
        if self.world.size == 1:
            return
        if self.sends_common:
            tensors = [*room.weights.values(), *room.lasting.values()]
            copy_from(self.world, self.verdict.source, tensors, keep=not self._agrees)
        if self.sends_moments:
            keep = not self._agrees or self.is_outer
            copy_from(self.world, self.verdict.source, room.moments.values(), keep)

    def compared(self, room: Replica) -> dict[str, Tensor]:
        """What must have the same bits on every rank now."""
        common = {**room.weights, **room.lasting} if self.sends_common else {}
        return {**common, **(room.moments if self.sends_moments else {})}


def _refuse_without_memory(needed_bytes: int, world: World) -> None:
    """Linux grants memory that it does not have and kills later: ask first. Ranks of one machine copy at once."""
    if world.device.type == "cpu":
        free_bytes = psutil.virtual_memory().available // world.local_size
    else:
        free_bytes = torch.cuda.mem_get_info(world.device)[0]
    if needed_bytes > free_bytes:
        raise MemoryError(f"{needed_bytes / 1e9:.2f} GB needed, {free_bytes / 1e9:.2f} GB free")


@contextmanager
def _as_memory_error() -> Iterator[None]:
    """torch has no class of its own for the machine's memory: its allocator raises a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise MemoryError(str(error).split("\n")[0]) from None
        raise


def tell_document(world: World, source: int, document: Any) -> Any:
    """Anything that JSON can say, from one rank to all."""
    payload = json.dumps(document).encode() if world.rank == source else b""
    [size] = tell_all(world, source, [len(payload)])
    block = torch.zeros(size, dtype=torch.uint8, device=world.device)
    if world.rank == source:
        block.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    await_work(dist.broadcast(block, src=source, group=world.group, async_op=True), world.release)
    return json.loads(block.cpu().numpy().tobytes())


def gather_documents(world: World, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Something small of every rank, for all."""
    payload = json.dumps(mine).encode()
    longest = max(size for [size] in gather(world, [len(payload)]))
    block = torch.frombuffer(bytearray(payload.ljust(longest)), dtype=torch.uint8).to(world.device)
    everyone = [torch.empty_like(block) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, block, group=world.group, async_op=True), world.release)
    return [json.loads(theirs.cpu().numpy().tobytes()) for theirs in everyone]


def _as_int(value: float) -> int:
    """The same bits, since ranks tell each other whole numbers."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def _as_float(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


# SECTION train/books
# What the ledger needs when a generation begins: steps that all have done and some have not written, and copies of it
# that are behind.


# Some megabytes: seconds on any link.
_PIECE = 20_000


@dataclass(frozen=True)
class LedgerSync:
    """Of a rank whose state is that of the step `reached`."""

    trainer: Trainer
    path: Path
    reached: int

    def share_pending(self, world: World, verdict: TransferPlan) -> list[Record]:
        """Steps that all have by now and that some have not committed. What a lost rank knew of the last one's loss
        is gone with it: then it is what the source itself saw, and says so. Changes nothing here: the generation may
        break before this rank has the state that these steps lead to."""
        # Of one that is behind, what it did since belongs to a generation that went on without it.
        kept = min(verdict.step, self.reached)
        own = [record for record in self.trainer.recorder.pending if record["step"] <= kept]
        # What it knows to be committed, whoever keeps a ledger may not have learned yet, or died before it wrote it.
        committed = self.trainer.recorder.committed
        mine = committed + own + self._seen_alone(own) if world.rank == verdict.source else []
        told: list[Record] = tell_document(world, verdict.source, mine)
        if world.rank in verdict.behind:
            committed = []
        by_step = {record["step"]: record for record in (*committed, *own, *told)}
        found = [by_step[step] for step in sorted(by_step)]
        if world.keeps_files:
            return recorder.missing(self.path, found)
        known = {recorder.name_of(record) for record in committed}
        return [record for record in found if recorder.name_of(record) not in known]

    def _seen_alone(self, known: list[Record]) -> list[Record]:
        trainer, batch = self.trainer, self.trainer.global_batch
        told = {record["step"] for record in known}
        return [
            trainer.recorder.describe(before.step + 1, before.cursor, before.cursor + batch, loss / trainer.own_tokens)
            | {"partial": True}
            # A loss more than steps: that of a step which was never applied.
            for before, loss in zip(trainer.unknown(), trainer.exchange.own_losses(), strict=False)
            if before.step < self.reached and before.step + 1 not in told
        ]


def bring_ledger(
    world: World, is_behind: bool, path: Path, given_up: Sequence[AbandonCommits], open_ledger: Callable[[], EventLog]
) -> list[AbandonCommits]:
    """A copy of the ledger that is behind gets what it lacks, from the lowest rank whose copy is not; and every copy
    the word of lineages that were given up, whoever of those that share it brings that. Returns all of these."""
    told = gather_documents(world, {"given_up": [each.model_dump_json() for each in given_up]})
    everybodys = {AbandonCommits.model_validate_json(each) for other in told for each in other["given_up"]}
    if world.keeps_files:
        recorder.give_up(open_ledger(), sorted(everybodys, key=lambda each: each.lineage))
    is_behind &= world.keeps_files
    mine = min([recorder.last_step(path), *(each.shared_step for each in everybodys)]) if is_behind else 0
    copies = gather(world, [is_behind, world.keeps_files and not is_behind, mine])
    missing = [step for behind, _, step in copies if behind]
    sources = [rank for rank, (_, whole, _) in enumerate(copies) if whole]
    if missing and sources:
        kept = open_ledger().kept_events() if world.keeps_files else []
        records = _in_pieces(world, sources[0], recorder.after(path, min(missing), kept))
        if is_behind:
            recorder.amend(open_ledger(), records)
        else:
            deque(records, maxlen=0)
    return list(everybodys)


def mend_ledger(trainer: Trainer, path: Path) -> None:
    """Fills in the steps before a resumed run's checkpoint that a copy of the ledger lacks, from the other copies.

    A disk that lost what it had promised to keep, or a hand, can cut a ledger. What no copy has is recorded as a hole,
    and the user is told: nothing can prove any more which samples these steps took.
    """
    world, step = trainer.world, trainer.progress.step
    ranges = recorder.lacking(path, step) if world.keeps_files else []
    copies = gather(world, [world.keeps_files, ranges[0][0] if ranges else 0])
    firsts = [first for _, first in copies if first]
    if not firsts:
        return
    whole = [rank for rank, (keeps, first) in enumerate(copies) if keeps and not first]
    for source in whole[:1] or [rank for rank, (keeps, _) in enumerate(copies) if keeps]:
        records = _in_pieces(world, source, recorder.after(path, min(firsts) - 1))
        if ranges and world.rank != source:
            recorder.amend(trainer.recorder.open_ledger(), records)
        else:
            deque(records, maxlen=0)
    if ranges and (lost := recorder.lacking(path, step, trainer.recorder.open_ledger().kept_events())):
        recorder.record_holes(trainer.recorder.open_ledger(), lost)
        trainer.recorder.warn(_lost_lines(path, lost, step))


def _lost_lines(path: Path, lost: Sequence[tuple[int, int]], step: int) -> RunFailed:
    return RunFailed(
        f"{path} lacks the lines of the steps {format_spans(lost, most=100)}, "
        f"which the checkpoint of step {step} has behind it",
        why="the file was cut or damaged since; no other machine of this run has these lines",
        fix="the training goes on; shoal verify will say that these steps cannot be proven",
    )


def _in_pieces(world: World, source: int, records: Iterator[Record]) -> Iterator[Record]:
    """From one rank to all. A training of weeks has a long ledger, and an exchange has a deadline."""
    while piece := tell_document(world, source, list(islice(records, _PIECE)) if world.rank == source else []):
        yield from piece
