"""Does each node use the right one of its addresses and interfaces?"""

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
    SlowLinks,
    Trial,
    again,
    slow_links,
    sudo,
)

_WORDS = {
    "docker": "a network of containers inside the machine",
    "bridge": "a bridge",
    "virtual": "an interface that leads nowhere",
    "vpn": "a VPN",
    "tailscale": "Tailscale",
    "wifi": "Wi-Fi",
}
_INSIDE = ("docker", "virtual")


def addresses(scene: ClusterFacts) -> Iterator[Finding]:
    """An address that the node does not have, or one by which nobody else can mean it."""
    for node in _seen(scene):
        has = _listing(scene, node)
        carrier = scene.carrying(node, node.address)
        other = _suggestion(scene, node)
        write = f': write address = "{other}" for it in the hosts file' if other else ""
        if not carrier:
            meaning = f"the other machines look for it where it is not{write}"
            evidence = f"{node.name} does not have the address {node.address}; it has {has}"
            yield Finding("interface.address", Severity.ERROR, node.name, evidence, meaning)
        elif node.interface and node.interface != carrier["name"]:
            evidence = f"{node.address} is on {carrier['name']} of {node.name}, not on {node.interface}; it has {has}"
            meaning = f"gloo would offer an address of {node.interface}: leave the interface out of the hosts file"
            yield Finding("interface.address", Severity.ERROR, node.name, evidence, meaning)
        elif carrier["kind"] == "loopback" and len(scene.nodes) > 1:
            meaning = f"to every machine {node.address} means itself{write}"
            yield Finding("interface.address", Severity.ERROR, node.name, f"{node.name} is {node.address}", meaning)
        elif not (carrier["up"] and carrier["carrier"]):
            yield _down(node, carrier)


def _down(node: Node, carrier: Facts) -> Finding:
    unplugged, how = carrier["up"], "unplugged" if carrier["up"] else "switched off"
    return Finding(
        "interface.down",
        Severity.ERROR,
        node.name,
        f"{carrier['name']} of {node.name}, which has {node.address}, is {how}",
        "no other machine can reach it there" + (": plug its cable in" if unplugged else ""),
        "" if unplugged else f"sudo ip link set dev {carrier['name']} up",
    )


def offers(scene: ClusterFacts) -> Iterator[Finding]:
    """gloo is told the interface, and takes the first address that this has."""
    for node in _seen(scene):
        tried = (scene.trial(dialer.name, node.name, "gloo") for dialer, listener in scene.pairs() if listener is node)
        lost = [trial for trial in tried if trial and not trial.ok]
        if lost:
            carrier = scene.carrying(node, node.address)
            name, first = carrier["name"], carrier["addresses"][0]
            yield Finding(
                "interface.first",
                Severity.ERROR,
                node.name,
                f"{name} of {node.name} has {' '.join(carrier['addresses'])}; "
                + "; ".join(f"{trial.source} → {node.name}: {trial.detail}" for trial in lost),
                f"gloo offers the first address of {name}, and the others reach {node.name} by {node.address}",
                # It stays, behind the others.
                f"sudo ip addr del {first} dev {name} && sudo ip addr add {first} dev {name}",
            )


def misplaced(scene: ClusterFacts) -> set[str]:
    """Nodes whose address is not one by which others reach them: what those see of them is no news."""
    return {finding.node for check in (addresses, decoys) for finding in check(scene) if finding.severity == "error"}


def decoys(scene: ClusterFacts) -> Iterator[Finding]:
    """Addresses of networks that end inside the machine."""
    for node in _seen(scene):
        carrier = scene.carrying(node, node.address)
        if carrier.get("kind") in _INSIDE and len(scene.nodes) > 1:
            other = _suggestion(scene, node)
            write = f': write address = "{other}" for it in the hosts file' if other else ""
            evidence = f"{node.address} of {node.name} is on {carrier['name']}, {_WORDS[carrier['kind']]}"
            yield Finding(
                "interface.decoy", Severity.ERROR, node.name, evidence, f"no other machine can reach it there{write}"
            )
        for address in _network(scene, node).get("hosts_file", []):
            carrier = scene.carrying(node, address)
            if carrier.get("kind") in _INSIDE and address != node.address:
                yield _named_decoy(scene, node, address, carrier)


def _named_decoy(scene: ClusterFacts, node: Node, address: str, carrier: Facts) -> Finding:
    host = _network(scene, node)["host_name"]
    return Finding(
        "interface.decoy",
        Severity.WARNING,
        node.name,
        f"/etc/hosts of {node.name} says that {host} is {address}: that is on {carrier['name']}, "
        f"{_WORDS[carrier['kind']]}",
        "gloo left to itself offers that address to the others; shoal names the interface, torchrun does not",
        # Not in place: in containers /etc/hosts is mounted and cannot be replaced.
        f'sudo sh -c \'sed "s/^{re.escape(address)}[[:space:]]/{node.address} /" /etc/hosts > /etc/hosts.new && '
        "cat /etc/hosts.new > /etc/hosts && rm /etc/hosts.new'",
    )


@dataclass(frozen=True)
class UnusedCable:
    """A wired interface of `node` on whose network `peer` has an address too, while another kind is used between them.
    Whether they meet there is to be tried: two homes may have the same network."""

    node: str
    peer: str
    used: str
    kind: str
    name: str
    address: str
    peer_address: str


def cables(scene: ClusterFacts) -> list[UnusedCable]:
    pairs = ((node, peer, scene.interface(node, peer)) for node, peer in permutations(_seen(scene), 2))
    found = ((node, peer, used, _cable(scene, node, peer)) for node, peer, used in pairs if used.get("kind") in _WORDS)
    return [
        UnusedCable(node.name, peer.name, used["name"], _WORDS[used["kind"]], *cable)
        for node, peer, used, cable in found
        if cable
    ]


def detours(scene: ClusterFacts) -> Iterator[Finding]:
    """A VPN, Wi-Fi or the like, where a cable leads to the same machine. Once for a node."""
    better = [cable for cable in cables(scene) if _passes(scene.trial(cable.node, cable.peer, "cable"))]
    for cable in {each.node: each for each in reversed(better)}.values():
        yield Finding(
            "interface.wrong",
            Severity.WARNING,
            cable.node,
            f"{cable.node} reaches {cable.peer} by {cable.used}, {cable.kind}; its {cable.name} leads there too",
            f'a cable is faster: write address = "{cable.address}" for {cable.node} and "{cable.peer_address}" for '
            f"{cable.peer} in the hosts file",
        )


def _passes(trial: Trial | None) -> bool:
    return trial is not None and trial.ok


def _cable(scene: ClusterFacts, node: Node, peer: Node) -> tuple[str, str, str] | None:
    """A wired interface of the node, its address, and an address of the peer on the same network."""
    theirs = [ipaddress.ip_interface(each) for each in _addresses(scene, peer)]
    for name, found in _network(scene, node).get("interfaces", {}).items():
        if found["kind"] == "wired" and found["up"] and found["carrier"]:
            for own in map(ipaddress.ip_interface, found["addresses"]):
                for other in theirs:
                    if other.ip in own.network and own.ip != other.ip and not own.is_link_local:
                        return name, str(own.ip), str(other.ip)
    return None


def _addresses(scene: ClusterFacts, node: Node) -> list[str]:
    """Those that others may use."""
    interfaces = _network(scene, node).get("interfaces", {}).values()
    return [each for found in interfaces if found["kind"] not in (*_INSIDE, "loopback") for each in found["addresses"]]


def _suggestion(scene: ClusterFacts, node: Node) -> str | None:
    """An address of the node on a network that another node is on too; failing that, any that is nobody else's."""
    shared = [cable[1] for peer in _seen(scene) if peer is not node and (cable := _cable(scene, node, peer))]
    taken = {other.address for other in scene.nodes}
    own = [*shared, *(each.split("/")[0] for each in _addresses(scene, node))]
    return next((address for address in own if address not in taken), None)


def _listing(scene: ClusterFacts, node: Node) -> str:
    found = _network(scene, node).get("interfaces", {})
    each = [f"{' '.join(item['addresses'])} on {name}" for name, item in found.items() if item["addresses"]]
    return ", ".join(each) or "none"


def _network(scene: ClusterFacts, node: Node) -> Facts:
    found: Facts = scene.facts[node.name].get("network", {})
    return found


def _seen(scene: ClusterFacts) -> list[Node]:
    """Where the kernel told of its interfaces."""
    return [node for node in scene.nodes if scene.facts.get(node.name, {}).get("network", {}).get("interfaces")]


# SECTION net/checks/names
# What a machine's own name means there, and whether its peers' names can be learnt without waiting.


SLOW_S = 1.0


def own_name(scene: ClusterFacts) -> Iterator[Finding]:
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


def reverse(scene: ClusterFacts) -> Iterator[Finding]:
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


def _add_lines(scene: ClusterFacts, addresses: list[str], sudo: str) -> str:
    """After an empty one: the file's last line may lack its end."""
    names = {node.address: _as_name(node.name) for node in scene.nodes}
    lines = ["", *(f"{form} {names[address]}" for address in addresses for form in _both(address))]
    return f"printf '%s\\n' {shlex.join(lines)} | {sudo}tee -a /etc/hosts"


def _both(address: str) -> list[str]:
    """Also as torch asks for it, see the collector."""
    return [address] if ":" in address else [address, f"::ffff:{address}"]


def _as_name(text: str) -> str:
    """A hostfile may call a machine by its address, which is nobody's name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return text
    return "shoal-" + re.sub(r"[.:]+", "-", text)


# SECTION net/checks/mtu
# Do packets of full size arrive? Connections begin with small ones, so a way that loses big ones hangs later.


_USUAL = 1500


def sizes(scene: ClusterFacts) -> Iterator[Finding]:
    """One size for all: the most common one, or what really passes where even that does not."""
    used = {node.name: way for node in scene.nodes for peer in scene.nodes if (way := scene.interface(node, peer))}
    mtus = {name: int(way["mtu"]) for name, way in used.items()}
    if not mtus:
        return
    lost = [trial for trial in scene.trials if trial.kind == "full" and not trial.ok and "told" not in trial.numbers]
    # Where the receiver's own size is the smaller one, that explains it; otherwise something between them does.
    swallowed = [trial for trial in lost if mtus.get(trial.source, 0) <= mtus.get(trial.target, 0)]
    wanted = min([_most_common(list(mtus.values())), *(int(trial.numbers["passes"]) for trial in swallowed)])
    for name, mtu in mtus.items():
        own = [trial for trial in lost if name in (trial.source, trial.target)]
        if mtu != wanted:
            yield _finding(name, used[name]["name"], mtu, wanted, own, any(trial in swallowed for trial in own))


def _finding(name: str, interface: str, mtu: int, wanted: int, lost: list[Trial], swallowed: bool) -> Finding:
    seen = [f"of {trial.numbers['size']:.0f} bytes from {trial.source} to {trial.target}" for trial in lost]
    most = min((trial.numbers["passes"] for trial in lost), default=0.0)
    evidence = f"{interface} of {name} has MTU {mtu}, the network {wanted}. "
    if lost:
        evidence += f"Lost were packets {', '.join(seen)}; up to {most:.0f} bytes arrive"
    else:
        evidence += "Packets of full size arrive all the same"
    meaning = (
        "connections open and then stand still with the first full packet: gloo would hang"
        if swallowed
        else "what others send in full size is lost there: it works only as long as both ends say so beforehand"
    )
    severity = Severity.ERROR if swallowed else Severity.WARNING if lost else Severity.INFO
    fix = f"sudo ip link set dev {interface} mtu {wanted}" if lost else ""
    return Finding("mtu.path" if swallowed else "mtu.mismatch", severity, name, evidence, meaning, fix)


def _most_common(mtus: list[int]) -> int:
    """Of equally common ones the usual one, then the smaller."""
    counts = Counter(mtus)
    return max(counts, key=lambda mtu: (counts[mtu], mtu == _USUAL, -mtu))


# SECTION net/checks/links
# Is each link as fast as it could be?


_BROKEN = "a damaged cable, a loose plug, or a setting made by hand; where the command does not help, try another cable"


def cards(scene: ClusterFacts) -> Iterator[Finding]:
    """A card that runs below what it can do. One for 2.5 Gbit/s at a switch for 1 is as it should be."""
    for node, used in _used(scene):
        half = used.get("duplex") == "half"
        speed, best = int(used.get("speed_mbps", 0)), int(used.get("best_mbps", 0))
        if half or 0 < speed < best:
            curable = half or speed < min(best, int(used.get("partner_mbps", TELLS_UP_TO_MBPS)))
            slow = curable or speed < TELLS_UP_TO_MBPS
            words = f"at {speed} Mbit/s{', half duplex' if half else ''}; it can do {best}"
            yield Finding(
                "interface.slow",
                Severity.WARNING if slow else Severity.INFO,
                node.name,
                f"{used['name']} of {node.name} runs {words}",
                _BROKEN if curable else "what it is plugged into can do no more",
                f"sudo ethtool -s {used['name']} autoneg on" if curable else "",
            )


def links(scene: ClusterFacts) -> Iterator[Finding]:
    """Slower than the others', measured; of two nodes, slower than their cards say."""
    found = slow_links(scene.trials)
    for name, mbps in found.slow.items():
        yield Finding(
            "link.slow",
            Severity.WARNING,
            name,
            f"{name}: {mbps:.0f} Mbit/s in a short burst, other pairs {found.fast_mbps:.0f}",
            "every rank waits for the slowest link in every step: look at its cable, its port of the switch, its Wi-Fi",
        )
    if found.suspects:
        rates = ", ".join(f"{name} {mbps:.0f}" for name, mbps in found.suspects.items())
        yield Finding(
            "link.slow",
            Severity.WARNING,
            "",
            f"{' or '.join(found.suspects)}: {rates} Mbit/s in a short burst, other pairs {found.fast_mbps:.0f}",
            f"at least one of these links is slow; which one cannot be told{_unmeasured(scene, found)}",
        )
    yield from _slower_than_cards(scene)


def _slower_than_cards(scene: ClusterFacts) -> Iterator[Finding]:
    """Where only two nodes were measured."""
    rates = {(trial.source, trial.target): trial.numbers["mbps"] for trial in scene.trials if trial.kind == "burst"}
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    speeds = {node.name: used["speed_mbps"] for node, used in _used(scene) if used.get("speed_mbps")}
    if len(names) != 2 or not speeds.keys() >= set(names):
        return
    mbps, card_mbps = min(rates.values()), min(speeds[name] for name in names)
    if mbps <= min(card_mbps, TELLS_UP_TO_MBPS) / 2:
        yield Finding(
            "link.slow",
            Severity.WARNING,
            "",
            f"{' and '.join(names)}: {mbps:.0f} Mbit/s in a short burst, and their cards say {card_mbps}",
            "something between the two is slower than either: a switch, a powerline adapter, a shaped link",
        )


def _unmeasured(scene: ClusterFacts, found: SlowLinks) -> str:
    """Which pairs of the suspects are missing, and what to do about it."""
    shut = [
        f"{trial.source} → {trial.target}"
        for trial in scene.trials
        if trial.kind == "tcp" and not trial.ok and found.suspects.keys() & {trial.source, trial.target}
    ]
    if not shut:
        return ": look at the cables, the ports of the switch and the Wi-Fi of each"
    return f", because there is no connection {', '.join(shut)}: open those first (see reach.pair), then look again"


def power_save(scene: ClusterFacts) -> Iterator[Finding]:
    for node, used in _used(scene):
        if used.get("power_save"):
            yield Finding(
                "wifi.powersave",
                Severity.WARNING,
                node.name,
                f"the Wi-Fi card {used['name']} of {node.name} sleeps between packets",
                "each exchange waits for it to wake, up to a tenth of a second",
                f"sudo iw dev {used['name']} set power_save off",
            )


def _used(scene: ClusterFacts) -> Iterator[tuple[Node, Facts]]:
    """Each node with each interface that leads to a peer, once."""
    for node in scene.nodes:
        ways = [scene.interface(node, peer) for peer in scene.nodes if peer is not node]
        for name in dict.fromkeys(way["name"] for way in ways if way):
            yield node, next(way for way in ways if way.get("name") == name)
