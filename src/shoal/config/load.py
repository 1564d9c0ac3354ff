"""Build, check, read and write the configuration of a run, and read and write measured profiles.

Later layers win: schema defaults, preset, file, flags, `--set`. Both kinds of files are TOML.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from shoal.config.presets import Overrides, did_you_mean, preset
from shoal.config.schema import Config, DataConfig, EngineConfig
from shoal.config.sync_choice import SYNC_METHODS, TRAIN_METHODS, WIRE_FORMATS, join_or, split_short_form
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.run_folder import write_atomically

if TYPE_CHECKING:
    from shoal.config.profile import Profile


AnyConfig = TypeVar("AnyConfig", bound=EngineConfig)

# A resumed run may change these: no finished step depends on them.
_CHANGEABLE = (
    "train.steps",
    "train.eval_every",
    "train.eval_sequences",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.gc_every",
    "train.pin",
    "train.profile_steps",
    "run.weights",
    "run.balance",
    "run.threads",
    "sync.measure",
    "sync.timeout_s",
    "sync.join_timeout_s",
)
_WHY_FIXED = {
    "model": "the checkpoint holds a model of this shape",
    "data": "the order of the samples, which the ledger proves, follows from the text and these settings",
    "train": "the finished steps belong to this optimisation; other settings would be another training",
    "sync": "the checkpoint holds the state of this sync method",
    "run": "the run folder and its checkpoints belong to this cluster and launcher",
}

# Names that a registry has, and pydantic does not know.
_NAMES = {"sync.mode": TRAIN_METHODS, "sync.wire": tuple(WIRE_FORMATS)}
# How texts with a pattern are written.
_FORMS = {
    "train.profile_steps": "write a step or a range of steps, such as 20-22",
    "run.weights": "write one number for each rank, with / between them, such as 1/0.5",
    "run.speeds": "write one number for each rank, with / between them, such as 1/0.5",
    "run.devices": "write one device for each rank, with / between them, such as cuda/cpu",
    "run.lineage": "write it as `shoal train --resume` prints it, such as 2-1",
}

_PROFILE_HEADER = "# What `shoal probe` measured; `shoal plan` reads it. What the figures mean: docs/probe.md\n"


def build_config(
    preset_name: str = "grammar",
    file: Path | None = None,
    flags: Overrides | None = None,
    sets: Iterable[str] = (),
) -> Config:
    sets = list(sets)
    layers = [preset(preset_name), {"run": {"preset": preset_name}}]
    if file is not None:
        layers.append(read_toml(file))
    layers.append(flags or {})
    layers.extend(parse_set(assignment) for assignment in sets)
    return _validate(Config, merge(layers), str(file) if file else "the command line", typed_settings(flags, sets))


def load_config(file: Path) -> Config:
    """Read a saved `config.toml`. For a user's training, sections that it lacks have defaults that mean nothing."""
    return validate(read_toml(file), source=str(file))


def load_settings(file: Path) -> EngineConfig:
    """Read a saved `config.toml`: a `Config` for shoal's GPT, an `EngineConfig` for a user's training."""
    document = read_toml(file)
    if document.keys() & (Config.model_fields.keys() - EngineConfig.model_fields.keys()):
        return validate(document, source=str(file))
    return validate_session(document, source=str(file))


def merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge section by section. Keep unknown sections and values that are not sections, for validation to refuse."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for section, values in layer.items():
            below = merged.get(section, {})
            if isinstance(below, dict):
                merged[section] = {**below, **values} if isinstance(values, Mapping) else values
    return merged


def parse_set(assignment: str) -> Overrides:
    """Read `train.steps=200`. The value is TOML where it parses as TOML, otherwise a plain string."""
    key, equals, text = assignment.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        why, fix = "", "write for example: --set train.steps=200"
        names = {known.partition(".")[2]: known for known in reversed(known_keys())}
        nearest = difflib.get_close_matches(key.strip(), names, n=1)
        if equals and not dot and nearest:
            why = f"did you mean {names[nearest[0]]!r}?"
            fix = f"write its section too: --set {shlex.quote(f'{names[nearest[0]]}={text.strip()}')}"
        raise ConfigError(f"--set {assignment!r} is not of the form section.key=value", why=why, fix=fix)
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    return {section: {name: value}}


def validate(values: Mapping[str, Any], source: str) -> Config:
    return _validate(Config, values, source)


def validate_session(
    values: Mapping[str, Any], source: str = "the session's settings or the command line", typed: Container[str] = ()
) -> EngineConfig:
    """Validate the settings of a user's training, which has no section for a model or data.

    `typed` are the settings that the command line gives.
    """
    unknown = [section for section in values if section not in EngineConfig.model_fields]
    if unknown:
        raise ConfigError(
            f"unknown section {unknown[0]} in the settings of the session",
            why="a session knows nothing of your model and data",
            fix=f"sections are: {', '.join(EngineConfig.model_fields)}",
        )
    return _validate(EngineConfig, values, source, typed)


def _validate(model: type[AnyConfig], values: Mapping[str, Any], source: str, typed: Container[str] = ()) -> AnyConfig:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    key, message = _locate(first)
    section, dot, _ = key.partition(".")
    if first["type"] == "extra_forbidden":
        why = did_you_mean(key, known_keys(model) if dot else model.model_fields)
        if key in known_keys():
            why = "it is a setting of shoal's own GPT; a session leaves model, data and optimizer to the script"
        fix = f"sections are: {', '.join(model.model_fields)}"
        if dot and model is Config:
            fix = f"list the settings of {section}: shoal config show {section}"
        elif dot:
            # A session has only some of those that `shoal config show` lists.
            fix = f"the settings of {section} are {', '.join(_keys(section, model))}"
        raise ConfigError(f"unknown setting {key} in {source}", why=why, fix=fix)
    if first["type"] == "model_type":
        raise ConfigError(f"{key} in {source} is a section, not a value", fix=f"write [{key}] and its settings below")
    seen, fix = message, "correct one of them"
    if first["type"] == "string_pattern_mismatch":
        message = _FORMS.get(key, message)
    if dot:
        seen, fix = f"{key}={first['input']!r}: {_lower_first(message)}", f"correct it, or: --set {key}=…"
    if key in typed:
        raise ConfigError(seen, why="the command line gives this value", fix=f"correct it: {_correction(key, first)}")
    raise ConfigError(seen, why=f"this comes from {source}, or from the preset", fix=fix)


def _correction(key: str, error: Any) -> str:
    """Return the options of a command line with an allowed value in place of the one that pydantic refused."""
    if key == "sync.mode" and (settings := split_short_form(str(error["input"]))):
        return " ".join(f"--set sync.{name}={value}" for name, value in settings.items())
    if key in _NAMES:
        return f"--set {key}={(difflib.get_close_matches(str(error['input']), _NAMES[key], n=1) or _NAMES[key])[0]}"
    allowed = error.get("ctx", {})
    literals = re.findall(r"'([^']+)'", str(allowed.get("expected", "")))
    values = [*literals, *(allowed[bound] for bound in ("ge", "le") if bound in allowed), "…"]
    return f"--set {key}={values[0]}"


def known_keys(model: type[EngineConfig] = Config) -> list[str]:
    return [f"{section}.{key}" for section in model.model_fields for key in _keys(section, model)]


def _keys(section: str, model: type[EngineConfig]) -> list[str]:
    return list(model.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]


def _locate(error: Any) -> tuple[str, str]:
    """Return the key that an error of pydantic names, and its message, without how a text was parsed."""
    message = error["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return ".".join(str(part) for part in error["loc"]), message


def _lower_first(message: str) -> str:
    return message[0].lower() + message[1:]


# Settings of the command line that cannot have an effect


def typed_settings(flags: Overrides | None, sets: Iterable[str]) -> list[str]:
    """Return the names of the settings that the command line gives, with flags or with `--set`."""
    layers = [flags or {}, *map(parse_set, sets)]
    return list(dict.fromkeys(f"{section}.{key}" for layer in layers for section in layer for key in layer[section]))


def refuse_duplicate_settings(flags: Mapping[str, str], sets: Iterable[str]) -> None:
    """Refuse a setting that is given by a flag and with `--set`; `flags` maps settings to the flags that were used."""
    for key in typed_settings(None, sets):
        if key in flags:
            raise ConfigError(
                f"{key} is given twice: with {flags[key]} and with --set",
                why="only one of them can count",
                fix=f"leave one out: {flags[key]}, or --set {key}=…",
            )


def refuse_without_effect(config: EngineConfig, settings: Iterable[str]) -> None:
    """Refuse a setting of the command line that a new run would ignore because of another setting.

    A file may serve several kinds of runs, so a setting that only the file gives is accepted.
    """
    for key in settings:
        if (reason := _no_effect(config, key)) is not None:
            why, fix = reason
            raise ConfigError(f"{key} has no effect here", why=why, fix=f"leave it out, or: {fix}")


def _no_effect(config: EngineConfig, key: str) -> tuple[str, str] | None:
    """Return why a setting has no effect and what would give it one; None for a setting that counts."""
    mode = config.sync.mode
    data = config.data if isinstance(config, Config) else DataConfig()
    section, _, name = key.partition(".")
    modes = [method.name for method in SYNC_METHODS.values() if section == "sync" and name in method.settings]
    if modes and mode not in modes:
        return (
            f"it belongs to sync.mode {join_or(tuple(modes))}, and this run has {mode}",
            f"--set sync.mode={modes[0]}",
        )
    if key == "data.bpe_vocab" and data.tokenizer != "bpe":
        return f"the {data.tokenizer} tokenizer has a vocabulary of its own", "--set data.tokenizer=bpe"
    if key == "data.sentences" and (data.path is not None or data.builtin != "grammar"):
        return "it is the number of generated sentences, and this run has a text", "leave the text out"
    if key == "data.builtin" and data.path is not None:
        return f"data.path={data.path} is the text", "leave data.path out"
    # All ranks compare their digests, whichever launcher started them.
    if section == "members" and name != "digest_every" and config.run.launcher != "shoal":
        return f"with run.launcher={config.run.launcher} the members of a run never change", "--set run.launcher=shoal"
    if key == "members.drop_slower_than":
        if config.members.on_loss == "end":
            return "with members.on_loss=end the members of a run never change", "--set members.on_loss=go-on"
        if config.sync.measure == "off":
            return "with sync.measure=off no rank knows how long its part of a step takes", "--set sync.measure=hook"
    if key == "run.balance" and config.run.balance != "off":
        if config.sync.measure == "off":
            return (
                "with sync.measure=off no rank knows how long its part of a step takes",
                "--set sync.measure=hook",
            )
        if data.sharding == "modulo":
            return "with data.sharding=modulo all ranks have equal shares", "--set data.sharding=cursor"
    if key == "run.lineage":
        return "it is for a run that is resumed, and this one is new", "shoal train --resume RUN --lineage LINEAGE"
    if key == "run.preset":
        return "a preset is chosen before settings are applied", "name it as the first argument: shoal train PRESET"
    return None


# Settings of a resumed run


def refuse_fixed(settings: Mapping[str, str], model: type[EngineConfig] = Config) -> None:
    """Refuse to change a setting that finished steps depend on; `settings` maps each setting to how it was written."""
    changeable = [key for key in _CHANGEABLE if key in known_keys(model)]
    for key, written in settings.items():
        section, _, _ = key.partition(".")
        if key not in known_keys(model) or section == "members" or key in changeable:
            continue
        is_lineage = key == "run.lineage"
        raise ConfigError(
            f"{written} cannot be changed when a run is resumed",
            why="the lineage to continue is named by --lineage" if is_lineage else _WHY_FIXED[section],
            fix=f"leave it out, or start a new run; a resume can change {', '.join(changeable)}, members.…",
        )


def change_settings(config: AnyConfig, changes: Overrides) -> tuple[AnyConfig, list[str]]:
    """Return the settings of a resumed run, and the differences, such as `train.steps: 40 → 80`."""
    before = config.model_dump()
    changed = _validate(type(config), merge([before, changes]), "the command line", typed_settings(changes, ()))

    def shown(value: object) -> str:
        return "unset" if value is None else str(value)

    differences = [
        f"{section}.{key}: {shown(before[section][key])} → {shown(value)}"
        for section, values in changed.model_dump().items()
        for key, value in values.items()
        if value != before[section][key]
    ]
    return changed, differences


# Profiles


def read_profile(path: Path) -> Profile:
    from shoal.config.profile import VERSION, Profile

    document = _read_profile_document(path)
    version = document.get("shoal_profile")
    if version is None:
        raise DataError(f"{path} is no profile of a cluster", why="it has no shoal_profile", fix=_probe_elsewhere(path))
    if version != VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        why = "a newer shoal wrote it" if is_newer else f"this shoal reads version {VERSION}"
        raise DataError(f"{path} is a profile of version {version!r}", why=why, fix=_probe_command(path))
    try:
        return Profile.model_validate(document)
    except ValidationError as error:
        key, message = _locate(error.errors()[0])
        why = f"{key}: {_lower_first(message)}" if key else message
        raise DataError(f"the profile {path} is damaged", why=why, fix=_probe_command(path)) from None


def write_profile(profile: Profile, path: Path) -> None:
    try:
        write_atomically(path, profile_to_toml(profile))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}", fix="choose another file: -o FILE") from None


def check_profile_writable(path: Path) -> None:
    """Check, before a minute of measuring, that the folder exists and that only an older profile would be replaced."""
    if not path.parent.is_dir():
        raise DataError(f"there is no folder {path.parent}", fix=f"make it: mkdir -p {shlex.quote(str(path.parent))}")
    if path.exists():
        try:
            is_profile = "shoal_profile" in _read_profile_document(path)
        except DataError:
            is_profile = False
        if not is_profile:
            raise DataError(
                f"{path} exists already, and is no profile",
                why="only an older profile is replaced",
                fix="choose another file: -o FILE",
            )


def _read_profile_document(path: Path) -> dict[str, Any]:
    return _read_document(path, DataError, "profile", _probe_command(path), _probe_elsewhere(path))


def _probe_elsewhere(path: Path) -> str:
    """Return the command for a file that is not a profile: a probe does not replace it."""
    return _probe_command(path.with_name(f"{path.stem}-profile.toml"))


def _probe_command(path: Path) -> str:
    return f"measure it: shoal probe --on … -o {shlex.quote(str(path))}"


# TOML


def read_toml(file: Path) -> dict[str, Any]:
    missing_fix, invalid_fix = f"check the path: ls {file.parent}", "see https://toml.io for the format"
    return _read_document(file, ConfigError, "configuration file", missing_fix, invalid_fix)


def _read_document(
    path: Path, error_type: type[ShoalError], what: str, missing_fix: str, invalid_fix: str
) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error_type(f"there is no {what} {path}", fix=missing_fix) from None
    # Not only tomllib's own error: a number of thousands of digits and endless brackets raise others.
    except (ValueError, RecursionError) as error:
        raise error_type(f"{path} is not valid TOML", why=str(error), fix=invalid_fix) from None
    except OSError as error:
        raise error_type(f"cannot read {path}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None


def to_toml(config: EngineConfig) -> str:
    """Return the text of `config.toml`; an unset key is left out."""
    return _document_text(config.model_dump(mode="json", exclude_none=True))


def profile_to_toml(profile: Profile) -> str:
    return _PROFILE_HEADER + _document_text(profile.model_dump(mode="json", exclude_none=True))


def _document_text(document: Mapping[str, Any]) -> str:
    return "\n".join(_table_lines("", document)).lstrip("\n") + "\n"


def _table_lines(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield plain values first, because a key below a header belongs to that header. Only lists of tables at the top
    level become `[[name]]`, so that a measured point stays one line."""
    tables = {key: value for key, value in values.items() if _is_table(value) or (not name and _is_table_list(value))}
    for key, value in values.items():
        if key not in tables:
            yield f"{key} = {toml_value(value)}"
    for key, value in tables.items():
        full_name = f"{name}.{key}" if name else key
        for entry in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{full_name}]]" if isinstance(value, list) else f"[{full_name}]"
            yield from _table_lines(full_name, entry)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_table, value))


def toml_value(value: Any) -> str:
    if _is_table(value):
        return "{" + ", ".join(f"{key} = {toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "".join(f"\n  {toml_value(part)}," for part in value) + "\n]" if value else "[]"
    # JSON's strings, booleans and numbers are valid TOML, except DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
