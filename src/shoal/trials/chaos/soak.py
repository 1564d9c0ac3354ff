"""A long run under a random fault every few seconds, beside one that nothing happens to."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import RunFailed, ShoalError
from shoal.launch.found import find
from shoal.runfolder import RunFolder
from shoal.trials.chaos.ground import Ground, opened
from shoal.trials.chaos.inject import Injector, Silent
from shoal.trials.chaos.leaks import Sample, growth, sample
from shoal.trials.chaos.plan import Injection, SoakFault, expand, is_due, plan_soak
from shoal.trials.chaos.record import Record
from shoal.trials.chaos.replicas import compare_told
from shoal.trials.chaos.session import POLL_S, Show
from shoal.trials.chaos.soakjudge import FaultOutcome, SoakResult, judge_fault, judge_soak
from shoal.trials.chaos.spec import Scenario
from shoal.trials.chaos.watch import Watch
from shoal.trials.stopping import Outcome, end_processes, stop
from shoal.trials.training import train_new

_SAMPLE_S = 5.0
_START_S = 120.0
# A rank is started again after 3 s at most, and imports torch.
_BACK_S = 60.0
_NOT_BACK = f"not everybody was back after {_BACK_S:.0f} s"
_DIGEST_EVERY = 20
# A flat learning rate: a run that is stopped somewhere can be compared with another one at the same step.
_TRAINING: dict[str, dict[str, Any]] = {
    "train": {"min_lr_fraction": 1.0, "checkpoint_every": 200, "lr": 1e-3},
    # More ranks are killed in minutes than an agent would put up with elsewhere.
    "members": {"digest_every": _DIGEST_EVERY, "restarts": 1_000},
}


@dataclass(frozen=True)
class SoakOrder:
    on: str
    nodes: int
    minutes: float
    every_s: float
    seed: int

    @property
    def scenario(self) -> Scenario:
        """The training that it is done to; its steps are drawn later."""
        heal = {"do": "heal"}
        return Scenario.model_validate(
            {"name": "soak", "row": 28, "text": "soak", "nodes": self.nodes, "training": _TRAINING, "steps": [heal]}
        )


def soak(order: SoakOrder, out: Path, show: Show) -> SoakResult:
    """The faulty run first: how far it comes says how long the other one has to be."""
    faults = plan_soak(order.minutes, order.every_s, order.seed, order.nodes)
    began = time.monotonic()
    with opened(order.scenario, order.on, out, 0) as ground:
        faulty = _Soaked(order, ground, out / "faulty", show)
        try:
            outcomes = faulty.through(faults)
        finally:
            left = faulty.end()
    took_s = time.monotonic() - began
    reference = _reference(order, out / "reference", faulty.watch.furthest_step, took_s, show)
    equal, _ = compare_told(faulty.watch.record, _DIGEST_EVERY)
    return judge_soak(
        record=faulty.watch.record,
        outcomes=outcomes,
        planned=len(faults),
        nodes=order.nodes,
        reference=reference.commits,
        replicas_equal=equal,
        growth=growth(faulty.samples),
        left=left,
        exit_code=None if faulty.watch.ended is None else int(faulty.watch.ended["code"]),
        runs=(str(out / "faulty"), str(out / "reference")),
    )


@dataclass
class _Soaked:
    order: SoakOrder
    ground: Ground
    folder: Path
    show: Show
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = RunFolder(self.folder.resolve())
        self.watch = Watch(self.run)
        self._injector = Injector("soak", self.run, self.ground, random.Random(self.order.seed))
        self._sampled_at = 0.0
        self._began = time.monotonic()
        # How much later than planned everything is by now, because somebody had to be waited for.
        self._late_s = 0.0

    def through(self, faults: Sequence[SoakFault]) -> list[FaultOutcome]:
        config = self.order.scenario.config(self.ground.on, seed=self.order.seed)
        train_new(config, self.folder, Silent, detach=True)
        self._await_step(20)
        self._began = time.monotonic()
        outcomes: list[FaultOutcome] = []
        for number, fault in enumerate(faults, start=1):
            self._until(self._planned(fault))
            self.show(f"{number} of {len(faults)}: waits until everybody is back")
            if not self._await_whole():
                outcomes.append(judge_fault(fault, time.time(), time.time(), self.watch.record, _NOT_BACK))
                break
            self._late_s += time.monotonic() - self._planned(fault)
            self.show(f"{number} of {len(faults)}: {fault.kind}, step {self.watch.furthest_step}")
            outcomes.append(self._suffer(fault))
            if self.watch.ended:
                break
        self._await_whole()
        return outcomes

    def _planned(self, fault: SoakFault) -> float:
        return self._began + self._late_s + fault.at_s

    def _suffer(self, fault: SoakFault) -> FaultOutcome:
        """Every action of the fault, then the time to the next one, which is what it has to recover in."""
        began, skipped, last = time.time(), "", time.monotonic()
        for action in expand(fault.steps):
            while not is_due(Injection(action), 0, None, time.monotonic() - last):
                self._look()
            try:
                self.watch.record.injected.append(self._injector.inject(action))
            except ShoalError as error:
                skipped = error.seen
            last = time.monotonic()
        undone = time.time()
        self._until(self._planned(fault) + 0.9 * self.order.every_s)
        return judge_fault(fault, began, undone, self.watch.record, skipped)

    def end(self) -> tuple[str, ...]:
        """Asked to stop, then looked after; what should have gone by itself is named and ended."""
        self.show("stops")
        hung = ["the run itself, which had to be ended"] if stop(self.run, wait_s=30.0) is Outcome.ENDED else []
        self.watch.poll()
        self._injector.close()
        left = find(self.run.path)
        end_processes(left)
        return (*hung, *(f"{found.part} on {found.node} ({found.pid})" for found in left))

    def _await_whole(self) -> bool:
        """Whoever the last fault took has to come back: every fault meets a cluster that is whole, since one that loses
        its last member has nothing left to go on with."""
        deadline = time.monotonic() + _BACK_S
        while self._world() < self.order.nodes and not self.watch.ended and time.monotonic() < deadline:
            self._look()
        return self._world() >= self.order.nodes and not self.watch.ended

    def _world(self) -> int:
        """How many train together."""
        commits = self.watch.record.commits
        return len(commits[-1].get("members", ())) if commits else 0

    def _await_step(self, step: int) -> None:
        deadline = time.monotonic() + _START_S
        while self.watch.furthest_step < step and not self.watch.ended and time.monotonic() < deadline:
            self._look()
        if self.watch.furthest_step < step:
            raise RunFailed(
                f"the training to soak did not come to step {step} within {_START_S:.0f} s",
                why=str((self.watch.ended or {}).get("seen", "it is still on its way")),
                fix=f"look at its logs: shoal logs {self.folder}",
            )

    def _until(self, moment: float) -> None:
        while time.monotonic() < moment and not self.watch.ended:
            self._look()

    def _look(self) -> None:
        self.watch.poll()
        now = time.monotonic()
        if now - self._sampled_at > _SAMPLE_S:
            self._sampled_at = now
            self.samples += sample(self.run.path, self._began, self._world())
        time.sleep(POLL_S)


def _reference(order: SoakOrder, folder: Path, steps: int, most_s: float, show: Show) -> Record:
    """The same training without faults, to the step that the other one came to; it need not be faster than that."""
    run = RunFolder(folder.resolve())
    watch = Watch(run)
    deadline = time.monotonic() + most_s + _START_S
    with opened(order.scenario, order.on, folder.parent, 1) as ground:
        try:
            train_new(order.scenario.config(ground.on, seed=order.seed), folder, Silent, detach=True)
            while watch.furthest_step <= steps and not watch.ended and time.monotonic() < deadline:
                watch.poll()
                show(f"without faults: step {watch.furthest_step} of {steps}")
                time.sleep(POLL_S)
            stop(run, wait_s=30.0)
        finally:
            end_processes(find(run.path))
    watch.poll()
    return watch.record
