"""What must be equal on all machines of a world, and which machine is the odd one out."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from shoal.cluster.node import Node
from shoal.tools.doctor.collect.machine import TEMPORARY
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, again, same_versions, sudo
from shoal.units import format_duration, format_si

_CLOCK_S = 1.0


@dataclass(frozen=True)
class Trait:
    """`of` takes it from what a collector saw of its machine; None where there is nothing to compare."""

    id: str
    words: str
    of: Callable[[dict[str, Any]], object]
    meaning: str
    severity: Severity = Severity.ERROR


_APART = "train on machines of one kind"
_KINDS = (
    Trait("sameness.os", "system", lambda seen: seen["system"], f"gloo cannot connect different systems: {_APART}"),
    Trait("sameness.arch", "architecture", lambda seen: seen["arch"], f"replicas would drift apart: {_APART}"),
    Trait(
        "sameness.cpu",
        "AVX2",
        lambda seen: None if seen["avx2"] is None else ("yes" if seen["avx2"] else "no"),
        "without AVX2 sums are rounded in another way, so replicas drift apart: leave out the machines without it",
    ),
    Trait(
        "sameness.cpu",
        "processor",
        lambda seen: seen["cpu"],
        "they compute at different speeds, and every step waits for the slowest",
        Severity.INFO,
    ),
)
_SET_UP = "shoal sets it up from here"
_DRIFT = f"a world of different versions fails in the middle, or trains replicas that drift apart; {_SET_UP}"
_VERSIONS = (
    Trait("sameness.python", "Python", lambda seen: ".".join(seen["python"].split(".")[:2]), _DRIFT),
    Trait("sameness.torch", "torch", lambda seen: release(seen["torch"]), _DRIFT),
    Trait("sameness.shoal", "shoal", lambda seen: seen["shoal"], _DRIFT),
)


def release(version: str | None) -> str | None:
    """`2.13.0+cpu` is release 2.13.0: the same torch may be built for CPU here and for CUDA there."""
    return None if version is None else version.partition("+")[0]


def kinds(scene: ClusterFacts) -> Iterator[Finding]:
    for trait in _KINDS:
        yield from _odd_ones(scene, trait)


def versions(scene: ClusterFacts) -> Iterator[Finding]:
    for trait in _VERSIONS:
        yield from _odd_ones(scene, trait)


def _odd_ones(scene: ClusterFacts, trait: Trait) -> Iterator[Finding]:
    values = {name: value for name, seen in _machines(scene).items() if (value := trait.of(seen)) is not None}
    common = majority(list(values.values()))
    for name, value in values.items():
        if value != common:
            with_common = [other for other in values if values[other] == common]
            yield Finding(
                trait.id,
                trait.severity,
                name,
                f"{trait.words} {value} on {name}, {common} on {', '.join(with_common)}",
                trait.meaning,
                same_versions(scene, "") if trait in _VERSIONS else "",
                again(scene),
            )


def majority(values: list[object]) -> object:
    """Of equally many, what the first node has."""
    counts = Counter(values)
    return max(values, key=lambda value: counts[value], default=None)


def no_torch(scene: ClusterFacts) -> Iterator[Finding]:
    for name, seen in _machines(scene).items():
        if seen["torch"] is None:
            yield Finding(
                "sameness.torch",
                Severity.ERROR,
                name,
                f"{seen['executable']} has no torch",
                f"no rank can start there; {_SET_UP}",
                same_versions(scene, f"{seen['executable']} -m pip install torch"),
                again(scene),
            )


def clocks(scene: ClusterFacts) -> Iterator[Finding]:
    """Against each other. The machine that asked has a say in who is wrong, and no more than that."""
    offsets = {name: facts["clock"] for name, facts in scene.facts.items() if "clock" in facts}
    if not any(_apart(one, other) for one, other in combinations(offsets.values(), 2)):
        return
    middle = {"offset_s": median([0.0, *(said["offset_s"] for said in offsets.values())]), "uncertainty_s": 0.0}
    wrong = [name for name, said in offsets.items() if _apart(said, middle)]
    farthest = max(offsets, key=lambda name: abs(offsets[name]["offset_s"] - middle["offset_s"]))
    for name in wrong or [farthest]:
        offset_s = offsets[name]["offset_s"] - middle["offset_s"]
        yield Finding(
            "clock.offset",
            Severity.WARNING,
            name,
            f"its clock is {format_duration(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} the others, "
            f"give or take {format_duration(offsets[name]['uncertainty_s'])}",
            "shoal compares no clocks, but make does, and torchrun: 40 s made it train alone and report success",
            f"{sudo(scene.facts[name])}timedatectl set-ntp true",
            f"timedatectl; {again(scene)}",
        )


def _apart(one: dict[str, float], other: dict[str, float]) -> bool:
    doubt_s = one["uncertainty_s"] + other["uncertainty_s"]
    return abs(one["offset_s"] - other["offset_s"]) > _CLOCK_S + doubt_s


def _machines(scene: ClusterFacts) -> dict[str, dict[str, Any]]:
    return {name: facts["machine"] for name, facts in scene.facts.items() if facts.get("machine")}


# SECTION net/checks/room
# Is there enough memory and disk on each machine for a run?


_DISK_ERROR, _DISK_WARNING = 100e6, 2e9
# Often in memory, and small on purpose; nothing large is written there.
_TEMPORARY_WARNING = 500e6
_FEW_FILES = 1000
# torch alone takes a quarter of a gigabyte a rank, before there is any model.
_MEMORY_ERROR, _MEMORY_WARNING = 300e6, 1e9


def memory(scene: ClusterFacts) -> Iterator[Finding]:
    for node, seen in _seen(scene, "memory"):
        if seen and seen["available"] < _MEMORY_WARNING:
            yield Finding(
                "memory.free",
                Severity.ERROR if seen["available"] < _MEMORY_ERROR else Severity.WARNING,
                node,
                f"{format_si(seen['available'], 'B')} of {format_si(seen['total'], 'B')} memory are free, "
                f"{format_si(seen['swap_used'], 'B')} of swap in use",
                "a rank that needs more is slowed down by the disk or ended by the kernel: close other programs (the "
                "largest: ps -eo pid,rss,comm --sort=-rss | head), or train a smaller model",
                retest=f"free -h; {again(scene)}",
            )


def disks(scene: ClusterFacts) -> Iterator[Finding]:
    for node, seen in _seen(scene, "disks"):
        for disk in seen or ():
            yield from _read_only(scene, node, disk) if disk["read_only"] else _full(scene, node, disk)


def _full(scene: ClusterFacts, node: str, disk: dict[str, Any]) -> Iterator[Finding]:
    free, files, place = disk["free"], disk["files_free"], shlex.quote(disk["path"])
    few_files = files is not None and files < _FEW_FILES
    enough = _TEMPORARY_WARNING if disk["for"] == [TEMPORARY] else _DISK_WARNING
    if free >= enough and not few_files:
        return
    left = f"room for {files} more files" if few_files and free >= _DISK_ERROR else f"{format_si(free, 'B')} free"
    yield Finding(
        "disk.free",
        Severity.ERROR if free < _DISK_ERROR or few_files else Severity.WARNING,
        node,
        f"{left} in {disk['path']}, which is for {', '.join(disk['for'])}",
        "checkpoints, logs and copies will not fit: remove what you no longer need (what takes the room: "
        f"du -xah {place} | sort -h | tail), or work on another disk",
        retest=f"df -h {place}; {again(scene)}",
    )


def _read_only(scene: ClusterFacts, node: str, disk: dict[str, Any]) -> Iterator[Finding]:
    place = shlex.quote(disk["path"])
    yield Finding(
        "disk.readonly",
        Severity.ERROR,
        node,
        f"nothing can be written to {disk['path']}, which is for {', '.join(disk['for'])}: it is mounted read-only",
        "a run cannot write its logs and checkpoints there; Linux does this to a disk that has errors (see: dmesg)",
        retest=f"findmnt --target {place}; {again(scene)}",
    )


def _seen(scene: ClusterFacts, topic: str) -> Iterator[tuple[str, Any]]:
    return ((node, facts.get("machine", {}).get(topic)) for node, facts in scene.facts.items())


# SECTION net/checks/speed
# What each machine has to give, and what holds it back.


# Of the rate that the maker promises for all cores together; of the highest of a single one where no other is known.
_OF_BASE, _OF_MOST = 0.9, 0.5
_BUSY = 0.5
_LID_FILE = "/etc/systemd/logind.conf.d/90-shoal.conf"
# With these drivers `powersave` only means that the processor chooses by itself.
_CHOOSES = ("intel_pstate", "amd-pstate-epp")

Seen = dict[str, Any]


def cores(scene: ClusterFacts) -> Iterator[Finding]:
    """One line a machine: what a run will use of it."""
    for node, _, seen in _machines_speed(scene):
        have, memory = seen["cores"], seen.get("memory", {})
        parts = [f"{seen['cpu']}: {_cores(have)}"]
        parts += [f"{format_si(memory['available'], 'B')} of memory free"] if memory else []
        parts += [f"{format_si(memory['swap_used'], 'B')} of swap in use"] if memory.get("swap_used") else []
        threads = threads_of(node, have)
        ranks = f"{node.slots} rank{'s' if node.slots > 1 else ''}"
        meaning = f"a run has {ranks} here, with {threads} thread{'s' if threads > 1 else ''} each"
        if 0 < have.get("fast", 0) < threads * node.slots:
            meaning += "; some of them on slow cores, for which the others wait: try fewer threads"
        yield Finding("speed.cores", Severity.INFO, node.name, ", ".join(parts), meaning)


def threads_of(node: Node, have: Seen) -> int:
    return node.threads or max(1, (node.cores or have["physical"]) // node.slots)


def _cores(have: Seen) -> str:
    text = f"{have['physical']} core{'s' if have['physical'] > 1 else ''}"
    if have["threads"] > have["physical"]:
        text += f" with {have['threads']} hardware threads"
    if have.get("slow"):
        text += f" ({have['fast']} fast, {have['slow']} slow)"
    return text if have["quota"] is None else f"{text}, of which a container may use {have['quota']:g}"


def frequency(scene: ClusterFacts) -> Iterator[Finding]:
    for node, facts, seen in _machines_speed(scene):
        clock = seen.get("frequency")
        if not clock or clock["at_work_khz"] >= least_khz(clock):
            continue
        by_governor = clock["governor"] == "powersave" and clock["driver"] not in _CHOOSES
        yield _governor(scene, node, facts, clock) if by_governor else _held_down(scene, node, facts, clock)


def least_khz(clock: Seen) -> float:
    base = clock["base_khz"]
    return float(_OF_BASE * base if base else _OF_MOST * clock["most_khz"])


def _governor(scene: ClusterFacts, node: Node, facts: Facts, clock: Seen) -> Finding:
    return Finding(
        "speed.governor",
        Severity.WARNING,
        node.name,
        f"the governor is powersave, and a busy core runs at {_rates(clock)}",
        "the cores stay at their lowest rate however much there is to do",
        f"echo performance | {sudo(facts)}tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        f"cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor; {again(scene)}",
    )


def _held_down(scene: ClusterFacts, node: Node, facts: Facts, clock: Seen) -> Finding:
    """By a limit that somebody set, which a command lifts; or by heat, firmware or a weak charger, which none does."""
    capped = clock["allowed_khz"] < least_khz(clock)
    return Finding(
        "speed.frequency",
        Severity.WARNING,
        node.name,
        f"a busy core runs at {_rates(clock)}"
        + (f"; it is not allowed more than {_hertz(clock['allowed_khz'])}" if capped else ""),
        "every step takes longer than this processor needs, and all machines wait for it"
        + ("" if capped else "; heat, a weak charger or an energy-saving profile do this"),
        f"echo {clock['most_khz']} | {sudo(facts)}tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_max_freq"
        if capped
        else "",
        again(scene),
    )


def _rates(clock: Seen) -> str:
    return f"{_hertz(clock['at_work_khz'])} where it could do {_hertz(clock['most_khz'])}"


def _hertz(khz: int) -> str:
    return format_si(khz * 1e3, "Hz")


def throttled(scene: ClusterFacts) -> Iterator[Finding]:
    """Every laptop has been too hot once; what counts is now."""
    for node, _, seen in _machines_speed(scene):
        counts = seen.get("throttled")
        if counts and counts["since_boot"]:
            now = counts["just_now"] > 0
            yield Finding(
                "speed.throttled",
                Severity.WARNING if now else Severity.INFO,
                node.name,
                f"the processor was slowed down by heat {counts['since_boot']} times since the machine was started, "
                f"{counts['just_now']} times while we looked",
                "a hot machine computes slowly, and all others wait for it: give it air, clean its fan",
                retest=again(scene),
            )


def power(scene: ClusterFacts) -> Iterator[Finding]:
    for node, _, seen in _machines_speed(scene):
        supply = seen.get("power")
        if supply and supply["on_battery"]:
            left = "" if supply["percent"] is None else f", {supply['percent']}% left"
            yield Finding(
                "speed.battery",
                Severity.WARNING,
                node.name,
                f"it runs on battery{left}",
                "on battery it computes slowly, and when it is empty the run loses this machine: plug it in",
                retest=again(scene),
            )


def lid(scene: ClusterFacts) -> Iterator[Finding]:
    for node, facts, seen in _machines_speed(scene):
        if (actions := seen.get("lid")) and (doing := _sleeping(actions)):
            as_root = sudo(facts)
            lines = r"[Login]\nHandleLidSwitch=ignore\nHandleLidSwitchExternalPower=ignore\n"
            yield Finding(
                "speed.lid",
                Severity.INFO,
                node.name,
                f"closing the lid makes it {doing}",
                "a machine that sleeps is lost to the run, and shoal may not prevent it: keep the lid open",
                f"{as_root}mkdir -p {_LID_FILE.rpartition('/')[0]} && printf '{lines}' | {as_root}tee {_LID_FILE} "
                f"&& {as_root}systemctl kill -s HUP systemd-logind",
                again(scene),
            )


def _sleeping(actions: dict[str, str]) -> str:
    asleep = {where: action for where, action in actions.items() if action not in ("ignore", "lock")}
    return " and ".join(f"{action} ({where.replace('_', ' ')})" for where, action in asleep.items())


def load(scene: ClusterFacts) -> Iterator[Finding]:
    """Never more than a remark: a moment later it may be over."""
    for node, _, seen in _machines_speed(scene):
        busy = seen.get("load", {}).get("one_minute", 0.0)
        cores = seen["cores"]["physical"]
        if busy > _BUSY * cores:
            yield Finding(
                "speed.load",
                Severity.INFO,
                node.name,
                f"in the last minute {busy:.1f} processes at a time wanted one of its {cores} cores",
                "other programs share its cores with the run (who: top); every step waits for the slowest machine",
                retest="uptime",
            )


def _machines_speed(scene: ClusterFacts) -> Iterator[tuple[Node, Facts, Seen]]:
    for node in scene.nodes:
        facts = scene.facts.get(node.name, {})
        if seen := facts.get("machine"):
            yield node, facts, seen
