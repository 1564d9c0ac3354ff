"""Everything the collectors saw, as the checks read it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Any

from shoal.cluster.node import Node
from shoal.errors import ShoalError
from shoal.host.facts import dial_order

Facts = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One attempt of `source` to reach `target`, at a port that `target` listens on for it.

    `kind`: `tcp` is a connection to a port of the kernel's choice, `gloo` the same at the address that gloo will offer
    where that is another one, `cable` by a wired way that is not used, `store` to the port that was asked for; `udp` is
    a packet out of nowhere, `answer` one that a firewall takes for an answer, `full` one as big as the sender's
    interface allows; `burst` is as much as goes in a moment.

    `outcome` is ok, refused, timeout, unreachable (nobody there), no-route, forbidden (by the source itself), lost, or
    stranger when somebody else answered; `detail` says more in the collector's own words, `numbers` what was measured.
    `mac` is whose card answers for the target, where both are on one wire.
    """

    source: str
    target: str
    kind: str
    outcome: str
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    mac: str | None = None

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"


@dataclass(frozen=True)
class ClusterFacts:
    """`facts` by node: what its collector saw there, by topic. `unreached`: nodes that could not be looked at, and why.
    `on` names the cluster, for commands to paste."""

    nodes: list[Node]
    facts: dict[str, Facts]
    unreached: dict[str, ShoalError] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    on: str = ""

    def pairs(self) -> Iterator[tuple[Node, Node]]:
        """Each pair once, the one that dials first: gloo's connection goes from the higher address to the lower one."""
        seen = [node for node in self.nodes if node.name in self.facts]
        for one, other in combinations(seen, 2):
            yield self.dialling(one, other)

    def dialling(self, one: Node, other: Node) -> tuple[Node, Node]:
        order = dial_order(self.offered(one)) > dial_order(self.offered(other))
        return (one, other) if order else (other, one)

    def offered(self, node: Node) -> str:
        """The address that gloo offers to the others: the first of the interface that carries the node's own."""
        first: str = next(iter(self.carrying(node, node.address).get("addresses", [])), node.address)
        return first.split("/")[0]

    def interface(self, node: Node, peer: Node) -> Facts:
        """The one by which `node` reaches `peer`, with its `name`; empty where it is not known."""
        network = self.facts.get(node.name, {}).get("network", {})
        way = network.get("routes", {}).get(peer.address, {})
        found = network.get("interfaces", {}).get(way.get("interface"))
        return {"name": way["interface"], **found} if found and not way["local"] else {}

    def carrying(self, node: Node, address: str) -> Facts:
        """The node's interface that has the address, with its `name` and the address `as_set`: 10.0.0.1/24."""
        for name, found in self.facts.get(node.name, {}).get("network", {}).get("interfaces", {}).items():
            for each in found["addresses"]:
                if each.split("/")[0] == address:
                    return {"name": name, "as_set": each, **found}
        return {}

    def trial(self, source: str, target: str, kind: str) -> Trial | None:
        return next(
            (trial for trial in self.trials if (trial.source, trial.target, trial.kind) == (source, target, kind)), None
        )


# SECTION net/finding
# A finding: one result of a check, with the command that fixes it.


class Severity(StrEnum):
    """`error`: a run would fail, hang or be wrong. `warning`: it would be badly slow, or break under load."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """`evidence` is what was seen, in the words of the machine; `fix` one command to paste on `node`, or empty where
    only a person can help; `retest` how to look again at just this."""

    id: str
    severity: Severity
    node: str
    evidence: str
    meaning: str
    fix: str = ""
    retest: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def worst_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: (list(Severity).index(finding.severity), finding.id, finding.node))


# SECTION net/links
# Which node's link is slow, from bursts between pairs of nodes. Pure.


# A moment of sending tells 10, 100 and 1000 Mbit/s apart, and nothing of what is faster.
TELLS_UP_TO_MBPS = 1000.0
# Sets of so many slow links are compared; where it takes more to explain the bursts, all of them are suspects.
_MOST_TOGETHER = 3

# One direction of one node's link: what it sends, or what it receives.
Way = tuple[str, str]
Sets = list[frozenset[str]]


@dataclass(frozen=True)
class SlowLinks:
    """`slow`: the nodes whose links must be slow, and their rates. `suspects`: nodes of which at least one link is
    slow, where the bursts do not tell which. `fast_mbps` is what the fastest pair reached."""

    slow: dict[str, float] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    fast_mbps: float = 0.0

    @property
    def named(self) -> set[str]:
        return {*self.slow, *self.suspects}


def slow_links(trials: Iterable[Trial]) -> SlowLinks:
    """A burst is slow at half of the fastest one or less, and then one of its two ends is slow.

    A fast burst clears the sending side of its source and the receiving side of its target. Of all sets of nodes that
    explain every slow burst the smallest count: a node in each of them is slow, a node in some of them is suspected.
    Two nodes alone have nothing to be compared with.
    """
    rates = {(trial.source, trial.target): trial.numbers["mbps"] for trial in trials if trial.kind == "burst"}
    if len({name for pair in rates for name in pair}) <= 2:
        return SlowLinks()
    fast_mbps = min(max(rates.values()), TELLS_UP_TO_MBPS)
    slow = [pair for pair, mbps in rates.items() if mbps <= fast_mbps / 2]
    cleared = {way for pair in rates if pair not in slow for way in _ways(pair)}
    # A pair that is slow although both ends are fast with others has its trouble between them: no node is to blame.
    ends = [open_ends for pair in slow if (open_ends := frozenset(way[0] for way in _ways(pair) if way not in cleared))]
    sets = _smallest_covers(ends)
    always, ever = frozenset.intersection(*sets), frozenset.union(*sets)
    best = {name: _rate(name, rates, cleared) for name in sorted(ever)}
    return SlowLinks(
        slow={name: mbps for name, mbps in best.items() if name in always},
        suspects={name: mbps for name, mbps in best.items() if name not in always},
        fast_mbps=fast_mbps,
    )


def _ways(pair: tuple[str, str]) -> tuple[Way, Way]:
    return (pair[0], "out"), (pair[1], "in")


def _smallest_covers(ends: list[frozenset[str]]) -> Sets:
    """All sets of as few nodes as possible, at least one of every pair of `ends`."""
    forced = frozenset(name for each in ends if len(each) == 1 for name in each)
    rest = [each for each in ends if not each & forced]
    names = sorted(frozenset().union(*rest))
    for size in range(min(len(names), _MOST_TOGETHER) + 1):
        if sets := list(_covers(rest, names, size)):
            return [forced | chosen for chosen in sets]
    return [forced, forced | frozenset(names)]


def _covers(ends: list[frozenset[str]], names: list[str], size: int) -> Iterator[frozenset[str]]:
    for chosen in map(frozenset, combinations(names, size)):
        if all(each & chosen for each in ends):
            yield chosen


def _rate(name: str, rates: dict[tuple[str, str], float], cleared: set[Way]) -> float:
    """The slower of sending and receiving, each at its best: a peer may be slow as well."""
    best: dict[Way, float] = {}
    for pair, mbps in rates.items():
        for way in _ways(pair):
            best[way] = max(mbps, best.get(way, 0.0))
    return min(best[way] for way in best if way[0] == name and way not in cleared)


# SECTION net/checks/commands
# Parts of the commands that findings print.


def sudo(facts: Facts) -> str:
    """Nothing for root, who in a container often has no sudo either."""
    return "" if facts.get("machine", {}).get("is_root") else "sudo "


def again(scene: ClusterFacts) -> str:
    return f"shoal doctor --on {shlex.quote(scene.on)}" if scene.on else "shoal doctor"


def same_versions(scene: ClusterFacts, otherwise: str) -> str:
    """On machines that shoal sets up, from here; on this one alone there is only `otherwise` to be typed."""
    if not scene.on or scene.on.partition(":")[0] in ("local", "lab"):
        return otherwise
    return f"shoal setup {shlex.quote(scene.on)}"
