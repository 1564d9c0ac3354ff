"""Do packets of full size arrive? Connections begin with small ones, so a way that loses big ones hangs later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene, Trial

_USUAL = 1500


def sizes(scene: Scene) -> Iterator[Finding]:
    """One size for all: the most common one, or what really passes where even that does not."""
    used = {node.name: way for node in scene.nodes for peer in scene.nodes if (way := scene.interface(node, peer))}
    mtus = {name: int(way["mtu"]) for name, way in used.items()}
    if not mtus:
        return
    lost = [trial for trial in scene.trials if trial.kind == "full" and not trial.ok and "told" not in trial.numbers]
    # Where the receiver's own size is the smaller one, that explains it; otherwise something between them does.
    swallowed = [trial for trial in lost if mtus.get(trial.source, 0) <= mtus.get(trial.target, 0)]
    wanted = min([_most_common(list(mtus.values())), *(int(trial.numbers["passes"]) for trial in swallowed)])
    for name, mtu in mtus.items():
        own = [trial for trial in lost if name in (trial.source, trial.target)]
        if mtu != wanted:
            yield _finding(name, used[name]["name"], mtu, wanted, own, any(trial in swallowed for trial in own))


def _finding(name: str, interface: str, mtu: int, wanted: int, lost: list[Trial], swallowed: bool) -> Finding:
    seen = [f"of {trial.numbers['size']:.0f} bytes from {trial.source} to {trial.target}" for trial in lost]
    most = min((trial.numbers["passes"] for trial in lost), default=0.0)
    evidence = f"{interface} of {name} has MTU {mtu}, the network {wanted}. "
    if lost:
        evidence += f"Lost were packets {', '.join(seen)}; up to {most:.0f} bytes arrive"
    else:
        evidence += "Packets of full size arrive all the same"
    meaning = (
        "connections open and then stand still with the first full packet: gloo would hang"
        if swallowed
        else "what others send in full size is lost there: it works only as long as both ends say so beforehand"
    )
    severity = Severity.ERROR if swallowed else Severity.WARNING if lost else Severity.INFO
    fix = f"sudo ip link set dev {interface} mtu {wanted}" if lost else ""
    return Finding("mtu.path" if swallowed else "mtu.mismatch", severity, name, evidence, meaning, fix)


def _most_common(mtus: list[int]) -> int:
    """Of equally common ones the usual one, then the smaller."""
    counts = Counter(mtus)
    return max(counts, key=lambda mtu: (counts[mtu], mtu == _USUAL, -mtu))
