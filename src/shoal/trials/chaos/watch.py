"""Reads a run folder as it grows: ranks, agents, ledger and keeper."""

from __future__ import annotations

from pathlib import Path

from shoal.events import Event, EventTail
from shoal.runfolder import RunFolder
from shoal.trials.chaos.record import Record


class Watch:
    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tails: dict[Path, EventTail] = {}
        self.record = Record()
        self.furthest_step = 0

    def begin_again(self) -> None:
        """After a power cut: files may be shorter than what was read of them, and are read from their start."""
        self._tails.clear()
        self.record.ranks, self.record.agents, self.record.commits, self.record.keeper = [], [], [], []
        self.furthest_step = 0

    def poll(self) -> None:
        for path in self._run.event_files().values():
            news = self._news(path)
            self.record.ranks += news
            steps = (int(event["step"]) for event in news if event.get("event") == "step")
            self.furthest_step = max(self.furthest_step, *steps, 0)
        for path in self._run.journals():
            self.record.agents += [{**event, "node": event.get("node", path.stem)} for event in self._news(path)]
        self.record.commits += self._news(self._run.commits)
        self.record.keeper += self._news(self._run.keeper)

    @property
    def ended(self) -> Event | None:
        """The keeper's last word of the newest launch; none while it keeps."""
        last = self.record.keeper[-1] if self.record.keeper else {}
        return last if last.get("event") == "ended" else None

    def _news(self, path: Path) -> list[Event]:
        return self._tails.setdefault(path, EventTail(path)).poll()
