"""What a run needs on a machine that does not share our disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


def _no_texts(_: Mapping[str, str]) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Cargo:
    """`files` are large and by a digest of their content, so that none is sent twice. `texts` are the small ones of the
    run folder: a function, because one of them says where on that machine the large ones lie. `stays`: what the
    run writes there is kept, as a training's is."""

    project: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    texts: Callable[[Mapping[str, str]], dict[str, str]] = _no_texts
    stays: bool = True
