"""The description of a lab: `shoal lab up 3 --link 1gbit`, or `--on lab:3,link=1gbit,cpu=1/1/0.5,slots=2`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from shoal.config.defaults import LAB_LINKS, LAB_NAME
from shoal.config.presets import did_you_mean
from shoal.errors import UsageError
from shoal.units import format_delay, format_rate, parse_delay, parse_rate

SWITCH = "switch"
INTERFACE = "eth0"
NETWORK = "10.77.0"
SWITCH_ADDRESS = f"{NETWORK}.254"
# More would fit into the address range, but not hundreds of nodes onto one machine.
MOST_NODES = 64
MOST_SLOTS = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LabLink(FrozenModel):
    """One node's cable, the same in both directions."""

    rate_bps: float | None = None  # None: unlimited
    delay_s: float = 0.0  # one way: a ping between two nodes sees it twice
    loss: float = 0.0  # share of packets

    def __str__(self) -> str:
        parts = [format_rate(self.rate_bps) if self.rate_bps else "unlimited"]
        parts += [f"delay {format_delay(self.delay_s)}"] if self.delay_s else []
        parts += [f"loss {100 * self.loss:.4g}%"] if self.loss else []
        return ", ".join(parts)


class LabNode(FrozenModel):
    name: str
    address: str
    link: LabLink
    cpu: float | None = None  # cores it may keep busy; None: unlimited
    slots: int = 1  # ranks it takes


class LabSpec(FrozenModel):
    name: str = LAB_NAME
    nodes: tuple[LabNode, ...]
    sshd: bool = False

    def node(self, name: str) -> LabNode:
        for node in self.nodes:
            if node.name == name:
                return node
        names = [node.name for node in self.nodes]
        raise UsageError(
            f"lab {self.name!r} has no node {name!r}",
            why=did_you_mean(name, names),
            fix=f"use one of: {', '.join(names)}",
        )


PROFILES = {
    name: LabLink(rate_bps=rate_bps, delay_s=delay_s, loss=loss)
    for name, (rate_bps, delay_s, loss) in LAB_LINKS.items()
}
DEFAULT_PROFILE = "1gbe"


def make_spec(
    count: int,
    *,
    name: str = LAB_NAME,
    link: str | None = None,
    delay: str | None = None,
    loss: str | None = None,
    cpu: str | None = None,
    slots: str | None = None,
    profile: str | None = None,
    sshd: bool = False,
) -> LabSpec:
    """Make a spec from command line words. `link`, `cpu` and `slots` take one value for all nodes or one a node."""
    if not 1 <= count <= MOST_NODES:
        raise UsageError(
            f"a lab of {count} nodes", why=f"a lab has 1 to {MOST_NODES} nodes", fix="write for example: shoal lab up 3"
        )
    base = profile_link(profile or DEFAULT_PROFILE)
    changes = {
        **({"delay_s": parse_delay(delay)} if delay is not None else {}),
        **({"loss": parse_loss(loss)} if loss is not None else {}),
    }
    rates = [base.rate_bps] * count if link is None else [_rate(word) for word in per_node("--link", link, count)]
    shares = [None] * count if cpu is None else [parse_cpu(word) for word in per_node("--cpu", cpu, count)]
    ranks = [1] * count if slots is None else [_slots(word) for word in per_node("--slots", slots, count)]
    links = [base.model_copy(update={**changes, "rate_bps": rate}) for rate in rates]
    nodes = tuple(
        LabNode(name=f"node{i}", address=f"{NETWORK}.{i}", link=node_link, cpu=share, slots=rank_count)
        for i, (node_link, share, rank_count) in enumerate(zip(links, shares, ranks, strict=True), start=1)
    )
    return LabSpec(name=check_name(name), nodes=nodes, sshd=sshd)


_KEYS = ("link", "delay", "loss", "cpu", "slots", "profile", "name")
_ON_FIX = "write for example: --on lab:3,link=1gbit,cpu=1/1/0.5"


def parse_lab(text: str) -> LabSpec:
    """Parse `lab:3`, or `lab:3,link=1gbit,delay=2ms,cpu=1/1/0.5,slots=2,profile=wifi,sshd`, of `--on`."""
    kind, _, rest = text.strip().partition(":")
    count, *settings = rest.split(",")
    if kind != "lab" or not re.fullmatch(r"-?\d{1,9}", count):
        raise UsageError(f"--on {text!r} names no lab", why="a lab is written lab:NODES[,setting=value…]", fix=_ON_FIX)
    words: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key == "sshd" and not equals:
            continue
        if key not in _KEYS or not value or key in words:
            raise UsageError(f"--on {text}: cannot use {setting!r}", why=_setting_fault(key, value, words), fix=_ON_FIX)
        words[key] = value
    name = words.pop("name", LAB_NAME)
    return make_spec(int(count), name=name, sshd="sshd" in settings, **words)


def _setting_fault(key: str, value: str, seen: Iterable[str]) -> str:
    if key in seen:
        return f"{key} is given twice"
    if key in _KEYS and not value:
        return f"{key} has no value"
    if key == "device":
        return "emulated nodes share the devices of this machine; --set run.devices=cuda/cpu gives each rank one"
    return did_you_mean(key, (*_KEYS, "sshd")) or f"the settings of a lab are {', '.join(_KEYS)} and sshd"


def profile_link(name: str) -> LabLink:
    if name not in PROFILES:
        raise UsageError(
            f"there is no link profile {name!r}",
            why=did_you_mean(name, PROFILES),
            fix=f"use one of: {', '.join(PROFILES)}",
        )
    return PROFILES[name]


def check_name(name: str) -> str:
    """Refuse names with special characters: they become folders and control groups."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a lab",
            why="a name has 1 to 31 small letters, digits or dashes and begins with a letter or digit",
            fix="write for example: --name slow-wifi",
        )
    return name


def parse_loss(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if match is None or not 0 <= float(match[1]) < 100:
        raise UsageError(
            f"{text!r} is no packet loss", why="a loss is a percentage below 100%", fix="write for example: 1%"
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
        raise UsageError(
            f"{text!r} is no CPU share",
            why="a share is a number of cores from 0.01 up: 0.5 is half of one core",
            fix="write for example: 0.5, or none for no limit",
        )
    return share


def _slots(word: str) -> int:
    if not re.fullmatch(r"[1-9]\d?", word) or int(word) > MOST_SLOTS:
        raise UsageError(
            f"{word!r} is no number of slots",
            why=f"a node takes 1 to {MOST_SLOTS} ranks",
            fix="write for example: slots=2, or slots=2/1/1 for each node its own",
        )
    return int(word)


def _rate(word: str) -> float | None:
    return None if word == "none" else parse_rate(word)


def per_node(option: str, text: str, count: int, what: str = "nodes") -> list[str]:
    words = text.split("/")
    if len(words) not in (1, count):
        raise UsageError(
            f"{option} {text}: {len(words)} values for {count} {what}",
            why=f"give one value for all {what}, or one for each, separated by /",
            fix=f"write for example: {option} {'/'.join([words[0]] * count)}",
        )
    return words * count if len(words) == 1 else words
