"""Plays one scenario once: a training starts in the background, is done harm, and what became of it is judged."""

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

from shoal.control.processes import await_end, find
from shoal.errors import Interrupted, ShoalError, UsageError
from shoal.events import Event, EventTail
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.manage import StopResult, end_processes, stop
from shoal.runs.start import train_new
from shoal.tools.chaos.inject import Injector, NoDisplay, TestBed, keep_checkpoints, opened, why_not
from shoal.tools.chaos.judge import Assertion, ScenarioTimes, came_back, compare_told, judge, measure, ranks_that_ended
from shoal.tools.chaos.scenario import (
    ChaosScenario,
    CutPower,
    Injection,
    Resume,
    RunEnding,
    ScenarioRecord,
    StopRun,
    all_scenarios,
    describe,
    find_scenario,
    is_due,
    plan_injections,
)
from shoal.tools.report.replicas import compare_replicas
from shoal.tools.report.verify import verify_run

# SECTION trials/chaos/watch
# Reads a run folder as it grows: ranks, agents, ledger and supervisor.


class ScenarioWatch:
    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._tails: dict[Path, EventTail] = {}
        self.record = ScenarioRecord()
        self.furthest_step = 0

    def begin_again(self) -> None:
        """After a power cut: files may be shorter than what was read of them, and are read from their start."""
        self._tails.clear()
        self.record.ranks, self.record.agents, self.record.commits, self.record.supervisor = [], [], [], []
        self.furthest_step = 0

    def poll(self) -> None:
        for path in self._run.event_files().values():
            news = self._news(path)
            self.record.ranks += news
            steps = (int(event["step"]) for event in news if event.get("event") == "step")
            self.furthest_step = max(self.furthest_step, *steps, 0)
        for path in self._run.journals():
            self.record.agents += [{**event, "node": event.get("node", path.stem)} for event in self._news(path)]
        self.record.commits += self._news(self._run.commits)
        self.record.supervisor += self._news(self._run.supervisor)

    @property
    def ended(self) -> Event | None:
        """The supervisor's last word of the newest launch; none while it keeps."""
        last = self.record.supervisor[-1] if self.record.supervisor else {}
        return last if last.get("event") == "ended" else None

    def _news(self, path: Path) -> list[Event]:
        return self._tails.setdefault(path, EventTail(path)).poll()


POLL_S = 0.02
_GRACE_S = 5.0
# Then it hangs.
_STOP_S = 30.0
Show = Callable[[str], None]


class ScenarioResult(BaseModel):
    """One run of a scenario, as `chaos.json` has it."""

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


def play(scenario: ChaosScenario, on: str, out: Path, number: int, seed: int, show: Show) -> ScenarioResult:
    began = time.monotonic()
    folder = out / f"{scenario.name}-{number}"
    with opened(scenario, on, out, number) as ground:
        stage = ScenarioStage(scenario, ground, ground.run_folder(folder), random.Random(f"{seed}/{number}/harm"), show)
        try:
            ending = stage.act(plan_injections(scenario.steps, seed, number))
        finally:
            stage.clear()
            ground.keep_run(folder)
    measured = measure(stage.record)
    return ScenarioResult(
        scenario=scenario.name,
        row=scenario.row,
        number=number,
        run=str(folder),
        seconds=time.monotonic() - began,
        measured=measured,
        assertions=judge(scenario, measured, ending),
    )


class ScenarioFailed(Exception):
    """The scenario could not be played to its end; the words say why."""


@dataclass
class ScenarioStage:
    scenario: ChaosScenario
    ground: TestBed
    folder: Path
    draw: random.Random
    show: Show
    run: RunFolder = field(init=False)
    watch: ScenarioWatch = field(init=False)
    injector: Injector = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunFolder(self.folder.resolve())
        self.watch = ScenarioWatch(self.run)
        self.injector = Injector(self.scenario.name, self.run, self.ground, self.draw)
        self._deadline = time.monotonic() + self.scenario.deadline_s

    @property
    def record(self) -> ScenarioRecord:
        return self.watch.record

    def act(self, injections: list[Injection]) -> RunEnding:
        try:
            if self.scenario.trains:
                self.show("starts")
                config = self.scenario.config(self.ground.on, seed=35_000)
                train_new(config, self.folder, NoDisplay, detach=True, before=self.ground.before)
            self._inject_all(injections)
            stop_s = self._see_to_the_end() if self.scenario.trains else None
        except Interrupted:
            # Somebody wants all of this to end, not only the run.
            raise
        except ScenarioFailed as trouble:
            return self._ending(None, str(trouble))
        except ShoalError as error:
            return self._ending(None, " ".join(filter(None, (error.seen, error.why))))
        return self._ending(stop_s, "")

    def clear(self) -> None:
        """Nothing of the run outlives its judgement."""
        self.injector.close()
        self.ground.thaw_all()
        end_processes(find(self.run.path))

    def _inject_all(self, injections: list[Injection]) -> None:
        last = time.monotonic()
        for injection in injections:
            self._await(injection, last)
            self.show(describe(injection.action))
            self.record.injected.append(self.injector.inject(injection.action))
            if isinstance(injection.action, CutPower):
                self.watch.begin_again()
            last = time.monotonic()

    def _await(self, injection: Injection, last: float) -> None:
        reached: float | None = None
        over_is_fine = isinstance(injection.action, Resume) or not self.scenario.trains
        while True:
            self._look(f"waits to {describe(injection.action)}")
            step, now = self.watch.furthest_step, time.monotonic()
            if reached is None and step >= (injection.action.at_step or 0):
                reached = now
            if is_due(injection, step, None if reached is None else now - reached, now - last):
                return
            if self.watch.ended and not over_is_fine and not self._stopped_on_purpose():
                raise ScenarioFailed(f"the run ended before {describe(injection.action)}: {self._last_words()}")
            time.sleep(POLL_S)

    def _stopped_on_purpose(self) -> bool:
        return any(event.get("do") == StopRun.model_fields["do"].default for event in self.record.injected)

    def _see_to_the_end(self) -> float | None:
        """To its own end, or for as long as there is something to watch; then it is asked to stop."""
        asked_at: float | None = None
        began = time.monotonic()
        patient = self.scenario.ends_by_itself or self._is_ending()
        settled_at: float | None = None
        while self._is_running():
            self._look("watches")
            if settled_at is None and self._is_whole(time.monotonic() - began):
                settled_at = time.monotonic()
            if not patient and settled_at and time.monotonic() - settled_at > self.scenario.watch_s:
                asked_at = time.monotonic()
                self._ask_to_stop()
            time.sleep(POLL_S)
        self.watch.poll()
        if asked_at is None and not patient and self.watch.ended is None:
            raise ScenarioFailed("nothing of the run was left before it was asked to stop")
        return time.monotonic() - (asked_at or began)

    def _ask_to_stop(self) -> None:
        self.show("stops")
        self.record.asked_at = time.time()
        if stop(self.run, wait_s=_STOP_S) is StopResult.ENDED:
            raise ScenarioFailed(f"it did not stop by itself within {_STOP_S:g} s")

    def _is_whole(self, waited_s: float) -> bool:
        """Whoever is expected back is back, or will not be in time."""
        within_s = self.scenario.expect.rejoin_within_s
        last = float(self.record.injected[-1]["time"])
        return within_s is None or waited_s > within_s or came_back(self.record, last) is not None

    def _is_ending(self) -> bool:
        """Whether the last thing that was done to it asks it to end."""
        last = self.record.injected[-1] if self.record.injected else {}
        return last.get("do") == "signal-supervisor" and last.get("signal") in ("INT", "TERM")

    def _is_running(self) -> bool:
        self.watch.poll()
        return self.watch.ended is None and bool(find(self.run.path))

    def _look(self, doing: str) -> None:
        self.watch.poll()
        self.show(f"step {self.watch.furthest_step}, {doing}")
        if time.monotonic() > self._deadline:
            raise ScenarioFailed(
                f"after {self.scenario.deadline_s:g} s, at step {self.watch.furthest_step}: it still {doing}"
            )

    def _last_words(self) -> str:
        return str((self.watch.ended or {}).get("seen", "it was done"))

    def _ending(self, stop_s: float | None, trouble: str) -> RunEnding:
        self.watch.poll()
        await_end(lambda: find(self.run.path), _GRACE_S)
        left = tuple(f"{found.part} on {found.node} ({found.pid})" for found in find(self.run.path))
        with contextlib.suppress(OSError):
            keep_checkpoints(self.run, self.ground.disk)
        ended = self.watch.ended
        every = self.scenario.config(self.ground.on, seed=0).members.digest_every
        equal, count = _replicas(self.run, self.record, every)
        return RunEnding(
            exit_code=None if ended is None else int(ended["code"]),
            replicas_equal=equal,
            replicas=count,
            left=left,
            torn=tuple(sorted(path.name for path in self.run.checkpoints.glob(".step-*"))),
            stop_s=stop_s,
            answers=tuple(self.injector.answers),
            verified=find_wrong(self.run) if self.scenario.trains and not trouble else None,
            trouble=trouble,
        )


def find_wrong(run: RunFolder) -> tuple[str, ...]:
    """What `shoal verify` finds wrong in a run that has ended."""
    try:
        verdict = verify_run(run)
    except ShoalError as error:
        return (error.seen,)
    wrong = [f"{finding.file}: {finding.text}" for finding in verdict.findings if finding.is_wrong]
    return tuple(wrong) or (() if verdict.ok else ("ledger or replicas are not in order",))


def _replicas(run: RunFolder, record: ScenarioRecord, every: int) -> tuple[bool | None, int]:
    """Of the ranks that came to an end: one that was killed and not started again has nothing to compare.

    A run that was asked to stop leaves no states, but its ranks have compared themselves now and then."""
    whole = {int(event["rank"]) for event in ranks_that_ended(record)}
    files = {rank: path for rank, path in run.state_files().items() if rank in whole}
    if not files:
        return compare_told(record, every)
    try:
        return compare_replicas(files).byte_equivalent, len(files)
    except ShoalError:
        return False, len(files)


# SECTION trials/chaos/figures
# Many runs of one scenario as a few numbers. Pure.


TIMES = ("detect_s", "regroup_s", "next_step_s", "next_commit_s", "rejoin_s", "pause_s")


class Percentiles(BaseModel):
    """Nearest-rank percentiles: with ten runs, p95 is the worst of them."""

    model_config = ConfigDict(frozen=True)

    count: int
    p50: float
    p95: float
    worst: float


def spread(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    ordered = sorted(values)
    at = {share: ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.95)}
    return Percentiles(count=len(ordered), p50=at[0.5], p95=at[0.95], worst=ordered[-1])


def spreads(played: Sequence[ScenarioResult]) -> dict[str, Percentiles]:
    """By name of the measured time; what never happened has no line."""
    found = {name: [getattr(each.measured, name) for each in played] for name in TIMES}
    known = {name: spread([value for value in values if value is not None]) for name, values in found.items()}
    return {name: value for name, value in known.items() if value is not None}


# SECTION trials/chaos/gather
# Several scenarios, each several times; and the file that has all of it.


ALL = "all"
FIGURES = "chaos.json"


def left_out(words: Sequence[str], on: str) -> dict[str, str]:
    """What `all` is not: scenarios of ours that cannot be played there, and why."""
    found = {each.name: why_not(each, on) for each in all_scenarios()} if ALL in words else {}
    return {name: reason for name, reason in found.items() if reason}


def chosen(words: Sequence[str], on: str) -> list[ChaosScenario]:
    """Checked before the first one is played. `all` is every one of ours that can be played there."""
    found: list[ChaosScenario] = []
    for word in words:
        found += [each for each in all_scenarios() if not why_not(each, on)] if word == ALL else [find_scenario(word)]
    for scenario in found:
        if reason := why_not(scenario, on):
            raise UsageError(f"{scenario.name} cannot be played on {on}", why=reason, fix="shoal chaos list")
    return list({scenario.name: scenario for scenario in found}.values())


def play_all(
    scenarios: Sequence[ChaosScenario],
    on: str,
    times: int,
    seed: int,
    out: Path,
    show: Show,
    done: Callable[[ScenarioResult], None],
) -> list[ScenarioResult]:
    """The figures so far are in the file after every run: somebody may not wait for the last."""
    new_folder(out)
    found: list[ScenarioResult] = []
    for scenario in scenarios:
        for number in range(1, times + 1):
            label = scenario.name + (f" {number} of {times}" if times > 1 else "")

            def tell(text: str, label: str = label) -> None:
                show(f"{label}: {text}")

            found.append(play(scenario, on, out, number, seed, tell))
            write_atomically(out / FIGURES, json.dumps(document(found, on, seed), indent=2) + "\n")
            done(found[-1])
    return found


def document(played: Sequence[ScenarioResult], on: str, seed: int) -> dict[str, Any]:
    by_name: dict[str, list[ScenarioResult]] = {}
    for each in played:
        by_name.setdefault(each.scenario, []).append(each)
    return {
        "on": on,
        "seed": seed,
        "ok": all(each.ok for each in played),
        "scenarios": {
            name: {
                "row": runs[0].row,
                "runs": len(runs),
                "passed": sum(each.ok for each in runs),
                "seconds": {key: value.model_dump() for key, value in spreads(runs).items()},
            }
            for name, runs in by_name.items()
        },
        "runs": [{**each.model_dump(mode="json"), "ok": each.ok} for each in played],
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
