"""What can be done to a lab that stands: from its state to the next one, and the commands in between. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.cluster.lab import ssh, topology
from shoal.cluster.lab.spec import LabNode, Link
from shoal.cluster.lab.state import LabState, cut, heal, with_node
from shoal.cluster.lab.steps import Step
from shoal.cluster.lab.topology import Site
from shoal.errors import UsageError


@dataclass(frozen=True)
class Scene:
    """A lab as it is now; `alive` are the nodes whose first process runs."""

    state: LabState
    site: Site
    alive: frozenset[str]

    def node(self, name: str, alive: bool = True) -> LabNode:
        node = self.state.spec.node(name)
        if alive and name not in self.alive:
            raise UsageError(
                f"{name} is not running", why="it was killed", fix=f"shoal lab start {name}{self.option()}"
            )
        return node

    def option(self) -> str:
        return f" --name {self.site.name}"

    def filters(self, after: LabState) -> list[Step]:
        """For each node that runs and whose rules are no longer what they were."""
        nodes = [node for node in after.spec.nodes if node.name in self.alive]
        changed = [node for node in nodes if after.rules(node) != self.state.rules(self.state.spec.node(node.name))]
        return [step for node in changed for step in topology.rules(node, self.site, after.rules(node))]


Outcome = tuple[LabState, list[Step]]
Change = Callable[[Scene], Outcome]


def set_link(name: str, change: Callable[[Link], Link]) -> Change:
    def outcome(scene: Scene) -> Outcome:
        node = scene.node(name)
        after = node.model_copy(update={"link": change(node.link)})
        if after.link.delay_s and not (scene.state.netem or scene.state.delay_line):
            raise UsageError(
                "this kernel cannot delay packets",
                why="it has no netem (sch_netem) and allows no packet sockets",
                fix="leave --delay out",
            )
        state = with_node(scene.state, after)
        return state, [*topology.link(after, scene.site, node.link), *scene.filters(state)]

    return outcome


def set_cpu(name: str, cpu: float | None) -> Change:
    def outcome(scene: Scene) -> Outcome:
        if scene.site.groups.cpu is None:
            raise UsageError(
                "this lab cannot limit the CPU",
                why="no control group with a cpu controller can be made here, or not without root",
                fix="run the lab as root",
            )
        node = scene.node(name).model_copy(update={"cpu": cpu})
        return with_node(scene.state, node), topology.cpu(node, scene.site)

    return outcome


def kill(name: str, silent: bool) -> Change:
    def outcome(scene: Scene) -> Outcome:
        node = scene.node(name)
        state, thaw = _stopped(scene, node, frozen=False) if name in scene.state.frozen else (scene.state, [])
        end = topology.kill(node, scene.site, silent)
        return state, [end[0], *thaw, end[1]] if silent else [*thaw, *end]

    return outcome


def restart(name: str) -> Change:
    def outcome(scene: Scene) -> Outcome:
        node = scene.node(name, alive=False)
        if name in scene.alive:
            raise UsageError(f"{name} is already running", fix=f"shoal lab status{scene.option()}")
        rules = topology.rules(node, scene.site, scene.state.rules(node)) if scene.state.filtered(node) else []
        server = ssh.start_server(node, scene.site) if scene.state.spec.sshd else []
        return scene.state, [*topology.restart(node, scene.site), *rules, *server]

    return outcome


def stop_or_go(name: str, frozen: bool) -> Change:
    def outcome(scene: Scene) -> Outcome:
        return _stopped(scene, scene.node(name), frozen)

    return outcome


def _stopped(scene: Scene, node: LabNode, frozen: bool) -> Outcome:
    names = scene.state.frozen | {node.name} if frozen else scene.state.frozen - {node.name}
    return scene.state.model_copy(update={"frozen": names}), topology.stop_or_go(node, scene.site, frozen)


def cut_off(one: str, other: str | None, one_way: bool) -> Change:
    def outcome(scene: Scene) -> Outcome:
        if one == other:
            raise UsageError(f"{one} cannot be cut off from itself", fix=f"shoal lab cut {one}, from all others")
        state = cut(scene.state, one, other, one_way)
        return state, scene.filters(state)

    return outcome


def heal_cuts(one: str | None, other: str | None) -> Change:
    def outcome(scene: Scene) -> Outcome:
        state = heal(scene.state, one, other)
        return state, scene.filters(state)

    return outcome


def set_firewall(name: str, ports: tuple[str, ...] | None) -> Change:
    def outcome(scene: Scene) -> Outcome:
        node = scene.node(name, alive=False)
        others = {key: value for key, value in scene.state.firewalls.items() if key != name}
        mine = {} if ports is None else {node.name: ports}
        state = scene.state.model_copy(update={"firewalls": {**others, **mine}})
        return state, scene.filters(state)

    return outcome
