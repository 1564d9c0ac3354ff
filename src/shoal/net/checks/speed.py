"""What each machine has to give, and what holds it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.cluster.node import Node
from shoal.net.checks.commands import again, sudo
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Facts, Scene
from shoal.units import format_si

# Of the rate that the maker promises for all cores together; of the highest of a single one where no other is known.
_OF_BASE, _OF_MOST = 0.9, 0.5
_BUSY = 0.5
_LID_FILE = "/etc/systemd/logind.conf.d/90-shoal.conf"
# With these drivers `powersave` only means that the processor chooses by itself.
_CHOOSES = ("intel_pstate", "amd-pstate-epp")

Seen = dict[str, Any]


def cores(scene: Scene) -> Iterator[Finding]:
    """One line a machine: what a run will use of it."""
    for node, _, seen in _machines(scene):
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


def frequency(scene: Scene) -> Iterator[Finding]:
    for node, facts, seen in _machines(scene):
        clock = seen.get("frequency")
        if not clock or clock["at_work_khz"] >= least_khz(clock):
            continue
        by_governor = clock["governor"] == "powersave" and clock["driver"] not in _CHOOSES
        yield _governor(scene, node, facts, clock) if by_governor else _held_down(scene, node, facts, clock)


def least_khz(clock: Seen) -> float:
    base = clock["base_khz"]
    return float(_OF_BASE * base if base else _OF_MOST * clock["most_khz"])


def _governor(scene: Scene, node: Node, facts: Facts, clock: Seen) -> Finding:
    return Finding(
        "speed.governor",
        Severity.WARNING,
        node.name,
        f"the governor is powersave, and a busy core runs at {_rates(clock)}",
        "the cores stay at their lowest rate however much there is to do",
        f"echo performance | {sudo(facts)}tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        f"cat /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor; {again(scene)}",
    )


def _held_down(scene: Scene, node: Node, facts: Facts, clock: Seen) -> Finding:
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


def throttled(scene: Scene) -> Iterator[Finding]:
    """Every laptop has been too hot once; what counts is now."""
    for node, _, seen in _machines(scene):
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


def power(scene: Scene) -> Iterator[Finding]:
    for node, _, seen in _machines(scene):
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


def lid(scene: Scene) -> Iterator[Finding]:
    for node, facts, seen in _machines(scene):
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


def load(scene: Scene) -> Iterator[Finding]:
    """Never more than a remark: a moment later it may be over."""
    for node, _, seen in _machines(scene):
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


def _machines(scene: Scene) -> Iterator[tuple[Node, Facts, Seen]]:
    for node in scene.nodes:
        facts = scene.facts.get(node.name, {})
        if seen := facts.get("machine"):
            yield node, facts, seen
