"""`shoal config`: show, explain and write settings, from the schema itself. `shoal completion`: scripts for shells."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any

from shoal.cli.command import Command, Group, command
from shoal.cli.help import NAMES, help_width, wrap
from shoal.cli.main import load_command
from shoal.cli.options import SETTINGS, Option, argument
from shoal.cli.output import print_json, shown
from shoal.config.presets import PRESET_NAMES, PRESETS, did_you_mean, flag_of
from shoal.config.sync_choice import SYNC_MODES, WIRE_FORMATS
from shoal.errors import ConfigError, UsageError
from shoal.run_folder import write_atomically
from shoal.units import format_number

if TYPE_CHECKING:
    from shoal.config.schema import Section

SHELLS = ("bash", "zsh", "fish")
# In a completion script of bash: the run folders in ./runs.
_RUNS = "$(compgen -G 'runs/*')"
_MARKDOWN_HEAD = """# Settings

Every setting of a run. Give one as `--set section.key=value`, or in a TOML file with `--config FILE`; many have an
option of their own, named beside them. `shoal config explain KEY` prints one of them, `shoal config init` writes a file
to start from. This page is written by `shoal config show --markdown`.
"""


@dataclass(frozen=True)
class Setting:
    key: str
    flag: str  # of `shoal train`, or nothing
    values: str  # what it may be
    default: str
    meaning: str
    when: str  # when to change it


CONFIG = Group(
    "config", "Show, explain and write settings. Give one as --set section.key=value, or a file of them with --config."
)


@CONFIG.command(
    section=argument("Only this section: model, data, train, sync, run or members."),
    markdown=Option("Print the page docs/settings.md."),
)
def show(section: str | None = None, markdown: bool = False, json: bool = False) -> None:
    """List all settings with their values, default and meaning."""
    settings = list_settings()
    sections = list(dict.fromkeys(setting.key.partition(".")[0] for setting in settings))
    if section is not None:
        if section not in sections:
            raise UsageError(
                f"there is no section {section!r}",
                why=did_you_mean(section, sections),
                fix=f"use one of: {', '.join(sections)}",
            )
        settings = [setting for setting in settings if setting.key.startswith(f"{section}.")]
    if json:
        print_json({"settings": [asdict(setting) for setting in settings]})
    elif markdown:
        sys.stdout.write(settings_page(settings))
    else:
        sys.stdout.write("\n\n".join(_entry(setting, help_width()) for setting in settings) + "\n")


@CONFIG.command(key=argument("A setting, such as train.lr, or its last part."))
def explain(key: str, json: bool = False) -> None:
    """Explain one setting: its meaning, its values, its default, and when to change it."""
    settings = list_settings()
    named = [setting for setting in settings if key in (setting.key, setting.key.partition(".")[2])]
    if not named:
        keys = [setting.key for setting in settings]
        raise ConfigError(f"there is no setting {key!r}", why=did_you_mean(key, keys), fix="shoal config show")
    if json:
        print_json({"settings": [asdict(setting) for setting in named]})
        return
    texts = (f"{_entry(setting, help_width())}\n\n  shoal train --set {setting.key}=…\n" for setting in named)
    sys.stdout.write("\n".join(texts))


@CONFIG.command(preset=argument(f"{PRESET_NAMES}."), out=Option("The file to write."))
def init(preset: str = "grammar", out: Path = Path("shoal.toml")) -> None:
    """Write a file with the settings of a preset, each with its meaning, to change and to give with --config."""
    from shoal.config.load import build_config

    if out.exists():
        raise UsageError(
            f"{out} exists already",
            why="it may hold your own settings",
            fix=f"name another file: --out {out.stem}-2.toml",
        )
    values = build_config(preset).model_dump(mode="json")
    write_atomically(out, _settings_file(preset, values))
    sys.stdout.write(f"wrote {shown(out)}\nnext: change it, then: shoal train {preset} --config {shown(out)}\n")


def list_settings() -> list[Setting]:
    """Read all settings from the schema: values and defaults from the models, texts from the docstrings of fields."""
    from shoal.config.schema import Config

    flags = {option.setting: flag_of(name) for name, option in SETTINGS.items()}
    return [
        Setting(
            f"{section}.{name}",
            flags.get(f"{section}.{name}", ""),
            _values_text(field),
            _default_text(field.default),
            *texts[name],
        )
        for section, part in Config.model_fields.items()
        for model in [typing.cast("type[Section]", part.annotation)]
        for texts in [field_texts(model)]
        for name, field in model.model_fields.items()
    ]


def field_texts(model: type[Section]) -> dict[str, tuple[str, str]]:
    """Return the two paragraphs below each field: its meaning, and when to change it.

    From the source: pydantic's own way to read them would parse it whenever a program imports the schema.
    """
    texts: dict[str, tuple[str, str]] = {}
    for cls in reversed(model.__mro__):
        if not cls.__module__.startswith("shoal."):
            continue
        [tree] = ast.parse(inspect.getsource(cls)).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                meaning, _, when = inspect.cleandoc(str(text.value.value)).partition("\n\n")
                texts[ast.unparse(field.target)] = (" ".join(meaning.split()), " ".join(when.split()))
    return texts


def _values_text(field: Any) -> str:
    """Return what a field may be: `strong or weak`, `a whole number from 1`."""
    parts = typing.get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    [kind] = [part for part in parts if part is not type(None)]
    metadata = list(field.metadata)
    while typing.get_origin(kind) is Annotated:
        kind, *inner = typing.get_args(kind)
        metadata += [part for entry in inner for part in getattr(entry, "metadata", [entry])]
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    name = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(kind, "text")
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    limits = [
        f"{word} {format_number(getattr(limit, name_), 10)}"
        for name_, word in words.items()
        for limit in metadata
        if getattr(limit, name_, None) is not None
    ]
    return " ".join([name, *limits])


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, UnionType)


def _default_text(value: Any) -> str:
    if value is None:
        return "unset"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else f"{value}" or '""'


def _entry(setting: Setting, width: int) -> str:
    lines = [f"{setting.key} = {setting.default}"]
    for text in (
        setting.meaning,
        *([f"option: {setting.flag}"] if setting.flag else []),
        f"values: {setting.values}",
        f"when to change it: {setting.when}",
    ):
        lines += [f"  {line}" for line in wrap(text, width - 2)]
    return "\n".join(lines)


def settings_page(settings: list[Setting]) -> str:
    """Return docs/settings.md."""
    lines = [_MARKDOWN_HEAD]
    section = ""
    for setting in settings:
        if (first := setting.key.partition(".")[0]) != section:
            section = first
            lines += [f"## {section}\n"]
        flag = f"`{setting.flag}`; " if setting.flag else ""
        text = (
            f"`{setting.key}` ({flag}default: {setting.default}; {setting.values}). {setting.meaning} *{setting.when}*"
        )
        lines += ["\n".join(wrap(f"- {text}", 118, "  "))]
    return "\n".join(lines).replace("\n## ", "\n\n## ").replace("\n\n\n## ", "\n\n## ") + "\n"


def _settings_file(preset: str, values: dict[str, Any]) -> str:
    """Return a TOML file; settings that are unset or follow from the command line are comments."""
    from shoal.config.load import toml_value

    lines = [f"# Settings of the preset {preset}. shoal train {preset} --config FILE; see shoal config explain KEY."]
    section = ""
    for setting in list_settings():
        first, _, name = setting.key.partition(".")
        if setting.key in ("run.preset", "run.lineage", "sync.planned", "sync.planned_step_s"):
            continue
        if first != section:
            section = first
            lines += ["", f"[{section}]"]
        lines += [f"# {line}" for line in wrap(f"{setting.meaning} {setting.when}", 116)]
        value = values[first][name]
        lines += [f"# {name} =" if value is None else f"{name} = {toml_value(value)}"]
    return "\n".join(lines) + "\n"


@command(shell=argument("bash, zsh or fish."))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in your shell; the examples say where it belongs."""
    if shell not in SHELLS:
        raise UsageError(
            f"there is no completion for {shell!r}", why=did_you_mean(shell, SHELLS), fix="use bash, zsh or fish"
        )
    words, values = completion_words(), completion_values()
    sys.stdout.write(_fish(words, values) if shell == "fish" else _bash(words, values, is_zsh=shell == "zsh"))


def completion_values() -> dict[str, list[str]]:
    """Return the values of options that have a few, by command and option: `train --sync`."""
    from shoal.config.schema import Config

    known = {"sync": list(SYNC_MODES), "wire": list(WIRE_FORMATS)}
    for name, option in SETTINGS.items():
        section, setting = option.setting.split(".")
        kind = Config.model_fields[section].annotation.model_fields[setting].annotation  # type: ignore[union-attr]
        for one in (kind, *typing.get_args(kind)):
            if typing.get_origin(one) is typing.Literal:
                known[name] = [str(value) for value in typing.get_args(one)]
    return {
        f"{name} {parameter.flags[0]}": known[parameter.name]
        for name in NAMES
        for parameter in load_command(name).parameters
        if parameter.name in known and not parameter.is_argument and not parameter.is_flag
    }


def completion_words() -> dict[str, list[str]]:
    """Return what may follow `shoal`, each command, and each command within one."""
    words = {"": [*NAMES, "help", "--help", "--version"]}
    for name in NAMES:
        named = load_command(name)
        words[name] = [*named.commands, *_options(named)]
        words |= {f"{name} {child}": _options(command) for child, command in named.commands.items()}
    return words


def _options(command: Command) -> list[str]:
    """Return the options of a command and what it may be given beside them: presets, or the runs there are."""
    arguments = {one.name for one in command.parameters if one.is_argument}
    presets = list(PRESETS) if {"preset", "presets", "runconfig"} & arguments else []
    runs = [_RUNS] if {"run", "runs"} & arguments else []
    options = [one for one in command.parameters if not one.is_argument and not one.option.is_hidden]
    longs = [next((name for name in one.flags if name.startswith("--")), one.flags[0]) for one in options]
    return [*longs, "--help", *presets, *runs]


def _bash(words: dict[str, list[str]], values: dict[str, list[str]], is_zsh: bool) -> str:
    value_cases = "\n".join(f'    "{path}") offered="{" ".join(known)}" ;;' for path, known in values.items())
    cases = "\n".join(f'    "{path}") offered="{" ".join(offered)}" ;;' for path, offered in words.items() if path)
    groups = " ".join(path for path, offered in words.items() if path and not offered[0].startswith("-"))
    head = "autoload -U +X bashcompinit && bashcompinit\n" if is_zsh else ""
    # Not `path` and `words`: in zsh the first is the search path, the second what is being completed.
    return f"""{head}_shoal() {{
  local offered="{" ".join(words[""])}" command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -gt 1 ]; then
    case " {groups} " in *" $command "*) [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}" ;; esac
    offered=""
    case "$command" in
    help) offered="{" ".join(NAMES)}" ;;
{cases}
    esac
    case "$command ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{value_cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$offered" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _shoal shoal
"""


def _fish(words: dict[str, list[str]], values: dict[str, list[str]]) -> str:
    lines = []
    for name, text in NAMES.items():
        quoted = text.replace("'", "\\'")
        lines.append(f"complete -c shoal -n __fish_use_subcommand -f -a {name} -d '{quoted}'")
    for path, offered in words.items():
        if not path:
            continue
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path.split())
        for word in offered:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            if word == _RUNS:
                what = "-a '(ls -d runs/* 2>/dev/null)'"
            elif f"{path} {word}" in values:
                what += f" -x -a '{' '.join(values[f'{path} {word}'])}'"
            lines.append(f"complete -c shoal -n '{seen}' {what}")
    return "\n".join(lines) + "\n"
