"""All checks, in the order of their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.net.checks import interfaces, leftovers, links, mtu, names, reach, room, sameness, speed, twins
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene

Check = Callable[[Scene], Iterator[Finding]]


def unreached(scene: Scene) -> Iterator[Finding]:
    for name, error in scene.unreached.items():
        yield Finding(
            "reach.host", Severity.ERROR, name, error.seen, error.why or "nothing can be started there", error.fix
        )


def unseen(scene: Scene) -> Iterator[Finding]:
    """A topic that the scout stumbled over must not pass for a healthy one."""
    for name, facts in scene.facts.items():
        for topic, error in facts.get("failed", {}).items():
            meaning = f"checks of {topic} were left out for this machine"
            yield Finding("scout.failed", Severity.INFO, name, f"the scout could not see {topic}: {error}", meaning)


CHECKS: tuple[Check, ...] = (
    unreached,
    unseen,
    sameness.kinds,
    sameness.versions,
    sameness.no_torch,
    sameness.clocks,
    names.own_name,
    names.reverse,
    leftovers.port,
    leftovers.workers,
    leftovers.files,
    room.memory,
    room.disks,
    speed.cores,
    speed.frequency,
    speed.throttled,
    speed.power,
    speed.lid,
    speed.load,
    interfaces.addresses,
    interfaces.offers,
    interfaces.decoys,
    interfaces.detours,
    links.cards,
    links.power_save,
    twins.twins,
    reach.family,
    reach.pairs,
    reach.store,
    mtu.sizes,
    links.links,
)


def judge(scene: Scene) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(scene)]
