"""Every pair of nodes, both ways: connections, packets of full size, and a short burst. All nodes at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import permutations

from shoal.cluster.node import Node
from shoal.cluster.talk import Answer, Talk, ask_each
from shoal.net.checks.interfaces import cables
from shoal.net.links import slow_links
from shoal.net.scene import Scene, Trial
from shoal.trials.packets import Pair, Post, try_answers, try_sizes

# A lost first packet is sent again after one second and after three.
DIAL_S = 3.2
# Beyond what a try may take by itself: a busy machine is a moment behind.
_SLACK_S = 4.0
_BURST_S = 4.0
# What looks slow once may have been busy.
_BURST_ROUNDS = 3
_NEIGHBOURS = 2


def try_pairs(talks: Mapping[str, Talk], scene: Scene, port: int) -> list[Trial]:
    """A node that falls silent meanwhile leaves the scene's facts and is noted as unreached."""
    stage = _Stage(dict(talks), scene)
    stage.listen(port)
    trials = stage.dial()
    trials += try_sizes(stage, stage.pairs(), scene)
    shut = {(trial.source, trial.target) for trial in trials if trial.kind == "tcp" and not trial.ok}
    asked = [pair for pair in stage.pairs() if not {_names(pair), _names(pair[::-1])}.isdisjoint(shut)]
    trials += try_answers(stage, asked)
    return trials + stage.bursts([pair for pair in stage.pairs() if _names(pair) not in shut])


@dataclass
class _Stage(Post):
    """Those who still answer, and where they listen, for which kind of trial."""

    talks: dict[str, Talk]
    scene: Scene
    ears: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)

    @property
    def ports(self) -> dict[str, int]:
        return {name: port for (name, kind), (_, port) in self.ears.items() if kind == "tcp"}

    def listen(self, port: int) -> None:
        seen = [node for node in self.scene.nodes if node.name in self.scene.facts]
        self._listen("tcp", {node.name: (node.address, 0) for node in seen})
        self._listen(
            "store", {node.name: (node.address, port) for node in seen if port and node is self.scene.nodes[0]}
        )
        offers = {node.name: (self.scene.offered(node), 0) for node in seen}
        self._listen("gloo", {node.name: offers[node.name] for node in seen if offers[node.name][0] != node.address})
        self._listen("cable", {cable.peer: (cable.peer_address, 0) for cable in cables(self.scene)})

    def _listen(self, kind: str, wanted: Mapping[str, tuple[str, int]]) -> None:
        said = self.ask(
            {
                name: {"do": "listen", "name": name, "address": address, "port": port}
                for name, (address, port) in wanted.items()
            },
            0.0,
        )
        for name, answer in said.items():
            if answer["port"]:
                self.ears[name, kind] = wanted[name][0], answer["port"]

    def dial(self) -> list[Trial]:
        """Everybody dials everybody who listens."""
        ways = [(source, name, kind) for source in self.talks for name, kind in self.ears if name != source]
        requests: dict[str, Answer] = {}
        for source, name, kind in ways:
            address, port = self.ears[name, kind]
            request = requests.setdefault(source, {"do": "dial", "timeout_s": DIAL_S, "places": []})
            request["places"].append({"address": address, "port": port, "expect": name})
        tries = {name: iter(said["tries"]) for name, said in self.ask(requests, 2 * DIAL_S).items()}
        return [_dialled(*way, next(tries[way[0]])) for way in ways if way[0] in tries]

    def bursts(self, open_ways: list[Pair]) -> list[Trial]:
        """Each node with its next ones in a ring, and back: it sends to one and receives from one at a time."""
        ring = [node for node in self.scene.nodes if node.name in self.ports]
        best: dict[Pair, float] = {}
        trials: list[Trial] = []
        for number in range(_BURST_ROUNDS):
            named = slow_links(trials).named
            for pairs in circles_of(ring):
                again = [pair for pair in pairs if not number or not named.isdisjoint(_names(pair))]
                self._burst([pair for pair in again if pair in open_ways], best)
            trials = [Trial(*_names(pair), "burst", "ok", numbers={"mbps": mbps}) for pair, mbps in best.items()]
        return trials

    def _burst(self, pairs: list[Pair], best: dict[Pair, float]) -> None:
        ports = self.ports
        requests = {
            one.name: {"do": "burst", "address": other.address, "port": ports[other.name]}
            for one, other in pairs
            if one.name in ports and other.name in ports
        }
        said = self.ask(requests, _BURST_S)
        for pair in pairs:
            mbps = said.get(pair[0].name, {}).get("mbps")
            if mbps is not None:
                best[pair] = max(mbps, best.get(pair, 0.0))

    def pairs(self) -> list[Pair]:
        """Both ways, of those who listen."""
        return list(permutations([node for node in self.scene.nodes if node.name in self.ports], 2))

    def ask(self, requests: Mapping[str, Answer], takes_s: float) -> dict[str, Answer]:
        said, errors = ask_each(self.talks, requests, takes_s + _SLACK_S)
        for name, error in errors.items():
            self.talks.pop(name)
            self.ears = {ear: place for ear, place in self.ears.items() if ear[0] != name}
            self.scene.facts.pop(name, None)
            self.scene.unreached[name] = error
        return said


def _dialled(source: str, target: str, kind: str, said: Answer) -> Trial:
    return Trial(source, target, kind, said["outcome"], said["detail"], said.get("numbers", {}), said.get("mac"))


def circles_of(ring: list[Node]) -> list[list[Pair]]:
    """Pairs that can be measured at once. With one neighbour each, four nodes of which every other one is slow would
    all look alike; with two each no pair of slow nodes hides the fast ones."""
    circles: list[list[Pair]] = []
    for distance in range(1, min(len(ring) // 2, _NEIGHBOURS) + 1):
        onward = [(one, ring[(number + distance) % len(ring)]) for number, one in enumerate(ring)]
        circles.append(onward)
        if 2 * distance < len(ring):
            circles.append([(other, one) for one, other in onward])
    return circles


def _names(pair: Iterable[Node]) -> tuple[str, str]:
    one, other = pair
    return one.name, other.name
