"""What happened each time somebody came or went, and what it cost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.config.manifest import RecoveryRecord
from shoal.control.membership.generation import Ballot
from shoal.events import Event
from shoal.report.ballots import read_ballot
from shoal.report.ledger import check_ledger
from shoal.report.membership import Stretch
from shoal.report.ranklog import is_number
from shoal.report.wording import count, join, times


@dataclass(frozen=True)
class Changes:
    """`notes` are what the agents said beside the recoveries' own sentences: of pauses, and of lineages given up."""

    generations: int
    lineage: str | None
    recoveries: list[RecoveryRecord]
    notes: list[str]
    redone_steps: int
    abandoned_steps: int


def describe_changes(history: Sequence[Stretch], commits: Sequence[Event], journals: Iterable[Event]) -> Changes:
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
    history: Sequence[Stretch], first_commits: dict[Ballot, float], sentences: dict[Ballot, str]
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


def _seconds(stretch: Stretch, committed_at: float | None) -> float | None:
    """From when the first of its ranks stopped training to when the next step was done."""
    if committed_at is None:
        return None
    return round(max(committed_at - stretch.began_at, 0.0) + stretch.lost_s, 3)


def _before(stretch: Stretch, earlier: Sequence[Stretch]) -> Stretch | None:
    """What its ranks were in before: of its own lineage, if there is one."""
    kin = [each for each in earlier if each.lineage == stretch.lineage]
    shared = [each for each in earlier if set(each.ids) & set(stretch.ids)]
    return next(reversed(kin or shared), None)


def _own_sentence(stretch: Stretch, before: Stretch | None) -> str:
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
