"""Play scenarios: start a training in the background, inject faults, watch it to its end, and judge the outcome."""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from shoal.config.defaults import SEED
from shoal.control.processes import find_processes, wait_until_ended
from shoal.errors import Interrupted, ShoalError, UsageError
from shoal.events import Event
from shoal.records.final_states import compare_replicas
from shoal.records.run_tails import RunTails
from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.manage import StopResult, end_processes, stop_run
from shoal.runs.start import start_script, start_training
from shoal.runs.supervisor import RunJob
from shoal.tools.chaos.actions import Action, CutPower, Resume, StopRun, describe
from shoal.tools.chaos.inject import Injector, NoDisplay, NoLines
from shoal.tools.chaos.judge import (
    Assertion,
    ScenarioTimes,
    compare_digests,
    has_regrouped,
    judge,
    measure,
    ranks_that_ended,
    rejoined_at,
)
from shoal.tools.chaos.scenario import (
    ChaosScenario,
    Injection,
    RunEnding,
    ScenarioRecord,
    all_scenarios,
    find_scenario,
    is_due,
    plan_injections,
)
from shoal.tools.chaos.testbed import TestBed, keep_checkpoints, opened, why_not

POLL_S = 0.02
_GRACE_S = 5.0
# A run that has not stopped by then hangs.
_STOP_S = 30.0
Report = Callable[[str], None]
ALL = "all"
FIGURES = "chaos.json"
# A user's script and its arguments, which is trained in place of shoal's own GPT; empty: that GPT.
Script = tuple[str, ...]


def scenarios_left_out(words: Sequence[str], on: str, script: Script = ()) -> dict[str, str]:
    """Return the built-in scenarios that `all` leaves out there, and why."""
    reasons = {scenario.name: _why_not(scenario, on, script) for scenario in all_scenarios()} if ALL in words else {}
    return {name: reason for name, reason in reasons.items() if reason}


def choose_scenarios(
    words: Sequence[str], on: str, script: Script = (), sync: str | None = None
) -> list[ChaosScenario]:
    """Return the scenarios, checked before the first one is played. `all`: every built-in one possible there.

    With `sync` all of them train with this method.
    """
    scenarios: list[ChaosScenario] = []
    for word in words:
        possible = (scenario for scenario in all_scenarios() if not _why_not(scenario, on, script))
        scenarios += possible if word == ALL else [find_scenario(word)]
    for scenario in scenarios:
        if reason := _why_not(scenario, on, script):
            where = f"{on} with {script[0]}" if script else on
            raise UsageError(f"{scenario.name} cannot be played on {where}", why=reason, fix="shoal chaos list")
    chosen = {scenario.name: scenario for scenario in scenarios}.values()
    return [scenario.with_sync(sync) if sync else scenario for scenario in chosen]


def _why_not(scenario: ChaosScenario, on: str, script: Script) -> str:
    return why_not(scenario, on) or (scenario.why_not_script() if script else "")


def play_all(
    scenarios: Sequence[ChaosScenario],
    on: str,
    times: int,
    seed: int,
    out: Path,
    report: Report,
    done: Callable[[ScenarioResult], None],
    script: Script = (),
) -> list[ScenarioResult]:
    """Play each scenario several times. The file has the figures after every run, also when the user interrupts."""
    new_folder(out)
    played: list[ScenarioResult] = []
    for scenario in scenarios:
        for number in range(1, times + 1):
            label = scenario.name + (f" {number} of {times}" if times > 1 else "")

            def report_run(text: str, label: str = label) -> None:
                report(f"{label}: {text}")

            played.append(play(scenario, on, out, number, seed, report_run, script))
            write_atomically(out / FIGURES, json.dumps(figures_document(played, on, seed, script), indent=2) + "\n")
            done(played[-1])
    return played


def figures_document(played: Sequence[ScenarioResult], on: str, seed: int, script: Script = ()) -> dict[str, Any]:
    by_name: dict[str, list[ScenarioResult]] = {}
    for result in played:
        by_name.setdefault(result.scenario, []).append(result)
    return {
        "on": on,
        "script": list(script),
        "seed": seed,
        "ok": all(result.ok for result in played),
        "scenarios": {
            name: {
                "row": runs[0].row,
                "runs": len(runs),
                "passed": sum(run.ok for run in runs),
                "seconds": {key: value.model_dump() for key, value in percentiles_by_time(runs).items()},
            }
            for name, runs in by_name.items()
        },
        "runs": [{**result.model_dump(mode="json"), "ok": result.ok} for result in played],
    }


def new_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(
                f"the folder {out} is not empty", why="it would mix two trials", fix="choose another --out"
            )
    except OSError as error:
        raise UsageError(f"cannot make {out}: {error.strerror}", fix="choose another --out") from None


class ScenarioResult(BaseModel):
    """One run of a scenario, as in `chaos.json`."""

    model_config = ConfigDict(frozen=True)

    scenario: str
    row: int
    number: int
    run: str
    seconds: float
    measured: ScenarioTimes
    assertions: list[Assertion]

    @property
    def ok(self) -> bool:
        return all(assertion.ok for assertion in self.assertions)


def play(
    scenario: ChaosScenario, on: str, out: Path, number: int, seed: int, report: Report, script: Script = ()
) -> ScenarioResult:
    began = time.monotonic()
    folder = out / f"{scenario.name}-{number}"
    with opened(scenario, on, out, number) as testbed:
        player = ScenarioPlayer(
            scenario, testbed, testbed.run_folder(folder), random.Random(f"{seed}/{number}/harm"), report, script
        )
        try:
            ending = player.play(plan_injections(scenario.steps, seed, number))
        finally:
            player.clear()
            testbed.keep_run(folder)
    measured = measure(player.record)
    return ScenarioResult(
        scenario=scenario.name,
        row=scenario.row,
        number=number,
        run=str(folder),
        seconds=time.monotonic() - began,
        measured=measured,
        assertions=judge(scenario, measured, ending, is_script=bool(script)),
    )


def start_run(
    scenario: ChaosScenario,
    script: Script,
    on: str,
    folder: Path,
    seed: int,
    before: Callable[[RunFolder], object] = lambda run: None,
) -> None:
    """Start what is trained under the faults in the background: shoal's own GPT, or a user's script."""
    if script:
        job = RunJob(script=script, on=on, session=json.dumps(scenario.session(on, seed)))
        start_script(job, folder, detach=True, display=NoLines(), before=before)
    else:
        start_training(scenario.config(on, seed), folder, NoDisplay, detach=True, before=before)


class ScenarioFailed(Exception):
    """The scenario could not be played to its end; the message is the reason."""


@dataclass
class ScenarioPlayer:
    """Play one scenario once."""

    scenario: ChaosScenario
    testbed: TestBed
    folder: Path
    draw: random.Random
    report: Report
    script: Script = ()
    run: RunFolder = field(init=False)
    watch: ScenarioWatch = field(init=False)
    injector: Injector = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunFolder(self.folder.resolve())
        self.watch = ScenarioWatch(self.run)
        self.injector = Injector(self.scenario.name, self.run, self.testbed, self.draw)
        self._deadline = time.monotonic() + self.scenario.deadline_s

    @property
    def record(self) -> ScenarioRecord:
        return self.watch.record

    def play(self, injections: list[Injection]) -> RunEnding:
        try:
            if self.scenario.trains:
                self.report("starts")
                start_run(self.scenario, self.script, self.testbed.on, self.folder, SEED, self.testbed.before)
            self._inject_all(injections)
            stop_s = self._watch_to_the_end() if self.scenario.trains else None
        except Interrupted:
            # The user ends `shoal chaos` itself, not only the run.
            raise
        except ScenarioFailed as trouble:
            return self._ending(None, str(trouble))
        except ShoalError as error:
            return self._ending(None, "; ".join(filter(None, (error.seen, error.why))))
        return self._ending(stop_s, "")

    def clear(self) -> None:
        """End all processes of the run."""
        self.injector.close()
        self.testbed.thaw_all()
        end_processes(find_processes(self.run.path))

    def _inject_all(self, injections: list[Injection]) -> None:
        last = time.monotonic()
        for injection in injections:
            self._await(injection, last)
            self.report(describe(injection.action))
            self.record.injected.append(self.injector.inject(injection.action))
            if isinstance(injection.action, CutPower):
                self.watch.restart()
            last = time.monotonic()

    def _await(self, injection: Injection, last: float) -> None:
        event_at: float | None = None
        may_be_over = isinstance(injection.action, Resume) or not self.scenario.trains
        while True:
            self._poll(f"waits to {describe(injection.action)}")
            now = time.monotonic()
            if event_at is None and self._has_happened(injection.action):
                event_at = now
            if is_due(injection, None if event_at is None else now - event_at, now - last):
                return
            if self.watch.ended and not may_be_over and not self._was_stopped():
                raise ScenarioFailed(f"the run ended before {describe(injection.action)}: {self._result_text()}")
            time.sleep(POLL_S)

    def _has_happened(self, action: Action) -> bool:
        """Tell whether what an action waits for has happened."""
        if action.after_regroup:
            return has_regrouped(self.record, float(self.record.injected[-1]["time"]))
        return self.watch.furthest_step >= (action.at_step or 0)

    def _was_stopped(self) -> bool:
        return any(event.get("do") == StopRun.model_fields["do"].default for event in self.record.injected)

    def _watch_to_the_end(self) -> float | None:
        """Wait for its own end, or watch it for a while and ask it to stop. Return the seconds that the end took."""
        asked_at: float | None = None
        began = time.monotonic()
        ends_by_itself = self.scenario.ends_by_itself or self._is_ending()
        settled_at: float | None = None
        while self._is_running():
            self._poll("watches")
            if settled_at is None and self._has_settled(time.monotonic() - began):
                settled_at = time.monotonic()
            if not ends_by_itself and settled_at and time.monotonic() - settled_at > self.scenario.watch_s:
                asked_at = time.monotonic()
                self._ask_to_stop()
            time.sleep(POLL_S)
        self.watch.poll()
        if asked_at is None and not ends_by_itself and self.watch.ended is None:
            raise ScenarioFailed("all processes of the run were gone before it was asked to stop")
        return time.monotonic() - (asked_at or began)

    def _ask_to_stop(self) -> None:
        self.report("stops")
        self.record.asked_at = time.time()
        if stop_run(self.run, wait_s=_STOP_S) is StopResult.ENDED:
            raise ScenarioFailed(f"it did not stop by itself within {_STOP_S:g} s")

    def _has_settled(self, waited_s: float) -> bool:
        """Tell whether the expected rank has rejoined, or is too late."""
        within_s = self.scenario.expect.rejoin_within_s
        last = float(self.record.injected[-1]["time"])
        return within_s is None or waited_s > within_s or rejoined_at(self.record, last) is not None

    def _is_ending(self) -> bool:
        """Tell whether the last action asks the run to end."""
        last = self.record.injected[-1] if self.record.injected else {}
        return last.get("do") == "signal-supervisor" and last.get("signal") in ("INT", "TERM")

    def _is_running(self) -> bool:
        self.watch.poll()
        return self.watch.ended is None and bool(find_processes(self.run.path))

    def _poll(self, doing: str) -> None:
        self.watch.poll()
        self.report(f"step {self.watch.furthest_step}, {doing}")
        if time.monotonic() > self._deadline:
            raise ScenarioFailed(
                f"after {self.scenario.deadline_s:g} s, at step {self.watch.furthest_step}: it still {doing}"
            )

    def _result_text(self) -> str:
        if self.script and not self.run.config.is_file():
            return "the script has no shoal.Session, or never began to train"
        return str((self.watch.ended or {}).get("seen", "it was finished"))

    def _ending(self, stop_s: float | None, trouble: str) -> RunEnding:
        self.watch.poll()
        wait_until_ended(lambda: find_processes(self.run.path), _GRACE_S)
        left = tuple(f"{process.part} on {process.node} ({process.pid})" for process in find_processes(self.run.path))
        with contextlib.suppress(OSError):
            keep_checkpoints(self.run, self.testbed.disk)
        ended = self.watch.ended
        every = self.scenario.config(self.testbed.on, seed=0).members.digest_every
        equal, count = _replicas(self.run, self.record, every)
        return RunEnding(
            exit_code=None if ended is None else int(ended["code"]),
            replicas_equal=equal,
            replicas=count,
            left=left,
            torn=tuple(sorted(path.name for path in self.run.checkpoints.glob(".step-*"))),
            stop_s=stop_s,
            answers=tuple(self.injector.answers),
            verified=find_errors(self.run) if self.scenario.trains and not trouble else None,
            trouble=trouble,
        )


def find_errors(run: RunFolder) -> tuple[str, ...]:
    """Return the errors that `shoal verify` finds in a run that has ended."""
    try:
        verdict = verify_run(run)
    except ShoalError as error:
        return (error.seen,)
    errors = [f"{finding.file}: {finding.text}" for finding in verdict.findings if finding.is_wrong]
    return tuple(errors) or (() if verdict.ok else ("ledger or replicas are not in order",))


def _replicas(run: RunFolder, record: ScenarioRecord, every: int) -> tuple[bool | None, int]:
    """Compare the final states of the ranks that ended regularly.

    A run that was asked to stop leaves no states, but its ranks have compared digests while training.
    """
    ended = {int(event["rank"]) for event in ranks_that_ended(record)}
    files = {rank: path for rank, path in run.state_files().items() if rank in ended}
    if not files:
        return compare_digests(record, every)
    try:
        return compare_replicas(files).byte_equivalent, len(files)
    except ShoalError:
        return False, len(files)


class ScenarioWatch:
    """Read the events of a growing run folder: ranks, agents, ledger and supervisor."""

    def __init__(self, run: RunFolder) -> None:
        self._tails = RunTails(run, "rank", "agent", "commits", "supervisor")
        self.record = ScenarioRecord()
        self.furthest_step = 0

    def restart(self) -> None:
        """Read all files from their start: after a power cut they may be shorter than what was read."""
        self._tails.restart()
        self.record.ranks, self.record.agents, self.record.commits, self.record.supervisor = [], [], [], []
        self.furthest_step = 0

    def poll(self) -> None:
        for file, events in self._tails.poll():
            if file.kind == "rank":
                self.record.ranks += events
                steps = (int(event["step"]) for event in events if event["event"] == "step")
                self.furthest_step = max(self.furthest_step, *steps, 0)
            elif file.kind == "agent":
                self.record.agents += [{**event, "node": event.get("node", file.node)} for event in events]
            elif file.kind == "commits":
                self.record.commits += events
            else:
                self.record.supervisor += events

    @property
    def ended(self) -> Event | None:
        """Return the supervisor's `ended` event of the newest launch; None while it runs."""
        last = self.record.supervisor[-1] if self.record.supervisor else {}
        return last if last.get("event") == "ended" else None


TIMES = ("detect_s", "regroup_s", "next_step_s", "next_commit_s", "rejoin_s", "pause_s")


class Percentiles(BaseModel):
    """Nearest-rank percentiles: with ten runs, p95 is the worst of them."""

    model_config = ConfigDict(frozen=True)

    count: int
    p50: float
    p95: float
    worst: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    ordered = sorted(values)
    at = {share: ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95)}
    return Percentiles(count=len(ordered), p50=at[0.5], p95=at[0.95], worst=ordered[-1])


def percentiles_by_time(played: Sequence[ScenarioResult]) -> dict[str, Percentiles]:
    """Return the percentiles of each measured time, without times that never occurred."""
    result = {}
    for name in TIMES:
        values = [getattr(run.measured, name) for run in played]
        if spread := percentiles([value for value in values if value is not None]):
            result[name] = spread
    return result
