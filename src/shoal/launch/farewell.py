"""How a run whose machines come and go ends for one agent: who has finished, who is still awaited. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.control.membership.generation import Generation
from shoal.control.membership.messages import Beat, Message
from shoal.errors import RunFailed

# Whoever could not pass the last barrier although others did may end by itself, as a lineage of its own.
_OUTLIVE_S = 15.0
# How long a machine without the training's state waits for anybody who has it.
_HOPELESS_AFTER_S = 60.0
# How long its ranks may take to start, where all that is missing to go back to a checkpoint are ranks.
_STARTED_WITHIN_S = 600.0


@dataclass
class Farewell:
    """`silent_after_s`: a member that has not been heard of for so long is not awaited. `finished`: our ranks have
    passed the last barrier of the training, or were asked to stop and did."""

    me: int
    founders: int
    silent_after_s: float
    finished: bool = False
    linked: set[int] = field(default_factory=set)
    heard_at: dict[int, float] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    voters: set[int] = field(default_factory=set)
    others_finished_at: float | None = None
    hopeless_since: float | None = None

    def heard(self, member: int, message: Message, now: float) -> None:
        """`holders`: who has a state to train on from, by its own last word; `voters` may also be loading one."""
        self.heard_at[member] = now
        if isinstance(message, Beat):
            (self.holders.add if message.votes and message.holds else self.holders.discard)(member)
            (self.voters.add if message.votes else self.voters.discard)(member)

    def is_hopeless(self, has_state: bool, has_vote: bool, now: float, is_starting: bool = False) -> bool:
        """Neither this agent nor one that it reaches has what was trained, and that for a while. Without a vote it
        waits for those that have one: they may be loading a checkpoint. `is_starting`: its own ranks are starting, and
        then go back to one."""
        if has_state or (self.holders if has_vote else self.voters) & self.linked:
            self.hopeless_since = None
        elif self.hopeless_since is None:
            self.hopeless_since = now
        limit_s = _STARTED_WITHIN_S if is_starting else _HOPELESS_AFTER_S
        return self.hopeless_since is not None and now - self.hopeless_since > limit_s

    def is_done(self, member: int, finished: bool, now: float) -> None:
        """Its ranks have ended, after the last step of the training or before."""
        self.done.add(member)
        if finished and self.others_finished_at is None:
            self.others_finished_at = now

    def awaits(self, generation: Generation | None, now: float) -> bool:
        """Whether somebody trained with us and still works: it may be writing its last checkpoint, or need our keys."""
        if not self.finished or generation is None:
            return False
        others = self.linked.intersection(generation.members) - self.done
        return any(now - self.heard_at.get(member, now) <= self.silent_after_s for member in others)

    def is_late(self, outside: bool, now: float) -> bool:
        """The training has ended elsewhere, and we were not part of it or could not follow to its end."""
        if self.finished or self.others_finished_at is None:
            return False
        return outside or now - self.others_finished_at > _OUTLIVE_S

    def absent(self) -> list[int]:
        """Those of the launch that have not said how they ended, now that the training is over."""
        founders = range(self.founders) if self.finished else ()
        return [member for member in founders if member not in {*self.done, self.me}]


def nobody_has_the_state(run: str) -> RunFailed:
    return RunFailed(
        "nobody who can be reached has the training's state any more",
        why="the others are out of reach from here, their ranks were killed, or the run has ended meanwhile",
        fix=f"if they still train, come back when they can be reached: shoal join {run}; if nobody does, go on from "
        f"the last checkpoint: shoal train --resume {run}",
    )
