"""The description of a lab: its nodes, links and limits, made from words such as `100mbit`, `2ms` and `1%`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shoal_lab.errors import LabUsageError, did_you_mean

DEFAULT_NAME = "default"
SWITCH = "switch"
INTERFACE = "eth0"
NETWORK = "10.77.0"
SWITCH_ADDRESS = f"{NETWORK}.254"
# More would fit into the address range, but not hundreds of nodes onto one machine.
MOST_NODES = 64
MOST_SLOTS = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_RATE_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(us|µs|ms|s)", re.IGNORECASE)
_TIME_SCALES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([mg])(i?)b", re.IGNORECASE)
# Python with a few modules has this much; with less, not even a shell starts reliably.
_LEAST_MEMORY_BYTES = 32e6


@dataclass(frozen=True)
class Link:
    """One node's cable, the same in both directions."""

    rate_bps: float | None = None  # None: unlimited
    delay_s: float = 0.0  # one way: a ping between two nodes sees it twice
    loss: float = 0.0  # share of packets

    def __str__(self) -> str:
        parts = [format_rate(self.rate_bps) if self.rate_bps else "unlimited"]
        parts += [f"delay {format_delay(self.delay_s)}"] if self.delay_s else []
        parts += [f"loss {100 * self.loss:.4g}%"] if self.loss else []
        return ", ".join(parts)


@dataclass(frozen=True)
class NodeSpec:
    name: str
    address: str
    link: Link
    cpu: float | None = None  # cores it may keep busy; None: unlimited
    memory_bytes: int | None = None  # above it the kernel kills a process of the node; None: unlimited
    slots: int = 1  # how many processes of a distributed program it takes; the lab itself does not use it


@dataclass(frozen=True)
class LabSpec:
    """What a lab is made of. `make_spec` makes one from words as on the command line."""

    nodes: tuple[NodeSpec, ...]
    name: str = DEFAULT_NAME
    sshd: bool = False  # run an SSH server on each node

    def node(self, name: str) -> NodeSpec:
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        raise LabUsageError(
            f"lab {self.name!r} has no node {name!r}",
            why=did_you_mean(name, names),
            fix=f"use one of: {', '.join(names)}",
        )


# Wi-Fi and WAN figures are what iperf3 and ping show in an ordinary flat and between two homes.
PROFILES = {
    "100mbit": Link(100e6),
    "1gbe": Link(1e9),
    "2.5gbe": Link(2.5e9),
    "10gbe": Link(10e9),
    "wifi": Link(150e6, delay_s=2e-3, loss=0.0005),
    "wan": Link(50e6, delay_s=15e-3, loss=0.001),
}
DEFAULT_PROFILE = "1gbe"


def make_spec(
    count: int,
    *,
    name: str = DEFAULT_NAME,
    link: str | None = None,
    delay: str | None = None,
    loss: str | None = None,
    cpu: str | None = None,
    memory: str | None = None,
    slots: str | None = None,
    profile: str | None = None,
    sshd: bool = False,
) -> LabSpec:
    """Make a spec from command line words. `link`, `cpu`, `memory` and `slots` take one value, or one for each node."""
    if not 1 <= count <= MOST_NODES:
        raise LabUsageError(
            f"a lab of {count} nodes", why=f"a lab has 1 to {MOST_NODES} nodes", fix="write for example: shoal lab up 3"
        )
    base = profile_link(profile or DEFAULT_PROFILE)
    base = change_link(base, delay=delay, loss=loss)
    shares = [None] * count if cpu is None else [parse_cpu(word) for word in per_node("--cpu", cpu, count)]
    sizes = [None] * count if memory is None else [parse_memory(word) for word in per_node("--memory", memory, count)]
    ranks = [1] * count if slots is None else [_slots(word) for word in per_node("--slots", slots, count)]
    links = [base] * count if link is None else [change_link(base, word) for word in per_node("--link", link, count)]
    nodes = tuple(
        NodeSpec(f"node{i}", f"{NETWORK}.{i}", node_link, cpu=share, memory_bytes=size, slots=rank_count)
        for i, (node_link, share, size, rank_count) in enumerate(zip(links, shares, sizes, ranks, strict=True), start=1)
    )
    return LabSpec(name=check_name(name), nodes=nodes, sshd=sshd)


def profile_link(name: str) -> Link:
    if name not in PROFILES:
        raise LabUsageError(
            f"there is no link profile {name!r}",
            why=did_you_mean(name, PROFILES),
            fix=f"use one of: {', '.join(PROFILES)}",
        )
    return PROFILES[name]


def check_name(name: str) -> str:
    """Refuse names with special characters: they become folders and control groups."""
    if not _NAME.fullmatch(name):
        raise LabUsageError(
            f"{name!r} is not a name for a lab",
            why="a name has 1 to 31 small letters, digits or dashes and begins with a letter or digit",
            fix="write for example: --name slow-wifi",
        )
    return name


def change_link(link: Link, rate: str | None = None, delay: str | None = None, loss: str | None = None) -> Link:
    """Return the link with what is given: a rate such as `100mbit` or `none`, a delay `2ms`, a loss `1%`."""
    if rate is not None:
        link = replace(link, rate_bps=None if rate == "none" else parse_rate(rate))
    if delay is not None:
        link = replace(link, delay_s=parse_delay(delay))
    return link if loss is None else replace(link, loss=parse_loss(loss))


# shoal.units reads rates and delays in the same way, for programs that have no lab; this package imports nothing of it.


def parse_rate(text: str) -> float:
    """Return bits per second from `100mbit` or `2.5gbit`. `bps` is refused: tc reads it as bytes, others as bits."""
    match = _RATE.fullmatch(text.strip())
    rate_bps = float(match[1]) * _RATE_SCALES[match[2].lower()] if match else 0.0
    if rate_bps <= 0:
        raise LabUsageError(
            f"{text!r} is not a link rate",
            why="a rate is a number above zero with its unit: kbit, mbit or gbit (bits a second)",
            fix="write for example: 100mbit, 1gbit or 2.5gbit",
        )
    return rate_bps


def format_rate(rate_bps: float) -> str:
    """Return `1gbit` for `1e9`, as `parse_rate` and tc read it."""
    for prefix in "tgmk":
        if rate_bps >= _RATE_SCALES[prefix]:
            return f"{rate_bps / _RATE_SCALES[prefix]:.6g}{prefix}bit"
    return f"{rate_bps:.6g}bit"


def parse_delay(text: str) -> float:
    """Return seconds from `2ms`, `500us` or `0.1s`."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise LabUsageError(
            f"{text!r} is not a delay",
            why="a delay is a number with its unit: us, ms or s",
            fix="write for example: 2ms",
        )
    return float(match[1]) * _TIME_SCALES[match[2].lower()]


def format_delay(seconds: float) -> str:
    for unit in ("s", "ms"):
        if seconds >= _TIME_SCALES[unit]:
            return f"{seconds / _TIME_SCALES[unit]:.6g}{unit}"
    return f"{seconds * 1e6:.6g}us"


def parse_loss(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if match is None or not 0 <= float(match[1]) < 100:
        raise LabUsageError(
            f"{text!r} is not a packet loss", why="a loss is a percentage below 100%", fix="write for example: 1%"
        )
    return float(match[1]) / 100


def parse_cpu(text: str) -> float | None:
    """Parse a number of cores, or `none`. The kernel's smallest quota is 1 ms in a period of at most 1 s."""
    if text.strip() == "none":
        return None
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 1024:
        raise LabUsageError(
            f"{text!r} is not a CPU share",
            why="a share is a number of cores from 0.01 up: 0.5 is half of one core",
            fix="write for example: 0.5, or none for no limit",
        )
    return share


def parse_memory(text: str) -> int | None:
    """Return bytes from `2gb`, `512mb` or `2gib`, None for `none`. `2g` is refused: programs disagree on it."""
    if text.strip() == "none":
        return None
    match = _SIZE.fullmatch(text.strip())
    base = 1024 if match and match[3] else 1000
    size_bytes = float(match[1]) * base ** {"m": 2, "g": 3}[match[2].lower()] if match else 0.0
    if size_bytes < _LEAST_MEMORY_BYTES:
        raise LabUsageError(
            f"{text!r} is not a size of memory",
            why=f"a size is a number with its unit, mb, gb, mib or gib, from {_LEAST_MEMORY_BYTES / 1e6:.0f}mb up",
            fix="write for example: 2gb, 512mb, or none for no limit",
        )
    return round(size_bytes)


def format_memory(size_bytes: int) -> str:
    """Return `2gb` for `2e9`, as `parse_memory` reads it."""
    scale, unit = (1e9, "gb") if size_bytes >= 1e9 else (1e6, "mb")
    return f"{size_bytes / scale:.6g}{unit}"


def _slots(word: str) -> int:
    if not re.fullmatch(r"[1-9]\d?", word) or int(word) > MOST_SLOTS:
        raise LabUsageError(
            f"{word!r} is not a number of slots",
            why=f"a node takes 1 to {MOST_SLOTS} ranks",
            fix="write for example: slots=2, or slots=2/1/1 for each node its own",
        )
    return int(word)


def per_node(option: str, text: str, count: int, what: str = "nodes") -> list[str]:
    words = text.split("/")
    if len(words) not in (1, count):
        raise LabUsageError(
            f"{option} {text}: {len(words)} values for {count} {what}",
            why=f"give one value for all {what}, or one for each, separated by /",
            fix=f"write for example: {option} {'/'.join([words[0]] * count)}",
        )
    return words * count if len(words) == 1 else words
