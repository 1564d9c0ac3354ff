"""Check the parts of a divided model: what the ranks recorded of those that they kept at the end of the run.

Every element of the model belongs to one part, and every part to one rank. A second rank may keep a copy of it, whose
digest of weights and moments is that of the owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.events import Event


class KeptPart(BaseModel):
    """A part of the model, as a rank that keeps it records it."""

    owner: int
    ranges: list[tuple[int, int]]  # Places in the model, whose parameters lie one after the other.
    sha256: str  # Of the weights and the moments.

    @property
    def elements(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


class KeptParts(BaseModel):
    """The fields of a rank's `digest` event about its parts."""

    elements: int  # Of the whole model.
    copies: int  # Ranks that keep a part beside its owner.
    parts: list[KeptPart]


class PartsReport(BaseModel):
    parts: int
    ranks_each: int  # The ranks that keep a part.
    elements: int
    elements_by_owner: dict[int, int]
    owned_once: bool | None  # None if not all ranks' records are here.
    copies_equal: bool | None  # None without copies, or if none of their pairs is here.


def read_parts(event: Mapping[str, Any]) -> KeptParts | None:
    """Return the parts that a `digest` event records; None for a model that was not divided."""
    if "parts" not in event:
        return None
    try:
        return KeptParts.model_validate(event)
    except ValidationError:
        return KeptParts(elements=-1, copies=0, parts=[])


def check_parts(
    digests: Mapping[int, Event], away: Collection[int] = ()
) -> tuple[PartsReport | None, list[tuple[int, str]]]:
    """Return what the ranks' last `digest` events prove, and what is wrong by rank.

    The events of the ranks `away` are on other machines.
    """
    kept = {rank: parts for rank, event in sorted(digests.items()) if (parts := read_parts(event)) is not None}
    if not kept:
        return None, []
    first = kept[min(kept)]
    owned = {rank: part for rank, parts in kept.items() for part in parts.parts if part.owner == rank}
    copies = [(rank, part) for rank, parts in kept.items() for part in parts.parts if part.owner != rank]
    wrong = [*_find_disagreements(kept, digests), *_find_unequal_copies(owned, copies, first.copies, away)]
    gap = _find_gap([span for part in owned.values() for span in part.ranges], first.elements, is_whole=not away)
    if gap:
        wrong.append((min(kept), gap))
    report = PartsReport(
        parts=len(owned) + len(away),
        ranks_each=1 + first.copies,
        elements=first.elements,
        elements_by_owner={rank: part.elements for rank, part in owned.items()},
        owned_once=None if away and not gap else not gap,
        copies_equal=_are_equal(owned, copies)
        if copies and owned.keys() & {part.owner for _, part in copies}
        else None,
    )
    return report, wrong


def _find_disagreements(kept: Mapping[int, KeptParts], digests: Mapping[int, Event]) -> Iterator[tuple[int, str]]:
    first = min(kept)
    for rank in digests:
        if rank not in kept:
            yield rank, f"rank {rank} has recorded no parts, and rank {first} has"
        elif (kept[rank].elements, kept[rank].copies) != (kept[first].elements, kept[first].copies):
            yield rank, f"the parts of rank {rank} are not of the model that rank {first} has recorded"


def _find_gap(ranges: list[tuple[int, int]], elements: int, is_whole: bool) -> str:
    """Return what shows that an element has no owner, or two."""
    place = 0
    for begin, end in sorted(ranges):
        if begin < place:
            return f"elements {begin:,} to {min(end, place):,} of the model belong to two ranks"
        if begin > place and is_whole:
            return f"elements {place:,} to {begin:,} of the model belong to no rank"
        place = end
    if place > elements or (place < elements and is_whole):
        return f"the parts of all ranks have {place:,} elements, the model has {elements:,}"
    return ""


def _find_unequal_copies(
    owned: Mapping[int, KeptPart], copies: list[tuple[int, KeptPart]], copies_each: int, away: Collection[int]
) -> Iterator[tuple[int, str]]:
    for rank, part in copies:
        if part.owner in owned and owned[part.owner] != part:
            yield rank, f"the copy of the part of rank {part.owner} on rank {rank} is not what rank {part.owner} has"
        elif part.owner not in owned and part.owner not in away:
            yield rank, f"rank {rank} keeps a copy of a part of rank {part.owner}, which has recorded none"
    for owner in owned if not away else ():
        count = sum(part.owner == owner for _, part in copies)
        if count != copies_each:
            yield owner, f"the part of rank {owner} has {count} copies, and {copies_each} were to be kept"


def _are_equal(owned: Mapping[int, KeptPart], copies: list[tuple[int, KeptPart]]) -> bool:
    return all(owned[part.owner] == part for _, part in copies if part.owner in owned)
