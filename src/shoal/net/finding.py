"""A finding: one result of a check, with the command that fixes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """`error`: a run would fail, hang or be wrong. `warning`: it would be badly slow, or break under load."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """`evidence` is what was seen, in the words of the machine; `fix` one command to paste on `node`, or empty where
    only a person can help; `retest` how to look again at just this."""

    id: str
    severity: Severity
    node: str
    evidence: str
    meaning: str
    fix: str = ""
    retest: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (list(Severity).index(finding.severity), finding.id, finding.node))
