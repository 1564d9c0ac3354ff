"""Read the event files of a run folder while they grow: each byte once, in bounded memory, whatever their length.

A torn last line waits until its writer has ended it. A line that is not an event, or one of another rank than its
file's, is counted and skipped: a machine that joined may write anything into its own files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.events import Event, EventTail
from shoal.run_folder import RunFolder

# Of each file, before the others get their turn. Agents' files are small, and are read before those of the ranks.
_TURN_BYTES = 4 << 20
_RANK_TURN_BYTES = 1 << 18
# How long one call of `poll_in_turns` may read: a viewer of a long run sees the part that has been read.
_TURN_S = 0.4

# What a file records: a node's agent, a rank, samples of a node, the ledger, or the supervisor.
FileKind = Literal["agent", "rank", "samples", "commits", "supervisor"]


@dataclass
class EventFile:
    """One growing file, and how far it has been read."""

    path: Path
    kind: FileKind
    rank: int = -1  # -1 and an empty text where the file is of none
    node: str = ""
    foreign: int = 0  # events of another rank
    tail: EventTail = field(init=False)

    def __post_init__(self) -> None:
        self.tail = EventTail(self.path)

    def poll(self, most_bytes: int | None = None) -> list[Event]:
        """Return the events that were appended; with `most_bytes`, those of about this many."""
        events = self.tail.poll(most_bytes)
        if self.kind != "rank":
            return events
        own = [event for event in events if event["rank"] == self.rank]
        self.foreign += len(events) - len(own)
        return own

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


class RunTails:
    """The event files of one run, also those that appear later."""

    def __init__(
        self, run: RunFolder, *kinds: FileKind, most_ranks: int | None = None, find_every_s: float = 0.0
    ) -> None:
        self._run = run
        self._kinds = kinds
        self._most_ranks = most_ranks
        self._find_every_s = find_every_s
        self._found_at = -math.inf
        self._files: dict[Path, EventFile] = {}
        self.unread_bytes = 0  # after the last `poll_in_turns`
        self._size = 0

    def poll(self) -> Iterator[tuple[EventFile, list[Event]]]:
        """Yield what was appended to each file."""
        self._find_files()
        for file in self._files.values():
            if events := file.poll():
                yield file, events

    def poll_in_turns(self, last_step: Callable[[int], int]) -> Iterator[tuple[EventFile, list[Event]]]:
        """Yield what was appended in pieces, for at most `_TURN_S`, so that all ranks stay at about the same step.

        `last_step` returns the last step that the caller has received of a rank; -1 before any.
        """
        began = time.monotonic()
        self._find_files()
        sizes = {file.path: file.size() for file in self._files.values()}
        waiting = [
            file
            for file in self._files.values()
            if sizes[file.path] != file.tail.offset or file.tail.has_unfinished_line
        ]
        self.unread_bytes = sum(max(0, sizes[file.path] - file.tail.offset) for file in waiting)
        while waiting:
            slowest = min((last_step(file.rank) for file in waiting if file.kind == "rank"), default=0)
            for file in waiting:
                if file.kind != "rank":
                    yield file, file.poll(_TURN_BYTES)
                elif last_step(file.rank) <= slowest:
                    yield file, file.poll(_RANK_TURN_BYTES)
            waiting = [file for file in waiting if file.tail.offset < sizes[file.path]]
            if time.monotonic() - began > _TURN_S:
                break
        self._size = sum(sizes.values())
        self.unread_bytes = sum(max(0, sizes[file.path] - file.tail.offset) for file in waiting)

    def skip_to_end(self) -> None:
        """Skip the events that are there already."""
        self._find_files()
        for file in self._files.values():
            file.tail.skip_to_end()

    def restart(self) -> None:
        """Read all files from their start: after a power cut they may be shorter than what was read."""
        self._files.clear()

    @property
    def unreadable(self) -> int:
        """Lines that were skipped: no event, or not one of the file they are in."""
        return sum(file.tail.unreadable + file.foreign for file in self._files.values())

    @property
    def unfinished(self) -> int:
        """Files that end in half a line."""
        return sum(file.tail.has_unfinished_line for file in self._files.values())

    @property
    def loaded(self) -> float:
        """The part of a long run that has been read."""
        return 1 - self.unread_bytes / self._size if self.unread_bytes and self._size else 1.0

    def _find_files(self) -> None:
        now = time.monotonic()
        if now - self._found_at < self._find_every_s:
            return
        self._found_at = now
        for path, kind, rank, node in self._list_files():
            if kind in self._kinds and path not in self._files:
                self._files[path] = EventFile(path, kind, rank, node)

    def _list_files(self) -> Iterator[tuple[Path, FileKind, int, str]]:
        yield from ((path, "agent", -1, path.stem) for path in self._run.journals())
        for rank, path in list(self._run.event_files().items())[: self._most_ranks]:
            yield path, "rank", rank, ""
        yield from ((path, "samples", -1, path.stem) for path in sorted((self._run.path / "samples").glob("*.jsonl")))
        yield self._run.commits, "commits", -1, ""
        # The last one: it repeats what the agents wrote, and theirs is known by then.
        yield self._run.supervisor, "supervisor", -1, ""
