"""What a node refuses to hear: cuts, a firewall and, where the kernel has no netem, lost packets. One nftables table.

Everything is dropped where it arrives. A rule on the sender's side would tell the sender: its `send` fails with "not
permitted", which no pulled cable ever says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shoal.cluster.lab.spec import INTERFACE
from shoal.errors import UsageError

_TABLE = "inet shoal"
_LOSS_SCALE = 1_000_000
_PORTS = re.compile(r"\d{1,5}(-\d{1,5})?")
_LAST_PORT = 65_535


def ruleset(deaf_to: Iterable[str], firewall: Sequence[str] | None, loss: float) -> str:
    """A whole table in one transaction: added first so that deleting cannot fail, then made anew.

    `deaf_to` are addresses whose packets vanish; `firewall` is None, or the TCP ports that stay open.
    """
    rules = [*_loss(loss), *_cuts(sorted(deaf_to)), *_firewall(firewall)]
    script = [f"add table {_TABLE}", f"delete table {_TABLE}"]
    if rules:
        script += [
            f"add table {_TABLE}",
            f"add chain {_TABLE} input {{ type filter hook input priority 0; }}",
            *(f"add rule {_TABLE} input iifname {INTERFACE} {rule}" for rule in rules),
        ]
    return "; ".join(script)


def _loss(loss: float) -> list[str]:
    return [f"numgen random mod {_LOSS_SCALE} < {round(loss * _LOSS_SCALE)} drop"] if loss else []


def _cuts(addresses: list[str]) -> list[str]:
    return [f"ip saddr {{ {', '.join(addresses)} }} drop"] if addresses else []


def _firewall(ports: Sequence[str] | None) -> list[str]:
    """The classic home firewall: answers come in, strangers only at open ports, and nobody is told why."""
    if ports is None:
        return []
    open_ports = [f"tcp dport {{ {', '.join(ports)} }} accept"] if ports else []
    return ["ct state established,related accept", "ip protocol icmp accept", *open_ports, "drop"]


def parse_ports(text: str) -> tuple[str, ...]:
    """`22,29500-29600`."""
    ports = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in ports:
        bounds = [int(part) for part in word.split("-")] if _PORTS.fullmatch(word) else [0]
        if bounds != sorted(bounds) or not all(1 <= port <= _LAST_PORT for port in bounds):
            raise UsageError(
                f"{word!r} is no TCP port",
                why=f"ports are numbers from 1 to {_LAST_PORT}, or a range of them",
                fix="write for example: --allow 22,29500-29600",
            )
    return ports
