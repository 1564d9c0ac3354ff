"""Everything that was seen of one run, as plain lists of events: what the judging works on."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.events import Event


@dataclass
class Record:
    """`ranks`, `agents` (each with its `node`), `commits` and `keeper` are the run folder's events as they came;
    `injected` is what was done to it, `asked_at` when it was asked to stop."""

    ranks: list[Event] = field(default_factory=list)
    agents: list[Event] = field(default_factory=list)
    commits: list[Event] = field(default_factory=list)
    keeper: list[Event] = field(default_factory=list)
    injected: list[Event] = field(default_factory=list)
    asked_at: float | None = None

    def ranks_said(self, *kinds: str) -> list[Event]:
        return [event for event in self.ranks if event.get("event") in kinds]

    def agents_said(self, *kinds: str) -> list[Event]:
        return [event for event in self.agents if event.get("event") in kinds]

    @property
    def furthest_step(self) -> int:
        return max((int(event["step"]) for event in self.ranks_said("step")), default=0)


@dataclass(frozen=True)
class Answer:
    """What a shoal command said that the scenario ran."""

    code: int
    text: str
    seconds: float


@dataclass(frozen=True)
class Ending:
    """How it came out: the keeper's word, and what a look around found afterwards.

    `replicas_equal` is None where there were no final states to compare; `left` are processes that should be gone,
    `torn` checkpoints that were begun and never completed.
    """

    exit_code: int | None
    replicas_equal: bool | None
    replicas: int
    left: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()
    stop_s: float | None = None
    answers: tuple[Answer, ...] = ()
    # What `shoal verify` found wrong; None where it was not asked.
    verified: tuple[str, ...] | None = None
    trouble: str = ""
