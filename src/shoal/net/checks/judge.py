"""All checks, in the order of their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.errors import ShoalError
from shoal.net.checks import leftovers, names, room, sameness, speed
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene

Check = Callable[[Scene], Iterator[Finding]]


def unreached(scene: Scene) -> Iterator[Finding]:
    for name, error in scene.unreached.items():
        yield Finding(
            "reach.host", Severity.ERROR, name, error.seen, error.why or "nothing can be started there", error.fix
        )


def unseen(scene: Scene) -> Iterator[Finding]:
    """A topic that the scout stumbled over must not pass for a healthy one."""
    for name, facts in scene.facts.items():
        for topic, error in facts.get("failed", {}).items():
            meaning = f"checks of {topic} were left out for this machine"
            yield Finding("scout.failed", Severity.INFO, name, f"the scout could not see {topic}: {error}", meaning)


CHECKS: tuple[Check, ...] = (
    unreached,
    unseen,
    sameness.kinds,
    sameness.versions,
    sameness.no_torch,
    sameness.clocks,
    names.own_name,
    names.reverse,
    leftovers.port,
    leftovers.workers,
    leftovers.files,
    room.memory,
    room.disks,
    speed.cores,
    speed.frequency,
    speed.throttled,
    speed.power,
    speed.lid,
    speed.load,
)


def judge(scene: Scene) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(scene)]


def judge_proof(scene: Scene, proofs: list[dict[str, Any]], error: ShoalError | None) -> list[Finding]:
    """What gloo said; nothing when every pair and the whole group went well."""
    findings = []
    for proof in proofs:
        if not proof["ok"]:
            who = " and ".join(scene.nodes[member].name for member in proof["members"] if member < len(scene.nodes))
            meaning = f"gloo cannot exchange gradients between {who}"
            findings.append(Finding("proof.gloo", Severity.ERROR, proof["node"], proof["said"], meaning))
    if error is not None and not findings:
        findings.append(Finding("proof.start", Severity.ERROR, "", error.seen, error.why, error.fix))
    return findings
