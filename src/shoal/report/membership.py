"""Who trained when, from what the ranks wrote. Pure.

A run in which nobody came or went has no history, and everything here falls back to what its `start` events say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.control.membership.generation import Ballot
from shoal.report.entered import Entered
from shoal.report.ranklog import RankLog, is_number

# Fewer steps than these say little about the speed of a world.
ENOUGH_STEPS = 10
# More than gloo can connect; a damaged line may claim any number.
_MOST_RANKS = 65_536

Logs = dict[int, RankLog]


@dataclass(frozen=True)
class Stretch:
    """A generation as its ranks saw it. It began after `step`; nobody of it trained for `lost_s` before. `stands` is
    false where its lineage was given up for another one."""

    generation: Ballot
    lineage: Ballot
    ids: tuple[int, ...]
    step: int
    began_at: float
    lost_s: float
    is_first: bool
    stands: bool


def last_members(logs: Logs) -> tuple[int, ...]:
    """The ids of those who took part at last."""
    newest, plain = _newest(logs), _plain(logs)
    if newest is not None and not plain:
        return newest.ids
    return tuple(range(_stated_size(plain))) or tuple(plain)


def is_joined(on: str, logs: Logs) -> bool:
    """Whether the folder is that of a machine that joined: `shoal join` notes that it starts one rank here, and that
    rank trained with others. Their files stay on their machines."""
    return on == "local:1" and any(len(entered.ids) > 1 for entered in _all_entered(logs))


def elsewhere(logs: Logs, joined: bool = False) -> tuple[int, ...]:
    """Ranks of the last generation whose files lie on other machines: of a machine that came while others trained
    nothing comes home, and nothing of the others comes to one that `joined`."""
    newest = _newest(logs)
    if newest is None or _plain(logs):
        return ()
    founders = {rank for entered in _all_entered(logs) if entered.is_first for rank in entered.ids}
    return tuple(rank for rank in newest.ids if rank not in logs and (joined or rank not in founders))


def party(logs: Logs) -> Logs:
    """Everybody of the last launch. A run resumed on fewer ranks leaves files of the others behind."""
    newest, plain = _newest(logs), _plain(logs)
    if newest is not None and not plain:
        launch = [entered for entered in _all_entered(logs) if entered.generation >= _launched(logs)]
        ids = {rank for entered in launch for rank in entered.ids}
        return {rank: log for rank, log in logs.items() if rank in ids}
    size = _stated_size(plain) or len(plain)
    return {rank: log for rank, log in plain.items() if log.start.get("world_size", size) == size}


def measured_size(logs: Logs) -> int | None:
    """Whose steps figures are about: those of the last world's size, or, where it has hardly trained, of that which
    trained most. None where the world never changed."""
    newest = _newest(logs)
    if newest is None or not logs:
        return None
    longest = max(logs.values(), key=lambda log: len(log.counted()))
    steps = Counter(longest.sizes()[longest.counted()].tolist())
    if steps[len(newest.ids)] >= ENOUGH_STEPS or not steps:
        return len(newest.ids)
    return max(steps, key=lambda size: (steps[size], size)) or None


def history(logs: Logs) -> tuple[Stretch, ...]:
    """Every generation that somebody entered, in order."""
    standing = Standing(logs)
    by_name: dict[Ballot, list[Entered]] = {}
    for entered in _all_entered(logs):
        by_name.setdefault(entered.generation, []).append(entered)
    return tuple(_stretch(entries, standing) for _, entries in sorted(by_name.items()))


def _stretch(entries: list[Entered], standing: Standing) -> Stretch:
    any_of_them = entries[0]
    # A rank that came in has not lost the time that it waited outside.
    stayed = [entered for entered in entries if entered.how != "joined"] or entries
    return Stretch(
        generation=any_of_them.generation,
        lineage=any_of_them.lineage,
        ids=any_of_them.ids,
        step=any_of_them.step,
        began_at=max(entered.time for entered in stayed),
        lost_s=max(entered.lost_s for entered in stayed),
        is_first=any(entered.is_first for entered in entries),
        stands=standing.holds(any_of_them, any_of_them.step + 1),
    )


class Standing:
    """Which steps belong to the model that the run ended with.

    A lineage follows another one where a rank went from one to the other with the state it had, or where all ranks
    went back to a checkpoint of the other one. A rank that was let in only says that it was elsewhere before.
    """

    def __init__(self, logs: Logs) -> None:
        self._until: dict[Ballot, float] = {}
        newest = _newest(logs)
        if newest is None:
            return
        # After a recovery ranks may come from several lineages: the checkpoint is of the newest.
        handed_on = sorted(_handed_on(logs), key=lambda pair: pair[0].generation)
        steps = {after.lineage: before for before, after in handed_on}
        limits = {after.lineage: after.step for _, after in handed_on}
        lineage, until = newest.lineage, math.inf
        while lineage not in self._until:
            self._until[lineage] = until
            if lineage not in steps:
                return
            lineage, until = steps[lineage].lineage, min(until, limits[lineage])

    def holds(self, entered: Entered | None, step: int) -> bool:
        return entered is None or step <= self._until.get(entered.lineage, -1)


def _handed_on(logs: Logs) -> Iterator[tuple[Entered, Entered]]:
    for log in logs.values():
        for before, after in zip(log.entered, log.entered[1:], strict=False):
            if before.lineage != after.lineage and after.how != "joined":
                yield before, after


def _all_entered(logs: Logs) -> Iterator[Entered]:
    return (entered for log in logs.values() for entered in log.entered)


def _newest(logs: Logs) -> Entered | None:
    return max(_last_entered(logs), key=lambda entered: entered.generation, default=None)


def _last_entered(logs: Logs) -> Iterable[Entered]:
    return [log.member_of for log in logs.values() if log.member_of is not None]


def _launched(logs: Logs) -> Ballot:
    """The generation that the last launch began with."""
    return max(
        (entered.generation for entered in _all_entered(logs) if entered.is_first),
        default=min(entered.generation for entered in _all_entered(logs)),
    )


def _plain(logs: Logs) -> Logs:
    """Ranks of a launch without membership, if that was the last one."""
    newest = _newest(logs)
    plain = {rank: log for rank, log in logs.items() if log.member_of is None}
    if newest is None:
        return plain
    later = {rank: log for rank, log in plain.items() if is_number(at := log.start.get("time")) and at > newest.time}
    # One rank that was started again and waits to be let in is no launch.
    return later if set(range(_stated_size(later))) <= later.keys() else {}


def _stated_size(logs: Logs) -> int:
    sizes = (log.start.get("world_size") for log in logs.values())
    return next((size for size in sizes if isinstance(size, int) and 0 < size <= _MOST_RANKS), 0)
