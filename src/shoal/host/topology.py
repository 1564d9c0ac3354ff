"""The processors that this process may use, and how ranks divide them.

`read_topology` reads the files of /sys and /proc: physical cores with their hardware threads, speed and NUMA node, and
the CPU quota of a container or slice. The functions after it decide how many threads a rank has, and on which cores.

Standard library only, apart from systems without those files: the collector of `shoal doctor` runs this on machines
where nothing else is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shoal.host.proc import PROC, read_cpu_list, read_number, read_text

SYS = Path("/sys")
# The speed of the fastest core, as the kernel's cpu_capacity has it.
FULL_SPEED = 1024
# Efficiency cores of Intel have half the vector width of performance cores, up to Meteor Lake. No file shows that.
_ATOM_WIDTH = 0.5
# Cores of one kind are not exactly equal: a favoured core may reach a slightly higher clock.
_SAME_KIND = 0.8


@dataclass(frozen=True)
class Core:
    """One physical core: its hardware threads share its arithmetic."""

    cpus: tuple[int, ...] = ()  # the hardware threads that this process may use; none where the system lists none
    speed: int = FULL_SPEED  # the same for all cores of one kind
    numa_node: int = 0
    package: int = 0


@dataclass(frozen=True)
class Quota:
    """A limit on CPU time, of a control group that this process is in."""

    cores: float
    file: str  # that sets it


@dataclass(frozen=True)
class Topology:
    cores: tuple[Core, ...]  # by NUMA node and number, so that neighbours follow each other
    quota: Quota | None = None  # the lowest of all groups that this process is in
    on_battery: bool = False

    @property
    def usable(self) -> int:
        """The number of cores that ranks can keep busy. A started core counts as none: its thread would delay all."""
        return len(self.cores) if self.quota is None else max(1, min(len(self.cores), int(self.quota.cores)))

    @property
    def core_speeds(self) -> tuple[int, ...]:
        """The speed of every core, the fastest first; empty where all are equal."""
        speeds = tuple(sorted((core.speed for core in self.cores), reverse=True))
        return speeds if len(set(speeds)) > 1 else ()

    @property
    def numa_nodes(self) -> int:
        return len({core.numa_node for core in self.cores})


# Reading


@cache
def this_topology() -> Topology:
    """Read the topology of this machine, once for each process: pinning narrows the affinity mask later."""
    if hasattr(os, "sched_getaffinity"):
        return read_topology(SYS, PROC, os.sched_getaffinity(0))
    try:
        import psutil

        count = psutil.cpu_count(logical=False)
    except ImportError:
        count = None
    return Topology((Core(),) * (count or os.cpu_count() or 1))


def read_topology(sys_root: Path, proc_root: Path, affinity: set[int]) -> Topology:
    """Read a tree of /sys and /proc. `affinity` has what `taskset`, a container or a batch system left to the process.

    Without topology files, as in some containers, /proc/cpuinfo tells which hardware threads are of one core; where it
    does not, each is taken for a core.
    """
    cpus = sys_root / "devices/system/cpu"
    core_ids = _cpuinfo_cores(read_text(proc_root / "cpuinfo"))
    siblings = {
        cpu: read_cpu_list(cpus / f"cpu{cpu}/topology/thread_siblings_list")
        or {other for other in affinity if cpu in core_ids and core_ids.get(other) == core_ids[cpu]}
        or {cpu}
        for cpu in affinity
    }
    groups = sorted({tuple(sorted(siblings[cpu] & affinity)) for cpu in affinity})
    speeds = _read_speeds(sys_root, [group[0] for group in groups])
    numa = {
        cpu: int(folder.name[len("node") :])
        for folder in (sys_root / "devices/system/node").glob("node[0-9]*")
        for cpu in read_cpu_list(folder / "cpulist")
    }
    cores = [
        # Some ARM boards do not know their package and write -1.
        Core(group, speeds[group[0]], numa.get(group[0], 0), max(0, read_number(_package_file(cpus, group[0])) or 0))
        for group in groups
    ]
    cores.sort(key=lambda core: (core.numa_node, core.cpus))
    return Topology(tuple(cores), _read_quota(sys_root, proc_root), is_on_battery(sys_root))


def _package_file(cpus: Path, cpu: int) -> Path:
    return cpus / f"cpu{cpu}/topology/physical_package_id"


def _cpuinfo_cores(text: str) -> dict[int, tuple[str, str]]:
    """Return the package and core of every processor that /proc/cpuinfo gives them for."""
    cores = {}
    for block in text.split("\n\n"):
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.split("\n"))}
        if fields.get("processor", "").isdigit() and "core id" in fields:
            cores[int(fields["processor"])] = fields.get("physical id", "0"), fields["core id"]
    return cores


def _read_speeds(sys_root: Path, cpus: Sequence[int]) -> dict[int, int]:
    """Return the speeds of cores, each named by one of its hardware threads: equal for all cores of one kind."""
    rates = _read_rates(sys_root, cpus)
    speeds: dict[int, int] = {}
    kind = 0.0
    for cpu in sorted(cpus, key=lambda cpu: -rates[cpu]):
        if not kind or rates[cpu] < _SAME_KIND * kind:
            kind = rates[cpu]
        speeds[cpu] = round(FULL_SPEED * kind / max(rates.values()))
    return speeds


def _read_rates(sys_root: Path, cpus: Sequence[int]) -> dict[int, float]:
    """Return relative rates of computing, by the best source that this kernel has for all of these processors."""
    folders = {cpu: sys_root / f"devices/system/cpu/cpu{cpu}" for cpu in cpus}
    clocks = {cpu: read_number(folder / "cpufreq/cpuinfo_max_freq") or 0 for cpu, folder in folders.items()}
    clock_rates = {cpu: float(clock) if all(clocks.values()) else 1.0 for cpu, clock in clocks.items()}
    if atoms := read_cpu_list(sys_root / "devices/cpu_atom/cpus"):
        return {cpu: rate * (_ATOM_WIDTH if cpu in atoms else 1) for cpu, rate in clock_rates.items()}
    capacities = {cpu: float(read_number(folder / "cpu_capacity") or 0) for cpu, folder in folders.items()}
    # x86 kernels write 1024 for every core, also where some are slower.
    if all(capacities.values()) and len(set(capacities.values())) > 1:
        return capacities
    return clock_rates


def control_groups(controller: str, sys_root: Path, proc_root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it, for `cpu` or `memory`, of both versions.

    In a container the path of its group may be of the host. The walk up then ends at the container's own group.
    """
    for line in read_text(proc_root / "self/cgroup").splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        mounts = sys_root / "fs/cgroup"
        for root in (mounts, mounts / (controllers or "unified"), mounts / controller):
            folder = root / name.strip("/")
            while folder != root.parent and folder.is_relative_to(root):
                if folder.is_dir():
                    yield folder
                folder = folder.parent


def _read_quota(sys_root: Path, proc_root: Path) -> Quota | None:
    quotas = (_group_quota(folder) for folder in control_groups("cpu", sys_root, proc_root))
    return min((quota for quota in quotas if quota), key=lambda quota: quota.cores, default=None)


def _group_quota(folder: Path) -> Quota | None:
    """Read the quota of one group: `cpu.max` has `250000 100000` or `max 100000`, version 1 has two files or -1."""
    file = folder / "cpu.max"
    limit, _, period = read_text(file).partition(" ")
    if not limit:
        file = folder / "cpu.cfs_quota_us"
        limit, period = read_text(file), read_text(folder / "cpu.cfs_period_us")
    is_limited = limit.isdigit() and period.isdigit() and int(period) > 0
    return Quota(int(limit) / int(period), str(file)) if is_limited else None


def power_supplies(sys_root: Path = SYS) -> list[Path]:
    """Return the folders of the power supplies, without batteries of mice and keyboards: their scope is "Device"."""
    folders = sorted((sys_root / "class/power_supply").glob("*"))
    return [folder for folder in folders if read_text(folder / "scope") != "Device"]


def is_on_battery(sys_root: Path = SYS) -> bool:
    """Return whether nothing is plugged in, and a power cable could be, or a battery discharges."""
    kinds = {folder: read_text(folder / "type") for folder in power_supplies(sys_root)}
    if any(kind != "Battery" and read_number(folder / "online") == 1 for folder, kind in kinds.items()):
        return False
    # A free USB-C port of a desktop is a supply that is not plugged in, too.
    return any(
        (kind == "Mains" and read_number(folder / "online") == 0)
        or (kind == "Battery" and read_text(folder / "status") == "Discharging")
        for folder, kind in kinds.items()
    )


# Deciding


def threads_for(topology: Topology, ranks: int) -> int:
    """Return the threads of each rank when `ranks` ranks share the machine."""
    return divide_cores(topology.usable, ranks, topology.core_speeds)


def divide_cores(cores: int, ranks: int, core_speeds: Sequence[int] = ()) -> int:
    """Return the threads of each rank on this many cores; `core_speeds` has the fastest first, or nothing if equal.

    OpenMP gives every thread an equal part of the work, and ranks wait for each other. All threads are therefore as
    slow as the slowest core in use, and a few fast cores may compute more than all together.
    """
    most = max(1, cores // ranks)
    if not core_speeds:
        return most

    def rate(threads: int) -> int:
        return threads * core_speeds[min(ranks * threads, len(core_speeds)) - 1]

    return max(range(1, most + 1), key=rate)


def cores_for_rank(topology: Topology, slot: int, ranks: int, threads: int) -> tuple[int, ...] | None:
    """Return the hardware threads for rank `slot` of the `ranks` on this machine; None where pinning cannot help.

    It cannot where ranks want more cores than there are (the scheduler shares them more fairly), nor where one rank has
    all of them, nor where a quota leaves less than all cores: the other cores are busy with programs that are not
    visible here, and the scheduler avoids those. A rank gets both hardware threads of a core: the second runs its
    communication, which would otherwise interrupt the first.
    """
    free = list(topology.cores)
    if ranks * threads > len(free) or threads == len(free) or topology.usable < len(free):
        return None
    if not all(core.cpus for core in free):
        return None
    team: list[Core] = []
    for _ in range(slot + 1):
        team = _choose_team(free, threads)
        free = [core for core in free if core not in team]
    return tuple(sorted(cpu for core in team for cpu in core.cpus))


def _choose_team(free: Sequence[Core], threads: int) -> list[Core]:
    """Choose the fastest cores that are free, of one kind and in one NUMA node where they fit.

    Only the slowest core of a team counts. Faster ones are left to other ranks where there are enough of that kind.
    """
    slowest = sorted(core.speed for core in free)[-threads]
    fast_enough = [core for core in free if core.speed >= slowest]
    one_kind = [core for core in free if core.speed == slowest]
    choices = [*_by_numa_node(one_kind), *_by_numa_node(fast_enough), one_kind, fast_enough]
    return next(choice for choice in choices if len(choice) >= threads)[:threads]


def _by_numa_node(cores: Iterable[Core]) -> list[list[Core]]:
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.numa_node, []).append(core)
    return list(nodes.values())
