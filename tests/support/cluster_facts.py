"""Cluster facts for the network checks: a healthy cluster, and helpers that add faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shoal.cluster.node import Node
from shoal.tools.doctor.facts import ClusterFacts, Finding, Trial

Facts = dict[str, Any]
CHAIN = {"family": "inet", "table": "home", "name": "input", "hook": "input"}
ADDRESSES = [f"10.0.0.{number}" for number in (1, 2, 3)]


def interface(*addresses: str, kind: str = "wired", **more: Any) -> Facts:
    mac = ":".join(addresses)
    return {"kind": kind, "addresses": list(addresses), "mac": mac, "mtu": 1500, "up": True, "carrier": True, **more}


def seen(address: str, peers: list[str]) -> Facts:
    """Return the facts that a collector reports for a node with one card."""
    route = {"interface": "eth0", "source": address, "local": False}
    return {
        "network": {
            "interfaces": {"lo": interface("127.0.0.1/8", kind="loopback"), "eth0": interface(f"{address}/24")},
            "routes": dict.fromkeys(peers, route),
            "firewall": {"tools": ["nft"], "ufw": False, "firewalld": False, "chains": [CHAIN]},
            "host_name": "me",
            "hosts_file": [address],
        }
    }


def healthy(addresses: list[str] = ADDRESSES) -> ClusterFacts:
    """Return facts in which every node reaches every other at the same speed."""
    nodes = [Node(f"node{number + 1}", address, "eth0", 1, 1) for number, address in enumerate(addresses)]
    facts = {node.name: seen(node.address, addresses) for node in nodes}
    ways = [(one.name, other.name) for one in nodes for other in nodes if one is not other]
    numbers = {"tcp": {}, "udp": {}, "full": {"size": 1500.0, "passes": 1500.0}, "burst": {"mbps": 940.0}}
    trials = [Trial(*way, kind, "ok", numbers=values) for kind, values in numbers.items() for way in ways]
    return ClusterFacts(nodes, facts, trials=trials)


def tried(scene: ClusterFacts, *trials: Trial) -> ClusterFacts:
    """Replace the successful trials of the same kind with these."""
    new = {(trial.source, trial.target, trial.kind) for trial in trials}
    others = [trial for trial in scene.trials if (trial.source, trial.target, trial.kind) not in new]
    return replace(scene, trials=[*others, *trials])


def lost(source: str, target: str, *kinds: str) -> list[Trial]:
    return [Trial(source, target, kind, "timeout" if kind == "tcp" else "lost", f"no {kind}") for kind in kinds]


def found(check: Callable[[ClusterFacts], Iterator[Finding]], scene: ClusterFacts) -> list[tuple[str, str, str]]:
    return [(finding.id, finding.severity.value, finding.node) for finding in check(scene)]


def with_interfaces(name: str, **more: Facts) -> ClusterFacts:
    scene = healthy()
    scene.facts[name]["network"]["interfaces"] |= more
    return scene
