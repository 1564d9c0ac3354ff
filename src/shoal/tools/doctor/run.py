"""Run doctor: collect facts on every node, try every pair of nodes, judge, and prove the result with gloo."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path

from shoal.cluster.cluster import NodePrograms, open_cluster, start_on_nodes, temporary_parent
from shoal.cluster.node import Node, RunFiles
from shoal.cluster.node_program import Answer, RemoteProgram, ask_each
from shoal.config.schema import Config, RunConfig
from shoal.errors import ControlError, Interrupted, ShoalError
from shoal.events import EventLog
from shoal.launch.launcher import run_module
from shoal.run_folder import RunFolder
from shoal.tools.doctor.checks import judge
from shoal.tools.doctor.checks.network import unused_cables
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity, Trial, slow_links, worst_first

COLLECTOR = "shoal.tools.doctor.collect"
# A frozen node must not use up the twenty seconds in which everything else is examined.
_WAKE_S = 6.0
_OBSERVE_S = 10.0
_CLOCK_S = 2.0
_CLOCK_TRIES = 5

Pair = tuple[Node, Node]


@dataclass(frozen=True)
class Diagnosis:
    cluster: ClusterFacts
    findings: list[Finding]
    proved: bool  # gloo itself was tried
    took_s: float  # wall time

    @property
    def healthy(self) -> bool:
        return not any(finding.severity in (Severity.ERROR, Severity.WARNING) for finding in self.findings)


def examine(
    on: str, report: Callable[[str], None], port: int = 0, prove: bool = True, config: Config | None = None
) -> Diagnosis:
    """Examine the machines; with `config` also whether the training has enough memory there."""
    began = time.monotonic()
    with start_on_nodes(on, COLLECTOR) as started:
        report("looking at each machine alone")
        # Not by the name of a lab that was made for this visit: it is gone when the user types a command.
        cluster = replace(_collect_facts(started, port), on=on, port=port, config=config)
        report("trying every pair, both ways")
        answering = {name: program for name, program in started.programs.items() if name in cluster.facts}
        cluster = replace(cluster, trials=try_pairs(answering, cluster, port))
        findings = judge(cluster)
        proved = prove and not any(finding.severity is Severity.ERROR for finding in findings)
        if proved:
            report("proving it with gloo")
            cluster = _prove(started.on, cluster)
            findings = judge(cluster)
    return Diagnosis(cluster, worst_first(findings), proved, time.monotonic() - began)


def _collect_facts(started: NodePrograms, port: int) -> ClusterFacts:
    """Ask all nodes in parallel. A node that does not even return its time is not asked again."""
    programs = started.programs
    _, unreached = ask_each(programs, {name: {"do": "clock"} for name in programs}, _WAKE_S)
    clocks, requests = {}, {}
    for name, program in programs.items():
        if name not in unreached:
            try:
                clocks[name] = _measure_clock(program)
            except ControlError as error:
                unreached[name] = error
                continue
            peers = [node.address for node in started.nodes if node.name != name]
            own = next(node.address for node in started.nodes if node.name == name)
            requests[name] = {"do": "observe", "peers": peers, "address": own, "port": port}
    answers, lost = ask_each(programs, requests, _OBSERVE_S)
    facts: dict[str, Facts] = {name: {**answer, "clock": clocks[name]} for name, answer in answers.items()}
    return ClusterFacts(started.nodes, facts, {**started.unreached, **unreached, **lost})


def _measure_clock(program: RemoteProgram) -> dict[str, float]:
    """Compare a node's clock with this machine's; of several tries take the quickest, which is the most precise."""
    tries = []
    for _ in range(_CLOCK_TRIES):
        asked = time.time()
        node_time = program.ask(_CLOCK_S, do="clock")["time"]
        answered = time.time()
        tries.append(((answered - asked) / 2, node_time - (asked + answered) / 2))
    uncertainty_s, offset_s = min(tries)
    return {"offset_s": offset_s, "uncertainty_s": uncertainty_s}


def _prove(on: str, cluster: ClusterFacts) -> ClusterFacts:
    """Start ranks on every node, as a training does, in a temporary run, and add the results of their all-reduces."""
    with tempfile.TemporaryDirectory(prefix="shoal-proof-", dir=temporary_parent(on)) as folder:
        run = RunFolder.create(Path(folder) / "proof")
        log = EventLog(run.path / "supervisor.jsonl", 0)
        failure: ShoalError | None = None
        try:
            with open_cluster(on, RunFiles(keeps_files=False), lambda text: None) as opened:
                run_module(RunConfig(on=on), "shoal.tools.doctor.gloo_worker", (), run, opened, log)
        except Interrupted:
            raise
        except ShoalError as error:
            failure = error
        finally:
            log.close()
        proofs = [event for event in run.read_all_events() if event["event"] == "proof"]
        return replace(cluster, proofs=proofs, proof_error=failure)


# A lost first packet is sent again after one second and after three.
_DIAL_S = 3.2
# Added to what a trial itself may take: a busy machine answers later.
_SLACK_S = 4.0
_BURST_S = 4.0
# A node that looks slow once may have been busy.
_BURST_ROUNDS = 3
_NEIGHBOURS = 2


def try_pairs(programs: Mapping[str, RemoteProgram], cluster: ClusterFacts, port: int) -> list[Trial]:
    """Try every pair in both directions: connections, datagrams, a short burst. All nodes work in parallel.

    A node that stops answering is moved from the cluster's `facts` to `unreached`.
    """
    nodes = ListeningNodes(dict(programs), cluster)
    nodes.listen(port)
    trials = nodes.dial()
    trials += try_sizes(nodes, nodes.pairs(), cluster)
    failed = {(trial.source, trial.target) for trial in trials if trial.kind == "tcp" and not trial.ok}
    blocked = [pair for pair in nodes.pairs() if not {_names(pair), _names(pair[::-1])}.isdisjoint(failed)]
    trials += try_answers(nodes, blocked)
    return trials + nodes.measure_bursts([pair for pair in nodes.pairs() if _names(pair) not in failed])


@dataclass
class ListeningNodes:
    """The nodes that still answer, and where they listen."""

    programs: dict[str, RemoteProgram]
    cluster: ClusterFacts
    listeners: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)  # (node, kind) → address and port

    @property
    def ports(self) -> dict[str, int]:
        return {name: port for (name, kind), (_, port) in self.listeners.items() if kind == "tcp"}

    def listen(self, port: int) -> None:
        nodes = [node for node in self.cluster.nodes if node.name in self.cluster.facts]
        first = self.cluster.nodes[0]
        published = {node.name: self.cluster.gloo_address(node) for node in nodes}
        self._listen("tcp", {node.name: (node.address, 0) for node in nodes})
        self._listen("store", {node.name: (node.address, port) for node in nodes if port and node is first})
        self._listen(
            "gloo", {node.name: (published[node.name], 0) for node in nodes if published[node.name] != node.address}
        )
        self._listen("cable", {cable.peer: (cable.peer_address, 0) for cable in unused_cables(self.cluster)})

    def _listen(self, kind: str, places: Mapping[str, tuple[str, int]]) -> None:
        requests = {
            name: {"do": "listen", "name": name, "address": address, "port": port}
            for name, (address, port) in places.items()
        }
        for name, answer in self.ask(requests, 0.0).items():
            if answer["port"]:
                self.listeners[name, kind] = places[name][0], answer["port"]

    def dial(self) -> list[Trial]:
        """Connect from every node to every listener of the others."""
        ways = [(source, name, kind) for source in self.programs for name, kind in self.listeners if name != source]
        requests: dict[str, Answer] = {}
        for source, name, kind in ways:
            address, port = self.listeners[name, kind]
            request = requests.setdefault(source, {"do": "dial", "timeout_s": _DIAL_S, "places": []})
            request["places"].append({"address": address, "port": port, "expect": name})
        tries = {name: iter(answer["tries"]) for name, answer in self.ask(requests, 2 * _DIAL_S).items()}
        trials = []
        for way in ways:
            if way[0] in tries:
                result = next(tries[way[0]])
                numbers = result.get("numbers", {})
                trials.append(Trial(*way, result["outcome"], result["detail"], numbers, result.get("mac")))
        return trials

    def measure_bursts(self, open_ways: list[Pair]) -> list[Trial]:
        """Measure each node with its neighbours in a ring: it sends to one and receives from one at a time."""
        ring = [node for node in self.cluster.nodes if node.name in self.ports]
        best_mbps: dict[Pair, float] = {}
        trials: list[Trial] = []
        for round_number in range(_BURST_ROUNDS):
            named = slow_links(trials).named
            for circle in circles_of(ring):
                # After the first round measure only the pairs of nodes that looked slow.
                pairs = [pair for pair in circle if not round_number or not named.isdisjoint(_names(pair))]
                self._measure_circle([pair for pair in pairs if pair in open_ways], best_mbps)
            trials = [Trial(*_names(pair), "burst", "ok", numbers={"mbps": mbps}) for pair, mbps in best_mbps.items()]
        return trials

    def _measure_circle(self, pairs: list[Pair], best_mbps: dict[Pair, float]) -> None:
        ports = self.ports
        requests = {
            source.name: {"do": "burst", "address": target.address, "port": ports[target.name]}
            for source, target in pairs
            if source.name in ports and target.name in ports
        }
        answers = self.ask(requests, _BURST_S)
        for pair in pairs:
            mbps = answers.get(pair[0].name, {}).get("mbps")
            if mbps is not None:
                best_mbps[pair] = max(mbps, best_mbps.get(pair, 0.0))

    def pairs(self) -> list[Pair]:
        """Return all pairs of listening nodes, in both directions."""
        return list(permutations([node for node in self.cluster.nodes if node.name in self.ports], 2))

    def ask(self, requests: Mapping[str, Answer], takes_s: float) -> dict[str, Answer]:
        answers, errors = ask_each(self.programs, requests, takes_s + _SLACK_S)
        for name, error in errors.items():
            self.programs.pop(name)
            self.listeners = {key: place for key, place in self.listeners.items() if key[0] != name}
            self.cluster.facts.pop(name, None)
            self.cluster.unreached[name] = error
        return answers


def circles_of(ring: list[Node]) -> list[list[Pair]]:
    """Return groups of pairs that can be measured at the same time.

    With one neighbour per node, four nodes of which every other one is slow would all look alike. With two neighbours
    no pair of slow nodes hides the fast ones.
    """
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


# Datagrams show more than connections: which direction is blocked, and up to which size packets pass.

# How long datagrams may take; those that are missing then are looked for once more, later.
_ARRIVE_S, _ARRIVE_LATE_S = 0.1, 0.4
_SMALL_BYTES = 128
_USUAL_MTU = 1500
_LARGEST_BYTES = 9216
# Some links lose a packet now and then.
_COPIES = 3
# This many sizes at once narrow a gap of 9000 bytes to one in four rounds; one at a time would take thirteen.
_SIZES_AT_ONCE = 16
_SIZE_ROUNDS = 5


def try_sizes(nodes: ListeningNodes, pairs: list[Pair], cluster: ClusterFacts) -> list[Trial]:
    """Send a small datagram and one as large as the sender's interface allows; where that is lost, find the limit."""
    full = {pair: min(int(cluster.interface_to(*pair).get("mtu", _USUAL_MTU)), _LARGEST_BYTES) for pair in pairs}
    results = _send(nodes, "new", {pair: [_SMALL_BYTES, size] * _COPIES for pair, size in full.items()})
    passes = {pair: size for pair, size in _largest_received(nodes, "new", full).items() if size}
    passes |= _narrow(nodes, {pair: (size, full[pair]) for pair, size in passes.items() if size < full[pair]})
    trials = []
    for pair in pairs:
        result = results.get(pair, {})
        if pair not in passes and result.get("errno") in (errno.EPERM, errno.EACCES):
            # A firewall that lets nothing out reports it to the sender, at least for datagrams.
            trials.append(Trial(*_names(pair), "udp", "forbidden", result["error"]))
        else:
            trials.append(Trial(*_names(pair), "udp", "ok" if pair in passes else "lost"))
    for pair, size in passes.items():
        numbers = {"size": float(full[pair]), "passes": float(size)}
        # The sender's kernel knows the limit of this path, so TCP keeps to it.
        if "path_mtu" in results.get(pair, {}):
            numbers["path_mtu"] = float(results[pair]["path_mtu"])
        trials.append(Trial(*_names(pair), "full", "ok" if size >= full[pair] else "lost", numbers=numbers))
    return trials


def try_answers(nodes: ListeningNodes, pairs: Collection[Pair]) -> list[Trial]:
    """Send from the listeners' ports in both directions, twice: a stateful firewall takes the second for an answer."""
    if not pairs:
        return []
    for _ in range(2):
        _send(nodes, "answer", {pair: [_SMALL_BYTES] for pair in pairs}, from_listener=True)
        time.sleep(_ARRIVE_S)
    sizes = _largest_received(nodes, "answer", dict.fromkeys(pairs, _SMALL_BYTES))
    return [Trial(*_names(pair), "answer", "ok" if sizes[pair] > 0 else "lost") for pair in pairs]


def _narrow(nodes: ListeningNodes, gaps: dict[Pair, tuple[int, int]]) -> dict[Pair, int]:
    """Find the largest size that arrives, from one that does and one that does not, for each pair."""
    for number in range(_SIZE_ROUNDS):
        sizes = {pair: sizes_between(*gap) for pair, gap in gaps.items() if gap[1] - gap[0] > 1}
        if not sizes:
            break
        tag = f"size{number}"
        _send(nodes, tag, {pair: pair_sizes * _COPIES for pair, pair_sizes in sizes.items()})
        largest = _largest_received(nodes, tag, {pair: pair_sizes[-1] for pair, pair_sizes in sizes.items()})
        for pair, pair_sizes in sizes.items():
            low = max(gaps[pair][0], largest[pair])
            gaps[pair] = low, min(size for size in (*pair_sizes, gaps[pair][1]) if size > low)
    return {pair: low for pair, (low, _) in gaps.items()}


def sizes_between(low: int, high: int) -> list[int]:
    """Return some sizes above `low` and below `high`, spread evenly."""
    step = max(1, (high - low) // (_SIZES_AT_ONCE + 1))
    return list(range(low + step, high, step))[: _SIZES_AT_ONCE + 1]


def _send(
    nodes: ListeningNodes, tag: str, sizes: Mapping[Pair, list[int]], from_listener: bool = False
) -> dict[Pair, Answer]:
    """Send datagrams of these sizes for each pair; return what the sender's kernel reported."""
    pairs = [pair for pair in sizes if pair[0].name in nodes.ports and pair[1].name in nodes.ports]
    requests: dict[str, Answer] = {}
    for source, target in pairs:
        order = {"do": "send", "port": nodes.ports[source.name], "tag": tag, "from_listener": from_listener}
        places = requests.setdefault(source.name, {**order, "places": []})["places"]
        places.append({"address": target.address, "port": nodes.ports[target.name], "sizes": sizes[source, target]})
    results = {name: iter(answer["results"]) for name, answer in nodes.ask(requests, 0.0).items()}
    return {pair: next(results[pair[0].name]) for pair in pairs if pair[0].name in results}


def _largest_received(nodes: ListeningNodes, tag: str, wanted: Mapping[Pair, int]) -> dict[Pair, int]:
    """Return the largest datagram of that tag received by each pair, 0 for none. Wait only while one is missing."""
    largest: dict[Pair, int] = {}
    for wait_s in (_ARRIVE_S, _ARRIVE_LATE_S):
        time.sleep(wait_s)
        receivers = {target.name for _, target in wanted if target.name in nodes.ports}
        answers = nodes.ask({name: {"do": "received", "port": nodes.ports[name]} for name in receivers}, 0.0)
        for source, target in wanted:
            sizes = answers.get(target.name, {}).get("sizes", {}).get(source.name, {}).get(tag, [])
            largest[source, target] = max(sizes, default=0)
        if all(largest[pair] >= size for pair, size in wanted.items()):
            break
    return largest
