"""gloo prints the ports of its connections with their two bytes swapped: 14215 is really 34615."""

from __future__ import annotations

import re

# Where gloo's transport speaks, and nowhere else: torch's store prints its ports as they are.
_GLOO = "gloo/transport/"
_PLACE = re.compile(r"(\[[0-9a-fA-F.:]+\]):(\d{1,5})(?!\d)")


def true_port(printed: int) -> int:
    return int.from_bytes(printed.to_bytes(2, "little"), "big")


def with_true_ports(line: str) -> str:
    """The line with both numbers, for whoever looks for the connection with `ss` or in a firewall's log."""
    return _PLACE.sub(_both, line) if _GLOO in line else line


def _both(match: re.Match[str]) -> str:
    printed = int(match[2])
    return match[0] if printed > 65535 else f"{match[0]} (really port {true_port(printed)})"
