"""Where the time of one run's steps went, in words, from its own numbers."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.manifest import ChoiceRecord, PredictionRecord
from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import choice_in
from shoal.events import Event
from shoal.tools.report.figures import ScalingPoint, efficiency, in_order
from shoal.tools.report.rank_log import is_number, is_step
from shoal.tools.report.summary import MeanMedianP95, RunSummary
from shoal.units import (
    DISTURBING_CORES,
    count,
    format_duration,
    format_si,
    join,
    ms,
    percent,
    percents,
    ranks,
    speed,
    times,
    tokens,
    warn_of_other_programs,
)

_NAMES = {
    "compute": "forward and backward",
    "exposed": "communication that backward did not hide",
    "wait": "waiting for the slowest rank",
    "optimizer": "the optimizer",
    "data": "loading data",
    "other": "everything else",
}
_WORTH_NAMING = 0.01
_STOCK = "How long stock DDP's all-reduces took is not measured: only how long ranks stood still for them."


def explain_single(summary: RunSummary) -> str:
    """One paragraph: the split of a step, the cost of the all-reduce, bytes against theory, and who was slowest."""
    if summary.step_s is None:
        return f"The run recorded no step (status: {summary.status}), so there is nothing to explain yet."
    sentences = [
        _speed(summary, summary.step_s),
        _changed(summary),
        _split(summary, summary.step_s),
        _allreduce(summary),
        _bytes(summary),
        _slowest(summary, summary.step_s),
        warn_of_other_programs({"": summary.other_load}),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _speed(summary: RunSummary, step_s: MeanMedianP95) -> str:
    where = f"On {ranks(summary.world_size)} a step took {ms(step_s.median)}"
    rate = f", which is {speed(summary.tokens_per_s)}" if summary.tokens_per_s else ""
    window = f" (median of steps {summary.measured[0]}–{summary.measured[1]})" if summary.measured else ""
    return f"{where}{rate}{window}."


def _changed(summary: RunSummary) -> str:
    """Figures of a world that came and went say whose they are."""
    changes = sum(not stretch.is_first for stretch in summary.history)
    if not changes:
        return ""
    together = f"{ranks(summary.world_size)} did together"
    return f"Who took part changed {times(changes)}; these figures are of steps that {together}."


def _split(summary: RunSummary, step_s: MeanMedianP95) -> str:
    if not summary.phases:
        return "Its phases were not measured (sync.measure=off)."
    named = sorted(_parts(summary, _WORTH_NAMING * step_s.median).items(), key=lambda part: -part[1])
    shares = percents([seconds for _, seconds in named])
    parts = [f"{share}% into {_NAMES[name]}" for share, (name, _) in zip(shares, named, strict=True) if share]
    return f"Of this time went {join(parts)}."


def _parts(summary: RunSummary, least_s: float) -> dict[str, float]:
    """The phases by name; what is not worth a name is with everything else, so that they add up to a step."""
    phases = dict(summary.phases)
    phases["compute"] = phases.pop("forward", 0.0) + phases.pop("backward", 0.0)
    small = [name for name, seconds in phases.items() if seconds < least_s and name != "other"]
    phases["other"] = phases.get("other", 0.0) + sum(phases.pop(name) for name in small)
    return phases


def _allreduce(summary: RunSummary) -> str:
    cost = summary.allreduce_s
    if summary.world_size < 2:
        return ""
    if cost is None:
        return _STOCK if summary.phases and summary.start.get("sync") == "stock" else ""
    hidden = summary.hidden_s or 0.0
    behind = f", {ms(hidden)} of it hidden behind backward" if hidden >= _WORTH_NAMING * cost.median else ""
    return f"The all-reduce took {ms(cost.median)} a step (mean {ms(cost.mean)}, p95 {ms(cost.p95)}){behind}."


def _bytes(summary: RunSummary) -> str:
    measured, theory = summary.wire_bytes_per_step, summary.theoretical_bytes_per_step
    if summary.world_size < 2 or not measured or theory is None:
        return ""
    sent = f"Each rank sent {format_si(measured, 'B')} a step"
    if not theory:
        return f"Gradients went through shared memory. {sent} over the network, of other things."
    of = "2(N−1)/N·S" if summary.start.get("inside", "gloo") == "gloo" else "one ring between the machines"
    return f"{sent}, {measured / theory - 1:+.1%} against the {format_si(theory, 'B')} of {of}."


def _slowest(summary: RunSummary, step_s: MeanMedianP95) -> str:
    """Who waited least was waited for; said only where the wait is worth naming and the ranks differ in it."""
    waits = {rank: one.phases["wait"].median for rank, one in summary.ranks.items() if "wait" in one.phases}
    if len(waits) < 2:
        return ""
    slowest, other = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
    if waits[other] - waits[slowest] < 3 * _WORTH_NAMING * step_s.median:
        return ""
    return f"Rank {slowest} was the slowest: rank {other} waited {ms(waits[other])} a step for it."


# SECTION report/explain_scaling
# Why N ranks are faster or slower than one, in words, from the measured numbers.
#
# The account is exact: a perfect division would give every rank 1/N of the work and nothing more; the measured step
# took
# longer or shorter than that, and the difference is the sum of the parts named below. Nothing is said that no number
# shows.


CAUSES = ("compute", "exposed", "wait", "optimizer", "rest")

# Below this part of a step a difference is noise on an ordinary machine, and is not given a reason.
NEGLIGIBLE = 0.03
# So far above the ideal a figure can be by chance.
PLAUSIBLE = 0.05


@dataclass(frozen=True)
class Account:
    """Where a point's step differs from a perfect division of the base's work, in seconds; positive is lost time."""

    base: ScalingPoint
    point: ScalingPoint
    ideal_s: float
    parts: dict[str, float]

    @property
    def lost_s(self) -> float:
        return self.point.step_s - self.ideal_s

    @property
    def is_close(self) -> bool:
        return abs(self.lost_s) < NEGLIGIBLE * self.point.step_s

    def in_order(self) -> list[tuple[str, float]]:
        """The parts worth naming: those that push the way the whole went first, the largest first."""
        sign = 1 if self.lost_s >= 0 else -1
        worth = [(cause, s) for cause, s in self.parts.items() if abs(s) >= NEGLIGIBLE * self.point.step_s]
        return sorted(worth, key=lambda part: -sign * part[1])


def account(base: ScalingPoint, point: ScalingPoint) -> Account:
    """`rest` is what remains, so the parts add up to the difference however the phases were measured."""
    share = (point.tokens_per_step / point.ranks) / (base.tokens_per_step / base.ranks)
    ideal_s = share * base.step_s
    parts = {"compute": point.compute_s - share * base.compute_s}
    for phase in ("exposed", "wait", "optimizer"):
        parts[phase] = point.phases.get(phase, 0.0) - share * base.phases.get(phase, 0.0)
    parts["rest"] = point.step_s - ideal_s - sum(parts.values())
    return Account(base, point, ideal_s, parts)


def explain(points: list[ScalingPoint]) -> str:
    """One paragraph: how fast each rank count was, what that cost against a perfect division, and the largest cause."""
    if not points:
        return "Nothing was measured yet, so there is no scaling to explain."
    base, *others = in_order(points)
    if not others:
        return _only_one(base)
    sentences = [sentence for point in others for sentence in _explain_point(account(base, point))]
    if len(others) > 1:
        sentences.append(_trend(base, others))
    sentences.append(_implausible(base, others))
    sentences.append(warn_of_load(points))
    return " ".join(sentence for sentence in sentences if sentence)


def warn_of_load(points: list[ScalingPoint]) -> str:
    return warn_of_other_programs({f"with {ranks(point.ranks)}": point.other_load for point in in_order(points)})


def is_plausible(point: ScalingPoint, base: ScalingPoint) -> bool:
    """Ranks beside each other do not make each other faster: an efficiency above 1 is an unequal measurement."""
    return efficiency(point, base) <= 1 + PLAUSIBLE


def _implausible(base: ScalingPoint, others: list[ScalingPoint]) -> str:
    above = [
        f"{percent(efficiency(each, base))} on {ranks(each.ranks)}" for each in others if not is_plausible(each, base)
    ]
    if not above:
        return ""
    return (
        f"An efficiency above 100% ({join(above)}) is not plausible: the run on {ranks(base.ranks)} was held back by "
        "something. Measure again with --repeat 3."
    )


def _only_one(point: ScalingPoint) -> str:
    return (
        f"Only a run on {ranks(point.ranks)} was measured: {speed(point.tokens_per_s)}, {ms(point.step_s)} a step. "
        "Why more ranks would be faster or slower needs a second rank count to compare with."
    )


def _explain_point(found: Account) -> list[str]:
    sentences = [_verdict(found)]
    if found.is_close:
        return [*sentences, _close(found)]
    sentences.append(_against_ideal(found))
    if not (found.base.phases and found.point.phases):
        return [*sentences, "The phases of the step were not measured (sync.measure=off), so nothing here says why."]
    return [*sentences, *_causes(found)]


def _verdict(found: Account) -> str:
    base, point = found.base, found.point
    ratio = point.tokens_per_s / base.tokens_per_s
    compared = "faster than" if ratio > 1 else "slower than"
    if abs(ratio - 1) < NEGLIGIBLE:
        compared = "about as fast as"
    figures = f"{speed(point.tokens_per_s)} against {speed(base.tokens_per_s)}, {ratio:.2f} times the speed"
    done = f"an efficiency of {percent(efficiency(point, base))}"
    return f"{ranks(point.ranks).capitalize()} were {compared} {ranks(base.ranks)}: {figures} and {done}."


def _close(found: Account) -> str:
    return (
        f"A step took {ms(found.point.step_s)} where a perfect division gives {ms(found.ideal_s)}: "
        f"the difference is under {percent(NEGLIGIBLE)} of the step, too little to look for a cause."
    )


def _against_ideal(found: Account) -> str:
    way = "more" if found.lost_s > 0 else "less"
    return (
        f"Divided perfectly, a step of {tokens(found.point.tokens_per_step)} would take {ms(found.ideal_s)}; "
        f"it took {ms(found.point.step_s)}, {ms(abs(found.lost_s))} {way}."
    )


def _causes(found: Account) -> list[str]:
    sign = 1 if found.lost_s > 0 else -1
    same = [(cause, s) for cause, s in found.in_order() if s * sign > 0]
    against = [(cause, s) for cause, s in reversed(found.in_order()) if s * sign < 0]
    if not same:
        return [f"No single part stands out: each is under {percent(NEGLIGIBLE)} of the step."]
    sentences = [_main_cause(found, *same[0])]
    if same[1:]:
        sentences.append(f"{'Further time went into' if sign > 0 else 'Time was also saved in'} {_listed(same[1:])}.")
    if against:
        sentences.append(f"{'Won back' if sign > 0 else 'Lost again'}: {_listed(against)}.")
    return sentences


def _main_cause(found: Account, cause: str, seconds: float) -> str:
    what = "cost" if seconds > 0 else "gain"
    amount = f"{ms(abs(seconds))} ({percent(abs(seconds) / found.point.step_s)} of the step)"
    return f"The largest {what}, {amount}, is {_IN_WORDS[cause]}: {_REASON[cause](found)}."


def _compute_reason(found: Account) -> str:
    base, point = found.base, found.point
    ideal = found.ideal_s / base.step_s * base.compute_s
    took = f"forward and backward took {ms(point.compute_s)} where their share of the work gives {ms(ideal)}"
    return took + _threads_reason(base, point, slower=point.compute_s > ideal)


def _threads_reason(base: ScalingPoint, point: ScalingPoint, *, slower: bool) -> str:
    if base.threads is None or point.threads is None or not (base.compute_s and point.compute_s):
        return ""
    before, after = base.ranks * base.threads, point.ranks * point.threads
    per_rank = f"each rank computed with {count(point.threads, 'thread')} ({base.threads} with {ranks(base.ranks)})"
    if point.cores is not None and after > point.cores and slower:
        return f"; {after} threads shared {count(point.cores, 'core')}, so the ranks stood in each other's way"
    if after > before:
        return f"; {per_rank}, {after} threads in all instead of {before}"
    gain = (point.tokens_per_step / point.compute_s) / (base.tokens_per_step / base.compute_s)
    if gain < 1 + NEGLIGIBLE:
        return f"; {per_rank}, so more ranks divided the same computing power instead of adding to it"
    shared = "so the ranks shared the computing power that one had alone"
    return f"; {per_rank}, {shared}, and used it {gain:.2f} times as well"


def _exposed_reason(found: Account) -> str:
    point = found.point
    exposed = point.phases.get("exposed", 0.0)
    stood_still = f"ranks stood still {ms(exposed)} a step for it"
    hidden = point.hidden_s
    if point.allreduce_s is None or hidden is None:
        return stood_still
    if hidden < NEGLIGIBLE * point.step_s:
        return f"the all-reduce took {ms(point.allreduce_s)} and next to nothing of it was hidden behind backward"
    return f"the all-reduce took {ms(point.allreduce_s)}, {ms(hidden)} of it hidden behind backward; {stood_still}"


def _wait_reason(found: Account) -> str:
    wait = found.point.phases.get("wait", 0.0)
    return f"on average a rank was ready {ms(wait)} before the slowest one and could only wait"


def _optimizer_reason(found: Account) -> str:
    base, point = found.base.phases.get("optimizer", 0.0), found.point.phases.get("optimizer", 0.0)
    return (
        f"every rank updates all weights itself, so this work does not shrink with more ranks "
        f"({ms(point)} a step, {ms(base)} with {ranks(found.base.ranks)})"
    )


def _rest_reason(_: Account) -> str:
    return "loading data, bookkeeping and whatever no phase accounts for"


_IN_WORDS = {
    "compute": "computing",
    "exposed": "communication that backward did not hide",
    "wait": "waiting for the slowest rank",
    "optimizer": "the optimizer",
    "rest": "overhead outside the named phases",
}
_REASON = {
    "compute": _compute_reason,
    "exposed": _exposed_reason,
    "wait": _wait_reason,
    "optimizer": _optimizer_reason,
    "rest": _rest_reason,
}


def _trend(base: ScalingPoint, others: list[ScalingPoint]) -> str:
    first, last = others[0], others[-1]
    a, b = efficiency(first, base), efficiency(last, base)
    ends = f"from {percent(a)} on {ranks(first.ranks)} to {percent(b)} on {ranks(last.ranks)}"
    if abs(a - b) < NEGLIGIBLE:
        return f"Efficiency stays the same from {ranks(first.ranks)} to {ranks(last.ranks)}."
    if b > a:
        return f"Efficiency rises {ends}."
    grown = _grew_most(account(base, first), account(base, last))
    return f"Efficiency falls {ends}{f'; the part of a step that grew most is {grown}' if grown else ''}."


def _grew_most(first: Account, last: Account) -> str | None:
    if not (first.base.phases and first.point.phases and last.point.phases):
        return None
    growth = {c: last.parts[c] / last.point.step_s - first.parts[c] / first.point.step_s for c in CAUSES}
    cause = max(growth, key=lambda name: growth[name])
    return _IN_WORDS[cause] if growth[cause] >= NEGLIGIBLE else None


def _listed(parts: list[tuple[str, float]]) -> str:
    return join([f"{_IN_WORDS[cause]} ({ms(abs(seconds))})" for cause, seconds in parts])


# SECTION report/explain_choice
# What a run with `--sync auto` chose, in words, and what came of it.


def choice_record(event: Event) -> ChoiceRecord | None:
    """None where nothing was chosen."""
    choice, step = choice_in(event), event.get("step")
    if choice is None or not is_step(step):
        return None
    seconds = {name: event[name] for name in ChoiceRecord.model_fields if is_number(event.get(name))}
    return ChoiceRecord(
        **{
            **seconds,
            "step": step,
            "sync": choice.mode,
            "wire": choice.wire,
            "every": choice.every,
            "why": str(event.get("why", "")),
            "planned": event.get("planned"),
            "agrees": event.get("agrees"),
        }
    )


def explain_choice(asked: SyncConfig, chosen: ChoiceRecord | None, summary: RunSummary) -> str | None:
    """None where nothing was to be chosen."""
    if asked.mode != "auto":
        return None
    if chosen is None:
        return f"Nothing was chosen by step {summary.steps_done}: gradients are exchanged in every step until then."
    said = f"After step {chosen.step} the run went on with {chosen.why}."
    if summary.step_s is None or chosen.expected_step_s is None or summary.steps_done <= chosen.step:
        return said
    return f"{said} Since then a step took {format_duration(summary.step_s.median)}."


# SECTION report/explain_prediction
# How wrong a prediction was, phase by phase, and where the difference comes from.
#
# Nothing is said that no number shows.


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


def phase_errors(prediction: PredictionRecord, summary: RunSummary) -> list[PhaseError]:
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
    prediction: PredictionRecord | None, summary: RunSummary, chosen: ChoiceRecord | None = None
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


def _reason(each: PhaseError, prediction: PredictionRecord, summary: RunSummary) -> str:
    amount = f"{NAMES[each.phase]} took {ms(abs(each.difference_s))} {'more' if each.difference_s > 0 else 'less'}"
    reason = _REASONS.get(each.phase)
    why = reason(each, prediction, summary) if reason else ""
    return f"{amount} ({why})" if why else amount


def _compute(each: PhaseError, prediction: PredictionRecord, summary: RunSummary) -> str:
    if each.difference_s > 0 and summary.other_load is not None and summary.other_load >= DISTURBING_CORES:
        return f"contention: other programs kept {summary.other_load:.1f} cores busy"
    if not prediction.is_measured:
        return "the profile knows other models only; shoal probe --model measures this one"
    return "cores were slower than probed" if each.difference_s > 0 else "cores were faster than probed"


def _exposed(each: PhaseError, prediction: PredictionRecord, summary: RunSummary) -> str:
    if summary.allreduce_s is None:
        return "the exchange itself was not timed"
    took_s, expected_s = summary.allreduce_s.median, prediction.comm_s
    took = f"the exchange took {ms(took_s)}, {ms(expected_s)} were expected"
    if abs(took_s - expected_s) < _OTHER_WIRE * expected_s:
        hid = "less" if each.difference_s > 0 else "more"
        return f"{took}: latency and bucketing, backward hid {hid} of it"
    return f"{took}: the wire was {'slower' if took_s > expected_s else 'faster'} than probed"


def _wait(each: PhaseError, prediction: PredictionRecord, summary: RunSummary) -> str:
    waits = {rank: one.phases["wait"].median for rank, one in summary.ranks.items() if "wait" in one.phases}
    if each.difference_s < 0 or len(waits) < 2:
        return ""
    slowest = min(waits, key=lambda rank: waits[rank])
    return f"a straggler: rank {slowest} on {summary.ranks[slowest].node} was waited for"


_REASONS = {"compute": _compute, "exposed": _exposed, "wait": _wait}
