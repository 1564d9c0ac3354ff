"""The events of an agent's journal: what is written is read back, and the checks of `events` know the same fields."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.control.agent_events import (
    AgentEvent,
    AgentReady,
    AgentRefused,
    ErrorEvent,
    MembershipAnnounced,
    RankEnded,
    SessionBegan,
    read_agent_event,
)
from shoal.errors import RunFailed
from shoal.event_schema import AGENT_EVENTS
from shoal.events import EventLog, EventTail

EVENTS = [
    SessionBegan(),
    RankEnded("rank-0", -9, by_agent=False, out_of_memory=True),
    MembershipAnnounced(None, "text"),
    AgentReady("node1", "10.0.0.1", "m", 7, 4711, None, "eth0", 4, None, False, 8_000_000_000, 0, 12),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_is_read_back_as_it_was_written(event: AgentEvent, tmp_path: Path) -> None:
    path = tmp_path / "agents/node1.jsonl"
    log = EventLog(path, 3)
    log.write(event.kind, launch="L", **event.to_fields())
    log.close()
    [record] = EventTail(path).poll()
    assert read_agent_event(record) == event
    assert list(record) == ["event", "rank", "time", "launch", *event.to_fields()]


def test_an_error_is_read_back_as_the_same_class() -> None:
    event = AgentRefused(RunFailed("seen", why="why", fix="fix"))
    record = json.loads(json.dumps({"event": event.kind, **event.to_fields()}))
    read = read_agent_event(record)
    assert isinstance(read, AgentRefused)
    assert isinstance(read.error, RunFailed)
    assert read.error.as_dict() == event.error.as_dict()


def test_an_unknown_event_is_ignored() -> None:
    assert read_agent_event({"event": "something-new", "text": 7}) is None


def test_the_checks_of_a_journal_know_only_events_and_fields_that_agents_write() -> None:
    for kind, checks in AGENT_EVENTS.items():
        cls = AgentEvent.kinds[kind]
        known = {"seen", "why", "fix"} if issubclass(cls, ErrorEvent) else {field.name for field in fields(cls)}
        # Pauses and abandoned lineages have no generation; readers may ask for one.
        assert checks.keys() - {"generation"} <= known, kind
