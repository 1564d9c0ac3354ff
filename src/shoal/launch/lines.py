"""The agent's end of one rank's line: what `control.rankline` says, over a socket that the rank inherits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from shoal.control.rankline import LENGTH, MOST_BYTES, ToAgent, ToRank, read_to_agent, to_frame
from shoal.errors import ControlError

# A rank that reads nothing is frozen or about to be ended: leases for it need not pile up.
_MOST_UNREAD = 64 << 10


class RankLine:
    def __init__(self, ours: socket.socket, hear: Callable[[ToAgent], None], refuse: Callable[[str], None]) -> None:
        self._socket = ours
        self._hear = hear
        self._refuse = refuse
        self._unsent: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None

    async def listen(self) -> None:
        """Until the rank closes its end. One that says what we don't understand is refused."""
        reader, writer = await asyncio.open_connection(sock=self._socket)
        self._writer = writer
        for frame in self._unsent:
            writer.write(frame)
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._hear(read_to_agent(await _read_frame(reader)))
        except ControlError as error:
            self._refuse(error.seen)
        finally:
            writer.close()

    def say(self, message: ToRank) -> None:
        frame = to_frame(message)
        if self._writer is None:
            self._unsent.append(frame)
        elif not self._writer.is_closing() and self._writer.transport.get_write_buffer_size() < _MOST_UNREAD:
            self._writer.write(frame)


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if size > MOST_BYTES:
        raise ControlError(f"a rank's message of {size} bytes", why="the stream is broken")
    return await reader.readexactly(size)
