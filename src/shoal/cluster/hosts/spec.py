"""Read a hosts file: a cluster file in TOML, or a hostfile of MPI or DeepSpeed.

ssh_config = "ssh/config"      # optional: the file for `ssh -F`, relative to this one

[[host]]
host = "me@laptop-b"           # as typed after ssh: an alias, a name, user@name or an address
slots = 2                      # how many ranks it takes

laptop-b slots=2               # a hostfile of Open MPI or DeepSpeed
laptop-c:2                     # of MPICH or Intel MPI
192.168.1.9                    # one rank
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shoal.config.presets import did_you_mean
from shoal.config.schema import Device
from shoal.errors import ConfigError, UsageError
from shoal.host.network import interface_addresses

DEFAULT_FOLDER = "~/.local/share/shoal"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A leading dash would be an option to ssh; no host name has a blank or a control character.
_HOST = re.compile(r"[^-\s\x00-\x20][^\s\x00-\x20]*")
_TABLE = re.compile(r"^\s*\[\[\s*host\s*\]\]", re.MULTILINE)
# Hostfiles
_COUNTED = re.compile(r"([^:\s]+):(\d+)")
_SETTING = re.compile(r"([\w-]+)\s*=\s*(\S+)")
# Some say where ranks are pinned and are ignored: here that follows from slots and threads.
_SETTINGS = ("slots", "max_slots", "max-slots", "binding", "ifname")
_MOST_DIGITS = 9


class Host(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    host: str
    name: str = ""  # unset: `host` without its user
    address: str | None = None  # unset: what ssh connects to
    interface: str | None = None  # unset: the one that has the address
    slots: Annotated[int, Field(ge=1)] = 1
    python: str | None = None  # unset: it is searched for
    threads: Annotated[int, Field(ge=1)] | None = None
    device: Device | None = None  # unset: what --device says
    weight: Annotated[float, Field(gt=0)] = 1.0  # larger for a machine that should get a larger share of the work
    folder: str = DEFAULT_FOLDER  # where shoal keeps its environment and its copies there

    @model_validator(mode="before")
    @classmethod
    def _derive_name(cls, values: Any) -> Any:
        if isinstance(values, dict) and "name" not in values and isinstance(values.get("host"), str):
            return {**values, "name": re.sub(r"[^A-Za-z0-9._-]", "-", machine_of(values["host"])).lstrip("._-")}
        return values

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str) -> str:
        if not _HOST.fullmatch(value):
            raise ValueError("a host is what you type after ssh: an alias, a name, user@name or an address")
        return value

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(
                "a name has letters, digits, dots, dashes and underscores: log folders are called after it"
            )
        return value

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(ipaddress.ip_address(value))
        except ValueError:
            raise ValueError("ranks find each other by address, as 192.168.1.7, never by name") from None

    @field_validator("python")
    @classmethod
    def _check_python(cls, value: str | None) -> str | None:
        if value is not None and "/" in value and not value.startswith(("/", "~/")):
            raise ValueError("a Python is a command as python3.11, or a path from / or ~/")
        return value

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, value: str) -> str:
        if not value.startswith(("/", "~/")):
            raise ValueError("a folder there starts with / or ~/")
        return value.rstrip("/")


class HostsSpec(BaseModel):
    model_config = ConfigDict(frozen=True)

    path: Path
    hosts: tuple[Host, ...]
    ssh_config: Path | None = None  # used instead of the user's `~/.ssh/config`


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
        raise ConfigError(f"{path} is not a hosts file: it is not UTF-8 text", fix="file " + str(path)) from None
    except (ValueError, RuntimeError) as error:
        # The path contains a zero byte, or the home of an unknown user.
        raise UsageError(f"{str(path)!r} names no hosts file: {error}", fix="check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None
    spec = parse_hosts(text, path)
    if spec.ssh_config is not None and not is_file(spec.ssh_config):
        raise ConfigError(
            f"ssh_config in {path} names {spec.ssh_config}, which is not a file",
            why="a relative path begins in the folder of the hosts file",
            fix="correct it, or leave it out: ssh then reads ~/.ssh/config",
        )
    return spec


def is_file(path: Path) -> bool:
    """Return False for a name that is too long for any file, where `Path.is_file` raises."""
    try:
        return path.is_file()
    except OSError:
        return False


def parse_hosts(text: str, path: Path) -> HostsSpec:
    """Parse TOML, known by the file's name or a [[host]] table, or else a hostfile."""
    is_toml = path.suffix == ".toml" or _TABLE.search(text)
    document = _parse_toml(text, path) if is_toml else {"host": _parse_hostfile(text, path)}
    if unknown := [key for key in document if key not in ("host", "ssh_config")]:
        raise _unknown(unknown[0], ("host", "ssh_config"), str(path))
    tables, config = document.get("host", []), document.get("ssh_config")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"host in {path} is not a list of tables", fix="write [[host]] and its settings below")
    if not isinstance(config, str | None):
        raise ConfigError(f"ssh_config={config!r} in {path} is not a file name", fix='write ssh_config = "FILE"')
    if not tables:
        raise ConfigError(f"{path} lists no host", fix='write [[host]] and below it host = "NAME"')
    hosts = tuple(_make_host(table, number, path) for number, table in enumerate(tables, 1))
    _refuse_duplicates(hosts, path)
    try:
        ssh_config = path.parent / Path(config).expanduser() if config else None
    except RuntimeError as error:
        raise ConfigError(f"ssh_config={config!r} in {path}: {error}", fix="write the whole path") from None
    return HostsSpec(path=path, hosts=hosts, ssh_config=ssh_config)


def machine_of(host: str) -> str:
    """Return `laptop-b` for `me@laptop-b`."""
    return host.rpartition("@")[2]


def is_here(host: Host) -> bool:
    """Tell whether the host is this machine and this user, for which no SSH is needed."""
    user, at, machine = host.host.rpartition("@")
    if at and user != getpass.getuser():
        return False
    name = socket.gethostname()
    own = {"local", "localhost", name, name.partition(".")[0]}
    own |= {address for addresses in interface_addresses().values() for address in addresses}
    if machine in own or host.address in own:
        return True
    try:
        return ipaddress.ip_address(machine).is_loopback
    except ValueError:
        return False


def _parse_hostfile(text: str, path: Path) -> list[dict[str, Any]]:
    """Return one table for each line, with the keys of a cluster file in TOML."""
    tables = []
    for number, line in enumerate(text.splitlines(), 1):
        if line := line.partition("#")[0].strip():
            where = f"line {number} of {path}"
            word, rest = (*line.split(maxsplit=1), "")[:2]
            counted = _COUNTED.fullmatch(word)
            table: dict[str, Any] = {"host": counted[1] if counted else word}
            if counted:
                table["slots"] = _parse_slots(counted[2], where)
            for key, value in _parse_settings(rest, where):
                if key == "slots":
                    table["slots"] = _parse_slots(value, where)
                elif key == "ifname":
                    table["interface"] = value
            tables.append(table)
    return tables


def _parse_settings(text: str, where: str) -> list[tuple[str, str]]:
    settings = _SETTING.findall(text)
    if rest := _SETTING.sub("", text).strip():
        raise ConfigError(
            f"{where}: {rest!r} is not a setting",
            why="after the host come settings as slots=2",
            fix="correct that line",
        )
    for key, _ in settings:
        if key not in _SETTINGS:
            fix = f"there are: {', '.join(_SETTINGS)}"
            raise ConfigError(f"{where}: unknown setting {key}", why=did_you_mean(key, _SETTINGS), fix=fix)
    return settings


def _parse_slots(value: str, where: str) -> int:
    if not value.isdecimal() or len(value) > _MOST_DIGITS:
        raise ConfigError(f"{where}: slots={value:.20} is not a number", fix="write for example: slots=2")
    return int(value)


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", fix="see https://toml.io for the format") from None


def _make_host(table: Mapping[str, Any], number: int, path: Path) -> Host:
    if "host" not in table:
        raise ConfigError(
            f"the {number}. [[host]] of {path} does not say which host it is",
            why=did_you_mean(next(iter(table), ""), Host.model_fields),
            fix='add host = "NAME", as you would type it after ssh',
        )
    where = f"host {table.get('name', table['host'])!r} in {path}"
    try:
        return Host.model_validate(table)
    except ValidationError as invalid:
        error = invalid.errors()[0]
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        raise _unknown(key, Host.model_fields, where)
    reason = error["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    raise ConfigError(f"{key}={error['input']!r} of {where}: {reason}", fix="correct it there")


def _unknown(key: str, known: Iterable[str], where: str) -> ConfigError:
    names = list(known)
    return ConfigError(
        f"unknown setting {key} of {where}", why=did_you_mean(key, names), fix=f"there are: {', '.join(names)}"
    )


def _refuse_duplicates(hosts: Iterable[Host], path: Path) -> None:
    seen: dict[tuple[str, str], Host] = {}
    for host in hosts:
        for kind, value in (("host", machine_of(host.host)), ("name", host.name), ("address", host.address or "")):
            if seen.setdefault((kind, value.lower()), host) is host or not value:
                continue
            if kind == "host":
                raise ConfigError(
                    f"{path} lists the host {value} twice",
                    why="each machine is listed once, with as many slots as it should take ranks",
                    fix="write it once, with slots = 2",
                )
            raise ConfigError(
                f"two hosts in {path} have the {kind} {value}",
                why="the ranks of one could not be told from those of the other",
                fix=f"give each its own {kind}",
            )
