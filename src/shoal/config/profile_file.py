"""A profile as a TOML file: written whole or not at all, and refused when it is not what we wrote."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.profile import VERSION, Profile
from shoal.errors import DataError
from shoal.runfolder import write_atomically

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
        raise DataError(f"the profile {path} is damaged", why=_explain(error), fix=_again(path)) from None


def write_profile(profile: Profile, path: Path) -> None:
    try:
        write_atomically(path, to_toml(profile))
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


def to_toml(profile: Profile) -> str:
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


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    said = first["msg"].removeprefix("Value error, ")
    return f"{place}: {said[0].lower()}{said[1:]}" if place else said


def _again(path: Path) -> str:
    return f"measure it: shoal probe --on … -o {shlex.quote(str(path))}"
