"""How a model is cut for outer exchanges, and when each part has its turn. Pure: names, sizes and step numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

Sized = Sequence[tuple[str, int]]


def cut_blocks(parameters: Sized, fragments: int) -> list[list[str]]:
    """Names in their order, in at most `fragments` runs of whole blocks, about equal in size and never empty."""
    total = sum(size for _, size in parameters)
    cut: dict[int, list[str]] = {}
    before = 0
    for _, members in groupby(parameters, key=lambda parameter: _block(parameter[0])):
        names, sizes = zip(*members, strict=True)
        middle = before + sum(sizes) / 2
        cut.setdefault(int(middle * fragments / total), []).extend(names)
        before += sum(sizes)
    return list(cut.values())


def cut_pieces(parameters: Sized, piece_bytes: int) -> list[list[str]]:
    """Names in their order, so many that a piece stays below `piece_bytes`; a larger parameter is a piece by itself."""
    pieces: list[list[str]] = []
    filled = 0
    for name, size in parameters:
        if not pieces or filled + size > piece_bytes:
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    return pieces


def is_sent_at(step: int, fragment: int, fragments: int, every: int) -> bool:
    """Fragments are spread evenly over a round, the last one is sent at its end."""
    return (step - (fragment + 1) * every // fragments) % every == 0


def _block(name: str) -> str:
    """`blocks.3.attention.out.bias` belongs to `blocks.3`, `token.weight` to `token`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first
