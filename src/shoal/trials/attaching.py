"""Joining a run in the middle: what it has said that still matters, then everything new, to its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from shoal.config.load import load_config
from shoal.events import RANK_EVENTS, Event, parse_event
from shoal.launch.found import Found, find_keeper, is_alive
from shoal.launch.logs import LogFollower
from shoal.report.membership import last_members
from shoal.report.ranklog import collect
from shoal.runfolder import RunFolder
from shoal.trials.following import POLL_S, Keeping, RunNews
from shoal.trials.scripts import Display
from shoal.trials.training import MakeDisplay

_ENTERED = b'{"event":"membership"'
_OPENING = (b'{"event":"start"', b'{"event":"shard"', _ENTERED)


def attach_training(run: RunFolder, watch: MakeDisplay) -> None:
    """Raises what the run says went wrong. A run that is over already is told the same way."""
    config = load_config(run.config)
    keeping, keeper = Keeping(run), find_keeper(run.path)
    news = RunNews(run)
    with contextlib.closing(watch(config)) as display:
        display(opening(run))
        for notes in _until_over(keeping, keeper):
            display([*notes, *news.poll()])
    keeping.raise_error()


def attach_script(run: RunFolder, display: Display) -> None:
    keeping, keeper = Keeping(run), find_keeper(run.path)
    logs = LogFollower(run, shows_current=display.is_live)
    with contextlib.closing(display):
        for notes in _until_over(keeping, keeper):
            for note in notes:
                display.note(note["text"])
            display.lines(logs.poll(), logs.current())
        display.lines(logs.last_words())
    keeping.raise_error()


def _until_over(keeping: Keeping, keeper: Found | None) -> Iterator[list[Event]]:
    """The keeper's notes, look by look; once more after its end."""
    while keeper is not None and is_alive(keeper):
        yield keeping.poll()
        time.sleep(POLL_S)
    yield keeping.poll()


def opening(run: RunFolder) -> list[Event]:
    """How the newest launch began on each rank that takes part: what it is, its part of the data, who is with it."""
    events = [event for rank in run.event_files() for event in _opening_of(run, rank)]
    members = last_members(collect(events))
    return [event for event in events if event["rank"] in members]


def _opening_of(run: RunFolder, rank: int) -> list[Event]:
    found: list[Event] = []
    previous = b""
    with contextlib.suppress(FileNotFoundError), run.events(rank).open("rb") as file:
        for line in file:
            # Picked before they are parsed: there may be a million steps in between.
            if line.startswith(_OPENING) and (event := parse_event(line, RANK_EVENTS)) is not None:
                found = [*_kept(found, event, previous.startswith(_ENTERED)), event]
            previous = line
    return found


def _kept(before: list[Event], event: Event, named_first: bool) -> list[Event]:
    """What still holds of what a rank has said: a new process begins anew, and may have named its generation just
    before; of several generations the last counts."""
    match event["event"]:
        case "start":
            return before[-1:] if named_first else []
        case "membership":
            return [each for each in before if each["event"] != "membership"]
        case _:
            return before
