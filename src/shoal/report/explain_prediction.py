"""How wrong a prediction was, phase by phase, and where the difference comes from.

Nothing is said that no number shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.manifest import ChoiceRecord, PredictionRecord
from shoal.report.summary import Summary
from shoal.report.wording import DISTURBING_CORES, join, ms

NAMES = {
    "compute": "forward and backward",
    "exposed": "communication that shows",
    "wait": "waiting for the slowest rank",
    "optimizer": "the optimizer",
    "other": "everything else",
}
# Of a step: below it a difference is noise, and is given no reason.
_NEGLIGIBLE = 0.03
# Of the exchange: the wire itself was another one than probed.
_OTHER_WIRE = 0.1


@dataclass(frozen=True)
class PhaseError:
    phase: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s


def phase_errors(prediction: PredictionRecord, summary: Summary) -> list[PhaseError]:
    """In the order of a step. Measured phases are those of a typical step, so that they add up."""
    phases = summary.phases
    measured = {
        "compute": phases.get("forward", 0.0) + phases.get("backward", 0.0),
        "exposed": phases.get("exposed", 0.0),
        "wait": phases.get("wait", 0.0),
        "optimizer": phases.get("optimizer", 0.0),
        "other": phases.get("data", 0.0) + phases.get("other", 0.0),
    }
    return [PhaseError(name, getattr(prediction, f"{name}_s"), seconds) for name, seconds in measured.items()]


def say_prediction(prediction: PredictionRecord) -> str:
    """One line before the run."""
    parts = {name: getattr(prediction, f"{name}_s") for name in NAMES}
    named = [f"{NAMES[name]} {ms(seconds)}" for name, seconds in parts.items() if seconds >= 0.01 * prediction.step_s]
    speed = f"{prediction.tokens_per_s:,.0f} tokens/s"
    basis = "" if prediction.is_measured else " (estimated: the profile knows other models only)"
    return f"predicted: a step takes {ms(prediction.step_s)}, {speed}{basis}: {join(named)}"


def explain_prediction(
    prediction: PredictionRecord | None, summary: Summary, chosen: ChoiceRecord | None = None
) -> str | None:
    if prediction is None or summary.step_s is None:
        return None
    if chosen is not None and chosen.agrees is False:
        return (
            f"A step was predicted for {chosen.planned}, and the run went on in another way: they cannot be compared."
        )
    measured_s = summary.step_s.median
    error = prediction.step_s / measured_s - 1
    verdict = (
        f"A step was predicted to take {ms(prediction.step_s)} and took {ms(measured_s)}: the prediction was "
        f"{abs(error):.1%} too {'long' if error > 0 else 'short'}."
    )
    if not summary.phases:
        return f"{verdict} Phases were not measured (sync.measure=off), so there is nothing to compare them with."
    reasons = [
        _reason(each, prediction, summary)
        for each in sorted(phase_errors(prediction, summary), key=lambda each: -abs(each.difference_s))
        if abs(each.difference_s) >= _NEGLIGIBLE * measured_s
    ]
    if not reasons:
        return f"{verdict} No phase is off by more than {_NEGLIGIBLE:.0%} of a step."
    return f"{verdict} The difference: {join(reasons)}."


def _reason(each: PhaseError, prediction: PredictionRecord, summary: Summary) -> str:
    amount = f"{NAMES[each.phase]} took {ms(abs(each.difference_s))} {'more' if each.difference_s > 0 else 'less'}"
    reason = _REASONS.get(each.phase)
    why = reason(each, prediction, summary) if reason else ""
    return f"{amount} ({why})" if why else amount


def _compute(each: PhaseError, prediction: PredictionRecord, summary: Summary) -> str:
    if each.difference_s > 0 and summary.other_load is not None and summary.other_load >= DISTURBING_CORES:
        return f"contention: other programs kept {summary.other_load:.1f} cores busy"
    if not prediction.is_measured:
        return "the profile knows other models only; shoal probe --model measures this one"
    return "cores were slower than probed" if each.difference_s > 0 else "cores were faster than probed"


def _exposed(each: PhaseError, prediction: PredictionRecord, summary: Summary) -> str:
    if summary.allreduce_s is None:
        return "the exchange itself was not timed"
    took_s, expected_s = summary.allreduce_s.median, prediction.comm_s
    took = f"the exchange took {ms(took_s)}, {ms(expected_s)} were expected"
    if abs(took_s - expected_s) < _OTHER_WIRE * expected_s:
        hid = "less" if each.difference_s > 0 else "more"
        return f"{took}: latency and bucketing, backward hid {hid} of it"
    return f"{took}: the wire was {'slower' if took_s > expected_s else 'faster'} than probed"


def _wait(each: PhaseError, prediction: PredictionRecord, summary: Summary) -> str:
    waits = {rank: one.phases["wait"].median for rank, one in summary.ranks.items() if "wait" in one.phases}
    if each.difference_s < 0 or len(waits) < 2:
        return ""
    slowest = min(waits, key=lambda rank: waits[rank])
    return f"a straggler: rank {slowest} on {summary.ranks[slowest].node} was waited for"


_REASONS = {"compute": _compute, "exposed": _exposed, "wait": _wait}
