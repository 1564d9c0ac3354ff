"""Collect facts of the network: interfaces, the route to each peer, firewall rules, names and how they resolve."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.host import network
from shoal.host.facts import can_listen
from shoal.host.proc import command_output, read_text

_SYS = Path("/sys/class/net")
# Recognised by name, because many of these are plain bridges, tunnels or veth pairs to the kernel.
_KINDS_BY_NAME = (
    ("docker", re.compile(r"docker|br-[0-9a-f]{12}|podman|cni|flannel|cali|lxc|lxd|virbr|vmnet|vboxnet")),
    ("tailscale", re.compile(r"tailscale|zt[0-9a-z]{8}")),
    ("vpn", re.compile(r"wg\d|tun\d|tap\d|ppp\d|nordlynx|proton|utun")),
)
_KINDS_BY_TYPE = {
    "bridge": "bridge",
    **dict.fromkeys(("wireguard", "tun", "gre", "gretap", "ipip", "sit", "vxlan"), "vpn"),
    **dict.fromkeys(("dummy", "ifb"), "virtual"),
}


def observe(request: dict[str, Any]) -> dict[str, Any]:
    interfaces = network.links()
    addresses = network.addresses()
    names = {link["index"]: link["name"] for link in interfaces}
    host_name = socket.gethostname()
    return {
        "interfaces": {
            link["name"]: _interface(link, [address for index, address, _ in addresses if index == link["index"]])
            for link in interfaces
        },
        "routes": {peer: _route(peer, names) for peer in request.get("peers", [])},
        "firewall": firewall(),
        "host_name": host_name,
        "hosts_file": hosts_file_addresses(read_text("/etc/hosts"), host_name),
    }


def _interface(link: dict[str, Any], addresses: list[str]) -> dict[str, Any]:
    name = link["name"]
    is_wifi = any((_SYS / name / mark).exists() for mark in ("wireless", "phy80211"))
    facts = {
        "kind": kind_of(name, link["type"], is_wifi),
        "addresses": addresses,
        **{key: link[key] for key in ("mac", "mtu", "up", "carrier")},
    }
    if not link["type"] and name != "lo":
        # Virtual interfaces report a fixed figure: a veth pair says 10 Gbit/s, however it is shaped.
        facts |= network.link_settings(name)
    if is_wifi:
        facts["power_save"] = network.power_save(name)
    return facts


def kind_of(name: str, kernel_type: str, is_wifi: bool) -> str:
    """Return wired for veth pairs too: containers and emulated nodes are connected by them."""
    if name == "lo":
        return "loopback"
    named = next((kind for kind, pattern in _KINDS_BY_NAME if pattern.match(name)), None)
    return named or ("wifi" if is_wifi else _KINDS_BY_TYPE.get(kernel_type, "wired"))


def _route(peer: str, names: dict[int, str]) -> dict[str, Any]:
    try:
        path = network.route(peer)
    except OSError as error:
        return {"error": error.strerror}
    return {"interface": names.get(path["index"], ""), **{key: path[key] for key in ("source", "local")}}


# Names.

# For all look-ups together, which run in parallel: a dead name server keeps each of them waiting for 5 s or more.
_LOOKUPS_TIMEOUT_S = 3.5


def observe_names(request: dict[str, Any]) -> dict[str, Any]:
    own = socket.gethostname()
    peers = [address for address in (request.get("address"), *request.get("peers", [])) if address]
    questions: dict[str, Callable[[], Any]] = {f"name of {address}": _reverse_lookup(address) for address in peers}
    answers = ask_all({"own": lambda: resolve(own), **questions}, _LOOKUPS_TIMEOUT_S)
    means = answers["own"].get("answer", [])
    return {
        "host_name": own,
        "means": means,
        "took_s": answers["own"]["took_s"],
        "published": published(means),
        "reverse": {address: answers[f"name of {address}"] for address in peers},
        "in_hosts_file": hosts_file_addresses(read_text("/etc/hosts"), own),
        "sources": host_sources(read_text("/etc/nsswitch.conf")),
    }


def ask_all(questions: dict[str, Callable[[], Any]], timeout_s: float) -> dict[str, dict[str, Any]]:
    """Ask each question in a thread, since a look-up has no timeout. `took_s` is None for one that still waits."""
    answers: dict[str, dict[str, Any]] = {name: {"took_s": None} for name in questions}

    def ask(name: str) -> None:
        began = time.monotonic()
        answer = questions[name]()
        answers[name] = {"took_s": time.monotonic() - began, "answer": answer}

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in questions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(answers)


def resolve(name: str) -> list[str]:
    """Return the addresses of a name, in the order in which gloo would get them."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def published(addresses: list[str]) -> str | None:
    """Return what gloo sends to its peers when no interface is named: the first address that this machine has."""
    return next((address for address in addresses if can_listen(address)), None)


def _reverse_lookup(address: str) -> Callable[[], str]:
    """Look up the name of an address as torch does when a rank connects to its store.

    torch's sockets are for both families, so an IPv4 address is looked up as an IPv4-mapped IPv6 address. A plain line
    in /etc/hosts does not answer that (tested).
    """
    mapped = address if ":" in address else f"::ffff:{address}"

    def ask() -> str:
        try:
            return socket.getnameinfo((mapped, 0), socket.NI_NUMERICSERV)[0]
        except OSError:
            return address

    return ask


def hosts_file_addresses(text: str, name: str) -> list[str]:
    """Return the addresses of a name in /etc/hosts, without asking any other source."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0] for words in lines if name in words[1:]]


def host_sources(text: str) -> list[str]:
    """Return the sources for host names in nsswitch.conf in their order, without the actions in brackets."""
    line = next((line for line in text.splitlines() if line.startswith("hosts:")), "")
    return [word for word in line.partition("#")[0].split()[1:] if not word.startswith("[") and not word.endswith("]")]


# Firewall.

_FIREWALL_TOOLS = ("ufw", "firewall-cmd", "nft", "iptables")
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"


def firewall() -> dict[str, Any]:
    """Return the firewall as far as this user may see it.

    `chains` are those that incoming or outgoing packets pass and that may drop them; None where they cannot be listed.
    """
    search = f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}"
    tools = {name: path for name in _FIREWALL_TOOLS if (path := shutil.which(name, path=search))}
    chains = None
    if "nft" in tools:
        with contextlib.suppress(ValueError):
            chains = blocking_chains(json.loads(command_output([tools["nft"], "-j", "list", "ruleset"])))
    return {
        "tools": list(tools),
        "ufw": "ufw" in tools and "ENABLED=yes" in read_text("/etc/ufw/ufw.conf").splitlines(),
        "firewalld": "firewall-cmd" in tools
        and command_output(["systemctl", "is-active", "firewalld"]).strip() == "active",
        "chains": chains,
    }


def blocking_chains(ruleset: dict[str, Any]) -> list[dict[str, str]]:
    """Return the chains of `nft -j list ruleset` that may drop packets, also by a jump to another chain."""
    entries = ruleset.get("nftables", [])
    rules = [entry["rule"] for entry in entries if "rule" in entry]
    blocking = []
    for chain in (entry["chain"] for entry in entries if "chain" in entry):
        family, table, name = place = (chain["family"], chain["table"], chain["name"])
        own = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == place]
        may_drop = chain.get("policy") == "drop" or any(_may_drop(rule) for rule in own)
        if chain.get("hook") in ("input", "output") and family in ("ip", "ip6", "inet") and may_drop:
            blocking.append({"family": family, "table": table, "name": name, "hook": chain["hook"]})
    return blocking


def _may_drop(rule: dict[str, Any]) -> bool:
    return any(key in ("drop", "reject", "jump", "goto", "vmap") for part in rule.get("expr", []) for key in part)
