"""Which machines: a cluster file in TOML, or an MPI or DeepSpeed hostfile as it is.

ssh_config = "ssh/config"      # optional: what `ssh -F` gets, beside this file

[[host]]
host = "me@laptop-b"         # what ssh is told: an alias, a name, user@name or an address
slots = 2                      # how many ranks it takes
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.presets import did_you_mean
from shoal.errors import ConfigError, UsageError

# SECTION cluster/hosts/hostfile
# Hostfiles of MPI and DeepSpeed, as they are. Pure.
#
# laptop-b slots=2               Open MPI, DeepSpeed
# laptop-c:2                     MPICH, Intel MPI
# 192.168.1.9                    one rank


_COUNTED = re.compile(r"([^:\s]+):(\d+)")
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)")
# What else these launchers read there; it says where ranks are pinned, which here follows from slots and threads.
_IGNORED = ("max_slots", "max-slots", "binding")
_MOST_DIGITS = 9
_KNOWN = ("slots", *_IGNORED, "ifname")


def parse_hostfile(text: str, path: Path) -> list[dict[str, Any]]:
    """One table for each line, with the keys that a cluster file in TOML has."""
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return [_host_hostfile(line, f"line {number} of {path}") for number, line in lines if line]


def _host_hostfile(line: str, where: str) -> dict[str, Any]:
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


DEFAULT_FOLDER = "~/.local/share/shoal"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A leading dash would be an option to ssh, a blank or a control character is in nobody's host name.
_HOST = re.compile(r"[^-\s\x00-\x20][^\s\x00-\x20]*")
_TABLE = re.compile(r"^\s*\[\[\s*host\s*\]\]", re.MULTILINE)


class Host(BaseModel):
    """One machine. Unset, `name` is `host` without its user, `address` is what ssh connects to, `interface` the one
    that carries it, and `python` is looked for. Raise `weight` for a machine that should get a larger share of the
    work. `folder` is where shoal keeps its environment and its copies there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    host: str
    name: str = ""
    address: str | None = None
    interface: str | None = None
    slots: Annotated[int, Field(ge=1)] = 1
    python: str | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    folder: str = DEFAULT_FOLDER

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_host(cls, values: Any) -> Any:
        if isinstance(values, dict) and "name" not in values and isinstance(values.get("host"), str):
            return {**values, "name": re.sub(r"[^A-Za-z0-9._-]", "-", machine_of(values["host"])).lstrip("._-")}
        return values

    @field_validator("host")
    @classmethod
    def _ssh_can_be_told(cls, value: str) -> str:
        if not _HOST.fullmatch(value):
            raise ValueError("a host is what ssh is told: an alias, a name, user@name or an address")
        return value

    @field_validator("name")
    @classmethod
    def _is_a_file_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "a name has letters, digits, dots, dashes and underscores: log folders are called after it"
            )
        return value

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(ipaddress.ip_address(value))
        except ValueError:
            raise ValueError("ranks find each other by address, as 192.168.1.7, never by name") from None

    @field_validator("python")
    @classmethod
    def _is_a_program(cls, value: str | None) -> str | None:
        if value is not None and "/" in value and not value.startswith(("/", "~/")):
            raise ValueError("a Python is a command as python3.11, or a path from / or ~/")
        return value

    @field_validator("folder")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if not value.startswith(("/", "~/")):
            raise ValueError("a folder there starts with / or ~/")
        return value.rstrip("/")


class HostsSpec(BaseModel):
    """What a hosts file says; `ssh_config` stands in for the user's own `~/.ssh/config`."""

    model_config = ConfigDict(frozen=True)

    path: Path
    hosts: tuple[Host, ...]
    ssh_config: Path | None = None


def read_hosts(path: Path) -> HostsSpec:
    try:
        path = path.expanduser()
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"there is no hosts file {path}",
            why="a cluster of machines is named by a file that lists them",
            fix=f"check the path: ls {path.parent}",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a hosts file: it is no UTF-8 text", fix="file " + str(path)) from None
    except (ValueError, RuntimeError) as error:
        # No file can be called so: a zero byte, or the home of a user who is not there.
        raise UsageError(f"{str(path)!r} names no hosts file: {error}", fix="check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None
    spec = parse_hosts(text, path)
    if spec.ssh_config is not None and not is_file(spec.ssh_config):
        raise ConfigError(
            f"ssh_config in {path} names {spec.ssh_config}, which is no file",
            why="a relative path is meant from the folder of the hosts file",
            fix="correct it, or leave it out: ssh then reads ~/.ssh/config",
        )
    return spec


def is_file(path: Path) -> bool:
    """`Path.is_file` raises for a name that is too long for any file."""
    try:
        return path.is_file()
    except OSError:
        return False


def parse_hosts(text: str, path: Path) -> HostsSpec:
    """TOML by its name or by its tables; everything else is a hostfile."""
    document = (
        _toml(text, path) if path.suffix == ".toml" or _TABLE.search(text) else {"host": parse_hostfile(text, path)}
    )
    if unknown := [key for key in document if key not in ("host", "ssh_config")]:
        raise _unknown(unknown[0], ("host", "ssh_config"), str(path))
    tables, config = document.get("host", []), document.get("ssh_config")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"host in {path} is not a list of tables", fix="write [[host]] and its settings below")
    if not isinstance(config, str | None):
        raise ConfigError(f"ssh_config={config!r} in {path} is no file name", fix='write ssh_config = "FILE"')
    if not tables:
        raise ConfigError(f"{path} lists no host", fix='write [[host]] and below it host = "NAME"')
    hosts = tuple(_host(table, number, path) for number, table in enumerate(tables, 1))
    _refuse_twins(hosts, path)
    return HostsSpec(path=path, hosts=hosts, ssh_config=_beside(path, config) if config else None)


def _beside(path: Path, config: str) -> Path:
    try:
        return path.parent / Path(config).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"ssh_config={config!r} in {path}: {error}", fix="write the whole path") from None


def machine_of(host: str) -> str:
    """`me@laptop-b` is laptop-b."""
    return host.rpartition("@")[2]


def is_here(host: Host) -> bool:
    """Whether it is this very machine, which needs no SSH. Somebody else's account on it does."""
    user, at, machine = host.host.rpartition("@")
    if at and user != getpass.getuser():
        return False
    ours = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return machine in _own_names() or machine in ours or host.address in ours or _is_loopback(machine)


def _own_names() -> set[str]:
    name = socket.gethostname()
    return {"local", "localhost", name, name.partition(".")[0]}


def _is_loopback(machine: str) -> bool:
    try:
        return ipaddress.ip_address(machine).is_loopback
    except ValueError:
        return False


def _toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", fix="see https://toml.io for the format") from None


def _host(table: Mapping[str, Any], number: int, path: Path) -> Host:
    if "host" not in table:
        raise ConfigError(
            f"the {number}. [[host]] of {path} does not say which host it is",
            why=did_you_mean(next(iter(table), ""), Host.model_fields),
            fix='add host = "NAME", as you would type it after ssh',
        )
    whose = f"host {table.get('name', table['host'])!r} in {path}"
    try:
        return Host.model_validate(table)
    except ValidationError as error:
        raise _explain(error, whose) from None


def _explain(error: ValidationError, whose: str) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown(key, Host.model_fields, whose)
    said = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key}={first['input']!r} of {whose}: {said[0].lower()}{said[1:]}", fix="correct it there")


def _unknown(key: str, known: Iterable[str], where: str) -> ConfigError:
    names = list(known)
    return ConfigError(
        f"unknown setting {key} of {where}", why=did_you_mean(key, names), fix=f"there are: {', '.join(names)}"
    )


def _refuse_twins(hosts: Iterable[Host], path: Path) -> None:
    seen: dict[tuple[str, str], Host] = {}
    for host in hosts:
        for kind, value in (("host", machine_of(host.host)), ("name", host.name), ("address", host.address or "")):
            twin = seen.setdefault((kind, value.lower()), host)
            if value and twin is not host:
                raise _twins(kind, value, path)


def _twins(kind: str, value: str, path: Path) -> ConfigError:
    if kind == "host":
        return ConfigError(
            f"{path} lists the host {value} twice",
            why="each machine is listed once, with as many slots as it should take ranks",
            fix="write it once, with slots = 2",
        )
    return ConfigError(
        f"two hosts in {path} have the {kind} {value}",
        why="the ranks of one could not be told from those of the other",
        fix=f"give each its own {kind}",
    )
