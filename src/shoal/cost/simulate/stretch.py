"""Many steps at once: what happens between two events, when nothing but steps and checkpoints does."""

from __future__ import annotations

import math
from dataclasses import dataclass

_TINY = 1e-9


@dataclass(frozen=True)
class Stretch:
    """`owed_s` of the pause for the last checkpoint are still to come; `saved` is the step of the last whole one."""

    steps: float
    paused_s: float
    owed_s: float
    saved: float | None


@dataclass(frozen=True)
class Rhythm:
    """A step after another, and a pause after every so many."""

    step_s: float
    every: int
    pause_s: float

    def advance(self, position: float, owed_s: float, span_s: float) -> Stretch:
        """`span_s` from step `position` on, of whose checkpoint `owed_s` are still to be paid."""
        paid_s = min(owed_s, span_s)
        if paid_s < owed_s:
            return Stretch(0.0, paid_s, owed_s - paid_s, None)
        saved = position if owed_s > 0 else None
        first = next_multiple(position, self.every) - position
        left_s = span_s - paid_s - first * self.step_s
        if left_s < -_TINY * self.step_s:
            return Stretch((span_s - paid_s) / self.step_s, paid_s, 0.0, saved)
        return self._cycles(position + first, Stretch(first, paid_s, 0.0, saved), left_s)

    def _cycles(self, at: float, before: Stretch, left_s: float) -> Stretch:
        """From a checkpoint that is due: pause and steps in turn, as often as they fit."""
        cycle_s = self.pause_s + self.every * self.step_s
        cycles = max(0, math.floor(left_s / cycle_s))
        left_s = max(0.0, left_s - cycles * cycle_s)
        at += cycles * self.every
        steps = before.steps + cycles * self.every
        paid_s = min(self.pause_s, left_s)
        paused_s = before.paused_s + cycles * self.pause_s + paid_s
        if paid_s < self.pause_s:
            saved = at - self.every if cycles else before.saved
            return Stretch(steps, paused_s, self.pause_s - paid_s, saved)
        return Stretch(steps + (left_s - paid_s) / self.step_s, paused_s, 0.0, at)


def next_multiple(position: float, every: int) -> int:
    """The first one after `position`."""
    return (math.floor(position / every + _TINY) + 1) * every


def whole(position: float, every: int = 1) -> int:
    """The last one up to `position`."""
    return math.floor(position / every + _TINY) * every
