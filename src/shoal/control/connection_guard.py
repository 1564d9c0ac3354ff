"""Who may greet at a port of ours, and what is said of those who were refused. Pure: the clock is the caller's.

Whoever connects takes a place until it has proved that it knows the token. Places are few, in all and per address, and
when they are taken the one that has waited longest gives way: a member greets within milliseconds, an idle connection
sits. An address that failed often is not heard for some seconds, unless a member is expected from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.control.channel import Channel, accept
from shoal.errors import ControlError
from shoal.host.facts import boot_clock


@dataclass(frozen=True)
class GuardLimits:
    """`failures` of one address within `window_s` shut it out for `shut_s`. `named` addresses are told apart in a
    window; a network that brings more of them is counted as one. An event loop may take in a hundred connections
    before it hears any of them out: an address has more places than that, so that no burst drives out a member."""

    places: int = 256
    places_per_address: int = 128
    failures: int = 8
    shut_s: float = 5.0
    window_s: float = 60.0
    named: int = 16


@dataclass(eq=False)
class PendingConnection:
    """One connection that has proved nothing yet."""

    address: str
    turn_away: Callable[[], None] = field(repr=False)


class ConnectionGuard:
    def __init__(
        self, note: Callable[[str], None], clock: Callable[[], float], rules: GuardLimits | None = None
    ) -> None:
        self._note = note
        self._clock = clock
        self._rules = rules or GuardLimits()
        self._waiting: dict[PendingConnection, None] = {}  # in the order of their coming
        self._expected: frozenset[str] = frozenset()
        self._shut_until: dict[str, float] = {}
        self._window_began = clock()
        self._failed: Counter[str] = Counter()
        self._unsaid: Counter[str] = Counter()
        self._unsaid_others = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def expect(self, addresses: Iterable[str]) -> None:
        """From these members come; what else happens there does not shut them out."""
        self._expected = frozenset(addresses)

    def knock(self, address: str, turn_away: Callable[[], None]) -> PendingConnection | None:
        """A place for one greeting, or None: close it. `turn_away` is called when the place is needed by another."""
        self.look()
        if address not in self._expected and self._clock() < self._shut_until.get(address, 0.0):
            self._count(address)
            return None
        neighbours = [knock for knock in self._waiting if knock.address == address]
        if len(neighbours) >= self._rules.places_per_address:
            self._give_way(neighbours[0])
        elif len(self._waiting) >= self._rules.places:
            self._give_way(self._least_welcome())
        knock = PendingConnection(address, turn_away)
        self._waiting[knock] = None
        return knock

    def admit(self, knock: PendingConnection) -> None:
        self._waiting.pop(knock, None)

    def refuse(self, knock: PendingConnection, why: str) -> None:
        """Also for one that was turned away before; it is counted once."""
        if knock in self._waiting:
            del self._waiting[knock]
            self._fail(knock.address, why)

    def look(self) -> None:
        """At the end of a window, says how many more were refused than were spoken of."""
        if self._clock() - self._window_began < self._rules.window_s:
            return
        self.sum_up()
        self._window_began = self._clock()
        self._failed.clear()
        self._shut_until.clear()

    def sum_up(self) -> None:
        seconds = self._clock() - self._window_began
        for address, count in self._unsaid.items():
            self._note(f"refused {count} more connections from {address} in {seconds:.0f} s")
        if self._unsaid_others:
            self._note(f"refused {self._unsaid_others} connections from other addresses in {seconds:.0f} s")
        self._unsaid.clear()
        self._unsaid_others = 0

    def _least_welcome(self) -> PendingConnection:
        """The longest waiting one from where nobody is expected; among members' addresses, simply the longest."""
        return next(
            (knock for knock in self._waiting if knock.address not in self._expected), next(iter(self._waiting))
        )

    def _give_way(self, knock: PendingConnection) -> None:
        del self._waiting[knock]
        self._fail(knock.address, "it was slow to greet, and others were waiting")
        knock.turn_away()

    def _fail(self, address: str, why: str) -> None:
        first = self._failed[address] == 0 and len(self._failed) < self._rules.named
        if first:
            self._note(f"refused a connection from {address}: {why}")
        self._count(address, is_said=first)
        if self._failed[address] and self._failed[address] % self._rules.failures == 0:
            self._shut_until[address] = self._clock() + self._rules.shut_s

    def _count(self, address: str, is_said: bool = False) -> None:
        """Only so many addresses are told apart: whoever has a whole network must not fill our memory."""
        if address not in self._failed and len(self._failed) >= self._rules.named:
            self._unsaid_others += 1
            return
        self._failed[address] += 1
        if not is_said:
            self._unsaid[address] += 1


# SECTION control/reception
# How a port of ours receives whoever connects: past the connection_guard, then the greeting, and no word to a stranger.


def connection_guard(note: Callable[[str], None]) -> ConnectionGuard:
    return ConnectionGuard(note, boot_clock)


async def receive(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str, door: ConnectionGuard
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
