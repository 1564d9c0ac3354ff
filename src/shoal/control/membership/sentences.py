"""Every event of membership as one plain sentence: what happened, to whom, what was done, what it cost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.control.membership.types import Generation

Name = Callable[[int], str]
Cause = Literal["leave", "ranks", "suspend", "restart", "closed", "silent", "elsewhere"]

_CAUSES: dict[Cause, str] = {
    "leave": "left the run",
    "ranks": "lost all of its ranks",
    "suspend": "was put to sleep",
    "restart": "was started again without its state",
    "closed": "is gone: its connection closed",
    "silent": "is silent",
    "elsewhere": "went on with others",
}


@dataclass(frozen=True)
class GenerationChange:
    """From one generation to the next, as one member saw it. `since_s`: how long nobody trained, so far."""

    before: Generation
    after: Generation
    causes: Mapping[int, Cause]
    since_s: float


def regrouped(change: GenerationChange, name: Name) -> str:
    what = "; ".join(_events(change, name)) or "An exchange failed"
    step = change.after.state.step
    who = _all(change.after.members, name)
    alone = len(change.after.members) == 1
    own = f" as a lineage of {'its' if alone else 'their'} own, since others may go on too" if _forked(change) else ""
    return (
        f"{what}. {who} {'goes' if alone else 'go'} on{own}, as generation {change.after.id.number}, with step "
        f"{step + 1}; that was agreed after {change.since_s:.1f} s, and no committed step is lost."
    )


def admitted(after: Generation, me: int, name: Name) -> str:
    return (
        f"{name(me)} is let in as a member of generation {after.id.number}, copies the state of {name(after.source)} "
        f"and trains with step {after.state.step + 1}."
    )


def recovering(after: Generation, me: int, name: Name) -> str:
    alone = after.members == (me,)
    return (
        f"No machine has the training's state any more: {_all(after.members, name)} {'goes' if alone else 'go'} back "
        f"to the newest checkpoint there, as generation {after.id.number}; the steps since then are done again."
    )


def paused(
    why: str, present: Iterable[int], generation: Generation, name: Name, min_nodes: int, recover_after_s: float = 0.0
) -> str:
    members = list(present)
    missing = [member for member in generation.members if member not in members]
    here = f"{_all(members, name) or 'This machine'} {'has' if len(members) < 2 else 'have'} paused"
    safe = "the state is kept in memory, and training goes on by itself as soon as they are back"
    if why == "min_nodes":
        return f"{here}: fewer than the {min_nodes} machines asked for are left; {safe}."
    if why == "no state":
        return (
            f"{here}: no machine that answers has the training's state; {_all(missing, name)} may have it and cannot "
            f"be heard. If none comes back within {recover_after_s:.0f} s, training goes on from the newest checkpoint."
        )
    return f"{here}: {_all(missing, name)} cannot be heard and may go on without us; {safe}."


def fenced(me: int, committed: int, name: Name) -> str:
    return (
        f"{name(me)} was away after step {committed}, and the others went on: it commits nothing more and asks to be "
        "let in again."
    )


def cannot_recover(me: int, why: str, name: Name) -> str:
    return (
        f"{name(me)} would go back to the newest checkpoint, but cannot write down that it does: {why}. It tries again;"
        " free space on its disk: df -h"
    )


def abandoned(me: int, theirs: Generation, committed: int, shared: int, name: Name) -> str:
    others = [member for member in theirs.members if member != me] or [me]
    return (
        f"{name(me)} has trained apart from {_all(others, name)} since step {shared}. The lineage of "
        f"{_all(others, name)} stays, with {theirs.state.committed} committed steps against {committed}: {name(me)} "
        f"goes back, and up to {committed - shared} steps are marked abandoned."
    )


def cannot_promise(me: int, error: OSError, name: Name) -> str:
    return (
        f"{name(me)} cannot write down its vote ({error.strerror or error}), so it gives none: free some space there, "
        "or the next fault may leave the others waiting."
    )


def _forked(change: GenerationChange) -> bool:
    return change.before.lineage.name != change.after.lineage.name


def _all(members: Iterable[int], name: Name) -> str:
    names = [name(member) for member in members]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


def _events(change: GenerationChange, name: Name) -> Iterator[str]:
    before, after = change.before, change.after
    for member, cause in sorted(change.causes.items()):
        yield f"{name(member)} {_CAUSES[cause]}"
    if joined := [member for member in after.members if member not in before.members]:
        yield f"{_all(joined, name)} joined"
    for member in before.members:
        if member not in after.members:
            continue
        had, has = before.ranks_of(member), after.ranks_of(member)
        if lost := [number for number in had if number not in has]:
            yield f"{name(member)} lost {len(lost)} of its {len(had)} ranks (number {', '.join(map(str, lost))} there)"
        if came := [number for number in has if number not in had]:
            yield f"{name(member)} has {len(has)} ranks again (number {', '.join(map(str, came))} came back)"
