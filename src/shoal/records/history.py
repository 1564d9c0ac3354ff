"""Reconstruct the membership history of a run: which ranks trained in which generation, and what each change cost.

The input is what the ranks and agents recorded. A run without membership changes has no history; all functions then
fall back to its `start` events.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shoal.config.manifest import RecoveryRecord
from shoal.control.membership.types import Ballot
from shoal.events import Event
from shoal.records.commit_log import check_ledger
from shoal.records.rank_log import Entered, RankLog, as_float, is_number, read_ballot
from shoal.units import format_times, join_words, pluralize, rank_names

# Fewer steps than these are too few to judge the speed of a world size.
ENOUGH_STEPS = 10
# More ranks than gloo can connect. A damaged line may claim any number.
_MOST_RANKS = 65_536

Logs = dict[int, RankLog]


@dataclass(frozen=True)
class GenerationSpan:
    """A generation as its ranks recorded it."""

    generation: Ballot
    lineage: Ballot
    ids: tuple[int, ...]
    step: int  # the last step before it began
    began_at: float
    lost_s: float  # time without training before it began
    is_first: bool  # a launch began with it
    stands: bool  # false where its lineage was abandoned


def last_members(logs: Logs) -> tuple[int, ...]:
    """Return the ids of the ranks that took part at the end."""
    newest, plain = _newest(logs), _logs_without_membership(logs)
    if newest is not None and not plain:
        return newest.ids
    return tuple(range(_recorded_world_size(plain))) or tuple(plain)


def is_joined(on: str, logs: Logs) -> bool:
    """Return whether the folder belongs to a machine that joined a run.

    `shoal join` records `local:1` there, and its rank trained with others, whose files stay on their machines.
    """
    return on == "local:1" and any(len(entered.ids) > 1 for entered in _all_entered(logs))


def ranks_elsewhere(logs: Logs, joined: bool = False) -> tuple[int, ...]:
    """Return the ranks of the last generation whose files are on other machines.

    A machine that joined later keeps its files. A machine that `joined` receives none from the others.
    """
    newest = _newest(logs)
    if newest is None or _logs_without_membership(logs):
        return ()
    first_ranks = {rank for entered in _all_entered(logs) if entered.is_first for rank in entered.ids}
    return tuple(rank for rank in newest.ids if rank not in logs and (joined or rank not in first_ranks))


def logs_of_last_launch(logs: Logs) -> Logs:
    """Return the logs of the last launch's ranks. A run resumed on fewer ranks leaves files of the others behind."""
    newest, plain = _newest(logs), _logs_without_membership(logs)
    if newest is not None and not plain:
        launched = max(
            (entered.generation for entered in _all_entered(logs) if entered.is_first),
            default=min(entered.generation for entered in _all_entered(logs)),
        )
        ids = {rank for entered in _all_entered(logs) if entered.generation >= launched for rank in entered.ids}
        return {rank: log for rank, log in logs.items() if rank in ids}
    size = _recorded_world_size(plain) or len(plain)
    return {rank: log for rank, log in plain.items() if log.start.get("world_size", size) == size}


def choose_measured_size(logs: Logs) -> int | None:
    """Choose the world size whose steps the speed figures describe; None where it never changed.

    Take the last world size or, if it has trained few steps, the one that trained the most.
    """
    newest = _newest(logs)
    if newest is None or not logs:
        return None
    longest = max(logs.values(), key=lambda log: len(log.steps.counted()))
    steps = Counter(longest.steps.sizes()[longest.steps.counted()].tolist())
    if steps[len(newest.ids)] >= ENOUGH_STEPS or not steps:
        return len(newest.ids)
    return max(steps, key=lambda size: (steps[size], size)) or None


def read_history(logs: Logs) -> tuple[GenerationSpan, ...]:
    """Return every generation that a rank entered, in order."""
    final = FinalLineage(logs)
    by_generation: dict[Ballot, list[Entered]] = {}
    for entered in _all_entered(logs):
        by_generation.setdefault(entered.generation, []).append(entered)
    spans = []
    for _, entries in sorted(by_generation.items()):
        first = entries[0]
        # A joining rank has not lost the time that it waited to be admitted.
        stayed = [entered for entered in entries if entered.how != "joined"] or entries
        spans.append(
            GenerationSpan(
                generation=first.generation,
                lineage=first.lineage,
                ids=first.ids,
                step=first.step,
                began_at=max(entered.time for entered in stayed),
                lost_s=max(entered.lost_s for entered in stayed),
                is_first=any(entered.is_first for entered in entries),
                stands=final.holds(first, first.step + 1),
            )
        )
    return tuple(spans)


class FinalLineage:
    """Decide which steps belong to the model that the run ended with.

    A lineage follows another one where a rank moved between them with the state it had, or where all ranks went back
    to a checkpoint of the other one. A rank that joined with a copied state proves nothing about its earlier lineage.
    """

    def __init__(self, logs: Logs) -> None:
        self._until: dict[Ballot, float] = {}  # the last step that counts, by lineage
        newest = _newest(logs)
        if newest is None:
            return
        moves = [
            (before, after)
            for log in logs.values()
            for before, after in zip(log.entered, log.entered[1:], strict=False)
            if before.lineage != after.lineage and after.how != "joined"
        ]
        # After a recovery ranks may come from several lineages: the checkpoint is of the newest.
        moves.sort(key=lambda move: move[0].generation)
        parents = {after.lineage: before.lineage for before, after in moves}
        limits = {after.lineage: after.step for _, after in moves}
        lineage, until = newest.lineage, math.inf
        while lineage not in self._until:
            self._until[lineage] = until
            if lineage not in parents:
                return
            lineage, until = parents[lineage], min(until, limits[lineage])

    def holds(self, entered: Entered | None, step: int) -> bool:
        return entered is None or step <= self._until.get(entered.lineage, -1)


def _all_entered(logs: Logs) -> Iterator[Entered]:
    return (entered for log in logs.values() for entered in log.entered)


def _newest(logs: Logs) -> Entered | None:
    entered = (log.member_of for log in logs.values() if log.member_of is not None)
    return max(entered, key=lambda entered: entered.generation, default=None)


def _logs_without_membership(logs: Logs) -> Logs:
    """Return the logs of a launch without membership, if that was the last launch."""
    newest = _newest(logs)
    plain = {rank: log for rank, log in logs.items() if log.member_of is None}
    if newest is None:
        return plain
    later = {rank: log for rank, log in plain.items() if is_number(at := log.start.get("time")) and at > newest.time}
    # One restarted rank that waits to join is not a launch.
    return later if set(range(_recorded_world_size(later))) <= later.keys() else {}


def _recorded_world_size(logs: Logs) -> int:
    sizes = (log.start.get("world_size") for log in logs.values())
    return next((size for size in sizes if isinstance(size, int) and 0 < size <= _MOST_RANKS), 0)


@dataclass(frozen=True)
class Changes:
    """All membership changes of a run and what they cost."""

    generations: int
    lineage: str | None
    recoveries: list[RecoveryRecord]
    notes: list[str]  # the agents' messages about pauses and abandoned lineages
    redone_steps: int
    abandoned_steps: int


def describe_changes(history: Sequence[GenerationSpan], commits: Sequence[Event], journals: Iterable[Event]) -> Changes:
    agent_events = list(journals)
    ledger = check_ledger(commits)
    standing = [span for span in history if span.stands]
    first_commits, texts = _first_commit_times(commits), _agent_texts(agent_events)
    recoveries = [
        RecoveryRecord(
            generation=str(span.generation),
            lineage=str(span.lineage),
            stands=span.stands,
            step=span.step,
            members=list(span.ids),
            seconds=_recovery_s(span, first_commits.get(span.generation)),
            text=texts.get(span.generation) or _describe_change(span, history[:place]),
        )
        for place, span in enumerate(history)
        if not span.is_first
    ]
    notes = [event for event in agent_events if event.get("event") in {"pause", "abandon"} and event.get("text")]
    notes.sort(key=lambda event: as_float(event.get("time"), 0.0))
    return Changes(
        generations=len(history) or 1,
        lineage=str(standing[-1].lineage) if standing else None,
        recoveries=recoveries,
        notes=list(dict.fromkeys(str(event["text"]) for event in notes)),
        redone_steps=ledger.redone,
        abandoned_steps=ledger.abandoned,
    )


def cost_sentence(recoveries: Sequence[RecoveryRecord], abandoned_steps: int, redone_steps: int) -> str:
    """Return the cost of all changes. Durations are not added up: concurrent lineages pause at the same time."""
    longest_s = max((recovery.seconds for recovery in recoveries if recovery.seconds is not None), default=None)
    parts = [
        "" if longest_s is None else f"a recovery took at most {longest_s:.1f} s until the next step was done",
        f"{pluralize(redone_steps, 'step')} had to be repeated" if redone_steps else "",
        f"{pluralize(abandoned_steps, 'step')} of abandoned lineages do not count" if abandoned_steps else "",
    ]
    costs = [part for part in parts if part]
    return f"The members changed {format_times(len(recoveries))}{': ' + join_words(costs) if costs else ''}."


def _recovery_s(span: GenerationSpan, committed_at: float | None) -> float | None:
    """Return the time from when the first rank stopped training until the next step was committed."""
    if committed_at is None:
        return None
    return round(max(committed_at - span.began_at, 0.0) + span.lost_s, 3)


def _describe_change(span: GenerationSpan, earlier: Sequence[GenerationSpan]) -> str:
    """Describe a change that no journal describes: compare with the generation before, of the same lineage if any."""
    same_lineage = [before for before in earlier if before.lineage == span.lineage]
    shared = [before for before in earlier if set(before.ids) & set(span.ids)]
    before = next(reversed(same_lineage or shared), None)
    previous_ids = set(before.ids) if before else set()
    left, joined = sorted(previous_ids - set(span.ids)), sorted(set(span.ids) - previous_ids)
    events = [f"{rank_names(left)} left" if left else "", f"{rank_names(joined)} joined" if joined else ""]
    what = " and ".join(event for event in events if event) or "an exchange failed"
    goes = "goes" if len(span.ids) == 1 else "go"
    return f"{what[0].upper()}{what[1:]}; {rank_names(sorted(span.ids))} {goes} on with step {span.step + 1}."


def _first_commit_times(commits: Sequence[Event]) -> dict[Ballot, float]:
    """Return when each generation committed its first step."""
    first_times: dict[Ballot, float] = {}
    for record in commits:
        generation = read_ballot(record.get("generation"))
        if "step" in record and generation is not None and is_number(record.get("time")):
            first_times[generation] = min(first_times.get(generation, math.inf), float(record["time"]))
    return first_times


def _agent_texts(agent_events: Iterable[Event]) -> dict[Ballot, str]:
    """Return the agents' sentence about each generation.

    Agents of one generation write the same sentence. A joining agent knows less and writes another one, so the most
    frequent sentence wins.
    """
    counts: dict[Ballot, Counter[str]] = {}
    for event in agent_events:
        generation = read_ballot(event.get("generation")) if event.get("generation") else None
        if event.get("event") == "announce" and generation is not None and event.get("text"):
            counts.setdefault(generation, Counter())[str(event["text"])] += 1
    return {generation: max(texts, key=lambda text: (texts[text], len(text))) for generation, texts in counts.items()}
