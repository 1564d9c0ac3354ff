"""Checks of names, addresses, interfaces, packet sizes and link speeds."""

from __future__ import annotations

import ipaddress
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from shoal.cluster.node import Node
from shoal.tools.doctor.facts import (
    TELLS_UP_TO_MBPS,
    ClusterFacts,
    Facts,
    Finding,
    Severity,
    Trial,
    slow_links,
    sudo,
)

# How findings name the kinds of interfaces that a cable is better than.
_KIND_NAMES = {
    "docker": "a network of containers inside the machine",
    "bridge": "a bridge",
    "virtual": "an interface that leads nowhere",
    "vpn": "a VPN",
    "tailscale": "Tailscale",
    "wifi": "Wi-Fi",
}
# Kinds whose networks end inside the machine.
_INTERNAL = ("docker", "virtual")


def check_addresses(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that each node has its address, and that other nodes can reach it there."""
    for node in _nodes_with_interfaces(cluster):
        interface = cluster.interface_with(node, node.address)
        advice = _advise_address(cluster, node)
        interfaces = _network(cluster, node).get("interfaces", {})
        listing = ", ".join(
            f"{' '.join(other['addresses'])} on {name}" for name, other in interfaces.items() if other["addresses"]
        )
        has = listing or "none"
        if not interface:
            evidence = f"{node.name} does not have the address {node.address}; it has {has}"
            meaning = f"the other machines look for it at a wrong address{advice}"
        elif node.interface and node.interface != interface["name"]:
            evidence = f"{node.address} is on {interface['name']} of {node.name}, not on {node.interface}; it has {has}"
            meaning = f"gloo would publish an address of {node.interface}: leave the interface out of the hosts file"
        elif interface["kind"] == "loopback" and len(cluster.nodes) > 1:
            evidence = f"{node.name} is {node.address}"
            meaning = f"on every machine {node.address} means the machine itself{advice}"
        else:
            if not (interface["up"] and interface["carrier"]):
                yield _interface_down(node, interface)
            continue
        yield Finding("interface.address", Severity.ERROR, node.name, evidence, meaning)


def _interface_down(node: Node, interface: Facts) -> Finding:
    is_unplugged = interface["up"]
    return Finding(
        "interface.down",
        Severity.ERROR,
        node.name,
        f"{interface['name']} of {node.name}, which has {node.address}, is "
        + ("unplugged" if is_unplugged else "switched off"),
        "no other machine can reach it there" + (": plug its cable in" if is_unplugged else ""),
        "" if is_unplugged else f"sudo ip link set dev {interface['name']} up",
    )


def check_published(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check the address that gloo publishes: gloo is given an interface and takes its first address."""
    for node in _nodes_with_interfaces(cluster):
        dialers = [dialer for dialer, listener in cluster.pairs() if listener is node]
        trials = (cluster.trial(dialer.name, node.name, "gloo") for dialer in dialers)
        failed = [trial for trial in trials if trial and not trial.ok]
        if failed:
            interface = cluster.interface_with(node, node.address)
            name, first = interface["name"], interface["addresses"][0]
            yield Finding(
                "interface.first",
                Severity.ERROR,
                node.name,
                f"{name} of {node.name} has {' '.join(interface['addresses'])}; "
                + "; ".join(f"{trial.source} → {node.name}: {trial.detail}" for trial in failed),
                f"gloo publishes the first address of {name}, but the others reach {node.name} by {node.address}",
                # The address stays, but behind the others.
                f"sudo ip addr del {first} dev {name} && sudo ip addr add {first} dev {name}",
            )


def check_internal(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check for addresses of networks that end inside the machine."""
    for node in _nodes_with_interfaces(cluster):
        interface = cluster.interface_with(node, node.address)
        if interface.get("kind") in _INTERNAL and len(cluster.nodes) > 1:
            yield Finding(
                "interface.internal",
                Severity.ERROR,
                node.name,
                f"{node.address} of {node.name} is on {interface['name']}, {_KIND_NAMES[interface['kind']]}",
                f"no other machine can reach it there{_advise_address(cluster, node)}",
            )
        host_name = _network(cluster, node).get("host_name")
        for address in _network(cluster, node).get("hosts_file", []):
            interface = cluster.interface_with(node, address)
            if interface.get("kind") in _INTERNAL and address != node.address:
                yield Finding(
                    "interface.internal",
                    Severity.WARNING,
                    node.name,
                    f"/etc/hosts of {node.name} maps {host_name} to {address}, which is on {interface['name']}, "
                    f"{_KIND_NAMES[interface['kind']]}",
                    "without a named interface gloo publishes that address; shoal names the interface, torchrun does "
                    "not",
                    # Not in place: in containers /etc/hosts is a mount and cannot be replaced.
                    f'sudo sh -c \'sed "s/^{re.escape(address)}[[:space:]]/{node.address} /" /etc/hosts '
                    "> /etc/hosts.new && cat /etc/hosts.new > /etc/hosts && rm /etc/hosts.new'",
                )


def misplaced(cluster: ClusterFacts) -> set[str]:
    """Return the nodes with an unusable address. Failed connections to them need no further finding."""
    findings = [*check_addresses(cluster), *check_internal(cluster)]
    return {finding.node for finding in findings if finding.severity is Severity.ERROR}


@dataclass(frozen=True)
class UnusedCable:
    """A wired interface of `node` in a network in which `peer` has an address too, while they use another kind.

    Only a trial shows whether it connects them: two separate networks may have the same addresses.
    """

    node: str
    peer: str
    used: str  # the interface that is used
    kind: str  # its kind, as a finding names it
    name: str  # the wired interface
    address: str
    peer_address: str


def unused_cables(cluster: ClusterFacts) -> list[UnusedCable]:
    cables = []
    for node, peer in permutations(_nodes_with_interfaces(cluster), 2):
        used = cluster.interface_to(node, peer)
        if used.get("kind") in _KIND_NAMES and (cable := _cable(cluster, node, peer)):
            cables.append(UnusedCable(node.name, peer.name, used["name"], _KIND_NAMES[used["kind"]], *cable))
    return cables


def check_detours(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check for a VPN, Wi-Fi or the like that is used where a cable leads to the same machine. Once per node."""
    first_by_node: dict[str, UnusedCable] = {}
    for cable in unused_cables(cluster):
        trial = cluster.trial(cable.node, cable.peer, "cable")
        if trial and trial.ok:
            first_by_node.setdefault(cable.node, cable)
    for cable in first_by_node.values():
        yield Finding(
            "interface.wrong",
            Severity.WARNING,
            cable.node,
            f"{cable.node} reaches {cable.peer} by {cable.used}, {cable.kind}; its {cable.name} leads there too",
            f'a cable is faster: write address = "{cable.address}" for {cable.node} and "{cable.peer_address}" for '
            f"{cable.peer} in the hosts file",
        )


def _cable(cluster: ClusterFacts, node: Node, peer: Node) -> tuple[str, str, str] | None:
    """Return a wired interface of the node, its address, and an address of the peer in the same network."""
    peer_addresses = [ipaddress.ip_interface(address) for address in _external_addresses(cluster, peer)]
    for name, interface in _network(cluster, node).get("interfaces", {}).items():
        if interface["kind"] == "wired" and interface["up"] and interface["carrier"]:
            for own in map(ipaddress.ip_interface, interface["addresses"]):
                for other in peer_addresses:
                    if other.ip in own.network and own.ip != other.ip and not own.is_link_local:
                        return name, str(own.ip), str(other.ip)
    return None


def _external_addresses(cluster: ClusterFacts, node: Node) -> list[str]:
    interfaces = _network(cluster, node).get("interfaces", {}).values()
    external = [interface for interface in interfaces if interface["kind"] not in (*_INTERNAL, "loopback")]
    return [address for interface in external for address in interface["addresses"]]


def _advise_address(cluster: ClusterFacts, node: Node) -> str:
    """Suggest an address of the node in a network that another node is in too; failing that, any unused one."""
    peers = [peer for peer in _nodes_with_interfaces(cluster) if peer is not node]
    shared = [cable[1] for peer in peers if (cable := _cable(cluster, node, peer))]
    taken = {other.address for other in cluster.nodes}
    own = [*shared, *(address.split("/")[0] for address in _external_addresses(cluster, node))]
    suggestion = next((address for address in own if address not in taken), None)
    return f': write address = "{suggestion}" for it in the hosts file' if suggestion else ""


def _network(cluster: ClusterFacts, node: Node) -> Facts:
    network: Facts = cluster.facts[node.name].get("network", {})
    return network


def _nodes_with_interfaces(cluster: ClusterFacts) -> list[Node]:
    return [node for node, _, network in cluster.topic("network") if network.get("interfaces")]


_SLOW_LOOKUP_S = 1.0


def check_own_name(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check what each machine's own name resolves to. For a single machine loopback is right."""
    for node, facts, names in cluster.topic("names") if len(cluster.nodes) > 1 else ():
        host_name, published = names["host_name"], names["published"]
        is_loopback = published is None or ipaddress.ip_address(published).is_loopback
        # Where the name resolves to the node's address, a machine that lost this address is another check's finding.
        if is_loopback and node.address not in names["means"]:
            yield Finding(
                "names.loopback",
                Severity.WARNING,
                node.name,
                f"its host name {host_name} means {_describe_meaning(names)}",
                "scripts started by torchrun or by hand publish this address and hang; shoal itself names the "
                "interface and is not affected",
                _rename_command(host_name, node.address, sudo(facts)),
                f"getent hosts {shlex.quote(host_name)}",
            )
        # myhostname decides only where /etc/hosts, which comes first, has no entry.
        if "myhostname" in names["sources"] and not names["in_hosts_file"]:
            yield Finding(
                "names.myhostname",
                Severity.INFO,
                node.name,
                f"/etc/nsswitch.conf asks myhostname, for which {host_name} means {_describe_meaning(names)}",
                "the name stands for all addresses that the machine has at the moment, also docker's and the VPN's; "
                "name the interface (GLOO_SOCKET_IFNAME) for scripts that you start yourself",
            )


def _describe_meaning(names: dict[str, Any]) -> str:
    if names["took_s"] is None:
        return "nothing yet: the look-up was still waiting for an answer at its timeout"
    if not names["means"]:
        return "nothing at all, and gloo then takes 127.0.0.1"
    addresses = ", ".join(names["means"])
    return addresses if names["published"] else f"{addresses}, which is not its own, and gloo then takes 127.0.0.1"


def _rename_command(host_name: str, address: str, sudo: str) -> str:
    """Return the command that maps the name to the address in /etc/hosts.

    The name must leave its loopback line: with both lines present, loopback is sorted first (tested). The file is
    overwritten, not replaced: in a container it is a mount, which `sed -i` cannot replace.
    """
    word = host_name.replace(".", "\\.")
    edit = f"/^(127\\.|::1)/s/[[:space:]]{word}([[:space:]]|$)/\\1/g; /^[0-9a-f.:]+[[:space:]]*$/d"
    lines = f'{shlex.quote(f"{address} {host_name}")} "$others"'
    return f"others=$(sed -E {shlex.quote(edit)} /etc/hosts) && printf '%s\\n' {lines} | {sudo}tee /etc/hosts"


def check_reverse(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check how long each node waits for the names of its peers' addresses."""
    for node, facts, topic in cluster.topic("names") if len(cluster.nodes) > 1 else ():
        times = {address: lookup["took_s"] for address, lookup in topic.get("reverse", {}).items()}
        slow = {address: took_s for address, took_s in times.items() if took_s is None or took_s > _SLOW_LOOKUP_S}
        if slow:
            described = (
                f"{address} took " + ("too long: no answer at the timeout" if took_s is None else f"{took_s:.1f} s")
                for address, took_s in slow.items()
            )
            names = {peer.address: _host_name(peer.name) for peer in cluster.nodes}
            # The first line is empty because the file's last line may lack its end.
            lines = ["", *(f"{form} {names[address]}" for address in slow for form in _lookup_forms(address))]
            yield Finding(
                "names.reverse",
                Severity.WARNING,
                node.name,
                "asking for the name of " + ", ".join(described),
                "torch asks for this name when a rank connects to its store, and blocks until it has an answer; the "
                "name server does not answer",
                f"printf '%s\\n' {shlex.join(lines)} | {sudo(facts)}tee -a /etc/hosts",
                f"time getent hosts {_lookup_forms(next(iter(slow)))[-1]}",
            )


def _lookup_forms(address: str) -> list[str]:
    """Return the address also in the form in which torch looks it up; see the collector."""
    return [address] if ":" in address else [address, f"::ffff:{address}"]


def _host_name(text: str) -> str:
    """Return a name for /etc/hosts: a hosts file may name a machine by its address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text
    return "shoal-" + re.sub(r"[.:]+", "-", text)


_USUAL_MTU = 1500


def check_mtu(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that packets of full size arrive.

    Connections begin with small packets, so a path that loses large ones hangs later. All nodes should have one MTU:
    the most common one, or the size that really passes where even that is lost.
    """
    used = {
        node.name: interface
        for node in cluster.nodes
        for peer in cluster.nodes
        if (interface := cluster.interface_to(node, peer))
    }
    mtus = {name: int(interface["mtu"]) for name, interface in used.items()}
    if not mtus:
        return
    lost = [
        trial for trial in cluster.trials if trial.kind == "full" and not trial.ok and "path_mtu" not in trial.numbers
    ]
    # A smaller MTU at the receiver explains a loss; otherwise something between the two nodes drops the packets.
    dropped = [trial for trial in lost if mtus.get(trial.source, 0) <= mtus.get(trial.target, 0)]
    counts = Counter(mtus.values())
    # Among equally common sizes prefer the usual one, then the smaller.
    most_common = max(counts, key=lambda mtu: (counts[mtu], mtu == _USUAL_MTU, -mtu))
    wanted = min([most_common, *(int(trial.numbers["passes"]) for trial in dropped)])
    for name, mtu in mtus.items():
        own = [trial for trial in lost if name in (trial.source, trial.target)]
        if mtu != wanted:
            yield _wrong_mtu(name, used[name]["name"], mtu, wanted, own, any(trial in dropped for trial in own))


def _wrong_mtu(name: str, interface: str, mtu: int, wanted: int, lost: list[Trial], is_dropped: bool) -> Finding:
    evidence = f"{interface} of {name} has MTU {mtu}, the network {wanted}. "
    if lost:
        sizes = [f"of {trial.numbers['size']:.0f} bytes from {trial.source} to {trial.target}" for trial in lost]
        largest = min(trial.numbers["passes"] for trial in lost)
        evidence += f"Packets {', '.join(sizes)} were lost; up to {largest:.0f} bytes arrive"
    else:
        evidence += "Packets of full size arrive nevertheless"
    meaning = (
        "connections open and then stall at the first full packet: gloo would hang"
        if is_dropped
        else "full packets from other machines are lost there: it works only while both ends announce their size"
    )
    severity = Severity.ERROR if is_dropped else Severity.WARNING if lost else Severity.INFO
    fix = f"sudo ip link set dev {interface} mtu {wanted}" if lost else ""
    return Finding("mtu.path" if is_dropped else "mtu.mismatch", severity, name, evidence, meaning, fix)


_BROKEN = "a damaged cable, a loose plug, or a manual setting; where the command does not help, try another cable"


def check_cards(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check for cards below their full speed. A 2.5 Gbit/s card at a 1 Gbit/s switch is as it should be."""
    for node, interface in _interfaces_to_peers(cluster):
        is_half = interface.get("duplex") == "half"
        speed_mbps, best_mbps = int(interface.get("speed_mbps", 0)), int(interface.get("best_mbps", 0))
        if is_half or 0 < speed_mbps < best_mbps:
            partner_mbps = int(interface.get("partner_mbps", TELLS_UP_TO_MBPS))
            can_fix = is_half or speed_mbps < min(best_mbps, partner_mbps)
            duplex = ", half duplex" if is_half else ""
            yield Finding(
                "interface.slow",
                Severity.WARNING if can_fix or speed_mbps < TELLS_UP_TO_MBPS else Severity.INFO,
                node.name,
                f"{interface['name']} of {node.name} runs at {speed_mbps} Mbit/s{duplex}; it can do {best_mbps}",
                _BROKEN if can_fix else "the device at the other end of its cable can do no more",
                f"sudo ethtool -s {interface['name']} autoneg on" if can_fix else "",
            )


def check_links(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check for links that are slower than the others; with two nodes, slower than their cards report."""
    links = slow_links(cluster.trials)
    for name, mbps in links.slow.items():
        yield Finding(
            "link.slow",
            Severity.WARNING,
            name,
            f"{name}: {mbps:.0f} Mbit/s in a short burst, other pairs {links.fast_mbps:.0f}",
            "every rank waits for the slowest link in every step: check its cable, its port of the switch, its Wi-Fi",
        )
    if links.suspects:
        rates = ", ".join(f"{name} {mbps:.0f}" for name, mbps in links.suspects.items())
        unmeasured = [
            f"{trial.source} → {trial.target}"
            for trial in cluster.trials
            if trial.kind == "tcp" and not trial.ok and links.suspects.keys() & {trial.source, trial.target}
        ]
        advice = (
            f", because there is no connection {', '.join(unmeasured)}: open those first (see reach.pair), then check "
            "again"
            if unmeasured
            else ": check the cables, the ports of the switch and the Wi-Fi of all of them"
        )
        yield Finding(
            "link.slow",
            Severity.WARNING,
            "",
            f"{' or '.join(links.suspects)}: {rates} Mbit/s in a short burst, other pairs {links.fast_mbps:.0f}",
            f"at least one of these links is slow; which one cannot be told{advice}",
        )
    rates_by_pair = {
        (trial.source, trial.target): trial.numbers["mbps"] for trial in cluster.trials if trial.kind == "burst"
    }
    names = list(dict.fromkeys(name for pair in rates_by_pair for name in pair))
    card_speeds = {
        node.name: interface["speed_mbps"]
        for node, interface in _interfaces_to_peers(cluster)
        if interface.get("speed_mbps")
    }
    if len(names) == 2 and card_speeds.keys() >= set(names):
        mbps, card_mbps = min(rates_by_pair.values()), min(card_speeds[name] for name in names)
        if mbps <= min(card_mbps, TELLS_UP_TO_MBPS) / 2:
            yield Finding(
                "link.slow",
                Severity.WARNING,
                "",
                f"{' and '.join(names)}: {mbps:.0f} Mbit/s in a short burst, but their cards report {card_mbps}",
                "something between the two is slower than either: a switch, a powerline adapter, a shaped link",
            )


def check_power_save(cluster: ClusterFacts) -> Iterator[Finding]:
    for node, interface in _interfaces_to_peers(cluster):
        if interface.get("power_save"):
            yield Finding(
                "wifi.powersave",
                Severity.WARNING,
                node.name,
                f"the Wi-Fi card {interface['name']} of {node.name} sleeps between packets",
                "every exchange waits for it to wake, up to a tenth of a second",
                f"sudo iw dev {interface['name']} set power_save off",
            )


def _interfaces_to_peers(cluster: ClusterFacts) -> Iterator[tuple[Node, Facts]]:
    """Yield each node with each interface that leads to a peer, once."""
    for node in cluster.nodes:
        by_name: dict[str, Facts] = {}
        for peer in cluster.nodes:
            if peer is not node and (interface := cluster.interface_to(node, peer)):
                by_name.setdefault(interface["name"], interface)
        for interface in by_name.values():
            yield node, interface
