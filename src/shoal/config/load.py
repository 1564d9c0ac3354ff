"""From preset, TOML file and `--set` to one validated `Config`, and back to `config.toml`.

Later beats earlier: schema defaults, preset, file, dials and flags, `--set`.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.presets import Overrides, did_you_mean, preset
from shoal.config.profile import VERSION, Profile
from shoal.config.schema import Config
from shoal.errors import ConfigError, DataError
from shoal.run_folder import write_atomically

# Settings that only some ways to synchronise have.
_OUTER = ("diloco", "streaming", "auto")
_MODES_OF = {
    "sync.every": ("local", *_OUTER),
    "sync.outer_lr": _OUTER,
    "sync.outer_momentum": _OUTER,
    "sync.fragments": ("streaming", "auto"),
    "sync.overlap": ("streaming", "auto"),
    "sync.bucket_mb": ("ddp", "local", *_OUTER),
    "sync.planned": ("auto",),
    "sync.planned_step_s": ("auto",),
}

# What a run can be resumed with: no step that was done would have been another one.
_CHANGEABLE = (
    "train.steps",
    "train.eval_every",
    "train.eval_sequences",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.gc_every",
    "train.pin",
    "run.weights",
    "run.threads",
    "sync.measure",
    "sync.timeout_s",
    "sync.join_timeout_s",
)
_WHY_FIXED = {
    "model": "the checkpoint holds a model of this shape",
    "data": "the order of the samples, which the ledger proves, follows from the text and these settings",
    "train": "the steps that were done belong to this optimisation; with another it would be another training",
    "sync": "the checkpoint holds what this way to exchange has to remember",
    "run": "the run folder and its checkpoints belong to this cluster and launcher",
}


def build_config(
    preset_name: str = "grammar",
    file: Path | None = None,
    flags: Overrides | None = None,
    sets: Iterable[str] = (),
) -> Config:
    layers = [preset(preset_name), {"run": {"preset": preset_name}}]
    if file is not None:
        layers.append(read_toml(file))
    layers.append(flags or {})
    layers.extend(parse_set(assignment) for assignment in sets)
    return validate(merge(layers), source=str(file) if file else "the command line")


def typed_settings(flags: Overrides | None, sets: Iterable[str]) -> list[str]:
    """The names of the settings that the command line gives, with flags or with `--set`."""
    layers = [flags or {}, *map(parse_set, sets)]
    return list(dict.fromkeys(f"{section}.{key}" for layer in layers for section in layer for key in layer[section]))


def refuse_twice(flags: Mapping[str, str], sets: Iterable[str]) -> None:
    """Refuse a setting that is given by a flag and with `--set`; `flags` are those on the command line, by setting."""
    for key in typed_settings(None, sets):
        if key in flags:
            raise ConfigError(
                f"{key} is given twice: with {flags[key]} and with --set",
                why="only one of them can count",
                fix=f"leave one out: {flags[key]}, or --set {key}=…",
            )


def refuse_without_effect(config: Config, settings: Iterable[str]) -> None:
    """Refuse a setting of the command line that a new run would ignore because of another setting.

    A file with settings may serve several ways to train, so what only stands there is accepted.
    """
    for key in settings:
        if (reason := _no_effect(config, key)) is not None:
            why, fix = reason
            raise ConfigError(f"{key} has no effect here", why=why, fix=f"leave it out, or: {fix}")


def _no_effect(config: Config, key: str) -> tuple[str, str] | None:
    """Why a setting has no effect and what would give it one; None for a setting that counts."""
    mode, data = config.sync.mode, config.data
    modes = _MODES_OF.get(key)
    if modes is not None and mode not in modes:
        return f"it belongs to sync.mode {' or '.join(modes)}, and this run has {mode}", f"--set sync.mode={modes[0]}"
    if key == "data.bpe_vocab" and data.tokenizer != "bpe":
        return f"the {data.tokenizer} tokenizer has a vocabulary of its own", "--set data.tokenizer=bpe"
    if key == "data.sentences" and (data.path is not None or data.builtin != "grammar"):
        return "it says how many sentences are generated, and this run has a text", "leave the text out"
    if key == "data.builtin" and data.path is not None:
        return f"data.path={data.path} is the text", "leave data.path out"
    # All ranks compare their digests, whatever started them.
    if key.startswith("members.") and key != "members.digest_every" and config.run.launcher != "shoal":
        return f"with run.launcher={config.run.launcher} the members of a run never change", "--set run.launcher=shoal"
    if key == "run.lineage":
        return "it is for a run that goes on, and this one begins", "shoal train --resume RUN --lineage LINEAGE"
    if key == "run.preset":
        return "a preset is chosen before settings are applied", "name it as the first argument: shoal train PRESET"
    return None


def refuse_fixed(settings: Mapping[str, str]) -> None:
    """Refuse to change a setting with which the steps of a run were done; `settings` are those that the command line
    gives, each with the words that give it."""
    for key, given in settings.items():
        if key in known_keys() and (why := _why_fixed(key)) is not None:
            raise ConfigError(
                f"{given} cannot be changed when a run is resumed",
                why=why,
                fix=f"leave it out, or start a new run; what can be changed: {', '.join(_CHANGEABLE)}, members.…",
            )


def _why_fixed(key: str) -> str | None:
    """Why a resumed run keeps a setting; None where it may change."""
    section, _, _ = key.partition(".")
    if section == "members" or key in _CHANGEABLE:
        return None
    if key == "run.lineage":
        return "the training to go on with is named by --lineage"
    return _WHY_FIXED[section]


def change_settings(config: Config, changes: Overrides) -> tuple[Config, list[str]]:
    """The settings of a resumed run, and what is different, as `train.steps: 40 → 80`."""
    before = config.model_dump()
    changed = validate(merge([before, changes]), source="the command line")
    after = changed.model_dump()
    differences = [
        f"{section}.{key}: {_shown(before[section][key])} → {_shown(value)}"
        for section, values in after.items()
        for key, value in values.items()
        if value != before[section][key]
    ]
    return changed, differences


def _shown(value: object) -> str:
    return "unset" if value is None else str(value)


def validate(values: Mapping[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error, source) from None


def merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Section by section; unknown sections, and values that are no section, are kept for validation to refuse."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            below = merged.get(section, {})
            if isinstance(below, dict):
                merged[section] = {**below, **values} if isinstance(values, Mapping) else values
    return merged


def parse_set(assignment: str) -> Overrides:
    """`train.steps=200`; the value is TOML where it parses as TOML, otherwise a plain string."""
    key, equals, text = assignment.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(
            f"--set {assignment!r} is not of the form section.key=value",
            fix="write for example: --set train.steps=200",
        )
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    return {section: {name: value}}


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {file}", fix=f"check the path: ls {file.parent}") from None
    # Not only tomllib's own: a number of thousands of digits and endless brackets have other names.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", fix="see https://toml.io for the format") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", fix=f"look at it: ls -ld {file}") from None


def load_config(file: Path) -> Config:
    """A saved `config.toml`, whole."""
    return validate(read_toml(file), source=str(file))


def to_toml(config: Config) -> str:
    """Flat sections of scalars are all a `Config` has, so this writes just those; an unset key is left out."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines.extend(f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    # JSON's strings, booleans and numbers are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def known_keys() -> list[str]:
    return [f"{section}.{key}" for section in Config.model_fields for key in _keys(section)]


def _keys(section: str) -> list[str]:
    return list(Config.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]


def _explain(error: ValidationError, source: str) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown(key, source)
    if first["type"] == "model_type":
        return ConfigError(f"{key} in {source} is a section, not a value", fix=f"write [{key}] and its settings below")
    seen, fix = first["msg"].removeprefix("Value error, "), "correct one of them"
    if "." in key:
        seen, fix = f"{key}={first['input']!r}: {seen[0].lower()}{seen[1:]}", f"correct it, or: --set {key}=…"
    return ConfigError(seen, why=f"this comes from {source}, or from the preset", fix=fix)


def _unknown(key: str, source: str) -> ConfigError:
    section, dot, _ = key.partition(".")
    why = did_you_mean(key, known_keys() if dot else Config.model_fields)
    known = f"{section} has: {', '.join(_keys(section))}" if dot else f"sections are: {', '.join(Config.model_fields)}"
    return ConfigError(f"unknown setting {key} in {source}", why=why, fix=known)


# SECTION config/profile_file
# A profile as a TOML file: written whole or not at all, and refused when it is not what we wrote.


_HEAD = "# What `shoal probe` measured; `shoal plan` reads it. What the figures mean: docs/probe.md\n"


def read_profile(path: Path) -> Profile:
    document = _parse(path)
    version = document.get("shoal_profile")
    if version is None:
        raise DataError(f"{path} is no profile of a cluster", why="it has no shoal_profile", fix=_again(path))
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        why = "a newer shoal wrote it" if newer else f"this shoal reads version {VERSION}"
        raise DataError(f"{path} is a profile of version {version!r}", why=why, fix=_again(path))
    try:
        return Profile.model_validate(document)
    except ValidationError as error:
        raise DataError(f"the profile {path} is damaged", why=_explain_profile_file(error), fix=_again(path)) from None


def write_profile(profile: Profile, path: Path) -> None:
    try:
        write_atomically(path, profile_file_to_toml(profile))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}", fix="choose another file: -o FILE") from None


def check_writable(path: Path) -> None:
    """Before a minute of measuring: the folder is there, and nothing but an older profile would be replaced."""
    if not path.parent.is_dir():
        raise DataError(f"there is no folder {path.parent}", fix=f"make it: mkdir -p {shlex.quote(str(path.parent))}")
    if path.exists():
        try:
            is_ours = "shoal_profile" in _parse(path)
        except DataError:
            is_ours = False
        if not is_ours:
            raise DataError(
                f"{path} is there already, and is no profile",
                why="only an older profile is replaced",
                fix="choose another file: -o FILE",
            )


def profile_file_to_toml(profile: Profile) -> str:
    return _HEAD + "\n".join(_table("", profile.model_dump(mode="json", exclude_none=True))) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Plain values first: what stands below a header belongs to it. Lists of tables are spelt out at the top level
    only, so that a measured point is one line."""
    later = {key: value for key, value in values.items() if _is_table(value) or (not name and _is_tables(value))}
    for key, value in values.items():
        if key not in later:
            yield f"{key} = {_value(value)}"
    for key, value in later.items():
        full = f"{name}.{key}" if name else key
        for entry in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{full}]]" if isinstance(value, list) else f"[{full}]"
            yield from _table(full, entry)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def _value(value: Any) -> str:
    if _is_table(value):
        return "{" + ", ".join(f"{key} = {_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        parts = [_value(part) for part in value]
        return "[" + "".join(f"\n  {part}," for part in parts) + "\n]" if parts else "[]"
    # JSON's strings, booleans and numbers are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no profile {path}", fix=_again(path)) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid TOML", why=str(error), fix=_again(path)) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None


def _explain_profile_file(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    said = first["msg"].removeprefix("Value error, ")
    return f"{place}: {said[0].lower()}{said[1:]}" if place else said


def _again(path: Path) -> str:
    return f"measure it: shoal probe --on … -o {shlex.quote(str(path))}"
