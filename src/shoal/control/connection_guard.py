"""Limit the connections that have not proved to know the token, and log the refused ones without flooding the log.

A new connection is pending until its handshake succeeds. Pending connections are few, in all and per address; when the
limit is reached the oldest one is closed, because a member finishes its handshake within milliseconds while an idle
connection stays. An address that failed often is blocked for some seconds, unless a member is expected from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.control.channel import Channel, accept
from shoal.errors import ControlError, UnknownSender
from shoal.host.facts import boot_clock


@dataclass(frozen=True)
class GuardLimits:
    max_pending: int = 256
    # An event loop may accept a hundred connections before it serves any of them: the limit of one address is higher,
    # so that a burst does not close a member's connection.
    max_pending_per_address: int = 128
    failures: int = 8  # of one address within `window_s` block it for `blocked_s`
    blocked_s: float = 5.0
    window_s: float = 60.0
    max_addresses: int = 16  # counted separately within a window; all further ones are counted as one


@dataclass(eq=False)
class PendingConnection:
    address: str
    abort: Callable[[], None] = field(repr=False)


class ConnectionGuard:
    """Pure: the caller passes the clock and closes the connections."""

    def __init__(
        self, note: Callable[[str], None], clock: Callable[[], float], limits: GuardLimits | None = None
    ) -> None:
        self._note = note
        self._clock = clock
        self._limits = limits or GuardLimits()
        self._pending: dict[PendingConnection, None] = {}  # oldest first
        self._expected: frozenset[str] = frozenset()
        self._blocked_until: dict[str, float] = {}
        self._window_began = clock()
        self._failed: Counter[str] = Counter()
        self._unlogged: Counter[str] = Counter()
        self._unlogged_others = 0

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def expect(self, addresses: Iterable[str]) -> None:
        """Never block these addresses: members connect from them."""
        self._expected = frozenset(addresses)

    def knock(self, address: str, abort: Callable[[], None]) -> PendingConnection | None:
        """Register a new connection, or return None: close it. `abort` is called when another one needs its place."""
        self.look()
        if address not in self._expected and self._clock() < self._blocked_until.get(address, 0.0):
            self._count(address)
            return None
        same_address = [pending for pending in self._pending if pending.address == address]
        if len(same_address) >= self._limits.max_pending_per_address:
            self._evict(same_address[0])
        elif len(self._pending) >= self._limits.max_pending:
            # The oldest from where no member is expected; if there is none, the oldest.
            unexpected = (pending for pending in self._pending if pending.address not in self._expected)
            self._evict(next(unexpected, next(iter(self._pending))))
        pending = PendingConnection(address, abort)
        self._pending[pending] = None
        return pending

    def admit(self, pending: PendingConnection) -> None:
        self._pending.pop(pending, None)

    def refuse(self, pending: PendingConnection, why: str) -> None:
        """Count and log a failed handshake; once, also if the connection was evicted before."""
        if pending in self._pending:
            del self._pending[pending]
            self._fail(pending.address, why)

    def look(self) -> None:
        """At the end of a window, log how many refused connections were not logged, and begin a new window."""
        if self._clock() - self._window_began < self._limits.window_s:
            return
        self.sum_up()
        self._window_began = self._clock()
        self._failed.clear()
        self._blocked_until.clear()

    def sum_up(self) -> None:
        """Log the number of refused connections that were not logged."""
        seconds = self._clock() - self._window_began
        for address, count in self._unlogged.items():
            self._note(f"refused {count} more connections from {address} in {seconds:.0f} s")
        if self._unlogged_others:
            self._note(f"refused {self._unlogged_others} connections from other addresses in {seconds:.0f} s")
        self._unlogged.clear()
        self._unlogged_others = 0

    def _evict(self, pending: PendingConnection) -> None:
        del self._pending[pending]
        self._fail(pending.address, "its handshake was slow, and others were waiting")
        pending.abort()

    def _fail(self, address: str, why: str) -> None:
        is_first = self._failed[address] == 0 and len(self._failed) < self._limits.max_addresses
        if is_first:
            self._note(f"refused a connection from {address}: {why}")
        self._count(address, is_logged=is_first)
        if self._failed[address] and self._failed[address] % self._limits.failures == 0:
            self._blocked_until[address] = self._clock() + self._limits.blocked_s

    def _count(self, address: str, is_logged: bool = False) -> None:
        """Count a refused connection, of a limited number of addresses: an attacker's network must not fill memory."""
        if address not in self._failed and len(self._failed) >= self._limits.max_addresses:
            self._unlogged_others += 1
            return
        self._failed[address] += 1
        if not is_logged:
            self._unlogged[address] += 1


def make_connection_guard(note: Callable[[str], None]) -> ConnectionGuard:
    return ConnectionGuard(note, boot_clock)


async def accept_connection(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: str,
    guard: ConnectionGuard,
    unknown: str = "",
) -> Channel | None:
    """Return a channel to a peer that knows the token; close, count and log any other connection.

    `unknown` is the reason to log for a peer that has another token, where the token is one that a person types.
    """
    # A connection that is already gone has no address.
    address = str((writer.get_extra_info("peername") or ("nowhere",))[0])
    # Not `close`: that would wait until the peer has read everything.
    pending = guard.knock(address, writer.transport.abort)
    if pending is None:
        writer.transport.abort()
        return None
    try:
        channel = await accept(reader, writer, token)
    except (ControlError, OSError, EOFError) as error:
        if isinstance(error, UnknownSender) and unknown:
            why = unknown
        elif isinstance(error, ControlError):
            why = error.seen
        else:
            is_late = isinstance(error, TimeoutError)
            why = "its handshake took too long" if is_late else "it left in the middle of the handshake"
        guard.refuse(pending, why)
        writer.close()
        return None
    except BaseException:
        guard.refuse(pending, "the handshake was cancelled")
        writer.transport.abort()
        raise
    guard.admit(pending)
    return channel
