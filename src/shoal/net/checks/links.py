"""Is each link as fast as it could be?"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.cluster.node import Node
from shoal.net.finding import Finding, Severity
from shoal.net.links import TELLS_UP_TO_MBPS, SlowLinks, slow_links
from shoal.net.scene import Facts, Scene

_BROKEN = "a damaged cable, a loose plug, or a setting made by hand; where the command does not help, try another cable"


def cards(scene: Scene) -> Iterator[Finding]:
    """A card that runs below what it can do. One for 2.5 Gbit/s at a switch for 1 is as it should be."""
    for node, used in _used(scene):
        half = used.get("duplex") == "half"
        speed, best = int(used.get("speed_mbps", 0)), int(used.get("best_mbps", 0))
        if half or 0 < speed < best:
            curable = half or speed < min(best, int(used.get("partner_mbps", TELLS_UP_TO_MBPS)))
            slow = curable or speed < TELLS_UP_TO_MBPS
            words = f"at {speed} Mbit/s{', half duplex' if half else ''}; it can do {best}"
            yield Finding(
                "interface.slow",
                Severity.WARNING if slow else Severity.INFO,
                node.name,
                f"{used['name']} of {node.name} runs {words}",
                _BROKEN if curable else "what it is plugged into can do no more",
                f"sudo ethtool -s {used['name']} autoneg on" if curable else "",
            )


def links(scene: Scene) -> Iterator[Finding]:
    """Slower than the others', measured; of two nodes, slower than their cards say."""
    found = slow_links(scene.trials)
    for name, mbps in found.slow.items():
        yield Finding(
            "link.slow",
            Severity.WARNING,
            name,
            f"{name}: {mbps:.0f} Mbit/s in a short burst, other pairs {found.fast_mbps:.0f}",
            "every rank waits for the slowest link in every step: look at its cable, its port of the switch, its Wi-Fi",
        )
    if found.suspects:
        rates = ", ".join(f"{name} {mbps:.0f}" for name, mbps in found.suspects.items())
        yield Finding(
            "link.slow",
            Severity.WARNING,
            "",
            f"{' or '.join(found.suspects)}: {rates} Mbit/s in a short burst, other pairs {found.fast_mbps:.0f}",
            f"at least one of these links is slow; which one cannot be told{_unmeasured(scene, found)}",
        )
    yield from _slower_than_cards(scene)


def _slower_than_cards(scene: Scene) -> Iterator[Finding]:
    """Where only two nodes were measured."""
    rates = {(trial.source, trial.target): trial.numbers["mbps"] for trial in scene.trials if trial.kind == "burst"}
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    speeds = {node.name: used["speed_mbps"] for node, used in _used(scene) if used.get("speed_mbps")}
    if len(names) != 2 or not speeds.keys() >= set(names):
        return
    mbps, card_mbps = min(rates.values()), min(speeds[name] for name in names)
    if mbps <= min(card_mbps, TELLS_UP_TO_MBPS) / 2:
        yield Finding(
            "link.slow",
            Severity.WARNING,
            "",
            f"{' and '.join(names)}: {mbps:.0f} Mbit/s in a short burst, and their cards say {card_mbps}",
            "something between the two is slower than either: a switch, a powerline adapter, a shaped link",
        )


def _unmeasured(scene: Scene, found: SlowLinks) -> str:
    """Which pairs of the suspects are missing, and what to do about it."""
    shut = [
        f"{trial.source} → {trial.target}"
        for trial in scene.trials
        if trial.kind == "tcp" and not trial.ok and found.suspects.keys() & {trial.source, trial.target}
    ]
    if not shut:
        return ": look at the cables, the ports of the switch and the Wi-Fi of each"
    return f", because there is no connection {', '.join(shut)}: open those first (see reach.pair), then look again"


def power_save(scene: Scene) -> Iterator[Finding]:
    for node, used in _used(scene):
        if used.get("power_save"):
            yield Finding(
                "wifi.powersave",
                Severity.WARNING,
                node.name,
                f"the Wi-Fi card {used['name']} of {node.name} sleeps between packets",
                "each exchange waits for it to wake, up to a tenth of a second",
                f"sudo iw dev {used['name']} set power_save off",
            )


def _used(scene: Scene) -> Iterator[tuple[Node, Facts]]:
    """Each node with each interface that leads to a peer, once."""
    for node in scene.nodes:
        ways = [scene.interface(node, peer) for peer in scene.nodes if peer is not node]
        for name in dict.fromkeys(way["name"] for way in ways if way):
            yield node, next(way for way in ways if way.get("name") == name)
