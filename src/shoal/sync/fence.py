"""The fence: what a rank may still do in its generation.

The training asks before it changes its state and before it writes anything that others rely on. Whoever is told that
its generation is over raises here, and what it has computed meanwhile counts for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from shoal.control.membership.types import NEVER, Ballot, State
from shoal.control.rank_messages import LEASE_S
from shoal.host.facts import boot_clock


class GenerationEnded(Exception):
    """This generation is over for us; nothing is wrong with the training."""


class StepBoundary(GenerationEnded):
    """All ranks have ended the same step, because somebody wants to come in."""


class Fence(Protocol):
    """`edge`: the ranks are to stop together after a step. `floor`: who has not even this step is nobody that others
    would go on from in this generation."""

    @property
    def edge(self) -> bool: ...

    @property
    def floor(self) -> int: ...

    def applying(self, step: int) -> AbstractContextManager[None]:
        """Around the update that brings the replica to `step`: all of it happens in the generation, or none."""

    def moved(self, step: int) -> None:
        """The state that others may go on from is that of `step`, forward or back."""

    def replacing(self, step: int) -> AbstractContextManager[None]:
        """Around the local swap to another rank's state, which is that of `step`. Raises before anything is changed
        when the generation is over: what was reported of the old state then still holds."""

    def lose_state(self) -> None:
        """Another one is about to be written over it: until it has `moved`, there is none to go on from."""

    def committed(self, step: int) -> None: ...

    def await_lease(self) -> None:
        """Returns while this generation is known to be the newest; waits where that is not sure."""


class OpenFence:
    """For a world that nobody can leave: one of torchrun's, or a rank alone."""

    edge = False
    floor = 0

    def applying(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def moved(self, step: int) -> None:
        pass

    def replacing(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def lose_state(self) -> None:
        pass

    def committed(self, step: int) -> None:
        pass

    def await_lease(self) -> None:
        pass


class GenerationFence:
    """One rank's, for all its generations. The training's thread asks; the thread that listens to the agent decides.

    `holds`: there is a state here that others could go on from. While one is being copied over it, there is none.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = NEVER
        self._is_over = True
        self._leased_until = 0.0
        self._step = 0
        self._committed = 0
        self._holds = False
        self._edge_of = NEVER
        self._floor = 0

    # The training's side.

    @property
    def edge(self) -> bool:
        return self._edge_of == self._generation != NEVER

    @property
    def floor(self) -> int:
        return self._floor

    @property
    def generation(self) -> Ballot:
        return self._generation

    @property
    def is_over(self) -> bool:
        return self._is_over

    @contextmanager
    def applying(self, step: int) -> Iterator[None]:
        with self._changed:
            self._refuse()
            # An update that fails in the middle leaves a replica of no step at all.
            was_holding, self._holds = self._holds, False
            yield
            self._step, self._holds = step, was_holding

    @contextmanager
    def replacing(self, step: int) -> Iterator[None]:
        with self._changed:
            self._refuse()
            # A swap that fails in the middle leaves a replica of no step at all.
            self._holds = False
            yield
            self.moved(step)

    def moved(self, step: int) -> None:
        with self._changed:
            if step < self._step:
                # Back to a checkpoint: what is done again has to be committed again.
                self._committed = min(self._committed, step)
            self._step, self._holds = step, True

    def committed(self, step: int) -> None:
        with self._changed:
            self._committed = max(self._committed, step)

    def await_lease(self) -> None:
        with self._changed:
            while True:
                self._refuse()
                if boot_clock() < self._leased_until:
                    return
                self._changed.wait(LEASE_S)

    def lose_state(self) -> None:
        with self._changed:
            self._holds = False

    # The agent's side.

    def enter(self, generation: Ballot, holds: bool, floor: int) -> None:
        with self._changed:
            self._generation, self._is_over, self._floor = generation, False, floor
            self._leased_until = 0.0
            self._holds &= holds

    def lease(self, generation: Ballot, at_s: float) -> None:
        with self._changed:
            if generation == self._generation:
                self._leased_until = max(self._leased_until, at_s + LEASE_S)
                self._changed.notify_all()

    def ask_for_edge(self, generation: Ballot) -> None:
        """It may be one that this rank has still to enter."""
        with self._changed:
            self._edge_of = max(self._edge_of, generation)

    def end(self, generation: Ballot) -> State | None:
        """Nothing is applied or committed in it from here on; where we stand then."""
        with self._changed:
            if generation == self._generation:
                self._is_over = True
                self._changed.notify_all()
            return self.position()

    def position(self) -> State | None:
        with self._changed:
            if not self._holds:
                return None
            # A run that went back may have committed more than it has.
            return State(step=self._step, committed=min(self._committed, self._step))

    def _refuse(self) -> None:
        if self._is_over:
            raise GenerationEnded(f"generation {self._generation} is over")
