"""From names and figures on a command line to machines and a network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal.config.presets import did_you_mean
from shoal.cost.machines import GLOO, LINKS, MACHINES, NCCL, CommStack, LinkSheet, MachineSheet, SheetSpeed
from shoal.cost.network import NodesNetwork, RingNetwork
from shoal.cost.predict import ClusterModel
from shoal.errors import UsageError
from shoal.units import format_duration, format_rate, format_si, parse_delay, parse_rate


@dataclass(frozen=True)
class SheetOverrides:
    """What the user knows better than the catalogue; None leaves its figure."""

    efficiency: float | None = None
    latency: str | None = None
    flops: float | None = None
    mfu: float | None = None
    memory_gb: float | None = None


def find_link(text: str) -> LinkSheet:
    """By name, or any rate such as `300mbit`, taken for Ethernet."""
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    if not any(character.isdigit() for character in name):
        raise _unknown("link", text, LINKS, "or any rate such as 300mbit")
    rate_bps = _rate(name)
    slower = [link for link in LINKS.values() if "gbe" in link.name and link.bits_per_s <= rate_bps]
    like = slower[-1] if slower else LINKS["100mbit"]
    return replace(like, name=format_rate(rate_bps), bits_per_s=rate_bps)


def find_machines(text: str | None, link: LinkSheet) -> tuple[MachineSheet, ...]:
    """`laptop`, or one name a node: `desktop,laptop,laptop`; unsaid, what such a link usually connects."""
    return tuple(_machine(name) for name in (text or link.usual).split(","))


def make_setting(
    link: LinkSheet, machines: tuple[MachineSheet, ...], ranks_per_node: int, given: SheetOverrides
) -> ClusterModel:
    machines = tuple(_adjusted(machine, given) for machine in machines)
    stack = stack_of(machines)
    speed = SheetSpeed(machines, ranks_per_node)
    names = tuple(machine.name for machine in machines)
    between = ring(link, stack, given)
    if ranks_per_node == 1:
        return ClusterModel(speed, between, node_names=names)
    inside = ring(LINKS[machines[0].inside], stack, SheetOverrides())
    flat = NodesNetwork(ranks_per_node, inside, between)
    return ClusterModel(speed, flat, replace(flat, hierarchical=True), ranks_per_node, names)


def describe(link: LinkSheet, machines: tuple[MachineSheet, ...], setting: ClusterModel) -> str:
    """`laptop (…) over 1gbe by gloo: 118 MB/s, 0.7 ms a message`: what a plan without a profile was made from."""
    network = setting.network
    ring_ = network.between if isinstance(network, NodesNetwork) else network
    assert isinstance(ring_, RingNetwork)  # noqa: S101 - made by make_setting
    names = ", ".join(machine.name for machine in machines)
    rate = format_si(ring_.bytes_per_s, "B/s")
    return (
        f"{names} over {link.name} by {stack_of(machines).name}: {rate}, {format_duration(ring_.latency_s)} a message, "
        "by data sheet"
    )


def stack_of(machines: Iterable[MachineSheet]) -> CommStack:
    """NCCL needs a GPU everywhere."""
    return NCCL if all(machine.kind == "gpu" for machine in machines) else GLOO


def ring(link: LinkSheet, stack: CommStack, given: SheetOverrides) -> RingNetwork:
    """A stated efficiency is what the whole stack makes of the wire: its own limit and message cost are in it."""
    if given.efficiency is None:
        bytes_per_s = min(link.efficiency * link.bits_per_s / 8, stack.most_bytes_per_s)
        latency_s = link.latency_s + stack.message_s
    else:
        bytes_per_s = _between_0_and_1("--efficiency", given.efficiency) * link.bits_per_s / 8
        latency_s = link.latency_s
    if given.latency is not None:
        latency_s = parse_delay(given.latency)
    return RingNetwork(bytes_per_s, latency_s, stack.cores_per_byte_s, link.air, stack.trees)


def positive(flag: str, value: float, most: float = 1e18) -> float:
    """Infinity and what is no number at all are refused with the rest."""
    if not 0 < value <= most or not math.isfinite(value):
        raise UsageError(
            f"{flag} {value:g} is out of range", why=f"it is a number above 0, up to {most:g}", fix=f"correct {flag}"
        )
    return value


def _rate(text: str) -> float:
    try:
        return parse_rate(text)
    except UsageError as error:
        near = "" if text.endswith("bit") else did_you_mean(text, LINKS)
        raise UsageError(error.seen, why=near or error.why, fix=f"{error.fix}, or {', '.join(LINKS)}") from None


def _between_0_and_1(flag: str, value: float) -> float:
    if not 0 < value <= 1:
        raise UsageError(
            f"{flag} {value:g} is out of range", why="it is a part: above 0, 1 at most", fix=f"write {flag} 0.85"
        )
    return value


def _machine(name: str) -> MachineSheet:
    found = MACHINES.get(name.strip().lower())
    if found is None:
        raise _unknown("machine", name, MACHINES, "with --flops and --memory-gb for one of your own")
    return found


def _adjusted(machine: MachineSheet, given: SheetOverrides) -> MachineSheet:
    if given.flops is not None:
        flops = positive("--flops", given.flops)
        machine = replace(machine, fp32_flops=flops, bf16_flops=flops)
    if given.mfu is not None:
        share = _between_0_and_1("--mfu", given.mfu)
        machine = replace(machine, fp32_share=share, bf16_share=share)
    if given.memory_gb is not None:
        machine = replace(machine, memory_bytes=1e9 * positive("--memory-gb", given.memory_gb, 1e9))
    return machine


def _unknown(what: str, name: str, known: Iterable[str], more: str) -> UsageError:
    return UsageError(
        f"there is no {what} {name!r}",
        why=did_you_mean(name.lower(), known),
        fix=f"use one of: {', '.join(known)}; {more}",
    )
