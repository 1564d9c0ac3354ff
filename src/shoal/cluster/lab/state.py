"""What is known of a lab that stands: kept in its folder as lab.json, so that any command can find and change it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from shoal.cluster.lab.cgroup import Groups
from shoal.cluster.lab.filters import ruleset
from shoal.cluster.lab.spec import Frozen, LabNode, LabSpec
from shoal.cluster.lab.topology import Site


class Owner(Frozen):
    """The process a lab belongs to. A number alone could by now be somebody else's; with its start time it cannot."""

    pid: int
    started: int


class LabState(Frozen):
    """`cuts` are pairs: what the first sends, the second no longer hears. `ready` is false while it is being built."""

    spec: LabSpec
    rootless: bool
    netem: bool
    delay_line: bool = False
    groups: Groups
    notes: tuple[str, ...] = ()
    owner: Owner | None = None
    ready: bool = False
    cuts: frozenset[tuple[str, str]] = frozenset()
    firewalls: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    def site(self, folder: Path) -> Site:
        return Site(self.spec.name, folder, self.rootless, self.netem, self.groups)

    def rules(self, node: LabNode) -> str:
        deaf_to = [self.spec.node(sender).address for sender, hearer in self.cuts if hearer == node.name]
        return ruleset(deaf_to, self.firewalls.get(node.name), 0.0 if self.netem else node.link.loss)

    def filtered(self, node: LabNode) -> bool:
        lossy = bool(node.link.loss) and not self.netem
        return lossy or node.name in self.firewalls or any(hearer == node.name for _, hearer in self.cuts)


def with_node(state: LabState, node: LabNode) -> LabState:
    nodes = tuple(node if each.name == node.name else each for each in state.spec.nodes)
    return state.model_copy(update={"spec": state.spec.model_copy(update={"nodes": nodes})})


def cut(state: LabState, one: str, other: str | None, one_way: bool) -> LabState:
    """Without `other`, from everybody. One way: what `one` sends is lost, and it still hears."""
    return state.model_copy(update={"cuts": state.cuts | _pairs(state, one, other, one_way)})


def heal(state: LabState, one: str | None, other: str | None) -> LabState:
    if one is None:
        return state.model_copy(update={"cuts": frozenset()})
    return state.model_copy(update={"cuts": state.cuts - _pairs(state, one, other, one_way=False)})


def _pairs(state: LabState, one: str, other: str | None, one_way: bool) -> frozenset[tuple[str, str]]:
    state.spec.node(one)
    others = [state.spec.node(other).name] if other else [node.name for node in state.spec.nodes if node.name != one]
    there = {(one, each) for each in others}
    return frozenset(there if one_way else there | {(each, one) for each in others})
