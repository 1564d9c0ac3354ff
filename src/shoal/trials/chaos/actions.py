"""What a scenario can do to a cluster and to the run on it: one small model each, told apart by `do`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NodeName = Annotated[str, Field(pattern=r"^node\d+$")]
Seconds = Annotated[float, Field(ge=0)]
Rank = Annotated[int, Field(ge=0)]


class Action(BaseModel):
    """`at_step`: when a rank has done that step. `after_s`: so long after the action before it; neither: at once.
    `random_s`: up to so much later, another moment in each of `--times` runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_step: Annotated[int, Field(ge=1)] | None = None
    after_s: Seconds | None = None
    random_s: Seconds = 0.0

    @model_validator(mode="after")
    def _one_moment(self) -> Action:
        if self.at_step is not None and self.after_s is not None:
            raise ValueError("at_step and after_s are two moments; give one of them")
        return self


class KillRank(Action):
    """By its number, or the first one of a node."""

    do: Literal["kill-rank"] = "kill-rank"
    rank: Rank | None = None
    node: NodeName | None = None
    signal: Literal["KILL", "SEGV"] = "KILL"

    @model_validator(mode="after")
    def _one_rank(self) -> KillRank:
        if (self.rank is None) == (self.node is None):
            raise ValueError("kill-rank takes a rank or a node")
        return self


class KillSourceInCopy(Action):
    """The rank whose state others copy, when the next copy since the action before has begun; an action before this one
    has to bring it about, and a slow link make it last."""

    do: Literal["kill-source-in-copy"] = "kill-source-in-copy"
    within_s: Seconds = 90.0


class KillAgent(Action):
    """Its ranks die with it."""

    do: Literal["kill-agent"] = "kill-agent"
    node: NodeName


class KillNode(Action):
    """Every process of it; `silent` is the power cut: the node goes too, and no connection is closed."""

    do: Literal["kill-node"] = "kill-node"
    node: NodeName
    silent: bool = False


class KillRun(Action):
    """Everything of it, as when the power of all machines fails: keeper, agents and ranks."""

    do: Literal["kill-run"] = "kill-run"


class PowerOn(Action):
    """The node stands, again if need be, and joins the run."""

    do: Literal["power-on"] = "power-on"
    node: NodeName


class Freeze(Action):
    """The lid is closed; without `for_s` until a `thaw`."""

    do: Literal["freeze"] = "freeze"
    node: NodeName
    for_s: Seconds | None = None


class Thaw(Action):
    do: Literal["thaw"] = "thaw"
    node: NodeName


class FreezeRank(Action):
    do: Literal["freeze-rank"] = "freeze-rank"
    rank: Rank
    for_s: Seconds


class ThawRank(Action):
    do: Literal["thaw-rank"] = "thaw-rank"
    rank: Rank


class Cut(Action):
    """Two nodes lose each other, or one loses all. `one_way`: what the first sends is lost, and it still hears."""

    do: Literal["cut"] = "cut"
    between: Annotated[tuple[NodeName, ...], Field(min_length=1, max_length=2)]
    one_way: bool = False


class Heal(Action):
    """All cuts."""

    do: Literal["heal"] = "heal"


class Flap(Action):
    """A node is cut off from everybody, and comes back."""

    do: Literal["flap"] = "flap"
    node: NodeName
    for_s: Seconds


class SetLink(Action):
    do: Literal["link"] = "link"
    node: NodeName
    rate: str


class Loss(Action):
    """So many percent of the packets to and from the node are lost."""

    do: Literal["loss"] = "loss"
    node: NodeName
    percent: Annotated[float, Field(ge=0, lt=100)]


class Cpu(Action):
    """`share` of one core; unset lifts the limit."""

    do: Literal["cpu"] = "cpu"
    node: NodeName
    share: Annotated[float, Field(gt=0)] | None = None


class Starve(Action):
    """The rank gets no more memory than it has."""

    do: Literal["starve"] = "starve"
    rank: Rank


class CorruptMemory(Action):
    """One weight of a rank: a bit of it, or it is no number any more. The training must have `lr = 1e-30`."""

    do: Literal["corrupt-memory"] = "corrupt-memory"
    rank: Rank
    how: Literal["flip", "nan"] = "flip"


class FillDisk(Action):
    """The disk that holds the checkpoints is full; the scenario says how large that is (`disk_mb`)."""

    do: Literal["fill-disk"] = "fill-disk"


class FreeDisk(Action):
    do: Literal["free-disk"] = "free-disk"


class CutPower(Action):
    """The power of this machine fails: every process of the run ends, and of its files only what was put on disk is
    left. The scenario says how large that disk is (`disk_mb`), and that it holds the run (`disk_holds = "run"`)."""

    do: Literal["cut-power"] = "cut-power"


class SignalKeeper(Action):
    """What Ctrl-C, `kill` or a crash of the launcher does; `twice` is the impatient user."""

    do: Literal["signal-keeper"] = "signal-keeper"
    signal: Literal["INT", "TERM", "HUP", "KILL"] = "INT"
    twice: bool = False


class Stop(Action):
    """`shoal stop`: the run finishes its step and saves. What follows happens after that."""

    do: Literal["stop"] = "stop"


class CorruptCheckpoint(Action):
    do: Literal["corrupt-checkpoint"] = "corrupt-checkpoint"
    how: Literal["flip", "truncate", "zero"] = "flip"


class Resume(Action):
    """`shoal train --resume`."""

    do: Literal["resume"] = "resume"


class Garbage(Action):
    """Strangers at every port that the agents listen on: `connections` that talk nonsense, `idle` that say nothing."""

    do: Literal["garbage"] = "garbage"
    connections: Annotated[int, Field(ge=0)] = 1000
    idle: Annotated[int, Field(ge=0)] = 200


class Command(Action):
    """A shoal command on this machine; `{on}` and `{run}` stand for the cluster and the run folder."""

    do: Literal["shoal"] = "shoal"
    words: Annotated[tuple[str, ...], Field(min_length=1)]


AnyAction = Annotated[
    KillRank
    | KillSourceInCopy
    | KillAgent
    | KillNode
    | KillRun
    | PowerOn
    | Freeze
    | Thaw
    | FreezeRank
    | ThawRank
    | Cut
    | Heal
    | Flap
    | SetLink
    | Loss
    | Cpu
    | Starve
    | CorruptMemory
    | FillDisk
    | FreeDisk
    | CutPower
    | SignalKeeper
    | Stop
    | CorruptCheckpoint
    | Resume
    | Garbage
    | Command,
    Field(discriminator="do"),
]

# They need machines of their own: nodes with links, clocks and lids.
ON_NODES = (KillAgent, KillNode, PowerOn, Freeze, Thaw, Cut, Heal, Flap, SetLink, Loss, Cpu)


def needs_nodes(action: Action) -> bool:
    return isinstance(action, ON_NODES) or getattr(action, "node", None) is not None


def kinds() -> list[str]:
    union = AnyAction.__origin__  # type: ignore[attr-defined]
    return [kind.model_fields["do"].default for kind in union.__args__]


def describe(action: Action) -> str:
    """`freeze node2 for 1.5 s`: as short as a table's cell."""
    said = action.model_dump(exclude={"at_step", "after_s", "random_s", "do"}, exclude_defaults=True)
    for_s = said.pop("for_s", None)
    words = [str(getattr(action, "do", "")), *(_word(name, value) for name, value in said.items())]
    return " ".join([*words, *([f"for {for_s:g} s"] if for_s is not None else [])])


def _word(name: str, value: object) -> str:
    if name in ("node", "how", "rate"):
        return str(value)
    if name in ("between", "words"):
        return " ".join(value) if isinstance(value, tuple) else str(value)
    if value is True:
        return name.replace("_", "-")
    return f"{name} {value}"
