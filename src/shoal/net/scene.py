"""Everything the scouts saw, as the checks read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from shoal.cluster.node import Node
from shoal.control.route import dial_order
from shoal.errors import ShoalError

Facts = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One attempt of `source` to reach `target`, at a port that `target` listens on for it.

    `kind`: `tcp` is a connection to a port of the kernel's choice, `gloo` the same at the address that gloo will offer
    where that is another one, `cable` by a wired way that is not used, `store` to the port that was asked for; `udp` is
    a packet out of nowhere, `answer` one that a firewall takes for an answer, `full` one as big as the sender's
    interface allows; `burst` is as much as goes in a moment.

    `outcome` is ok, refused, timeout, unreachable (nobody there), no-route, forbidden (by the source itself), lost, or
    stranger when somebody else answered; `detail` says more in the scout's own words, `numbers` what was measured.
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
class Scene:
    """`facts` by node: what its scout saw there, by topic. `unreached`: nodes that could not be looked at, and why.
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
