"""Who trained when, from what the ranks wrote. Pure.

A run in which nobody came or went has no history, and everything here falls back to what its `start` events say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.config.manifest import RecoveryRecord
from shoal.control.membership.types import Ballot
from shoal.events import Event
from shoal.tools.report.commit_log import check_ledger
from shoal.tools.report.rank_log import Entered, RankLog, is_number, read_ballot
from shoal.units import count, join, times

# Fewer steps than these say little about the speed of a world.
ENOUGH_STEPS = 10
# More than gloo can connect; a damaged line may claim any number.
_MOST_RANKS = 65_536

Logs = dict[int, RankLog]


@dataclass(frozen=True)
class GenerationSpan:
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


def history(logs: Logs) -> tuple[GenerationSpan, ...]:
    """Every generation that somebody entered, in order."""
    standing = FinalLineage(logs)
    by_name: dict[Ballot, list[Entered]] = {}
    for entered in _all_entered(logs):
        by_name.setdefault(entered.generation, []).append(entered)
    return tuple(_stretch(entries, standing) for _, entries in sorted(by_name.items()))


def _stretch(entries: list[Entered], standing: FinalLineage) -> GenerationSpan:
    any_of_them = entries[0]
    # A rank that came in has not lost the time that it waited outside.
    stayed = [entered for entered in entries if entered.how != "joined"] or entries
    return GenerationSpan(
        generation=any_of_them.generation,
        lineage=any_of_them.lineage,
        ids=any_of_them.ids,
        step=any_of_them.step,
        began_at=max(entered.time for entered in stayed),
        lost_s=max(entered.lost_s for entered in stayed),
        is_first=any(entered.is_first for entered in entries),
        stands=standing.holds(any_of_them, any_of_them.step + 1),
    )


class FinalLineage:
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


# SECTION report/changes
# What happened each time somebody came or went, and what it cost. Pure.


@dataclass(frozen=True)
class Changes:
    """`notes` are what the agents said beside the recoveries' own sentences: of pauses, and of lineages given up."""

    generations: int
    lineage: str | None
    recoveries: list[RecoveryRecord]
    notes: list[str]
    redone_steps: int
    abandoned_steps: int


def describe_changes(history: Sequence[GenerationSpan], commits: Sequence[Event], journals: Iterable[Event]) -> Changes:
    said = list(journals)
    ledger = check_ledger(commits)
    standing = [stretch for stretch in history if stretch.stands]
    return Changes(
        generations=len(history) or 1,
        lineage=str(standing[-1].lineage) if standing else None,
        recoveries=_recoveries(history, _first_commits(commits), _sentences(said)),
        notes=_notes(said),
        redone_steps=ledger.redone,
        abandoned_steps=ledger.abandoned,
    )


def cost_sentence(recoveries: Sequence[RecoveryRecord], abandoned_steps: int, redone_steps: int) -> str:
    """Of all changes together. Nothing is added up: where two lineages ran at once, so did their pauses."""
    longest = max((each.seconds for each in recoveries if each.seconds is not None), default=None)
    parts = [
        "" if longest is None else f"it took at most {longest:.1f} s until a step was done again",
        f"{count(redone_steps, 'step')} had to be repeated" if redone_steps else "",
        f"{count(abandoned_steps, 'step')} of what was given up do not count" if abandoned_steps else "",
    ]
    found = [part for part in parts if part]
    return f"Who took part changed {times(len(recoveries))}{': ' + join(found) if found else ''}."


def _recoveries(
    history: Sequence[GenerationSpan], first_commits: dict[Ballot, float], sentences: dict[Ballot, str]
) -> list[RecoveryRecord]:
    return [
        RecoveryRecord(
            generation=str(stretch.generation),
            lineage=str(stretch.lineage),
            stands=stretch.stands,
            step=stretch.step,
            members=list(stretch.ids),
            seconds=_seconds(stretch, first_commits.get(stretch.generation)),
            text=sentences.get(stretch.generation) or _own_sentence(stretch, _before(stretch, history[:place])),
        )
        for place, stretch in enumerate(history)
        if not stretch.is_first
    ]


def _seconds(stretch: GenerationSpan, committed_at: float | None) -> float | None:
    """From when the first of its ranks stopped training to when the next step was done."""
    if committed_at is None:
        return None
    return round(max(committed_at - stretch.began_at, 0.0) + stretch.lost_s, 3)


def _before(stretch: GenerationSpan, earlier: Sequence[GenerationSpan]) -> GenerationSpan | None:
    """What its ranks were in before: of its own lineage, if there is one."""
    kin = [each for each in earlier if each.lineage == stretch.lineage]
    shared = [each for each in earlier if set(each.ids) & set(stretch.ids)]
    return next(reversed(kin or shared), None)


def _own_sentence(stretch: GenerationSpan, before: GenerationSpan | None) -> str:
    """Where no agent's journal has one."""
    was = set(before.ids) if before else set()
    left, joined = sorted(was - set(stretch.ids)), sorted(set(stretch.ids) - was)
    events = [f"{_ranks(left)} left" if left else "", f"{_ranks(joined)} joined" if joined else ""]
    what = " and ".join(event for event in events if event) or "an exchange failed"
    goes = "goes" if len(stretch.ids) == 1 else "go"
    return f"{what[0].upper()}{what[1:]}; {_ranks(sorted(stretch.ids))} {goes} on with step {stretch.step + 1}."


def _ranks(ids: list[int]) -> str:
    return f"rank {ids[0]}" if len(ids) == 1 else f"ranks {join([str(rank) for rank in ids])}"


def _first_commits(commits: Sequence[Event]) -> dict[Ballot, float]:
    """When each generation had its first step done."""
    found: dict[Ballot, float] = {}
    for record in commits:
        generation = read_ballot(record.get("generation"))
        if "step" in record and generation is not None and is_number(record.get("time")):
            found[generation] = min(found.get(generation, float("inf")), float(record["time"]))
    return found


def _sentences(said: Iterable[Event]) -> dict[Ballot, str]:
    """Agents of one generation say the same of it; whoever was let in says less, and is alone with that."""
    found: dict[Ballot, Counter[str]] = {}
    for event in said:
        generation = read_ballot(event.get("generation")) if event.get("generation") else None
        if event.get("event") == "tell" and generation is not None and event.get("text"):
            found.setdefault(generation, Counter())[str(event["text"])] += 1
    return {generation: max(texts, key=lambda text: (texts[text], len(text))) for generation, texts in found.items()}


def _notes(said: Iterable[Event]) -> list[str]:
    """In the order in which they were said, each once."""
    notes = [event for event in said if event.get("event") in {"pause", "abandon"} and event.get("text")]
    notes.sort(key=lambda event: float(event["time"]) if is_number(event.get("time")) else 0.0)
    return list(dict.fromkeys(str(event["text"]) for event in notes))
