"""The actions of a scenario: one class per action, selected by `do`. `inject.py` carries them out.

To add an action: write its class here, add it to `AnyAction`, carry it out in `Injector._prepare`, and name it in
docs/chaos.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

NodeName = Annotated[str, Field(pattern=r"^node\d+$")]
Seconds = Annotated[float, Field(ge=0)]
Rank = Annotated[int, Field(ge=0)]


class Action(BaseModel):
    """What all actions have: the moment. Without one it is that of the action before."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    # It needs emulated nodes, with links, clocks and lids.
    on_nodes: ClassVar[bool] = False

    at_step: Annotated[int, Field(ge=1)] | None = None  # when a rank has done that step
    after_s: Seconds | None = None  # since the action before
    after_regroup: bool = False  # when the ranks have done a step in the generation that follows the action before
    random_s: Seconds = 0.0  # up to this much later; drawn for each of `--times` runs

    @model_validator(mode="after")
    def _has_one_moment(self) -> Action:
        if (self.at_step is not None) + (self.after_s is not None) + self.after_regroup > 1:
            raise ValueError("at_step, after_s and after_regroup are moments; give one of them")
        return self

    @property
    def waits_for_event(self) -> bool:
        return self.at_step is not None or self.after_regroup

    def parts(self) -> tuple[Action, ...]:
        """Return the single injections: an action that lasts has two, and the run is watched in between."""
        return (self,)


class KillRank(Action):
    """Kill a rank by its number, or the first one of a node."""

    do: Literal["kill-rank"] = "kill-rank"
    rank: Rank | None = None
    node: NodeName | None = None
    signal: Literal["KILL", "SEGV"] = "KILL"

    @model_validator(mode="after")
    def _names_one_rank(self) -> KillRank:
        if (self.rank is None) == (self.node is None):
            raise ValueError("kill-rank takes a rank or a node")
        return self


class KillSourceInCopy(Action):
    """Kill the rank whose state others copy, when the next copy since the action before has begun.

    An earlier action has to cause the copy, and a slow link make it last.
    """

    do: Literal["kill-source-in-copy"] = "kill-source-in-copy"
    within_s: Seconds = 90.0


class KillAgent(Action):
    """Kill a node's agent; its ranks die with it."""

    on_nodes = True
    do: Literal["kill-agent"] = "kill-agent"
    node: NodeName


class KillNode(Action):
    """Kill every process of a node. `silent` is a power cut: the node goes too, and no connection is closed."""

    on_nodes = True
    do: Literal["kill-node"] = "kill-node"
    node: NodeName
    silent: bool = False


class KillRun(Action):
    """Kill supervisor, agents and ranks, as when the power of all machines fails."""

    do: Literal["kill-run"] = "kill-run"


class PowerOn(Action):
    """Start the node again if it is gone, and let it join the run."""

    on_nodes = True
    do: Literal["power-on"] = "power-on"
    node: NodeName


class Freeze(Action):
    """Close the lid; without `for_s` until a `thaw`."""

    on_nodes = True
    do: Literal["freeze"] = "freeze"
    node: NodeName
    for_s: Seconds | None = None

    def parts(self) -> tuple[Action, ...]:
        return (self,) if self.for_s is None else (self, Thaw(node=self.node, after_s=self.for_s))


class Thaw(Action):
    on_nodes = True
    do: Literal["thaw"] = "thaw"
    node: NodeName


class FreezeRank(Action):
    do: Literal["freeze-rank"] = "freeze-rank"
    rank: Rank
    for_s: Seconds

    def parts(self) -> tuple[Action, ...]:
        return (self, ThawRank(rank=self.rank, after_s=self.for_s))


class ThawRank(Action):
    do: Literal["thaw-rank"] = "thaw-rank"
    rank: Rank


class Cut(Action):
    """Cut two nodes off from each other, or one from all. `one_way`: only the packets that the first sends are lost."""

    on_nodes = True
    do: Literal["cut"] = "cut"
    between: Annotated[tuple[NodeName, ...], Field(min_length=1, max_length=2)]
    one_way: bool = False


class Heal(Action):
    """End all cuts."""

    on_nodes = True
    do: Literal["heal"] = "heal"


class Flap(Action):
    """Cut a node off from all others for a time."""

    on_nodes = True
    do: Literal["flap"] = "flap"
    node: NodeName
    for_s: Seconds

    def parts(self) -> tuple[Action, ...]:
        moment: dict[str, Any] = {"at_step": self.at_step, "after_s": self.after_s, "random_s": self.random_s}
        return (Cut(between=(self.node,), **moment), Heal(after_s=self.for_s))


class SetLink(Action):
    on_nodes = True
    do: Literal["link"] = "link"
    node: NodeName
    rate: str


class Loss(Action):
    """Lose this percentage of the packets to and from the node."""

    on_nodes = True
    do: Literal["loss"] = "loss"
    node: NodeName
    percent: Annotated[float, Field(ge=0, lt=100)]


class LimitCpu(Action):
    on_nodes = True
    do: Literal["cpu"] = "cpu"
    node: NodeName
    share: Annotated[float, Field(gt=0)] | None = None  # of one core; None lifts the limit


class LimitMemory(Action):
    """Let the rank have no more memory than it has now."""

    do: Literal["limit-memory"] = "limit-memory"
    rank: Rank


class CorruptMemory(Action):
    """Flip a bit of one weight of a rank, or make it NaN. The training must have `lr = 1e-30`."""

    do: Literal["corrupt-memory"] = "corrupt-memory"
    rank: Rank
    how: Literal["flip", "nan"] = "flip"


class FillDisk(Action):
    """Fill the disk of the scenario (`disk_mb`)."""

    do: Literal["fill-disk"] = "fill-disk"


class FreeDisk(Action):
    do: Literal["free-disk"] = "free-disk"


class CutPower(Action):
    """Cut the power of this machine: every process of the run ends, and unsynced file content is lost.

    The run must be on the scenario's own disk (`disk_mb`, `disk_holds = "run"`).
    """

    do: Literal["cut-power"] = "cut-power"


class SignalSupervisor(Action):
    """Do what Ctrl-C, `kill` or a crash of the launcher does; `twice` is the impatient user."""

    do: Literal["signal-supervisor"] = "signal-supervisor"
    signal: Literal["INT", "TERM", "HUP", "KILL"] = "INT"
    twice: bool = False


class StopRun(Action):
    """Run `shoal stop`: the run finishes its step and saves. Later actions happen after that."""

    do: Literal["stop"] = "stop"


class CorruptCheckpoint(Action):
    do: Literal["corrupt-checkpoint"] = "corrupt-checkpoint"
    how: Literal["flip", "truncate", "zero"] = "flip"


class Resume(Action):
    """Run `shoal train --resume`."""

    do: Literal["resume"] = "resume"


class UnknownConnections(Action):
    """Open foreign connections at every port that the agents listen on."""

    do: Literal["unknown-connections"] = "unknown-connections"
    connections: Annotated[int, Field(ge=0)] = 1000  # that send random bytes
    idle: Annotated[int, Field(ge=0)] = 200  # that send nothing


class RunShoal(Action):
    """Run a shoal command on this machine; `{on}` and `{run}` stand for the cluster and the run folder."""

    do: Literal["shoal"] = "shoal"
    words: Annotated[tuple[str, ...], Field(min_length=1)]


AnyAction = Annotated[
    KillRank | KillSourceInCopy | KillAgent | KillNode | KillRun | PowerOn | Freeze | Thaw | FreezeRank | ThawRank | Cut
    | Heal | Flap | SetLink | Loss | LimitCpu | LimitMemory | CorruptMemory | FillDisk | FreeDisk | CutPower
    | SignalSupervisor | StopRun | CorruptCheckpoint | Resume | UnknownConnections | RunShoal,
    Field(discriminator="do"),
]  # fmt: skip


def needs_nodes(action: Action) -> bool:
    return action.on_nodes or getattr(action, "node", None) is not None


def action_names() -> list[str]:
    union = AnyAction.__origin__  # type: ignore[attr-defined]
    return [kind.model_fields["do"].default for kind in union.__args__]


def describe(action: Action) -> str:
    """Describe an action for a cell of a table: `freeze node2 for 1.5 s`."""
    values = action.model_dump(exclude={"at_step", "after_s", "after_regroup", "random_s", "do"}, exclude_defaults=True)
    for_s = values.pop("for_s", None)
    words = [str(getattr(action, "do", "")), *(_describe_value(name, value) for name, value in values.items())]
    return " ".join([*words, *([f"for {for_s:g} s"] if for_s is not None else [])])


def _describe_value(name: str, value: object) -> str:
    if name in ("node", "how", "rate"):
        return str(value)
    if name in ("between", "words"):
        return " ".join(value) if isinstance(value, tuple) else str(value)
    if value is True:
        return name.replace("_", "-")
    return f"{name} {value}"
