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

    `kind` is tcp, or udp for a packet of full size. `outcome` is ok, refused, timeout, unreachable, or stranger when
    somebody else answered; `detail` says more in the scout's own words, `numbers` what was measured.
    """

    source: str
    target: str
    kind: str
    outcome: str
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


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
            yield (one, other) if dial_order(one.address) > dial_order(other.address) else (other, one)

    def trial(self, source: str, target: str, kind: str) -> Trial | None:
        return next(
            (trial for trial in self.trials if (trial.source, trial.target, trial.kind) == (source, target, kind)), None
        )

