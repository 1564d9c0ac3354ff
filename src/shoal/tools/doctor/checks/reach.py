"""Who can reach whom, and which one machine to open where somebody cannot."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shoal.cluster.node import Node
from shoal.host.facts import dial_order
from shoal.tools.doctor.checks.network import misplaced
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, Trial, again, sudo
from shoal.units import format_duration

# SECTION net/checks/opening
# The command that opens a machine to its peers, in the words of the firewall that stands there.
#
# By address, never by port: gloo listens wherever the kernel puts it, and no variable changes that.


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


# SECTION net/checks/twins
# Two machines with one address: each gets part of what is meant for the other.


# Every machine has the same address on these.
_EVERYWHERE = ("docker", "loopback")


@dataclass(frozen=True)
class SharedAddress:
    """`other` has the address of `owner`, on the interface `held`."""

    owner: Node
    other: Node
    held: Facts


def twins(scene: ClusterFacts) -> Iterator[Finding]:
    for each in _shared(scene):
        owner, other = each.owner, each.other
        yield Finding(
            "reach.twins",
            Severity.ERROR,
            other.name,
            f"{owner.name} and {other.name} both have {owner.address}{_who_answered(scene, each)}",
            f"whoever means {owner.name} reaches one of the two, now this one and now that one; after the command the "
            "others remember the wrong card for some seconds",
            _give_up(each.held, other),
        )
    for trial in scene.trials:
        if (trial.kind, trial.outcome) == ("tcp", "stranger") and trial.target not in involved(scene):
            yield Finding(
                "reach.twins",
                Severity.ERROR,
                trial.target,
                f"from {trial.source} {trial.detail}, not by {trial.target}",
                "another machine has its address, or a router hands its connections on",
            )


def involved(scene: ClusterFacts) -> set[str]:
    """Nodes of which nothing can be told by their address."""
    return {node.name for each in _shared(scene) for node in (each.owner, each.other)}


def _shared(scene: ClusterFacts) -> list[SharedAddress]:
    found = []
    for owner in scene.nodes:
        for other in scene.nodes:
            held = scene.carrying(other, owner.address) if other is not owner else {}
            if held and held["kind"] not in _EVERYWHERE and owner.name in scene.facts:
                found.append(SharedAddress(owner, other, held))
    return found


def _who_answered(scene: ClusterFacts, each: SharedAddress) -> str:
    cards = {found["mac"] for found in scene.facts[each.other.name]["network"]["interfaces"].values()}
    misled = [trial.source for trial in scene.trials if trial.target == each.owner.name and trial.mac in cards]
    return f"; to {', '.join(misled)} it is {each.other.name} that answers" if misled else ""


def _give_up(held: Facts, node: Node) -> str:
    """Deleting a first address takes the others of its network along, so our own is set again."""
    own = f"{node.address}/{held['as_set'].split('/')[1]}"
    return f"sudo ip addr del {held['as_set']} dev {held['name']} && sudo ip addr replace {own} dev {held['name']}"


_BY_ADDRESS = (
    "Open it by address: gloo listens at ports of the kernel's choice, whose range is net.ipv4.ip_local_port_range"
)


@dataclass(frozen=True, order=True)
class BlockedPair:
    """`node` lets nothing in from `peer`, or nothing out to it."""

    node: str
    way: str
    peer: str


def pairs(scene: ClusterFacts) -> Iterator[Finding]:
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


def store(scene: ClusterFacts) -> Iterator[Finding]:
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


def family(scene: ClusterFacts) -> Iterator[Finding]:
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
    scene: ClusterFacts, check: str, severity: Severity, seen: list[Trial], blocks: list[BlockedPair], harm: str
) -> Finding:
    name, way = blocks[0].node, blocks[0].way
    addresses = [node.address for node in scene.nodes if node.name in {block.peer for block in blocks}]
    fix = opening(scene.facts.get(name, {}).get("network", {}).get("firewall", {}), way, addresses)
    where = "" if fix else f" No firewall is to be seen on {name}: look at what stands between them."
    evidence = "; ".join([_evidence(seen), *filter(None, (_packets(scene, block) for block in blocks))])
    return Finding(check, severity, name, evidence, f"{_words(scene, blocks)}: {harm}.{where} {_BY_ADDRESS}", fix)


def _words(scene: ClusterFacts, blocks: list[BlockedPair]) -> str:
    deaf = any(_lost(scene.trial(block.peer, block.node, "answer")) for block in blocks)
    inward = "hears nothing from" if deaf else "lets in no connection from"
    peers = ", ".join(block.peer for block in blocks)
    return f"{blocks[0].node} {inward if blocks[0].way == 'in' else 'lets nothing out to'} {peers}"


def _packets(scene: ClusterFacts, block: BlockedPair) -> str:
    """What shows that it is this side, and whether it at least hears answers."""
    sender, hearer = (block.peer, block.node) if block.way == "in" else (block.node, block.peer)
    if not _lost(scene.trial(sender, hearer, "udp")):
        return ""
    answers = "even answers" if _lost(scene.trial(sender, hearer, "answer")) else "but answers arrive"
    return f"single packets {sender} → {hearer} are lost, {answers}"


def _by_node(blocks: Iterable[BlockedPair], trials: list[Trial]) -> Iterator[tuple[list[BlockedPair], list[Trial]]]:
    """One finding for each node and direction, with the trials that show it."""
    grouped: dict[tuple[str, str], list[BlockedPair]] = {}
    for block in sorted(blocks):
        grouped.setdefault((block.node, block.way), []).append(block)
    for (name, _), each in grouped.items():
        peers = {block.peer for block in each}
        yield each, [trial for trial in trials if {trial.source, trial.target} - peers == {name}]


def _blocks(scene: ClusterFacts, trials: Iterable[Trial]) -> set[BlockedPair]:
    return {block for trial in trials for block in _blocks_of(scene, trial)}


def _blocks_of(scene: ClusterFacts, trial: Trial) -> set[BlockedPair]:
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


def _deaf(scene: ClusterFacts, node: str, peer: str) -> BlockedPair:
    """`node` does not hear `peer`; it may be the peer itself that lets nothing out."""
    sent = scene.trial(peer, node, "udp")
    return BlockedPair(peer, "out", node) if sent and sent.outcome == "forbidden" else BlockedPair(node, "in", peer)


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


def _shut(scene: ClusterFacts, ways: Iterable[tuple[Node, Node]]) -> list[Trial]:
    """Those that fail, and of which something can be told."""
    tried = (scene.trial(source.name, target.name, "tcp") for source, target in ways)
    doubtful = _doubtful(scene)
    return [trial for trial in tried if trial and not trial.ok and doubtful.isdisjoint((trial.source, trial.target))]


def _doubtful(scene: ClusterFacts) -> set[str]:
    return involved(scene) | misplaced(scene)


def _evidence(trials: Iterable[Trial]) -> str:
    return "; ".join(f"{trial.source} → {trial.target}: {trial.detail}" for trial in trials)


# SECTION net/checks/leftovers
# What earlier runs left behind, ours and other people's, and what a run will want and cannot have.


_FILES = 1024
_ENOUGH_FILES = 4096
_KEEPING = ("supervisor", "messenger")
_NAMED = 4

Process = dict[str, Any]


def port(scene: ClusterFacts) -> Iterator[Finding]:
    for node in scene.nodes:
        seen = scene.facts.get(node.name, {}).get("processes", {})
        if holders := seen.get("port", {}).get("holders"):
            # Rank 0 serves the store, and it is on the first node.
            is_first = node is scene.nodes[0]
            yield _taken(scene, node.name, seen, holders, Severity.ERROR if is_first else Severity.INFO)


def _taken(scene: ClusterFacts, node: str, seen: Facts, holders: list[Process], severity: Severity) -> Finding:
    number, ours = seen["port"]["number"], [holder for holder in holders if "run" in holder]
    meaning = (
        "the ranks cannot meet at this port"
        if severity is Severity.ERROR
        else f"it does no harm: ranks meet on the first machine, {scene.nodes[0].name}"
    )
    if not ours:
        meaning += "; what holds it is not shoal's, so end it yourself if you know it, or leave --port out"
    return Finding(
        "port.taken",
        severity,
        node,
        f"port {number} is taken: " + "; ".join(dict.fromkeys(_holder(holder) for holder in holders)),
        meaning,
        _end(ours, seen) if ours and severity is Severity.ERROR else "",
        f"ss -ltnp 'sport = :{number}'; {again(scene)} --port {number}",
    )


def _holder(holder: Process) -> str:
    if not holder["pid"]:
        return f"by a process of {holder['user']} that we may not look at"
    run = f", of shoal's run {holder['run']}" if "run" in holder else f", of {holder['user']}"
    return f"by {_shown(holder)}{run}"


def workers(scene: ClusterFacts) -> Iterator[Finding]:
    for node, facts in scene.facts.items():
        seen = facts.get("processes", {})
        for run, processes in _by(seen.get("marked", []), "run"):
            yield _left(scene, node, run, processes, seen) if is_left(processes) else _going_on(node, run, processes)
        for master, processes in _by(seen.get("strays", []), "master_addr"):
            yield _stray(scene, node, master, processes)


def is_left(processes: list[Process]) -> bool:
    """Parents are gone, and nobody looks after the rest: no supervisor, no messenger of one elsewhere, no launcher."""
    kept = any(each["part"] in _KEEPING or (each["part"] == "agent" and not each["orphan"]) for each in processes)
    return not kept and any(each["orphan"] for each in processes)


def _going_on(node: str, run: str, processes: list[Process]) -> Finding:
    return Finding(
        "speed.run",
        Severity.INFO,
        node,
        f"shoal's run {run} is going on, for {format_duration(max(each['age_s'] for each in processes))}",
        "two runs share the cores and the network, and both are slower",
    )


def _left(scene: ClusterFacts, node: str, run: str, processes: list[Process], seen: Facts) -> Finding:
    return Finding(
        "leftover.worker",
        Severity.WARNING,
        node,
        f"shoal's run {run} has no supervisor any more, and there are still {_listed(processes)}",
        "they take cores and memory from the next run; stop them if you do not want that run to go on",
        _end(processes, seen),
        again(scene),
    )


def _stray(scene: ClusterFacts, node: str, master: str, processes: list[Process]) -> Finding:
    return Finding(
        "leftover.worker",
        Severity.WARNING,
        node,
        f"ranks of somebody's torch job around {master} have lost whoever started them: {_listed(processes)}",
        "they are not shoal's; they wait for peers that may never come and take cores, memory and ports meanwhile",
        _kill(processes),
        again(scene),
    )


def _end(processes: list[Process], seen: Facts) -> str:
    """By the run's name where it is still known there; otherwise exactly these processes."""
    if seen.get("has_command") and processes[0]["has_folder"]:
        return f"shoal stop {shlex.quote(processes[0]['run'])}"
    return _kill(processes)


def _kill(processes: list[Process]) -> str:
    """What stands still, by Ctrl-Z or a debugger, hears nothing but -KILL."""
    loud = " -KILL" if any(each["stopped"] for each in processes) else ""
    return f"kill{loud} " + " ".join(dict.fromkeys(str(each["pid"]) for each in processes))


def _listed(processes: list[Process]) -> str:
    more = [f"and {len(processes) - _NAMED} more"] if len(processes) > _NAMED else []
    return "; ".join([*(_shown(each) for each in processes[:_NAMED]), *more])


def _shown(process: Process) -> str:
    return f"process {process['pid']} ({process['command']}), {format_duration(process['age_s'])} old"


def _by(processes: list[Process], key: str) -> Iterator[tuple[str, list[Process]]]:
    ordered = sorted(processes, key=lambda process: (str(process[key]), int(process["pid"])))
    return ((name, list(group)) for name, group in groupby(ordered, key=lambda process: str(process[key])))


def files(scene: ClusterFacts) -> Iterator[Finding]:
    for node, facts in scene.facts.items():
        seen = facts.get("processes", {})
        soft, hard = seen.get("files", {}).get("soft"), seen.get("files", {}).get("hard")
        if soft is not None and soft < _FILES:
            yield Finding(
                "limits.files",
                Severity.WARNING,
                node,
                f"a process may open {soft} files (soft limit; hard limit {'none' if hard is None else hard})",
                "every connection counts as an open file: a run can stop with 'too many open files'",
                _more_files(seen, hard, facts),
                f"ulimit -n; {again(scene)}",
            )


def _more_files(seen: Facts, hard: int | None, facts: Facts) -> str:
    raised = hard is None or hard >= _ENOUGH_FILES
    if raised and not seen.get("over_ssh"):
        return f"ulimit -n {_ENOUGH_FILES}"
    # For the next login: what is typed in one SSH session says nothing to another.
    line = f"{seen['user']} {'soft' if raised else '-'} nofile {_ENOUGH_FILES}"
    return f"echo {shlex.quote(line)} | {sudo(facts)}tee /etc/security/limits.d/90-shoal.conf"
