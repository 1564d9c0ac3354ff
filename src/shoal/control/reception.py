"""How a port of ours receives whoever connects: past the doorkeeper, then the greeting, and no word to a stranger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.control.channel import Channel, accept
from shoal.control.doorkeeper import Doorkeeper
from shoal.control.machine import boot_clock
from shoal.errors import ControlError


def doorkeeper(note: Callable[[str], None]) -> Doorkeeper:
    return Doorkeeper(note, boot_clock)


async def receive(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, door: Doorkeeper
) -> Channel | None:
    """A channel to one who knows the token; anybody else is closed, counted, and spoken of once."""
    # A connection that is already gone again has no address.
    address = str((writer.get_extra_info("peername") or ("nowhere",))[0])
    # Not `close`: that would wait for what the stranger never reads.
    knock = door.knock(address, writer.transport.abort)
    if knock is None:
        writer.transport.abort()
        return None
    try:
        channel = await accept(reader, writer, token)
    except (ControlError, OSError, EOFError) as error:
        door.refuse(knock, _why(error))
        writer.close()
        return None
    except BaseException:
        door.refuse(knock, "the greeting was broken off")
        writer.transport.abort()
        raise
    door.admit(knock)
    return channel


def _why(error: Exception) -> str:
    if isinstance(error, ControlError):
        return error.seen
    return "it did not greet in time" if isinstance(error, TimeoutError) else "it left in the middle of the greeting"
