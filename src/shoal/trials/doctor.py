"""Looking at every node alone, then at every pair, and in the end at gloo itself: what would stop or slow a run?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cluster.cargo import Cargo
from shoal.cluster.cluster import Visit, open_cluster, visit
from shoal.cluster.talk import Talk
from shoal.config.schema import RunConfig
from shoal.errors import Interrupted, ShoalError
from shoal.events import Event, EventLog
from shoal.launch.supervise import run_module
from shoal.net.checks.judge import judge, judge_proof
from shoal.net.finding import Finding, Severity, worst_first
from shoal.net.scene import Facts, Scene, Trial
from shoal.runfolder import RunFolder

SCOUT = "shoal.net.scout"
_OBSERVE_S = 12.0
DIAL_S = 2.0
_CLOCK_TRIES = 5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Diagnosis:
    """`proved`: gloo itself was tried. `took_s` is wall time."""

    scene: Scene
    findings: list[Finding]
    proved: bool
    took_s: float

    @property
    def healthy(self) -> bool:
        return not any(finding.severity in (Severity.ERROR, Severity.WARNING) for finding in self.findings)


def examine(on: str, say: Say, port: int = 0, prove: bool = True) -> Diagnosis:
    began = time.monotonic()
    with visit(on, SCOUT) as found:
        say("looking at each machine alone")
        scene = _look_at_each(found, port)
        say("trying every pair, both ways")
        scene = replace(scene, trials=_try_pairs(found, scene))
        findings = judge(scene)
        proved = prove and not any(finding.severity is Severity.ERROR for finding in findings)
        if proved:
            say("proving it with gloo")
            findings += _prove(found.on, scene)
    return Diagnosis(scene, worst_first(findings), proved, time.monotonic() - began)


def _look_at_each(found: Visit, port: int) -> Scene:
    """Asked all at once, heard one after the other."""
    clocks, unreached = {}, dict(found.unreached)
    for name, talk in found.talks.items():
        try:
            clocks[name] = _clock(talk)
            peers = [node.address for node in found.nodes if node.name != name]
            own = next(node.address for node in found.nodes if node.name == name)
            talk.send(do="observe", peers=peers, address=own, port=port)
        except ShoalError as error:
            unreached[name] = error
    facts: dict[str, Facts] = {}
    for name in clocks:
        try:
            facts[name] = {**found.talks[name].hear(_OBSERVE_S, "observe"), "clock": clocks[name]}
        except ShoalError as error:
            unreached[name] = error
    return Scene(found.nodes, facts, unreached, on=found.on)


def _clock(talk: Talk) -> dict[str, float]:
    """Against ours; of several tries the quickest, whose answer says most about the moment it was given."""
    tries = []
    for _ in range(_CLOCK_TRIES):
        asked = time.time()
        said = talk.ask(5.0, do="clock")["time"]
        answered = time.time()
        tries.append(((answered - asked) / 2, said - (asked + answered) / 2))
    uncertainty_s, offset_s = min(tries)
    return {"offset_s": offset_s, "uncertainty_s": uncertainty_s}


def _try_pairs(found: Visit, scene: Scene) -> list[Trial]:
    """Everybody listens, then everybody dials everybody: all nodes at once, each its peers one after another."""
    seen = [node for node in scene.nodes if node.name in scene.facts]
    ports: dict[str, int] = {}
    for node in seen:
        try:
            ports[node.name] = found.talks[node.name].ask(5.0, do="listen", address=node.address, name=node.name)[
                "port"
            ]
        except ShoalError as error:
            scene.facts[node.name].setdefault("failed", {})["listen"] = error.seen
    asked = []
    for node in seen:
        for peer in seen:
            if peer is not node and peer.name in ports:
                request = {"address": peer.address, "port": ports[peer.name], "expect": peer.name}
                found.talks[node.name].send(do="dial", timeout_s=DIAL_S, **request)
                asked.append((node.name, peer.name))
    trials = []
    for source, target in asked:
        said = found.talks[source].hear(len(seen) * DIAL_S + 5, "dial")
        trials.append(Trial(source, target, "tcp", said["outcome"], said["detail"], said.get("numbers", {})))
    return [*trials, *_try_full_packets(found, scene, ports)]


def _try_full_packets(found: Visit, scene: Scene, ports: Mapping[str, int]) -> list[Trial]:
    return []


def _prove(on: str, scene: Scene) -> list[Finding]:
    """Ranks on every node, as a training would have them, in a run that leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="shoal-proof-") as folder:
        run = RunFolder.create(Path(folder) / "proof")
        log = EventLog(run.path / "keeper.jsonl", 0)
        try:
            with open_cluster(on, Cargo(stays=False), lambda text: None) as cluster:
                run_module(RunConfig(on=on), "shoal.sync.proof", (), run, cluster, log)
        except Interrupted:
            raise
        except ShoalError as error:
            return judge_proof(scene, _proofs(run), error)
        finally:
            log.close()
        return judge_proof(scene, _proofs(run), None)


def _proofs(run: RunFolder) -> list[Event]:
    return [event for event in run.read_all_events() if event["event"] == "proof"]
