"""The fence: decides what a rank may still do in its generation.

The training asks the fence before it changes its state and before it writes anything that other ranks rely on. Once the
agent has ended the generation, the fence raises `GenerationEnded`, and the work since the last commit is discarded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shoal.control.membership.settings import LEASE_S
from shoal.control.membership.types import NEVER, Ballot, State
from shoal.host.facts import boot_clock


class GenerationEnded(Exception):
    """This rank's generation is over. It is not a failure of the training."""


class StepBoundary(GenerationEnded):
    """All ranks have stopped after the same step, so that the membership can change."""


class Fence:
    """What the training asks. This base class allows everything, for a world with fixed membership."""

    @property
    def stop_after_step(self) -> bool:
        """Whether the ranks are to stop together after a step."""
        return False

    @property
    def min_step(self) -> int:
        """The step that a state must have reached for other ranks to continue from it in this generation."""
        return 0

    def apply_step(self, step: int) -> AbstractContextManager[None]:
        """Enclose the update to `step`: it happens in the generation completely or not at all."""
        return nullcontext()

    def set_step(self, step: int) -> None:
        """Record that the state that others may continue from is that of `step`, forward or back."""

    def replace_state(self, step: int) -> AbstractContextManager[None]:
        """Enclose the local swap to another rank's state of `step`.

        Raise before any change when the generation is over: the reported old state is then still valid.
        """
        return nullcontext()

    def mark_overwritten(self) -> None:
        """Record that the state is about to be overwritten: until `set_step`, there is none to continue from."""

    def committed(self, step: int) -> None:
        """Record a committed step."""

    def await_lease(self) -> None:
        """Return while this generation is known to be the newest; wait while that is uncertain."""


class OpenFence(Fence):
    """For ranks of torchrun, or a single rank."""


class GenerationFence(Fence):
    """One rank's fence, for all its generations. The training thread asks; the agent's listener thread decides."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._generation = NEVER
        self._is_over = True
        self._leased_until = 0.0
        self._step = 0
        self._committed = 0
        # This rank has a state that others could continue from. It has none while another state is copied over it.
        self._has_state = False
        # The newest generation whose ranks are to stop after a step.
        self._stop_after_step_of = NEVER
        self._min_step = 0

    # Called by the training thread.

    @property
    def stop_after_step(self) -> bool:
        return self._stop_after_step_of == self._generation != NEVER

    @property
    def min_step(self) -> int:
        return self._min_step

    @property
    def generation(self) -> Ballot:
        return self._generation

    @property
    def is_over(self) -> bool:
        return self._is_over

    @contextmanager
    def apply_step(self, step: int) -> Iterator[None]:
        with self._changed:
            self._refuse()
            # An update that fails halfway leaves a state that belongs to no step.
            was_holding, self._has_state = self._has_state, False
            yield
            self._step, self._has_state = step, was_holding

    @contextmanager
    def replace_state(self, step: int) -> Iterator[None]:
        with self._changed:
            self._refuse()
            # A swap that fails halfway leaves a state that belongs to no step.
            self._has_state = False
            yield
            self.set_step(step)

    def set_step(self, step: int) -> None:
        with self._changed:
            if step < self._step:
                # Back to a checkpoint: repeated steps must be committed again.
                self._committed = min(self._committed, step)
            self._step, self._has_state = step, True

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

    def mark_overwritten(self) -> None:
        with self._changed:
            self._has_state = False

    # `enter` is called by the training thread, `end` by the thread that listens to the agent, or by both.

    def enter(self, generation: Ballot, has_state: bool, min_step: int) -> None:
        with self._changed:
            self._generation, self._is_over, self._min_step = generation, False, min_step
            self._leased_until = 0.0
            self._has_state &= has_state

    def lease(self, generation: Ballot, at_s: float) -> None:
        with self._changed:
            if generation == self._generation:
                self._leased_until = max(self._leased_until, at_s + LEASE_S)
                self._changed.notify_all()

    def request_stop_after_step(self, generation: Ballot) -> None:
        """Request a stop after a step. This rank may not have entered the generation yet."""
        with self._changed:
            self._stop_after_step_of = max(self._stop_after_step_of, generation)

    def end(self, generation: Ballot) -> State | None:
        """End the generation, so that nothing more is applied or committed in it; return this rank's position."""
        with self._changed:
            if generation == self._generation:
                self._is_over = True
                self._changed.notify_all()
            return self.position()

    def position(self) -> State | None:
        with self._changed:
            if not self._has_state:
                return None
            # After a rollback more steps may be committed than the state has.
            return State(step=self._step, committed=min(self._committed, self._step))

    def _refuse(self) -> None:
        if self._is_over:
            raise GenerationEnded(f"generation {self._generation} is over")
