"""Measuring a cluster: its links by gauges without torch, then gloo and each machine by ranks like a training's."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from shoal.cluster.cargo import Cargo
from shoal.cluster.cluster import Visit, open_cluster, visit
from shoal.config.profile import SMALL_GPT, WIDE_GPT, Profile
from shoal.config.schema import ModelConfig, RunConfig
from shoal.errors import ControlError
from shoal.events import Event, EventLog, EventTail
from shoal.launch.supervise import run_module
from shoal.net.flow_plan import plan_flows
from shoal.net.flows import GAUGE, Say, measure_links
from shoal.runfolder import RunFolder
from shoal.trials.measured import Measured, assemble

RANKS = "shoal.train.gauge"
SMALL = {"small": SMALL_GPT}
STANDARD = {**SMALL, "wide": WIDE_GPT}
_LINKS_PART = 0.35
# From a rank's last figure until its agent has gone.
_ENDING_S = 2.0
_ANSWER_S = 20.0
_LOOK_EVERY_S = 0.2


def probe(on: str, budget_s: float, say: Say, models: Mapping[str, ModelConfig] | None = None) -> Profile:
    """`say` gets what is being done, to be shown to somebody who waits. `models` by name are those whose pace is
    wanted; without any, two from which that of others can be estimated."""
    began = time.monotonic()
    with visit(on, GAUGE) as found:
        _need_everybody(found)
        say("asking every machine what it is")
        facts = {name: talk.ask(_ANSWER_S, do="facts") for name, talk in found.talks.items()}
        plan = plan_flows(found.nodes, {name: said["iperf3"] for name, said in facts.items()}, _LINKS_PART * budget_s)
        try:
            links = measure_links(found, plan, say)
        except ControlError as error:
            raise ControlError(
                error.seen,
                why=error.why or "the machines do not reach each other, or one of them is gone",
                fix=f"find out why: shoal doctor --on {on}",
            ) from error
        say("starting ranks")
        left_s = budget_s - _ENDING_S - (time.monotonic() - began)
        events = _run_ranks(found.on, left_s, {**SMALL, **models} if models else STANDARD, say)
    measured = Measured(on, found.nodes, facts, links, events, plan.notes)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return assemble(measured, now, budget_s, time.monotonic() - began)


def _need_everybody(found: Visit) -> None:
    for error in found.unreached.values():
        raise error


def _run_ranks(on: str, left_s: float, models: Mapping[str, ModelConfig], say: Say) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="shoal-probe-") as folder:
        run = RunFolder.create(Path(folder) / "probe")
        with contextlib.closing(EventLog(run.path / "keeper.jsonl", 0)) as log, _following(run, say):
            shapes = {name: model.model_dump(mode="json") for name, model in models.items()}
            words = ("--budget-s", f"{max(0.0, left_s):.1f}", "--models", json.dumps(shapes))
            with open_cluster(on, Cargo(stays=False), lambda text: None) as cluster:
                run_module(RunConfig(on=on), RANKS, words, run, cluster, log)
        return list(run.read_all_events())


@contextlib.contextmanager
def _following(run: RunFolder, say: Say) -> Iterator[None]:
    """Passes on what the ranks say they do, while somebody else waits for their end."""
    over = threading.Event()

    def follow() -> None:
        tails: dict[Path, EventTail] = {}
        while not over.wait(_LOOK_EVERY_S):
            for path in run.event_files().values():
                for event in tails.setdefault(path, EventTail(path)).poll():
                    if event["event"] == "doing":
                        say(event["text"])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
