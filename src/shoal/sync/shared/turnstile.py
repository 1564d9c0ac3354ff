"""A barrier between processes of one machine that sleeps, has a deadline, and notices at once that a peer is gone.

Every rank has a socket to the first one: it sends a word when it has come and goes on when it gets one back. The kernel
closes the socket of a killed process, so nobody waits for it; a stopped one is given up after `timeout_s`. Sockets also
order memory: what a rank wrote before it sent its word is seen by whoever got the answer. A counter in shared memory
would not promise that from Python, and spinning on one takes the core that a peer computes on.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import NoReturn, Protocol

from shoal.errors import PeerLost

_HERE, _GO, _LOST, _SILENT = b"h", b"g", b"l", b"s"
# Who waits for the first rank lets it give up first: only that one knows who is missing.
_GRACE_S = 2.0
_MOST_BYTES = 16


class Turnstile(Protocol):
    def arrive(self) -> None:
        """Returns when everybody has come; raises PeerLost when somebody never will."""
        ...

    def close(self) -> None:
        """Whoever waits for us learns at once that we do not come."""
        ...


class FirstTurnstile:
    """`peers`: a connection to each of the others, by rank."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self._rank = rank
        self._peers = peers
        self._rank_of = {peer.fileno(): number for number, peer in peers.items()}
        self._timeout_s = timeout_s
        self._poll = select.poll()
        for peer in peers.values():
            self._poll.register(peer, select.POLLIN)

    def arrive(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(self._peers)
        while missing:
            came = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not came:
                self._give_up(_SILENT, min(missing))
            for fd, _ in came:
                self._hear(self._rank_of[fd])
                missing.discard(self._rank_of[fd])
        for rank in self._peers:
            self._let_through(rank)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _hear(self, rank: int) -> None:
        """A closed connection can be read, too: it has nothing to say."""
        said = b""
        with contextlib.suppress(OSError):
            said = self._peers[rank].recv(_MOST_BYTES)
        if not said:
            self._give_up(_LOST, rank)

    def _let_through(self, rank: int) -> None:
        try:
            self._peers[rank].send(_GO)
        except OSError:
            self._give_up(_LOST, rank)

    def _give_up(self, how: bytes, lost: int) -> NoReturn:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.send(how + str(lost).encode(), socket.MSG_DONTWAIT)
        self.close()
        raise _lost(self._rank, how, lost, self._timeout_s)


class OtherTurnstile:
    def __init__(self, rank: int, first_rank: int, first: socket.socket, timeout_s: float) -> None:
        self._rank = rank
        self._first_rank = first_rank
        self._first = first
        self._timeout_s = timeout_s
        first.settimeout(timeout_s + _GRACE_S)

    def arrive(self) -> None:
        try:
            self._first.send(_HERE)
            said = self._first.recv(_MOST_BYTES)
        except TimeoutError:
            said = _SILENT
        except OSError:
            said = _LOST
        if said != _GO:
            self.close()
            lost = int(said[1:]) if said[1:] else self._first_rank
            raise _lost(self._rank, said[:1], lost, self._timeout_s)

    def close(self) -> None:
        self._first.close()


class OpenTurnstile:
    """For a rank that is alone on its machine."""

    def arrive(self) -> None:
        pass

    def close(self) -> None:
        pass


def _lost(rank: int, how: bytes, lost: int, timeout_s: float) -> PeerLost:
    """In gloo's own words, by which a worker tells a consequence from a cause where torch hands on the text alone."""
    seen = f"Timed out waiting {timeout_s:g} s for" if how == _SILENT else "Connection closed by peer,"
    return PeerLost(
        f"rank {rank} lost a peer: {seen} rank {lost} on the same machine",
        why="it is stopped or hangs" if how == _SILENT else "it was killed or failed",
        fix=f"look at its log, rank-{lost}.log in the run folder",
    )
