"""What gloo itself said, held against what was seen before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.cluster.node import Node
from shoal.errors import ShoalError
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene

Members = tuple[int, ...]


def judge_proof(scene: Scene, proofs: Sequence[dict[str, Any]], error: ShoalError | None) -> list[Finding]:
    """Nothing when every pair and the whole group went well. A group that fails because a pair does is no news."""
    said: dict[Members, str] = {}
    for proof in proofs:
        if not proof["ok"]:
            said.setdefault(tuple(proof["members"]), f"gloo on {proof['node']} said: {proof['said']}")
    pairs = [_pair(scene, members, words) for members, words in said.items() if len(members) == 2]
    groups = [_group(scene, members, words) for members, words in said.items() if len(members) > 2]
    if error is not None and not said:
        return [Finding("proof.start", Severity.ERROR, "", error.seen, error.why, error.fix)]
    return pairs or groups


def _pair(scene: Scene, members: Members, said: str) -> Finding:
    dialer, listener = scene.dialling(*(_owner(scene, member) for member in members))
    passed = scene.trial(dialer.name, listener.name, "tcp")
    meaning = f"{dialer.name} dials {listener.name}, and gloo's exchange between them fails"
    if passed and passed.ok:
        meaning += f", although a plain connection passed: {passed.detail}"
    return Finding("proof.gloo", Severity.ERROR, listener.name, said, meaning)


def _group(scene: Scene, members: Members, said: str) -> Finding:
    names = ", ".join(dict.fromkeys(_owner(scene, member).name for member in members))
    return Finding("proof.group", Severity.ERROR, "", said, f"each two of {names} can exchange gradients, all cannot")


def _owner(scene: Scene, rank: int) -> Node:
    """Ranks count through the nodes in their order."""
    return [node for node in scene.nodes for _ in range(node.slots)][rank]
