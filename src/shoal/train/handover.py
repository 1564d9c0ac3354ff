"""What ranks of a new generation tell each other before they train: who is ahead, and what whoever comes needs to know.

Decisions are pure; the exchanges themselves are a handful of small collectives that every rank goes through alike.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import RunFailed
from shoal.sync.replicas import gather, tell_all
from shoal.sync.waiting import await_work
from shoal.sync.world import World


@dataclass(frozen=True)
class Standing:
    """Where one rank's replica stands. `unknown`: steps of which it has not learned the world's loss."""

    holds: bool
    step: int
    digest: int
    unknown: int = 0


@dataclass(frozen=True)
class Verdict:
    """`source` has the state that all go on from; `behind` are the ranks that have another one, or none."""

    source: int
    step: int
    behind: tuple[int, ...]


def judge(standings: Sequence[Standing]) -> Verdict:
    """The furthest state counts; where ranks that are equally far differ, what most of them have. Among those that
    have it, whoever knows most of the last step speaks."""
    holding = [rank for rank, each in enumerate(standings) if each.holds]
    if not holding:
        raise RunFailed(
            "nobody in this generation has a state to train on from",
            why="whoever had it was lost while it was being copied",
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
    return Verdict(source, step, behind)


def _first(standings: Sequence[Standing], ranks: Sequence[int], digest: int) -> int:
    return next(rank for rank in ranks if standings[rank].digest == digest)


def compare(world: World, mine: Standing) -> Verdict:
    told = gather(world, [mine.holds, mine.step, mine.digest, mine.unknown])
    return judge([Standing(bool(holds), step, digest, unknown) for holds, step, digest, unknown in told])


@dataclass(frozen=True)
class Training:
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

    def tell(self, world: World, source: int) -> Training:
        counts = [self.cursor, self.global_batch, self.micro_batch, self.tended_step, self.evaluated_step]
        flags = [self.has_moments, self.compiled, self.bf16]
        told = tell_all(world, source, [*counts, _as_int(self.peak_lr), *flags, *self.sync])
        cursor, batch, micro, tended, evaluated, lr, has_moments, compiled, bf16, *sync = told
        return Training(
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
