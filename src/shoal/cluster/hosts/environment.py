"""Which Python of a host to use, whether an environment has to be made, and why one could not be. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shoal.cluster.hosts.explain import by_hand
from shoal.cluster.hosts.facts import HostFacts, no_python
from shoal.cluster.hosts.python import PythonFacts, Wanted, minor_of, misfits
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.errors import HostError
from shoal.units import format_si

_NO_NETWORK = re.compile(
    r"NameResolution|NewConnection|ConnectTimeout|ReadTimeout|ProxyError|unreachable|name resolution"
)
_NOT_OFFERED = re.compile(r"(?:No matching distribution found for|satisfies the requirement) (\S+)")


@dataclass(frozen=True)
class EnvironmentPlan:
    """`python` is used as it is when `state` is present, and otherwise what the environment is made with."""

    state: Literal["present", "made", "updated"]
    python: PythonFacts
    why: str = ""


def plan_environment(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Wanted) -> EnvironmentPlan:
    named, own = _of(facts, "named"), _of(facts, "own")
    if host.python and named is None:
        raise no_python(host, spec, facts.others, [], "")
    if named and not misfits(named, wanted):
        return EnvironmentPlan("present", named)
    if own and not misfits(own, wanted, exactly=True):
        return EnvironmentPlan("present", own)
    base = _base(host, spec, facts, wanted)
    if own and minor_of(own.version) == wanted.minor:
        return EnvironmentPlan("updated", base, misfits(own, wanted, exactly=True)[0])
    return EnvironmentPlan("made", base, misfits(named, wanted)[0] if named else "")


def _base(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Wanted) -> PythonFacts:
    """To make the environment with: never the environment itself, which may have to be removed first."""
    offered = [python for python in facts.pythons if python.origin != "own"]
    fitting = [python for python in offered if minor_of(python.version) == wanted.minor]
    if not fitting:
        raise _wrong_python(host, spec, facts, offered, wanted)
    if not fitting[0].has_venv:
        raise HostError(
            f"{fitting[0].executable} on {host.name} cannot make environments",
            why="its venv or ensurepip module is missing; Debian and Ubuntu ship them as a package of their own",
            fix=f"on that machine: sudo apt install python{wanted.minor}-venv",
        )
    return fitting[0]


def _wrong_python(
    host: Host, spec: HostsSpec, facts: HostFacts, offered: list[PythonFacts], wanted: Wanted
) -> HostError:
    seen = ", ".join(f"{python.executable} is {python.version}" for python in offered)
    other = ", ".join(facts.others)
    return HostError(
        f"there is no Python {wanted.minor} on {host.name}",
        why=f"all machines need the same minor version as here; {seen or f'there are: {other}'}",
        fix=f"on that machine: sudo apt install python{wanted.minor}-venv, or name one in {spec.path}",
    )


def _of(facts: HostFacts, origin: str) -> PythonFacts | None:
    return next((python for python in facts.pythons if python.origin == origin), None)


def cannot_make(
    host: Host, spec: HostsSpec, facts: HostFacts, wanted: Wanted, answer: Mapping[str, Any], stderr: str
) -> HostError:
    """From the last words of `there/env.py`."""
    kind, log = answer.get("error", ""), str(answer.get("log", ""))
    where = f"{facts.folder}/env on {host.name}"
    if kind == "room":
        needed, free = format_si(answer["needed"], "B"), format_si(answer["free"], "B")
        return _full(host, facts, f"an environment needs about {needed}, and {free} are free in {facts.folder}")
    if kind == "full" or "No space left on device" in log:
        return _full(host, facts, _last(log))
    if kind == "busy":
        return HostError(f"another shoal setup is at work on {host.name}", fix="wait for it, then run this again")
    if kind == "in the way":
        return HostError(
            f"{log} on {host.name} is in the way: it is no environment, and shoal did not make it",
            fix=f'move it away, or give the host another folder = "…" in {spec.path}',
        )
    if kind == "pip":
        return _pip_failed(host, spec, facts, wanted, log)
    if kind == "use":
        return HostError(
            f"what pip installed in {where} cannot be used", why=_last(log), fix=_see_log(host, spec, facts)
        )
    return HostError(f"cannot make {where}", why=_last(log or stderr), fix=_see_log(host, spec, facts))


def _pip_failed(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Wanted, log: str) -> HostError:
    if _NO_NETWORK.search(log):
        return HostError(
            f"pip on {host.name} cannot reach a package index",
            why=_last(log),
            fix=f"give it Internet, or a mirror in its pip settings, or wheels: shoal setup {spec.path} --wheels DIR",
        )
    if match := _NOT_OFFERED.search(log):
        return HostError(
            f"pip on {host.name} finds no {match[1]} for {facts.arch} and Python {wanted.minor}",
            why=_last(log),
            fix=f"add it to what --wheels copies, or see what pip looked at: {_see_log(host, spec, facts)}",
        )
    return HostError(
        f"pip on {host.name} could not install the packages", why=_last(log), fix=_see_log(host, spec, facts)
    )


def _full(host: Host, facts: HostFacts, why: str) -> HostError:
    return HostError(
        f"the disk of {host.name} is full", why=why, fix=f"make room on that machine: df -h {facts.folder}"
    )


def _see_log(host: Host, spec: HostsSpec, facts: HostFacts) -> str:
    return f"{by_hand(host, spec)} cat {facts.folder}/setup.log"


def _last(log: str) -> str:
    """The lines that say what went wrong; pip puts them at the end, and its advice about itself after them."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if "rror" in line]
    return "\n".join((errors or lines)[-3:])
