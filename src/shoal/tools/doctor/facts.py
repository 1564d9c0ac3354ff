"""The facts that the collectors gathered, and the findings that the checks make of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Any

from shoal.cluster.node import Node
from shoal.config.schema import Config
from shoal.errors import ShoalError
from shoal.events import Event
from shoal.host.facts import dial_priority

Facts = dict[str, Any]


class Severity(StrEnum):
    ERROR = "error"  # a run would fail, hang or compute wrong results
    WARNING = "warning"  # a run would be much slower, or fail under load
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    id: str
    severity: Severity
    node: str  # empty where no single node is to blame
    evidence: str  # what was seen
    meaning: str
    fix: str = ""  # one command to paste on `node`; empty where no command helps
    retest: str = ""  # a command that shows this again; `judge` adds doctor's own

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (list(Severity).index(finding.severity), finding.id, finding.node))


@dataclass(frozen=True)
class Trial:
    """One attempt of `source` to reach `target`, at a port that `target` opened for it.

    Kinds:
      tcp     a connection to a port chosen by the kernel
      gloo    the same at the address that gloo will publish, where that is another one
      cable   the same over a wired interface that is not used
      store   a connection to the port that the user named
      udp     a datagram that belongs to no known flow
      answer  a datagram that a stateful firewall takes for an answer
      full    a datagram as large as the sender's interface allows
      burst   as much data as can be sent in a moment
    """

    source: str
    target: str
    kind: str
    # ok, refused, timeout, unreachable (no machine has the address), no-route, forbidden (by the source itself), lost,
    # failed, or other-machine (another machine answered)
    outcome: str
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    mac: str | None = None  # of the card that answers for the target, where both are on one network segment

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(frozen=True)
class ClusterFacts:
    """Everything the checks read."""

    nodes: list[Node]
    facts: dict[str, Facts]  # by node: what its collector reported, by topic
    unreached: dict[str, ShoalError] = field(default_factory=dict)  # nodes that were not examined, and why
    trials: list[Trial] = field(default_factory=list)
    on: str = ""  # the cluster's name, for commands to paste
    port: int = 0  # that the user named
    config: Config | None = None  # of the training that the user named
    proofs: list[Event] = field(default_factory=list)  # results of real all-reduces
    proof_error: ShoalError | None = None  # why the ranks of the proof failed

    def topic(self, name: str) -> Iterator[tuple[Node, Facts, Facts]]:
        """Yield each node whose collector reported this topic, with all its facts and those of the topic."""
        for node in self.nodes:
            facts = self.facts.get(node.name, {})
            if facts.get(name):
                yield node, facts, facts[name]

    def pairs(self) -> Iterator[tuple[Node, Node]]:
        """Yield each examined pair once, as (dialer, listener)."""
        for one, other in combinations([node for node in self.nodes if node.name in self.facts], 2):
            yield self.dialer_first(one, other)

    def dialer_first(self, one: Node, other: Node) -> tuple[Node, Node]:
        """Order two nodes as gloo connects them: from the higher address to the lower one."""
        is_higher = dial_priority(self.gloo_address(one)) > dial_priority(self.gloo_address(other))
        return (one, other) if is_higher else (other, one)

    def gloo_address(self, node: Node) -> str:
        """Return the address that gloo publishes: the first of the interface that has the node's own."""
        first: str = next(iter(self.interface_with(node, node.address).get("addresses", [])), node.address)
        return first.split("/")[0]

    def interface_to(self, node: Node, peer: Node) -> Facts:
        """Return the interface by which `node` reaches `peer`, with its `name`; empty where it is unknown."""
        network = self.facts.get(node.name, {}).get("network", {})
        route = network.get("routes", {}).get(peer.address, {})
        interface = network.get("interfaces", {}).get(route.get("interface"))
        return {"name": route["interface"], **interface} if interface and not route["local"] else {}

    def interface_with(self, node: Node, address: str) -> Facts:
        """Return the node's interface that has the address, with its `name` and the address `as_set`: 10.0.0.1/24."""
        for name, interface in self.facts.get(node.name, {}).get("network", {}).get("interfaces", {}).items():
            for as_set in interface["addresses"]:
                if as_set.split("/")[0] == address:
                    return {"name": name, "as_set": as_set, **interface}
        return {}

    def trial(self, source: str, target: str, kind: str) -> Trial | None:
        wanted = (source, target, kind)
        return next((trial for trial in self.trials if (trial.source, trial.target, trial.kind) == wanted), None)


# A short burst distinguishes 10, 100 and 1000 Mbit/s, but no faster rates.
TELLS_UP_TO_MBPS = 1000.0
# The largest set of slow links that is searched for. Where a larger one is needed, all candidates are suspects.
_LARGEST_COVER = 3

# One direction of a node's link: (node, "out") or (node, "in").
Direction = tuple[str, str]


@dataclass(frozen=True)
class SlowLinks:
    slow: dict[str, float] = field(default_factory=dict)  # nodes whose links must be slow, and their rates in Mbit/s
    suspects: dict[str, float] = field(default_factory=dict)  # at least one of these is slow; which one is unknown
    fast_mbps: float = 0.0  # of the fastest pair

    @property
    def named(self) -> set[str]:
        return {*self.slow, *self.suspects}


def slow_links(trials: Iterable[Trial]) -> SlowLinks:
    """Tell from bursts between pairs which nodes' links are slow.

    A burst is slow at half of the fastest rate or less; then one of its two ends is slow. A fast burst clears the
    sending side of its source and the receiving side of its target. Among all sets of nodes that explain every slow
    burst, take the smallest: a node in all of them is slow, a node in some of them is suspected. Two nodes alone cannot
    be compared with anything.
    """
    rates = {(trial.source, trial.target): trial.numbers["mbps"] for trial in trials if trial.kind == "burst"}
    if len({name for pair in rates for name in pair}) <= 2:
        return SlowLinks()
    fast_mbps = min(max(rates.values()), TELLS_UP_TO_MBPS)
    slow = [pair for pair, mbps in rates.items() if mbps <= fast_mbps / 2]
    cleared = {direction for pair in rates if pair not in slow for direction in _directions(pair)}
    # A slow pair whose two ends are both fast with others has its fault in between: no node is to blame.
    ends = [
        candidates
        for pair in slow
        if (candidates := frozenset(name for name, way in _directions(pair) if (name, way) not in cleared))
    ]
    covers = _smallest_covers(ends)
    in_all, in_any = frozenset.intersection(*covers), frozenset.union(*covers)
    best = {name: _rate(name, rates, cleared) for name in sorted(in_any)}
    return SlowLinks(
        slow={name: mbps for name, mbps in best.items() if name in in_all},
        suspects={name: mbps for name, mbps in best.items() if name not in in_all},
        fast_mbps=fast_mbps,
    )


def _directions(pair: tuple[str, str]) -> tuple[Direction, Direction]:
    return (pair[0], "out"), (pair[1], "in")


def _smallest_covers(ends: list[frozenset[str]]) -> list[frozenset[str]]:
    """Return all smallest sets of nodes that contain at least one node of every set in `ends`."""
    forced = frozenset(name for names in ends if len(names) == 1 for name in names)
    rest = [names for names in ends if not names & forced]
    candidates = sorted(frozenset().union(*rest))
    for size in range(min(len(candidates), _LARGEST_COVER) + 1):
        chosen_sets = map(frozenset, combinations(candidates, size))
        if covers := [forced | chosen for chosen in chosen_sets if all(names & chosen for names in rest)]:
            return covers
    return [forced, forced | frozenset(candidates)]


def _rate(name: str, rates: dict[tuple[str, str], float], cleared: set[Direction]) -> float:
    """Return the slower of sending and receiving, each at its best: a peer may be slow as well."""
    best: dict[Direction, float] = {}
    for pair, mbps in rates.items():
        for direction in _directions(pair):
            best[direction] = max(mbps, best.get(direction, 0.0))
    return min(best[direction] for direction in best if direction[0] == name and direction not in cleared)


# Parts of the commands that findings print.


def sudo(facts: Facts) -> str:
    """Return "sudo ", or nothing for root, who often has no sudo in a container."""
    return "" if facts.get("machine", {}).get("is_root") else "sudo "


def doctor_command(cluster: ClusterFacts) -> str:
    on = ("--on", cluster.on) if cluster.on else ()
    return shlex.join(["shoal", "doctor", *on, *(("--port", str(cluster.port)) if cluster.port else ())])


def setup_command(cluster: ClusterFacts, otherwise: str) -> str:
    """Return the command that installs the same versions everywhere; `otherwise` where shoal does not install."""
    if not cluster.on or cluster.on.partition(":")[0] in ("local", "lab"):
        return otherwise
    return f"shoal setup {shlex.quote(cluster.on)}"
