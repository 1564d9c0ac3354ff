"""Whom does everybody wait for, and why: judged from the figures that ranks tell each other in every step. Pure.

A training goes at the pace of its slowest part. That may be a machine that computes slower than the others, one that is
kept from its processor, a batch that does not come out even, or a link; each is named once, in words a user can act on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.errors import ShoalError
from shoal.sync.step_stats import RankStats

# Judged every few steps over the last ones, and believed when the next judgement says the same.
_WINDOW = 12
_EVERY = 4
# The first steps of a world warm up caches, allocators and congestion windows.
_WARM_STEPS = 16
# What was not seen for so long is over, and told again when it comes back.
_OVER_STEPS = 100

_TIMES_SLOWER = 1.5
_WORTH_WAITING = 0.1
_STARVED = 0.2
_TIMES_STARVED = 1.5
_EXPOSED = 0.25
# A rate is measured by whoever sends, and counts the time in which the receiver had no processor to answer with: where
# ranks share cores, only a much lower one is the link's. (Three ranks on two cores: up to 10 times, on equal links.)
_TIMES_LINK = 5.0
_BUSY = 0.1
_TIMES_LINK_BUSY = 20.0
_RESENT = 0.005


class SlowRank(ShoalError):
    """Not an error: a training that could be faster."""


@dataclass(frozen=True)
class _Step:
    told: Sequence[RankStats]
    step_s: float
    exposed_s: float


@dataclass(frozen=True)
class _Edge:
    """What one machine sends to another, by their addresses."""

    source: float
    target: float
    value: float


class Stragglers:
    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ids: tuple[int, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._steps: deque[_Step] = deque(maxlen=_WINDOW)
        self._seen = 0
        self._warm_at = _WARM_STEPS
        self._best_bps = 0.0
        self._suspected: set[str] = set()
        self._told: dict[str, int] = {}

    def begin_anew(self, names: Sequence[str], ids: Sequence[int] = (), weights: Sequence[float] = ()) -> None:
        """In another world, whose ranks are called so in a sentence: what was told in the last one is not repeated.

        `ids` are the numbers of these ranks, 0, 1, 2 … if left out. `weights` are those of all ranks of the launch, by
        their numbers: as many as `run.weights` must have when the run is resumed. Left out: these ranks, all alike.
        """
        self._names = tuple(names)
        self._ids = tuple(ids) or tuple(range(len(names)))
        self._weights = tuple(weights) or (1.0,) * len(names)
        self._steps.clear()
        self._warm_at = self._seen + _WARM_STEPS
        self._best_bps = 0.0
        self._suspected = set()

    def saw(self, told: Sequence[RankStats], work: Sequence[int], step_s: float, exposed_s: float) -> list[SlowRank]:
        """After each step: everybody's figures, how much each had to do, how long it took here, and how much of that
        the network alone."""
        self._seen += 1
        if self._seen <= self._warm_at or len(told) < 2:
            return []
        self._steps.append(_Step(told, step_s, exposed_s))
        if self._seen % _EVERY or len(self._steps) < _WINDOW:
            return []
        return self._news(dict(self._judge(told, work)))

    def _news(self, found: dict[str, SlowRank]) -> list[SlowRank]:
        sure = found.keys() & self._suspected
        self._suspected = set(found)
        news = [slow for key, slow in found.items() if key in sure and key not in self._told]
        self._told |= dict.fromkeys(sure, self._seen)
        self._told = {key: seen for key, seen in self._told.items() if self._seen - seen <= _OVER_STEPS}
        return news

    def _judge(self, now: Sequence[RankStats], work: Sequence[int]) -> Iterator[tuple[str, SlowRank]]:
        step_s = median(step.step_s for step in self._steps)
        own_s = [median(step.told[rank].ready_s for step in self._steps) for rank in range(len(now))]
        slowest = max(range(len(now)), key=lambda rank: own_s[rank])
        others_s = median(_without(own_s, slowest))
        if _is_slow(own_s, slowest) and own_s[slowest] - others_s >= _WORTH_WAITING * step_s:
            yield self._names[slowest], self._slow_rank(now, work, own_s, slowest)
        yield from self._slow_link(now, step_s)
        yield from self._lossy_link(now)

    def _slow_rank(
        self, now: Sequence[RankStats], work: Sequence[int], own_s: Sequence[float], slowest: int
    ) -> SlowRank:
        slow_s, others_s = own_s[slowest], max(1e-6, median(_without(own_s, slowest)))
        seen = (
            f"everybody waits for {self._names[slowest]}: it takes {slow_s / others_s:.1f} times as long as the others "
            f"for its part of a step ({1e3 * slow_s:.0f} ms, and not {1e3 * others_s:.0f}); "
        )
        why = "a step is over when the slowest has done its part"
        if not _is_slow([seconds / part for seconds, part in zip(own_s, work, strict=True)], slowest):
            share = f"it has {work[slowest]} of {sum(work)} micro-batches"
            return SlowRank(
                seen + share,
                why=why,
                fix="deal them more evenly in the next run: a smaller --micro-batch, another --global-batch",
            )
        starved = [each.vitals.starved for each in now]
        if starved[slowest] > max(_STARVED, _TIMES_STARVED * median(_without(starved, slowest))):
            kept = f"for {starved[slowest]:.0%} of the time it is kept from its processor, by other programs or a limit"
            return SlowRank(
                seen + kept, why=why, fix="see who else computes there: top; and whether its CPU share is limited"
            )
        slower = seen + "its processor is slower, or it computes on fewer cores"
        return SlowRank(slower, why=why, fix=self._give_less(work, own_s, slowest))

    def _give_less(self, work: Sequence[int], own_s: Sequence[float], slowest: int) -> str:
        """The command that lowers a slow rank's weight to its speed, in the unit of the other ranks' weights."""
        number = self._ids[slowest]
        if number >= len(self._weights):
            return (
                "it joined after the start, and only the ranks of the start have a number in run.weights: let the "
                "others go on without it, with Ctrl-C on that machine"
            )
        usual = sum(self._weights) / len(self._weights)
        present = [self._weights[each] if each < len(self._weights) else usual for each in self._ids]
        speeds = [part / max(1e-6, seconds) for part, seconds in zip(work, own_s, strict=True)]
        in_unit = [weight / speed for weight, speed in zip(present, speeds, strict=True)]
        weight = float(f"{speeds[slowest] * median(_without(in_unit, slowest)):.2g}")
        if weight >= present[slowest]:
            # A rank has at least one micro-batch, however low its weight.
            return (
                f"it has {work[slowest]} of {sum(work)} micro-batches, more than its weight: deal smaller ones in the "
                "next run, with a smaller --micro-batch or a larger --global-batch"
            )
        less = [*self._weights]
        less[number] = weight
        # Settings have no exponents.
        weights = [f"{each:.9f}".rstrip("0").rstrip(".") for each in less]
        return f"give it less to do: shoal stop RUN; shoal train --resume RUN --set run.weights={'/'.join(weights)}"

    def _slow_link(self, now: Sequence[RankStats], step_s: float) -> Iterator[tuple[str, SlowRank]]:
        """Slow is what carries far less than the best link here, now or before."""
        best = self._best_bps = max(self._best_bps, *(each.vitals.best_bps for each in now))
        edges = [_Edge(each.vitals.address, each.vitals.slow_peer, each.vitals.slow_bps) for each in now]
        is_busy = max(each.vitals.starved for each in now) > _BUSY
        times = _TIMES_LINK_BUSY if is_busy else _TIMES_LINK
        slow = [edge for edge in edges if 0 < edge.value * times < best]
        exposed_s = median(step.exposed_s for step in self._steps)
        if not slow or exposed_s < _EXPOSED * step_s:
            return
        bps = min(edge.value for edge in slow)
        yield (
            "link",
            SlowRank(
                f"everybody waits for {self._network(now, slow)}: it carries {_mbps(bps)} Mbit/s, and the best link "
                f"here {_mbps(best)}; exchanging takes {exposed_s / step_s:.0%} of a step",
                why="all gradients pass every machine's link in every step",
                fix="look at its cable, its switch or its Wi-Fi; measure it: shoal probe; send less: shoal plan",
            ),
        )

    def _lossy_link(self, now: Sequence[RankStats]) -> Iterator[tuple[str, SlowRank]]:
        edges = [_Edge(each.vitals.address, each.vitals.lossy_peer, each.vitals.resent) for each in now]
        lossy = [edge for edge in edges if edge.value >= _RESENT]
        if lossy:
            worst = max(edge.value for edge in lossy)
            yield (
                "loss",
                SlowRank(
                    f"packets are lost by {self._network(now, lossy)}: {worst:.1%} of what is sent there is sent again",
                    why="TCP mends it, at the price of waiting",
                    fix="look at its cable, its switch or its Wi-Fi",
                ),
            )

    def _network(self, now: Sequence[RankStats], edges: Sequence[_Edge]) -> str:
        """Of whom most of these edges have in common; of one edge nobody can say which end it is."""
        pairs = {frozenset((edge.source, edge.target)) for edge in edges}
        counts = Counter(end for pair in pairs for end in pair)
        most = max(counts.values())
        names = [self._name_of(now, address) for address, count in counts.items() if count == most]
        if len(names) == 1:
            return f"the network of {names[0]}"
        return f"the link between {' and '.join(sorted(names))}" if len(names) == 2 else "the whole network"

    def _name_of(self, now: Sequence[RankStats], address: float) -> str:
        """A machine's: that of its first rank."""
        ranks = [name for name, told in zip(self._names, now, strict=True) if told.vitals.address == address]
        return ranks[0].rpartition(" on ")[2] if ranks else "a machine that nobody here knows"


def _mbps(bps: float) -> str:
    return f"{bps / 1e6:.1f}" if bps < 1e8 else f"{bps / 1e6:,.0f}"


def _is_slow(seconds: Sequence[float], rank: int) -> bool:
    return seconds[rank] >= _TIMES_SLOWER * median(_without(seconds, rank))


def _without(values: Sequence[float], index: int) -> list[float]:
    return [*values[:index], *values[index + 1 :]]
