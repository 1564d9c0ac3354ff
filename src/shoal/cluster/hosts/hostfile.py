"""Hostfiles of MPI and DeepSpeed, as they are. Pure.

laptop-b slots=2               Open MPI, DeepSpeed
laptop-c:2                     MPICH, Intel MPI
192.168.1.9                    one rank
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shoal.config.presets import did_you_mean
from shoal.errors import ConfigError

_COUNTED = re.compile(r"([^:\s]+):(\d+)")
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)")
# What else these launchers read there; it says where ranks are pinned, which here follows from slots and threads.
_IGNORED = ("max_slots", "max-slots", "binding")
_MOST_DIGITS = 9
_KNOWN = ("slots", *_IGNORED, "ifname")


def parse_hostfile(text: str, path: Path) -> list[dict[str, Any]]:
    """One table for each line, with the keys that a cluster file in TOML has."""
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return [_host(line, f"line {number} of {path}") for number, line in lines if line]


def _host(line: str, where: str) -> dict[str, Any]:
    word, rest = (*line.split(maxsplit=1), "")[:2]
    counted = _COUNTED.fullmatch(word)
    table: dict[str, Any] = {"host": counted[1], "slots": _count(counted[2], where)} if counted else {"host": word}
    for key, value in _settings(rest, where):
        if key == "slots":
            table["slots"] = _count(value, where)
        elif key == "ifname":
            table["interface"] = value
    return table


def _settings(rest: str, where: str) -> list[tuple[str, str]]:
    found = _SETTING.findall(rest)
    if left := _SETTING.sub("", rest).strip():
        raise ConfigError(
            f"{where}: {left!r} is no setting", why="after the host come settings as slots=2", fix="correct that line"
        )
    for key, _ in found:
        if key not in _KNOWN:
            raise ConfigError(
                f"{where}: unknown setting {key}", why=did_you_mean(key, _KNOWN), fix=f"there are: {', '.join(_KNOWN)}"
            )
    return found


def _count(value: str, where: str) -> int:
    if not value.isdecimal() or len(value) > _MOST_DIGITS:
        raise ConfigError(f"{where}: slots={value:.20} is no number", fix="write for example: slots=2")
    return int(value)
