"""Where an agent is listened to: at the address of its launch, and where its machine came to be later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Welcome = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listeners:
    """`is_ours`: whether this machine has an address."""

    def __init__(self, welcome: Welcome, is_ours: Callable[[str], bool]) -> None:
        self._welcome = welcome
        self._is_ours = is_ours
        self._servers: list[asyncio.Server] = []
        self._moving = asyncio.Lock()
        self.address = ""
        self.port = 0

    async def open(self, address: str, port: int = 0) -> None:
        """On this one address; the port is the kernel's choice, unless a certain one is wanted and free."""
        try:
            server = await asyncio.start_server(self._welcome, address, port)
        except OSError:
            if not port:
                raise
            server = await asyncio.start_server(self._welcome, address, 0)
        self._servers.append(server)
        self.address, self.port = address, server.sockets[0].getsockname()[1]

    def are_lost(self) -> bool:
        """The machine woke in another network, or its router gave it another address."""
        return bool(self.address) and not self._is_ours(self.address)

    async def follow_to(self, address: str) -> bool:
        """Listens there too, if the address we had is not ours any more."""
        async with self._moving:
            if not self.are_lost():
                return False
            await self.open(address)
            return True

    def close(self) -> None:
        for server in self._servers:
            server.close()
