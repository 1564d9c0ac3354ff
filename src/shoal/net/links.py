"""Which node's link is slow, from bursts between pairs of nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from shoal.net.scene import Trial

# A moment of sending tells 10, 100 and 1000 Mbit/s apart, and nothing of what is faster.
TELLS_UP_TO_MBPS = 1000.0
# Sets of so many slow links are compared; where it takes more to explain the bursts, all of them are suspects.
_MOST_TOGETHER = 3

# One direction of one node's link: what it sends, or what it receives.
Way = tuple[str, str]
Sets = list[frozenset[str]]


@dataclass(frozen=True)
class SlowLinks:
    """`slow`: the nodes whose links must be slow, and their rates. `suspects`: nodes of which at least one link is
    slow, where the bursts do not tell which. `fast_mbps` is what the fastest pair reached."""

    slow: dict[str, float] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    fast_mbps: float = 0.0

    @property
    def named(self) -> set[str]:
        return {*self.slow, *self.suspects}


def slow_links(trials: Iterable[Trial]) -> SlowLinks:
    """A burst is slow at half of the fastest one or less, and then one of its two ends is slow.

    A fast burst clears the sending side of its source and the receiving side of its target. Of all sets of nodes that
    explain every slow burst the smallest count: a node in each of them is slow, a node in some of them is suspected.
    Two nodes alone have nothing to be compared with.
    """
    rates = {(trial.source, trial.target): trial.numbers["mbps"] for trial in trials if trial.kind == "burst"}
    if len({name for pair in rates for name in pair}) <= 2:
        return SlowLinks()
    fast_mbps = min(max(rates.values()), TELLS_UP_TO_MBPS)
    slow = [pair for pair, mbps in rates.items() if mbps <= fast_mbps / 2]
    cleared = {way for pair in rates if pair not in slow for way in _ways(pair)}
    # A pair that is slow although both ends are fast with others has its trouble between them: no node is to blame.
    ends = [open_ends for pair in slow if (open_ends := frozenset(way[0] for way in _ways(pair) if way not in cleared))]
    sets = _smallest_covers(ends)
    always, ever = frozenset.intersection(*sets), frozenset.union(*sets)
    best = {name: _rate(name, rates, cleared) for name in sorted(ever)}
    return SlowLinks(
        slow={name: mbps for name, mbps in best.items() if name in always},
        suspects={name: mbps for name, mbps in best.items() if name not in always},
        fast_mbps=fast_mbps,
    )


def _ways(pair: tuple[str, str]) -> tuple[Way, Way]:
    return (pair[0], "out"), (pair[1], "in")


def _smallest_covers(ends: list[frozenset[str]]) -> Sets:
    """All sets of as few nodes as possible, at least one of every pair of `ends`."""
    forced = frozenset(name for each in ends if len(each) == 1 for name in each)
    rest = [each for each in ends if not each & forced]
    names = sorted(frozenset().union(*rest))
    for size in range(min(len(names), _MOST_TOGETHER) + 1):
        if sets := list(_covers(rest, names, size)):
            return [forced | chosen for chosen in sets]
    return [forced, forced | frozenset(names)]


def _covers(ends: list[frozenset[str]], names: list[str], size: int) -> Iterator[frozenset[str]]:
    for chosen in map(frozenset, combinations(names, size)):
        if all(each & chosen for each in ends):
            yield chosen


def _rate(name: str, rates: dict[tuple[str, str], float], cleared: set[Way]) -> float:
    """The slower of sending and receiving, each at its best: a peer may be slow as well."""
    best: dict[Way, float] = {}
    for pair, mbps in rates.items():
        for way in _ways(pair):
            best[way] = max(mbps, best.get(way, 0.0))
    return min(best[way] for way in best if way[0] == name and way not in cleared)
