"""What a rank knows of one step's gradient exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommTimes:
    """One step's gradient exchange as this rank saw it.

    `ready_at`: when the last gradient was computed and only communication was left (perf_counter).
    `tail_s`: how long backward went on after that. `wait_s`: the part known to be waiting for a peer, where the variant
    can tell by itself. `allreduce_s`: time with at least one all-reduce under way, hidden behind backward or not, and
    waiting for a peer included where `wait_s` is None. Both are None where the variant does not measure them.
    """

    ready_at: float
    tail_s: float
    allreduce_s: float | None
    wait_s: float | None = None

    @property
    def hidden_s(self) -> float | None:
        """The part of `allreduce_s` during which this rank computed: it stood still for the rest of it."""
        if self.allreduce_s is None:
            return None
        return max(0.0, self.allreduce_s - (self.tail_s - (self.wait_s or 0.0)))


def covered(spans: list[list[float]]) -> float:
    """Seconds during which at least one bucket was under way."""
    total, reached = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
