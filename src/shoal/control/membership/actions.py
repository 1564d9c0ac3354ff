"""What the council wants done. The agent does it; nothing else follows from a decision."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.control.membership.generation import Ballot, Generation
from shoal.control.membership.messages import Message


@dataclass(frozen=True)
class Send:
    to: int
    message: Message


@dataclass(frozen=True)
class Stop:
    """Ranks leave this generation, after their step (`at_edge`) or at once, and say where they stand. Nothing that
    they compute in it afterwards counts."""

    generation: Ballot
    at_edge: bool


@dataclass(frozen=True)
class Start:
    """Ranks form this generation's group and begin with its state, copied from its source where theirs differs. Unless
    they hold one of its own, what they have counts for nothing until that copy has arrived."""

    generation: Generation
    holds: bool


@dataclass(frozen=True)
class Pause:
    """Nobody may go on here for now. The state stays where it is, and the council keeps asking."""

    text: str


@dataclass(frozen=True)
class Abandon:
    """Our lineage has ended: our commits after `shared_step` that the standing ledger lacks are marked abandoned."""

    lineage: Ballot
    standing: Ballot
    shared_step: int
    text: str


@dataclass(frozen=True)
class Tell:
    """One plain sentence for the user; agents of one generation say the same, so readers show it once."""

    generation: Ballot | None
    text: str


Action = Send | Stop | Start | Pause | Abandon | Tell
