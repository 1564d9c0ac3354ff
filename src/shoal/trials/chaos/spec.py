"""A scenario: what is done to a run, when, and what must hold. TOML files; ours lie in `scenarios/`."""

from __future__ import annotations

import re
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.load import merge, validate
from shoal.config.presets import did_you_mean, preset
from shoal.config.schema import Config
from shoal.errors import ConfigError, UsageError
from shoal.trials.chaos.actions import AnyAction, Command, CutPower, FillDisk, Seconds, describe, kinds, needs_nodes

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
    says that the keeper is killed, so that no process is left that could give one. `shoal verify` must pass on the run
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


class Scenario(BaseModel):
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
    def _is_possible(self) -> Scenario:
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
            isinstance(step, Command) for step in self.steps
        ):
            raise ValueError('expect.command_… judges what a command says, and no step is one: do = "shoal"')
        if self.expect.sentence_within_steps is not None and self.expect.sentence is None:
            raise ValueError("expect.sentence_within_steps needs a sentence")
        if any(isinstance(step, FillDisk) for step in self.steps) and self.disk_mb is None:
            raise ValueError("fill-disk needs a disk that can be filled: say how large, disk_mb = 4")
        if self.cuts_power and (self.disk_mb is None or self.disk_holds != "run"):
            raise ValueError('cut-power needs a disk of its own for the run: disk_mb = 64, disk_holds = "run"')
        return self


def load_scenario(file: Path) -> Scenario:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no scenario file {file}", fix="shoal chaos list, for those that exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", fix="see https://toml.io for the format") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", fix=f"look at it: ls -ld {file}") from None
    return parse_scenario(values, str(file))


def parse_scenario(values: dict[str, Any], source: str) -> Scenario:
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        raise _explain(error, source) from None
    scenario.config("local:1", 0)
    return scenario


def find_scenario(word: str) -> Scenario:
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


def all_scenarios() -> list[Scenario]:
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
    known = Expect.model_fields if place[0] == "expect" else Scenario.model_fields
    return did_you_mean(str(place[-1]), known)
