"""One sentence for the user about every membership event: what happened, what was done, what it cost. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.control.membership.types import Generation
from shoal.units import join_words

Name = Callable[[int], str]
Cause = Literal["leave", "ranks", "suspend", "restart", "closed", "silent", "elsewhere", "slow"]

_CAUSES: dict[Cause, str] = {
    "leave": "left the run",
    "ranks": "lost all of its ranks",
    "suspend": "was put to sleep",
    "restart": "was started again without its state",
    "closed": "is gone: its connection closed",
    "silent": "is silent",
    "elsewhere": "went on with others",
    "slow": "is left out, because it is too slow, and stays a spare",
}


@dataclass(frozen=True)
class GenerationChange:
    """From one generation to the next, as one member saw it."""

    before: Generation
    after: Generation
    causes: Mapping[int, Cause]  # why members are missing
    since_s: float  # how long training has been interrupted so far
    can_lose_parts: bool = False  # a lost rank may have had the only copy of a part of the state


def regrouped(change: GenerationChange, name: Name) -> str:
    events = "; ".join(_describe_changes(change, name)) or "An exchange failed"
    before, after = change.before, change.after
    is_alone, is_fork = len(after.members) == 1, before.lineage.name != after.lineage.name
    fork = f" as a lineage of {'its' if is_alone else 'their'} own, since others may go on too" if is_fork else ""
    # Rounded it would be "0.0 s".
    agreed = f"after {change.since_s:.1f} s" if change.since_s >= 0.05 else "at once"
    is_smaller = after.world_size < before.world_size
    lost = (
        "a lost part of the model is looked for"
        if change.can_lose_parts and is_smaller
        else "no committed step is lost"
    )
    return (
        f"{events}. {_join(after.members, name)} {'goes' if is_alone else 'go'} on{fork}, as generation "
        f"{after.id.number}, with step {after.state.step + 1}; that was agreed {agreed}, and {lost}."
    )


def begun_without(change: GenerationChange, name: Name) -> str:
    """A launch lost members or ranks before its first group had formed."""
    events = "; ".join(_describe_changes(change, name)) or "The ranks could not meet"
    members, ranks = change.after.members, change.after.world_size
    left = f"the {ranks} ranks that are left" if ranks > 1 else "the rank that is left"
    return (
        f"{events}, before the first step. {_join(members, name)} {'begins' if len(members) == 1 else 'begin'} with "
        f"{left}, as generation {change.after.id.number}."
    )


def admitted(after: Generation, me: int, name: Name) -> str:
    return (
        f"{name(me)} joins generation {after.id.number}, copies the state of {name(after.source)} and continues with "
        f"step {after.state.step + 1}."
    )


def recovering(after: Generation, me: int, name: Name) -> str:
    is_alone = after.members == (me,)
    return (
        f"No machine has the training's state any more: {_join(after.members, name)} {'goes' if is_alone else 'go'} "
        f"back to the newest checkpoint there, as generation {after.id.number}; the steps since then are done again."
    )


def paused(
    why: str, present: Iterable[int], generation: Generation, name: Name, min_nodes: int, recover_after_s: float = 0.0
) -> str:
    members = list(present)
    missing = [member for member in generation.members if member not in members]
    paused = f"{_join(members, name) or 'This machine'} {'has' if len(members) < 2 else 'have'} paused"
    safe = "the state is kept in memory, and training goes on by itself as soon as they are back"
    if why == "min_nodes":
        return f"{paused}: fewer than the {min_nodes} machines asked for are left; {safe}."
    if why == "no state":
        return (
            f"{paused}: no machine that answers has the training's state; {_join(missing, name)} may have it and "
            f"cannot be reached. If none returns within {recover_after_s:.0f} s, training goes on from the newest "
            "checkpoint."
        )
    return f"{paused}: {_join(missing, name)} cannot be reached and may go on without us; {safe}."


def fenced(me: int, committed: int, name: Name) -> str:
    return (
        f"{name(me)} was away after step {committed}, and the others went on: it commits nothing more and asks to "
        "join again."
    )


def cannot_recover(me: int, why: str, name: Name) -> str:
    return (
        f"{name(me)} would go back to the newest checkpoint, but cannot write that decision to disk: {why}. It tries "
        "again; free space on its disk: df -h"
    )


def abandoned(me: int, after: Generation, committed: int, shared: int, name: Name) -> str:
    others = _join([member for member in after.members if member != me] or [me], name)
    return (
        f"{name(me)} has trained apart from {others} since step {shared}. The lineage of "
        f"{others} stays, with {after.state.committed} committed steps against {committed}: {name(me)} "
        f"goes back, and up to {committed - shared} steps are marked abandoned."
    )


def redone(me: int, after: Generation, committed: int, shared: int, name: Name) -> str:
    others = _join([member for member in after.members if member != me] or [me], name)
    went_back = f"to the checkpoint of step {shared}" if shared else "to the first step, since there was no checkpoint"
    return (
        f"No machine that could be reached had the training's state, and {others} went back {went_back}. {name(me)} "
        f"joins there: {committed - shared} steps that it had committed since are done again and marked abandoned."
    )


def cannot_promise(me: int, error: OSError, name: Name) -> str:
    return (
        f"{name(me)} cannot write its vote to disk ({error.strerror or error}), so it does not vote: free some space "
        "there, or the next fault may leave the others waiting."
    )


def _join(members: Iterable[int], name: Name) -> str:
    names = [name(member) for member in members]
    return join_words(names) if names else ""


def _describe_changes(change: GenerationChange, name: Name) -> Iterator[str]:
    before, after = change.before, change.after
    for member, cause in sorted(change.causes.items()):
        yield f"{name(member)} {_CAUSES[cause]}"
    if joined := [member for member in after.members if member not in before.members]:
        yield f"{_join(joined, name)} joined"
    for member in before.members:
        if member not in after.members:
            continue
        had, has = before.ranks_of(member), after.ranks_of(member)
        if lost := ", ".join(str(number) for number in had if number not in has):
            count = len(set(had) - set(has))
            yield f"{name(member)} lost {count} of its {len(had)} ranks (number {lost} there)"
        if returned := ", ".join(str(number) for number in has if number not in had):
            yield f"{name(member)} has {len(has)} ranks again (number {returned} came back)"
