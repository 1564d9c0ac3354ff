"""What the ranks measure and exchange in every step: losses, times, host counters, requests to stop.

    CommTimes        the times of one step's gradient exchange on this rank
    StepGather       an all-gather of a few numbers per rank in every step
    KernelCounters   this rank's CPU starvation and its TCP connections, by the kernel's counters
    StepTimer        the phases of one step

The gather runs while the optimizer works, so no rank waits for it: right after an all-reduce all ranks are at the same
point anyway. In a step without one the ranks may drift apart; the gathered numbers are then read some steps later.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import reduce
from itertools import islice
from operator import add
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.host.node_stats import NodeStats, cpu_wait_s
from shoal.sync.interruptible import await_work, own_sockets
from shoal.sync.world import World, without_group


@dataclass(frozen=True)
class CommTimes:
    """One step's gradient exchange as this rank saw it."""

    ready_at: float  # when the last gradient was computed and only communication was left (perf_counter)
    tail_s: float  # how long backward continued after that
    # Time with at least one all-reduce under way, whether or not hidden behind backward. It includes waiting for a peer
    # where `wait_s` is None. None where it is not measured.
    allreduce_s: float | None
    wait_s: float | None = None  # the part of the tail known to be waiting for a peer; None where it is not measured

    @property
    def hidden_s(self) -> float | None:
        """The part of `allreduce_s` during which this rank computed."""
        if self.allreduce_s is None:
            return None
        return max(0.0, self.allreduce_s - (self.tail_s - (self.wait_s or 0.0)))


# A moment: of the processor, or of a GPU's queue.
Mark = float | torch.cuda.Event


def mark(device: torch.device | None = None) -> Mark:
    """Return the time now, or an event that marks the place in the queue of a GPU."""
    if device is None or device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_past(moment: Mark) -> bool:
    return isinstance(moment, float) or moment.query()


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two moments of one device; 0 for two that cannot be compared."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin if isinstance(begin, float) and isinstance(end, float) else 0.0
    return float(begin.elapsed_time(end)) / 1e3


def to_host_times(spans: list[list[Mark]]) -> list[list[float]]:
    """Return moments of a GPU's queue by the processor's clock; wait until all of them are past."""
    events = [moment for span in spans for moment in span if not isinstance(moment, float)]
    if not events:
        return [[moment for moment in span if isinstance(moment, float)] for span in spans]
    for event in events:
        event.synchronize()
    last = torch.cuda.Event(enable_timing=True)
    last.record()
    last.synchronize()
    now = time.perf_counter()
    return [[now - seconds_between(moment, last) for moment in span] for span in spans]


def covered(spans: list[list[float]]) -> float:
    """Return the seconds during which at least one of the spans, sorted by their begin, was under way."""
    total, reached = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class HostStats:
    """How a rank's host does, by the kernel's counters. Addresses are IPv4, as numbers; 0 where nothing is known."""

    starved: float = 0.0  # the part of the time in which the rank's thread wanted a processor and had none
    address: float = 0.0
    best_bps: float = 0.0  # what the fastest of its connections carried at least
    slow_peer: float = 0.0  # the slowest of the peers it sends to
    slow_bps: float = 0.0
    lossy_peer: float = 0.0  # the peer to which it resends the largest part
    resent: float = 0.0
    queued_s: float = 0.0  # what a round trip to that peer took longer than the shortest one: packets wait in a queue

    def numbers(self) -> tuple[float, ...]:
        return tuple(vars(self).values())


class OwnTimes(NamedTuple):
    """What this rank did since its last step besides computing."""

    data_s: float = 0.0  # loading data
    gc_s: float = 0.0  # collecting garbage
    disk_s: float = 0.0  # writing a checkpoint


NO_TIMES, NO_STATS = OwnTimes(), NodeStats()


@dataclass(frozen=True)
class RankStats:
    ready_s: float  # from when all ranks were at the same point to the end of this rank's own work
    host: HostStats
    own: OwnTimes = NO_TIMES
    node: NodeStats = NO_STATS
    work_s: float = 0.0  # the part of `ready_s` that the micro-batches of the step took


class StopKind(IntEnum):
    """Whether a rank wants the training to end."""

    NO = 0
    PAUSE = 1  # It can be resumed.
    COMPLETE = 2  # It needs no more steps.

    @classmethod
    def of(cls, is_paused: bool, is_complete: bool) -> StopKind:
        return cls.COMPLETE if is_complete else cls.PAUSE if is_paused else cls.NO


@dataclass(frozen=True)
class StepStats:
    """What all ranks know of a step once it is over; the same on every rank but for `wait_s`."""

    loss_sum: float
    stop: StopKind  # the most that a rank wants
    wait_s: float
    stop_after_step: bool  # a rank was asked that all stop together after a step
    by_rank: tuple[RankStats, ...]  # by rank


def _rank_stats(row: list[float]) -> RankStats:
    _, ready_s, work_s, _, _, *numbers = row
    own, host = len(OwnTimes._fields), len(fields(HostStats))
    return RankStats(
        ready_s,
        HostStats(*numbers[own : own + host]),
        OwnTimes(*numbers[:own]),
        NodeStats(*numbers[own + host :]),
        work_s,
    )


@dataclass(frozen=True)
class _PendingGather:
    own: list[float]
    rows: list[Tensor]  # empty on a single rank, which has its own numbers only
    work: dist.Work | None
    ready_s: float

    def wait(self, world: World) -> None:
        if self.work is not None:
            await_work(self.work, world.release)

    def read(self, world: World) -> StepStats:
        self.wait(world)
        numbers = torch.stack(self.rows).tolist() if self.rows else [self.own]
        loss_sum, ready_s, _, stop, stop_after_step, *_ = zip(*numbers, strict=True)
        return StepStats(
            # Not `sum`: from Python 3.12 on it rounds otherwise, and all ranks must have the same bits.
            loss_sum=reduce(add, loss_sum),
            stop=StopKind(int(max(stop))),
            wait_s=max(ready_s) - self.ready_s,
            stop_after_step=any(stop_after_step),
            by_rank=tuple(map(_rank_stats, numbers)),
        )


# The kernel is asked in every fifth step only: it takes a tenth of a millisecond.
_HOST_STATS_EVERY = 5


class StepGather:
    """Gathers each step's numbers: `begin` when backward has ended, `finish` when the optimizer has.

    How long this rank waited for the slowest follows from all ranks' times since the end of the last all-reduce, when
    all were at the same point: only durations, since clocks of two machines are never compared.

    With a `lag` of L, `finish` of step s returns step s - L, and only when all ranks have begun the step after that
    one. All ranks get the same result at the same step.
    """

    def __init__(self, world: World, lag: int = 0) -> None:
        self._world = world
        self._lag = lag
        self._pending: deque[_PendingGather] = deque()
        self._together_at = time.perf_counter()
        self._kernel = KernelCounters()
        self._host_stats = HostStats()
        self._begun = 0
        self._waited_s = 0.0
        self.late_s = 0.0  # how long the last `finish` waited for ranks that are behind

    def begin(
        self,
        loss_sum: float,
        comm: CommTimes,
        stop: StopKind,
        stop_after_step: bool = False,
        work_s: float = 0.0,
        own_times: OwnTimes = NO_TIMES,
        node: NodeStats = NO_STATS,
    ) -> None:
        """Send this rank's numbers. `work_s` is how long it took for its micro-batches."""
        ready_s = comm.ready_at - self._together_at - self._waited_s
        self._together_at = comm.ready_at + comm.tail_s
        self._begun += 1
        if self._begun % _HOST_STATS_EVERY == 0:
            self._host_stats = self._kernel.look()
        own_numbers = (*own_times, *self._host_stats.numbers(), *node.numbers)
        numbers = [loss_sum, ready_s, work_s, float(stop), float(stop_after_step), *own_numbers]
        rows: list[Tensor] = []
        work: dist.Work | None = None
        if self._world.size > 1:
            own = torch.tensor(numbers, dtype=torch.float64, device=self._world.control_device)
            rows = [torch.zeros_like(own) for _ in range(self._world.size)]
            work = dist.all_gather(rows, own, group=self._world.group, async_op=True)
        self._pending.append(_PendingGather(numbers, rows, work, ready_s))

    def add_wait(self, seconds: float) -> None:
        """Note that this rank waited for others inside the step: that does not make it slow."""
        self._waited_s += seconds

    def finish(self) -> list[StepStats]:
        """Return the statistics of one step; none in the first steps of a lagging gather."""
        began = time.perf_counter()
        if not self._lag:
            stats = self.drain()
        elif len(self._pending) <= self._lag:
            stats = []
        else:
            self._pending[1].wait(self._world)
            stats = self._read(1)
        # Time spent waiting here does not make this rank slow.
        self._waited_s = time.perf_counter() - began
        self.late_s = self._waited_s if self._lag else 0.0
        return stats

    def note_own(self, loss_sum: float) -> None:
        """Note this rank's loss of a step that it finishes without sending its numbers."""
        self._pending.append(_PendingGather([loss_sum], [], None, 0.0))

    def close(self) -> None:
        """Drop the group: nothing more is gathered or read. `own_losses` stay known."""
        self._world = without_group(self._world)

    def own_losses(self) -> list[float]:
        """Return this rank's loss sums of the steps that were not read yet."""
        return [pending.own[0] for pending in self._pending]

    def drain(self) -> list[StepStats]:
        """Return the statistics of all steps begun so far; wait for all ranks."""
        return self._read(len(self._pending))

    def _read(self, count: int) -> list[StepStats]:
        # Removed only after reading: where that fails, this rank's own losses are all that is known.
        stats = [pending.read(self._world) for pending in islice(self._pending, count)]
        for _ in stats:
            self._pending.popleft()
        return stats


def sum_over_world(world: World, values: list[float]) -> list[float]:
    """Return the sum of each number over all ranks, in double precision."""
    return _all_reduce(world, values, dist.ReduceOp.SUM)


def max_over_world(world: World, values: list[float]) -> list[float]:
    """Return the largest of each number over all ranks."""
    return _all_reduce(world, values, dist.ReduceOp.MAX)


def _all_reduce(world: World, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=world.control_device)
    await_work(dist.all_reduce(tensor, op=op, group=world.group, async_op=True), world.release)
    return [float(value) for value in tensor.cpu()]


# struct tcp_info of linux/tcp.h, as far as it is read: rtt; bytes_acked; min_rtt, busy_time and rwnd_limited;
# bytes_sent and bytes_retrans. Times are in µs. Kernels since 4.19 have them all.
_TCP_INFO = struct.Struct("@68x I 48x Q 20x I 16x Q Q 16x Q Q")
# The kernel counts busy time in ticks of up to 10 ms, so a rate is a lower bound, and only a connection that was busy
# for long can be called slow.
_TICK_US = 12_000
_MIN_BUSY_US = 40_000
# Small messages wait for answers, not for the link; and losses among few bytes are chance.
_MIN_ACKED_BYTES = 1 << 16
_MIN_SENT_BYTES = 1 << 19
_MIN_RESENT_BYTES = 1 << 13
# Losses come in bursts: they are counted over this many looks.
_LOSS_LOOKS = 10


class _Sent(NamedTuple):
    """Counters of one connection, or of all to one peer, since it was opened."""

    acked: int = 0
    busy_us: int = 0
    full_us: int = 0  # the part of `busy_us` in which the receiver had no room: that is not the link's fault
    sent: int = 0
    resent: int = 0

    def plus(self, other: _Sent) -> _Sent:
        return _Sent(*(one + two for one, two in zip(self, other, strict=True)))

    def minus(self, other: _Sent) -> _Sent:
        return _Sent(*(one - two for one, two in zip(self, other, strict=True)))


class KernelCounters:
    """Reads the kernel's counters. Used by the training thread, because it is this thread's waiting that counts."""

    def __init__(self) -> None:
        self._connections: dict[int, _Sent] = {}
        self._looks: deque[dict[int, _Sent]] = deque(maxlen=_LOSS_LOOKS)
        self._queued_us: deque[dict[int, int]] = deque(maxlen=_LOSS_LOOKS)
        self._delay_s, self._at = cpu_wait_s("thread-self"), time.perf_counter()
        self._address = 0
        self.look()

    def look(self) -> HostStats:
        """Return the statistics since the last look."""
        delay_s, at = cpu_wait_s("thread-self"), time.perf_counter()
        starved = (delay_s - self._delay_s) / (at - self._at) if at > self._at else 0.0
        self._delay_s, self._at = delay_s, at
        sent_to = self._sent_since_last()
        self._looks.append(sent_to)
        slow_peer, slow_bps = _slowest(sent_to)
        lossy_peer, resent = _lossiest(self._looks)
        return HostStats(
            starved=min(max(starved, 0.0), 1.0),
            address=self._address,
            best_bps=max((_bps_at_least(sent.acked, sent.busy_us) for sent in sent_to.values()), default=0.0),
            slow_peer=slow_peer,
            slow_bps=slow_bps,
            lossy_peer=lossy_peer,
            resent=resent,
            queued_s=max(look.get(lossy_peer, 0) for look in self._queued_us) / 1e6,
        )

    def _sent_since_last(self) -> dict[int, _Sent]:
        """Return what was sent to each peer; a new connection counts from its beginning."""
        before, self._connections = self._connections, {}
        sent_to: dict[int, _Sent] = {}
        queued_us: dict[int, int] = {}
        for inode, own, peer, sent, queue_us in _connections():
            self._connections[inode], self._address = sent, own
            sent_to[peer] = sent_to.get(peer, _Sent()).plus(sent.minus(before.get(inode, _Sent())))
            queued_us[peer] = max(queue_us, queued_us.get(peer, 0))
        self._queued_us.append(queued_us)
        return sent_to


def _bps_at_least(acked: int, busy_us: int) -> float:
    return 8e6 * acked / (busy_us + _TICK_US)


def _slowest(sent_to: dict[int, _Sent]) -> tuple[int, float]:
    rates = {
        peer: _bps_at_least(sent.acked, sent.busy_us - sent.full_us)
        for peer, sent in sent_to.items()
        if sent.acked >= _MIN_ACKED_BYTES and sent.busy_us - sent.full_us >= _MIN_BUSY_US
    }
    return min(rates.items(), key=lambda item: item[1], default=(0, 0.0))


def _lossiest(looks: deque[dict[int, _Sent]]) -> tuple[int, float]:
    total: dict[int, _Sent] = {}
    for sent_to in looks:
        for peer, sent in sent_to.items():
            total[peer] = total.get(peer, _Sent()).plus(sent)
    shares = {
        peer: sent.resent / sent.sent
        for peer, sent in total.items()
        if sent.sent >= _MIN_SENT_BYTES and sent.resent >= _MIN_RESENT_BYTES
    }
    return max(shares.items(), key=lambda item: item[1], default=(0, 0.0))


def _connections() -> Iterator[tuple[int, int, int, _Sent, int]]:
    """Yield inode, own address, peer's address, counters and µs in queues of each connection to another host.

    Linux only.
    """
    if sys.platform != "linux":
        return
    for inode, connection in own_sockets():
        with suppress(OSError, struct.error):
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                own, peer = connection.getsockname()[0], connection.getpeername()[0]
                if own != peer:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                    rtt_us, acked, min_rtt_us, *counters = _TCP_INFO.unpack(info)
                    # The least one is the largest number while there is none.
                    queue_us = max(0, rtt_us - min_rtt_us)
                    yield inode, _as_number(own), _as_number(peer), _Sent(acked, *counters), queue_us


def _as_number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address))


class StepTimer:
    """Adds up named phases of one step.

        timer = StepTimer()
        for batch in batches:
            timer.start()
            with timer.phase("forward"):
                loss = model(batch)
            ...
            print(timer.finish())     # {"forward": 0.021, ..., "other": 0.001, "step": 0.034}

    On a GPU, whose work is queued, phases are marked by events, and the queue never runs empty for them. The last
    phase is still running when a step finishes, so its time counts for the next step.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._spans: list[tuple[str, Mark, Mark]] = []
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def start(self) -> None:
        """Begin a step: forget the phases of the last one."""
        self.seconds = {}
        self.began = time.perf_counter()

    def mark(self) -> Mark:
        """Return the time, for `add_since`."""
        return mark(self._device)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add the time of the block to this phase."""
        return _Phase(self, name)

    def add_since(self, name: str, begin: Mark) -> None:
        """Add the time since a mark to a phase."""
        end = self.mark()
        if isinstance(end, float):
            self.add(name, seconds_between(begin, end))
        else:
            self._spans.append((name, begin, end))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move time between phases: the end of backward may have been spent waiting for the network."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def finish(self) -> dict[str, float]:
        """Return the phases, the time that none of them covered as `other`, and the whole as `step`."""
        step = time.perf_counter() - self.began
        running = [span for span in self._spans if not is_past(span[2])]
        for name, begin, end in self._spans[: len(self._spans) - len(running)]:
            self.add(name, seconds_between(begin, end))
        self._spans = running
        return {**self.seconds, "other": step - sum(self.seconds.values()), "step": step}


class WholeStepTimer(StepTimer):
    """Times the step and none of its phases: the cost of the instrumentation is measured against this."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> Mark:
        return 0.0

    def add(self, name: str, seconds: float) -> None:
        pass

    def finish(self) -> dict[str, float]:
        return {"step": time.perf_counter() - self.began}


class _Phase(AbstractContextManager[None]):
    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._began = self._timer.mark()

    def __exit__(self, *_: object) -> None:
        self._timer.add_since(self._name, self._began)
