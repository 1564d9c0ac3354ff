"""Two machines with one address: each gets part of what is meant for the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.cluster.node import Node
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Facts, Scene

# Every machine has the same address on these.
_EVERYWHERE = ("docker", "loopback")


@dataclass(frozen=True)
class Shared:
    """`other` has the address of `owner`, on the interface `held`."""

    owner: Node
    other: Node
    held: Facts


def twins(scene: Scene) -> Iterator[Finding]:
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


def involved(scene: Scene) -> set[str]:
    """Nodes of which nothing can be told by their address."""
    return {node.name for each in _shared(scene) for node in (each.owner, each.other)}


def _shared(scene: Scene) -> list[Shared]:
    found = []
    for owner in scene.nodes:
        for other in scene.nodes:
            held = scene.carrying(other, owner.address) if other is not owner else {}
            if held and held["kind"] not in _EVERYWHERE and owner.name in scene.facts:
                found.append(Shared(owner, other, held))
    return found


def _who_answered(scene: Scene, each: Shared) -> str:
    cards = {found["mac"] for found in scene.facts[each.other.name]["network"]["interfaces"].values()}
    misled = [trial.source for trial in scene.trials if trial.target == each.owner.name and trial.mac in cards]
    return f"; to {', '.join(misled)} it is {each.other.name} that answers" if misled else ""


def _give_up(held: Facts, node: Node) -> str:
    """Deleting a first address takes the others of its network along, so our own is set again."""
    own = f"{node.address}/{held['as_set'].split('/')[1]}"
    return f"sudo ip addr del {held['as_set']} dev {held['name']} && sudo ip addr replace {own} dev {held['name']}"
