"""How a rank's machine fares, by the kernel's own counters: processor time it was refused, and its connections.

Looked at every few steps and told to the others with the next one's figures: a few numbers, no exchange of their own.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.sync.sockets import own_sockets

# struct tcp_info of linux/tcp.h, as far as it is read: bytes_acked; busy_time and rwnd_limited in µs; bytes_sent and
# bytes_retrans. Kernels since 4.19 have them all.
_TCP_INFO = struct.Struct("@120x Q 40x Q Q 16x Q Q")
# The kernel counts busy time in ticks of up to 10 ms: a rate is a lower bound by this much, and slow is only who was
# busy for long.
_TICK_US = 12_000
_BUSY_US = 40_000
# Small messages wait for answers, not for the link; and of little, what was lost is luck.
_LEAST_BYTES = 1 << 16
_LEAST_SENT = 1 << 19
_LEAST_RESENT = 1 << 13
# Losses come in bursts: they are counted over so many looks.
_LOOKS = 10


@dataclass(frozen=True)
class Vitals:
    """`starved`: the part of the time for which the rank's thread wanted a processor and had none. `best_bps`: what the
    best of its connections carried at least. The slowest and the lossiest of the peers it sends to, each with its
    address; 0 where there is nothing to say. Addresses are IPv4's, as numbers."""

    starved: float = 0.0
    address: float = 0.0
    best_bps: float = 0.0
    slow_peer: float = 0.0
    slow_bps: float = 0.0
    lossy_peer: float = 0.0
    resent: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        return astuple(self)


class _Sent(NamedTuple):
    """Of one connection, or of all to one peer: counted by the kernel since it was made. `full_us` of `busy_us` the
    other side had no room for more: that is not the link's fault."""

    acked: int = 0
    busy_us: int = 0
    full_us: int = 0
    sent: int = 0
    resent: int = 0

    def plus(self, other: _Sent) -> _Sent:
        return _Sent(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))

    def minus(self, other: _Sent) -> _Sent:
        return _Sent(*(ours - theirs for ours, theirs in zip(self, other, strict=True)))


class Kernel:
    """Asked by the thread that trains: it is this one's waiting that counts."""

    def __init__(self) -> None:
        self._connections: dict[int, _Sent] = {}
        self._last: deque[dict[int, _Sent]] = deque(maxlen=_LOOKS)
        self._delay_s, self._at = _run_delay_s(), time.perf_counter()
        self._address = 0
        self.look()

    def look(self) -> Vitals:
        """Since the last look."""
        delay_s, at = _run_delay_s(), time.perf_counter()
        starved = (delay_s - self._delay_s) / (at - self._at) if at > self._at else 0.0
        self._delay_s, self._at = delay_s, at
        self._last.append(self._since_last())
        news = self._last[-1]
        best_bps = max((_bps(sent.acked, sent.busy_us) for sent in news.values()), default=0.0)
        slow_peer, slow_bps = _slowest(news)
        lossy_peer, resent = _lossiest(self._last)
        return Vitals(
            starved=min(max(starved, 0.0), 1.0),
            address=self._address,
            best_bps=best_bps,
            slow_peer=slow_peer,
            slow_bps=slow_bps,
            lossy_peer=lossy_peer,
            resent=resent,
        )

    def _since_last(self) -> dict[int, _Sent]:
        """By peer. A connection that is new has all of its counters' time since the last look."""
        before, self._connections = self._connections, {}
        news: dict[int, _Sent] = {}
        for inode, own, peer, sent in _connections():
            self._connections[inode], self._address = sent, own
            news[peer] = news.get(peer, _Sent()).plus(sent.minus(before.get(inode, _Sent())))
        return news


def _bps(acked: int, busy_us: int) -> float:
    """At least."""
    return 8e6 * acked / (busy_us + _TICK_US)


def _slowest(news: dict[int, _Sent]) -> tuple[int, float]:
    rates = {
        peer: _bps(sent.acked, sent.busy_us - sent.full_us)
        for peer, sent in news.items()
        if sent.acked >= _LEAST_BYTES and sent.busy_us - sent.full_us >= _BUSY_US
    }
    peer = min(rates, key=lambda each: rates[each], default=0)
    return peer, rates.get(peer, 0.0)


def _lossiest(looks: deque[dict[int, _Sent]]) -> tuple[int, float]:
    total: dict[int, _Sent] = {}
    for news in looks:
        for peer, sent in news.items():
            total[peer] = total.get(peer, _Sent()).plus(sent)
    enough = {peer: sent for peer, sent in total.items() if sent.sent >= _LEAST_SENT and sent.resent >= _LEAST_RESENT}
    shares = {peer: sent.resent / sent.sent for peer, sent in enough.items()}
    peer = max(shares, key=lambda each: shares[each], default=0)
    return peer, shares.get(peer, 0.0)


def _connections() -> Iterator[tuple[int, int, int, _Sent]]:
    """This process's own to other machines: inode, own address, peer's address, what it sent. Linux alone counts so."""
    if sys.platform != "linux":
        return
    for inode, found in own_sockets():
        with suppress(OSError, struct.error):
            if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                own, peer = found.getsockname()[0], found.getpeername()[0]
                if own != peer:
                    yield inode, _number(own), _number(peer), _sent(found)


def _sent(connection: socket.socket) -> _Sent:
    return _Sent(*_TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)))


def _number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address))


def _run_delay_s() -> float:
    """How long this thread has waited for a processor; 0 where the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
