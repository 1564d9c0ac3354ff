"""Commands: a function, its options and arguments, the reading of a command line, and the answer to a wrong one.

Not by typer or click: help, errors, suggestions and completion are shoal's own, so that only the splitting of words
would be theirs; see docs/design.md.
"""

from __future__ import annotations

import inspect
import shlex
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from shoal.cli.options import TABLE, Option
from shoal.config.presets import PRESETS, Overrides, did_you_mean, flag_of
from shoal.errors import UsageError

HELP_FLAGS = ("-h", "--help")
# Commands within commands that list what there is: users type one where another is the name.
_LISTING_COMMANDS = ("list", "status", "show", "ls", "ps")
# Options of other launchers and trainers, and what they are here.
OTHER_WORDS = {
    **dict.fromkeys(
        ("--ranks", "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes", "--world-size"),
        "--on local:{}",
    ),
    **dict.fromkeys(("-n", "-np", "--np", "--nprocs", "--workers", "--gpus"), "--on local:{}"),
    **dict.fromkeys(("--hosts", "--hostfile", "--host-file"), "--on {}"),
    **dict.fromkeys(("--max-steps", "--max-iters", "--iterations", "--iters"), "--steps {}"),
    **dict.fromkeys(("--batch-size", "--batch", "--batch_size"), "--global-batch {}"),
    **dict.fromkeys(("--output", "--output-dir", "--run-dir", "--log-dir"), "--out {}"),
    **dict.fromkeys(("--text", "--dataset", "--corpus", "--input"), "--data {}"),
    # An argument, which has no name on the command line.
    **dict.fromkeys(("--preset", "--model"), "preset {}"),
    "--learning-rate": "--set train.lr={}",
    "--compress": "--wire {}",
    # Only `report` has it.
    "--format": "--pdf",
}
_EPOCHS = ("--epochs", "--epoch", "--num-epochs", "--num_epochs", "--max-epochs", "--max_epochs")
_REQUIRED = inspect.Parameter.empty
_FORMS = {int: "a whole number", float: "a number"}

Function = TypeVar("Function", bound=Callable[..., object])


class HelpAsked(Exception):
    """`--help` among other words."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command line asks for: one field for each option and argument. A base class for commands with many."""

    # The options that were typed, by field; the other fields have their defaults.
    given: dict[str, Option] = field(default_factory=dict)

    def flags(self) -> dict[str, str]:
        """Return the typed flags by setting."""
        return {option.setting: flag_of(name) for name, option in self.given.items() if option.setting}

    def overrides(self) -> Overrides:
        """Return the settings of the typed flags."""
        overrides: Overrides = {}
        for name, option in self.given.items():
            if option.setting:
                section, key = option.setting.split(".")
                overrides.setdefault(section, {})[key] = getattr(self, name)
        return overrides

    def refuse(self, names: Iterable[str], beside: str, why: str, fix: str) -> None:
        """Refuse the first of these fields that was typed, because it would have no effect."""
        for name in names:
            if name in self.given:
                raise UsageError(f"{flag_of(name)} has no effect {beside}", why=why, fix=fix)


@dataclass(frozen=True)
class Parameter:
    """An option or argument of a command, with what its function says about it."""

    name: str
    option: Option
    kind: type
    is_list: bool
    default: Any

    @property
    def is_argument(self) -> bool:
        return self.option.is_argument

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def is_required(self) -> bool:
        return self.default is _REQUIRED

    @property
    def flags(self) -> list[str]:
        return [] if self.is_argument else (self.option.flags or flag_of(self.name)).split()

    @property
    def shown_name(self) -> str:
        """Return an argument's name in the help."""
        return self.option.metavar or self.name.rstrip("_").upper()

    def convert(self, text: str) -> Any:
        low, high = self.option.low, self.option.high
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if value is not None and (low is None or value >= low) and (high is None or value <= high):
            return value
        start = "" if low is None else f" from {low:,}"
        end = "" if high is None else f" {'to' if start else 'up to'} {high:,}"
        name = self.shown_name if self.is_argument else self.flags[0]
        raise UsageError(f"{name} is {_FORMS[self.kind]}{start}{end}; {text!r} was given")


# Tells whether the words from this one on are not shoal's, but those of a script or of another program.
TakesWords = Callable[[str], bool]


def no_word(word: str) -> bool:
    return False


def any_word(word: str) -> bool:
    return True


class Command:
    """A function that can be typed."""

    def __init__(
        self, function: Callable[..., object], options: dict[str, Option], takes_words: TakesWords = no_word
    ) -> None:
        self.function = function
        self._options = options
        self._takes_words = takes_words
        self.commands: dict[str, Command] = {}
        self.help = inspect.cleandoc(function.__doc__ or "")

    @cached_property
    def _request(self) -> type[Request] | None:
        hints = typing.get_type_hints(self.function)
        request = hints.get("request")
        return request if is_dataclass(request) else None  # type: ignore[return-value]

    @cached_property
    def parameters(self) -> list[Parameter]:
        target = self._request or self.function
        hints = typing.get_type_hints(target)
        return [
            _read_parameter(one, hints[one.name], self._options.get(one.name) or TABLE[one.name])
            for one in inspect.signature(target).parameters.values()
            if one.name != "given"
        ]

    def call(self, path: str, words: Sequence[str]) -> object:
        values = self.read(path, words)
        if self._request is not None:
            given = {one.name: one.option for one in self.parameters if one.name in values}
            return self.function(self._request(**values, given=given))
        return self.function(**values)

    def read(self, path: str, words: Sequence[str]) -> dict[str, Any]:
        """Return what the words give, by parameter."""
        values: dict[str, Any] = {}
        try:
            rest = self._read_options(path, list(words), values)
            for parameter in (one for one in self.parameters if one.is_argument):
                taken, rest = (rest, []) if parameter.is_list else (rest[:1], rest[1:])
                if taken:
                    converted = [parameter.convert(word) for word in taken]
                    values[parameter.name] = converted if parameter.is_list else converted[0]
            if rest:
                raise UsageError(f"Got unexpected extra argument(s) ({' '.join(rest)})")
            self._require(values)
        except UsageError as error:
            error.fix = error.fix or f"shoal {path} --help"
            raise
        return values

    def _read_options(self, path: str, left: list[str], values: dict[str, Any]) -> list[str]:
        """Read the options into `values`; return the other words."""
        by_flag = {flag: parameter for parameter in self.parameters for flag in parameter.flags}
        whole = list(left)
        rest: list[str] = []
        while left:
            word = left.pop(0)
            if word == "--":
                return rest + left
            if not word.startswith("-") or word == "-":
                rest.append(word)
                if self._takes_words(word):
                    return rest + left
                continue
            flag, equals, value = word.partition("=")
            if not word.startswith("--") and word[:2] in by_flag and len(word) > 2:
                # `-oFILE`, and several short flags in one word: `-fa`.
                flag, equals, value = word[:2], "=", word[2:]
                if by_flag[flag].is_flag:
                    left.insert(0, f"-{value}")
                    equals = ""
            parameter = by_flag.get(flag)
            if parameter is None:
                if flag in HELP_FLAGS:
                    raise HelpAsked
                if self._takes_words(word):
                    return [*rest, word, *left]
                raise self.unknown_option(flag, path, whole)
            if parameter.is_flag:
                if equals:
                    raise UsageError(f"Option {flag!r} does not take a value.")
                values[parameter.name] = True
                continue
            if not equals:
                if not left:
                    raise UsageError(f"Option {flag!r} requires an argument.")
                value = left.pop(0)
            converted = parameter.convert(value)
            if parameter.is_list:
                values.setdefault(parameter.name, []).append(converted)
            else:
                values[parameter.name] = converted
        return rest

    def _require(self, values: dict[str, Any]) -> None:
        for parameter in self.parameters:
            if parameter.is_required and parameter.name not in values:
                if not parameter.is_argument:
                    raise UsageError(f"Missing option {' / '.join(map(repr, parameter.flags))}.")
                name = parameter.shown_name.removesuffix("…")
                if name != "RUN":
                    raise UsageError(f"Missing argument {name}")
                raise UsageError(
                    "Missing argument RUN",
                    why="RUN is the folder of a run, such as runs/NAME",
                    fix="list the runs: shoal runs",
                )

    def unknown_option(self, flag: str, path: str, words: Sequence[str]) -> UsageError:
        why, fix = suggest_option(flag, self, [*path.split(), *words]) or (self._nearest(flag), "")
        return UsageError(f"No such option: {flag}", why=why, fix=fix)

    def _nearest(self, flag: str) -> str:
        """Return the option that is meant, or that it is an argument, which has no name when typed."""
        wanted = flag.lstrip("-").replace("-", "_")
        for parameter in self.parameters:
            if parameter.is_argument and parameter.name == wanted:
                return f"{parameter.shown_name} is given without a name in front"
        return did_you_mean(flag, [known for parameter in self.parameters for known in parameter.flags])


class Group(Command):
    """Commands within a command, such as `shoal lab up`."""

    def __init__(self, name: str, help: str, /, **options: Option) -> None:
        """`options` are those of its commands' parameters that the table does not have."""
        super().__init__(lambda: None, options)
        self.help = help
        COMMANDS[name] = self

    def command(self, takes_words: TakesWords = no_word, **options: Option) -> Callable[[Function], Function]:
        """Make the function a command of this group."""

        def register(function: Function) -> Function:
            self.commands[function.__name__.rstrip("_")] = Command(function, self._options | options, takes_words)
            return function

        return register

    def call(self, path: str, words: Sequence[str]) -> object:
        if not words or words[0] in HELP_FLAGS:
            raise HelpAsked
        name, fix = words[0], f"shoal {path} --help"
        if name.startswith("-"):
            raise UsageError(f"No such option: {name}", fix=fix)
        if name not in self.commands:
            meant = next((known for known in _LISTING_COMMANDS if known in self.commands), None)
            is_list = name in _LISTING_COMMANDS and meant is not None
            why = f"did you mean {meant!r}?" if is_list else did_you_mean(name, self.commands)
            raise UsageError(f"shoal {path} has no command {name!r}", why=why, fix=fix)
        return self.commands[name].call(f"{path} {name}", words[1:])


# The commands of the modules that were imported.
COMMANDS: dict[str, Command] = {}


def command(takes_words: TakesWords = no_word, **options: Option) -> Callable[[Function], Function]:
    """Make a function a command with its name; `options` are those of its parameters that the table does not have."""

    def register(function: Function) -> Function:
        COMMANDS[function.__name__] = Command(function, options, takes_words)
        return function

    return register


def _read_parameter(parameter: inspect.Parameter, annotation: Any, option: Option) -> Parameter:
    parts = typing.get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    [kind] = [part for part in parts if part is not NoneType]
    is_list = typing.get_origin(kind) is list
    if parameter.default is _REQUIRED and not option.flags:
        option = Option(**{**vars(option), "is_argument": True})
    return Parameter(parameter.name, option, typing.get_args(kind)[0] if is_list else kind, is_list, parameter.default)


def suggest_option(name: str, command: Command, arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return why an option is unknown and the command line that was meant, for the words of other tools and settings.

    None where the command has nothing like it.
    """
    known = {
        flag: parameter
        for parameter in command.parameters
        for flag in parameter.flags or [parameter.shown_name.lower()]
    }
    if name in _EPOCHS and "--steps" in known:
        return (
            "the length of a training is a number of steps; an epoch has as many as samples / global batch, and a run "
            "prints its samples when it starts",
            f"write --steps N; an option of your own script stands after it: shoal run train.py {name} …",
        )
    if command.function.__name__ == "plan":
        from shoal.tools.plan.scenario_file import ScenarioFile

        # As long as there was `shoal plan --simulate`, the keys of a scenario file were its options.
        key = name.lstrip("-").replace("-", "_")
        if key == "simulate" or key in ScenarioFile.__dataclass_fields__:
            what = "a simulation" if key == "simulate" else f"{key} = …"
            return f"{what} is written into a scenario file; docs/simulate.md has one", "shoal simulate SCENARIO.toml"
    pattern = OTHER_WORDS.get(name, "")
    if not pattern and "--set" in known:
        # Imported here: only a wrong command line needs the settings.
        from shoal.config.load import known_keys

        wanted = name.lstrip("-").replace("-", "_")
        pattern = next((f"--set {key}={{}}" for key in known_keys() if key.partition(".")[2] == wanted), "")
    option, _, form = pattern.partition(" ")
    # The `--on` of `ps` is a file.
    if option not in known or (form.startswith("local:") and known[option].kind is Path):
        return None
    before, value, rest = _split_at(name, arguments)
    if option == "preset" and value and value not in PRESETS:
        nearest = did_you_mean(value, PRESETS) or f"the presets are {', '.join(PRESETS)}"
        return (
            f"a preset is given without a name in front, and there is no preset {value!r}; {nearest}",
            shlex.join(["shoal", *before, next(iter(PRESETS)), *rest]),
        )
    if option == "--pdf":
        return (f"here it is {option}", shlex.join(["shoal", *before, option, *rest])) if value == "pdf" else None
    meant = [*([option] if option.startswith("-") else []), form.format(value or "…")]
    return f"here it is {' '.join(meant)}", shlex.join(["shoal", *before, *meant, *rest])


def _split_at(name: str, arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the words before an option, its value, and the words after both."""
    words = list(arguments)
    place = next(number for number, word in enumerate(words) if word.partition("=")[0] == name)
    _, equals, value = words[place].partition("=")
    rest = words[place + 1 :]
    if not equals and rest and not rest[0].startswith("-"):
        value, rest = rest[0], rest[1:]
    return words[:place], value, rest
