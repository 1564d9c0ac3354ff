"""Epochs of a session: the steps of a pass over the dataset, one loop inside the other.

Batches are cut from one endless stream of samples, each epoch of it in an order of its own. So no batch is smaller than
the others: a step that reaches over the end of an epoch belongs to the epoch in which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shoal.config.schema import LoopConfig
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.engine.replica import Replica
    from shoal.engine.session import Session, Step


def next_epoch(replica: Replica) -> int:
    """Return the epoch, from 1, in which the next step begins."""
    return replica.progress.cursor // epoch_samples(replica.config.train) + 1


def ends_epoch(replica: Replica, cursor: int, period: int = 1) -> bool:
    """Return whether the step that ends at this position of the samples is the last one of this many epochs."""
    samples = period * epoch_samples(replica.config.train)
    return (cursor - replica.global_batch) // samples < cursor // samples


def epoch_samples(train: LoopConfig) -> int:
    samples = train.epoch_samples
    if samples is None:
        raise UsageError(
            "the session does not know how long an epoch is",
            why="its end is known in steps only",
            fix="say how many samples there are: shoal.Session(epochs=10, samples=len(dataset), global_batch=64)",
        )
    return samples


class Epoch:
    """The steps of one epoch, to iterate over. An epoch that lost peers set back may come again."""

    def __init__(self, session: Session, first: Step, steps: Iterator[Step]) -> None:
        self.number = next_epoch(session.replica)
        self.following: Step | None = first  # The first step that is not of this epoch; None after the last one.
        self._session = session
        self._steps = steps
        self._is_done = False

    def __iter__(self) -> Iterator[Step]:
        while self.following is not None and next_epoch(self._session.replica) == self.number:
            yield self.following
            self.following = next(self._steps, None)
        self._is_done = True

    def require_done(self) -> None:
        if not self._is_done:
            raise UsageError(
                f"the loop over epoch {self.number} was left before its end",
                why="all steps of an epoch belong to it, and the other ranks do them",
                fix="to end the training call session.finish(), and let both loops end",
            )


def iterate_epochs(session: Session) -> Iterator[Epoch]:
    steps = session.iterate()
    following = next(steps, None)
    while following is not None:
        epoch = Epoch(session, following, steps)
        try:
            yield epoch
            epoch.require_done()
        except GeneratorExit:
            # The loop over the epochs was left: the session warns of it.
            steps.close()
            raise
        except UsageError as error:
            session.note_fault(error)
            raise
        following = epoch.following
