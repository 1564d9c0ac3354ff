"""Does each node use the right one of its addresses and interfaces?"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from shoal.cluster.node import Node
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Facts, Scene, Trial

_WORDS = {
    "docker": "a network of containers inside the machine",
    "bridge": "a bridge",
    "virtual": "an interface that leads nowhere",
    "vpn": "a VPN",
    "tailscale": "Tailscale",
    "wifi": "Wi-Fi",
}
_INSIDE = ("docker", "virtual")


def addresses(scene: Scene) -> Iterator[Finding]:
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


def offers(scene: Scene) -> Iterator[Finding]:
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


def misplaced(scene: Scene) -> set[str]:
    """Nodes whose address is not one by which others reach them: what those see of them is no news."""
    return {finding.node for check in (addresses, decoys) for finding in check(scene) if finding.severity == "error"}


def decoys(scene: Scene) -> Iterator[Finding]:
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


def _named_decoy(scene: Scene, node: Node, address: str, carrier: Facts) -> Finding:
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
class Cable:
    """A wired interface of `node` on whose network `peer` has an address too, while another kind is used between them.
    Whether they meet there is to be tried: two homes may have the same network."""

    node: str
    peer: str
    used: str
    kind: str
    name: str
    address: str
    peer_address: str


def cables(scene: Scene) -> list[Cable]:
    pairs = ((node, peer, scene.interface(node, peer)) for node, peer in permutations(_seen(scene), 2))
    found = ((node, peer, used, _cable(scene, node, peer)) for node, peer, used in pairs if used.get("kind") in _WORDS)
    return [
        Cable(node.name, peer.name, used["name"], _WORDS[used["kind"]], *cable)
        for node, peer, used, cable in found
        if cable
    ]


def detours(scene: Scene) -> Iterator[Finding]:
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


def _cable(scene: Scene, node: Node, peer: Node) -> tuple[str, str, str] | None:
    """A wired interface of the node, its address, and an address of the peer on the same network."""
    theirs = [ipaddress.ip_interface(each) for each in _addresses(scene, peer)]
    for name, found in _network(scene, node).get("interfaces", {}).items():
        if found["kind"] == "wired" and found["up"] and found["carrier"]:
            for own in map(ipaddress.ip_interface, found["addresses"]):
                for other in theirs:
                    if other.ip in own.network and own.ip != other.ip and not own.is_link_local:
                        return name, str(own.ip), str(other.ip)
    return None


def _addresses(scene: Scene, node: Node) -> list[str]:
    """Those that others may use."""
    interfaces = _network(scene, node).get("interfaces", {}).values()
    return [each for found in interfaces if found["kind"] not in (*_INSIDE, "loopback") for each in found["addresses"]]


def _suggestion(scene: Scene, node: Node) -> str | None:
    """An address of the node on a network that another node is on too; failing that, any that is nobody else's."""
    shared = [cable[1] for peer in _seen(scene) if peer is not node and (cable := _cable(scene, node, peer))]
    taken = {other.address for other in scene.nodes}
    own = [*shared, *(each.split("/")[0] for each in _addresses(scene, node))]
    return next((address for address in own if address not in taken), None)


def _listing(scene: Scene, node: Node) -> str:
    found = _network(scene, node).get("interfaces", {})
    each = [f"{' '.join(item['addresses'])} on {name}" for name, item in found.items() if item["addresses"]]
    return ", ".join(each) or "none"


def _network(scene: Scene, node: Node) -> Facts:
    found: Facts = scene.facts[node.name].get("network", {})
    return found


def _seen(scene: Scene) -> list[Node]:
    """Where the kernel told of its interfaces."""
    return [node for node in scene.nodes if scene.facts.get(node.name, {}).get("network", {}).get("interfaces")]
