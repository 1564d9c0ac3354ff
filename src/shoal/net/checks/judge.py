"""All checks, in the order of their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.errors import ShoalError
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene

Check = Callable[[Scene], Iterator[Finding]]


def unreached(scene: Scene) -> Iterator[Finding]:
    for name, error in scene.unreached.items():
        yield Finding(
            "reach.host", Severity.ERROR, name, error.seen, error.why or "nothing can be started there", error.fix
        )


CHECKS: tuple[Check, ...] = (unreached,)


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
