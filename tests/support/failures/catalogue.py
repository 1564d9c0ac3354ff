"""Renew the example in docs/explain.md: `python -m tests.support.failures.catalogue`."""

from __future__ import annotations

import re

from shoal.cli.doctor import as_lines
from shoal.explain.explain import explain_file
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "explain.md"
_EXAMPLE = re.compile(r"```\n\$ shoal explain (\S+)\n.*?```", re.DOTALL)


def example(log: str) -> str:
    """Return the output of the command in the document."""
    lines = as_lines(explain_file(DOCUMENT.parent.parent / log))
    return "\n".join([f"$ shoal explain {log}", *lines])


def renewed() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return _EXAMPLE.sub(lambda match: f"```\n{example(match[1])}\n```", text)


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(), encoding="utf-8")
