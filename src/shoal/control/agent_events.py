"""The events of an agent's journal: the agent writes them, its launcher reads them back as the same types.

`events.AGENT_EVENTS` checks the fields that readers use, for all readers of a run folder. `docs/design.md` lists the
journal among the files of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shoal.errors import ShoalError, from_dict
from shoal.events import Event


@dataclass(frozen=True)
class AgentEvent:
    """One line of a journal; its fields are written in their order."""

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[AgentEvent]]] = {}

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            cls.kind = kind
            cls.kinds[kind] = cls

    def to_fields(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_record(cls, record: Event) -> AgentEvent:
        return cls(**{field.name: record.get(field.name) for field in fields(cls)})


def read_agent_event(record: Event) -> AgentEvent | None:
    """Return the event of a journal's line that passed the checks of `events`; None for an unknown kind."""
    cls = AgentEvent.kinds.get(record["event"])
    return cls.from_record(record) if cls is not None else None


@dataclass(frozen=True)
class ErrorEvent(AgentEvent):
    error: ShoalError

    def to_fields(self) -> dict[str, Any]:
        return self.error.as_dict()

    @classmethod
    def from_record(cls, record: Event) -> AgentEvent:
        return cls(from_dict(record))


@dataclass(frozen=True)
class RankEvent(AgentEvent):
    name: str  # of the rank's process; the launcher accepts only those that it ordered this node to start


# The agent itself.


@dataclass(frozen=True)
class AgentReady(AgentEvent, kind="ready"):
    """The agent listens; these are the facts of its machine that the launcher needs."""

    node: str
    address: str
    agent_mark: str  # see `Hello.mark`
    pid: int
    port: int
    script_port: int | None
    interface: str | None
    cores: int
    core_speeds: tuple[int, ...] | None
    cpu_only: bool
    free_memory_bytes: int | None  # swap included
    incarnation: int  # how often the agent was restarted
    highest_generation: int


@dataclass(frozen=True)
class AgentNote(AgentEvent, kind="note"):
    text: str


@dataclass(frozen=True)
class AgentRefused(ErrorEvent, kind="refused"):
    """The agent ends because of this error."""


@dataclass(frozen=True)
class StopAsked(AgentEvent, kind="stop-asked"):
    at_once: bool


@dataclass(frozen=True)
class AgentFinished(AgentEvent, kind="finished"):
    """The ranks of this node have passed the last barrier of the training."""


@dataclass(frozen=True)
class AgentLeft(AgentEvent, kind="left"):
    """The machine is about to be switched off, and the others continue."""


@dataclass(frozen=True)
class AgentDone(AgentEvent, kind="done"):
    """The last event of an agent."""

    finished: bool


# Its ranks.


@dataclass(frozen=True)
class RanksStarted(AgentEvent, kind="started"):
    processes: dict[str, int]


@dataclass(frozen=True)
class RankEnded(RankEvent, kind="ended"):
    code: int  # the exit code, or the negative number of the signal that killed it
    by_agent: bool  # the agent killed it
    out_of_memory: bool  # the kernel killed processes for lack of memory meanwhile
    memory_limit_bytes: int | None = None  # of the control group in which it ran out of memory


@dataclass(frozen=True)
class RankRestarts(RankEvent, kind="restart"):
    attempt: int
    after_s: float


@dataclass(frozen=True)
class SessionBegan(AgentEvent, kind="session"):
    """A rank of the script has begun a session: from now on the run is elastic."""


@dataclass(frozen=True)
class RanksJoined(AgentEvent, kind="joined-group"):
    """Which ranks of a script have joined its process group after a while."""

    met: list[int]
    missing: list[int]
    after_s: float


@dataclass(frozen=True)
class ScriptStoreUsed(AgentEvent, kind="script-store-used"):
    """A rank of the script was seen at torch's own store."""


@dataclass(frozen=True)
class ScriptStoreKeys(AgentEvent, kind="script-store-keys"):
    keys: int | None  # that the ranks have left in the store; None: not known


# Its peers.


@dataclass(frozen=True)
class PeerClosed(AgentEvent, kind="closed"):
    """A connection closed, and the run continues without it."""

    node: str
    how: str


@dataclass(frozen=True)
class NodeLost(AgentEvent, kind="lost"):
    """Another node is lost for good."""

    member: int
    node: str
    how: str


@dataclass(frozen=True)
class PeerEnded(AgentEvent, kind="peer-ended"):
    """The ranks of another node have ended."""

    node: str
    failed: bool


# Membership.


@dataclass(frozen=True)
class GenerationEntered(AgentEvent, kind="generation"):
    id: str
    lineage: str
    members: list[str]
    ranks: int
    step: int


@dataclass(frozen=True)
class GroupFailed(RankEvent, kind="group-failed"):
    """A rank could not join the process group of its generation."""

    generation: str
    why: str


@dataclass(frozen=True)
class MembershipAnnounced(AgentEvent, kind="announce"):
    generation: str | None
    text: str


@dataclass(frozen=True)
class TrainingPaused(AgentEvent, kind="pause"):
    text: str


@dataclass(frozen=True)
class LineageAbandoned(AgentEvent, kind="abandon"):
    lineage: str
    surviving: str
    shared_step: int
    text: str


@dataclass(frozen=True)
class AbandonRecorded(AgentEvent, kind="given-up"):
    """The ledger has recorded that this lineage was abandoned."""

    lineage: str


@dataclass(frozen=True)
class RankHung(ErrorEvent, kind="hung"):
    """A rank hangs again after its restart, so this run ends."""


@dataclass(frozen=True)
class StateLost(ErrorEvent, kind="state-lost"):
    """Neither this node nor one that it reaches has the training's state."""
