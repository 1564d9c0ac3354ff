"""Checks of which node reaches which, and the firewall command that opens the node that does not let others in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cluster.node import Node
from shoal.host.facts import dial_priority
from shoal.tools.doctor.checks.network import misplaced
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, Trial

_BY_ADDRESS = (
    "Open it by address: gloo listens at ports of the kernel's choice, whose range is net.ipv4.ip_local_port_range"
)


@dataclass(frozen=True, order=True)
class BlockedPair:
    """`node` lets no packet in from `peer`, or none out to it."""

    node: str
    way: str  # "in" or "out"
    peer: str


def check_pairs(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check both directions of every pair. gloo needs the one it dials; the other is only reported."""
    needed = _failed_connections(cluster, cluster.pairs())
    for trial in needed:
        # Failures that no firewall causes.
        if trial.outcome == "unreachable":
            meaning = f"{trial.target} is not on the same network as {trial.source}: another cable, another VLAN, or a "
            meaning += "Wi-Fi that isolates its clients"
            yield Finding("reach.pair", Severity.ERROR, trial.target, _evidence([trial]), meaning)
        elif trial.outcome == "no-route":
            meaning = f"{trial.source} has no way to {trial.target}: they are on different networks"
            yield Finding("reach.pair", Severity.ERROR, trial.source, _evidence([trial]), meaning)
    blocked = _blocked_pairs(cluster, needed)
    for node_pairs, trials in _group_by_node(blocked, needed):
        harm = "gloo's ranks would wait for each other and fail"
        yield _blocked_finding(cluster, "reach.pair", Severity.ERROR, trials, node_pairs, harm)
    other = _failed_connections(cluster, ((listener, dialer) for dialer, listener in cluster.pairs()))
    for node_pairs, trials in _group_by_node(_blocked_pairs(cluster, other) - blocked, other):
        meaning = f"{_describe(cluster, node_pairs)}. Harmless: gloo dials from the higher address to the lower one"
        yield Finding("reach.other-way", Severity.INFO, node_pairs[0].node, _evidence(trials), meaning)


def check_store(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that every node reaches the first one, where torch's own store for scripts is."""
    first = cluster.nodes[0]
    reported = {(trial.source, trial.target) for trial in _failed_connections(cluster, cluster.pairs())}
    trials = (
        cluster.trial(node.name, first.name, "store") or cluster.trial(node.name, first.name, "tcp")
        for node in cluster.nodes
    )
    excluded = _wrongly_addressed(cluster)
    failed = [
        trial
        for trial in trials
        if trial
        and not trial.ok
        and (trial.source, trial.target) not in reported
        and excluded.isdisjoint((trial.source, trial.target))
    ]
    for node_pairs, evidence in _group_by_node(_blocked_pairs(cluster, failed), failed):
        harm = f"the ranks of a script of your own meet at {first.name} and would not; shoal train does not need it"
        yield _blocked_finding(cluster, "reach.store", Severity.WARNING, evidence, node_pairs, harm)


def check_family(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check that all addresses are of one family: gloo connects no others."""
    by_version: dict[int, list[Node]] = {}
    for node in cluster.nodes:
        by_version.setdefault(dial_priority(node.address)[0], []).append(node)
    if len(by_version) == 1:
        return
    # With equally many of both, report those with IPv6: host names are looked up as IPv4.
    _, minority = min(by_version.items(), key=lambda item: (len(item[1]), -item[0]))
    usual = next(node for node in cluster.nodes if node not in minority)
    for node in minority:
        yield Finding(
            "reach.family",
            Severity.ERROR,
            node.name,
            f"{node.name} is {node.address}, {usual.name} is {usual.address}",
            "gloo cannot connect IPv4 with IPv6: name addresses of one family in the hosts file",
        )


def _failed_connections(cluster: ClusterFacts, ways: Iterable[tuple[Node, Node]]) -> list[Trial]:
    """Return the connections that failed, without those to and from nodes whose address is wrong anyway."""
    trials = (cluster.trial(source.name, target.name, "tcp") for source, target in ways)
    excluded = _wrongly_addressed(cluster)
    return [trial for trial in trials if trial and not trial.ok and excluded.isdisjoint((trial.source, trial.target))]


def _wrongly_addressed(cluster: ClusterFacts) -> set[str]:
    return _nodes_with_shared_address(cluster) | misplaced(cluster)


def _blocked_pairs(cluster: ClusterFacts, trials: Iterable[Trial]) -> set[BlockedPair]:
    """Tell from single packets which node drops them: a failed connection may have lost its request or its answer."""
    blocked = set()
    for trial in trials:
        if trial.outcome in ("unreachable", "no-route", "other-machine"):
            continue
        source, target = trial.source, trial.target
        answers_are_lost = _failed(cluster.trial(target, source, "answer"))
        if answers_are_lost:
            blocked.add(_blocked_pair(cluster, source, target))
        if _failed(cluster.trial(source, target, "udp")) or not answers_are_lost:
            blocked.add(_blocked_pair(cluster, target, source))
    return blocked


def _blocked_pair(cluster: ClusterFacts, node: str, peer: str) -> BlockedPair:
    """Tell why `node` receives nothing from `peer`: it lets nothing in, or the peer lets nothing out."""
    sent = cluster.trial(peer, node, "udp")
    return BlockedPair(peer, "out", node) if sent and sent.outcome == "forbidden" else BlockedPair(node, "in", peer)


def _failed(trial: Trial | None) -> bool:
    return trial is not None and not trial.ok


def _group_by_node(
    blocked: Iterable[BlockedPair], trials: list[Trial]
) -> Iterator[tuple[list[BlockedPair], list[Trial]]]:
    """Group by node and direction, one group per finding, with the trials that are its evidence."""
    groups: dict[tuple[str, str], list[BlockedPair]] = {}
    for pair in sorted(blocked):
        groups.setdefault((pair.node, pair.way), []).append(pair)
    for (name, _), pairs in groups.items():
        peers = {pair.peer for pair in pairs}
        yield pairs, [trial for trial in trials if {trial.source, trial.target} - peers == {name}]


def _blocked_finding(
    cluster: ClusterFacts, check: str, severity: Severity, trials: list[Trial], pairs: list[BlockedPair], harm: str
) -> Finding:
    name, way = pairs[0].node, pairs[0].way
    peers = {pair.peer for pair in pairs}
    addresses = [node.address for node in cluster.nodes if node.name in peers]
    fix = open_command(cluster.facts.get(name, {}).get("network", {}).get("firewall", {}), way, addresses)
    where = "" if fix else f" No firewall is to be seen on {name}: look at the devices between them."
    evidence = [_evidence(trials)]
    for pair in pairs:
        sender, receiver = (pair.peer, name) if way == "in" else (name, pair.peer)
        if _failed(cluster.trial(sender, receiver, "udp")):
            has_lost_answers = _failed(cluster.trial(sender, receiver, "answer"))
            answers = "even answers" if has_lost_answers else "but answers arrive"
            evidence.append(f"single packets {sender} → {receiver} are lost, {answers}")
    meaning = f"{_describe(cluster, pairs)}: {harm}.{where} {_BY_ADDRESS}"
    return Finding(check, severity, name, "; ".join(evidence), meaning, fix)


def _describe(cluster: ClusterFacts, pairs: list[BlockedPair]) -> str:
    peers = ", ".join(pair.peer for pair in pairs)
    if pairs[0].way == "out":
        return f"{pairs[0].node} lets nothing out to {peers}"
    receives_nothing = any(_failed(cluster.trial(pair.peer, pair.node, "answer")) for pair in pairs)
    return f"{pairs[0].node} {'receives nothing' if receives_nothing else 'lets in no connection'} from {peers}"


def _evidence(trials: Iterable[Trial]) -> str:
    return "; ".join(f"{trial.source} → {trial.target}: {trial.detail}" for trial in trials)


# For users who may not list the rules, the command itself looks for every chain that the packets pass.
_EVERY_CHAIN = (
    "sudo sh -c 'for family in inet {family}; do nft list chains $family; done | "
    r'awk "/^table/{{table=\$2\" \"\$3}} /chain/{{name=\$2}} /hook {hook}/{{print \"insert rule\",table,name,'
    '\\"{family} {match} accept\\"}}" | nft -f -\''
)


def open_command(firewall: dict[str, Any], way: str, addresses: Sequence[str]) -> str:
    """Return the command that accepts packets from (`way` in) or to (out) these addresses before any other rule.

    By address, not by port: gloo listens at ports chosen by the kernel, and no variable changes that. Empty where the
    machine has no firewall: then a router or a switch blocks.
    """

    def for_all(command: str) -> str:
        return " && ".join(command.format(address) for address in addresses)

    tools, chains = firewall.get("tools", []), firewall.get("chains")
    family = "ip6" if ":" in addresses[0] else "ip"
    hook, selector = ("input", "saddr") if way == "in" else ("output", "daddr")
    listed = addresses[0] if len(addresses) == 1 else f"{{ {', '.join(addresses)} }}"
    match = f"{selector} {listed}"
    if firewall.get("ufw"):
        return for_all("sudo ufw allow from {}" if way == "in" else "sudo ufw allow out to {}")
    if firewall.get("firewalld") and way == "in":
        return for_all("sudo firewall-cmd --zone=trusted --add-source={}")
    if chains is not None:
        places = [f"{chain['family']} {chain['table']} {chain['name']}" for chain in chains if chain["hook"] == hook]
        return " && ".join(f"sudo nft insert rule {place} {family} {match} accept" for place in places)
    if "nft" in tools:
        return _EVERY_CHAIN.format(family=family, hook=hook, match=match)
    if "iptables" in tools:
        table = "iptables" if family == "ip" else "ip6tables"
        chain, flag = ("INPUT", "-s") if way == "in" else ("OUTPUT", "-d")
        return for_all(f"sudo {table} -I {chain} {flag} {{}} -j ACCEPT")
    return ""


# Every machine has the same addresses on interfaces of these kinds.
_SAME_EVERYWHERE = ("docker", "loopback")


@dataclass(frozen=True)
class SharedAddress:
    """`other` also has the address of `owner`."""

    owner: Node
    other: Node
    interface: Facts  # of `other`


def check_duplicates(cluster: ClusterFacts) -> Iterator[Finding]:
    """Check for two machines with one address: each receives part of the packets for the other."""
    for shared in _shared_addresses(cluster):
        owner, other, interface = shared.owner, shared.other, shared.interface
        cards = {card["mac"] for card in cluster.facts[other.name]["network"]["interfaces"].values()}
        misled = [trial.source for trial in cluster.trials if trial.target == owner.name and trial.mac in cards]
        answering = f"; to {', '.join(misled)} it is {other.name} that answers" if misled else ""
        # Deleting a first address deletes the others of its network too, so the node's own is set again.
        own = f"{other.address}/{interface['as_set'].split('/')[1]}"
        device = interface["name"]
        yield Finding(
            "reach.duplicate-address",
            Severity.ERROR,
            other.name,
            f"{owner.name} and {other.name} both have {owner.address}{answering}",
            f"a connection to {owner.name} reaches one of the two, and which one changes; after the command the other "
            "machines use the wrong card for some more seconds",
            f"sudo ip addr del {interface['as_set']} dev {device} && sudo ip addr replace {own} dev {device}",
        )
    involved = _nodes_with_shared_address(cluster)
    for trial in cluster.trials:
        if (trial.kind, trial.outcome) == ("tcp", "other-machine") and trial.target not in involved:
            yield Finding(
                "reach.duplicate-address",
                Severity.ERROR,
                trial.target,
                f"from {trial.source} {trial.detail}, not by {trial.target}",
                "another machine has its address, or a router forwards its connections",
            )


def _nodes_with_shared_address(cluster: ClusterFacts) -> set[str]:
    return {node.name for shared in _shared_addresses(cluster) for node in (shared.owner, shared.other)}


def _shared_addresses(cluster: ClusterFacts) -> list[SharedAddress]:
    shared = []
    for owner in cluster.nodes:
        for other in cluster.nodes:
            interface = cluster.interface_with(other, owner.address) if other is not owner else {}
            if interface and interface["kind"] not in _SAME_EVERYWHERE and owner.name in cluster.facts:
                shared.append(SharedAddress(owner, other, interface))
    return shared
