"""Judges a soak: did training go on after every fault, and did it learn what a run without faults learns? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from pydantic import BaseModel, ConfigDict

from shoal.events import Event
from shoal.report.ledger import check_ledger
from shoal.trials.chaos.actions import describe
from shoal.trials.chaos.judge import Assertion
from shoal.trials.chaos.leaks import Growth
from shoal.trials.chaos.measure import count_stale, longest_pause
from shoal.trials.chaos.plan import SoakFault
from shoal.trials.chaos.record import Record

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


def judge_fault(fault: SoakFault, began: float, undone: float, record: Record, skipped: str) -> FaultOutcome:
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
    record: Record,
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
