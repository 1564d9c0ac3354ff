"""Who can reach whom, and which one machine to open where somebody cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.cluster.node import Node
from shoal.control.route import dial_order
from shoal.net.checks.interfaces import misplaced
from shoal.net.checks.opening import opening
from shoal.net.checks.twins import involved
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene, Trial

_BY_ADDRESS = (
    "Open it by address: gloo listens at ports of the kernel's choice, whose range is net.ipv4.ip_local_port_range"
)


@dataclass(frozen=True, order=True)
class Block:
    """`node` lets nothing in from `peer`, or nothing out to it."""

    node: str
    way: str
    peer: str


def pairs(scene: Scene) -> Iterator[Finding]:
    """The direction that gloo dials is needed; the other one is only worth knowing."""
    needed = _shut(scene, scene.pairs())
    yield from _elsewhere(needed)
    blocks = _blocks(scene, needed)
    for each, seen in _by_node(blocks, needed):
        harm = "gloo's ranks would wait for each other and fail"
        yield _to_open(scene, "reach.pair", Severity.ERROR, seen, each, harm)
    other = _shut(scene, ((listener, dialer) for dialer, listener in scene.pairs()))
    for each, seen in _by_node(_blocks(scene, other) - blocks, other):
        meaning = f"{_words(scene, each)}. Harmless: gloo dials from the higher address to the lower one"
        yield Finding("reach.other-way", Severity.INFO, each[0].node, _evidence(seen), meaning)


def store(scene: Scene) -> Iterator[Finding]:
    """torch's own store, by which scripts meet, is on the first node: every other one dials it."""
    first = scene.nodes[0]
    already = {(trial.source, trial.target) for trial in _shut(scene, scene.pairs())}
    tried = (
        scene.trial(node.name, first.name, "store") or scene.trial(node.name, first.name, "tcp") for node in scene.nodes
    )
    shut = [trial for trial in tried if trial and not trial.ok and (trial.source, trial.target) not in already]
    shut = [trial for trial in shut if _doubtful(scene).isdisjoint((trial.source, trial.target))]
    for blocks, seen in _by_node(_blocks(scene, shut), shut):
        meaning = f"the ranks of a script of your own meet at {first.name} and would not; shoal train does not need it"
        yield _to_open(scene, "reach.store", Severity.WARNING, seen, blocks, meaning)


def family(scene: Scene) -> Iterator[Finding]:
    """gloo connects addresses of one family only."""
    by_version: dict[int, list[Node]] = {}
    for node in scene.nodes:
        by_version.setdefault(dial_order(node.address)[0], []).append(node)
    # Of as many on either side, IPv6 is the odd one: hosts are looked up by IPv4.
    odd = min(by_version.items(), key=lambda item: (len(item[1]), -item[0]))[1] if len(by_version) > 1 else []
    for node in odd:
        usual = next(other for other in scene.nodes if other not in odd)
        yield Finding(
            "reach.family",
            Severity.ERROR,
            node.name,
            f"{node.name} is {node.address}, {usual.name} is {usual.address}",
            "gloo cannot connect IPv4 with IPv6: name addresses of one family in the hosts file",
        )


def _to_open(
    scene: Scene, check: str, severity: Severity, seen: list[Trial], blocks: list[Block], harm: str
) -> Finding:
    name, way = blocks[0].node, blocks[0].way
    addresses = [node.address for node in scene.nodes if node.name in {block.peer for block in blocks}]
    fix = opening(scene.facts.get(name, {}).get("network", {}).get("firewall", {}), way, addresses)
    where = "" if fix else f" No firewall is to be seen on {name}: look at what stands between them."
    evidence = "; ".join([_evidence(seen), *filter(None, (_packets(scene, block) for block in blocks))])
    return Finding(check, severity, name, evidence, f"{_words(scene, blocks)}: {harm}.{where} {_BY_ADDRESS}", fix)


def _words(scene: Scene, blocks: list[Block]) -> str:
    deaf = any(_lost(scene.trial(block.peer, block.node, "answer")) for block in blocks)
    inward = "hears nothing from" if deaf else "lets in no connection from"
    peers = ", ".join(block.peer for block in blocks)
    return f"{blocks[0].node} {inward if blocks[0].way == 'in' else 'lets nothing out to'} {peers}"


def _packets(scene: Scene, block: Block) -> str:
    """What shows that it is this side, and whether it at least hears answers."""
    sender, hearer = (block.peer, block.node) if block.way == "in" else (block.node, block.peer)
    if not _lost(scene.trial(sender, hearer, "udp")):
        return ""
    answers = "even answers" if _lost(scene.trial(sender, hearer, "answer")) else "but answers arrive"
    return f"single packets {sender} → {hearer} are lost, {answers}"


def _by_node(blocks: Iterable[Block], trials: list[Trial]) -> Iterator[tuple[list[Block], list[Trial]]]:
    """One finding for each node and direction, with the trials that show it."""
    grouped: dict[tuple[str, str], list[Block]] = {}
    for block in sorted(blocks):
        grouped.setdefault((block.node, block.way), []).append(block)
    for (name, _), each in grouped.items():
        peers = {block.peer for block in each}
        yield each, [trial for trial in trials if {trial.source, trial.target} - peers == {name}]


def _blocks(scene: Scene, trials: Iterable[Trial]) -> set[Block]:
    return {block for trial in trials for block in _blocks_of(scene, trial)}


def _blocks_of(scene: Scene, trial: Trial) -> set[Block]:
    """Who drops what, told by single packets: a connection that fails may have lost its question or its answer."""
    source, target = trial.source, trial.target
    if trial.outcome in ("unreachable", "no-route", "stranger"):
        return set()
    found = set()
    if _lost(scene.trial(target, source, "answer")):
        found.add(_deaf(scene, source, target))
    if _lost(scene.trial(source, target, "udp")) or not found:
        found.add(_deaf(scene, target, source))
    return found


def _deaf(scene: Scene, node: str, peer: str) -> Block:
    """`node` does not hear `peer`; it may be the peer itself that lets nothing out."""
    sent = scene.trial(peer, node, "udp")
    return Block(peer, "out", node) if sent and sent.outcome == "forbidden" else Block(node, "in", peer)


def _lost(trial: Trial | None) -> bool:
    return trial is not None and not trial.ok


def _elsewhere(shut: list[Trial]) -> Iterator[Finding]:
    """What no firewall does: nobody on the wire has the address, or there is no way to it."""
    for trial in shut:
        if trial.outcome == "unreachable":
            meaning = f"{trial.target} is not on the same network as {trial.source}: another cable, another VLAN, or a "
            meaning += "Wi-Fi that keeps its guests apart"
            yield Finding("reach.pair", Severity.ERROR, trial.target, _evidence([trial]), meaning)
        elif trial.outcome == "no-route":
            meaning = f"{trial.source} has no way to {trial.target}: they are on different networks"
            yield Finding("reach.pair", Severity.ERROR, trial.source, _evidence([trial]), meaning)


def _shut(scene: Scene, ways: Iterable[tuple[Node, Node]]) -> list[Trial]:
    """Those that fail, and of which something can be told."""
    tried = (scene.trial(source.name, target.name, "tcp") for source, target in ways)
    doubtful = _doubtful(scene)
    return [trial for trial in tried if trial and not trial.ok and doubtful.isdisjoint((trial.source, trial.target))]


def _doubtful(scene: Scene) -> set[str]:
    return involved(scene) | misplaced(scene)


def _evidence(trials: Iterable[Trial]) -> str:
    return "; ".join(f"{trial.source} → {trial.target}: {trial.detail}" for trial in trials)
