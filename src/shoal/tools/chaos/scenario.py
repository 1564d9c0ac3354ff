"""Scenarios: which faults are injected into a run, when, and what must hold. TOML files, shoal's in `scenarios/`."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.load import merge, validate
from shoal.config.presets import did_you_mean, preset
from shoal.config.schema import Config, EngineConfig, SyncConfig
from shoal.config.sync_choice import TRAINED_METHODS
from shoal.errors import ConfigError, UsageError
from shoal.events import Event
from shoal.tools.bench.levers import parse_lever
from shoal.tools.chaos.actions import (
    Action,
    AnyAction,
    CorruptMemory,
    CutPower,
    FillDisk,
    LimitCpu,
    PowerOn,
    RunShoal,
    Seconds,
    action_names,
    describe,
    needs_nodes,
)

SCENARIOS = Path(__file__).with_name("scenarios")

# Small, so that most of the time goes into starting processes. The batch divides evenly among up to four ranks.
TRAINING: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "heads": 2, "width": 32, "seq_len": 32},
    "data": {"sentences": 400},
    "train": {"global_batch": 12, "checkpoint_every": 50, "eval_every": 1_000_000, "compile": "off"},
    "members": {"digest_every": 20},
}
# The settings of a user's script; its model, data and global batch are its own.
SCRIPT: dict[str, dict[str, Any]] = {"train": {"checkpoint_every": 50}, "members": {"digest_every": 20}}
# For a scenario without a number of steps: the run is asked to stop after the last action.
ENDLESS = 1_000_000


class Expect(BaseModel):
    """What must hold.

    Times are counted from the first action unless noted. Some things must hold in every scenario that trains: the
    ledger is complete, replicas are bit-identical, and no process is left 5 s after the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    detect_within_s: Seconds | None = None
    regroup_within_s: Seconds | None = None
    next_step_within_s: Seconds | None = None
    next_commit_within_s: Seconds | None = None
    rejoin_within_s: Seconds | None = None  # since the last action
    return_pause_within_s: Seconds | None = None  # longest time without a step since the last action
    pause_within_s: Seconds | None = None
    stop_within_s: Seconds | None = None
    reconfigurations: Annotated[int, Field(ge=0)] | None = None
    most_reconfigurations: Annotated[int, Field(ge=0)] | None = None
    members: Annotated[int, Field(ge=1)] | None = None
    stale_commits: Annotated[int, Field(ge=0)] = 0
    abandoned: Annotated[int, Field(ge=0)] | None = None
    slower_at_most: Annotated[float, Field(gt=0)] | None = None
    resumed_behind_at_most: Annotated[int, Field(ge=0)] | None = None
    sentence: str | None = None  # a regular expression for what the user is shown
    sentence_within_steps: Annotated[int, Field(ge=1)] | None = None  # since the first action
    exit_code: int | None = None  # None: 0 for a run with a number of steps, 130 for one that is asked to stop
    whole_checkpoints: bool = True  # no incomplete checkpoint is left; false where ranks are killed at the end
    has_supervisor: bool = True  # false where the supervisor is killed, so that no process reports an exit code
    command_code: int | None = None
    command_prints: str | None = None
    command_within_s: Seconds | None = None
    verified: bool = True  # `shoal verify` passes; false where the scenario leaves damage on purpose

    @field_validator("sentence", "command_prints")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value


class ChaosScenario(BaseModel):
    """A scenario file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    row: Annotated[int, Field(ge=1, le=28)]  # of the table of faults
    text: str
    nodes: Annotated[int, Field(ge=1, le=64)] = 3
    trains: bool = True  # false for faults that are detected before a training starts
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
    def limits_cpu(self) -> bool:
        return any(isinstance(part, LimitCpu) for step in self.steps for part in step.parts())

    @property
    def ends_by_itself(self) -> bool:
        return "steps" in self.training.get("train", {})

    @property
    def target_s(self) -> float | None:
        """Return the bound that matters most to a user."""
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

    def session(self, on: str, seed: int) -> dict[str, dict[str, Any]]:
        """Return the same settings for the session of a user's script, without those of the GPT."""
        settings = merge([SCRIPT, {"train": {"steps": ENDLESS, "seed": seed}, "run": {"on": on}}, self.training])
        known = {name: set(type(section).model_fields) for name, section in EngineConfig()}
        return {
            section: {key: value for key, value in values.items() if key in known[section]}
            for section, values in settings.items()
            if section in known
        }

    def with_sync(self, mode: str) -> ChaosScenario:
        """Return the same scenario with another sync method."""
        return self.model_copy(update={"training": merge([self.training, {"sync": read_sync(mode)}])})

    def why_not_script(self) -> str:
        """Return why the scenario cannot be played on a user's script; empty when it can."""
        if not self.trains:
            return "it trains nothing: its fault is found before a run"
        if any(isinstance(step, CorruptMemory) for step in self.steps):
            return "it needs weights that stand still (train.lr = 1e-30), and the learning rate of a script is its own"
        if any(isinstance(step, PowerOn) for step in self.steps):
            return "a restarted node cannot join the run of a script: shoal join knows shoal's own GPT only"
        return ""

    @model_validator(mode="after")
    def _is_possible(self) -> ChaosScenario:
        if self.steps[0].after_regroup:
            raise ValueError(f"{describe(self.steps[0])}: after_regroup follows another step")
        for step in self.steps:
            named = [getattr(step, "node", None), *getattr(step, "between", ())]
            for node in filter(None, named):
                if int(node.removeprefix("node")) > self.nodes:
                    raise ValueError(f"{describe(step)}: the scenario has nodes = {self.nodes}")
            if (getattr(step, "rank", None) or 0) >= self.nodes:
                raise ValueError(f"{describe(step)}: ranks count from 0, and the scenario has nodes = {self.nodes}")
            if not self.trains and step.waits_for_event:
                moment = "after_regroup" if step.after_regroup else "at_step"
                raise ValueError(f"{describe(step)}: {moment} needs a training, and the scenario has trains = false")
        if any(name.startswith("command_") for name in self.expect.model_fields_set) and not any(
            isinstance(step, RunShoal) for step in self.steps
        ):
            raise ValueError('expect.command_… judges the output of a command, and no step is one: do = "shoal"')
        if self.expect.sentence_within_steps is not None and self.expect.sentence is None:
            raise ValueError("expect.sentence_within_steps needs a sentence")
        if any(isinstance(step, FillDisk) for step in self.steps) and self.disk_mb is None:
            raise ValueError("fill-disk needs a disk that can be filled: set its size, disk_mb = 4")
        if self.cuts_power and (self.disk_mb is None or self.disk_holds != "run"):
            raise ValueError('cut-power needs a disk of its own for the run: disk_mb = 64, disk_holds = "run"')
        return self


def read_sync(mode: str) -> dict[str, Any]:
    """Return the settings of a sync method, spelled as for `shoal bench levers`: zero1, diloco:20, ddp+int8."""
    sync = parse_lever(mode)
    try:
        SyncConfig(**sync)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        fix = f"use one of: {', '.join(TRAINED_METHODS)}, ddp+int8"
        raise UsageError(f"--sync {mode} cannot be trained", why=why, fix=fix) from None
    return sync


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
    """Find a scenario by name, or load a file of the user."""
    if word.endswith(".toml") or "/" in word:
        return load_scenario(Path(word))
    file = SCENARIOS / f"{word}.toml"
    if not file.is_file():
        names = [path.stem for path in _files()]
        raise UsageError(
            f"there is no scenario {word!r}",
            why=did_you_mean(word, names) or "a scenario is a name from the list, or a TOML file of yours",
            fix="shoal chaos list",
        )
    return load_scenario(file)


def all_scenarios() -> list[ChaosScenario]:
    """Return the built-in scenarios in the order of the table of faults."""
    return sorted(map(load_scenario, _files()), key=lambda scenario: (scenario.row, scenario.name))


def _files() -> list[Path]:
    return sorted(SCENARIOS.glob("*.toml"))


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = Expect.model_fields if first["loc"][0] == "expect" else ChaosScenario.model_fields
        why = did_you_mean(str(first["loc"][-1]), known)
        return ConfigError(f"{source}: unknown key {place}", why=why, fix="docs/chaos.md has them all")
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        do = first["input"].get("do") if isinstance(first["input"], dict) else first["input"]
        names = action_names()
        why = did_you_mean(str(do), names) if do else "every step names its action"
        return ConfigError(f"{source}: {place} has do = {do!r}", why=why, fix=f"use one of: {', '.join(names)}")
    message = first["msg"].removeprefix("Value error, ")
    seen = f"{source}: {place}: {message}" if place else f"{source}: {message}"
    return ConfigError(seen, why=f"it says {first['input']!r}" if place else "", fix="docs/chaos.md has every key")


@dataclass(frozen=True)
class Injection:
    action: Action
    extra_s: float = 0.0  # the random part of its delay


def plan_injections(steps: Sequence[Action], seed: int, number: int) -> list[Injection]:
    """Draw the random delays; the same seed and number of a run give the same moments."""
    draw = random.Random(f"{seed}/{number}")
    return [Injection(part, draw.uniform(0, part.random_s)) for step in steps for part in step.parts()]


def is_due(injection: Injection, since_event_s: float | None, since_last_s: float) -> bool:
    """Tell whether it is time. `since_event_s` is the time since what the action waits for: a step, or a generation;
    None before that."""
    if injection.action.waits_for_event:
        return since_event_s is not None and since_event_s >= injection.extra_s
    return since_last_s >= (injection.action.after_s or 0.0) + injection.extra_s


@dataclass
class ScenarioRecord:
    """Everything observed of one run, as events in the order of their arrival."""

    ranks: list[Event] = field(default_factory=list)
    agents: list[Event] = field(default_factory=list)  # each with its `node`
    commits: list[Event] = field(default_factory=list)
    supervisor: list[Event] = field(default_factory=list)
    injected: list[Event] = field(default_factory=list)
    asked_at: float | None = None  # when the run was asked to stop

    def rank_events(self, *kinds: str) -> list[Event]:
        return [event for event in self.ranks if event.get("event") in kinds]

    def agent_events(self, *kinds: str) -> list[Event]:
        return [event for event in self.agents if event.get("event") in kinds]

    @property
    def furthest_step(self) -> int:
        return max((int(event["step"]) for event in self.rank_events("step")), default=0)


@dataclass(frozen=True)
class CommandResult:
    """The result of a shoal command that the scenario ran."""

    code: int
    text: str
    seconds: float


@dataclass(frozen=True)
class RunEnding:
    """The state of a run after its end."""

    exit_code: int | None  # as the supervisor reported it
    replicas_equal: bool | None  # None where there were no final states to compare
    replicas: int
    left: tuple[str, ...] = ()  # processes that should be gone
    torn: tuple[str, ...] = ()  # incomplete checkpoints
    stop_s: float | None = None
    answers: tuple[CommandResult, ...] = ()
    verified: tuple[str, ...] | None = None  # the errors of `shoal verify`; None where it was not run
    trouble: str = ""  # why the scenario could not be played


@dataclass(frozen=True)
class FaultRow:
    """One row of the table of faults."""

    number: int
    fault: str
    tests: tuple[str, ...] = ()  # modules in tests/ that cover it, beside scenarios or in their place
    why: str = ""  # no scenario plays it


FAULT_ROWS = (
    FaultRow(1, "kill -9 of any rank, at any moment", ("unit/control/test_membership_faults",)),
    FaultRow(
        2,
        "kill -9 of the leader, or of the agent with the key-value store",
        ("unit/control/test_membership_faults",),
    ),
    FaultRow(
        3,
        "every process of a node killed; power cut or pulled cable",
        ("unit/control/test_membership_faults",),
    ),
    FaultRow(4, "two of three nodes die at once", ("unit/control/test_membership_faults",)),
    FaultRow(5, "freeze for 1.5 s", ("unit/control/test_membership_faults",)),
    FaultRow(6, "freeze for 30 s, then wake", ("unit/control/test_membership_faults",)),
    FaultRow(7, "partition and heal: 2 against 1, 1 against 1", ("unit/control/test_membership_faults",)),
    FaultRow(8, "one-way block", ("integration/tools/test_doctor_faults_network",)),
    FaultRow(9, "link flap of 0.5 s and of 5 s", ("unit/control/test_membership_faults",)),
    FaultRow(10, "a slow link; a rank three times slower", ("integration/engine/test_stragglers",)),
    FaultRow(11, "packet loss of 1% and 5%", ("integration/engine/test_stragglers",)),
    FaultRow(12, "a restarted or new machine joins", ("unit/control/test_membership_faults",)),
    FaultRow(13, "kill during a checkpoint", ("unit/engine/test_checkpoint", "integration/test_whole_runs")),
    FaultRow(14, "checkpoint truncated or zero-filled", ("unit/engine/test_checkpoint",)),
    FaultRow(15, "one flipped bit in a checkpoint", ("unit/engine/test_checkpoint",)),
    FaultRow(16, "disk full, read-only folder", ("integration/cli/test_bad_input",)),
    FaultRow(
        17,
        "a clock that is wrong or jumps",
        (
            "integration/launch/test_clocks",
            "unit/control/test_membership_rules",
            "integration/tools/test_doctor_faults_machine",
        ),
        "a lab's nodes have one clock, unless a test gives one of them another",
    ),
    FaultRow(
        18,
        "port taken, stale run",
        ("integration/runs/test_detached", "unit/tools/doctor/test_checks_machine"),
    ),
    FaultRow(19, "random bytes and idle connections on every port", ("integration/runs/test_secure_runs",)),
    FaultRow(
        20,
        "wrong, missing or replayed token",
        (
            "unit/agent/test_mesh_unknown_connections",
            "unit/control/test_connection_guard",
            "integration/agent/test_agents",
            "integration/agent/test_joining_nodes",
        ),
        "the tests use the protocol with a wrong token; a scenario only connects",
    ),
    FaultRow(
        21,
        "a peer with another torch, protocol, config or data set",
        ("unit/control/test_handshake", "integration/agent/test_agents"),
        "nodes of a lab run one installation",
    ),
    FaultRow(
        22,
        "out of memory in one rank",
        ("integration/launch/test_out_of_memory", "unit/agent/test_rank_processes"),
    ),
    FaultRow(23, "NaN or Inf loss on one rank", ("integration/engine/test_refused_steps",)),
    FaultRow(24, "one weight bit changed on one rank", ("integration/engine/test_divergence",)),
    FaultRow(
        25,
        "dead DNS, a host name that is 127.0.1.1, the wrong interface",
        (
            "integration/tools/test_doctor_faults_network",
            "integration/tools/test_doctor_faults_machine",
        ),
        "doctor's own tests break each of them on a node",
    ),
    FaultRow(
        26,
        "SSH drops, launcher killed, terminal closed",
        ("integration/runs/test_detached", "integration/cluster/test_hosts_ssh"),
    ),
    FaultRow(
        27,
        "SIGINT once and twice, SIGTERM",
        ("integration/launch/test_failing_ranks", "integration/tools/test_chaos_runs"),
    ),
    FaultRow(28, "soak: a random fault every 15 s", (), "shoal chaos soak"),
)
