"""Soak: train each sync mode under a random fault every few seconds; compare with a short run without faults."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from shoal.cluster.lab import ShoalLab
from shoal.config.presets import did_you_mean
from shoal.config.sync_choice import TRAINED_METHODS as SYNC_MODES
from shoal.control.processes import find_processes
from shoal.errors import Interrupted, RunFailed, ShoalError, UsageError
from shoal.events import Event
from shoal.records.commit_log import check_ledger
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.manage import StopResult, end_processes, stop_run
from shoal.tools.chaos.actions import describe
from shoal.tools.chaos.growth import LEAST_S, Growth, ResourceSample, growth, sample_resources
from shoal.tools.chaos.inject import Injector
from shoal.tools.chaos.judge import Assertion, compare_digests, count_stale, longest_pause
from shoal.tools.chaos.run import POLL_S, ScenarioWatch, Script, find_errors, start_run
from shoal.tools.chaos.scenario import ChaosScenario, Injection, ScenarioRecord, is_due, read_sync
from shoal.tools.chaos.soak_plan import SOAK_KINDS, SoakBlock, SoakFault, plan_blocks
from shoal.tools.chaos.testbed import TestBed, keep_checkpoints, opened
from shoal.units import format_duration, pluralize

FIGURES = "soak.json"
ALL = "all"
_MODES_TEXT = f"{', '.join(SYNC_MODES)}, ddp+int8, {ALL}"
_SAMPLE_S = 5.0
_START_S = 300.0
# An estimate, for the remaining time: a lab, two starts of a training, and its end.
_SETUP_S = 30.0
# A rank is started again after 3 s at most, and imports torch: two at once on two busy cores took 68 s.
_BACK_S = 180.0
_NOT_BACK = f"not every node trained again after {_BACK_S:.0f} s"
_STOP_S = 30.0
_FIRST_STEP = 20
_DISK_MB = 32
_DIGEST_EVERY = 20
_REFERENCE_S = 60.0
# A constant learning rate: a run that is stopped at any step can be compared with another at the same step.
_TRAINING: dict[str, dict[str, Any]] = {
    "train": {"min_lr_fraction": 1.0, "checkpoint_every": 200, "lr": 1e-3},
    # A soak kills more ranks in minutes than an agent restarts by default.
    "members": {"digest_every": _DIGEST_EVERY, "restarts": 1_000},
}
# Other world sizes sum in another order; after hundreds of steps the losses differ by noise of this size.
TOLERANCE = 0.05
# Where replicas diverge between exchanges, a killed rank loses its steps since the last one, and a smaller world learns
# faster for a while, since each rank has more of the batch. Only a higher loss counts there.
OUTER_TOLERANCE = 0.15
_WINDOW_STEPS = 50
_STOPPED = 130
# What a message suggests to judge growth: in half an hour some agent and some rank escape the faults for long enough.
LONG_ENOUGH_MINUTES = 30
# A leak grows with every membership change, several times a minute.
_FILES_A_MINUTE = 1.0
_RSS_MB_A_MINUTE = 5.0


class FaultOutcome(BaseModel):
    """What one fault of a soak did."""

    model_config = ConfigDict(frozen=True)

    kind: str
    does: str
    step: int  # the furthest when it was injected
    commits: int
    pause_s: float | None  # the longest time without a step until the next fault
    ledger_ok: bool
    skipped: str = ""  # why it could not be injected, e.g. its target had not recovered from an earlier one

    @property
    def ok(self) -> bool:
        return self.commits > 0 and self.ledger_ok and not self.skipped


class ModeResult(BaseModel):
    """The soak of one sync mode."""

    model_config = ConfigDict(frozen=True)

    sync: str
    planned: int
    faults: list[FaultOutcome]
    steps: int = 0
    reconfigurations: int = 0
    # Means over the 50 consecutive steps, of those that both runs have, where they differ most.
    loss: float | None = None
    reference_loss: float | None = None
    compared_steps: int = 0  # the last step that both runs have
    compared_faults: int = 0  # faults injected before it
    growth: list[Growth] = []  # empty when no process lived long enough
    assertions: list[Assertion] = []
    seconds: float = 0.0
    runs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.assertions) and all(assertion.ok for assertion in self.assertions)

    @property
    def survived(self) -> int:
        return sum(fault.ok for fault in self.faults)

    @property
    def skipped(self) -> int:
        return sum(bool(fault.skipped) for fault in self.faults)


class SoakResult(BaseModel):
    """All modes of a soak, and what must hold for them together."""

    model_config = ConfigDict(frozen=True)

    modes: list[ModeResult]
    assertions: list[Assertion]
    not_judged: str = ""  # what the soak was too short for, and how to judge it

    @property
    def ok(self) -> bool:
        return all(assertion.ok for assertion in self.assertions)


@dataclass(frozen=True)
class SoakOrder:
    """The options of a soak."""

    on: str
    nodes: int
    minutes: float
    every_s: float
    seed: int
    sync: tuple[str, ...] = ("ddp",)  # the modes in turn, spelled as for `shoal bench levers`: diloco, ddp+int8
    kinds: tuple[str, ...] = tuple(SOAK_KINDS)
    script: Script = ()  # what is trained; empty: shoal's own GPT

    def scenario(self, sync: str) -> ChaosScenario:
        """Return the training of one mode as a scenario. Its single step is a placeholder: the faults are drawn."""
        disk_mb = _DISK_MB if any(SOAK_KINDS[kind].needs_disk for kind in self.kinds) else None
        return ChaosScenario.model_validate(
            {
                "name": "soak",
                "row": 28,
                "text": "soak",
                "nodes": self.nodes,
                "disk_mb": disk_mb,
                "training": {**_TRAINING, "sync": read_sync(sync)},
                "steps": [{"do": "heal"}],
            }
        )

    def blocks(self) -> list[SoakBlock]:
        return plan_blocks(self.minutes, self.every_s, self.seed, self.nodes, self.sync, self.kinds)

    def reference_s(self, faults: int) -> float:
        """Return how long the run without faults takes: a third of the faulty one, at most a minute.

        It must be long enough to reach beyond the first fault.
        """
        return max(1.5 * self.every_s + 5.0, min(_REFERENCE_S, faults * self.every_s / 3))


@dataclass(frozen=True)
class SoakStatus:
    """What a soak does now. `faults` and `planned` count those of all modes."""

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
    """Check `--sync` before anything is started: `all`, or what `shoal bench levers` accepts."""
    modes = [mode for word in words for mode in (SYNC_MODES if word == ALL else (word,))]
    if len(set(modes)) < len(modes):
        raise UsageError("--sync names a mode twice", why=f"it says {', '.join(modes)}", fix="name each mode once")
    for mode in modes:
        read_sync(mode)
    return tuple(modes)


def read_kinds(words: Sequence[str], script: Script = ()) -> tuple[str, ...]:
    """Check `--fault`; without it, return every kind that can be injected here."""
    for word in words:
        if word not in SOAK_KINDS:
            why = did_you_mean(word, SOAK_KINDS)
            raise UsageError(f"there is no fault {word!r}", why=why, fix=f"use one of: {', '.join(SOAK_KINDS)}")
        if SOAK_KINDS[word].needs_disk and os.geteuid() != 0:
            raise UsageError(f"--fault {word} needs root, to make a disk that can be filled", fix="leave it out")
        if SOAK_KINDS[word].rejoins and script:
            raise UsageError(
                f"--fault {word} does not go with --script",
                why="a restarted node cannot join the run of a script",
                fix="leave it out; a node that is lost for good: shoal chaos run kill-node --script …",
            )
    is_possible = {
        name: (not kind.needs_disk or os.geteuid() == 0) and not (kind.rejoins and script)
        for name, kind in SOAK_KINDS.items()
    }
    return tuple(dict.fromkeys(words)) or tuple(name for name in SOAK_KINDS if is_possible[name])


def soak(order: SoakOrder, out: Path, display: SoakDisplay) -> SoakResult:
    """Soak one mode after another, each in its own lab, so that a failed one cannot affect the next.

    The file has the figures after every fault: a soak that is interrupted keeps them.
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
    """The progress of the whole soak, and its file."""

    order: SoakOrder
    blocks: Sequence[SoakBlock]
    out: Path
    display: SoakDisplay
    results: list[ModeResult] = field(default_factory=list)
    outcomes: list[FaultOutcome] = field(default_factory=list)  # of the current mode
    late_s: dict[str, float] = field(default_factory=dict)  # delay of each mode, from waiting for nodes

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
        """Show the status. `left_s` is for this mode; the later ones are estimated by planned time and mean delay."""
        number = self.blocks.index(block)
        done = sum(len(result.faults) for result in self.results) + len(self.outcomes)
        late_s = sum(self.late_s.values()) / done if done else 0.0
        later_s = sum(
            _SETUP_S + self.order.reference_s(len(later.faults)) + len(later.faults) * (self.order.every_s + late_s)
            for later in self.blocks[number + 1 :]
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
            remaining_s=left_s + (len(block.faults) - len(self.outcomes)) * late_s + later_s,
        )
        self.display.status(status)

    def save(self, finished: bool = False) -> None:
        """Write the file. `finished` is false during the soak, and stays so when it is interrupted."""
        write_atomically(self.out / FIGURES, json.dumps(self.document(finished), indent=2) + "\n")

    def document(self, finished: bool) -> dict[str, Any]:
        return soak_document(self.order, self.judged(), finished, self.under_way())

    def under_way(self) -> ModeResult | None:
        """Return the mode that has faults but no verdict yet."""
        if len(self.results) == len(self.blocks) or not self.outcomes:
            return None
        block = self.blocks[len(self.results)]
        return ModeResult(sync=block.sync, planned=len(block.faults), faults=list(self.outcomes))


def soak_document(
    order: SoakOrder, result: SoakResult, finished: bool = True, under_way: ModeResult | None = None
) -> dict[str, Any]:
    """Return the content of `--json` and `soak.json`. A mode without assertions has no verdict yet."""
    modes = [*result.modes, *([under_way] if under_way else [])]
    return {
        "soak": asdict(order),
        "finished": finished,
        "ok": finished and result.ok,
        "planned": sum(len(block.faults) for block in order.blocks()),
        "injected": sum(len(mode.faults) for mode in modes),
        "survived": sum(mode.survived for mode in modes),
        "assertions": [assertion.model_dump(mode="json") for assertion in result.assertions] if finished else [],
        "not_judged": result.not_judged if finished else "",
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
    """Run without faults first, then with faults, in the same lab.

    A failed training is the verdict on its mode; a lab that cannot be built ends the soak.
    """
    order, number = session.order, session.blocks.index(block)
    session.outcomes = []
    name = f"{number + 1}-{block.sync.replace(':', '-')}"
    began = time.monotonic()
    with opened(order.scenario(block.sync), order.on, session.out, number) as testbed:
        lab = testbed.need_lab().name
        try:
            reference = _reference(session, block, testbed, session.out / f"{name}-reference")
            faulty = _FaultyRun(session, block, testbed, session.out / name)
            try:
                faulty.play()
            finally:
                left = faulty.end()
        except Interrupted:
            raise
        except ShoalError as error:
            trouble = "; ".join(filter(None, (error.seen, error.why)))
            return broken_off(block.sync, session.outcomes, len(block.faults), trouble, time.monotonic() - began)
    record = faulty.watch.record
    equal, _ = compare_digests(record, _DIGEST_EVERY)
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
        errors=find_errors(faulty.run),
        is_outer=order.scenario(block.sync).config(order.on, seed=0).sync.is_outer,
        judges_loss=not order.script,
    )


def _traces(lab: str) -> list[str]:
    """Return folders and cgroups of a lab that should be gone."""
    return [str(path) for path in ShoalLab(lab).places if path.exists()]


@dataclass
class _FaultyRun:
    """The training of one mode, under faults."""

    session: _Session
    block: SoakBlock
    testbed: TestBed
    folder: Path
    samples: list[ResourceSample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = self.session.order
        self.run = RunFolder(self.folder.resolve())
        self.watch = ScenarioWatch(self.run)
        self._injector = Injector("soak", self.run, self.testbed, random.Random(self.order.seed))
        self._sampled_at = 0.0
        self._began = time.monotonic()
        self._late_s = 0.0  # delay so far, from waiting for nodes
        self._doing = "starts"

    def play(self) -> None:
        order, scenario = self.order, self.order.scenario(self.block.sync)
        start_run(scenario, order.script, self.testbed.on, self.folder, order.seed, self.testbed.before)
        _await_step(self.watch, self.folder, self._poll)
        self._began = time.monotonic()
        for number, fault in enumerate(self.block.faults, start=1):
            self._poll_until(self._planned_at(fault))
            self._doing = f"waits for fault {number}: every node must train again"
            if not self._await_all_nodes():
                self._add(judge_fault(fault, time.time(), time.time(), self.watch.record, _NOT_BACK))
                break
            self._late_s += time.monotonic() - self._planned_at(fault)
            self._doing = f"fault {number} of {len(self.block.faults)}, {fault.kind}"
            self._add(self._inject(fault))
            if self.watch.ended:
                break
        self._doing = "waits until every node trains again"
        self._await_all_nodes()
        self._await_digest()

    def _add(self, outcome: FaultOutcome) -> None:
        self.session.add(self.block, outcome)

    def _planned_at(self, fault: SoakFault) -> float:
        return self._began + self._late_s + fault.at_s

    def _inject(self, fault: SoakFault) -> FaultOutcome:
        """Inject every action of the fault, then wait until shortly before the next one: the time for recovery."""
        began, skipped, last = time.time(), "", time.monotonic()
        for action in (part for step in fault.steps for part in step.parts()):
            while not is_due(Injection(action), None, time.monotonic() - last):
                self._poll()
            try:
                self.watch.record.injected.append(self._injector.inject(action))
            except ShoalError as error:
                skipped = error.seen
            last = time.monotonic()
        undone = time.time()
        self._poll_until(self._planned_at(fault) + 0.9 * self.order.every_s)
        return judge_fault(fault, began, undone, self.watch.record, skipped)

    def end(self) -> tuple[str, ...]:
        """Stop the run; return and end what should have ended by itself."""
        self._doing = "stops"
        self._show()
        hung = (
            ["the run itself, which had to be killed"] if stop_run(self.run, wait_s=_STOP_S) is StopResult.ENDED else []
        )
        self.watch.poll()
        self._injector.close()
        self.testbed.thaw_all()
        left = find_processes(self.run.path)
        end_processes(left)
        keep_checkpoints(self.run, self.testbed.disk)
        torn = sorted(path.name for path in self.run.checkpoints.glob(".step-*"))
        return (*hung, *(f"{process.part} on {process.node} ({process.pid})" for process in left), *torn)

    def _await_all_nodes(self) -> bool:
        """Wait until all nodes train again: a cluster that loses its last member cannot continue."""
        deadline = time.monotonic() + _BACK_S
        while self._world() < self.order.nodes and not self.watch.ended and time.monotonic() < deadline:
            self._poll()
        return self._world() >= self.order.nodes and not self.watch.ended

    def _await_digest(self) -> None:
        """Wait until the last generation has compared its replicas once, which happens every few steps."""
        deadline = time.monotonic() + _BACK_S
        while compare_digests(self.watch.record, _DIGEST_EVERY)[0] is None and time.monotonic() < deadline:
            if self.watch.ended:
                return
            self._poll()

    def _world(self) -> int:
        commits = self.watch.record.commits
        return len(commits[-1].get("members", ())) if commits else 0

    def _poll_until(self, moment: float) -> None:
        while time.monotonic() < moment and not self.watch.ended:
            self._poll()

    def _poll(self) -> None:
        self.watch.poll()
        now = time.monotonic()
        if now - self._sampled_at > _SAMPLE_S:
            self._sampled_at = now
            self.samples += sample_resources(self.run.path, self._began, self._world())
        self._show()
        time.sleep(POLL_S)

    def _show(self) -> None:
        self.session.late_s[self.block.sync] = self._late_s
        left_s = (len(self.block.faults) + 1) * self.order.every_s + self._late_s - (time.monotonic() - self._began)
        self.session.show(self.block, self._doing, self.watch.furthest_step, max(0.0, left_s))


def _await_step(watch: ScenarioWatch, folder: Path, poll: Callable[[], None]) -> None:
    deadline = time.monotonic() + _START_S
    while watch.furthest_step < _FIRST_STEP and not watch.ended and time.monotonic() < deadline:
        poll()
    if watch.furthest_step < _FIRST_STEP:
        raise RunFailed(
            f"the training to soak did not reach step {_FIRST_STEP} within {_START_S:.0f} s",
            why=str((watch.ended or {}).get("seen", "it is still starting")),
            fix=f"look at its logs: shoal logs {folder}",
        )


def _reference(session: _Session, block: SoakBlock, testbed: TestBed, folder: Path) -> ScenarioRecord:
    """Run the same training without faults for `SoakOrder.reference_s`."""
    order, run = session.order, RunFolder(folder.resolve())
    watch = ScenarioWatch(run)
    takes_s = order.reference_s(len(block.faults))
    whole_s = takes_s + len(block.faults) * order.every_s
    ends_at = time.monotonic() + _START_S + takes_s

    def poll() -> None:
        watch.poll()
        left_s = whole_s - max(0.0, takes_s - (ends_at - time.monotonic()))
        session.show(block, "the run without faults, to compare with", watch.furthest_step, left_s)
        time.sleep(POLL_S)

    try:
        start_run(order.scenario(block.sync), order.script, testbed.on, folder, order.seed)
        _await_step(watch, folder, poll)
        ends_at = time.monotonic() + takes_s
        while time.monotonic() < ends_at and not watch.ended:
            poll()
        stop_run(run, wait_s=_STOP_S)
    finally:
        end_processes(find_processes(run.path))
    watch.poll()
    return watch.record


def judge_fault(fault: SoakFault, began: float, undone: float, record: ScenarioRecord, skipped: str) -> FaultOutcome:
    """Judge one fault. Only commits after its last action (`undone`) show that training continues."""
    steps = sorted((float(event["time"]), int(event["step"])) for event in record.rank_events("step"))
    return FaultOutcome(
        kind=fault.kind,
        does=", then ".join(map(describe, fault.steps)),
        step=max((step for at, step in steps if at <= began), default=0),
        commits=sum("step" in commit and float(commit["time"]) > undone for commit in record.commits),
        pause_s=longest_pause([at for at, _ in steps], began),
        ledger_ok=check_ledger(record.commits).ok,
        skipped=skipped,
    )


def judge_mode(
    sync: str,
    record: ScenarioRecord,
    outcomes: Sequence[FaultOutcome],
    planned: int,
    nodes: int,
    reference: Sequence[Event],
    replicas_equal: bool | None,
    growth: Sequence[Growth],
    left: Sequence[str],
    exit_code: int | None,
    seconds: float,
    runs: tuple[str, ...],
    errors: Sequence[str],
    is_outer: bool = False,
    judges_loss: bool = True,
) -> ModeResult:
    """Judge one mode. `errors` are those of `shoal verify`; `is_outer`: replicas diverge between exchanges.

    The loss of a user's script is shown but not judged: its scale is unknown, and BatchNorm sees other parts of the
    batch in a smaller world.
    """
    loss, reference_loss = compare_losses(record.commits, reference, above_only=is_outer)
    survived, skipped = sum(outcome.ok for outcome in outcomes), sum(bool(outcome.skipped) for outcome in outcomes)
    ledger, stale = check_ledger(record.commits), count_stale(record.commits)
    compared = last_common(record.commits, reference)
    compared_faults = sum(outcome.step < compared for outcome in outcomes)
    world = len(record.commits[-1].get("members", ())) if record.commits else 0
    described = {True: "yes", False: "no", None: "nothing to compare"}
    assertions = [
        Assertion(
            name="went on after every fault",
            ok=survived == planned,
            seen=f"{survived} of {planned}" + (f"; {skipped} could not be injected" if skipped else ""),
        ),
        Assertion(name=f"exit code {_STOPPED}", ok=exit_code == _STOPPED, seen=str(exit_code)),
        Assertion(name="every node trains at the end", ok=world == nodes, seen=f"{world} of {nodes}"),
        Assertion(name="every sample used once", ok=ledger.ok, seen=described[ledger.ok]),
        Assertion(name="shoal verify passes", ok=not errors, seen="; ".join(errors) or "yes"),
        Assertion(name="no stale commits", ok=stale == 0, seen=f"{stale}"),
        Assertion(name="replicas equal to the bit", ok=replicas_equal is True, seen=described[replicas_equal]),
        *([_judge_loss(loss, reference_loss, compared, compared_faults, is_outer)] if judges_loss else ()),
        *(_judge_growth(name, most, growth) for name, most in _GROWTH_LIMITS if growth),
        Assertion(name="nothing left", ok=not left, seen=", ".join(left) or "nothing"),
    ]
    return ModeResult(
        sync=sync,
        planned=planned,
        faults=list(outcomes),
        steps=record.furthest_step,
        reconfigurations=len({event["generation"] for event in record.rank_events("membership")} - {None}),
        loss=loss,
        reference_loss=reference_loss,
        compared_steps=compared,
        compared_faults=compared_faults,
        growth=list(growth),
        assertions=assertions,
        seconds=round(seconds, 1),
        runs=runs,
    )


def _judge_loss(
    loss: float | None, reference_loss: float | None, compared: int, compared_faults: int, is_outer: bool
) -> Assertion:
    """Judge the loss against that of the run without faults, over the first `compared` steps of both."""
    difference = None if loss is None or reference_loss is None else loss - reference_loss
    if is_outer:
        furthest = "it is most above"
        name = f"loss at most {OUTER_TOLERANCE} above the run without faults"
        is_near = difference is not None and difference <= OUTER_TOLERANCE
    else:
        furthest = "they differ most"
        name = f"loss within {TOLERANCE} of the run without faults"
        is_near = difference is not None and abs(difference) <= TOLERANCE
    return Assertion(
        name=name,
        # Steps before the first fault are equal in any case and prove nothing.
        ok=is_near and compared >= _WINDOW_STEPS and compared_faults > 0,
        seen=f"{loss} and {reference_loss} over the {_WINDOW_STEPS} steps where {furthest}, of steps 1 to "
        f"{compared}, with {pluralize(compared_faults, 'fault')}",
    )


def broken_off(sync: str, outcomes: Sequence[FaultOutcome], planned: int, trouble: str, seconds: float) -> ModeResult:
    """Return the result of a mode whose training could not be started or watched to its end."""
    failed = Assertion(name="the training starts and can be watched to its end", ok=False, seen=trouble)
    return ModeResult(sync=sync, planned=planned, faults=list(outcomes), assertions=[failed], seconds=round(seconds, 1))


def judge_soak(modes: Sequence[ModeResult], planned: int) -> SoakResult:
    """Judge all modes together. Growth of an agent and of a rank must have been judged in at least one of them.

    Otherwise the soak is too short to detect a leak: that is not a failure, but must not read as if there were none.
    """
    survived, held = sum(mode.survived for mode in modes), [mode.sync for mode in modes if mode.ok]
    parts = {"agent" if process.part == "agent" else "rank" for mode in modes for process in mode.growth}
    missing = [mode.sync for mode in modes if not mode.ok]
    return SoakResult(
        modes=list(modes),
        assertions=[
            Assertion(name="went on after every fault", ok=survived == planned, seen=f"{survived} of {planned}"),
            Assertion(
                name="every sync mode held",
                ok=bool(held) and not missing,
                seen=(", ".join(held) or "none") + (f"; not held: {', '.join(missing)}" if missing else ""),
            ),
        ],
        not_judged=_growth_not_judged({"agent", "rank"} - parts),
    )


def _growth_not_judged(missing: Collection[str]) -> str:
    if not missing:
        return ""
    which = " and ".join(f"{'an' if part == 'agent' else 'a'} {part}" for part in sorted(missing))
    return (
        f"growth of {which}: none lived for {format_duration(LEAST_S)} and a third of the soak; "
        f"to judge it, soak for longer: --minutes {LONG_ENOUGH_MINUTES}"
    )


def growth_warning(order: SoakOrder) -> str:
    """Return a sentence for a soak in which no process can live long enough to judge its growth; otherwise nothing."""
    longest_s = max(len(block.faults) + 1 for block in order.blocks()) * order.every_s
    if longest_s >= LEAST_S:
        return ""
    return (
        f"growth of memory, files and threads is judged in processes that live for {format_duration(LEAST_S)}: this "
        f"soak is too short for that (--minutes {LONG_ENOUGH_MINUTES} judges it)"
    )


_GROWTH_LIMITS = (
    ("rss_mb_a_minute", _RSS_MB_A_MINUTE),
    ("files_a_minute", _FILES_A_MINUTE),
    ("sockets_a_minute", _FILES_A_MINUTE),
    ("threads_a_minute", _FILES_A_MINUTE),
)


def _judge_growth(name: str, most: float, growth: Sequence[Growth]) -> Assertion:
    worst = max(growth, key=lambda process: float(getattr(process, name)))
    value = float(getattr(worst, name))
    seen = f"{value:.2f} ({worst.part} on {worst.node}, over {worst.minutes:.1f} min; {len(growth)} processes judged)"
    return Assertion(name=f"{name.replace('_', ' ')}: at most {most:g}", ok=value <= most, seen=seen)


def last_common(commits: Sequence[Event], reference: Sequence[Event]) -> int:
    return max(_losses(commits).keys() & _losses(reference).keys(), default=0)


def compare_losses(
    commits: Sequence[Event], reference: Sequence[Event], above_only: bool = False
) -> tuple[float | None, float | None]:
    """Return both means over the fifty consecutive steps where they differ most.

    With `above_only`, where that of `commits` is most above the reference. Of a repeated step the last result counts.
    The last window reaches back, so that none is short.
    """
    losses, reference_losses = _losses(commits), _losses(reference)
    common = sorted(losses.keys() & reference_losses.keys())
    starts = [*range(0, max(1, len(common) - _WINDOW_STEPS), _WINDOW_STEPS), max(0, len(common) - _WINDOW_STEPS)]
    windows = [common[start : start + _WINDOW_STEPS] for start in starts if common]
    pairs = [
        (mean(losses[step] for step in window), mean(reference_losses[step] for step in window)) for window in windows
    ]
    if not pairs:
        return None, None
    worst = max(pairs, key=lambda pair: pair[0] - pair[1] if above_only else abs(pair[0] - pair[1]))
    return round(worst[0], 4), round(worst[1], 4)


def _losses(commits: Sequence[Event]) -> dict[int, float]:
    return {int(commit["step"]): float(commit["loss"]) for commit in commits if commit.get("loss") is not None}
