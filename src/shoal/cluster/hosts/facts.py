"""What a host has: its Pythons, hardware, network addresses, and the files that shoal put there before.

One script and one connection answer all of it: `remote_facts.py` runs on the host with each Python that may be used.
"""

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

import shoal
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
from shoal.errors import HostError, ShoalError, UsageError
from shoal.host.facts import public_version, source_address

_KNOWN_MINORS = range(8, 20)
_RESOLVE_TIMEOUT_S = 10.0
# `numpy>=2.0`; what only an extra needs carries a marker.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")

_OWN_IMPORT = re.compile(r"^from shoal\.([\w.]+) import .*\n", re.MULTILINE)
_FUTURE = "from __future__ import annotations\n"


class PythonFacts(BaseModel):
    """One interpreter on a host."""

    model_config = ConfigDict(frozen=True)

    origin: Literal["named", "own", "found"]  # named in the hosts file, of shoal's own environment, or on the PATH
    executable: str
    version: str
    packages: dict[str, str]  # versions of those that were asked for and are installed
    has_venv: bool


class HostFacts(BaseModel):
    model_config = ConfigDict(frozen=True)

    pythons: tuple[PythonFacts, ...]  # those that shoal may use, best first
    others: tuple[str, ...]  # other Pythons there, for messages only
    folder: str  # shoal's own, expanded
    arch: str
    os: str
    interfaces: dict[str, list[str]]
    link_mbps: dict[str, int]
    has_code: bool
    files: tuple[str, ...]
    project_digest: str
    project_files: dict[str, str]  # empty when the project there is the one asked for

    @property
    def own_python(self) -> str:
        """Return the interpreter that `shoal setup` makes."""
        return f"{self.folder}/env/bin/python"


@dataclass(frozen=True)
class HostQuery:
    """What to look for on a host."""

    code: str = "-"  # by digest
    project: str = ""
    project_digest: str = ""
    files: dict[str, int] = field(default_factory=dict)  # sizes by name


@dataclass(frozen=True)
class Requirements:
    """What a Python on a host must have."""

    minor: str
    packages: Mapping[str, str]  # shoal's dependencies, in the versions used here
    least: Mapping[str, str] = field(default_factory=dict)  # the lowest versions that work

    @property
    def requirements(self) -> list[str]:
        return [f"{name}=={version}" for name, version in self.packages.items()]


# Ask a host


_NOTHING = HostQuery()


def look(
    host: Host,
    spec: HostsSpec,
    question: HostQuery = _NOTHING,
    wanted: Requirements | None = None,
    any_python: bool = False,
) -> HostFacts:
    """Ask a host for its facts. `any_python` also considers those with which an environment could be made."""
    wanted = wanted or wanted_here()
    pythons = [("named", host.python)] if host.python else []
    pythons.append(("own", f"{host.folder}/env/bin/python"))
    if any_python and not host.python:
        pythons += [("found", f"python{wanted.minor}"), ("found", "python3")]
    request = {"folder": host.folder, "packages": list(wanted.packages), **vars(question)}
    known = " ".join(["python3", *(f"python3.{minor}" for minor in _KNOWN_MINORS)])
    script = (
        variables(program=program("remote_facts"), request=json.dumps(request))
        # Not in the home folder: a json.py there would be imported instead of the library's.
        + "cd /\n"
        + "ask() {\n"
        + '  path=$(command -v "$2") || return\n'
        + '  "$path" -E -c "$program" "$request" "$1" </dev/null || printf "broken %s\\n" "$path"\n'
        + "}\n"
        + "".join(f"ask {origin} {shell_path(name)}\n" for origin, name in pythons)
        + f'for name in {known}; do path=$(command -v "$name") && printf "other %s\\n" "$path"; done\n'
        + "exit 0"
    )
    return _parse_answer(host, spec, run_script(host, spec, script, deadline_s=ANSWER_S))


def program(name: str) -> str:
    """Return the text of a program that runs on a host. A host may have no shoal: in place of an import of shoal the
    text has the imported module."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    imported = [Path(shoal.__file__).parent / f"{module.replace('.', '/')}.py" for module in _OWN_IMPORT.findall(text)]
    texts = [path.read_text(encoding="utf-8") for path in imported]
    return "\n".join([_FUTURE, *(_OWN_IMPORT.sub("", part).replace(_FUTURE, "") for part in (*texts, text))])


def _parse_answer(host: Host, spec: HostsSpec, result: ScriptResult) -> HostFacts:
    lines = result.stdout.decode(errors="replace").splitlines()
    others = tuple(line.removeprefix("other ") for line in lines if line.startswith("other "))
    broken = [line.removeprefix("broken ") for line in lines if line.startswith("broken ")]
    try:
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        if answers:
            pythons = [PythonFacts.model_validate(answer.pop("python")) for answer in answers]
            # Each executable once, at its first place.
            distinct = {python.executable: python for python in reversed(pythons)}
            return HostFacts(pythons=tuple(reversed(distinct.values())), others=others, **answers[0])
    except (ValueError, KeyError, ValidationError) as error:
        raise HostError(f"{host.name} answered something else than asked: {error}", fix="try again") from None
    raise no_python(host, spec, others, broken, result.stderr)


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


def need_same_kind(host: Host, facts: HostFacts, os: str, arch: str) -> None:
    """Refuse another system or processor: gloo differs between systems, the last bits of a sum between processors."""
    if (facts.os, facts.arch) != (os, arch):
        raise HostError(
            f"{host.name} is another kind of machine: {facts.os} on {facts.arch}, and here is {os} on {arch}",
            why="ranks on different systems or processors cannot form one world with the same results",
            fix="take it out of the hosts file",
        )


# Compare a host's Python with the one here


@functools.cache
def wanted_here() -> Requirements:
    """Return what this environment has, in public versions: torch may be a CPU build here and a CUDA build there."""
    least = _least_versions()
    try:
        packages = {name: public_version(importlib.metadata.version(name)) for name in least}
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed here", why="every host gets the versions used here", fix="make setup"
        ) from None
    return Requirements(f"{sys.version_info[0]}.{sys.version_info[1]}", packages, least)


def _least_versions() -> dict[str, str]:
    try:
        lines = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "shoal is not installed as a package here, so its requirements are not known",
            why="it runs from a bare folder",
            fix="pip install -e . in the folder of shoal's pyproject.toml",
        ) from None
    matches = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return {_normalize(match[1]): match[2] or "0" for match in matches if match}


def constraints_here() -> list[str]:
    """Return the versions of all other packages installed here, as constraints for pip."""
    distributions = importlib.metadata.distributions()
    versions = {_normalize(dist.metadata["Name"]): public_version(dist.version) for dist in distributions}
    required = {"shoal", "pip", *wanted_here().packages}
    return sorted(f"{name}=={version}" for name, version in versions.items() if name not in required)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def misfits(python: PythonFacts, wanted: Requirements, exactly: bool = False) -> list[str]:
    """Return what keeps a Python from running what runs here, worst first; nothing when it fits.

    It needs the same minor version and the same torch. Other packages may be older or newer than here in an environment
    that shoal did not make; `exactly` is for the one that it made.
    """
    if minor_of(python.version) != wanted.minor:
        return [f"it is Python {python.version}, and here is {wanted.minor}"]
    reasons = []
    for name, version in sorted(wanted.packages.items(), key=lambda item: item[0] != "torch"):
        there = python.packages.get(name)
        if there is None:
            reasons.append(f"{name} is not installed, and here is {version}")
        elif (exactly or name == "torch") and public_version(there) != version:
            reasons.append(f"it has {name} {there}, and here is {version}")
        elif _numbers(there) < _numbers(wanted.least.get(name, "0")):
            reasons.append(f"it has {name} {there}, and shoal needs {wanted.least[name]} or newer")
    return reasons


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", public_version(version)))


# Addresses and interfaces of the ranks


def addresses(spec: HostsSpec) -> dict[str, str]:
    """Return each host's address from the hosts file, the ssh configuration or the name service; no host is asked."""
    remote_hosts = [host for host in spec.hosts if not is_here(host)]
    remote = values_or_raise(on_each(remote_hosts, lambda host: host.address or _resolve(host, spec)))
    local = {host.name: host.address or _local_address(list(remote.values())) for host in spec.hosts if is_here(host)}
    by_name = {host.name: {**remote, **local}[host.name] for host in spec.hosts}
    refuse_shared_address(by_name, spec)
    return by_name


def refuse_one_machine_twice(spec: HostsSpec) -> None:
    """Refuse hosts whose names lead to the same address. A name that leads to none is left out: it may be a mistake
    that another check names, or a jump host that only ssh knows."""
    remote_hosts = [host for host in spec.hosts if not is_here(host)]
    results = on_each(remote_hosts, lambda host: host.address or _resolve(host, spec))
    by_name = {name: address for name, address in results.items() if not isinstance(address, ShoalError)}
    local = [host for host in spec.hosts if is_here(host)]
    by_name |= {host.name: host.address or _local_address(list(by_name.values())) for host in local}
    refuse_shared_address(by_name, spec)


def _local_address(remote: list[str]) -> str:
    """Return this machine's address on the route to the other hosts; loopback where there are none."""
    if not remote:
        return LOOPBACK
    try:
        return source_address(remote[0])
    except OSError as error:
        raise HostError(
            f"there is no way from here to {remote[0]}: {error.strerror}", fix=f"ip route get {remote[0]}"
        ) from None


def _resolve(host: Host, spec: HostsSpec) -> str:
    """Return the IPv4 address of the name that ssh would connect to: gloo on most machines is reached by IPv4."""
    argv = [*ssh_words(spec), "-G", "--", host.host]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RESOLVE_TIMEOUT_S
        )
    except FileNotFoundError:
        raise ssh_missing("ssh") from None
    if done.returncode:
        raise HostError(
            "ssh does not accept its configuration", why=done.stderr.strip(), fix=f"correct it: ssh -G {host.host}"
        )
    name = host_name_of(done.stdout)
    try:
        known = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        raise HostError(
            f"no address is known for {name} ({host.name})",
            why="ranks find each other by address, and the name service here does not know this name",
            fix=f'correct the name, or add address = "…" to it in {spec.path}',
        ) from None
    reachable = [address for address in known if not ipaddress.ip_address(address).is_loopback]
    if not reachable:
        raise HostError(
            f"{name} ({host.name}) means {known[0]} here, which no other machine can reach",
            why="/etc/hosts often gives a machine's own name to a loopback address",
            fix=f'add address = "…" to it in {spec.path}',
        )
    return reachable[0]


def host_name_of(output: str) -> str:
    """Return the host name in the output of `ssh -G`."""
    match = re.search(r"^hostname (\S+)$", output, re.MULTILINE)
    return match[1] if match else ""


def settle(host: Host, spec: HostsSpec, address: str, facts: HostFacts) -> tuple[str, str]:
    """Return address and interface after comparing them with what the host has. An interface named in the hosts file
    overrides an address that is not."""
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
    has = ", ".join(f"{' '.join(own)} on {name}" for name, own in facts.interfaces.items() if own and name != "lo")
    raise HostError(
        f"{host.name} does not have the address {address}",
        why=f"behind a router or a jump host, ssh uses another address than the machine's own. It has: {has}",
        fix=f'add address = "…" to it in {spec.path}, one that the other hosts can reach',
    )


def refuse_shared_address(by_name: Mapping[str, str], spec: HostsSpec) -> None:
    owners: dict[str, str] = {}
    for name, address in by_name.items():
        if (other := owners.setdefault(address, name)) != name:
            raise HostError(
                f"{other} and {name} in {spec.path} are the same machine: both have the address {address}",
                why="each machine is listed once, with as many slots as it should take ranks",
                fix="remove one of them, or give each the address of its own",
            )
