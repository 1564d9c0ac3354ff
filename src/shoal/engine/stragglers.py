"""Find stragglers: the rank or link that all others wait for, and why. Pure, from the statistics of every step.

A training is as slow as its slowest part. That may be a machine that computes slower than the others, one that stands
still at times, a disk, a batch that does not divide evenly, or a link. Each is reported once: since which step, what it
costs, the likely cause (`cost.causes`), and what helps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from shoal.config.defaults import MIN_WAIT_PART, SLOW_RATIO
from shoal.cost.causes import UNKNOWN, VAGUE, Cause, RankTimes, find_cause
from shoal.errors import ShoalError
from shoal.sync.step_stats import RankStats
from shoal.units import format_duration, format_percent

# Judge every few steps over the last ones; report what two judgements in a row find. Where steps take long, fewer of
# them count: a straggler is named within a minute.
_WINDOW_STEPS = 12
_WINDOW_S = 30.0
_LEAST_STEPS = 4
_JUDGE_EVERY = 4
# The first steps of a world warm up caches, allocators and congestion windows.
_WARM_UP_STEPS = 16
# After so many steps without it a straggler counts as gone, and is reported again when it returns.
_FORGET_AFTER_STEPS = 100
# Samples of the machines come every few seconds: a verdict waits until they show what has changed.
EVIDENCE_S = 10.0

# A rank that is late at times only: so many of the last steps, and far more than any other rank, over such a time.
_JUDGE_LONG_EVERY_S = 5.0
_LONG_WINDOW_S = 40.0
_LEAST_LATE_S = 10.0
_LONG_WINDOW_STEPS = 512
_LEAST_LATE_STEPS = 5
_LATE_PART = 0.3
_LATE_RATIO = 4.0
# Without a cause that can be named: ranks that share busy processors are late in turn.
_MIN_VAGUE_COST = 0.2
# Checkpoints: so many writes of such a length, which take such a part of the time.
_LEAST_WRITES = 2
_SLOW_WRITE_S = 1.0

# A slow link matters when exposed communication is such a part of a step.
_MIN_EXPOSED_PART = 0.25
# The sender measures a rate, and counts the time in which the receiver had no processor to answer with: where ranks
# share cores, only a much lower rate is the link's. (Three ranks on two cores: up to 10 times lower, on equal links.)
_SLOW_LINK_RATIO = 5.0
_BUSY_PART = 0.1
_SLOW_LINK_RATIO_BUSY = 20.0
_LOSSY_PART = 0.005
# A link that is too slow for what is sent loses packets when its queue is full: then round trips take this much longer.
_FULL_QUEUE_S = 0.01

Value = TypeVar("Value")

_WHY = "a step ends when the slowest rank has done its part"


class SlowRank(ShoalError):
    """A warning that the training could be faster."""

    rank: int | None = None  # the rank in this world that is late; None for a link
    fields: dict[str, Any]  # what a program may read: cause, cost, since

    def about(self, rank: int | None, cause: str, cost: float, since: int) -> SlowRank:
        self.rank, self.fields = rank, {"cause": cause, "cost": round(cost, 4), "since": since}
        return self


@dataclass(frozen=True)
class _Step:
    number: int
    ranks: Sequence[RankStats]
    step_s: float
    exposed_s: float

    def late_s(self, rank: int) -> float:
        """Return how much longer all ranks waited because of this one."""
        others = max(stats.ready_s for number, stats in enumerate(self.ranks) if number != rank)
        return max(0.0, self.ranks[rank].ready_s - others)


@dataclass(frozen=True)
class _Edge:
    """A measurement of one machine's sending to another, by their addresses."""

    source: float
    target: float
    value: float


class Stragglers:
    def __init__(self, evidence_s: float = EVIDENCE_S) -> None:
        self._evidence_s = evidence_s
        self._names: tuple[str, ...] = ()
        self._ids: tuple[int, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._steps: deque[_Step] = deque(maxlen=_LONG_WINDOW_STEPS)
        self._step_count = 0
        self._warm_up_until = _WARM_UP_STEPS
        self._best_bps = 0.0
        self._suspects: set[str] = set()
        self._long_suspects: set[str] = set()
        self._long_due_s = _JUDGE_LONG_EVERY_S
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
        self._suspects.clear()
        self._long_suspects.clear()

    def observe(
        self,
        ranks: Sequence[RankStats],
        work: Sequence[int],
        step_s: float,
        exposed_s: float,
        step: int = 0,
        top_process: str = "",
    ) -> list[SlowRank]:
        """Take the statistics of a step, in order of rank; return the stragglers to report now.

        `work` are the micro-batches of every rank. `exposed_s` is the part of `step_s` that the network alone took.
        `top_process` is the busiest program outside the run on this rank's own machine.
        """
        self._step_count += 1
        if self._step_count <= self._warm_up_until or len(ranks) < 2:
            return []
        self._steps.append(_Step(step or self._step_count, ranks, step_s, exposed_s))
        self._long_due_s -= step_s
        news: list[SlowRank] = []
        window = self._window()
        if window is not None and (self._step_count % _JUDGE_EVERY == 0 or len(window) < _WINDOW_STEPS):
            news += self._confirm(self._suspects, dict(self._judge(window, work, top_process)))
        if self._long_due_s <= 0:
            # Over hundreds of steps, so not often.
            self._long_due_s = _JUDGE_LONG_EVERY_S
            news += self._confirm(self._long_suspects, dict(self._judge_long(top_process)))
        oldest = self._step_count - _FORGET_AFTER_STEPS
        self._reported = {key: number for key, number in self._reported.items() if number >= oldest}
        return news

    def _confirm(self, suspects: set[str], stragglers: dict[str, SlowRank]) -> list[SlowRank]:
        """Return the stragglers that were found twice in a row, long enough ago, and are not reported yet."""
        confirmed = stragglers.keys() & suspects
        suspects.clear()
        suspects.update(stragglers)
        news = []
        for key in sorted(confirmed):
            slow = stragglers[key]
            if key in self._reported:
                self._reported[key] = self._step_count
            elif self._lasted_s(slow.fields["since"]) >= self._evidence_s and not self._is_vaguer(key, slow):
                news.append(slow)
                self._reported[key] = self._step_count
        return news

    def _is_vaguer(self, key: str, slow: SlowRank) -> bool:
        """Return whether a verdict says less than one about the same rank that was reported already."""
        place = key.rpartition(": ")[0]
        return slow.fields["cause"] in VAGUE and any(known.rpartition(": ")[0] == place for known in self._reported)

    def _window(self) -> list[_Step] | None:
        """Return the last steps, by number and time; None while there are not enough."""
        window: list[_Step] = []
        seconds = 0.0
        for step in reversed(self._steps):
            window.append(step)
            seconds += step.step_s
            if len(window) == _WINDOW_STEPS or (len(window) >= _LEAST_STEPS and seconds >= _WINDOW_S):
                return window[::-1]
        return None

    def _lasted_s(self, since: int) -> float:
        return sum(step.step_s for step in self._steps if step.number >= since)

    def _judge(self, window: list[_Step], work: Sequence[int], top_process: str) -> Iterator[tuple[str, SlowRank]]:
        count = len(window[-1].ranks)
        step_s = median(step.step_s for step in window)
        own_s = [median(step.ranks[rank].ready_s for step in window) for rank in range(count)]
        slowest = max(range(count), key=lambda rank: own_s[rank])
        others_s = median(_without(own_s, slowest))
        if _is_slow(own_s, slowest) and own_s[slowest] - others_s >= MIN_WAIT_PART * step_s:
            slow = self._slow_rank(window, work, own_s, slowest, top_process)
            yield f"{self._names[slowest]}: {slow.fields['cause']}", slow
        ranks = window[-1].ranks
        slow_links = list(self._slow_link(ranks, window, step_s))
        yield from slow_links
        yield from self._lossy_link(ranks, is_slow=bool(slow_links))

    def _judge_long(self, top_process: str) -> Iterator[tuple[str, SlowRank]]:
        yield from self._late_at_times(top_process)
        yield from self._slow_disk()

    def _slow_rank(
        self, window: list[_Step], work: Sequence[int], own_s: Sequence[float], slowest: int, top_process: str
    ) -> SlowRank:
        slow_s, others_s = own_s[slowest], max(1e-6, median(_without(own_s, slowest)))
        step_s = median(step.step_s for step in window)
        cost = max(0.0, slow_s - max(_without(own_s, slowest))) / step_s
        since = self._since(slowest, cost * step_s)
        seen = (
            f"all ranks wait for {self._names[slowest]} since step {since}: it takes {slow_s / others_s:.1f} times as "
            f"long as the others for its part of a step ({1e3 * slow_s:.0f} ms, and not {1e3 * others_s:.0f}), which "
            f"costs {format_percent(cost)} of the time; "
        )
        if not _is_slow([seconds / part for seconds, part in zip(own_s, work, strict=True)], slowest):
            return SlowRank(
                f"{seen}it has {work[slowest]} of {sum(work)} micro-batches",
                why=_WHY,
                fix="divide them more evenly in the next run: a smaller --micro-batch, another --global-batch",
            ).about(slowest, "uneven work", cost, since)
        cause = self._cause(window, slowest, top_process)
        fix = cause.fix
        evidence = f"likely cause: {cause.evidence}"
        if cause.kind == UNKNOWN:
            fix = self._give_less(work, own_s, slowest)
            evidence = "its processor is slower, or it computes on fewer cores: nothing else that is measured differs"
        return SlowRank(seen + evidence, why=_WHY, fix=fix).about(slowest, cause.kind, cost, since)

    def _cause(self, steps: Sequence[_Step], late: int, top_process: str) -> Cause:
        times = [_mean_times(steps, rank) for rank in range(len(steps[-1].ranks))]
        late_s = times[late].ready_s - median(other.ready_s for other in _without(times, late))
        return find_cause(times[late], _without(times, late), late_s, fmean(step.step_s for step in steps), top_process)

    def _since(self, rank: int, late_s: float) -> int:
        """Return the step at which a rank began to be about this late; single better steps do not count."""
        since, good = self._steps[-1].number, 0
        for step in reversed(self._steps):
            if step.late_s(rank) >= late_s / 2:
                since, good = step.number, 0
            else:
                good += 1
                if good > 2:
                    break
        return since

    def _late_at_times(self, top_process: str) -> Iterator[tuple[str, SlowRank]]:
        """Report a rank that most steps do not wait for, but some for long: short freezes, garbage collection."""
        steps = self._last(_LONG_WINDOW_S)
        total_s = sum(step.step_s for step in steps)
        if len(steps) < 2 * _WINDOW_STEPS or total_s < _LEAST_LATE_S:
            return
        late_s = [sum(step.late_s(rank) for step in steps) for rank in range(len(self._names))]
        worst = max(range(len(late_s)), key=lambda rank: late_s[rank])
        usual_s = median(step.step_s for step in steps)
        late = [step for step in steps if step.late_s(worst) >= _LATE_PART * usual_s]
        cost = sum(step.late_s(worst) for step in late) / total_s
        if (
            len(late) < _LEAST_LATE_STEPS
            or cost < MIN_WAIT_PART
            or late_s[worst] < _LATE_RATIO * max(_without(late_s, worst))
            # The last one must be recent: what is over is not reported.
            or self._lasted_s(late[-1].number) > _LEAST_LATE_S
        ):
            return
        cause = self._cause(steps, worst, top_process)
        if cause.kind in VAGUE and cost < _MIN_VAGUE_COST:
            return
        known = "cause unknown: " if cause.kind == UNKNOWN else "likely cause: "
        yield (
            f"{self._names[worst]}: {cause.kind}",
            SlowRank(
                f"all ranks wait at times for {self._names[worst]} since step {late[0].number}: it was late in "
                f"{len(late)} of {len(steps)} steps, by up to {format_duration(max(s.late_s(worst) for s in late))}, "
                f"which costs {format_percent(cost)} of the time; {known}{cause.evidence}",
                why=_WHY,
                fix=cause.fix,
            ).about(worst, cause.kind, cost, late[0].number),
        )

    def _last(self, seconds: float) -> list[_Step]:
        """Return the steps of the last seconds."""
        steps: list[_Step] = []
        for step in reversed(self._steps):
            steps.append(step)
            seconds -= step.step_s
            if seconds <= 0:
                break
        return steps[::-1]

    def _slow_disk(self) -> Iterator[tuple[str, SlowRank]]:
        """Report the rank for whose checkpoints the others wait. Its time is no part of any step."""
        disk_s = [[step.ranks[rank].own.disk_s for step in self._steps] for rank in range(len(self._names))]
        totals_s = [sum(seconds) for seconds in disk_s]
        worst = max(range(len(totals_s)), key=lambda rank: totals_s[rank])
        writes = [(step.number, s) for step, s in zip(self._steps, disk_s[worst], strict=True) if s >= _SLOW_WRITE_S]
        total_s = sum(step.step_s for step in self._steps) + totals_s[worst]
        cost = sum(seconds for _, seconds in writes) / max(1e-6, total_s)
        if len(writes) < _LEAST_WRITES or cost < MIN_WAIT_PART:
            return
        longest_s = max(seconds for _, seconds in writes)
        yield (
            f"{self._names[worst]}: disk",
            SlowRank(
                f"all ranks wait for the disk of {self._names[worst]} since step {writes[0][0]}: its last "
                f"{len(writes)} checkpoints took up to {format_duration(longest_s)} each, which costs "
                f"{format_percent(cost)} of the time; likely cause: a slow or busy disk",
                why="training goes on when a checkpoint is on disk",
                fix="write to a faster disk (--out), or less often: --set train.checkpoint_every=…",
            ).about(worst, "disk", cost, writes[0][0]),
        )

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

    def _slow_link(
        self, ranks: Sequence[RankStats], window: list[_Step], step_s: float
    ) -> Iterator[tuple[str, SlowRank]]:
        """Report a link that carries far less than the best link of this world, now or before."""
        best = self._best_bps = max(self._best_bps, *(rank.host.best_bps for rank in ranks))
        edges = [_Edge(rank.host.address, rank.host.slow_peer, rank.host.slow_bps) for rank in ranks]
        is_busy = max(rank.host.starved for rank in ranks) > _BUSY_PART
        ratio = _SLOW_LINK_RATIO_BUSY if is_busy else _SLOW_LINK_RATIO
        slow = [edge for edge in edges if 0 < edge.value * ratio < best]
        exposed_s = median(step.exposed_s for step in window)
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
            ).about(None, "link", exposed_s / step_s, self._exposed_since(exposed_s)),
        )

    def _exposed_since(self, exposed_s: float) -> int:
        return self._first_of_last(lambda step: step.exposed_s >= exposed_s / 2)

    def _lossy_since(self) -> int:
        return self._first_of_last(lambda step: max(stats.host.resent for stats in step.ranks) >= _LOSSY_PART)

    def _first_of_last(self, holds: Callable[[_Step], bool]) -> int:
        """Return the first of the last steps for which something holds."""
        since = self._steps[-1].number
        for step in reversed(self._steps):
            if not holds(step):
                break
            since = step.number
        return since

    def _lossy_link(self, ranks: Sequence[RankStats], is_slow: bool) -> Iterator[tuple[str, SlowRank]]:
        """Report links that lose packets, unless they do so because they are slow, which is reported already."""
        lossy = [
            _Edge(rank.host.address, rank.host.lossy_peer, rank.host.resent)
            for rank in ranks
            if rank.host.resent >= _LOSSY_PART and not (is_slow and rank.host.queued_s >= _FULL_QUEUE_S)
        ]
        if lossy:
            worst = max(edge.value for edge in lossy)
            yield (
                "loss",
                SlowRank(
                    f"packets are lost by {self._network(ranks, lossy)}: {worst:.1%} of what is sent is sent again",
                    why="TCP sends lost packets again, and the ranks wait for them",
                    fix="check its cable, its switch or its Wi-Fi",
                ).about(None, "packet loss", 0.0, self._lossy_since()),
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


def _mean_times(steps: Sequence[_Step], rank: int) -> RankTimes:
    stats = [step.ranks[rank] for step in steps]
    return RankTimes(
        ready_s=fmean(entry.ready_s for entry in stats),
        data_s=fmean(entry.own.data_s for entry in stats),
        gc_s=fmean(entry.own.gc_s for entry in stats),
        # The newest: the kernel is asked every few steps, and its older values may be from before.
        starved=stats[-1].host.starved,
        node=stats[-1].node,
    )


def _without(values: Sequence[Value], index: int) -> list[Value]:
    return [*values[:index], *values[index + 1 :]]
