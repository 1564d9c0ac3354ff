"""One node's agent, as its launcher sees it: told what to do, ended at last, alive or gone meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from shoal.cluster.link import Link
from shoal.cluster.node import Node
from shoal.events import Event, EventTail
from shoal.launch.found import is_running
from shoal.launch.orders import END, to_line


@dataclass
class Post:
    """One node's agent, as its journal shows it. `since`: when it was seen to have ended without saying so. `lost`: how
    another agent lost it. `finished`: another agent heard that all its ranks have ended well. `left`:
    we stopped waiting for it. `again`: the process of its agent's later life, which is no child of ours; 0 when
    it cannot be seen from here."""

    node: Node
    link: Link
    tail: EventTail
    ready: Event | None = None
    started: bool = False
    done: bool = False
    since: float | None = None
    lost: str = ""
    finished: bool = False
    left: bool = False
    again: int | None = None

    def is_busy(self) -> bool:
        """Whether it may still have something for us."""
        return not self.left and self.gone() is None and (not self.done or self.link.is_reachable())

    def gone(self) -> str | None:
        """How it left us, if it did: by its own end, or by what the others say of a machine we cannot reach either."""
        if self.again is not None:
            return None if is_running(self.again) else "its agent, which had been started again, ended"
        how = self.link.ended()
        return self.lost if how is None and self.lost and not self.link.is_reachable() else how

    def tell(self, wish: str) -> None:
        """Two signals at once are the wish to end; see `Agent._on_signal`."""
        self.link.send(to_line(wish))
        if self.again is not None and is_running(self.again):
            for signum in (signal.SIGINT, signal.SIGTERM)[: 2 if wish == END else 1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.again, signum)

    def end(self) -> None:
        if self.link.ended() is None:
            self.link.kill()
        self.link.close()
        if self.again is not None and is_running(self.again):
            os.kill(self.again, signal.SIGKILL)
