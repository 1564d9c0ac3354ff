"""Samples of a machine, from files as kernels write them. Files that a machine does not have are left out."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.host.node_stats import NodeCounters, NodeStats, NodeWatch, ThreadTimes, mean_stats, usable_cpus

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin MaxConn ActiveOpens PassiveOpens AttemptFails CurrEstab InSegs OutSegs RetransSegs
Tcp: 1 200 -1 12 11 0 8 90000 {sent} {resent}
"""
DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier
    lo: 100 1 9 9 0 0 0 0 100 1 9 9 0 0 0 0
  eth0: 5000000 4000 {errors} 2 0 0 0 0 6000000 4100 1 3 0 0 0 0
"""


class Machine:
    """Files of /proc and /sys in a folder."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        for folder in (self.proc, self.sys):
            folder.mkdir()

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def counters(self) -> NodeCounters:
        return NodeCounters(self.proc, self.sys)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_machine_without_any_file_gives_an_empty_sample(machine: Machine) -> None:
    watch = NodeWatch(counters=machine.counters())
    stats = watch.sample()
    assert (stats.throttled, stats.steal, stats.clock, stats.heat, stats.on_battery) == (0, 0, 0, 0, 0)
    assert not NodeStats().is_notable


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/user.slice/run.scope", "sys/fs/cgroup/user.slice/cpu.stat", "usage_usec 5\nthrottled_usec {us}\n"),
        ("4:cpu,cpuacct:/lab/n2", "sys/fs/cgroup/cpu,cpuacct/lab/n2/cpu.stat", "periods 3\nthrottled_time {us}000\n"),
        ("4:cpu:/lab/node2", "sys/fs/cgroup/cpu/lab/node2/cpu.stat", "nr_periods 9\nthrottled_time {us}000\n"),
    ],
)  # fmt: skip
def test_a_quota_of_either_kind_of_control_group_is_seen(machine: Machine, group: str, file: str, text: str) -> None:
    machine.write("proc/self/cgroup", f"9:memory:/\n{group}\n")
    machine.write(file, text.format(us=1_000_000))
    counters = machine.counters()
    assert counters.read()["throttled"] == 1.0
    machine.write(file, text.format(us=3_500_000))
    assert counters.read()["throttled"] == 3.5


def test_counters_are_read_as_kernels_write_them(machine: Machine) -> None:
    machine.write("proc/pressure/memory", "some avg10=0.00 avg60=0.00 total=2500000\nfull avg10=0.00 total=7\n")
    machine.write("proc/stat", "cpu  100 0 100 600 0 0 0 200 0 0\ncpu0 1 1 1\n")
    machine.write("proc/self/net/snmp", SNMP.format(sent=1000, resent=20))
    machine.write("proc/self/net/dev", DEV.format(errors=4))
    machine.write("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", "12\n")
    ticks = os.sysconf("SC_CLK_TCK")
    values = machine.counters().read()
    assert values["memory_stall"] == 2.5
    assert (values["busy"], values["steal"], values["all"]) == (200 / ticks, 200 / ticks, 1000 / ticks)
    assert (values["tcp_sent"], values["tcp_resent"], values["link_errors"], values["heat"]) == (1000, 20, 8, 12)


def test_clock_and_power_cable(machine: Machine) -> None:
    for cpu, now in enumerate((800_000, 1_600_000)):
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{now}\n")
        machine.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq", "3200000\n")
    machine.write("sys/class/power_supply/AC/type", "Mains\n")
    machine.write("sys/class/power_supply/AC/online", "0\n")
    counters = machine.counters()
    assert counters.read_clock() == pytest.approx(0.375)
    assert counters.is_on_battery()
    machine.write("sys/class/power_supply/AC/online", "1\n")
    assert not counters.is_on_battery()


def test_the_busiest_program_outside_the_run_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")

    def show(busy: int, by_process: Mapping[int, int]) -> None:
        machine.write("proc/stat", f"cpu  {busy * ticks} 0 0 0 0 0 0 0 0 0\n")
        for pid, seconds in by_process.items():
            machine.write(
                f"proc/{pid}/stat", f"{pid} (a name) S 1 1 1 0 -1 0 0 0 0 0 {seconds * ticks} 0 0 0 20 0 1 0 77\n"
            )
            machine.write(f"proc/{pid}/comm", f"program{pid}\n")

    clock = [100.0]
    monkeypatch.setattr("shoal.host.node_stats.time.perf_counter", lambda: clock[0])
    show(0, {7: 0, 8: 0, 9: 0})
    written: list[Mapping[str, Any]] = []
    watch = NodeWatch(is_own=lambda pid: pid == 9, write=written.append, counters=machine.counters())
    for second in (10, 20):
        clock[0] = 100.0 + second
        show(2 * second, {7: second // 5, 8: second, 9: second})
        stats = watch.sample()
    assert stats.other_cores == pytest.approx(1.2, abs=0.05)
    assert watch.top_process == "program8 (process 8)"
    assert written[-1]["top_process"] == watch.top_process


def test_notable_samples_are_kept_and_one_every_15_seconds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("shoal.host.node_stats.time.perf_counter", lambda: clock[0])
    written: list[Mapping[str, Any]] = []
    watch = NodeWatch(write=written.append, counters=machine.counters())
    for _ in range(100):
        clock[0] += 3.0
        watch.sample()
    assert len(written) == 20


def test_the_use_of_processors_and_memory_is_written_for_the_live_page(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n")
    machine.write("proc/stat", "cpu  100 0 100 600 0 0 0 200 0 0\n")
    written: list[Mapping[str, Any]] = []
    watch = NodeWatch(write=written.append, counters=machine.counters())
    machine.write("proc/stat", "cpu  160 0 110 620 0 0 0 210 0 0\n")
    watch.sample()
    assert (written[0]["cpu"], written[0]["memory"]) == (0.7, 0.75)


def test_garbage_collection_is_timed() -> None:
    watch = NodeWatch()
    watch.start()
    try:
        began = time.perf_counter()
        gc.collect()
        assert 0 < watch.take_gc_s() <= time.perf_counter() - began
        assert watch.take_gc_s() == 0
    finally:
        watch.close()


def test_recent_samples_are_averaged() -> None:
    assert mean_stats([]) == NodeStats()
    assert mean_stats([NodeStats(throttled=0.2), NodeStats(throttled=0.6)]).throttled == pytest.approx(0.4)


def test_threads_that_run_or_wait_are_counted_with_those_of_child_processes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("shoal.host.node_stats.time.perf_counter", lambda: clock[0])

    def show(task: str, ran_s: float, waited_s: float, children: str = "") -> None:
        machine.write(f"proc/{task}/schedstat", f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 7\n")
        machine.write(f"proc/{task}/children", children)

    show("self/task/7", 50, 5, "20 ")
    show("self/task/8", 50, 5)
    show("20/task/20", 9, 0)
    times = ThreadTimes(machine.proc)
    clock[0] += 10
    show("self/task/7", 55, 10, "20 ")
    (machine.proc / "self/task/8/schedstat").unlink()  # it has ended
    show("self/task/9", 2, 1)  # it has begun
    show("20/task/20", 19, 0)  # a data worker
    assert times.since_last() == pytest.approx(((5 + 5 + 2 + 1 + 10) / 10, (5 + 1) / 10))
    clock[0] += 10
    assert times.since_last() == (0, 0)


def test_only_the_processors_of_the_run_count_as_busy(machine: Machine) -> None:
    rows = ["cpu  1 1 1 1 1 1 1 1", *(f"cpu{cpu} {cpu}00 0 100 900 900 0 0 50 0 0" for cpu in (0, 1, 2, 12)), "intr 9"]
    machine.write("proc/stat", "\n".join(rows) + "\n")
    counters, ticks = machine.counters(), os.sysconf("SC_CLK_TCK")
    assert counters.read_busy_s({1, 12}) == (200 + 1300) / ticks
    assert counters.read_busy_s(set()) == 0


def test_a_kernel_without_the_schedulers_counters_gives_nothing(machine: Machine) -> None:
    machine.write("proc/self/task/7/stat", "7 (python) R")
    assert ThreadTimes(machine.proc).since_last() == (0, 0)
    assert ThreadTimes(machine.proc / "absent").since_last() == (0, 0)


def test_pinned_threads_do_not_hide_the_processors_of_the_run() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    end, is_running = threading.Event(), threading.Event()

    def wait() -> None:
        is_running.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    is_running.wait()
    try:
        os.sched_setaffinity(0, cpus[:1])
        assert usable_cpus() == ({cpus[0]}, set(cpus))
    finally:
        os.sched_setaffinity(0, cpus)
        end.set()
        thread.join()
