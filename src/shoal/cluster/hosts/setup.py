"""Prepare hosts: `shoal setup` once, and every launch before it starts ranks.

`set_up` makes an environment with the Python minor version, the torch and the packages of this machine, and copies
shoal and the project. It is safe to repeat: what is there stays. `make_ready` runs at every launch and is quick when
nothing has changed: one connection to each host, all of them at once.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.cluster.hosts.copy import (
    CopyFile,
    FileBundle,
    code_bundle,
    describe_left_out,
    ensure_code,
    ensure_project,
    lone_piece,
    project_bundle,
    put_file,
    question,
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
    refuse_shared_address,
    settle,
    wanted_here,
)
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import RemoteScript, by_hand, explain_end, on_each, values_or_raise, variables
from shoal.cluster.node import Note
from shoal.errors import HostError, UsageError
from shoal.units import format_si

# Bytes of an environment without CUDA, unpacked, and of what pip unpacks on the way.
_ENV_BYTES = 1_500_000_000
_VENV_BYTES = 100_000_000
_UNPACKED_PER_WHEEL_BYTE = 4
# pip's own errors are cut on the host before they are sent.
_MOST_LINE_BYTES = 1 << 20
_NO_NETWORK = re.compile(
    r"NameResolution|NewConnection|ConnectTimeout|ReadTimeout|ProxyError|unreachable|name resolution"
)
_NOT_OFFERED = re.compile(r"(?:No matching distribution found for|satisfies the requirement) (\S+)")


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
    """What was done on a host: each part is `present`, `made`, `updated`, or `ours` on this machine."""

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
    return SetupOrder(wanted_here(), code_bundle(), bundle, project, _read_wheels(wheels) if wheels else ())


def _read_wheels(folder: Path) -> tuple[CopyFile, ...]:
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not wheels:
        raise UsageError(
            f"there are no wheels in {folder}",
            why="--wheels names a folder of .whl files to install from, on hosts without Internet",
            fix=f"fill it where there is Internet: pip download -d {folder} {' '.join(wanted_here().requirements)}",
        )
    return tuple(lone_piece(path, path.name) for path in wheels)


def set_up(host: Host, spec: HostsSpec, order: SetupOrder, report: Note) -> SetupResult:
    if is_here(host):
        return SetupResult(sys.executable, "ours", "ours", "ours" if order.project else None)
    report("looking what is there")
    facts = look(host, spec, question(order.code, order.project), order.wanted, any_python=True)
    need_same_kind(host, facts, platform.system(), platform.machine())
    plan = plan_environment(host, spec, facts, order.wanted)
    facts = facts.model_copy(update={"pythons": (plan.python,)})
    if not facts.has_code:
        report("copying shoal")
    pythonpath = ensure_code(host, spec, facts, order.code)
    if plan.state != "present":
        _make_environment(host, spec, facts, plan, order, pythonpath, report)
    project = None
    if order.project is not None and order.folder is not None:
        project = "present"
        if facts.project_digest != order.project.digest:
            report("copying the project")
            ensure_project(host, spec, order.folder, facts, order.project)
            project = "updated" if facts.project_digest or facts.project_files else "made"
    return SetupResult(
        python=plan.python.executable if plan.state == "present" else facts.own_python,
        environment=plan.state,
        code="present" if facts.has_code else "made",
        project=project,
        why=plan.why,
    )


@dataclass(frozen=True)
class EnvironmentPlan:
    state: Literal["present", "made", "updated"]
    python: PythonFacts  # used as it is for `present`; otherwise the environment is made with it
    why: str = ""


def plan_environment(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements) -> EnvironmentPlan:
    by_origin = {python.origin: python for python in reversed(facts.pythons)}
    named, own = by_origin.get("named"), by_origin.get("own")
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
    """Choose the Python to make the environment with: not the environment's own, which may have to be removed."""
    offered = [python for python in facts.pythons if python.origin != "own"]
    fitting = [python for python in offered if minor_of(python.version) == wanted.minor]
    if not fitting:
        seen = ", ".join(f"{python.executable} is {python.version}" for python in offered)
        seen = seen or f"there are: {', '.join(facts.others)}"
        raise HostError(
            f"there is no Python {wanted.minor} on {host.name}",
            why=f"all machines need the same minor version as here; {seen}",
            fix=f"on that machine: sudo apt install python{wanted.minor}-venv, or name one in {spec.path}",
        )
    if not fitting[0].has_venv:
        raise HostError(
            f"{fitting[0].executable} on {host.name} cannot make environments",
            why="its venv or ensurepip module is missing; Debian and Ubuntu ship them as a package of their own",
            fix=f"on that machine: sudo apt install python{wanted.minor}-venv",
        )
    return fitting[0]


def _make_environment(
    host: Host,
    spec: HostsSpec,
    facts: HostFacts,
    plan: EnvironmentPlan,
    order: SetupOrder,
    pythonpath: str,
    report: Note,
) -> None:
    if order.wheels:
        report("copying the wheels")
        send(host, spec, facts, f"{facts.folder}/wheels", order.wheels)
    wheel_bytes = sum(piece.size for piece in order.wheels)
    request = {
        "folder": facts.folder,
        "requirements": order.wanted.requirements,
        "constraints": constraints_here(),
        "wheels": bool(order.wheels),
        "needed_bytes": _UNPACKED_PER_WHEEL_BYTE * wheel_bytes + _VENV_BYTES if order.wheels else _ENV_BYTES,
    }
    script = (
        variables(python=plan.python.executable, PYTHONPATH=pythonpath)
        + 'export PYTHONPATH\ncd /\nexec "$python" -m shoal.cluster.hosts.remote_setup'
    )
    with RemoteScript(host, spec) as running:
        running.start(script)
        running.send([json.dumps(request).encode() + b"\n"])
        answer = _follow(running, report)
        if "done" not in answer and "error" not in answer:
            raise explain_end(host, running.process.wait(), running.errors())
        if "error" in answer:
            raise cannot_make(host, spec, facts, order.wanted, answer, running.errors())


def _follow(running: RemoteScript, report: Note) -> dict[str, Any]:
    """Report what the script does; return its last message, which is empty when it ended without one."""
    answer: dict[str, Any] = {}
    for line in iter(lambda: running.stdout.readline(_MOST_LINE_BYTES), b""):
        if line.startswith(b"{"):
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                # Another program printed it. Without an answer after it this ends in an error.
                continue
            answer = message if isinstance(message, dict) else {}
            report(str(answer.get("doing", "finishing")))
    return answer


def cannot_make(
    host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements, answer: Mapping[str, Any], stderr: str
) -> HostError:
    """Explain the last message of `remote_setup.py`."""
    kind, log = answer.get("error", ""), str(answer.get("log", ""))
    where, see_log = f"{facts.folder}/env on {host.name}", f"{by_hand(host, spec)} cat {facts.folder}/setup.log"
    if kind == "room":
        needed, free = format_si(answer["needed"], "B"), format_si(answer["free"], "B")
        return _full(host, facts, f"an environment needs about {needed}, and {free} are free in {facts.folder}")
    if kind == "full" or "No space left on device" in log:
        return _full(host, facts, _last_lines(log))
    if kind == "busy":
        return HostError(f"another shoal setup is at work on {host.name}", fix="wait for it, then run this again")
    if kind == "in the way":
        return HostError(
            f"{log} on {host.name} is in the way: it is not an environment, and shoal did not make it",
            fix=f'move it away, or give the host another folder = "…" in {spec.path}',
        )
    if kind == "pip" and _NO_NETWORK.search(log):
        return HostError(
            f"pip on {host.name} cannot reach a package index",
            why=_last_lines(log),
            fix=f"give it Internet, or a mirror in its pip settings, or wheels: shoal setup {spec.path} --wheels DIR",
        )
    if kind == "pip" and (match := _NOT_OFFERED.search(log)):
        return HostError(
            f"pip on {host.name} finds no {match[1]} for {facts.arch} and Python {wanted.minor}",
            why=_last_lines(log),
            fix=f"add it to what --wheels copies, or see what pip looked at: {see_log}",
        )
    if kind == "pip":
        return HostError(f"pip on {host.name} could not install the packages", why=_last_lines(log), fix=see_log)
    if kind == "use":
        return HostError(f"what pip installed in {where} cannot be used", why=_last_lines(log), fix=see_log)
    return HostError(f"cannot make {where}", why=_last_lines(log or stderr), fix=see_log)


def _full(host: Host, facts: HostFacts, why: str) -> HostError:
    return HostError(
        f"the disk of {host.name} is full", why=why, fix=f"make room on that machine: df -h {facts.folder}"
    )


def _last_lines(log: str) -> str:
    """Return the lines that say what went wrong: pip puts them at the end, and notices about itself after them."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if "rror" in line]
    return "\n".join((errors or lines)[-3:])


# Ready for a launch


@dataclass(frozen=True)
class ReadyHost:
    """What a launcher needs to start ranks on a host. Paths are the host's own. On this machine nothing is copied: they
    are the ones used here."""

    host: Host
    here: bool
    address: str
    interface: str
    link_mbps: int | None
    python: str
    pythonpath: str
    project: str | None
    files: dict[str, str]  # by the digest they were asked for with
    runs: str
    facts: HostFacts


def make_ready(
    spec: HostsSpec,
    project: Path | None = None,
    files: Mapping[str, Path] = {},
    note: Note = lambda text: None,
) -> list[ReadyHost]:
    """Return the hosts in the order of the file; raise an error that names each host that cannot take part."""
    wanted, code = wanted_here(), code_bundle()
    bundle = project_bundle(project) if project else None
    if bundle is not None and (left_out := describe_left_out(bundle)):
        note(left_out)
    known_addresses = addresses(spec)

    def prepare(host: Host) -> ReadyHost:
        if is_here(host) and host.python is None:
            host = host.model_copy(update={"python": sys.executable})
        facts = look(host, spec, question(code, bundle, files), wanted)
        need_same_kind(host, facts, platform.system(), platform.machine())
        address, interface = settle(host, spec, known_addresses[host.name], facts)
        python = usable_python(host, spec, facts, wanted)
        return ReadyHost(
            host=host,
            here=is_here(host),
            address=address,
            interface=interface,
            link_mbps=facts.link_mbps.get(interface),
            python=python.executable,
            pythonpath=ensure_code(host, spec, facts, code),
            project=ensure_project(host, spec, project, facts, bundle) if project and bundle else None,
            files={digest: put_file(host, spec, local, digest, facts) for digest, local in files.items()},
            runs=f"{facts.folder}/runs",
            facts=facts,
        )

    ready = values_or_raise(on_each(spec.hosts, prepare))
    refuse_shared_address({name: host.address for name, host in ready.items()}, spec)
    return list(ready.values())


def usable_python(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Requirements) -> PythonFacts:
    """Return the Python that the file names, or the one that `shoal setup` made."""
    for python in facts.pythons:
        if not misfits(python, wanted):
            return python
    # The last is the one that setup made, because the named one did not fit.
    last = facts.pythons[-1]
    raise HostError(
        f"the Python of {host.name} cannot run this: {misfits(last, wanted)[0]}",
        why=f"all ranks need the same Python and the same torch; looked at {last.executable}",
        fix=f"shoal setup {spec.path}",
    )
