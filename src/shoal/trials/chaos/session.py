"""Plays one scenario once: a training starts in the background, is done harm, and what became of it is judged."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shoal.errors import Interrupted, ShoalError
from shoal.launch.found import await_end, find
from shoal.report.replicas import compare_replicas
from shoal.report.verify import verify_run
from shoal.runfolder import RunFolder
from shoal.trials.chaos.actions import CutPower, Resume, Stop, describe
from shoal.trials.chaos.ground import Ground, keep_checkpoints, opened
from shoal.trials.chaos.inject import Injector, Silent
from shoal.trials.chaos.judge import Assertion, judge
from shoal.trials.chaos.measure import Measured, measure
from shoal.trials.chaos.plan import Injection, is_due, plan_injections
from shoal.trials.chaos.record import Ending, Record
from shoal.trials.chaos.replicas import came_back, compare_told, ranks_that_ended
from shoal.trials.chaos.spec import Scenario
from shoal.trials.chaos.watch import Watch
from shoal.trials.stopping import Outcome, end_processes, stop
from shoal.trials.training import train_new

POLL_S = 0.02
_GRACE_S = 5.0
# Then it hangs.
_STOP_S = 30.0
Show = Callable[[str], None]


class Played(BaseModel):
    """One run of a scenario, as `chaos.json` has it."""

    model_config = ConfigDict(frozen=True)

    scenario: str
    row: int
    number: int
    run: str
    seconds: float
    measured: Measured
    assertions: list[Assertion]

    @property
    def ok(self) -> bool:
        return all(assertion.ok for assertion in self.assertions)


def play(scenario: Scenario, on: str, out: Path, number: int, seed: int, show: Show) -> Played:
    began = time.monotonic()
    folder = out / f"{scenario.name}-{number}"
    with opened(scenario, on, out, number) as ground:
        stage = Stage(scenario, ground, ground.run_folder(folder), random.Random(f"{seed}/{number}/harm"), show)
        try:
            ending = stage.act(plan_injections(scenario.steps, seed, number))
        finally:
            stage.clear()
            ground.keep_run(folder)
    measured = measure(stage.record)
    return Played(
        scenario=scenario.name,
        row=scenario.row,
        number=number,
        run=str(folder),
        seconds=time.monotonic() - began,
        measured=measured,
        assertions=judge(scenario, measured, ending),
    )


class Trouble(Exception):
    """The scenario could not be played to its end; the words say why."""


@dataclass
class Stage:
    scenario: Scenario
    ground: Ground
    folder: Path
    draw: random.Random
    show: Show
    run: RunFolder = field(init=False)
    watch: Watch = field(init=False)
    injector: Injector = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunFolder(self.folder.resolve())
        self.watch = Watch(self.run)
        self.injector = Injector(self.scenario.name, self.run, self.ground, self.draw)
        self._deadline = time.monotonic() + self.scenario.deadline_s

    @property
    def record(self) -> Record:
        return self.watch.record

    def act(self, injections: list[Injection]) -> Ending:
        try:
            if self.scenario.trains:
                self.show("starts")
                config = self.scenario.config(self.ground.on, seed=35_000)
                train_new(config, self.folder, Silent, detach=True, before=self.ground.before)
            self._inject_all(injections)
            stop_s = self._see_to_the_end() if self.scenario.trains else None
        except Interrupted:
            # Somebody wants all of this to end, not only the run.
            raise
        except Trouble as trouble:
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
                raise Trouble(f"the run ended before {describe(injection.action)}: {self._last_words()}")
            time.sleep(POLL_S)

    def _stopped_on_purpose(self) -> bool:
        return any(event.get("do") == Stop.model_fields["do"].default for event in self.record.injected)

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
            raise Trouble("nothing of the run was left before it was asked to stop")
        return time.monotonic() - (asked_at or began)

    def _ask_to_stop(self) -> None:
        self.show("stops")
        self.record.asked_at = time.time()
        if stop(self.run, wait_s=_STOP_S) is Outcome.ENDED:
            raise Trouble(f"it did not stop by itself within {_STOP_S:g} s")

    def _is_whole(self, waited_s: float) -> bool:
        """Whoever is expected back is back, or will not be in time."""
        within_s = self.scenario.expect.rejoin_within_s
        last = float(self.record.injected[-1]["time"])
        return within_s is None or waited_s > within_s or came_back(self.record, last) is not None

    def _is_ending(self) -> bool:
        """Whether the last thing that was done to it asks it to end."""
        last = self.record.injected[-1] if self.record.injected else {}
        return last.get("do") == "signal-keeper" and last.get("signal") in ("INT", "TERM")

    def _is_running(self) -> bool:
        self.watch.poll()
        return self.watch.ended is None and bool(find(self.run.path))

    def _look(self, doing: str) -> None:
        self.watch.poll()
        self.show(f"step {self.watch.furthest_step}, {doing}")
        if time.monotonic() > self._deadline:
            raise Trouble(f"after {self.scenario.deadline_s:g} s, at step {self.watch.furthest_step}: it still {doing}")

    def _last_words(self) -> str:
        return str((self.watch.ended or {}).get("seen", "it was done"))

    def _ending(self, stop_s: float | None, trouble: str) -> Ending:
        self.watch.poll()
        await_end(lambda: find(self.run.path), _GRACE_S)
        left = tuple(f"{found.part} on {found.node} ({found.pid})" for found in find(self.run.path))
        with contextlib.suppress(OSError):
            keep_checkpoints(self.run, self.ground.disk)
        ended = self.watch.ended
        every = self.scenario.config(self.ground.on, seed=0).members.digest_every
        equal, count = _replicas(self.run, self.record, every)
        return Ending(
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


def _replicas(run: RunFolder, record: Record, every: int) -> tuple[bool | None, int]:
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
