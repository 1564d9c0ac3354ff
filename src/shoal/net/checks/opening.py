"""The command that opens a machine to its peers, in the words of the firewall that stands there.

By address, never by port: gloo listens wherever the kernel puts it, and no variable changes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Where we may not look, the command looks for itself: every chain that incoming packets pass, whoever made it.
_EVERY_CHAIN = (
    "sudo sh -c 'for family in inet {family}; do nft list chains $family; done | "
    r'awk "/^table/{{table=\$2\" \"\$3}} /chain/{{name=\$2}} /hook {hook}/{{print \"insert rule\",table,name,'
    '\\"{family} {match} accept\\"}}" | nft -f -\''
)
_HOOKS = {"in": "input", "out": "output"}


def opening(firewall: dict[str, Any], way: str, addresses: Sequence[str]) -> str:
    """`way` is in or out. Accepts from (or to) these addresses before anything else is asked of a packet.

    Empty where no firewall is to be found: then it stands elsewhere, in a router or a switch.
    """
    tools = firewall.get("tools", [])
    if firewall.get("ufw"):
        return _each(addresses, "sudo ufw allow from {}" if way == "in" else "sudo ufw allow out to {}")
    if firewall.get("firewalld") and way == "in":
        return _each(addresses, "sudo firewall-cmd --zone=trusted --add-source={}")
    chains = firewall.get("chains")
    if chains is not None:
        wanted = [chain for chain in chains if chain["hook"] == _HOOKS[way]]
        return " && ".join(_insert(chain, way, addresses) for chain in wanted)
    if "nft" in tools:
        words = {"family": _family(addresses), "hook": _HOOKS[way], "match": _match(way, addresses)}
        return _EVERY_CHAIN.format(**words)
    if "iptables" in tools:
        table = "iptables" if _family(addresses) == "ip" else "ip6tables"
        chain, flag = ("INPUT", "-s") if way == "in" else ("OUTPUT", "-d")
        return _each(addresses, f"sudo {table} -I {chain} {flag} {{}} -j ACCEPT")
    return ""


def _insert(chain: dict[str, str], way: str, addresses: Sequence[str]) -> str:
    place = f"{chain['family']} {chain['table']} {chain['name']}"
    return f"sudo nft insert rule {place} {_family(addresses)} {_match(way, addresses)} accept"


def _match(way: str, addresses: Sequence[str]) -> str:
    who = addresses[0] if len(addresses) == 1 else f"{{ {', '.join(addresses)} }}"
    return f"{'saddr' if way == 'in' else 'daddr'} {who}"


def _family(addresses: Sequence[str]) -> str:
    return "ip6" if ":" in addresses[0] else "ip"


def _each(addresses: Sequence[str], line: str) -> str:
    return " && ".join(line.format(address) for address in addresses)
