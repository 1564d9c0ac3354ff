"""The few numbers that ranks tell each other in every step: loss, who was ready when, who wants to stop.

Gathered while the optimizer works, so nobody waits for it: right after an all-reduce all ranks are together anyway.
Where there is none in a step, ranks may drift apart: what they told each other is then waited for some steps later.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.sync.interruptible import await_work, own_sockets
from shoal.sync.world import World, without_group

# SECTION sync/times
# What a rank knows of one step's gradient exchange.


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


# SECTION sync/vitals
# How a rank's machine fares, by the kernel's own counters: processor time it was refused, and its connections.
#
# Looked at every few steps and told to the others with the next one's figures: a few numbers, no exchange of their own.


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
class HostStats:
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


class KernelCounters:
    """Asked by the thread that trains: it is this one's waiting that counts."""

    def __init__(self) -> None:
        self._connections: dict[int, _Sent] = {}
        self._last: deque[dict[int, _Sent]] = deque(maxlen=_LOOKS)
        self._delay_s, self._at = _run_delay_s(), time.perf_counter()
        self._address = 0
        self.look()

    def look(self) -> HostStats:
        """Since the last look."""
        delay_s, at = _run_delay_s(), time.perf_counter()
        starved = (delay_s - self._delay_s) / (at - self._at) if at > self._at else 0.0
        self._delay_s, self._at = delay_s, at
        self._last.append(self._since_last())
        news = self._last[-1]
        best_bps = max((_bps(sent.acked, sent.busy_us) for sent in news.values()), default=0.0)
        slow_peer, slow_bps = _slowest(news)
        lossy_peer, resent = _lossiest(self._last)
        return HostStats(
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


# So rarely is the kernel asked: it takes a tenth of a millisecond.
_VITALS_EVERY = 5


@dataclass(frozen=True)
class RankStats:
    """One rank's figures. `ready_s`: from when all were together to the end of its own work."""

    ready_s: float
    vitals: HostStats


@dataclass(frozen=True)
class StepStats:
    """What all ranks know of a step once it is over; the same on every rank but for `wait_s`. `edge`: somebody was
    told that all are to stop together after a step. `told` is by rank."""

    loss_sum: float
    stop: bool
    wait_s: float
    edge: bool
    told: tuple[RankStats, ...]


@dataclass(frozen=True)
class _PendingGather:
    """One step's numbers on their way."""

    mine: Tensor
    rows: list[Tensor]
    work: dist.Work
    ready_s: float

    def read(self, world: World) -> StepStats:
        await_work(self.work, world.release)
        matrix = torch.stack(self.rows).cpu()
        loss_sum, ready_s, stop, edge = matrix[:, :4].unbind(dim=1)
        return StepStats(
            loss_sum=float(loss_sum.sum()),
            stop=bool(stop.any()),
            wait_s=float(ready_s.max()) - self.ready_s,
            edge=bool(edge.any()),
            told=tuple(RankStats(ready, HostStats(*vitals)) for _, ready, _, _, *vitals in matrix.tolist()),
        )


class StepGather:
    """`begin` when backward has ended, `finish` when the optimizer has.

    How long this rank waited for the slowest follows from everybody's time since the end of the last all-reduce, when
    all were together: durations only, since clocks of two machines are never compared.

    With a `lag` of L, `finish` of step s gives what became known: step s - L, and only when everybody has begun the
    step after that one, so that all have had it. All ranks learn the same at the same step. `late_s` is how long the
    last `finish` waited for ranks that are behind.
    """

    def __init__(self, world: World, lag: int = 0) -> None:
        self._world = world
        self._lag = lag
        self._asked: deque[_PendingGather] = deque()
        self._together_at = time.perf_counter()
        self._kernel = KernelCounters()
        self._vitals = HostStats()
        self._begun = 0
        self._waited_s = 0.0
        self.late_s = 0.0

    def begin(self, loss_sum: float, comm: CommTimes, stop: bool, edge: bool = False) -> None:
        ready_s = comm.ready_at - self._together_at - self._waited_s
        self._together_at = comm.ready_at + comm.tail_s
        self._begun += 1
        if self._begun % _VITALS_EVERY == 0:
            self._vitals = self._kernel.look()
        figures = [loss_sum, ready_s, stop, edge, *self._vitals.numbers()]
        mine = torch.tensor(figures, dtype=torch.float64, device=self._world.device)
        rows = [torch.zeros_like(mine) for _ in range(self._world.size)]
        work = dist.all_gather(rows, mine, group=self._world.group, async_op=True)
        assert work is not None  # noqa: S101 - only a rank outside the group gets None
        self._asked.append(_PendingGather(mine, rows, work, ready_s))

    def finish(self) -> list[StepStats]:
        """One step's, in order; none in the first steps of a lagging exchange."""
        began = time.perf_counter()
        found = self._finish()
        # Whoever waits here for figures on their way is not slow itself.
        self._waited_s = time.perf_counter() - began
        self.late_s = self._waited_s if self._lag else 0.0
        return found

    def _finish(self) -> list[StepStats]:
        if not self._lag:
            return self.drain()
        if len(self._asked) <= self._lag:
            return []
        await_work(self._asked[1].work, self._world.release)
        return self._read(1)

    def let_go(self) -> None:
        """Nothing more is asked or read; what this rank told the others stays known."""
        self._world = without_group(self._world)

    def own_losses(self) -> list[float]:
        """This rank's own sums of the steps of which nothing is known yet."""
        return [float(asked.mine[0]) for asked in self._asked]

    def drain(self) -> list[StepStats]:
        """Everything that was asked so far; waits for everybody."""
        return self._read(len(self._asked))

    def _read(self, count: int) -> list[StepStats]:
        """Forgotten only when it has been read: where that fails, this rank's own losses are all there is to tell."""
        found = [asked.read(self._world) for asked in islice(self._asked, count)]
        for _ in found:
            self._asked.popleft()
        return found


def sum_over_world(world: World, values: list[float]) -> list[float]:
    """A handful of numbers added up over all ranks, in double precision."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    await_work(dist.all_reduce(tensor, group=world.group, async_op=True), world.release)
    return [float(value) for value in tensor.cpu()]


def worst_over_world(world: World, values: list[float]) -> list[float]:
    """The largest of each number over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    await_work(dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=world.group, async_op=True), world.release)
    return [float(value) for value in tensor.cpu()]


# SECTION sync/timer
# Where the time of a step goes, phase by phase.


class StepTimer:
    """Adds up named phases of one step.

        timer = StepTimer()
        for batch in batches:
            timer.start()
            with timer.phase("forward"):
                loss = model(batch)
            ...
            print(timer.finish())     # {"forward": 0.021, ..., "other": 0.001, "step": 0.034}

    On a GPU pass `synchronize=torch.cuda.synchronize`: kernels run behind the program's back, and without it a phase
    would only show how long it took to queue them.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def start(self) -> None:
        self.seconds = {}
        self.began = self.now()

    def now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _Phase(self, name)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Part of one phase turned out to be another: the end of backward was spent waiting for the network."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def finish(self) -> dict[str, float]:
        """The phases, what none of them covered as `other`, and the whole as `step`."""
        step = self.now() - self.began
        return {**self.seconds, "other": step - sum(self.seconds.values()), "step": step}


class WholeStepTimer(StepTimer):
    """Times the step and none of its phases: what instrumentation costs is measured against this."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, name: str, seconds: float) -> None:
        pass

    def finish(self) -> dict[str, float]:
        return {"step": self.now() - self.began}


class _Phase(AbstractContextManager[None]):
    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._began = self._timer.now()

    def __exit__(self, *_: object) -> None:
        self._timer.add(self._name, self._timer.now() - self._began)
