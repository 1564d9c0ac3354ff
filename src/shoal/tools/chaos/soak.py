"""Soaks: a training per sync mode under a random fault every few seconds, judged against a short one without faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.cluster.lab import state
from shoal.cluster.lab.commands import read_groups
from shoal.config.presets import did_you_mean
from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import TRAINED_METHODS
from shoal.control.processes import find
from shoal.errors import Interrupted, RunFailed, ShoalError, UsageError
from shoal.events import Event
from shoal.run_folder import RunFolder, write_atomically
from shoal.runs.manage import StopResult, end_processes, stop
from shoal.runs.start import train_new
from shoal.tools.bench.levers import parse_lever
from shoal.tools.chaos.inject import Injector, NoDisplay, TestBed, keep_checkpoints, opened
from shoal.tools.chaos.judge import Assertion, compare_told, count_stale, longest_pause
from shoal.tools.chaos.run import POLL_S, ScenarioWatch, find_wrong
from shoal.tools.chaos.scenario import (
    SOAK_KINDS,
    ChaosScenario,
    Injection,
    ScenarioRecord,
    SoakBlock,
    SoakFault,
    describe,
    expand,
    is_due,
    plan_blocks,
)
from shoal.tools.report.commit_log import check_ledger

# SECTION trials/chaos/leaks
# Does a long run grow? Memory, descriptors and threads of its agents and ranks, over time.


_PAGE = os.sysconf("SC_PAGE_SIZE")
# One connection that is made anew is a slope in a shorter life.
_LEAST_S = 240.0
_LEAST_PART = 1 / 3


@dataclass(frozen=True)
class ResourceSample:
    """`world`: how many trained together at that moment. More of them have more connections and buckets."""

    at_s: float
    world: int
    pid: int
    part: str
    node: str
    rss_bytes: int
    files: int
    sockets: int
    threads: int


class Growth(BaseModel):
    """Of one process, a minute, by least squares over the second half of its time in a whole world: the first half
    fills caches."""

    model_config = ConfigDict(frozen=True)

    part: str
    node: str
    pid: int
    minutes: float
    rss_mb: float
    rss_mb_a_minute: float
    files_a_minute: float
    sockets_a_minute: float
    threads_a_minute: float


def sample(run: Path, began: float, world: int) -> list[ResourceSample]:
    """Agents and ranks, as /proc shows them at this moment."""
    return [
        each
        for found in find(run)
        if found.part == "agent" or found.part.startswith("rank-")
        if (each := _look(found.pid, found.part, found.node, began, world)) is not None
    ]


def _look(pid: int, part: str, node: str, began: float, world: int) -> ResourceSample | None:
    """None for one that ended while we looked."""
    place = Path("/proc") / str(pid)
    with contextlib.suppress(OSError, ValueError, IndexError):
        rss = int((place / "statm").read_text().split()[1]) * _PAGE
        threads = len(list((place / "task").iterdir()))
        targets = [_target(path) for path in (place / "fd").iterdir()]
        sockets = sum(target.startswith("socket:") for target in targets)
        return ResourceSample(time.monotonic() - began, world, pid, part, node, rss, len(targets), sockets, threads)
    return None


def _target(path: Path) -> str:
    with contextlib.suppress(OSError):
        return str(path.readlink())
    return ""


def growth(samples: Sequence[ResourceSample]) -> list[Growth]:
    """Of every process that was seen for long enough to say: a rank that starts is growing for half a minute, and in
    a short life one connection that is made anew is a slope."""
    times = [each.at_s for each in samples]
    least_s = max(_LEAST_S, (max(times) - min(times)) * _LEAST_PART) if times else _LEAST_S
    whole = max((each.world for each in samples), default=0)
    by_pid: dict[int, list[ResourceSample]] = {}
    for each in samples:
        if each.world == whole:
            by_pid.setdefault(each.pid, []).append(each)
    lives = [life for life in by_pid.values() if life[-1].at_s - life[0].at_s >= least_s]
    return [_growth(life) for life in lives]


def _growth(life: Sequence[ResourceSample]) -> Growth:
    late = life[len(life) // 2 :]
    minutes = [each.at_s / 60 for each in late]
    return Growth(
        part=life[0].part,
        node=life[0].node,
        pid=life[0].pid,
        minutes=(life[-1].at_s - life[0].at_s) / 60,
        rss_mb=life[-1].rss_bytes / 1e6,
        rss_mb_a_minute=slope(minutes, [each.rss_bytes / 1e6 for each in late]),
        files_a_minute=slope(minutes, [float(each.files) for each in late]),
        sockets_a_minute=slope(minutes, [float(each.sockets) for each in late]),
        threads_a_minute=slope(minutes, [float(each.threads) for each in late]),
    )


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least squares; flat for fewer than two different moments."""
    if len(xs) < 2 or xs[0] == xs[-1]:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)


# SECTION trials/chaos/soakjudge
# Judges a soak: did training go on after every fault, and did it learn what a run without faults learns? Pure.


# Worlds of other sizes add up in another order; after hundreds of steps the curves differ by noise of this size.
TOLERANCE = 0.05
# Where replicas part between exchanges, a killed rank takes its steps since the last one with it, and a smaller world
# learns faster for a while, since each rank has more of the batch. Only a loss that is worse counts there.
OUTER_TOLERANCE = 0.15
_WINDOW = 50
_STOPPED = 130
# What leaks does so with every change, several times a minute.
_FILES_A_MINUTE = 1.0
_RSS_MB_A_MINUTE = 5.0


class FaultOutcome(BaseModel):
    """What one fault of a soak did. `pause_s` is the longest time without a step until the next fault; `skipped` says
    why it could not be injected: its target was not back from an earlier one in time."""

    model_config = ConfigDict(frozen=True)

    kind: str
    does: str
    # The furthest step when it was injected.
    step: int
    commits: int
    pause_s: float | None
    ledger_ok: bool
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return self.commits > 0 and self.ledger_ok and not self.skipped


class ModeResult(BaseModel):
    """The soak of one sync mode. `loss` and `reference_loss` are means over those 50 steps in a row, of all that both
    runs have, where they differ most."""

    model_config = ConfigDict(frozen=True)

    sync: str
    planned: int
    faults: list[FaultOutcome]
    steps: int = 0
    reconfigurations: int = 0
    loss: float | None = None
    reference_loss: float | None = None
    # The last step that both runs have, and how many faults were injected before it.
    compared_steps: int = 0
    compared_faults: int = 0
    # Empty when no process lived long enough to tell.
    growth: list[Growth] = []
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
    """All modes of a soak, and what must hold of them together."""

    model_config = ConfigDict(frozen=True)

    modes: list[ModeResult]
    assertions: list[Assertion]

    @property
    def ok(self) -> bool:
        return all(assertion.ok for assertion in self.assertions)


def judge_fault(fault: SoakFault, began: float, undone: float, record: ScenarioRecord, skipped: str) -> FaultOutcome:
    """What was committed before all of it was done says nothing of how it was survived."""
    steps = sorted((float(event["time"]), int(event["step"])) for event in record.ranks_said("step"))
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
    wrong: Sequence[str],
    is_outer: bool = False,
) -> ModeResult:
    """`wrong` is what `shoal verify` found in the run folder. `is_outer`: replicas part between exchanges, as in local,
    diloco and streaming."""
    loss, reference_loss = compare_losses(record.commits, reference, above_only=is_outer)
    survived, skipped = sum(outcome.ok for outcome in outcomes), sum(bool(outcome.skipped) for outcome in outcomes)
    ledger, stale = check_ledger(record.commits), count_stale(record.commits)
    compared = last_common(record.commits, reference)
    compared_faults = sum(outcome.step < compared for outcome in outcomes)
    off = None if loss is None or reference_loss is None else loss - reference_loss
    if is_outer:
        furthest = "it is most above"
        loss_name = f"loss at most {OUTER_TOLERANCE} above the run without faults"
        near = off is not None and off <= OUTER_TOLERANCE
    else:
        furthest = "they differ most"
        loss_name = f"loss within {TOLERANCE} of the run without faults"
        near = off is not None and abs(off) <= TOLERANCE
    world = len(record.commits[-1].get("members", ())) if record.commits else 0
    known = {True: "yes", False: "no", None: "nothing to compare"}
    assertions = [
        Assertion(
            name=f"went on after each of {planned} faults",
            ok=survived == planned,
            seen=f"{survived}" + (f"; {skipped} could not be injected" if skipped else ""),
        ),
        Assertion(name=f"exit code {_STOPPED}", ok=exit_code == _STOPPED, seen=str(exit_code)),
        Assertion(name="every node is back at the end", ok=world == nodes, seen=f"{world} of {nodes}"),
        Assertion(name="every sample used once", ok=ledger.ok, seen=known[ledger.ok]),
        Assertion(name="shoal verify passes", ok=not wrong, seen="; ".join(wrong) or "yes"),
        Assertion(name="stale commits: 0", ok=stale == 0, seen=str(stale)),
        Assertion(name="replicas equal to the bit", ok=replicas_equal is True, seen=known[replicas_equal]),
        Assertion(
            name=loss_name,
            # Steps before the first fault are equal anyway, and would prove nothing.
            ok=near and compared >= _WINDOW and compared_faults > 0,
            seen=f"{loss} and {reference_loss} over the {_WINDOW} steps where {furthest}, of steps 1 to {compared}, "
            f"in which {compared_faults} faults fell",
        ),
        *(_steady(name, most, growth) for name, most in _LIMITS if growth),
        Assertion(name="nothing left", ok=not left, seen=", ".join(left) or "nothing"),
    ]
    return ModeResult(
        sync=sync,
        planned=planned,
        faults=list(outcomes),
        steps=record.furthest_step,
        reconfigurations=len({event["generation"] for event in record.ranks_said("membership")} - {None}),
        loss=loss,
        reference_loss=reference_loss,
        compared_steps=compared,
        compared_faults=compared_faults,
        growth=list(growth),
        assertions=assertions,
        seconds=round(seconds, 1),
        runs=runs,
    )


def broken_off(sync: str, outcomes: Sequence[FaultOutcome], planned: int, trouble: str, seconds: float) -> ModeResult:
    """A mode whose training could not be started or watched to its end."""
    failed = Assertion(name="the training could be soaked", ok=False, seen=trouble)
    return ModeResult(sync=sync, planned=planned, faults=list(outcomes), assertions=[failed], seconds=round(seconds, 1))


def judge_soak(modes: Sequence[ModeResult], planned: int) -> SoakResult:
    """Every mode must hold, and memory, files, sockets and threads must have been judged somewhere: where no process
    lived long enough, a soak is too short to find a leak and must not claim that there is none."""
    survived, held = sum(mode.survived for mode in modes), [mode.sync for mode in modes if mode.ok]
    parts = {"agent" if each.part == "agent" else "rank" for mode in modes for each in mode.growth}
    judged = [mode.sync for mode in modes if mode.growth]
    missing = [mode.sync for mode in modes if not mode.ok]
    return SoakResult(
        modes=list(modes),
        assertions=[
            Assertion(name=f"went on after each of {planned} faults", ok=survived == planned, seen=str(survived)),
            Assertion(
                name="every sync mode held",
                ok=bool(held) and not missing,
                seen=f"held: {', '.join(held) or 'none'}" + (f"; not held: {', '.join(missing)}" if missing else ""),
            ),
            Assertion(
                name="growth of an agent and of a rank was judged",
                ok=parts == {"agent", "rank"},
                seen=f"{', '.join(sorted(parts))} in {', '.join(judged)}" if judged else "no process lived long enough",
            ),
        ],
    )


_LIMITS = (
    ("rss_mb_a_minute", _RSS_MB_A_MINUTE),
    ("files_a_minute", _FILES_A_MINUTE),
    ("sockets_a_minute", _FILES_A_MINUTE),
    ("threads_a_minute", _FILES_A_MINUTE),
)


def _steady(name: str, most: float, growth: Sequence[Growth]) -> Assertion:
    words = name.replace("_", " ")
    worst = max(growth, key=lambda each: float(getattr(each, name)))
    value = float(getattr(worst, name))
    seen = f"{value:.2f} ({worst.part} on {worst.node}, over {worst.minutes:.1f} min; {len(growth)} processes judged)"
    return Assertion(name=f"{words}: at most {most:g}", ok=value <= most, seen=seen)


def last_common(ours: Sequence[Event], theirs: Sequence[Event]) -> int:
    return max(_losses(ours).keys() & _losses(theirs).keys(), default=0)


def compare_losses(
    ours: Sequence[Event], theirs: Sequence[Event], above_only: bool = False
) -> tuple[float | None, float | None]:
    """Means over fifty steps in a row, where they differ most; with `above_only`, where ours is most above theirs.
    A step that was done again counts as it was done last. The last window reaches back, so that none is short."""
    a, b = _losses(ours), _losses(theirs)
    common = sorted(a.keys() & b.keys())
    starts = [*range(0, max(1, len(common) - _WINDOW), _WINDOW), max(0, len(common) - _WINDOW)]
    windows = [common[start : start + _WINDOW] for start in starts if common]
    pairs = [(mean(a[step] for step in window), mean(b[step] for step in window)) for window in windows]
    if not pairs:
        return None, None
    worst = max(pairs, key=lambda pair: pair[0] - pair[1] if above_only else abs(pair[0] - pair[1]))
    return round(worst[0], 4), round(worst[1], 4)


def _losses(commits: Sequence[Event]) -> dict[int, float]:
    return {int(each["step"]): float(each["loss"]) for each in commits if each.get("loss") is not None}


FIGURES = "soak.json"
ALL = "all"
SYNC_MODES = TRAINED_METHODS
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

    def scenario(self, sync: str) -> ChaosScenario:
        """The training of one mode. Its one step only makes it a scenario: the faults are drawn."""
        disk_mb = _DISK_MB if any(SOAK_KINDS[kind].needs_disk for kind in self.kinds) else None
        return ChaosScenario.model_validate(
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
    places = [state.lab_folder(lab), *(group.of_lab(lab) for group in read_groups().all())]
    return [str(path) for path in places if path.exists()]


@dataclass
class _Soaked:
    session: _Session
    block: SoakBlock
    ground: TestBed
    folder: Path
    samples: list[ResourceSample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = self.session.order
        self.run = RunFolder(self.folder.resolve())
        self.watch = ScenarioWatch(self.run)
        self._injector = Injector("soak", self.run, self.ground, random.Random(self.order.seed))
        self._sampled_at = 0.0
        self._began = time.monotonic()
        # How much later than planned everything is by now, because a node had to be waited for.
        self._late_s = 0.0
        self._doing = "starts"

    def through(self) -> None:
        config = self.order.scenario(self.block.sync).config(self.ground.on, seed=self.order.seed)
        train_new(config, self.folder, NoDisplay, detach=True, before=self.ground.before)
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
        hung = ["the run itself, which had to be ended"] if stop(self.run, wait_s=_STOP_S) is StopResult.ENDED else []
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


def _await_step(watch: ScenarioWatch, folder: Path, look: Callable[[], None]) -> None:
    deadline = time.monotonic() + _START_S
    while watch.furthest_step < _FIRST_STEP and not watch.ended and time.monotonic() < deadline:
        look()
    if watch.furthest_step < _FIRST_STEP:
        raise RunFailed(
            f"the training to soak did not come to step {_FIRST_STEP} within {_START_S:.0f} s",
            why=str((watch.ended or {}).get("seen", "it is still on its way")),
            fix=f"look at its logs: shoal logs {folder}",
        )


def _reference(session: _Session, block: SoakBlock, ground: TestBed, folder: Path) -> ScenarioRecord:
    """The same training without faults, for as long as `SoakOrder.reference_s` says."""
    order, run = session.order, RunFolder(folder.resolve())
    watch = ScenarioWatch(run)
    takes_s = order.reference_s(len(block.faults))
    whole_s = takes_s + len(block.faults) * order.every_s
    ends_at = time.monotonic() + _START_S + takes_s

    def look() -> None:
        watch.poll()
        left_s = whole_s - max(0.0, takes_s - (ends_at - time.monotonic()))
        session.show(block, "the run without faults, to compare with", watch.furthest_step, left_s)
        time.sleep(POLL_S)

    try:
        train_new(order.scenario(block.sync).config(ground.on, seed=order.seed), folder, NoDisplay, detach=True)
        _await_step(watch, folder, look)
        ends_at = time.monotonic() + takes_s
        while time.monotonic() < ends_at and not watch.ended:
            look()
        stop(run, wait_s=_STOP_S)
    finally:
        end_processes(find(run.path))
    watch.poll()
    return watch.record
