"""One machine that joined: what it needs goes to it, what it writes comes here, and nothing makes it run anything.

It plans and starts its own ranks. Of our orders it is told only who takes part, which is what it cannot know.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cluster.keeping import PIECE_BYTES, Homecoming, Refusals, read_piece
from shoal.control.channel import Channel, Message
from shoal.control.token import seal
from shoal.errors import ControlError, from_dict


@dataclass
class Guest:
    """A `Link` to a machine that came by itself. `code` is the one it came with, and is of no use to anybody else."""

    name: str
    address: str
    # The address that its connection comes from, which it cannot choose, and the user name that it claims.
    peer: str
    user: str
    cores: int
    channel: Channel
    code: str
    loop: asyncio.AbstractEventLoop
    _ended: str | None = None
    _reachable: bool = True
    _listening: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        """For the host's owner. The user is what the other machine claims."""
        elsewhere = "" if self.peer == self.address else f", connected from {self.peer}"
        return f"{self.name} ({self.address}{elsewhere}; it says its user is {self.user})"

    async def provide(self, texts: Mapping[str, str], files: Mapping[str, Path], late: bool = False) -> None:
        """Until the machine has everything, and has checked it. `late`: the run goes on already."""
        sizes = {name: path.stat().st_size for name, path in files.items()}
        welcome = {"type": "welcome", "node": self.name, "texts": dict(texts), "files": sizes, "late": late}
        await self.channel.send(welcome)
        answer = await self.channel.receive()
        wanted = answer.get("need")
        for name in [name for name in files if isinstance(wanted, list) and name in wanted]:
            await self._send_file(name, files[name])
        if answer.get("type") == "need":
            answer = await self.channel.receive()
        if answer.get("type") != "prepared":
            raise from_dict(answer) if "seen" in answer else ControlError(f"{self.name} went away while it prepared")

    async def _send_file(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                await self.channel.send({"type": "piece", "path": name, "data": base64.b64encode(piece).decode()})

    def listen(self, run: Path, ranks: Collection[int], note: Callable[[str], None]) -> None:
        """Keep what it sends of its own journal, logs and `ranks`. Anything else is refused, noted and left out."""
        home = Homecoming(run, self.name, ranks)
        home.start({})
        self._listening = asyncio.run_coroutine_threadsafe(self._take_home(home, Refusals(note)), self.loop)

    async def _take_home(self, home: Homecoming, refusals: Refusals) -> None:
        spoke = False
        try:
            while (message := await self.channel.receive()).get("type") != "end":
                try:
                    path, offset, piece = read_piece(message, self.name)
                    home.keep(path, offset, piece)
                    spoke = True
                except ControlError as error:
                    refusals.add(str(message.get("path"))[:100], error)
            self._ended = "its agent ended"
        except Exception as error:
            # Gone, or talking nonsense. Its agent may well go on, and the others hear its heart, once it has begun.
            self._reachable = False
            if not spoke:
                self._ended = f"it left before the run began ({type(error).__name__})"

    def send(self, line: bytes) -> None:
        """Of an order, who it is and whom it meets. Wishes reach its agent through the other agents."""
        order = json.loads(line)
        if "Meet" in order:
            meet = order["Meet"]
            told = {name: meet[name] for name in ("node", "member", "launch", "launched_at")}
            self._tell({"type": "meet", **told, "sealed": seal(meet["token"], self.code)})
        elif "Go" in order:
            resume = any("--resume" in start["argv"] for start in order["Go"]["starts"])
            told = {name: order["Go"][name] for name in ("roster", "members")}
            self._tell({"type": "roster", "resume": resume, **told})

    def _tell(self, message: Message) -> None:
        asyncio.run_coroutine_threadsafe(self.channel.send(message), self.loop)

    def ended(self) -> str | None:
        return self._ended

    def is_reachable(self) -> bool:
        return self._reachable

    def kill(self) -> None:
        self.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.channel.close)
