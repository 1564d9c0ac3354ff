"""Who is here, silent or gone, by what we heard and when. The clock is handed in: CLOCK_BOOTTIME in production."""

from __future__ import annotations

from enum import Enum

from shoal.control.membership.rules import Rules


class Standing(Enum):
    """`GONE`: its agent's connection closed right after a heartbeat; that it said so itself is known elsewhere.
    `SILENT`: nothing was heard, which a cable, a closed lid and a long pause all look like."""

    HERE = "here"
    SILENT = "silent"
    GONE = "gone"


class Watch:
    def __init__(self, rules: Rules, now: float) -> None:
        self._rules = rules
        self._now = now
        # As if we had always been awake: nothing has happened yet that we could have missed.
        self._awake_since = now - rules.silent_after_s
        self._heard_at: dict[int, float] = {}
        self._gone: set[int] = set()

    def note(self, now: float) -> bool:
        """Every input begins with this; whether we have just woken up. After a gap in our own time we know nothing of
        the others: everybody gets a fresh grace, or a woken machine would take its live peers for silent ones."""
        was_away = now - self._now > self._rules.away_after_s
        if was_away:
            self._awake_since = now
            self._heard_at = dict.fromkeys(self._heard_at, now)
        self._now = now
        return was_away

    def awake_s(self) -> float:
        """What arrives right after waking was said while we slept."""
        return self._now - self._awake_since

    def expect(self, member: int) -> None:
        """Its time to be heard of begins now, unless we heard of it before."""
        self._heard_at.setdefault(member, self._now)

    def heard(self, member: int) -> None:
        self._heard_at[member] = self._now
        self._gone.discard(member)

    def closed(self, member: int) -> None:
        """Only a closing right after a heartbeat proves anything, and not to somebody who has just woken up: peers that
        gave it up closed their connections while it slept, and are all alive."""
        heard_at = self._heard_at.get(member, float("-inf"))
        settled = self.awake_s() >= self._rules.silent_after_s
        if settled and self._now - heard_at <= self._rules.closed_within_s:
            self._gone.add(member)

    def standing(self, member: int) -> Standing:
        if member in self._gone:
            return Standing.GONE
        heard_at = self._heard_at.get(member)
        if heard_at is None or self._now - heard_at > self._rules.silent_after_s:
            return Standing.SILENT
        return Standing.HERE

    def silent_s(self, member: int) -> float:
        return self._now - self._heard_at.get(member, self._now)
