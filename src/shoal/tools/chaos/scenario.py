"""A scenario: what is done to a run, when, and what must hold. TOML files; ours lie in `scenarios/`."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.load import merge, validate
from shoal.config.presets import did_you_mean, preset
from shoal.config.schema import Config
from shoal.errors import ConfigError, UsageError
from shoal.events import Event

# SECTION trials/chaos/actions
# What a scenario can do to a cluster and to the run on it: one small model each, told apart by `do`.


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
    """Everything of it, as when the power of all machines fails: supervisor, agents and ranks."""

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


class LimitCpu(Action):
    """`share` of one core; unset lifts the limit."""

    do: Literal["cpu"] = "cpu"
    node: NodeName
    share: Annotated[float, Field(gt=0)] | None = None


class LimitMemory(Action):
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


class SignalSupervisor(Action):
    """What Ctrl-C, `kill` or a crash of the launcher does; `twice` is the impatient user."""

    do: Literal["signal-supervisor"] = "signal-supervisor"
    signal: Literal["INT", "TERM", "HUP", "KILL"] = "INT"
    twice: bool = False


class StopRun(Action):
    """`shoal stop`: the run finishes its step and saves. What follows happens after that."""

    do: Literal["stop"] = "stop"


class CorruptCheckpoint(Action):
    do: Literal["corrupt-checkpoint"] = "corrupt-checkpoint"
    how: Literal["flip", "truncate", "zero"] = "flip"


class Resume(Action):
    """`shoal train --resume`."""

    do: Literal["resume"] = "resume"


class UnknownConnections(Action):
    """Strangers at every port that the agents listen on: `connections` that talk nonsense, `idle` that say nothing."""

    do: Literal["garbage"] = "garbage"
    connections: Annotated[int, Field(ge=0)] = 1000
    idle: Annotated[int, Field(ge=0)] = 200


class RunShoal(Action):
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
    | LimitCpu
    | LimitMemory
    | CorruptMemory
    | FillDisk
    | FreeDisk
    | CutPower
    | SignalSupervisor
    | StopRun
    | CorruptCheckpoint
    | Resume
    | UnknownConnections
    | RunShoal,
    Field(discriminator="do"),
]

# They need machines of their own: nodes with links, clocks and lids.
ON_NODES = (KillAgent, KillNode, PowerOn, Freeze, Thaw, Cut, Heal, Flap, SetLink, Loss, LimitCpu)


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


SCENARIOS = Path(__file__).with_name("scenarios")

# Small, so that starting the processes is what takes time, and even in any world of up to four.
TRAINING: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "heads": 2, "width": 32, "seq_len": 32},
    "data": {"sentences": 400},
    "train": {"global_batch": 12, "checkpoint_every": 50, "eval_every": 1_000_000, "compile": "off"},
    "members": {"digest_every": 20},
}
# Where a scenario names no number of steps, the run is asked to stop when all has happened.
ENDLESS = 1_000_000


class Expect(BaseModel):
    """What must hold. Seconds and steps count from the first action, those of `rejoin_within_s` from the last;
    `return_pause_within_s` is the longest time without a step since the last action.

    A training's ledger must be whole, its replicas equal to the bit and nothing left of it 5 s after its end, whatever
    stands here; nor a checkpoint that was only begun, unless its ranks are killed at the end (`whole_checkpoints`).
    `exit_code` unset is 0 for a run that has a number of steps, and 130 for one that was asked to stop; `kept = false`
    says that the supervisor is killed, so that no process is left that could give one. `shoal verify` must pass on
    the run
    folder, unless the scenario leaves damage in it on purpose (`verified = false`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect_within_s: Seconds | None = None
    regroup_within_s: Seconds | None = None
    next_step_within_s: Seconds | None = None
    next_commit_within_s: Seconds | None = None
    rejoin_within_s: Seconds | None = None
    return_pause_within_s: Seconds | None = None
    pause_within_s: Seconds | None = None
    stop_within_s: Seconds | None = None
    reconfigurations: Annotated[int, Field(ge=0)] | None = None
    most_reconfigurations: Annotated[int, Field(ge=0)] | None = None
    members: Annotated[int, Field(ge=1)] | None = None
    stale_commits: Annotated[int, Field(ge=0)] = 0
    abandoned: Annotated[int, Field(ge=0)] | None = None
    slower_at_most: Annotated[float, Field(gt=0)] | None = None
    resumed_behind_at_most: Annotated[int, Field(ge=0)] | None = None
    sentence: str | None = None
    sentence_within_steps: Annotated[int, Field(ge=1)] | None = None
    exit_code: int | None = None
    whole_checkpoints: bool = True
    kept: bool = True
    command_code: int | None = None
    command_says: str | None = None
    command_within_s: Seconds | None = None
    verified: bool = True

    @field_validator("sentence", "command_says")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value


class ChaosScenario(BaseModel):
    """`row` is that of the table of faults. `trains = false` is for what is found before anything is started."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    row: Annotated[int, Field(ge=1, le=28)]
    text: str
    nodes: Annotated[int, Field(ge=1, le=64)] = 3
    trains: bool = True
    training: dict[str, dict[str, Any]] = Field(default_factory=dict)
    disk_mb: Annotated[int, Field(ge=1)] | None = None
    disk_holds: Literal["checkpoints", "run"] = "checkpoints"
    watch_s: Seconds = 4.0
    deadline_s: Annotated[float, Field(gt=0)] = 300.0
    steps: Annotated[tuple[AnyAction, ...], Field(min_length=1)]
    expect: Expect = Expect()

    @property
    def needs_lab(self) -> bool:
        return any(map(needs_nodes, self.steps))

    @property
    def cuts_power(self) -> bool:
        return any(isinstance(step, CutPower) for step in self.steps)

    @property
    def ends_by_itself(self) -> bool:
        return "steps" in self.training.get("train", {})

    @property
    def target_s(self) -> float | None:
        """The bound that a person asks for first."""
        expect = self.expect
        bounds = (expect.next_step_within_s, expect.pause_within_s, expect.stop_within_s, expect.command_within_s)
        return next((bound for bound in bounds if bound is not None), None)

    @cached_property
    def does(self) -> str:
        return ", then ".join(map(describe, self.steps))

    def config(self, on: str, seed: int) -> Config:
        endless: dict[str, dict[str, Any]] = {"train": {"steps": ENDLESS, "seed": seed}, "run": {"on": on}}
        layers = [preset("grammar"), TRAINING, endless, self.training]
        return validate(merge(layers), source=f"scenario {self.name}")

    @model_validator(mode="after")
    def _is_possible(self) -> ChaosScenario:
        for step in self.steps:
            named = [getattr(step, "node", None), *getattr(step, "between", ())]
            for node in filter(None, named):
                if int(node.removeprefix("node")) > self.nodes:
                    raise ValueError(f"{describe(step)}: the scenario has nodes = {self.nodes}")
            if (getattr(step, "rank", None) or 0) >= self.nodes:
                raise ValueError(f"{describe(step)}: ranks count from 0, and the scenario has nodes = {self.nodes}")
            if not self.trains and step.at_step is not None:
                raise ValueError(f"{describe(step)}: at_step needs a training, and the scenario has trains = false")
        if any(name.startswith("command_") for name in self.expect.model_fields_set) and not any(
            isinstance(step, RunShoal) for step in self.steps
        ):
            raise ValueError('expect.command_… judges what a command says, and no step is one: do = "shoal"')
        if self.expect.sentence_within_steps is not None and self.expect.sentence is None:
            raise ValueError("expect.sentence_within_steps needs a sentence")
        if any(isinstance(step, FillDisk) for step in self.steps) and self.disk_mb is None:
            raise ValueError("fill-disk needs a disk that can be filled: say how large, disk_mb = 4")
        if self.cuts_power and (self.disk_mb is None or self.disk_holds != "run"):
            raise ValueError('cut-power needs a disk of its own for the run: disk_mb = 64, disk_holds = "run"')
        return self


def load_scenario(file: Path) -> ChaosScenario:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no scenario file {file}", fix="shoal chaos list, for those that exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", fix="see https://toml.io for the format") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", fix=f"look at it: ls -ld {file}") from None
    return parse_scenario(values, str(file))


def parse_scenario(values: dict[str, Any], source: str) -> ChaosScenario:
    try:
        scenario = ChaosScenario.model_validate(values)
    except ValidationError as error:
        raise _explain(error, source) from None
    scenario.config("local:1", 0)
    return scenario


def find_scenario(word: str) -> ChaosScenario:
    """By name, or a file of the user's own."""
    if word.endswith(".toml") or "/" in word:
        return load_scenario(Path(word))
    file = SCENARIOS / f"{word}.toml"
    if not file.is_file():
        names = [each.stem for each in _files()]
        raise UsageError(
            f"there is no scenario {word!r}",
            why=did_you_mean(word, names) or "a scenario is one of ours by name, or a TOML file of yours",
            fix="shoal chaos list",
        )
    return load_scenario(file)


def all_scenarios() -> list[ChaosScenario]:
    """In the order of the table of faults."""
    return sorted(map(load_scenario, _files()), key=lambda scenario: (scenario.row, scenario.name))


def _files() -> list[Path]:
    return sorted(SCENARIOS.glob("*.toml"))


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"{source}: unknown key {place}", why=_nearest(first["loc"]), fix="docs/chaos.md has them all"
        )
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        said = first["input"].get("do") if isinstance(first["input"], dict) else first["input"]
        why = did_you_mean(str(said), kinds()) if said else "every step says what it does"
        return ConfigError(f"{source}: {place} has do = {said!r}", why=why, fix=f"use one of: {', '.join(kinds())}")
    words = first["msg"].removeprefix("Value error, ")
    seen = f"{source}: {place}: {words}" if place else f"{source}: {words}"
    return ConfigError(seen, why=f"it says {first['input']!r}" if place else "", fix="docs/chaos.md has every key")


def _nearest(place: tuple[int | str, ...]) -> str:
    known = Expect.model_fields if place[0] == "expect" else ChaosScenario.model_fields
    return did_you_mean(str(place[-1]), known)


# SECTION trials/chaos/rows
# The table of faults: what each row is, and where those are tested that no scenario plays.


@dataclass(frozen=True)
class FaultRow:
    """`tests` hold it, beside the scenarios or in their place; `why` says what no scenario can do about it."""

    number: int
    fault: str
    tests: tuple[str, ...] = ()
    why: str = ""


ROWS = (
    FaultRow(1, "kill -9 of any rank, at any moment", ("tests/test_membership_faults.py",)),
    FaultRow(2, "kill -9 of the leader, or of who keeps the keys", ("tests/test_membership_faults.py",)),
    FaultRow(3, "every process of a node killed; power cut or pulled cable", ("tests/test_membership_faults.py",)),
    FaultRow(4, "two of three nodes die at once", ("tests/test_membership_faults.py",)),
    FaultRow(5, "freeze for 1.5 s", ("tests/test_membership_faults.py",)),
    FaultRow(6, "freeze for 30 s, then wake", ("tests/test_membership_faults.py",)),
    FaultRow(7, "partition and heal: 2 against 1, 1 against 1", ("tests/test_membership_faults.py",)),
    FaultRow(8, "one-way block", ("tests/test_doctor_faults_net.py",)),
    FaultRow(9, "link flap of 0.5 s and of 5 s", ("tests/test_membership_faults.py",)),
    FaultRow(10, "a slow link; a rank three times slower", ("tests/test_stragglers.py",)),
    FaultRow(11, "packet loss of 1% and 5%", ("tests/test_stragglers.py",)),
    FaultRow(12, "a restarted or new machine joins", ("tests/test_membership_faults.py",)),
    FaultRow(13, "kill during a checkpoint", ("tests/test_checkpoint.py", "tests/test_long.py")),
    FaultRow(14, "checkpoint truncated or zero-filled", ("tests/test_checkpoint.py",)),
    FaultRow(15, "one flipped bit in a checkpoint", ("tests/test_checkpoint.py",)),
    FaultRow(16, "disk full, read-only folder", ("tests/test_bad_input.py",)),
    FaultRow(
        17,
        "a clock that is wrong or jumps",
        ("tests/test_clocks.py", "tests/test_membership_rules.py", "tests/test_doctor_faults_machine.py"),
        "a lab's nodes have one clock, unless a test gives one of them another",
    ),
    FaultRow(18, "port taken, stale run", ("tests/test_detached.py", "tests/test_doctor_machine.py")),
    FaultRow(19, "garbage and idle connections on every port", ("tests/test_secure_runs.py",)),
    FaultRow(
        20,
        "wrong, missing or replayed token",
        (
            "tests/test_mesh_strangers.py",
            "tests/test_connection_guard.py",
            "tests/test_agents.py",
            "tests/test_guests.py",
        ),
        "the tests speak the protocol with a wrong token; a scenario only knocks",
    ),
    FaultRow(
        21,
        "a peer with another torch, protocol, config or data set",
        ("tests/test_hello.py", "tests/test_agents.py"),
        "nodes of a lab run one installation",
    ),
    FaultRow(22, "out of memory in one rank", ("tests/test_out_of_memory.py", "tests/test_workplace.py")),
    FaultRow(23, "NaN or Inf loss on one rank", ("tests/test_refusal.py",)),
    FaultRow(24, "one weight bit changed on one rank", ("tests/test_comparing.py",)),
    FaultRow(
        25,
        "dead DNS, a host name that is 127.0.1.1, the wrong interface",
        ("tests/test_doctor_faults_net.py", "tests/test_doctor_faults_machine.py"),
        "doctor's own tests break each of them on a node",
    ),
    FaultRow(26, "SSH drops, launcher killed, terminal closed", ("tests/test_detached.py", "tests/test_hosts_ssh.py")),
    FaultRow(27, "SIGINT once and twice, SIGTERM", ("tests/test_failing_ranks.py", "tests/test_chaos_runs.py")),
    FaultRow(28, "soak: a random fault every 15 s", (), "shoal chaos soak"),
)


# SECTION trials/chaos/plan
# When what is done: a scenario's actions as single injections, and the random ones of a soak. Pure.


@dataclass(frozen=True)
class Injection:
    """One thing to do, at a moment that is fixed: `extra_s` is the part of it that was drawn."""

    action: Action
    extra_s: float = 0.0


def plan_injections(steps: Sequence[Action], seed: int, number: int) -> list[Injection]:
    """The same seed and number of a run give the same moments again."""
    draw = random.Random(f"{seed}/{number}")
    return [Injection(step, draw.uniform(0, step.random_s)) for step in expand(steps)]


def expand(steps: Iterable[Action]) -> Iterator[Action]:
    """What lasts is two injections: the run is watched in between like at any other time."""
    for step in steps:
        match step:
            case Freeze(node=node, for_s=float(for_s)):
                yield from (step, Thaw(node=node, after_s=for_s))
            case FreezeRank(rank=rank, for_s=for_s):
                yield from (step, ThawRank(rank=rank, after_s=for_s))
            case Flap(node=node, for_s=for_s):
                moment = {"at_step": step.at_step, "after_s": step.after_s, "random_s": step.random_s}
                yield from (Cut(between=(node,), **moment), Heal(after_s=for_s))
            case _:
                yield step


def is_due(injection: Injection, step: int, step_since_s: float | None, since_last_s: float) -> bool:
    """`step` is the furthest that a rank has done, `step_since_s` for how long the awaited one has been behind us."""
    if injection.action.at_step is None:
        return since_last_s >= (injection.action.after_s or 0.0) + injection.extra_s
    return step >= injection.action.at_step and (step_since_s or 0.0) >= injection.extra_s


@dataclass(frozen=True)
class FaultDraw:
    """What a fault kind may use to draw one fault: the random source, the victim and the time that is left."""

    random: random.Random
    node: str
    # Another node than `node`, for faults with two victims.
    other_node: str
    # A fault lasts no longer than half of the time to the next one, so that every fault meets a whole cluster.
    most_s: float


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault that a soak draws. To add one, add an entry to `SOAK_KINDS`.

    Its actions leave the cluster whole, and at least one node keeps the training's state: training must go on.
    """

    # How often it is drawn, relative to the others.
    weight: int
    make: Callable[[FaultDraw], tuple[AnyAction, ...]]
    # It fills the checkpoints' own small disk, which only root can mount.
    needs_disk: bool = False


def _kill_node(d: FaultDraw) -> tuple[AnyAction, ...]:
    silent = d.random.random() < 0.5
    return (KillNode(node=d.node, silent=silent), PowerOn(node=d.node, after_s=min(5.0, d.most_s)))


def _kill_two(d: FaultDraw) -> tuple[AnyAction, ...]:
    """The second rank dies while the others detect the first loss, regroup or copy the state."""
    return (KillRank(node=d.node), KillRank(node=d.other_node, after_s=round(d.random.uniform(0.0, 1.5), 2)))


def _slow_link(d: FaultDraw) -> tuple[AnyAction, ...]:
    return (SetLink(node=d.node, rate="10mbit"), SetLink(node=d.node, rate="1gbit", after_s=min(5.0, d.most_s)))


SOAK_KINDS: dict[str, FaultKind] = {
    "kill-rank": FaultKind(4, lambda d: (KillRank(node=d.node),)),
    "kill-node": FaultKind(3, _kill_node),
    "kill-two": FaultKind(2, _kill_two),
    "freeze-short": FaultKind(3, lambda d: (Freeze(node=d.node, for_s=min(1.5, d.most_s)),)),
    "freeze-long": FaultKind(2, lambda d: (Freeze(node=d.node, for_s=min(8.0, d.most_s)),)),
    "cut": FaultKind(2, lambda d: (Cut(between=(d.node,)), Heal(after_s=min(6.0, d.most_s)))),
    "flap": FaultKind(3, lambda d: (Flap(node=d.node, for_s=0.5),)),
    "slow-link": FaultKind(2, _slow_link),
    "disk-full": FaultKind(1, lambda d: (FillDisk(), FreeDisk(after_s=min(3.0, d.most_s))), needs_disk=True),
}


@dataclass(frozen=True)
class SoakFault:
    """`at_s` since the soak of its sync mode began; its actions follow each other by their `after_s`."""

    at_s: float
    kind: str
    steps: tuple[AnyAction, ...]


@dataclass(frozen=True)
class SoakBlock:
    """The faults of one sync mode, which are injected into one training."""

    sync: str
    faults: tuple[SoakFault, ...]


def plan_blocks(
    minutes: float, every_s: float, seed: int, nodes: int, modes: Sequence[str], kinds: Sequence[str]
) -> list[SoakBlock]:
    """Divides the faults among the sync modes: one block each, in the given order, at least one fault each."""
    count = max(len(modes), int(60 * minutes / every_s))
    shares = [count // len(modes) + (number < count % len(modes)) for number in range(len(modes))]
    return [
        SoakBlock(mode, tuple(plan_soak(share, every_s, seed, nodes, mode, kinds)))
        for mode, share in zip(modes, shares, strict=True)
    ]


def plan_soak(
    count: int, every_s: float, seed: int, nodes: int, mode: str = "ddp", kinds: Sequence[str] = tuple(SOAK_KINDS)
) -> list[SoakFault]:
    """Draws without putting back, until each kind came as often as its weight says: a block of 22 has every kind.

    The draws depend on seed and mode only. One mode alone meets the same faults as in a soak of all of them.
    """
    draw = random.Random(f"soak/{seed}/{mode}")
    bag: list[str] = []
    faults = []
    for number in range(1, count + 1):
        if not bag:
            bag = [kind for kind in kinds for _ in range(SOAK_KINDS[kind].weight)]
            draw.shuffle(bag)
        kind = bag.pop()
        node, other = draw.sample([f"node{n}" for n in range(1, nodes + 1)], 2)
        steps = SOAK_KINDS[kind].make(FaultDraw(draw, node, other, every_s / 2))
        faults.append(SoakFault(number * every_s, kind, steps))
    return faults


# SECTION trials/chaos/record
# Everything that was seen of one run, as plain lists of events: what the judging works on.


@dataclass
class ScenarioRecord:
    """`ranks`, `agents` (each with its `node`), `commits` and `supervisor` are the run folder's events as they came;
    `injected` is what was done to it, `asked_at` when it was asked to stop."""

    ranks: list[Event] = field(default_factory=list)
    agents: list[Event] = field(default_factory=list)
    commits: list[Event] = field(default_factory=list)
    supervisor: list[Event] = field(default_factory=list)
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
class CommandResult:
    """What a shoal command said that the scenario ran."""

    code: int
    text: str
    seconds: float


@dataclass(frozen=True)
class RunEnding:
    """How it came out: the supervisor's word, and what a look around found afterwards.

    `replicas_equal` is None where there were no final states to compare; `left` are processes that should be gone,
    `torn` checkpoints that were begun and never completed.
    """

    exit_code: int | None
    replicas_equal: bool | None
    replicas: int
    left: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()
    stop_s: float | None = None
    answers: tuple[CommandResult, ...] = ()
    # What `shoal verify` found wrong; None where it was not asked.
    verified: tuple[str, ...] | None = None
    trouble: str = ""
