"""What the ledger needs when a generation begins: steps that all have done and some have not written, and copies of it
that are behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from shoal.control.rankline import GiveUp
from shoal.errors import RunFailed
from shoal.events import EventLog
from shoal.sync.replicas import gather
from shoal.sync.world import World
from shoal.train import ledger
from shoal.train.handover import Verdict, gather_documents, tell_document
from shoal.train.recorder import Record
from shoal.train.trainer import Trainer
from shoal.units import format_spans

# Some megabytes: seconds on any link.
_PIECE = 20_000


@dataclass(frozen=True)
class Books:
    """Of a rank whose state is that of the step `reached`."""

    trainer: Trainer
    path: Path
    reached: int

    def share_pending(self, world: World, verdict: Verdict) -> list[Record]:
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
            return ledger.missing(self.path, found)
        known = {ledger.name_of(record) for record in committed}
        return [record for record in found if ledger.name_of(record) not in known]

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
    world: World, is_behind: bool, path: Path, given_up: Sequence[GiveUp], open_ledger: Callable[[], EventLog]
) -> list[GiveUp]:
    """A copy of the ledger that is behind gets what it lacks, from the lowest rank whose copy is not; and every copy
    the word of lineages that were given up, whoever of those that share it brings that. Returns all of these."""
    told = gather_documents(world, {"given_up": [each.model_dump_json() for each in given_up]})
    everybodys = {GiveUp.model_validate_json(each) for other in told for each in other["given_up"]}
    if world.keeps_files:
        ledger.give_up(open_ledger(), sorted(everybodys, key=lambda each: each.lineage))
    is_behind &= world.keeps_files
    mine = min([ledger.last_step(path), *(each.shared_step for each in everybodys)]) if is_behind else 0
    copies = gather(world, [is_behind, world.keeps_files and not is_behind, mine])
    missing = [step for behind, _, step in copies if behind]
    sources = [rank for rank, (_, whole, _) in enumerate(copies) if whole]
    if missing and sources:
        kept = open_ledger().kept_events() if world.keeps_files else []
        records = _in_pieces(world, sources[0], ledger.after(path, min(missing), kept))
        if is_behind:
            ledger.amend(open_ledger(), records)
        else:
            deque(records, maxlen=0)
    return list(everybodys)


def mend_ledger(trainer: Trainer, path: Path) -> None:
    """Fills in the steps before a resumed run's checkpoint that a copy of the ledger lacks, from the other copies.

    A disk that lost what it had promised to keep, or a hand, can cut a ledger. What no copy has is recorded as a hole,
    and the user is told: nothing can prove any more which samples these steps took.
    """
    world, step = trainer.world, trainer.progress.step
    ranges = ledger.lacking(path, step) if world.keeps_files else []
    copies = gather(world, [world.keeps_files, ranges[0][0] if ranges else 0])
    firsts = [first for _, first in copies if first]
    if not firsts:
        return
    whole = [rank for rank, (keeps, first) in enumerate(copies) if keeps and not first]
    for source in whole[:1] or [rank for rank, (keeps, _) in enumerate(copies) if keeps]:
        records = _in_pieces(world, source, ledger.after(path, min(firsts) - 1))
        if ranges and world.rank != source:
            ledger.amend(trainer.recorder.open_ledger(), records)
        else:
            deque(records, maxlen=0)
    if ranges and (lost := ledger.lacking(path, step, trainer.recorder.open_ledger().kept_events())):
        ledger.record_holes(trainer.recorder.open_ledger(), lost)
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
