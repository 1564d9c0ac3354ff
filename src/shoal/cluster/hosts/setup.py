"""Prepares hosts, once: an environment with the same Python minor, the same torch and the other packages as here, and
copies of shoal and of the project. Safe to repeat: what is there stays."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shoal.cluster.hosts.copy import (
    CopyFile,
    FileBundle,
    code_bundle,
    ensure_code,
    ensure_project,
    lone_piece,
    project_bundle,
    put_file,
    question,
    say_left_out,
    send,
)
from shoal.cluster.hosts.facts import (
    HostFacts,
    PythonFacts,
    Requirements,
    addresses,
    constraints_here,
    look,
    minor_of,
    misfits,
    need_same_kind,
    no_python,
    refuse_twins,
    settle,
    wanted_here,
)
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import RemoteScript, by_hand, gone, on_each, values_or_raise, variables
from shoal.errors import HostError, UsageError
from shoal.units import format_si

# SECTION cluster/hosts/environment
# Which Python of a host to use, whether an environment has to be made, and why one could not be. Pure.


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


def plan_environment(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements) -> EnvironmentPlan:
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


def _base(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements) -> PythonFacts:
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
    host: Host, spec: HostsSpec, facts: HostFacts, offered: list[PythonFacts], wanted: Requirements
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
    host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements, answer: Mapping[str, Any], stderr: str
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


def _pip_failed(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements, log: str) -> HostError:
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


# An environment without CUDA, unpacked, and what pip unpacks on the way.
ENV_BYTES = 1_500_000_000
_VENV_BYTES = 100_000_000
_UNPACKED = 4

Say = Callable[[str], None]


@dataclass(frozen=True)
class SetupOrder:
    """What every host shall have."""

    wanted: Requirements
    code: FileBundle
    project: FileBundle | None
    folder: Path | None
    wheels: tuple[CopyFile, ...] = ()


@dataclass(frozen=True)
class SetupResult:
    """What was done on a host: each is `present`, `made`, `updated`, or `ours` on this very machine."""

    python: str
    environment: str
    code: str
    project: str | None = None
    why: str = ""

    @property
    def changed(self) -> bool:
        return bool({self.environment, self.code, self.project} & {"made", "updated"})


def make_order(project: Path | None, wheels: Path | None) -> SetupOrder:
    bundle = project_bundle(project) if project else None
    return SetupOrder(wanted_here(), code_bundle(), bundle, project, read_wheels(wheels) if wheels else ())


def read_wheels(folder: Path) -> tuple[CopyFile, ...]:
    found = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not found:
        raise UsageError(
            f"there are no wheels in {folder}",
            why="--wheels names a folder of .whl files to install from, on hosts without Internet",
            fix=f"fill it where there is Internet: pip download -d {folder} {' '.join(wanted_here().requirements)}",
        )
    return tuple(lone_piece(path, path.name) for path in found)


def set_up(host: Host, spec: HostsSpec, order: SetupOrder, say: Say) -> SetupResult:
    if is_here(host):
        return SetupResult(sys.executable, "ours", "ours", "ours" if order.project else None)
    say("looking what is there")
    facts = look(host, spec, question(order.code, order.project), order.wanted, any_python=True)
    need_same_kind(host, facts, platform.system(), platform.machine())
    plan = plan_environment(host, spec, facts, order.wanted)
    facts = facts.model_copy(update={"pythons": (plan.python,)})
    if not facts.has_code:
        say("copying shoal")
    pythonpath = ensure_code(host, spec, facts, order.code)
    if plan.state != "present":
        _make_environment(host, spec, facts, plan, order, pythonpath, say)
    outcome = SetupResult(
        python=plan.python.executable if plan.state == "present" else facts.own_python,
        environment=plan.state,
        code="present" if facts.has_code else "made",
        why=plan.why,
    )
    return _with_project(host, spec, facts, order, outcome, say)


def _with_project(
    host: Host, spec: HostsSpec, facts: HostFacts, order: SetupOrder, outcome: SetupResult, say: Say
) -> SetupResult:
    if order.project is None or order.folder is None:
        return outcome
    if facts.project_digest == order.project.digest:
        return replace(outcome, project="present")
    say("copying the project")
    ensure_project(host, spec, order.folder, facts, order.project)
    return replace(outcome, project="updated" if facts.project_digest or facts.project_files else "made")


def _make_environment(
    host: Host, spec: HostsSpec, facts: HostFacts, plan: EnvironmentPlan, order: SetupOrder, pythonpath: str, say: Say
) -> None:
    if order.wheels:
        say("copying the wheels")
        send(host, spec, facts, f"{facts.folder}/wheels", order.wheels)
    script = (
        variables(python=plan.python.executable, PYTHONPATH=pythonpath)
        + 'export PYTHONPATH\ncd /\nexec "$python" -m shoal.cluster.hosts.remote_setup'
    )
    with RemoteScript(host, spec) as running:
        running.start(script)
        running.send([json.dumps(_request(facts, order)).encode() + b"\n"])
        answer = _follow(running, say)
        if "done" not in answer and "error" not in answer:
            raise gone(host, running.process.wait(), running.errors())
        if "error" in answer:
            raise cannot_make(host, spec, facts, order.wanted, answer, running.errors())


# pip's own errors are cut there before they are sent.
_LONGEST_LINE = 1 << 20


def _follow(running: RemoteScript, say: Say) -> dict[str, Any]:
    """Its last words; nothing when it ended without any."""
    answer: dict[str, Any] = {}
    for line in iter(lambda: running.stdout.readline(_LONGEST_LINE), b""):
        if line.startswith(b"{"):
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                # Printed by something else there: it ends in an error if no answer follows.
                continue
            answer = said if isinstance(said, dict) else {}
            say(str(answer.get("doing", "finishing")))
    return answer


def _request(facts: HostFacts, order: SetupOrder) -> dict[str, Any]:
    wheel_bytes = sum(piece.size for piece in order.wheels)
    return {
        "folder": facts.folder,
        "requirements": order.wanted.requirements,
        "constraints": constraints_here(),
        "wheels": bool(order.wheels),
        "needed_bytes": _UNPACKED * wheel_bytes + _VENV_BYTES if order.wheels else ENV_BYTES,
    }


# SECTION cluster/hosts/ready
# Hosts ready for a launch: the right Python found, the same shoal, the project and the data there.
#
# Called at every launch, so it is quick when nothing changed: one connection to each host, all of them at once.


@dataclass(frozen=True)
class ReadyHost:
    """What a launcher needs to start ranks there. Paths are the host's own; `files` are by the digest they were asked
    for with. On this very machine nothing is copied: they are the ones that are used here anyway."""

    host: Host
    here: bool
    address: str
    interface: str
    cores: int
    link_mbps: int | None
    python: str
    pythonpath: str
    project: str | None
    files: dict[str, str]
    runs: str
    facts: HostFacts


def make_ready(
    spec: HostsSpec,
    project: Path | None = None,
    files: Mapping[str, Path] = {},
    note: Callable[[str], None] = lambda text: None,
) -> list[ReadyHost]:
    """In the order of the file; raises what keeps a host from taking part, naming each of them."""
    wanted, code = wanted_here(), code_bundle()
    bundle = project_bundle(project) if project else None
    if bundle is not None and (left_out := say_left_out(bundle)):
        note(left_out)
    where = addresses(spec)

    def prepare(host: Host) -> ReadyHost:
        return _ready(host, spec, where[host.name], wanted, code, bundle, project, files)

    found = values_or_raise(on_each(spec.hosts, prepare))
    refuse_twins({name: ready.address for name, ready in found.items()}, spec)
    return list(found.values())


def usable_python(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements) -> PythonFacts:
    """The one that the file names, or the one that `shoal setup` made."""
    found = {python.executable: misfits(python, wanted) for python in facts.pythons}
    for python in facts.pythons:
        if not found[python.executable]:
            return python
    # The one that setup made, where there is one: it was made because the named one would not do.
    last = facts.pythons[-1]
    raise HostError(
        f"the Python of {host.name} cannot run this: {found[last.executable][0]}",
        why=f"all ranks need the same Python and the same torch; looked at {last.executable}",
        fix=f"shoal setup {spec.path}",
    )


def _ready(
    host: Host,
    spec: HostsSpec,
    address: str,
    wanted: Requirements,
    code: FileBundle,
    bundle: FileBundle | None,
    project: Path | None,
    files: Mapping[str, Path],
) -> ReadyHost:
    host = _with_own_python(host)
    facts = look(host, spec, question(code, bundle, files), wanted)
    need_same_kind(host, facts, platform.system(), platform.machine())
    address, interface = settle(host, spec, address, facts)
    python = usable_python(host, spec, facts, wanted)
    return ReadyHost(
        host=host,
        here=is_here(host),
        address=address,
        interface=interface,
        cores=facts.cores,
        link_mbps=facts.link_mbps.get(interface),
        python=python.executable,
        pythonpath=ensure_code(host, spec, facts, code),
        project=ensure_project(host, spec, project, facts, bundle) if project else None,
        files={digest: put_file(host, spec, local, digest, facts) for digest, local in files.items()},
        runs=f"{facts.folder}/runs",
        facts=facts,
    )


def _with_own_python(host: Host) -> Host:
    """This very machine needs no other one than ours."""
    return host.model_copy(update={"python": sys.executable}) if is_here(host) and host.python is None else host
