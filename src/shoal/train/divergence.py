"""Do replicas still have the same bits? Compared while they train, and made equal again where they don't.

Every rank sums the same gradients and takes the same steps, so a bit that changes in one rank's memory stays that
rank's alone, and spoils everybody's gradients from then on without a word. Where most ranks agree, the odd ones copy
their state. Where no majority does (two ranks, to begin with), all go back to the newest checkpoint: each was compared
before it was written, so it is one that everybody agreed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import CheckpointError, RunFailed
from shoal.sync.replicas import combined, copy_from, gather, tell_all, tensor_digests
from shoal.train.checkpoint import CheckpointFolder, load_weights, weights
from shoal.train.resume import resume
from shoal.train.saving import replica_state
from shoal.train.trainer import Trainer

_NO_CHECKPOINT = -1


@dataclass(frozen=True)
class Difference:
    """`odd` are the ranks that are not like most others, all of them where no majority is alike; `source` is the lowest
    rank of the majority, if there is one; `tensor` is the first by name that differs."""

    odd: tuple[int, ...]
    source: int | None
    tensor: str


def judge(names: Sequence[str], told: Sequence[Sequence[int]]) -> Difference:
    """From every rank's digests of the same tensors, of which some differ."""
    rows = [tuple(row) for row in told]
    usual, count = Counter(rows).most_common(1)[0]
    has_majority = 2 * count > len(rows)
    odd = tuple(rank for rank, row in enumerate(rows) if row != usual or not has_majority)
    differing = [name for name, *digests in zip(names, *rows, strict=True) if len(set(digests)) > 1]
    return Difference(odd, rows.index(usual) if has_majority else None, min(differing))


class Comparison:
    """What is due depends on the step alone: a rank that joined a moment ago must do the same as all others."""

    def __init__(self, trainer: Trainer, checkpoints: CheckpointFolder) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints

    def is_due(self, step: int) -> bool:
        """Every `digest_every` steps, or at the end of the round where that falls into one; and after the last step,
        while there is still a way back."""
        every, outer = self._trainer.config.members.digest_every, self._trainer.outer
        # Replicas that meet only at the end of a round would wait for each other here.
        meets = outer.common_step(step) == step
        stride = 1 if outer.apart else outer.round_steps
        return step == self._trainer.config.train.steps or (meets and step // every > (step - stride) // every)

    def hold(self, is_end: bool = False) -> bool:
        """True when all replicas are equal, if need be by copying; False when the training has gone back. One that
        ends here cannot go back, and fails."""
        difference = self._look()
        if difference is None:
            return True
        if difference.source is None:
            self._go_back(difference, is_end)
            return False
        self._heal(difference, difference.source)
        return True

    def _look(self) -> Difference | None:
        trainer = self._trainer
        if trainer.world.size == 1:
            return None
        with trainer.outer.common():
            digests = tensor_digests(replica_state(trainer))
        if len({number for [number] in gather(trainer.world, [combined(digests)])}) == 1:
            return None
        return judge(list(digests), gather(trainer.world, list(digests.values())))

    def _heal(self, difference: Difference, source: int) -> None:
        trainer = self._trainer
        is_odd = trainer.world.rank in difference.odd
        if is_odd:
            # Its bits are wrong: no other rank should go on from them, whatever becomes of the copy.
            trainer.fence.lose_state()
        with trainer.outer.common():
            # The majority keeps its own: a source that is lost during the copy takes no state with it.
            copy_from(trainer.world, source, replica_state(trainer).values(), keep=is_odd)
            common = {name: tensor.clone() for name, tensor in weights(trainer.model).items()}
        if is_odd:
            # Outside a common step a replica has weights of its own, which came from the wrong ones.
            load_weights(trainer.model, common)
            for state in trainer.optimizer.state.values():
                state["step"].fill_(trainer.progress.step)
        self._check(difference)
        trainer.fence.moved(trainer.outer.common_step(trainer.progress.step))
        donor = self._id(source)
        self._tell(
            difference, trainer.progress.step, f"its whole state was copied from rank {donor}", healed_from=donor
        )

    def _go_back(self, difference: Difference, is_end: bool) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        # Whatever was told of the steps so far must not be taken for news of those that are done again.
        trainer.settle()
        trainer.recorder.commit()
        saved = self._saved_step()
        # What a generation began with is what others count on: to go back behind it takes a new launch.
        if is_end or saved == _NO_CHECKPOINT or saved < trainer.fence.floor:
            raise self._hopeless(difference, saved)
        history = trainer.history
        trainer.fence.lose_state()
        trainer.progress = resume(trainer, self._checkpoints, lambda *_: None, lineage="")
        # The same lineage goes on.
        trainer.history = history
        trainer.fence.moved(trainer.outer.common_step(trainer.progress.step))
        self._check(difference)
        back_to = trainer.progress.step
        trainer.recorder.forget_committed(after=back_to)
        done = f"all went back to step {back_to}, the last they had agreed on, and do the steps since then again"
        self._tell(difference, step, done, back_to=back_to)

    def _saved_step(self) -> int:
        """By the first rank's folder, which is the one that would be loaded; asked first, so that all fail alike."""
        found = _NO_CHECKPOINT
        if self._trainer.world.is_main:
            try:
                found = self._checkpoints.load_latest(set_aside=True).progress.step
            except CheckpointError:
                found = _NO_CHECKPOINT
        return tell_all(self._trainer.world, 0, [found])[0]

    def _check(self, difference: Difference) -> None:
        still = self._look()
        if still is not None:
            raise RunFailed(
                f"{self._describe(still, self._trainer.progress.step)}, right after all had been made equal",
                why=f"before that it was {difference.tensor}: the memory of one of these machines is not to be trusted",
                fix="test it (memtester 1G 1) before you resume: shoal train --resume RUN",
            )

    def _hopeless(self, difference: Difference, saved: int) -> RunFailed:
        seen = self._describe(difference, self._trainer.progress.step)
        if saved == _NO_CHECKPOINT:
            return RunFailed(
                seen,
                why="no majority says which of them is right, and there is no checkpoint yet to go back to",
                fix="test their memory (memtester 1G 1), then start a new run: shoal train … --out NEW_FOLDER",
            )
        return RunFailed(
            f"{seen}: what was done since step {saved} is not saved",
            why="no majority says which of them is right",
            fix=f"go on from step {saved}, the last they agreed on: shoal train --resume RUN",
        )

    def _tell(
        self, difference: Difference, step: int, done: str, healed_from: int | None = None, back_to: int | None = None
    ) -> None:
        recorder, ranks = self._trainer.recorder, self._ids(difference)
        fields = {"tensor": difference.tensor, "healed_from": healed_from, "back_to": back_to}
        recorder.event("divergence", step=step, ranks=ranks, **fields)
        if self._trainer.world.is_main:
            fix = "if it happens again, test the memory of their machines: memtester 1G 1"
            recorder.warn(
                RunFailed(f"{self._describe(difference, step)}: {done}", why="a bit changed in memory", fix=fix),
                step=step,
            )

    def _describe(self, difference: Difference, step: int) -> str:
        ids = " and ".join(map(str, self._ids(difference)))
        than = "than the others" if difference.source is not None else "than each other"
        have = f"rank {ids} has" if len(difference.odd) == 1 else f"ranks {ids} have"
        return f"after step {step} {have} another {difference.tensor} {than}"

    def _ids(self, difference: Difference) -> list[int]:
        return [self._id(rank) for rank in difference.odd]

    def _id(self, rank: int) -> int:
        return self._trainer.world.ids[rank]
