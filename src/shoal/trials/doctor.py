"""Looking at every node alone, then at every pair, and in the end at gloo itself: what would stop or slow a run?"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cluster.cargo import Cargo
from shoal.cluster.cluster import Visit, open_cluster, visit
from shoal.cluster.talk import Talk, ask_each
from shoal.config.schema import RunConfig
from shoal.errors import ControlError, Interrupted, ShoalError
from shoal.events import Event, EventLog
from shoal.launch.supervise import run_module
from shoal.net.checks.judge import judge
from shoal.net.checks.proof import judge_proof
from shoal.net.finding import Finding, Severity, worst_first
from shoal.net.scene import Facts, Scene
from shoal.runfolder import RunFolder
from shoal.trials.pairs import try_pairs

SCOUT = "shoal.net.scout"
# A frozen node must not use up the twenty seconds in which everything else is found.
_WAKE_S = 6.0
_OBSERVE_S = 10.0
_CLOCK_S = 2.0
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


def _look_at_each(found: Visit, port: int) -> Scene:
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
    return Scene(found.nodes, facts, {**found.unreached, **unreached, **lost}, on=found.on)


def _clock(talk: Talk) -> dict[str, float]:
    """Against ours; of several tries the quickest, whose answer says most about the moment it was given."""
    tries = []
    for _ in range(_CLOCK_TRIES):
        asked = time.time()
        said = talk.ask(_CLOCK_S, do="clock")["time"]
        answered = time.time()
        tries.append(((answered - asked) / 2, said - (asked + answered) / 2))
    uncertainty_s, offset_s = min(tries)
    return {"offset_s": offset_s, "uncertainty_s": uncertainty_s}


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
