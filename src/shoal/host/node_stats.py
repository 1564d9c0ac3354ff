"""Watch this machine while it trains: what may slow down a rank, by the kernel's counters.

A thread reads some files of /proc and /sys every few seconds. A file that a machine does not have is left out. Counters
are turned into parts of the time, so that they can be compared with a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from shoal.host.facts import boot_id
from shoal.host.memory import available_bytes, total_bytes
from shoal.host.proc import (
    all_pids,
    cpu_ticks,
    interface_counters,
    read_meminfo,
    read_number,
    read_text,
    stat_fields,
)
from shoal.host.topology import control_groups, is_on_battery

SAMPLE_S = 3.0
# A thread that sleeps this long notices when its process stood still. Shorter stops are not noticed.
_PULSE_S = 0.1
_STOPPED_S = 0.08
# Samples that count as now.
_RECENT = 5
# Other programs are looked up only if they use this many cores: reading every process takes milliseconds.
_MIN_OTHER_CORES = 0.2
# A file of samples: all notable ones and one at least so often, for the live page; later fewer, and no more than these.
_WRITE_EVERY_S, _LATER_EVERY_S = 15.0, 600.0
_OFTEN_SAMPLES, MOST_SAMPLES = 10_000, 20_000
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class NodeStats:
    """How a machine did lately. Parts are of the time; 0 where nothing is known."""

    throttled: float = 0.0  # its control group had used up its CPU quota
    frozen: float = 0.0  # the rank's whole process stood still and did not wait for a processor
    other_cores: float = 0.0  # cores that programs outside the run kept busy
    major_faults: float = 0.0  # of the rank a second: pages that were read from a disk
    memory_stall: float = 0.0  # tasks waited for memory (PSI)
    io_stall: float = 0.0  # tasks waited for a disk (PSI)
    steal: float = 0.0  # the hypervisor gave the processors to others
    clock: float = 0.0  # clock frequency as a part of the highest
    heat: float = 0.0  # thermal throttling events a second
    link_errors: float = 0.0  # damaged and dropped packets a second
    resent: float = 0.0  # part of the TCP segments that were sent again
    on_battery: float = 0.0  # 1: the power cable is out
    # Of the rank and its child processes, see `ThreadTimes`: threads that wanted a processor, and those without one.
    wanted: float = 0.0
    waited: float = 0.0
    cpus: float = 0.0  # processors that the rank's main thread may use: all, or those that it is pinned to
    run_cpus: float = 0.0  # processors that any of its threads may use: all that the run has on this machine
    busy: float = 0.0  # how many of these were at work, for any program, also one that a container does not show
    threads: float = 0.0  # that torch computes with
    machine: float = 0.0  # a number that ranks of one machine have in common

    @property
    def is_notable(self) -> bool:
        parts = (self.throttled, self.frozen, self.memory_stall, self.io_stall, self.steal)
        counts = (self.major_faults / 100, self.other_cores, self.heat, self.link_errors / 10, self.resent * 20)
        return max(*parts, *counts) > 0.1

    @property
    def numbers(self) -> tuple[float, ...]:
        return tuple(vars(self).values())


def mean_stats(samples: Iterable[NodeStats]) -> NodeStats:
    rows = [sample.numbers for sample in samples]
    return NodeStats(*(sum(column) / len(rows) for column in zip(*rows, strict=True))) if rows else NodeStats()


class NodeCounters:
    """Reads the kernel's counters of this machine; each is absent where its file is."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc = proc
        self._sys = sys
        self._cgroups = [path for folder in control_groups("cpu", sys, proc) if (path := folder / "cpu.stat").is_file()]
        cpus = sys / "devices/system/cpu"
        self._clocks = sorted(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
        self._heat = sorted(cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))

    def read(self) -> dict[str, float]:
        counters: dict[str, float] = {}
        for name in ("memory", "io"):
            if (total_us := _some_total_us(read_text(self._proc / "pressure" / name))) is not None:
                counters[f"{name}_stall"] = total_us / 1e6
        if throttled := [seconds for path in self._cgroups if (seconds := _throttled_s(read_text(path))) is not None]:
            counters["throttled"] = max(throttled)
        counters |= self._read_cpu()
        if self._heat:
            counters["heat"] = float(sum(read_number(path) or 0 for path in self._heat))
        counters |= _tcp_counters(read_text(self._proc / "self/net/snmp"))
        # Damaged packets in both directions, and dropped ones that were to be sent.
        damaged = [
            int(words[2]) + int(words[10]) + int(words[11])
            for name, words in interface_counters(self._proc)
            if name != "lo"
        ]
        return counters | {"link_errors": float(sum(damaged))} if damaged else counters

    def _read_cpu(self) -> dict[str, float]:
        line = read_text(self._proc / "stat").partition("\n")[0].split()
        if len(line) < 9 or line[0] != "cpu":
            return {}
        user, nice, system, idle, iowait, irq, softirq, steal = (int(word) / _TICKS for word in line[1:9])
        busy = user + nice + system + irq + softirq
        return {"busy": busy, "steal": steal, "all": busy + idle + iowait + steal}

    def read_busy_s(self, cpus: Set[int]) -> float:
        """Return how long these processors have been at work, for any program."""
        total = 0
        for line in read_text(self._proc / "stat").splitlines()[1:]:
            name, *words = line.split()
            if not name.startswith("cpu"):
                break
            if name[3:].isdigit() and int(name[3:]) in cpus and len(words) > 6:
                # user, nice and system; idle and iowait are not work; irq and softirq
                total += sum(map(int, (*words[:3], *words[5:7])))
        return total / _TICKS

    def read_clock(self) -> float | None:
        """Return the mean clock frequency of all cores as a part of their highest."""
        parts = []
        for path in self._clocks:
            now, most = read_number(path), read_number(path.with_name("cpuinfo_max_freq"))
            if now and most:
                parts.append(now / most)
        return sum(parts) / len(parts) if parts else None

    def read_memory(self) -> float:
        """Return the part of the memory that is in use; 0 where it is not known."""
        if "MemAvailable" not in read_meminfo(self._proc):
            return 0.0
        return 1 - available_bytes(self._sys, self._proc) / total_bytes(self._sys, self._proc)

    def is_on_battery(self) -> bool:
        return is_on_battery(self._sys)

    def process_times(self) -> dict[int, float]:
        """Return the CPU seconds of every process that this machine shows."""
        times: dict[int, float] = {}
        for pid in all_pids(self._proc):
            with contextlib.suppress(ProcessLookupError):
                times[pid] = cpu_ticks(stat_fields(pid, self._proc)) / _TICKS
        return times

    def process_name(self, pid: int) -> str:
        return read_text(self._proc / str(pid) / "comm")


def _some_total_us(text: str) -> int | None:
    for line in text.splitlines():
        if line.startswith("some ") and "total=" in line:
            return int(line.rpartition("total=")[2])
    return None


def _throttled_s(text: str) -> float | None:
    """Return how long a control group was without its quota: version 2 counts microseconds, version 1 nanoseconds."""
    values = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) == 2)
    for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        if values.get(name, "").isdigit():
            return int(values[name]) / unit
    return None


def _tcp_counters(text: str) -> dict[str, float]:
    names, values = ([line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")] + [[], []])[:2]
    table = dict(zip(names, values, strict=False))
    try:
        return {"tcp_sent": float(table["OutSegs"]), "tcp_resent": float(table["RetransSegs"])}
    except (KeyError, ValueError):
        return {}


class ThreadTimes:
    """Adds up what the threads of this process and of its child processes did, by the scheduler's own counters.

    A thread that spins counts like one that computes: it takes a processor from others. Threads that have ended since
    are not counted. All is 0 where the kernel does not report it: outside Linux, or without CONFIG_SCHED_INFO.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last, self._at = self._read(), time.perf_counter()

    def since_last(self) -> tuple[float, float]:
        """Return how many threads wanted a processor on average since the last call, and how many waited for one."""
        before, before_at = self._last, self._at
        self._last, self._at = self._read(), time.perf_counter()
        ran_ns = waited_ns = 0
        for task, (ran, waited) in self._last.items():
            ran_before, waited_before = before.get(task, (0, 0))
            ran_ns, waited_ns = ran_ns + ran - ran_before, waited_ns + waited - waited_before
        elapsed_ns = 1e9 * max(1e-3, self._at - before_at)
        return max(0, ran_ns + waited_ns) / elapsed_ns, max(0, waited_ns) / elapsed_ns

    def _read(self) -> dict[str, tuple[int, int]]:
        """Return the nanoseconds that each thread has run and has waited, by its number."""
        times: dict[str, tuple[int, int]] = {}
        processes = ["self"]
        while processes:
            for task in _tasks(self._proc / processes.pop()):
                words = read_text(task / "schedstat").split()
                if len(words) == 3:
                    times[task.name] = int(words[0]), int(words[1])
                    processes += read_text(task / "children").split()
        return times


def _tasks(process: Path) -> list[Path]:
    try:
        return list((process / "task").iterdir())
    except OSError:
        return []


def usable_cpus() -> tuple[set[int], set[int]]:
    """Return the processors that the main thread of this process may use, and those that any of its threads may use."""
    if not hasattr(os, "sched_getaffinity"):
        cpus = set(range(os.cpu_count() or 1))
        return cpus, cpus
    own = os.sched_getaffinity(os.getpid())
    anywhere = set(own)
    for task in _tasks(Path("/proc/self")):
        with contextlib.suppress(OSError):
            anywhere |= os.sched_getaffinity(int(task.name))
    return own, anywhere


class GcTimer:
    """Adds up how long garbage was collected."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._on_gc)

    def close(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._on_gc)

    def take_s(self) -> float:
        """Return the time since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _on_gc(self, phase: str, _: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        elif self._began:
            self._seconds += now - self._began


class OtherPrograms:
    """Finds the programs outside the run that keep processors busy. `is_own`: whether a process belongs to the run."""

    def __init__(self, counters: NodeCounters, is_own: Callable[[int], bool]) -> None:
        self._counters = counters
        self._is_own = is_own
        self._owned: dict[int, bool] = {}
        self._before: tuple[float, dict[int, float]] | None = None
        self._look_every_s = self._cores = 0.0
        self.top_process = ""  # the one that used the most of the processors lately

    def measure_cores(self, now: float, beside_cores: float) -> float:
        """Return how many cores they use. `beside_cores`: how many all other processes of the machine use."""
        if beside_cores < _MIN_OTHER_CORES:
            self._before, self._cores = None, 0.0
            return 0.0
        before = self._before
        if before is not None and now - before[0] < self._look_every_s:
            return self._cores
        cpu_began = time.thread_time()
        times = self._counters.process_times()
        # On a machine with thousands of processes look less often: not for more than a thousandth of the time.
        self._look_every_s = 1000 * (time.thread_time() - cpu_began)
        self._before = now, times
        if before is None:
            return 0.0
        used = {pid: (seconds - before[1][pid]) for pid, seconds in times.items() if pid in before[1]}
        elapsed_s, total_s, most_s = max(1e-3, now - before[0]), 0.0, 0.0
        for pid, seconds in used.items():
            if seconds > 0.02 * elapsed_s and not self._is_of_run(pid):
                total_s += seconds
                if seconds > most_s:
                    most_s, self.top_process = seconds, f"{self._counters.process_name(pid)} (process {pid})"
        self._cores = total_s / elapsed_s
        return self._cores

    def _is_of_run(self, pid: int) -> bool:
        if pid not in self._owned:
            if len(self._owned) > 1000:
                self._owned.clear()
            with contextlib.suppress(OSError):
                self._owned[pid] = pid == os.getpid() or self._is_own(pid)
        return self._owned.get(pid, True)


class KeptSamples:
    """Passes on the samples that are worth keeping: `write` appends one to a file."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        self._write = write
        self._count = 0
        self._written_at = float("-inf")

    def is_wanted(self, now: float, stats: NodeStats) -> bool:
        every_s = _WRITE_EVERY_S if self._count < _OFTEN_SAMPLES else _LATER_EVERY_S
        return self._count < MOST_SAMPLES and (stats.is_notable or now - self._written_at >= every_s)

    def add(self, now: float, stats: NodeStats, **others: float | str) -> None:
        self._count, self._written_at = self._count + 1, now
        named = {entry.name: round(getattr(stats, entry.name), 4) for entry in fields(stats)}
        self._write({**named, **others})


class _Reading(NamedTuple):
    at: float
    counters: dict[str, float]
    own_cpu_s: float  # of this process
    own_major_faults: float
    run_busy_s: float  # of the processors that the run may use


class NodeWatch:
    """Samples this machine in a thread, for the rank whose process it is.

    `is_own` tells whether a process belongs to the run: all others are other programs. `write` receives the samples
    that are worth keeping. `threads` is how many torch computes with.
    """

    def __init__(
        self,
        is_own: Callable[[int], bool] = lambda pid: False,
        write: Callable[[Mapping[str, Any]], None] = lambda sample: None,
        counters: NodeCounters | None = None,
        threads: int = 0,
    ) -> None:
        self._counters = counters or NodeCounters()
        self._thread_times = ThreadTimes()
        self._other_programs = OtherPrograms(self._counters, is_own)
        self._kept = KeptSamples(write)
        self._gc = GcTimer()
        self._stopped_s = 0.0  # that the process stood still since the last sample
        # Small enough for means of it to be exact.
        self._machine = zlib.crc32((boot_id() or socket.gethostname()).encode())
        self._recent: deque[NodeStats] = deque(maxlen=_RECENT)
        self._sums, self._count = NodeStats().numbers, 0
        self._end = threading.Event()
        self._last = self._read(usable_cpus()[1])
        self.threads = threads
        self.sample_cpu_s = 0.0  # what all samples took

    @property
    def top_process(self) -> str:
        """The program outside the run that used the most of the processors lately."""
        return self._other_programs.top_process

    def start(self) -> None:
        self._gc.start()
        threading.Thread(target=self._work, name="shoal-node-watch", daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self._gc.close()

    def recent(self) -> NodeStats:
        """Return the means of the last samples."""
        return mean_stats(tuple(self._recent))

    def overall(self) -> NodeStats:
        """Return the means of all samples."""
        return NodeStats(*(value / max(1, self._count) for value in self._sums))

    def take_gc_s(self) -> float:
        """Return how long garbage was collected since the last call."""
        return self._gc.take_s()

    def _work(self) -> None:
        sampled_at, waited_s = time.perf_counter(), cpu_wait_s("thread-self")
        while True:
            began = time.perf_counter()
            if self._end.wait(_PULSE_S):
                return
            now, before_s = time.perf_counter(), waited_s
            waited_s = cpu_wait_s("thread-self")
            # A thread that is not woken for long, and did not wait for a processor: all of the process stood still.
            late_s = now - began - _PULSE_S - (waited_s - before_s)
            if late_s > _STOPPED_S:
                self._stopped_s += late_s
            if now - sampled_at >= SAMPLE_S:
                sampled_at = now
                with contextlib.suppress(OSError, ValueError):
                    self.sample()

    def sample(self) -> NodeStats:
        """Read all counters once; return what happened since the last sample."""
        cpu_began = time.thread_time()
        cpus, run_cpus = usable_cpus()
        before, now = self._last, self._read(run_cpus)
        stats, spent = self._compare(before, now, len(cpus), len(run_cpus))
        self._last = now
        self._recent.append(stats)
        self._sums = tuple(total + value for total, value in zip(self._sums, stats.numbers, strict=True))
        self._count += 1
        if self._kept.is_wanted(now.at, stats):
            cpu = round(spent.get("busy", 0.0) / max(1e-3, spent.get("all", 0.0)), 4)
            memory = round(self._counters.read_memory(), 4)
            self._kept.add(now.at, stats, cpu=cpu, memory=memory, top_process=self.top_process)
        self.sample_cpu_s += time.thread_time() - cpu_began
        return stats

    def _read(self, run_cpus: Set[int]) -> _Reading:
        return _Reading(time.perf_counter(), self._counters.read(), *_own_usage(), self._counters.read_busy_s(run_cpus))

    def _compare(self, before: _Reading, now: _Reading, cpus: int, run_cpus: int) -> tuple[NodeStats, dict[str, float]]:
        """Return what happened between two readings, and by how much each counter grew."""
        elapsed_s = max(1e-3, now.at - before.at)
        spent = {
            name: max(0.0, value - before.counters[name])
            for name, value in now.counters.items()
            if name in before.counters
        }
        stopped_s, self._stopped_s = self._stopped_s, 0.0
        throttled = min(1.0, spent.get("throttled", 0.0) / elapsed_s)
        wanted, waited = self._thread_times.since_last()
        beside_cores = (spent.get("busy", 0.0) - (now.own_cpu_s - before.own_cpu_s)) / elapsed_s
        stats = NodeStats(
            throttled=throttled,
            # A group without quota stands still too.
            frozen=max(0.0, min(1.0, stopped_s / elapsed_s) - throttled),
            other_cores=self._other_programs.measure_cores(now.at, beside_cores),
            major_faults=(now.own_major_faults - before.own_major_faults) / elapsed_s,
            memory_stall=min(1.0, spent.get("memory_stall", 0.0) / elapsed_s),
            io_stall=min(1.0, spent.get("io_stall", 0.0) / elapsed_s),
            steal=spent.get("steal", 0.0) / max(1e-3, spent.get("all", 0.0)),
            clock=self._counters.read_clock() or 0.0,
            heat=spent.get("heat", 0.0) / elapsed_s,
            link_errors=spent.get("link_errors", 0.0) / elapsed_s,
            resent=spent.get("tcp_resent", 0.0) / max(1.0, spent.get("tcp_sent", 0.0)),
            on_battery=float(self._counters.is_on_battery()),
            wanted=wanted,
            waited=waited,
            cpus=cpus,
            run_cpus=run_cpus,
            busy=max(0.0, now.run_busy_s - before.run_busy_s) / elapsed_s,
            threads=self.threads,
            machine=self._machine,
        )
        return stats, spent


def _own_usage() -> tuple[float, float]:
    """Return the CPU seconds and the major page faults of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, float(usage.ru_majflt)


def cpu_wait_s(task: str = "self") -> float:
    """Return how long the main thread of this process (or `thread-self`, this one) has waited for a processor.

    0 where the kernel does not report it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
