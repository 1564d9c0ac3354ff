"""What a machine's own name means there, and whether its peers' names can be learnt without waiting."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections.abc import Iterator
from typing import Any

from shoal.cluster.node import Node
from shoal.net.checks.commands import again, sudo
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Facts, Scene

SLOW_S = 1.0


def own_name(scene: Scene) -> Iterator[Finding]:
    """A machine alone talks to itself, and loopback is the best way to do it."""
    for node in scene.nodes if len(scene.nodes) > 1 else ():
        facts = scene.facts.get(node.name, {})
        if names := facts.get("names"):
            yield from _loopback(node, names, facts)
            yield from _myhostname(node, names)


def _loopback(node: Node, names: dict[str, Any], facts: Facts) -> Iterator[Finding]:
    published = names["published"]
    if published is not None and not ipaddress.ip_address(published).is_loopback:
        return
    if node.address in names["means"]:
        # The name is right; that the machine has lost this address is another finding's business.
        return
    host_name = names["host_name"]
    yield Finding(
        "names.loopback",
        Severity.WARNING,
        node.name,
        f"its host name {host_name} means {_meaning(names)}",
        "scripts started by torchrun or by hand tell their peers this address and hang; shoal itself names the "
        "interface and is not affected",
        _rename(host_name, node.address, sudo(facts)),
        f"getent hosts {shlex.quote(host_name)}",
    )


def _meaning(names: dict[str, Any]) -> str:
    if names["took_s"] is None:
        return "nothing yet: the look-up was still waiting for an answer when we stopped"
    if not names["means"]:
        return "nothing at all, and gloo then takes 127.0.0.1"
    addresses = ", ".join(names["means"])
    return addresses if names["published"] else f"{addresses}, which is not its own, and gloo then takes 127.0.0.1"


def _rename(host_name: str, address: str, sudo: str) -> str:
    """The name must leave its loopback line: with both lines there, loopback is sorted first (tried). Written into the
    file, not put in its place: in a container it is mounted, and `sed -i` cannot replace it."""
    word = host_name.replace(".", "\\.")
    edit = f"/^(127\\.|::1)/s/[[:space:]]{word}([[:space:]]|$)/\\1/g; /^[0-9a-f.:]+[[:space:]]*$/d"
    lines = f'{shlex.quote(f"{address} {host_name}")} "$others"'
    return f"others=$(sed -E {shlex.quote(edit)} /etc/hosts) && printf '%s\\n' {lines} | {sudo}tee /etc/hosts"


def _myhostname(node: Node, names: dict[str, Any]) -> Iterator[Finding]:
    """Only where it decides: what /etc/hosts says comes first."""
    if "myhostname" not in names["sources"] or names["in_hosts_file"]:
        return
    yield Finding(
        "names.myhostname",
        Severity.INFO,
        node.name,
        f"/etc/nsswitch.conf asks myhostname, which says that {names['host_name']} means {_meaning(names)}",
        "the name stands for whichever addresses the machine has at the moment, docker's and the VPN's too; name the "
        "interface (GLOO_SOCKET_IFNAME) for scripts that you start yourself",
    )


def reverse(scene: Scene) -> Iterator[Finding]:
    for node in scene.nodes:
        facts = scene.facts.get(node.name, {})
        asked = facts.get("names", {}).get("reverse", {})
        slow = {address: said["took_s"] for address, said in asked.items() if _is_slow(said["took_s"])}
        if slow and len(scene.nodes) > 1:
            yield Finding(
                "names.reverse",
                Severity.WARNING,
                node.name,
                "asking for the name of " + ", ".join(f"{each} took {_time(slow[each])}" for each in slow),
                "torch asks for this name when a rank connects to its store and stands still until it is told; the "
                "name server does not answer",
                _add_lines(scene, list(slow), sudo(facts)),
                f"time getent hosts {_both(next(iter(slow)))[-1]}; {again(scene)}",
            )


def _is_slow(took_s: float | None) -> bool:
    return took_s is None or took_s > SLOW_S


def _time(took_s: float | None) -> str:
    return "too long: no answer when we stopped waiting" if took_s is None else f"{took_s:.1f} s"


def _add_lines(scene: Scene, addresses: list[str], sudo: str) -> str:
    """After an empty one: the file's last line may lack its end."""
    names = {node.address: _as_name(node.name) for node in scene.nodes}
    lines = ["", *(f"{form} {names[address]}" for address in addresses for form in _both(address))]
    return f"printf '%s\\n' {shlex.join(lines)} | {sudo}tee -a /etc/hosts"


def _both(address: str) -> list[str]:
    """Also as torch asks for it, see the scout."""
    return [address] if ":" in address else [address, f"::ffff:{address}"]


def _as_name(text: str) -> str:
    """A hostfile may call a machine by its address, which is nobody's name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text
    return "shoal-" + re.sub(r"[.:]+", "-", text)
