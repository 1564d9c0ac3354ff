"""Renew the example and the list of explanations in docs/explain.md: `python -m tests.support.failures.catalogue`."""

from __future__ import annotations

import re
from itertools import groupby

from shoal.cli.doctor import as_lines
from shoal.explain.explain import explain_file
from shoal.explain.pattern import Pattern, fill_in
from shoal.explain.patterns import PATTERNS
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "explain.md"
MARK = "<!-- from here on written by: python -m tests.support.failures.catalogue -->\n"
_EXAMPLE = re.compile(r"```\n\$ shoal explain (\S+)\n.*?```", re.DOTALL)
TITLES = {
    "gloo": "Between ranks (gloo)",
    "store": "Where ranks meet (torch's store)",
    "launch": "How the program was started",
    "torchrun": "torchrun",
    "ddp": "The model under DDP",
    "train": "The training itself",
    "data": "Data loaders",
    "python": "Python",
    "cuda": "GPUs",
    "memory": "Memory",
    "disk": "Disks",
    "system": "Limits of the system",
    "ssh": "SSH",
    "shoal": "shoal's own words",
}


def catalogue() -> str:
    kinds = groupby(PATTERNS, key=lambda pattern: pattern.id.partition(".")[0])
    parts = [f"\n### {TITLES[kind]}\n\n" + "\n".join(map(entry, patterns)) + "\n" for kind, patterns in kinds]
    return "".join(parts)


def entry(pattern: Pattern) -> str:
    cause, fix = (fill_in(text, {}) or "as shoal says it" for text in (pattern.cause, pattern.fix))
    check = f" Found before by `{pattern.check}`." if pattern.check else ""
    return f"- **`{pattern.id}`** ({pattern.weight.name.lower()}): {cause}. *Fix:* {fix}.{check}"


def example(log: str) -> str:
    """Return the output of the command in the document."""
    lines = as_lines(explain_file(DOCUMENT.parent.parent / log))
    return "\n".join([f"$ shoal explain {log}", *lines])


def renewed() -> str:
    head = DOCUMENT.read_text(encoding="utf-8").partition(MARK)[0]
    head = _EXAMPLE.sub(lambda match: f"```\n{example(match[1])}\n```", head)
    return head + MARK + catalogue()


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(), encoding="utf-8")
