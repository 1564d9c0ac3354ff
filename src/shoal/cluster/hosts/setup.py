"""Prepares hosts, once: an environment with the same Python minor, the same torch and the other packages as here, and
copies of shoal and of the project. Safe to repeat: what is there stays."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cluster.hosts.environment import EnvironmentPlan, cannot_make, plan_environment
from shoal.cluster.hosts.explain import gone
from shoal.cluster.hosts.facts import HostFacts, look, need_same_kind
from shoal.cluster.hosts.files import Bundle, Piece, code_bundle, lone_piece, project_bundle
from shoal.cluster.hosts.python import Wanted, constraints_here, wanted_here
from shoal.cluster.hosts.ship import ensure_code, ensure_project, question, send
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import Script, variables
from shoal.errors import UsageError

# An environment without CUDA, unpacked, and what pip unpacks on the way.
ENV_BYTES = 1_500_000_000
_VENV_BYTES = 100_000_000
_UNPACKED = 4

Say = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What every host shall have."""

    wanted: Wanted
    code: Bundle
    project: Bundle | None
    folder: Path | None
    wheels: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What was done on a host: each is `present`, `made`, `updated`, or `ours` on this very machine."""

    python: str
    environment: str
    code: str
    project: str | None = None
    why: str = ""

    @property
    def changed(self) -> bool:
        return bool({self.environment, self.code, self.project} & {"made", "updated"})


def make_order(project: Path | None, wheels: Path | None) -> Order:
    bundle = project_bundle(project) if project else None
    return Order(wanted_here(), code_bundle(), bundle, project, read_wheels(wheels) if wheels else ())


def read_wheels(folder: Path) -> tuple[Piece, ...]:
    found = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not found:
        raise UsageError(
            f"there are no wheels in {folder}",
            why="--wheels names a folder of .whl files to install from, on hosts without Internet",
            fix=f"fill it where there is Internet: pip download -d {folder} {' '.join(wanted_here().requirements)}",
        )
    return tuple(lone_piece(path, path.name) for path in found)


def set_up(host: Host, spec: HostsSpec, order: Order, say: Say) -> Outcome:
    if is_here(host):
        return Outcome(sys.executable, "ours", "ours", "ours" if order.project else None)
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
    outcome = Outcome(
        python=plan.python.executable if plan.state == "present" else facts.own_python,
        environment=plan.state,
        code="present" if facts.has_code else "made",
        why=plan.why,
    )
    return _with_project(host, spec, facts, order, outcome, say)


def _with_project(host: Host, spec: HostsSpec, facts: HostFacts, order: Order, outcome: Outcome, say: Say) -> Outcome:
    if order.project is None or order.folder is None:
        return outcome
    if facts.project_digest == order.project.digest:
        return replace(outcome, project="present")
    say("copying the project")
    ensure_project(host, spec, order.folder, facts, order.project)
    return replace(outcome, project="updated" if facts.project_digest or facts.project_files else "made")


def _make_environment(
    host: Host, spec: HostsSpec, facts: HostFacts, plan: EnvironmentPlan, order: Order, pythonpath: str, say: Say
) -> None:
    if order.wheels:
        say("copying the wheels")
        send(host, spec, facts, f"{facts.folder}/wheels", order.wheels)
    script = (
        variables(python=plan.python.executable, PYTHONPATH=pythonpath)
        + 'export PYTHONPATH\ncd /\nexec "$python" -m shoal.cluster.hosts.there.env'
    )
    with Script(host, spec) as running:
        running.start(script)
        running.send([json.dumps(_request(facts, order)).encode() + b"\n"])
        answer = _follow(running, say)
        if "done" not in answer and "error" not in answer:
            raise gone(host, running.process.wait(), running.errors())
        if "error" in answer:
            raise cannot_make(host, spec, facts, order.wanted, answer, running.errors())


# pip's own errors are cut there before they are sent.
_LONGEST_LINE = 1 << 20


def _follow(running: Script, say: Say) -> dict[str, Any]:
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


def _request(facts: HostFacts, order: Order) -> dict[str, Any]:
    wheel_bytes = sum(piece.size for piece in order.wheels)
    return {
        "folder": facts.folder,
        "requirements": order.wanted.requirements,
        "constraints": constraints_here(),
        "wheels": bool(order.wheels),
        "needed_bytes": _UNPACKED * wheel_bytes + _VENV_BYTES if order.wheels else ENV_BYTES,
    }
