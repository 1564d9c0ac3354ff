"""Checks of each machine: is it like the others, has it enough memory and disk, what slows it down, and do the
threads of a run fit its processors?"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

from shoal.cluster.node import Node
from shoal.errors import ConfigError
from shoal.host.topology import divide_cores
from shoal.launch.memory_check import check_memory as compare_memory
from shoal.tools.doctor.collect.machine import TEMPORARY
from shoal.tools.doctor.facts import (
    ClusterFacts,
    Facts,
    Finding,
    Severity,
    setup_command,
    sudo,
)
from shoal.units import format_duration, format_percent, format_si, pluralize


@dataclass(frozen=True)
class Trait:
    """A property that should be equal on all machines."""

    id: str
    label: str
    read: Callable[[Facts], object]  # takes it from the `machine` facts; None where there is nothing to compare
    meaning: str
    severity: Severity = Severity.ERROR


_ONE_KIND = "train on machines of one kind"
_KINDS = (
    Trait(
        "sameness.os", "system", lambda facts: facts["system"], f"gloo cannot connect different systems: {_ONE_KIND}"
    ),
    Trait("sameness.arch", "architecture", lambda facts: facts["arch"], f"replicas would drift apart: {_ONE_KIND}"),
    Trait(
        "sameness.cpu",
        "AVX2",
        lambda facts: None if facts["avx2"] is None else ("yes" if facts["avx2"] else "no"),
        "without AVX2 sums are rounded differently, so replicas drift apart: leave out the machines without it",
    ),
    Trait(
        "sameness.cpu",
        "processor",
        lambda facts: facts["cpu"],
        "they compute at different speeds, and every step waits for the slowest",
        Severity.INFO,
    ),
)
_SET_UP = "shoal can install it from here"
_DRIFT = f"different versions fail in the middle of a run, or train replicas that drift apart; {_SET_UP}"
_VERSIONS = (
    Trait("sameness.python", "Python", lambda facts: ".".join(facts["python"].split(".")[:2]), _DRIFT),
    # Of `2.13.0+cpu` only the release counts: the same torch may be built for CPU here and for CUDA there.
    Trait("sameness.torch", "torch", lambda facts: facts["torch"] and facts["torch"].partition("+")[0], _DRIFT),
    Trait("sameness.shoal", "shoal", lambda facts: facts["shoal"], _DRIFT),
)


def check_kinds(cluster: ClusterFacts) -> Iterator[Finding]:
    for trait in _KINDS:
        yield from _compare(cluster, trait, "")


def check_versions(cluster: ClusterFacts) -> Iterator[Finding]:
    for trait in _VERSIONS:
        yield from _compare(cluster, trait, setup_command(cluster, ""))
    for node, _, machine in cluster.topic("machine"):
        if machine["torch"] is None:
            yield Finding(
                "sameness.torch",
                Severity.ERROR,
                node.name,
                f"{machine['executable']} has no torch",
                f"no rank can start there; {_SET_UP}",
                setup_command(cluster, f"{machine['executable']} -m pip install torch"),
            )


def _compare(cluster: ClusterFacts, trait: Trait, fix: str) -> Iterator[Finding]:
    """Name the machines that differ from the majority; of equally many, from the first node."""
    all_values = {node.name: trait.read(machine) for node, _, machine in cluster.topic("machine")}
    values = {name: value for name, value in all_values.items() if value is not None}
    counts = Counter(values.values())
    common = max(values.values(), key=lambda value: counts[value], default=None)
    others = ", ".join(name for name in values if values[name] == common)
    for name, value in values.items():
        if value != common:
            evidence = f"{trait.label} {value} on {name}, {common} on {others}"
            yield Finding(trait.id, trait.severity, name, evidence, trait.meaning, fix)


_CLOCK_S = 1.0


def check_clocks(cluster: ClusterFacts) -> Iterator[Finding]:
    """Compare the nodes' clocks with each other. This machine's clock only helps to tell which one is wrong."""
    offsets = {name: facts["clock"] for name, facts in cluster.facts.items() if "clock" in facts}
    if not any(_differ(one, other) for one, other in combinations(offsets.values(), 2)):
        return
    middle_s = median([0.0, *(clock["offset_s"] for clock in offsets.values())])
    middle = {"offset_s": middle_s, "uncertainty_s": 0.0}
    wrong = [name for name, clock in offsets.items() if _differ(clock, middle)]
    farthest = max(offsets, key=lambda name: abs(offsets[name]["offset_s"] - middle_s))
    for name in wrong or [farthest]:
        offset_s = offsets[name]["offset_s"] - middle_s
        yield Finding(
            "clock.offset",
            Severity.WARNING,
            name,
            f"its clock is {format_duration(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} the others, "
            f"give or take {format_duration(offsets[name]['uncertainty_s'])}",
            "shoal compares no clocks, but make does, and torchrun: 40 s made it train alone and report success",
            f"{sudo(cluster.facts[name])}timedatectl set-ntp true",
            "timedatectl",
        )


def _differ(one: dict[str, float], other: dict[str, float]) -> bool:
    doubt_s = one["uncertainty_s"] + other["uncertainty_s"]
    return abs(one["offset_s"] - other["offset_s"]) > _CLOCK_S + doubt_s


# torch alone takes a quarter of a gigabyte per rank, before there is any model.
_MEMORY_ERROR_BYTES, _MEMORY_WARNING_BYTES = 300e6, 1e9
_DISK_ERROR_BYTES, _DISK_WARNING_BYTES = 100e6, 2e9
# Temporary files are often kept in memory and small on purpose; a run writes nothing large there.
_TEMPORARY_WARNING_BYTES = 500e6
_FEW_FILES = 1000


def check_memory(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, machine in cluster.topic("machine"):
        memory = machine.get("memory")
        if memory and memory["available"] < _MEMORY_WARNING_BYTES:
            yield Finding(
                "memory.free",
                Severity.ERROR if memory["available"] < _MEMORY_ERROR_BYTES else Severity.WARNING,
                node.name,
                f"{format_si(memory['available'], 'B')} of {format_si(memory['total'], 'B')} memory are free, "
                f"{format_si(memory['swap_used'], 'B')} of swap in use",
                "a rank that needs more is slowed down by swapping or killed by the kernel: close other programs (the "
                "largest: ps -eo pid,rss,comm --sort=-rss | head), or train a smaller model",
                retest="free -h",
            )


def check_training(cluster: ClusterFacts) -> Iterator[Finding]:
    """Compare the training that the user named with the free memory."""
    if cluster.config is None:
        return
    nodes = [replace(node, **_memory_facts(node, cluster.facts.get(node.name, {}))) for node in cluster.nodes]
    severity, warning, meaning = Severity.WARNING, "", "a rank that needs more is slowed down by swapping or killed"
    try:
        warning = compare_memory(cluster.config, nodes)
    except ConfigError as error:
        severity, warning = Severity.ERROR, f"{error.seen}: {error.why}"
        meaning = f"shoal train refuses to start it; {error.fix}"
    if warning:
        yield Finding("memory.training", severity, "", warning, meaning)


def _memory_facts(node: Node, facts: Facts) -> dict[str, Any]:
    """Return what a node's collector knows better than the plan: the nodes of a lab also share one machine."""
    machine, gpu = facts.get("machine", {}), facts.get("gpu") or {}
    free_bytes, planned_bytes = machine.get("memory", {}).get("available_with_swap"), node.free_memory_bytes
    sizes = [size for size in (free_bytes, planned_bytes) if size is not None]
    has_gpu = any(gpu.get(kind) for kind in ("pci", "nvidia", "amd"))
    cpu_only = node.cpu_only or (bool(machine) and not has_gpu) or str(machine.get("torch")).endswith("+cpu")
    return {"free_memory_bytes": min(sizes, default=None), "cpu_only": cpu_only}


def check_disks(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, machine in cluster.topic("machine"):
        for disk in machine.get("disks") or ():
            if disk["read_only"]:
                yield _read_only_disk(node.name, disk)
            else:
                yield from _check_free_space(node.name, disk)


def _read_only_disk(node: str, disk: dict[str, Any]) -> Finding:
    return Finding(
        "disk.readonly",
        Severity.ERROR,
        node,
        f"nothing can be written to {disk['path']}, which is for {', '.join(disk['for'])}: it is mounted read-only",
        "a run cannot write its logs and checkpoints there; Linux does this to a disk that has errors (see: dmesg)",
        retest=f"findmnt --target {shlex.quote(disk['path'])}",
    )


def _check_free_space(node: str, disk: dict[str, Any]) -> Iterator[Finding]:
    free, files, path = disk["free"], disk["files_free"], shlex.quote(disk["path"])
    has_few_files = files is not None and files < _FEW_FILES
    enough = _TEMPORARY_WARNING_BYTES if disk["for"] == [TEMPORARY] else _DISK_WARNING_BYTES
    if free >= enough and not has_few_files:
        return
    by_files = has_few_files and free >= _DISK_ERROR_BYTES
    left = f"room for {files} more files" if by_files else f"{format_si(free, 'B')} free"
    yield Finding(
        "disk.free",
        Severity.ERROR if free < _DISK_ERROR_BYTES or has_few_files else Severity.WARNING,
        node,
        f"{left} in {disk['path']}, which is for {', '.join(disk['for'])}",
        "checkpoints, logs and copies will not fit: remove what you no longer need (what takes the space: "
        f"du -xah {path} | sort -h | tail), or work on another disk",
        retest=f"df -h {path}",
    )


def check_cores(cluster: ClusterFacts) -> Iterator[Finding]:
    """Report, one line per machine, what a run will use of it."""
    for node, _, machine in cluster.topic("machine"):
        cores, memory = machine["cores"], machine.get("memory", {})
        parts = [f"{machine['cpu']}: {_describe_cores(cores)}"]
        parts += [f"{format_si(memory['available'], 'B')} of memory free"] if memory else []
        parts += [f"{format_si(memory['swap_used'], 'B')} of swap in use"] if memory.get("swap_used") else []
        threads = pluralize(rank_threads(node, cores), "thread")
        meaning = f"a run has {pluralize(node.slots, 'rank')} here, with {threads} each"
        yield Finding("speed.cores", Severity.INFO, node.name, ", ".join(parts), meaning)


def rank_threads(node: Node, cores: dict[str, Any]) -> int:
    """Return the threads of each rank on a node, by its collector's facts if its cores are not known."""
    return node.rank_threads or divide_cores(cores["usable"], node.slots, cores.get("speeds", ()))


def _describe_cores(cores: dict[str, Any]) -> str:
    text = pluralize(cores["physical"], "core")
    if cores["threads"] > cores["physical"]:
        text += f" with {cores['threads']} hardware threads"
    if cores.get("slow"):
        text += f" ({cores['fast']} fast, {cores['slow']} slow)"
    return text


def check_quota(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, machine in cluster.topic("machine"):
        cores = machine["cores"]
        if cores["quota"] is not None and cores["quota"] < cores["physical"]:
            yield Finding(
                "speed.quota",
                Severity.INFO,
                node.name,
                f"a control group limits it to the time of {cores['quota']:g} of its {cores['physical']} cores: "
                f"{cores['quota_file']}",
                f"a run uses {pluralize(cores['usable'], 'core')} here, because a group that has used its time stands "
                "still; raise the limit where it was set: docker --cpus, a Kubernetes cpu limit, CPUQuota= of systemd",
            )


def check_kinds_of_cores(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, machine in cluster.topic("machine"):
        cores = machine["cores"]
        if not cores.get("slow"):
            continue
        part = format_percent(min(cores["speeds"]) / max(cores["speeds"]))
        used = node.slots * rank_threads(node, cores)
        if used <= cores["fast"]:
            meaning = "a run uses fast cores only, because every thread waits for the slowest; to try all of them: "
            meaning += f"--threads {max(1, cores['physical'] // node.slots)}"
        else:
            meaning = "a run uses slow cores too, for which the fast ones wait; to try fast ones only: "
            meaning += f"--threads {max(1, cores['fast'] // node.slots)}"
        yield Finding(
            "speed.hybrid",
            Severity.INFO,
            node.name,
            f"{cores['fast']} of its {cores['physical']} cores are fast; the slowest has about {part} of their speed",
            meaning,
        )


def check_numa(cluster: ClusterFacts) -> Iterator[Finding]:
    """Remark ranks that must use cores of several NUMA nodes."""
    for node, _, machine in cluster.topic("machine"):
        count = machine["cores"]["numa_nodes"]
        if node.slots < count:
            yield Finding(
                "speed.numa",
                Severity.INFO,
                node.name,
                f"its cores and memory are divided into {count} NUMA nodes, and it has {pluralize(node.slots, 'rank')}",
                f"a rank on several of them waits for memory that is far from its cores: try {count} ranks there",
            )


# A busy core should reach this share of the base frequency, which the maker promises for all cores together; where
# that is unknown, of the highest frequency of a single core.
_SHARE_OF_BASE, _SHARE_OF_HIGHEST = 0.9, 0.5
# With these drivers the governor `powersave` only means that the processor chooses its own frequency.
_SELF_CHOOSING_DRIVERS = ("intel_pstate", "amd-pstate-epp")
_CPUFREQ = "/sys/devices/system/cpu/cpu*/cpufreq"


def check_frequency(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, facts, machine in cluster.topic("machine"):
        clock = machine.get("frequency")
        if not clock:
            continue
        base_khz, highest_khz = clock["base_khz"], clock["most_khz"]
        least_khz = _SHARE_OF_BASE * base_khz if base_khz else _SHARE_OF_HIGHEST * highest_khz
        if clock["at_work_khz"] >= least_khz:
            continue
        rates = f"{_hertz(clock['at_work_khz'])} where it could do {_hertz(highest_khz)}"
        if clock["governor"] == "powersave" and clock["driver"] not in _SELF_CHOOSING_DRIVERS:
            yield Finding(
                "speed.governor",
                Severity.WARNING,
                node.name,
                f"the governor is powersave, and a busy core runs at {rates}",
                "the cores stay at their lowest frequency under any load",
                f"echo performance | {sudo(facts)}tee {_CPUFREQ}/scaling_governor",
                f"cat {_CPUFREQ}/scaling_governor",
            )
            continue
        # A configured limit can be lifted by a command; heat, firmware and a weak charger cannot.
        is_capped = clock["allowed_khz"] < least_khz
        yield Finding(
            "speed.frequency",
            Severity.WARNING,
            node.name,
            f"a busy core runs at {rates}"
            + (f"; it is not allowed more than {_hertz(clock['allowed_khz'])}" if is_capped else ""),
            "every step takes longer than this processor needs, and all machines wait for it"
            + ("" if is_capped else "; heat, a weak charger or an energy-saving profile do this"),
            f"echo {highest_khz} | {sudo(facts)}tee {_CPUFREQ}/scaling_max_freq" if is_capped else "",
        )


def _hertz(khz: int) -> str:
    return format_si(khz * 1e3, "Hz")


def check_throttled(cluster: ClusterFacts) -> Iterator[Finding]:
    """Warn only of heat now: every laptop has been too hot once."""
    for node, _, machine in cluster.topic("machine"):
        counts = machine.get("throttled")
        if counts and counts["since_boot"]:
            yield Finding(
                "speed.throttled",
                Severity.WARNING if counts["just_now"] > 0 else Severity.INFO,
                node.name,
                f"the processor was slowed down by heat {counts['since_boot']} times since the machine was started, "
                f"{counts['just_now']} times during this check",
                "a hot machine computes slowly, and all others wait for it: give it air, clean its fan",
            )


def check_power(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, _, machine in cluster.topic("machine"):
        supply = machine.get("power")
        if supply and supply["on_battery"]:
            left = "" if supply["percent"] is None else f", {supply['percent']}% left"
            yield Finding(
                "speed.battery",
                Severity.WARNING,
                node.name,
                f"it runs on battery{left}",
                "on battery it computes slowly, and when it is empty the run loses this machine: plug it in",
            )


_LID_FILE = "/etc/systemd/logind.conf.d/90-shoal.conf"


def check_lid(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, facts, machine in cluster.topic("machine"):
        actions = machine.get("lid") or {}
        sleeping = {where: action for where, action in actions.items() if action not in ("ignore", "lock")}
        if sleeping:
            described = " and ".join(f"{action} ({where.replace('_', ' ')})" for where, action in sleeping.items())
            as_root = sudo(facts)
            lines = r"[Login]\nHandleLidSwitch=ignore\nHandleLidSwitchExternalPower=ignore\n"
            yield Finding(
                "speed.lid",
                Severity.INFO,
                node.name,
                f"closing the lid makes it {described}",
                "a machine that sleeps is lost to the run, and shoal may not prevent it: keep the lid open",
                f"{as_root}mkdir -p {_LID_FILE.rpartition('/')[0]} && printf '{lines}' | {as_root}tee {_LID_FILE} "
                f"&& {as_root}systemctl kill -s HUP systemd-logind",
            )


_BUSY_SHARE = 0.5


def check_load(cluster: ClusterFacts) -> Iterator[Finding]:
    """Report other work only as information: a moment later it may have ended."""
    for node, _, machine in cluster.topic("machine"):
        load = machine.get("load", {}).get("one_minute", 0.0)
        cores = machine["cores"]["physical"]
        if load > _BUSY_SHARE * cores:
            yield Finding(
                "speed.load",
                Severity.INFO,
                node.name,
                f"in the last minute {load:.1f} processes at a time wanted one of its {cores} cores",
                "other programs share its cores with the run (which: top); every step waits for the slowest machine",
                retest="uptime",
            )


def check_threads(cluster: ClusterFacts) -> Iterator[Finding]:
    """Compare the threads of all ranks on a machine with its processors. Emulated nodes share those of one machine."""
    machines: defaultdict[str, list[Node]] = defaultdict(list)
    for node, _, machine in cluster.topic("machine"):
        machines[str(machine.get("boot_id") or node.name)].append(node)
    for nodes in machines.values():
        facts = cluster.facts[nodes[0].name]
        cpus = _processors(facts["machine"])
        ranks, threads = sum(node.slots for node in nodes), sum(node.slots * _threads(node, facts) for node in nodes)
        others = sum(process["part"].startswith("rank-") for process in facts.get("processes", {}).get("marked", []))
        if threads + others <= cpus:
            continue
        is_set = threads > cpus and any(node.threads for node in nodes)
        more = f", and {pluralize(others, 'rank')} of other runs compute there now" if others else ""
        yield Finding(
            "speed.threads",
            # A number in the hosts file is a mistake. More ranks than cores, and another run, are what was asked for.
            Severity.WARNING if is_set else Severity.INFO,
            nodes[0].name,
            f"{pluralize(ranks, 'rank')} with {pluralize(threads, 'thread')} in all share "
            f"{pluralize(cpus, 'processor')}{more}",
            "threads that wait for a processor hold up those that they compute with"
            + _describe_setting(is_set, _omp_threads(facts), max(1, int(cpus / ranks))),
            "unset OMP_NUM_THREADS" if _omp_threads(facts) and not is_set else "",
        )


def _describe_setting(is_set: bool, omp_threads: int, fair: int) -> str:
    if is_set:
        return f": write threads = {fair} in the hosts file, or start with --threads {fair}"
    return f"; a script under shoal run gets OMP_NUM_THREADS={omp_threads} of the environment" if omp_threads else ""


def _processors(machine: Facts) -> int:
    """Return the hardware threads that a run may use, fewer with a quota: a part of one counts as one."""
    cores = machine["cores"]
    return int(cores["threads"] if cores["quota"] is None else min(cores["threads"], max(1, cores["quota"])))


def _threads(node: Node, facts: Facts) -> int:
    """Return the threads of each rank of a script. `shoal train` does not use the variable."""
    return node.threads or _omp_threads(facts) or rank_threads(node, facts["machine"]["cores"])


def _omp_threads(facts: Facts) -> int:
    value = str(facts["machine"].get("omp_num_threads") or "")
    return int(value) if value.isdigit() else 0
