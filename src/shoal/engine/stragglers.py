"""Find stragglers: the rank or link that all others wait for, and why. Pure, from the statistics of every step.

A training is as slow as its slowest part. That may be a machine that computes slower than the others, one whose
processor is taken by other programs, a batch that does not divide evenly, or a link. Each is reported once, with a
command that helps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from shoal.config.defaults import MIN_WAIT_PART, SLOW_RATIO
from shoal.errors import ShoalError
from shoal.sync.step_stats import RankStats
from shoal.units import format_percent

# Judge every few steps over the last ones; report what two judgements in a row find.
_WINDOW_STEPS = 12
_JUDGE_EVERY = 4
# The first steps of a world warm up caches, allocators and congestion windows.
_WARM_UP_STEPS = 16
# After so many steps without it a straggler counts as gone, and is reported again when it returns.
_FORGET_AFTER_STEPS = 100

# A rank is starved when it waits for a processor for such a part of the time, and so many times as long as the others.
_STARVED_PART = 0.2
_STARVED_RATIO = 1.5
# A slow link matters when exposed communication is such a part of a step.
_MIN_EXPOSED_PART = 0.25
# The sender measures a rate, and counts the time in which the receiver had no processor to answer with: where ranks
# share cores, only a much lower rate is the link's. (Three ranks on two cores: up to 10 times lower, on equal links.)
_SLOW_LINK_RATIO = 5.0
_BUSY_PART = 0.1
_SLOW_LINK_RATIO_BUSY = 20.0
_LOSSY_PART = 0.005


class SlowRank(ShoalError):
    """A warning that the training could be faster."""


@dataclass(frozen=True)
class _Step:
    ranks: Sequence[RankStats]
    step_s: float
    exposed_s: float


@dataclass(frozen=True)
class _Edge:
    """A measurement of one machine's sending to another, by their addresses."""

    source: float
    target: float
    value: float


class Stragglers:
    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ids: tuple[int, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._steps: deque[_Step] = deque(maxlen=_WINDOW_STEPS)
        self._step_count = 0
        self._warm_up_until = _WARM_UP_STEPS
        self._best_bps = 0.0
        self._suspects: set[str] = set()
        # The step of the last judgement that found each reported straggler.
        self._reported: dict[str, int] = {}

    def reset(self, names: Sequence[str], ids: Sequence[int] = (), weights: Sequence[float] = ()) -> None:
        """Start in another world, whose ranks are called `names` in messages; do not repeat reported stragglers.

        `ids` are the ids of these ranks, by default 0, 1, 2 … `weights` are those of all ranks of the launch, by id: as
        many as `run.weights` must have when the run is resumed. By default all ranks of this world weigh the same.
        """
        self._names = tuple(names)
        self._ids = tuple(ids) or tuple(range(len(names)))
        self._weights = tuple(weights) or (1.0,) * len(names)
        self._steps.clear()
        self._warm_up_until = self._step_count + _WARM_UP_STEPS
        self._best_bps = 0.0
        self._suspects = set()

    def observe(
        self, ranks: Sequence[RankStats], work: Sequence[int], step_s: float, exposed_s: float
    ) -> list[SlowRank]:
        """Take the statistics of a step, in order of rank; return the stragglers to report now.

        `work` are the micro-batches of every rank. `exposed_s` is the part of `step_s` that the network alone took.
        """
        self._step_count += 1
        if self._step_count <= self._warm_up_until or len(ranks) < 2:
            return []
        self._steps.append(_Step(ranks, step_s, exposed_s))
        if self._step_count % _JUDGE_EVERY or len(self._steps) < _WINDOW_STEPS:
            return []
        stragglers = dict(self._judge(ranks, work))
        confirmed = stragglers.keys() & self._suspects
        self._suspects = set(stragglers)
        news = [slow for key, slow in stragglers.items() if key in confirmed and key not in self._reported]
        self._reported |= dict.fromkeys(confirmed, self._step_count)
        oldest = self._step_count - _FORGET_AFTER_STEPS
        self._reported = {key: step for key, step in self._reported.items() if step >= oldest}
        return news

    def _judge(self, ranks: Sequence[RankStats], work: Sequence[int]) -> Iterator[tuple[str, SlowRank]]:
        step_s = median(step.step_s for step in self._steps)
        own_s = [median(step.ranks[rank].ready_s for step in self._steps) for rank in range(len(ranks))]
        slowest = max(range(len(ranks)), key=lambda rank: own_s[rank])
        others_s = median(_without(own_s, slowest))
        if _is_slow(own_s, slowest) and own_s[slowest] - others_s >= MIN_WAIT_PART * step_s:
            yield self._names[slowest], self._slow_rank(ranks, work, own_s, slowest)
        yield from self._slow_link(ranks, step_s)
        yield from self._lossy_link(ranks)

    def _slow_rank(
        self, ranks: Sequence[RankStats], work: Sequence[int], own_s: Sequence[float], slowest: int
    ) -> SlowRank:
        slow_s, others_s = own_s[slowest], max(1e-6, median(_without(own_s, slowest)))
        seen = (
            f"all ranks wait for {self._names[slowest]}: it takes {slow_s / others_s:.1f} times as long as the others "
            f"for its part of a step ({1e3 * slow_s:.0f} ms, and not {1e3 * others_s:.0f}); "
        )
        why = "a step ends when the slowest rank has done its part"
        if not _is_slow([seconds / part for seconds, part in zip(own_s, work, strict=True)], slowest):
            return SlowRank(
                seen + f"it has {work[slowest]} of {sum(work)} micro-batches",
                why=why,
                fix="divide them more evenly in the next run: a smaller --micro-batch, another --global-batch",
            )
        starved = [rank.host.starved for rank in ranks]
        if starved[slowest] > max(_STARVED_PART, _STARVED_RATIO * median(_without(starved, slowest))):
            return SlowRank(
                f"{seen}for {format_percent(starved[slowest])} of the time it waits for a processor, "
                "because of other programs or a limit",
                why=why,
                fix="see which programs compute there: top; and whether its CPU share is limited",
            )
        slower = seen + "its processor is slower, or it computes on fewer cores"
        return SlowRank(slower, why=why, fix=self._give_less(work, own_s, slowest))

    def _give_less(self, work: Sequence[int], own_s: Sequence[float], slowest: int) -> str:
        """Return the command that lowers a slow rank's weight to its speed, in the unit of the other ranks' weights."""
        slow_id = self._ids[slowest]
        if slow_id >= len(self._weights):
            return (
                "it joined after the start, and only the ranks of the start have a number in run.weights: let the "
                "others go on without it, with Ctrl-C on that machine"
            )
        mean = sum(self._weights) / len(self._weights)
        present = [self._weights[id] if id < len(self._weights) else mean for id in self._ids]
        speeds = [part / max(1e-6, seconds) for part, seconds in zip(work, own_s, strict=True)]
        in_unit = [weight / speed for weight, speed in zip(present, speeds, strict=True)]
        weight = float(f"{speeds[slowest] * median(_without(in_unit, slowest)):.2g}")
        if weight >= present[slowest]:
            # A rank has at least one micro-batch, however low its weight.
            return (
                f"it has {work[slowest]} of {sum(work)} micro-batches, more than its weight: use smaller ones in the "
                "next run, with a smaller --micro-batch or a larger --global-batch"
            )
        less = [*self._weights]
        less[slow_id] = weight
        # Settings accept no exponents.
        weights = [f"{weight:.9f}".rstrip("0").rstrip(".") for weight in less]
        return f"give it less to do: shoal stop RUN; shoal train --resume RUN --set run.weights={'/'.join(weights)}"

    def _slow_link(self, ranks: Sequence[RankStats], step_s: float) -> Iterator[tuple[str, SlowRank]]:
        """Report a link that carries far less than the best link of this world, now or before."""
        best = self._best_bps = max(self._best_bps, *(rank.host.best_bps for rank in ranks))
        edges = [_Edge(rank.host.address, rank.host.slow_peer, rank.host.slow_bps) for rank in ranks]
        is_busy = max(rank.host.starved for rank in ranks) > _BUSY_PART
        ratio = _SLOW_LINK_RATIO_BUSY if is_busy else _SLOW_LINK_RATIO
        slow = [edge for edge in edges if 0 < edge.value * ratio < best]
        exposed_s = median(step.exposed_s for step in self._steps)
        if not slow or exposed_s < _MIN_EXPOSED_PART * step_s:
            return
        bps = min(edge.value for edge in slow)
        yield (
            "link",
            SlowRank(
                f"all ranks wait for {self._network(ranks, slow)}: it carries {_mbps(bps)} Mbit/s, and the best link "
                f"here {_mbps(best)}; exchanging takes {format_percent(exposed_s / step_s)} of a step",
                why="all gradients pass every machine's link in every step",
                fix="check its cable, its switch or its Wi-Fi; measure it: shoal probe; send less: shoal plan",
            ),
        )

    def _lossy_link(self, ranks: Sequence[RankStats]) -> Iterator[tuple[str, SlowRank]]:
        edges = [_Edge(rank.host.address, rank.host.lossy_peer, rank.host.resent) for rank in ranks]
        lossy = [edge for edge in edges if edge.value >= _LOSSY_PART]
        if lossy:
            worst = max(edge.value for edge in lossy)
            yield (
                "loss",
                SlowRank(
                    f"packets are lost by {self._network(ranks, lossy)}: {worst:.1%} of what is sent is sent again",
                    why="TCP sends lost packets again, and the ranks wait for them",
                    fix="check its cable, its switch or its Wi-Fi",
                ),
            )

    def _network(self, ranks: Sequence[RankStats], edges: Sequence[_Edge]) -> str:
        """Name the machine that most of these edges share. One edge alone does not tell which end is at fault."""
        pairs = {frozenset((edge.source, edge.target)) for edge in edges}
        counts = Counter(end for pair in pairs for end in pair)
        most = max(counts.values())
        names = [self._machine_name(ranks, address) for address, count in counts.items() if count == most]
        if len(names) == 1:
            return f"the network of {names[0]}"
        return f"the link between {' and '.join(sorted(names))}" if len(names) == 2 else "the whole network"

    def _machine_name(self, ranks: Sequence[RankStats], address: float) -> str:
        names = [name for name, rank in zip(self._names, ranks, strict=True) if rank.host.address == address]
        return names[0].rpartition(" on ")[2] if names else "an unknown machine"


def _mbps(bps: float) -> str:
    return f"{bps / 1e6:.1f}" if bps < 1e8 else f"{bps / 1e6:,.0f}"


def _is_slow(seconds: Sequence[float], rank: int) -> bool:
    return seconds[rank] >= SLOW_RATIO * median(_without(seconds, rank))


def _without(values: Sequence[float], index: int) -> list[float]:
    return [*values[:index], *values[index + 1 :]]
