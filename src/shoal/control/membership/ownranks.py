"""Where the ranks of this agent stand, as far as membership goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shoal.control.membership.actions import Stop
from shoal.control.membership.generation import Ballot, Ranks, State


class Phase(Enum):
    TRAINING = "training"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass
class OwnRanks:
    numbers: Ranks = ()
    state: State | None = None
    committed: int = 0
    holds: bool = False
    phase: Phase = Phase.STOPPED
    at_edge: bool = False

    def halt(self, generation: Ballot, at_edge: bool) -> list[Stop]:
        """Asks them to stop, once, and once more where there is no time left for their step."""
        asked = self.phase is Phase.STOPPING and (at_edge or not self.at_edge)
        if self.phase is Phase.STOPPED or asked:
            return []
        self.phase, self.at_edge = Phase.STOPPING, at_edge
        return [Stop(generation, at_edge)]

    def halted(self, state: State | None, numbers: Ranks) -> None:
        self.phase, self.state, self.numbers = Phase.STOPPED, state, numbers
        self.holds = state is not None
        if state is not None:
            self.committed = max(self.committed, state.committed)

    def has(self, state: State) -> bool:
        own = self.state
        return own is not None and own.digest != "" and (own.step, own.digest) == (state.step, state.digest)

    def lose_all(self) -> None:
        self.phase, self.state, self.numbers, self.holds = Phase.STOPPED, None, (), False
