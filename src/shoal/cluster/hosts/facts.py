"""What is on a host: one question, one connection, whatever there is to ask."""

from __future__ import annotations

import functools
import importlib.metadata
import ipaddress
import json
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import (
    ANSWER_S,
    ScriptResult,
    on_each,
    run_script,
    shell_path,
    ssh_missing,
    ssh_words,
    values_or_raise,
    variables,
)
from shoal.cluster.node import LOOPBACK
from shoal.errors import HostError, UsageError
from shoal.host.facts import source_address

# SECTION cluster/hosts/python
# Which Python a host must have, and whether one of those that are there will do. Pure but for `wanted_here`.


# `numpy>=2.0`; what only an extra needs carries a marker.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


class PythonFacts(BaseModel):
    """One interpreter on a host, and the versions of the packages it was asked about.

    `named` in the hosts file, shoal's `own` environment, or `found` there.
    """

    model_config = ConfigDict(frozen=True)

    origin: Literal["named", "own", "found"]
    executable: str
    version: str
    packages: dict[str, str]
    has_venv: bool


@dataclass(frozen=True)
class Requirements:
    """`packages` are shoal's own dependencies in the versions used here, `least` the versions it can do with."""

    minor: str
    packages: Mapping[str, str]
    least: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> list[str]:
        return [f"{name}=={version}" for name, version in self.packages.items()]


@functools.cache
def wanted_here() -> Requirements:
    """What this very environment has. Without local tags: one torch may be built for CPU here and for CUDA there."""
    least = _least()
    try:
        packages = {name: public(importlib.metadata.version(name)) for name in least}
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed here", why="every host gets the versions used here", fix="make setup"
        ) from None
    return Requirements(f"{sys.version_info[0]}.{sys.version_info[1]}", packages, least)


def constraints_here() -> list[str]:
    """Every other version that is installed here, for pip to hold to where it needs one of them."""
    found = {_normal(dist.metadata["Name"]): public(dist.version) for dist in importlib.metadata.distributions()}
    asked = {"shoal", "pip", *wanted_here().packages}
    return sorted(f"{name}=={version}" for name, version in found.items() if name not in asked)


def public(version: str) -> str:
    """`2.13.0+cpu` is release 2.13.0."""
    return version.partition("+")[0]


def misfits(python: PythonFacts, wanted: Requirements, exactly: bool = False) -> list[str]:
    """What keeps a Python there from running what runs here, worst first; nothing when it will do.

    The same minor version and the same torch always. The other packages may be older or newer than here in an
    environment that somebody else keeps; `exactly` is for the one that shoal made.
    """
    if minor_of(python.version) != wanted.minor:
        return [f"it is Python {python.version}, and here is {wanted.minor}"]
    found = []
    for name, version in _torch_first(wanted.packages):
        there = python.packages.get(name)
        if there is None:
            found.append(f"{name} is not installed, and here is {version}")
        elif (exactly or name == "torch") and public(there) != version:
            found.append(f"it has {name} {there}, and here is {version}")
        elif _numbers(there) < _numbers(wanted.least.get(name, "0")):
            found.append(f"it has {name} {there}, and shoal needs {wanted.least[name]} or newer")
    return found


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _torch_first(packages: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(packages.items(), key=lambda item: item[0] != "torch")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", public(version)))


def _least() -> dict[str, str]:
    try:
        lines = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "shoal is not installed as a package here, so nobody can tell what it needs",
            why="it runs from a bare folder",
            fix="pip install -e . in the folder of shoal's pyproject.toml",
        ) from None
    found = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return {_normal(match[1]): match[2] or "0" for match in found if match}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_KNOWN_MINORS = range(8, 20)


class HostFacts(BaseModel):
    """`pythons` are those that shoal may use, in the order in which it would; `others` only help to say what is there.
    `folder` is shoal's own, expanded. `project_files` is filled when the project there is not the one asked about."""

    model_config = ConfigDict(frozen=True)

    pythons: tuple[PythonFacts, ...]
    others: tuple[str, ...]
    folder: str
    free_bytes: int
    cores: int
    arch: str
    os: str
    host_name: str
    interfaces: dict[str, list[str]]
    link_mbps: dict[str, int]
    has_nvidia: bool
    has_code: bool
    files: tuple[str, ...]
    project_digest: str
    project_files: dict[str, str]

    @property
    def own_python(self) -> str:
        """Where the interpreter is that `shoal setup` makes."""
        return f"{self.folder}/env/bin/python"


@dataclass(frozen=True)
class HostQuery:
    """What to look for there: code and project by digest, files by name and size."""

    code: str = "-"
    project: str = ""
    project_digest: str = ""
    files: dict[str, int] = field(default_factory=dict)


_NOTHING = HostQuery()


def look(
    host: Host,
    spec: HostsSpec,
    question: HostQuery = _NOTHING,
    wanted: Requirements | None = None,
    any_python: bool = False,
) -> HostFacts:
    """Facts about a host. `any_python` also considers those an environment could be made with."""
    wanted = wanted or wanted_here()
    names = [("named", host.python)] if host.python else []
    names.append(("own", f"{host.folder}/env/bin/python"))
    if any_python and not host.python:
        names += [("found", f"python{wanted.minor}"), ("found", "python3")]
    done = run_script(host, spec, look_script(host, names, question, wanted), deadline_s=ANSWER_S)
    return read_answer(host, spec, done)


def look_script(host: Host, names: list[tuple[str, str]], question: HostQuery, wanted: Requirements) -> str:
    request = {"folder": host.folder, "packages": list(wanted.packages), **vars(question)}
    known = " ".join(["python3", *(f"python3.{minor}" for minor in _KNOWN_MINORS)])
    return (
        variables(program=program("remote_facts"), request=json.dumps(request))
        # Not at home: a json.py that lies there would be taken for the library's.
        + "cd /\n"
        + "ask() {\n"
        + '  path=$(command -v "$2") || return\n'
        + '  "$path" -E -c "$program" "$request" "$1" </dev/null || printf "broken %s\\n" "$path"\n'
        + "}\n"
        + "".join(f"ask {origin} {shell_path(name)}\n" for origin, name in names)
        + f'for name in {known}; do path=$(command -v "$name") && printf "other %s\\n" "$path"; done\n'
        + "exit 0"
    )


def need_same_kind(host: Host, facts: HostFacts, os: str, arch: str) -> None:
    """gloo speaks another way on each system, and the last bits of a sum differ between processors."""
    if (facts.os, facts.arch) != (os, arch):
        raise HostError(
            f"{host.name} is another kind of machine: {facts.os} on {facts.arch}, and here is {os} on {arch}",
            why="ranks on different systems or processors cannot form one world with the same results",
            fix="take it out of the hosts file",
        )


def program(name: str) -> str:
    """The text of a program that runs on a host."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def read_answer(host: Host, spec: HostsSpec, done: ScriptResult) -> HostFacts:
    lines = done.stdout.decode(errors="replace").splitlines()
    others = tuple(line.removeprefix("other ") for line in lines if line.startswith("other "))
    broken = [line.removeprefix("broken ") for line in lines if line.startswith("broken ")]
    try:
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        if answers:
            pythons = [answer.pop("python") for answer in answers]
            return HostFacts(pythons=_distinct(pythons), others=others, **answers[0])
    except (ValueError, KeyError, ValidationError) as error:
        raise HostError(f"{host.name} answered something else than asked: {error}", fix="try again") from None
    raise no_python(host, spec, others, broken, done.stderr)


def no_python(host: Host, spec: HostsSpec, others: tuple[str, ...], broken: list[str], stderr: str) -> HostError:
    if broken:
        return HostError(
            f"{broken[0]} on {host.name} does not work",
            why=stderr.strip().rpartition("\n")[2],
            fix=f"name another python in {spec.path}",
        )
    there_is = f"there are: {', '.join(others)}" if others else "there is no python3 at all"
    if host.python:
        return HostError(
            f"there is no {host.python} on {host.name}", why=there_is, fix=f"correct its python in {spec.path}"
        )
    return HostError(f"shoal has no environment on {host.name}", why=there_is, fix=f"shoal setup {spec.path}")


def _distinct(pythons: list[dict[str, object]]) -> tuple[PythonFacts, ...]:
    found = {facts.executable: facts for facts in reversed([PythonFacts.model_validate(each) for each in pythons])}
    return tuple(reversed(found.values()))


# SECTION cluster/hosts/addresses
# Which address and interface the ranks of a host use: what the file says, or what ssh would connect to.


_RESOLVE_S = 10.0


def addresses(spec: HostsSpec) -> dict[str, str]:
    """By the host's name. Asks the ssh configuration and the name service, and no host."""
    there = values_or_raise(on_each([host for host in spec.hosts if not is_here(host)], lambda host: _far(host, spec)))
    here = {host.name: host.address or _near(host, list(there.values())) for host in spec.hosts if is_here(host)}
    found = {host.name: {**there, **here}[host.name] for host in spec.hosts}
    refuse_twins(found, spec)
    return found


def settle(host: Host, spec: HostsSpec, address: str, facts: HostFacts) -> tuple[str, str]:
    """Address and interface, held against what the host really has. An interface that the file names beats an address
    that it does not."""
    if host.interface is not None:
        own = facts.interfaces.get(host.interface)
        if own is None:
            raise HostError(
                f"{host.name} has no interface {host.interface}",
                why=f"there are: {', '.join(facts.interfaces)}",
                fix=f"correct it in {spec.path}, or leave it out",
            )
        if host.address is None and address not in own and own:
            address = own[0]
    for name, own in facts.interfaces.items():
        if address in own:
            return address, host.interface or name
    raise HostError(
        f"{host.name} does not have the address {address}",
        why="behind a router or a jump host, ssh is told another address than the machine's own. It has: "
        + _own(facts),
        fix=f'add address = "…" to it in {spec.path}, one that the other hosts can reach',
    )


def refuse_twins(found: Mapping[str, str], spec: HostsSpec) -> None:
    owners: dict[str, str] = {}
    for name, address in found.items():
        if (other := owners.setdefault(address, name)) != name:
            raise HostError(
                f"{other} and {name} in {spec.path} are the same machine: both have the address {address}",
                why="each machine is listed once, with as many slots as it should take ranks",
                fix="remove one of them, or give each the address of its own",
            )


def host_name_of(printed: str) -> str:
    """What the ssh configuration makes of a host, as `ssh -G` prints it."""
    match = re.search(r"^hostname (\S+)$", printed, re.MULTILINE)
    return match[1] if match else ""


def _far(host: Host, spec: HostsSpec) -> str:
    return host.address or _resolve(host, spec, _configured_name(host, spec))


def _near(host: Host, others: list[str]) -> str:
    """Ours on the way to the others; alone, we need no network."""
    if not others:
        return LOOPBACK
    try:
        return source_address(others[0])
    except OSError as error:
        raise HostError(
            f"there is no way from here to {others[0]}: {error.strerror}", fix=f"ip route get {others[0]}"
        ) from None


def _configured_name(host: Host, spec: HostsSpec) -> str:
    try:
        done = subprocess.run(
            [*ssh_words(spec), "-G", "--", host.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RESOLVE_S,
        )
    except FileNotFoundError:
        raise ssh_missing("ssh") from None
    if done.returncode:
        raise HostError(
            "ssh does not accept its configuration", why=done.stderr.strip(), fix=f"correct it: ssh -G {host.host}"
        )
    return host_name_of(done.stdout)


def _resolve(host: Host, spec: HostsSpec, name: str) -> str:
    """IPv4: gloo on most machines is reached by it, and a name often has both."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        raise HostError(
            f"no address is known for {name} ({host.name})",
            why="ranks find each other by address, and the name service here does not know this name",
            fix=f'correct the name, or add address = "…" to it in {spec.path}',
        ) from None
    useful = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if not useful:
        raise HostError(
            f"{name} ({host.name}) means {found[0]} here, which no other machine can reach",
            why="/etc/hosts often gives a machine's own name to a loopback address",
            fix=f'add address = "…" to it in {spec.path}',
        )
    return useful[0]


def _own(facts: HostFacts) -> str:
    return ", ".join(f"{' '.join(own)} on {name}" for name, own in facts.interfaces.items() if own and name != "lo")
