"""Looking at every node alone, then at every pair, and in the end at gloo itself: what would stop or slow a run?"""

from __future__ import annotations

import errno
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Protocol

from shoal.cluster.cluster import NodePrograms, open_cluster, visit
from shoal.cluster.node import Answer, Node, RemoteProgram, RunFiles, ask_each
from shoal.config.schema import RunConfig
from shoal.errors import ControlError, Interrupted, ShoalError
from shoal.events import Event, EventLog
from shoal.launch.launcher import run_module
from shoal.run_folder import RunFolder
from shoal.tools.doctor.checks import judge, judge_proof
from shoal.tools.doctor.checks.network import cables
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, Trial, slow_links, worst_first

# SECTION trials/packets
# Single packets tell more than connections: which way it is shut, and up to which size it is open.


# For packets on their way; those that are not there by then are looked for once more, later.
_ARRIVE_S, _ARRIVE_LATE_S = 0.1, 0.4
_SMALL_BYTES = 128
_USUAL_BYTES = 1500
_BIGGEST_BYTES = 9216
# Some links lose one now and then.
_COPIES = 3
# So many sizes at once narrow a gap of 9000 bytes down to one in four rounds; one at a time would take thirteen.
_SIZES_AT_ONCE = 16
_ROUNDS = 5

Pair = tuple[Node, Node]


class ListeningNodes(Protocol):
    """Nodes that answer, and the ports at which they listen."""

    @property
    def ports(self) -> dict[str, int]: ...

    def ask(self, requests: Mapping[str, Answer], takes_s: float) -> dict[str, Answer]: ...


def try_sizes(post: ListeningNodes, pairs: list[Pair], scene: ClusterFacts) -> list[Trial]:
    """A small packet, and one as big as the sender's interface allows; where only the small one arrives, the biggest
    that does."""
    full = {pair: _full_size(scene, *pair) for pair in pairs}
    told = _send(post, "new", {pair: [_SMALL_BYTES, size] * _COPIES for pair, size in full.items()})
    heard = _hear(post, "new", full)
    passes = {pair: size for pair, size in heard.items() if size}
    passes |= _narrow(post, {pair: (size, full[pair]) for pair, size in passes.items() if size < full[pair]})
    return [
        *(_small(pair, pair in passes, told.get(pair, {})) for pair in pairs),
        *(_sized(pair, full[pair], size, told.get(pair, {})) for pair, size in passes.items()),
    ]


def try_answers(post: ListeningNodes, pairs: Collection[Pair]) -> list[Trial]:
    """Both sides send from where they listen, twice: a firewall that lets answers in takes the second one for one."""
    if not pairs:
        return []
    for _ in range(2):
        _send(post, "answer", {pair: [_SMALL_BYTES] for pair in pairs}, from_listener=True)
        time.sleep(_ARRIVE_S)
    heard = _hear(post, "answer", dict.fromkeys(pairs, _SMALL_BYTES))
    return [_trial("answer", pair, heard[pair] > 0) for pair in pairs]


def _full_size(scene: ClusterFacts, source: Node, target: Node) -> int:
    return min(int(scene.interface(source, target).get("mtu", _USUAL_BYTES)), _BIGGEST_BYTES)


def _narrow(post: ListeningNodes, gaps: dict[Pair, tuple[int, int]]) -> dict[Pair, int]:
    """From a size that arrives and one that does not, for each pair, to the biggest that does."""
    for number in range(_ROUNDS):
        sizes = {pair: between(*gap) for pair, gap in gaps.items() if gap[1] - gap[0] > 1}
        if not sizes:
            break
        _send(post, f"size{number}", {pair: each * _COPIES for pair, each in sizes.items()})
        heard = _hear(post, f"size{number}", {pair: each[-1] for pair, each in sizes.items()})
        for pair, each in sizes.items():
            low = max(gaps[pair][0], heard[pair])
            gaps[pair] = low, min(size for size in (*each, gaps[pair][1]) if size > low)
    return {pair: low for pair, (low, _) in gaps.items()}


def between(low: int, high: int) -> list[int]:
    """Some sizes above `low` and below `high`, spread evenly."""
    step = max(1, (high - low) // (_SIZES_AT_ONCE + 1))
    return list(range(low + step, high, step))[: _SIZES_AT_ONCE + 1]


def _send(
    post: ListeningNodes, tag: str, sizes: Mapping[Pair, list[int]], from_listener: bool = False
) -> dict[Pair, Answer]:
    """What each sender's kernel had to say to it."""
    pairs = [pair for pair in sizes if pair[0].name in post.ports and pair[1].name in post.ports]
    requests: dict[str, Answer] = {}
    for source, target in pairs:
        order = {"do": "send", "port": post.ports[source.name], "tag": tag, "from_listener": from_listener}
        places = requests.setdefault(source.name, {**order, "places": []})["places"]
        places.append({"address": target.address, "port": post.ports[target.name], "sizes": sizes[source, target]})
    told = {name: iter(said["told"]) for name, said in post.ask(requests, 0.0).items()}
    return {pair: next(told[pair[0].name]) for pair in pairs if pair[0].name in told}


def _hear(post: ListeningNodes, tag: str, until: Mapping[Pair, int]) -> dict[Pair, int]:
    """The biggest packet of that tag that arrived, for each pair; 0 for none. Waits only while some is missing."""
    biggest: dict[Pair, int] = {}
    for wait_s in (_ARRIVE_S, _ARRIVE_LATE_S):
        time.sleep(wait_s)
        ears = {target.name for _, target in until if target.name in post.ports}
        said = post.ask({name: {"do": "hear", "port": post.ports[name]} for name in ears}, 0.0)
        for source, target in until:
            sizes = said.get(target.name, {}).get("heard", {}).get(source.name, {}).get(tag, [])
            biggest[source, target] = max(sizes, default=0)
        if all(biggest[pair] >= size for pair, size in until.items()):
            break
    return biggest


def _small(pair: Pair, came: bool, told: Answer) -> Trial:
    """A firewall that lets nothing out tells the sender so, at least of single packets."""
    if not came and told.get("errno") in (errno.EPERM, errno.EACCES):
        return Trial(pair[0].name, pair[1].name, "udp", "forbidden", told["error"])
    return _trial("udp", pair, came)


def _trial(kind: str, pair: Pair, came: bool) -> Trial:
    return Trial(pair[0].name, pair[1].name, kind, "ok" if came else "lost")


def _sized(pair: Pair, size: int, passes: int, told: Answer) -> Trial:
    """`told`: what the sender's own kernel knows to be the most on this way, so that TCP keeps to it."""
    numbers = {"size": float(size), "passes": float(passes)}
    if "path_mtu" in told:
        numbers["told"] = float(told["path_mtu"])
    return Trial(pair[0].name, pair[1].name, "full", "ok" if passes >= size else "lost", numbers=numbers)


# SECTION trials/pairs
# Every pair of nodes, both ways: connections, packets of full size, and a short burst. All nodes at once.


# A lost first packet is sent again after one second and after three.
DIAL_S = 3.2
# Beyond what a try may take by itself: a busy machine is a moment behind.
_SLACK_S = 4.0
_BURST_S = 4.0
# What looks slow once may have been busy.
_BURST_ROUNDS = 3
_NEIGHBOURS = 2


def try_pairs(talks: Mapping[str, RemoteProgram], scene: ClusterFacts, port: int) -> list[Trial]:
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
class _Stage(ListeningNodes):
    """Those who still answer, and where they listen, for which kind of trial."""

    talks: dict[str, RemoteProgram]
    scene: ClusterFacts
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


COLLECTOR = "shoal.tools.doctor.collect"
# A frozen node must not use up the twenty seconds in which everything else is found.
_WAKE_S = 6.0
_OBSERVE_S = 10.0
_CLOCK_S = 2.0
_CLOCK_TRIES = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """`proved`: gloo itself was tried. `took_s` is wall time."""

    scene: ClusterFacts
    findings: list[Finding]
    proved: bool
    took_s: float

    @property
    def healthy(self) -> bool:
        return not any(finding.severity in (Severity.ERROR, Severity.WARNING) for finding in self.findings)


def examine(on: str, say: Say, port: int = 0, prove: bool = True) -> Diagnosis:
    began = time.monotonic()
    with visit(on, COLLECTOR) as found:
        say("looking at each machine alone")
        scene = _look_at_each(found, port)
        say("trying every pair, both ways")
        answering = {name: talk for name, talk in found.talks.items() if name in scene.facts}
        scene = replace(scene, trials=try_pairs(answering, scene, port))
        findings = judge(scene)
        proved = prove and not any(finding.severity is Severity.ERROR for finding in findings)
        if proved:
            say("proving it with gloo")
            findings += _prove(found.on, scene)
    again = shlex.join(["shoal", "doctor", "--on", on, *(("--port", str(port)) if port else ())])
    findings = [replace(finding, retest=finding.retest or again) for finding in findings]
    return Diagnosis(scene, worst_first(findings), proved, time.monotonic() - began)


def _look_at_each(found: NodePrograms, port: int) -> ClusterFacts:
    """Asked all at once. A node that does not even tell the time is not waited for again."""
    _, unreached = ask_each(found.talks, {name: {"do": "clock"} for name in found.talks}, _WAKE_S)
    clocks, requests = {}, {}
    for name, talk in found.talks.items():
        if name not in unreached:
            try:
                clocks[name] = _clock(talk)
            except ControlError as error:
                unreached[name] = error
                continue
            peers = [node.address for node in found.nodes if node.name != name]
            own = next(node.address for node in found.nodes if node.name == name)
            requests[name] = {"do": "observe", "peers": peers, "address": own, "port": port}
    seen, lost = ask_each(found.talks, requests, _OBSERVE_S)
    facts: dict[str, Facts] = {name: {**said, "clock": clocks[name]} for name, said in seen.items()}
    return ClusterFacts(found.nodes, facts, {**found.unreached, **unreached, **lost}, on=found.on)


def _clock(talk: RemoteProgram) -> dict[str, float]:
    """Against ours; of several tries the quickest, whose answer says most about the moment it was given."""
    tries = []
    for _ in range(_CLOCK_TRIES):
        asked = time.time()
        said = talk.ask(_CLOCK_S, do="clock")["time"]
        answered = time.time()
        tries.append(((answered - asked) / 2, said - (asked + answered) / 2))
    uncertainty_s, offset_s = min(tries)
    return {"offset_s": offset_s, "uncertainty_s": uncertainty_s}


def _prove(on: str, scene: ClusterFacts) -> list[Finding]:
    """Ranks on every node, as a training would have them, in a run that leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="shoal-proof-") as folder:
        run = RunFolder.create(Path(folder) / "proof")
        log = EventLog(run.path / "supervisor.jsonl", 0)
        try:
            with open_cluster(on, RunFiles(stays=False), lambda text: None) as cluster:
                run_module(RunConfig(on=on), "shoal.tools.doctor.gloo_worker", (), run, cluster, log)
        except Interrupted:
            raise
        except ShoalError as error:
            return judge_proof(scene, _proofs(run), error)
        finally:
            log.close()
        return judge_proof(scene, _proofs(run), None)


def _proofs(run: RunFolder) -> list[Event]:
    return [event for event in run.read_all_events() if event["event"] == "proof"]
