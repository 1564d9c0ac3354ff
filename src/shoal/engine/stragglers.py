"""Find stragglers: the rank or link that all others wait for, and why. Pure, from the statistics of every step.

A training is as slow as its slowest part. That may be a machine that computes slower than the others, one that stands
still at times, a disk, a batch that does not divide evenly, or a link. Each is reported once: since which step, what it
costs, the likely cause (`cost.causes`), and what helps. So is a machine whose ranks are all slow, and none is late,
because their threads want more processors than it has.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from shoal.config.defaults import MIN_WAIT_PART, SLOW_RATIO
from shoal.cost.causes import (
    CROWDED,
    GARBAGE,
    UNKNOWN,
    VAGUE,
    Cause,
    Demand,
    RankTimes,
    find_cause,
    machine_demands,
    other_cores_beside,
)
from shoal.errors import ShoalError
from shoal.sync.step_stats import RankStats
from shoal.units import format_duration, format_percent, name_ranks

# Judge every few steps over the last ones; report what two judgements in a row find. Where steps take long, fewer of
# them count: a straggler is named within a minute.
_WINDOW_STEPS = 12
_WINDOW_S = 30.0
_LEAST_STEPS = 4
_JUDGE_EVERY = 4
# The first steps of a world warm up caches, allocators and congestion windows.
_WARM_UP_STEPS = 16
# The first steps with other shares may start data workers anew.
_SETTLE_STEPS = 2
# After this many steps without it a straggler counts as gone, and is reported again when it returns.
_FORGET_AFTER_STEPS = 100
# Samples of the machines come every few seconds: a verdict waits until they show what has changed.
EVIDENCE_S = 10.0

# A rank that is late at times only: this many of the last steps, and far more than any other rank, over this time.
_JUDGE_LONG_EVERY_S = 5.0
_LONG_WINDOW_S = 40.0
_LEAST_LATE_S = 10.0
_LONG_WINDOW_STEPS = 512
_LEAST_LATE_STEPS = 5
_LATE_PART = 0.3
_LATE_RATIO = 4.0
# Without a cause that can be named: ranks that share busy processors are late in turn.
_MIN_VAGUE_COST = 0.2
# Checkpoints: this many writes of this length, which take this part of the time.
_LEAST_WRITES = 2
_SLOW_WRITE_S = 1.0

# Ranks whose threads slow each other down: those of one rank want this many processors, and its training thread waits
# for one this part of the time. More ranks than cores, with one thread each, are what the user asked for.
_SEVERAL_THREADS = 1.5
_MIN_STARVED = 0.1

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
        self._follows_speed = False
        self._shares: Sequence[int] = ()
        self._least = 1
        # By step, how long each rank took for a sample. Other shares do not change it.
        self._sample_s: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_LONG_WINDOW_STEPS)
        self._steps: deque[_Step] = deque(maxlen=_LONG_WINDOW_STEPS)
        self._step_count = 0
        self._warm_up_until = _WARM_UP_STEPS
        self._best_bps = 0.0
        self._suspects: set[str] = set()
        self._long_suspects: set[str] = set()
        self._long_due_s = _JUDGE_LONG_EVERY_S
        # The step of the last judgement that found each reported straggler.
        self._reported: dict[str, int] = {}

    def reset(self, names: Sequence[str], follows_speed: bool = False) -> None:
        """Start in another world, whose ranks are called `names` in messages; do not repeat reported stragglers.

        `follows_speed`: the shares of its ranks follow their speed.
        """
        self._names, self._follows_speed = tuple(names), follows_speed
        self._sample_s.clear()
        self._best_bps = 0.0
        self._judge_anew(_WARM_UP_STEPS)

    def change_shares(self, lag_steps: int = 0) -> None:
        """Judge anew: the same ranks have other shares from the next step on.

        `lag_steps` is how many steps with the present shares will be observed later.
        """
        self._judge_anew(_SETTLE_STEPS + lag_steps)

    def _judge_anew(self, after_steps: int) -> None:
        self._steps.clear()
        self._warm_up_until = self._step_count + after_steps
        self._suspects.clear()
        self._long_suspects.clear()

    def observe(
        self,
        ranks: Sequence[RankStats],
        shares: Sequence[int],
        step_s: float,
        exposed_s: float,
        step: int = 0,
        top_process: str = "",
        work: Sequence[float] = (),
        least: int = 1,
    ) -> list[SlowRank]:
        """Take the statistics of a step, in order of rank; return the stragglers to report now.

        `shares` are the samples of every rank. `exposed_s` is the part of `step_s` that the network alone took.
        `top_process` is the busiest program outside the run on this rank's own machine. `work` is how much every rank
        computes, where that is more than its samples (see `Balance.work_of`), and `least` the smallest share.
        """
        self._shares, self._least, work = shares, least, work or shares
        self._step_count += 1
        if self._step_count <= self._warm_up_until:
            return []
        self._steps.append(_Step(step or self._step_count, ranks, step_s, exposed_s))
        self._sample_s.append((self._steps[-1].number, _sample_s(ranks, work)))
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

    def _judge(self, window: list[_Step], work: Sequence[float], top_process: str) -> Iterator[tuple[str, SlowRank]]:
        ranks = window[-1].ranks
        verdicts = dict(self._judge_ranks(window, work, top_process)) if len(ranks) > 1 else {}
        yield from verdicts.items()
        yield from self._crowded_machines(ranks, known={*verdicts, *self._reported})
        if len(ranks) > 1:
            slow_links = list(self._slow_link(ranks, window, median(step.step_s for step in window)))
            yield from slow_links
            # Losses are counted over more steps than a slow link is judged by: those of a link that was slow are known.
            yield from self._lossy_link(ranks, is_slow=bool(slow_links) or "link" in self._reported)

    def _judge_ranks(
        self, window: list[_Step], work: Sequence[float], top_process: str
    ) -> Iterator[tuple[str, SlowRank]]:
        count = len(window[-1].ranks)
        step_s = median(step.step_s for step in window)
        own_s = [median(step.ranks[rank].ready_s for step in window) for rank in range(count)]
        slowest = max(range(count), key=lambda rank: own_s[rank])
        others_s = median(_without(own_s, slowest))
        if _is_slow(own_s, slowest) and own_s[slowest] - others_s >= MIN_WAIT_PART * step_s:
            slow = self._slow_rank(window, work, own_s, slowest, top_process)
            yield f"{self._names[slowest]}: {slow.fields['cause']}", slow
        elif self._follows_speed:
            slowed = list(self._slowed_rank(window, work, top_process))
            yield from slowed or self._collecting_rank(window, work)

    def _judge_long(self, top_process: str) -> Iterator[tuple[str, SlowRank]]:
        if len(self._names) > 1:
            yield from self._late_at_times(top_process)
            yield from self._slow_disk()

    def _crowded_machines(self, ranks: Sequence[RankStats], known: set[str]) -> Iterator[tuple[str, SlowRank]]:
        """Report machines whose ranks have too few processors for their threads: all may be slow alike, and none late.

        A machine whose rank is `known` to be late for the same reason is left out.
        """
        for machine, demand in machine_demands([rank.node for rank in ranks]).items():
            local = [number for number, rank in enumerate(ranks) if rank.node.machine == machine]
            is_known = any(f"{self._names[number]}: {CROWDED}" in known for number in local)
            if not is_known and _slows_itself([ranks[number] for number in local], demand):
                yield self._crowded(local, demand)

    def _crowded(self, local: Sequence[int], demand: Demand) -> tuple[str, SlowRank]:
        first = local[0]
        place = self._names[first].rpartition(" on ")[2]
        since = self._first_of_last(lambda step: step.ranks[first].host.starved >= _MIN_STARVED)
        starved = median(self._steps[-1].ranks[number].host.starved for number in local)
        verdict = SlowRank(
            f"{demand.describe(f'the threads of {name_ranks(demand.ranks)} on {place}')} (since step {since})",
            why="a thread that waits for a processor, also behind one that only spins, holds up those it computes with",
            fix=demand.fix,
        )
        return f"{place}: {CROWDED}", verdict.about(first, CROWDED, starved, since)

    def _slow_rank(
        self, window: list[_Step], work: Sequence[float], own_s: Sequence[float], slowest: int, top_process: str
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
                f"{seen}it has {self._shares[slowest]} of {sum(self._shares)} samples",
                why=_WHY,
                fix="divide them more evenly in the next run: a smaller --micro-batch, another --global-batch",
            ).about(slowest, "uneven work", cost, since)
        cause = self._cause(window, slowest, top_process)
        fix = cause.fix
        evidence = f"likely cause: {cause.evidence}"
        if cause.kind == UNKNOWN:
            fix = self._give_less(self._shares[slowest])
            evidence = "its processor is slower, or it computes on fewer cores: nothing else that is measured differs"
        if self._follows_speed:
            evidence += f"; shares follow speed, and are {_ratio(self._shares)} now"
        return SlowRank(seen + evidence, why=_WHY, fix=fix).about(slowest, cause.kind, cost, since)

    def _slowed_rank(
        self, window: list[_Step], work: Sequence[float], top_process: str
    ) -> Iterator[tuple[str, SlowRank]]:
        """Report a rank that no other waits for, because it has a smaller share, but that something slows down.

        A processor that is slower by nature is not news: the change of shares has named it.
        """
        times = [_sample_s(step.ranks, work) for step in window]
        own_s = [median(column) for column in zip(*times, strict=True)]
        slowest = max(range(len(own_s)), key=lambda rank: own_s[rank])
        usual_s = median(_without(own_s, slowest))
        # All ranks end together: what they do in a second is the sum of what each does.
        rate = sum(1 / seconds for seconds in own_s)
        cost = 1 - rate / (rate - 1 / own_s[slowest] + 1 / usual_s)
        if not _is_slow(own_s, slowest) or cost < MIN_WAIT_PART:
            return
        cause = self._cause(window, slowest, top_process, work)
        if cause.kind == UNKNOWN or (cause.kind in VAGUE and cost < _MIN_VAGUE_COST):
            return
        since = self._slower_since(slowest, own_s[slowest] / usual_s)
        how = f"computes at {usual_s / own_s[slowest]:.2f} of the speed of the others"
        yield self._although_smaller(slowest, how, cause, cost, since, work)

    def _collecting_rank(self, window: list[_Step], work: Sequence[float]) -> Iterator[tuple[str, SlowRank]]:
        """Report a rank that collects garbage in every step, where shares make up for that and no other rank waits."""
        step_s = median(step.step_s for step in window)
        times = [_mean_times(window, rank) for rank in range(len(work))]
        most = max(range(len(work)), key=lambda rank: times[rank].gc_s)
        gc_s = times[most].gc_s - median(other.gc_s for other in _without(times, most))
        rates = [1 / median(column) for column in zip(*(_sample_s(step.ranks, work) for step in window), strict=True)]
        # What it could do in that time, of what all do.
        cost = gc_s / step_s * rates[most] / sum(rates)
        if cost < MIN_WAIT_PART:
            return
        cause = find_cause(times[most], _without(times, most), gc_s, step_s, "")
        if cause.kind != GARBAGE:
            return
        since = self._first_of_last(lambda step: step.ranks[most].own.gc_s >= gc_s / 2)
        yield self._although_smaller(most, "does less than it could", cause, cost, since, work)

    def _although_smaller(
        self, rank: int, how: str, cause: Cause, cost: float, since: int, work: Sequence[float]
    ) -> tuple[str, SlowRank]:
        """Return the verdict on a rank that no other waits for, because its share is smaller."""
        name = self._names[rank]
        verdict = SlowRank(
            f"{name} {how} since step {since}, which costs {format_percent(cost)} of the time, although its share is "
            f"smaller (shares now {_ratio(self._shares)}); likely cause: {cause.evidence}",
            why="the other ranks do what this one cannot",
            fix=cause.fix,
        )
        return f"{name}: {cause.kind}", verdict.about(rank, cause.kind, cost, since)

    def _slower_since(self, rank: int, ratio: float) -> int:
        """Return the step at which a rank began to be slower than the others by about this ratio."""
        since, good = self._sample_s[-1][0], 0
        for step, seconds in reversed(self._sample_s):
            if seconds[rank] >= (1 + ratio) / 2 * median(_without(seconds, rank)):
                since, good = step, 0
            else:
                good += 1
                if good > 2:
                    break
        return since

    def _cause(self, steps: Sequence[_Step], late: int, top_process: str, work: Sequence[float] = ()) -> Cause:
        """Return the likely cause that a rank is late, or with `work` that it computes its samples slower."""
        scales: list[float | None] = [work[late] / part for part in work] if work else [None] * len(steps[-1].ranks)
        times = [_mean_times(steps, rank, scale) for rank, scale in enumerate(scales)]
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
        """Report the rank for whose checkpoints the others wait. Its time is not a part of any step."""
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

    def _give_less(self, samples: int) -> str:
        """Return what helps a rank whose processor is slower."""
        if not self._follows_speed:
            return "let the shares follow speed: --balance live, also for a run that is resumed"
        if samples == self._least:
            smaller = "" if samples == 1 else "a smaller --micro-batch or "
            return f"its share is the least that there can be: use {smaller}a larger --global-batch next time"
        return "nothing to do: its share becomes smaller if this lasts"

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
        since = self._first_of_last(lambda step: step.exposed_s >= exposed_s / 2)
        yield (
            "link",
            SlowRank(
                f"all ranks wait for {self._network(ranks, slow)}: it carries {_mbps(bps)} Mbit/s, and the best link "
                f"here {_mbps(best)}; exchanging takes {format_percent(exposed_s / step_s)} of a step",
                why="all gradients pass every machine's link in every step",
                fix="check its cable, its switch or its Wi-Fi; measure it: shoal probe; send less: shoal plan",
            ).about(None, "link", exposed_s / step_s, since),
        )

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
            since = self._first_of_last(lambda step: max(stats.host.resent for stats in step.ranks) >= _LOSSY_PART)
            yield (
                "loss",
                SlowRank(
                    f"packets are lost by {self._network(ranks, lossy)}: {worst:.1%} of what is sent is sent again",
                    why="TCP sends lost packets again, and the ranks wait for them",
                    fix="check its cable, its switch or its Wi-Fi",
                ).about(None, "packet loss", 0.0, since),
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


def _slows_itself(ranks: Sequence[RankStats], demand: Demand) -> bool:
    """Tell whether these ranks of one machine lose time because each has several threads."""
    return (
        demand.is_cause(other_cores_beside([rank.node for rank in ranks]))
        and max(rank.node.wanted for rank in ranks) >= _SEVERAL_THREADS
        and median(rank.host.starved for rank in ranks) >= _MIN_STARVED
    )


def _is_slow(seconds: Sequence[float], rank: int) -> bool:
    return seconds[rank] >= SLOW_RATIO * median(_without(seconds, rank))


def _sample_s(ranks: Sequence[RankStats], work: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(1e-9, stats.work_s) / part for stats, part in zip(ranks, work, strict=True))


def _ratio(shares: Sequence[int]) -> str:
    return ":".join(map(str, shares))


def _mean_times(steps: Sequence[_Step], rank: int, scale: float | None = None) -> RankTimes:
    """Return the means of these steps; with `scale` only of computing, as if there were `scale` times as many
    samples."""
    stats = [step.ranks[rank] for step in steps]
    return RankTimes(
        ready_s=fmean(entry.ready_s if scale is None else scale * entry.work_s for entry in stats),
        data_s=(scale or 1.0) * fmean(entry.own.data_s for entry in stats),
        gc_s=fmean(entry.own.gc_s for entry in stats),
        # The newest: the kernel is asked every few steps, and its older values may be from before.
        starved=stats[-1].host.starved,
        node=stats[-1].node,
    )


def _without(values: Sequence[Value], index: int) -> list[Value]:
    return [*values[:index], *values[index + 1 :]]
