"""Ranks on their way out of a generation: who has answered, and who takes too long."""

from __future__ import annotations

from shoal.control.membership.generation import Ballot
from shoal.control.membership.rules import Rules
from shoal.launch.crew import Crew, Hand


class Halting:
    def __init__(self, crew: Crew, rules: Rules) -> None:
        self._crew = crew
        self._rules = rules
        self._generation: Ballot | None = None
        self._at_edge = False
        self._until = 0.0

    def begin(self, generation: Ballot, at_edge: bool, now: float) -> None:
        self._generation, self._at_edge = generation, at_edge
        self._until = now + (self._rules.edge_s if at_edge else self._rules.answer_s)
        self._crew.halt(generation, at_edge)

    def begin_anew(self, now: float) -> None:
        """After a sleep: our ranks slept too, and have not had their time."""
        if self._generation is not None:
            self.begin(self._generation, self._at_edge, now)

    def forget(self) -> None:
        self._generation = None

    def done(self) -> Ballot | None:
        """The generation that everybody who is left has come out of, once."""
        generation = self._generation
        if generation is None or self._crew.still_in(generation):
            return None
        self._generation = None
        return generation if self._crew.inside(generation) else None

    def late(self, now: float) -> list[Hand]:
        """Those to be ended, once in a while until they are gone."""
        if self._generation is None or now < self._until:
            return []
        if self._at_edge:
            # A step, or a round of them, may take longer than anybody waits: then they stop where they are.
            self.begin(self._generation, at_edge=False, now=now)
            return []
        self._until = now + self._rules.answer_s
        return self._crew.still_in(self._generation)
