"""Soaks: a training per sync mode under a random fault every few seconds, judged against a short one without faults."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from shoal.cluster.lab import registry
from shoal.cluster.lab.cgroup import read_groups
from shoal.config.presets import did_you_mean
from shoal.config.schema import SyncConfig
from shoal.errors import Interrupted, RunFailed, ShoalError, UsageError
from shoal.launch.found import find
from shoal.runfolder import RunFolder, write_atomically
from shoal.trials.chaos.ground import Ground, keep_checkpoints, opened
from shoal.trials.chaos.inject import Injector, Silent
from shoal.trials.chaos.leaks import Sample, growth, sample
from shoal.trials.chaos.plan import SOAK_KINDS, Injection, SoakBlock, SoakFault, expand, is_due, plan_blocks
from shoal.trials.chaos.record import Record
from shoal.trials.chaos.replicas import compare_told
from shoal.trials.chaos.session import POLL_S, find_wrong
from shoal.trials.chaos.soakjudge import (
    FaultOutcome,
    ModeResult,
    SoakResult,
    broken_off,
    judge_fault,
    judge_mode,
    judge_soak,
)
from shoal.trials.chaos.spec import Scenario
from shoal.trials.chaos.watch import Watch
from shoal.trials.levers import parse_lever
from shoal.trials.stopping import Outcome, end_processes, stop
from shoal.trials.training import train_new

FIGURES = "soak.json"
ALL = "all"
# Every value of `--sync` that trains in another way; `auto` chooses one of them.
SYNC_MODES = ("ddp", "stock", "accumulate", "local", "diloco", "streaming")
_MODES_TEXT = f"{', '.join(SYNC_MODES)}, ddp+int8, {ALL}"
_SAMPLE_S = 5.0
_START_S = 300.0
# A guess, for the time that is left: a lab, two starts of a training, and its end.
_SETUP_S = 30.0
# A rank is started again after 3 s at most, and imports torch: two at once on two busy cores took 68 s.
_BACK_S = 180.0
_NOT_BACK = f"not every node was back after {_BACK_S:.0f} s"
_STOP_S = 30.0
_FIRST_STEP = 20
_DISK_MB = 32
_DIGEST_EVERY = 20
_REFERENCE_S = 60.0
# A flat learning rate: a run that is stopped somewhere can be compared with another one at the same step.
_TRAINING: dict[str, dict[str, Any]] = {
    "train": {"min_lr_fraction": 1.0, "checkpoint_every": 200, "lr": 1e-3},
    # More ranks are killed in minutes than an agent would put up with elsewhere.
    "members": {"digest_every": _DIGEST_EVERY, "restarts": 1_000},
}


@dataclass(frozen=True)
class SoakOrder:
    """`sync` are the modes that take turns, as `shoal levers` spells them: diloco, ddp+int8. `kinds` of faults are
    keys of `SOAK_KINDS`."""

    on: str
    nodes: int
    minutes: float
    every_s: float
    seed: int
    sync: tuple[str, ...] = ("ddp",)
    kinds: tuple[str, ...] = tuple(SOAK_KINDS)

    def scenario(self, sync: str) -> Scenario:
        """The training of one mode. Its one step only makes it a scenario: the faults are drawn."""
        disk_mb = _DISK_MB if any(SOAK_KINDS[kind].needs_disk for kind in self.kinds) else None
        return Scenario.model_validate(
            {
                "name": "soak",
                "row": 28,
                "text": "soak",
                "nodes": self.nodes,
                "disk_mb": disk_mb,
                "training": {**_TRAINING, "sync": parse_lever(sync)},
                "steps": [{"do": "heal"}],
            }
        )

    def blocks(self) -> list[SoakBlock]:
        return plan_blocks(self.minutes, self.every_s, self.seed, self.nodes, self.sync, self.kinds)

    def reference_s(self, faults: int) -> float:
        """How long the run without faults may take: a third of the faulty one and a minute at most, and long enough
        to reach beyond the first fault."""
        return max(1.5 * self.every_s + 5.0, min(_REFERENCE_S, faults * self.every_s / 3))


@dataclass(frozen=True)
class SoakStatus:
    """What a soak does at this moment. `faults` and `planned` count those of all modes."""

    sync: str
    mode: int
    modes: int
    faults: int
    planned: int
    doing: str
    step: int
    elapsed_s: float
    remaining_s: float


class SoakDisplay(Protocol):
    def status(self, status: SoakStatus) -> None: ...
    def fault(self, sync: str, number: int, planned: int, outcome: FaultOutcome) -> None: ...
    def mode(self, result: ModeResult) -> None: ...


def read_modes(words: Sequence[str]) -> tuple[str, ...]:
    """`--sync` as given, checked before anything is started: `all`, or what `shoal levers` understands."""
    modes = [mode for word in words for mode in (SYNC_MODES if word == ALL else (word,))]
    if len(set(modes)) < len(modes):
        raise UsageError("--sync names a mode twice", why=f"it says {', '.join(modes)}", fix="name each mode once")
    for mode in modes:
        sync = parse_lever(mode)
        try:
            SyncConfig(**sync)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UsageError(f"--sync {mode} cannot be trained", why=why, fix=f"use one of: {_MODES_TEXT}") from None
    return tuple(modes)


def read_kinds(words: Sequence[str]) -> tuple[str, ...]:
    """`--fault` as given; without, every kind that can be injected here."""
    for word in words:
        if word not in SOAK_KINDS:
            why = did_you_mean(word, SOAK_KINDS)
            raise UsageError(f"there is no fault {word!r}", why=why, fix=f"use one of: {', '.join(SOAK_KINDS)}")
        if SOAK_KINDS[word].needs_disk and os.geteuid() != 0:
            raise UsageError(f"--fault {word} needs root, to make a disk that can be filled", fix="leave it out")
    is_possible = {name: not kind.needs_disk or os.geteuid() == 0 for name, kind in SOAK_KINDS.items()}
    return tuple(dict.fromkeys(words)) or tuple(name for name in SOAK_KINDS if is_possible[name])


def soak(order: SoakOrder, out: Path, display: SoakDisplay) -> SoakResult:
    """One mode after another, each in a lab of its own: what a failed one leaves behind does not reach the next.

    The figures so far are in the file after every fault: a soak that is interrupted keeps what was done.
    """
    blocks = order.blocks()
    session = _Session(order, blocks, out, display)
    for block in blocks:
        session.results.append(_soak_mode(session, block))
        session.save()
        display.mode(session.results[-1])
    result = session.judged()
    session.save(finished=True)
    return result


@dataclass
class _Session:
    """The soak as a whole: what is done, what is left, and the file that says so."""

    order: SoakOrder
    blocks: Sequence[SoakBlock]
    out: Path
    display: SoakDisplay
    results: list[ModeResult] = field(default_factory=list)
    # Of the mode that is being soaked.
    outcomes: list[FaultOutcome] = field(default_factory=list)
    # How much later than planned each mode is, because nodes had to be waited for.
    late_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def planned(self) -> int:
        return sum(len(block.faults) for block in self.blocks)

    def judged(self) -> SoakResult:
        return judge_soak(self.results, self.planned)

    def add(self, block: SoakBlock, outcome: FaultOutcome) -> None:
        self.outcomes.append(outcome)
        self.save()
        self.display.fault(block.sync, len(self.outcomes), len(block.faults), outcome)

    def show(self, block: SoakBlock, doing: str, step: int, left_s: float) -> None:
        """`left_s`: what this mode still takes; the later ones take as long as planned, and as late as so far."""
        number = self.blocks.index(block)
        done = sum(len(result.faults) for result in self.results) + len(self.outcomes)
        late_s = sum(self.late_s.values()) / done if done else 0.0
        later = sum(
            _SETUP_S + self.order.reference_s(len(each.faults)) + len(each.faults) * (self.order.every_s + late_s)
            for each in self.blocks[number + 1 :]
        )
        status = SoakStatus(
            sync=block.sync,
            mode=number + 1,
            modes=len(self.blocks),
            faults=done,
            planned=self.planned,
            doing=doing,
            step=step,
            elapsed_s=time.monotonic() - self._began,
            remaining_s=left_s + (len(block.faults) - len(self.outcomes)) * late_s + later,
        )
        self.display.status(status)

    def save(self, finished: bool = False) -> None:
        """`finished` is false while it goes on, and stays so when it is interrupted."""
        write_atomically(self.out / FIGURES, json.dumps(self.document(finished), indent=2) + "\n")

    def document(self, finished: bool) -> dict[str, Any]:
        return soak_document(self.order, self.judged(), finished, self.under_way())

    def under_way(self) -> ModeResult | None:
        """The mode that has faults and no verdict yet."""
        if len(self.results) == len(self.blocks) or not self.outcomes:
            return None
        block = self.blocks[len(self.results)]
        return ModeResult(sync=block.sync, planned=len(block.faults), faults=list(self.outcomes))


def soak_document(
    order: SoakOrder, result: SoakResult, finished: bool = True, under_way: ModeResult | None = None
) -> dict[str, Any]:
    """What `--json` prints and `soak.json` holds. A mode without assertions has no verdict yet."""
    modes = [*result.modes, *([under_way] if under_way else [])]
    return {
        "soak": asdict(order),
        "finished": finished,
        "ok": finished and result.ok,
        "planned": sum(len(block.faults) for block in order.blocks()),
        "injected": sum(len(mode.faults) for mode in modes),
        "survived": sum(mode.survived for mode in modes),
        "assertions": [assertion.model_dump(mode="json") for assertion in result.assertions] if finished else [],
        "modes": [
            {
                "ok": mode.ok,
                "survived": mode.survived,
                "skipped": mode.skipped,
                **mode.model_dump(mode="json"),
                "faults": [{**fault.model_dump(mode="json"), "ok": fault.ok} for fault in mode.faults],
            }
            for mode in modes
        ],
    }


def _soak_mode(session: _Session, block: SoakBlock) -> ModeResult:
    """The run without faults first, then the faulty one, in the same lab. What goes wrong in a training is a verdict
    on its mode; a lab that cannot be built ends the soak."""
    order, number = session.order, session.blocks.index(block)
    session.outcomes = []
    name = f"{number + 1}-{block.sync.replace(':', '-')}"
    began = time.monotonic()
    with opened(order.scenario(block.sync), order.on, session.out, number) as ground:
        lab = ground.need_lab().name
        try:
            reference = _reference(session, block, ground, session.out / f"{name}-reference")
            faulty = _Soaked(session, block, ground, session.out / name)
            try:
                faulty.through()
            finally:
                left = faulty.end()
        except Interrupted:
            raise
        except ShoalError as error:
            trouble = " ".join(filter(None, (error.seen, error.why)))
            return broken_off(block.sync, session.outcomes, len(block.faults), trouble, time.monotonic() - began)
    record = faulty.watch.record
    equal, _ = compare_told(record, _DIGEST_EVERY)
    return judge_mode(
        sync=block.sync,
        record=record,
        outcomes=session.outcomes,
        planned=len(block.faults),
        nodes=order.nodes,
        reference=reference.commits,
        replicas_equal=equal,
        growth=growth(faulty.samples),
        left=(*left, *_traces(lab)),
        exit_code=None if faulty.watch.ended is None else int(faulty.watch.ended["code"]),
        seconds=time.monotonic() - began,
        runs=(str(session.out / name), str(session.out / f"{name}-reference")),
        wrong=find_wrong(faulty.run),
        is_outer=order.scenario(block.sync).config(order.on, seed=0).sync.is_outer,
    )


def _traces(lab: str) -> list[str]:
    """Folders and cgroups of a lab that should be gone."""
    places = [registry.lab_folder(lab), *(group.of_lab(lab) for group in read_groups().all())]
    return [str(path) for path in places if path.exists()]


@dataclass
class _Soaked:
    session: _Session
    block: SoakBlock
    ground: Ground
    folder: Path
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = self.session.order
        self.run = RunFolder(self.folder.resolve())
        self.watch = Watch(self.run)
        self._injector = Injector("soak", self.run, self.ground, random.Random(self.order.seed))
        self._sampled_at = 0.0
        self._began = time.monotonic()
        # How much later than planned everything is by now, because a node had to be waited for.
        self._late_s = 0.0
        self._doing = "starts"

    def through(self) -> None:
        config = self.order.scenario(self.block.sync).config(self.ground.on, seed=self.order.seed)
        train_new(config, self.folder, Silent, detach=True, before=self.ground.before)
        _await_step(self.watch, self.folder, self._look)
        self._began = time.monotonic()
        for number, fault in enumerate(self.block.faults, start=1):
            self._until(self._planned(fault))
            self._doing = f"waits for fault {number}: every node must be back"
            if not self._await_whole():
                self._record(judge_fault(fault, time.time(), time.time(), self.watch.record, _NOT_BACK))
                break
            self._late_s += time.monotonic() - self._planned(fault)
            self._doing = f"fault {number} of {len(self.block.faults)}, {fault.kind}"
            self._record(self._suffer(fault))
            if self.watch.ended:
                break
        self._doing = "waits until every node is back"
        self._await_whole()
        self._await_digest()

    def _record(self, outcome: FaultOutcome) -> None:
        self.session.add(self.block, outcome)

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
        self._doing = "stops"
        self._show()
        hung = ["the run itself, which had to be ended"] if stop(self.run, wait_s=_STOP_S) is Outcome.ENDED else []
        self.watch.poll()
        self._injector.close()
        self.ground.thaw_all()
        left = find(self.run.path)
        end_processes(left)
        keep_checkpoints(self.run, self.ground.disk)
        torn = sorted(path.name for path in self.run.checkpoints.glob(".step-*"))
        return (*hung, *(f"{found.part} on {found.node} ({found.pid})" for found in left), *torn)

    def _await_whole(self) -> bool:
        """Whoever the last fault took has to come back: every fault meets a cluster that is whole, since one that loses
        its last member has nothing left to go on with."""
        deadline = time.monotonic() + _BACK_S
        while self._world() < self.order.nodes and not self.watch.ended and time.monotonic() < deadline:
            self._look()
        return self._world() >= self.order.nodes and not self.watch.ended

    def _await_digest(self) -> None:
        """Until the last generation has compared its replicas once: they are compared every few steps."""
        deadline = time.monotonic() + _BACK_S
        while compare_told(self.watch.record, _DIGEST_EVERY)[0] is None and time.monotonic() < deadline:
            if self.watch.ended:
                return
            self._look()

    def _world(self) -> int:
        """How many train together."""
        commits = self.watch.record.commits
        return len(commits[-1].get("members", ())) if commits else 0

    def _until(self, moment: float) -> None:
        while time.monotonic() < moment and not self.watch.ended:
            self._look()

    def _look(self) -> None:
        self.watch.poll()
        now = time.monotonic()
        if now - self._sampled_at > _SAMPLE_S:
            self._sampled_at = now
            self.samples += sample(self.run.path, self._began, self._world())
        self._show()
        time.sleep(POLL_S)

    def _show(self) -> None:
        self.session.late_s[self.block.sync] = self._late_s
        left_s = (len(self.block.faults) + 1) * self.order.every_s + self._late_s - (time.monotonic() - self._began)
        self.session.show(self.block, self._doing, self.watch.furthest_step, max(0.0, left_s))


def _await_step(watch: Watch, folder: Path, look: Callable[[], None]) -> None:
    deadline = time.monotonic() + _START_S
    while watch.furthest_step < _FIRST_STEP and not watch.ended and time.monotonic() < deadline:
        look()
    if watch.furthest_step < _FIRST_STEP:
        raise RunFailed(
            f"the training to soak did not come to step {_FIRST_STEP} within {_START_S:.0f} s",
            why=str((watch.ended or {}).get("seen", "it is still on its way")),
            fix=f"look at its logs: shoal logs {folder}",
        )


def _reference(session: _Session, block: SoakBlock, ground: Ground, folder: Path) -> Record:
    """The same training without faults, for as long as `SoakOrder.reference_s` says."""
    order, run = session.order, RunFolder(folder.resolve())
    watch = Watch(run)
    takes_s = order.reference_s(len(block.faults))
    whole_s = takes_s + len(block.faults) * order.every_s
    ends_at = time.monotonic() + _START_S + takes_s

    def look() -> None:
        watch.poll()
        left_s = whole_s - max(0.0, takes_s - (ends_at - time.monotonic()))
        session.show(block, "the run without faults, to compare with", watch.furthest_step, left_s)
        time.sleep(POLL_S)

    try:
        train_new(order.scenario(block.sync).config(ground.on, seed=order.seed), folder, Silent, detach=True)
        _await_step(watch, folder, look)
        ends_at = time.monotonic() + takes_s
        while time.monotonic() < ends_at and not watch.ended:
            look()
        stop(run, wait_s=_STOP_S)
    finally:
        end_processes(find(run.path))
    watch.poll()
    return watch.record
