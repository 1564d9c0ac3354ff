"""Explain a run's measured numbers in sentences.

The paragraphs say where the time of a step went, why N ranks are faster or slower than one, what `--sync auto` chose,
and how wrong a prediction was. Every statement follows from a measured number.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.manifest import ChoiceRecord, PredictionRecord
from shoal.config.schema import SyncConfig
from shoal.config.sync_choice import choice_of_event
from shoal.cost.causes import Demand
from shoal.events import Event
from shoal.records.measured_script import NO_EXCHANGE, has_own_exchanges, name_collectives
from shoal.records.rank_log import is_number, is_step
from shoal.records.scaling import ScalingPoint, are_alike, efficiency, in_order
from shoal.records.summary import RunSummary, shard_level
from shoal.units import (
    DISTURBING_CORES,
    SAMPLES,
    format_amount,
    format_change,
    format_duration,
    format_ms,
    format_percent,
    format_si,
    format_speed,
    format_times,
    join_words,
    name_ranks,
    pluralize,
    warn_of_other_programs,
    whole_percents,
)

PHASE_TEXTS = {
    "compute": "forward and backward",
    "exposed": "communication that backward did not hide",
    "wait": "waiting for the slowest rank",
    "optimizer": "the optimizer",
    "data": "loading data",
    "other": "everything else",
    "rest": "overhead outside the named phases",
}
# As parts of a step: a smaller phase is not named, a smaller difference is noise on an ordinary machine.
_WORTH_NAMING = 0.01
_NEGLIGIBLE = 0.03
# An efficiency can be this far above 1 by chance.
_PLAUSIBLE_EXCESS = 0.05
# An exchange that differs by more than this part from the expected one used a slower or faster link than probed.
_OTHER_LINK_SPEED = 0.1
# Of a smaller payload the headers of the packets are a large part.
_SMALL_PAYLOAD_BYTES = 64e3
_OWN_COLLECTIVES = "In a step a rank was in collectives of the script's own"
_NO_PHASES = "(sync.measure=off)"


def explain_step_time(summary: RunSummary) -> str:
    """Explain one run: where a step's time went, the all-reduce, the bytes sent, and the slowest rank."""
    step_s = summary.step_s
    if step_s is None:
        return f"The run recorded no step (status: {summary.status}), so there is nothing to explain yet."
    rate = f", which is {format_speed(summary.speed, summary.unit)}" if summary.speed else ""
    window = f" (median of steps {summary.measured[0]:,}–{summary.measured[1]:,})" if summary.measured else ""
    sentences = [f"On {name_ranks(summary.world_size)} a step took {format_ms(step_s.median)}{rate}{window}."]
    changes = sum(not span.is_first for span in summary.history)
    if changes:
        together = f"{name_ranks(summary.world_size)} did together"
        sentences.append(f"The members changed {format_times(changes)}. These figures are of steps that {together}.")
    sentences += [
        _explain_split(summary, step_s.median),
        _explain_allreduce(summary),
        _explain_bytes(summary),
        _name_slowest_rank(summary, step_s.median),
        _explain_tail(summary),
        _explain_demand(summary.demand, summary.other_load),
        warn_of_other_programs({"": summary.other_load}),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _explain_split(summary: RunSummary, step_s: float) -> str:
    if not summary.phases:
        return f"Its phases were not measured {_NO_PHASES}."
    phases = dict(summary.phases)
    phases["compute"] = phases.pop("forward", 0.0) + phases.pop("backward", 0.0)
    small = [name for name, seconds in phases.items() if seconds < _WORTH_NAMING * step_s and name != "other"]
    phases["other"] = phases.get("other", 0.0) + sum(phases.pop(name) for name in small)
    named = sorted(phases.items(), key=lambda part: -part[1])
    shares = whole_percents([seconds for _, seconds in named])
    texts = PHASE_TEXTS
    if "forward" not in summary.phases:
        texts = texts | {"other": "forward, backward and everything else"}
    parts = [f"{share}% into {texts[name]}" for share, (name, _) in zip(shares, named, strict=True) if share]
    return f"Of this, {join_words(parts).replace(' into ', ' went into ', 1)}."


def _explain_allreduce(summary: RunSummary) -> str:
    cost = summary.allreduce_s
    if summary.world_size < 2:
        return ""
    own = name_collectives(summary.collectives)
    if has_own_exchanges(summary.start):
        return f"{_OWN_COLLECTIVES}: {own}." if own else f"{NO_EXCHANGE[0].upper()}{NO_EXCHANGE[1:]}."
    if cost is None:
        if not summary.phases or summary.start.get("sync") != "stock":
            return ""
        return "How long stock DDP's all-reduces took is not measured, only how long ranks waited for them."
    hidden_s = summary.hidden_s or 0.0
    behind = f", {format_ms(hidden_s)} of it hidden behind backward" if hidden_s >= _WORTH_NAMING * cost.median else ""
    spread = f"mean {format_ms(cost.mean)}, p95 {format_ms(cost.p95)}"
    beside = f" {_OWN_COLLECTIVES}: {own}." if own else ""
    return f"The all-reduce took {format_ms(cost.median)} a step ({spread}){behind}.{beside}"


def _explain_bytes(summary: RunSummary) -> str:
    measured, theory = summary.wire_bytes_per_step, summary.theoretical_bytes_per_step
    if summary.world_size < 2 or not measured or theory is None:
        return ""
    sent = f"Each rank sent {format_si(measured, 'B')} a step"
    if not theory:
        return f"Gradients went through shared memory. {sent} over the network for other purposes."
    formula = "2(N−1)/N·S" if summary.start.get("inside", "gloo") == "gloo" else "one ring between the machines"
    if shard_level(summary.start):
        formula = f"the reduce-scatters and all-gathers of {summary.start['sync']}"
    round_steps = summary.start.get("round_steps")
    if isinstance(round_steps, int) and round_steps > 1 and summary.steps_done < 2 * round_steps:
        return f"{sent}; the run is too short to compare that with {formula}: a round has {round_steps} steps."
    if theory < _SMALL_PAYLOAD_BYTES:
        return f"{sent}, mostly headers: {formula} is {format_si(theory, 'B')}."
    return f"{sent}, {format_change(measured / theory - 1)} against the {format_si(theory, 'B')} of {formula}."


def _name_slowest_rank(summary: RunSummary, step_s: float) -> str:
    """Name the rank that waited least: the others waited for it. Empty where the waits hardly differ."""
    waits = _wait_times(summary)
    if len(waits) < 2:
        return ""
    slowest, other = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
    if waits[other] - waits[slowest] < _NEGLIGIBLE * step_s:
        return ""
    return f"Rank {slowest} was the slowest: rank {other} waited {format_ms(waits[other])} a step for it."


def _explain_tail(summary: RunSummary) -> str:
    """Explain what the slowest of N costs, and what one more rank would. Empty where it is not worth a word."""
    tail = summary.tail
    if tail is None or tail.slowest_s < (1 + _NEGLIGIBLE) * tail.median_s:
        return ""
    count, how = len(tail.by_rank), "as"
    if tail.slowest_s > (1 + _NEGLIGIBLE) * tail.independent_s:
        how = "more than"
    elif tail.slowest_s < (1 - _NEGLIGIBLE) * tail.independent_s:
        how = "less than"
    return (
        f"A rank's own part of a step took {format_ms(tail.median_s)}, and that of the slowest of {count} took "
        f"{format_ms(tail.slowest_s)} on average, {how} independent ranks would ({format_ms(tail.independent_s)}); "
        f"one more such rank would make it {format_ms(tail.one_more_s)}."
    )


def _explain_demand(demand: Demand | None, other_load: float | None, label: str = "") -> str:
    """Explain that the threads of the run, or of that on `label`, want more processors than there are, if they do."""
    if demand is None or not demand.is_cause(other_load or 0.0):
        return ""
    whose = "the threads of " + ("one rank" if demand.ranks == 1 else f"{name_ranks(demand.ranks)} on one machine")
    whose = f"With {label}, {whose}" if label else whose.capitalize()
    return f"{demand.describe(whose)}. To change that, {demand.fix}."


def _wait_times(summary: RunSummary) -> dict[int, float]:
    return {number: rank.phases["wait"].median for number, rank in summary.ranks.items() if "wait" in rank.phases}


@dataclass(frozen=True)
class IdealComparison:
    """How a point's step differs from a perfect division of the base's work, by cause."""

    base: ScalingPoint
    point: ScalingPoint
    ideal_s: float
    parts: dict[str, float]  # seconds by cause; positive is lost time; they add up to lost_s

    @property
    def lost_s(self) -> float:
        return self.point.step_s - self.ideal_s

    def split_by_sign(self) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        """Return the parts worth naming, the largest first: those of the sign of `lost_s`, and those against it."""
        sign = 1 if self.lost_s > 0 else -1
        large = [(cause, s) for cause, s in self.parts.items() if abs(s) >= _NEGLIGIBLE * self.point.step_s]
        large.sort(key=lambda part: -abs(part[1]))
        return [part for part in large if part[1] * sign > 0], [part for part in large if part[1] * sign < 0]


def compare_with_ideal(base: ScalingPoint, point: ScalingPoint) -> IdealComparison:
    """Compare a point with the ideal, in which every rank does 1/N of the work and nothing more.

    `rest` is what remains, so the parts add up to the difference however the phases were measured.
    """
    share = (point.tokens_per_step / point.ranks) / (base.tokens_per_step / base.ranks)
    ideal_s = share * base.step_s
    parts = {"compute": point.compute_s - share * base.compute_s}
    for phase in ("exposed", "wait", "optimizer"):
        parts[phase] = point.phases.get(phase, 0.0) - share * base.phases.get(phase, 0.0)
    parts["rest"] = point.step_s - ideal_s - sum(parts.values())
    return IdealComparison(base, point, ideal_s, parts)


def explain_scaling(points: list[ScalingPoint]) -> str:
    """Explain how fast each run was, what it lost against a perfect division of the first, and the largest cause."""
    if not points:
        return "Nothing was measured yet, so there is no scaling to explain."
    base, *others = in_order(points)
    if not others:
        return (
            f"Only a run on {base.label} was measured: {format_speed(base.tokens_per_s)}, "
            f"{format_ms(base.step_s)} a step. "
            f"Why more ranks would be faster or slower needs a second {'cluster' if base.name else 'rank count'} to "
            "compare with."
        )
    sentences = [
        sentence
        for point in others
        for sentence in (
            _explain_point(compare_with_ideal(base, point)) if are_alike(point, base) else _contrast(base, point)
        )
    ]
    if len(others) > 1 and not base.name:
        sentences.append(_explain_trend(base, others))
    above = [
        f"{format_percent(efficiency(point, base))} on {point.label}"
        for point in others
        if not is_plausible(point, base)
    ]
    if above:
        sentences.append(
            f"An efficiency above 100% ({join_words(above)}) is not plausible: something slowed down the run on "
            f"{base.label}. Measure again with --repeat 3."
        )
    sentences.append(_explain_demand(base.demand, base.other_load, base.label))
    sentences.append(warn_of_load(points))
    return " ".join(sentence for sentence in sentences if sentence)


def warn_of_load(points: list[ScalingPoint]) -> str:
    return warn_of_other_programs({f"with {point.label}": point.other_load for point in in_order(points)})


def is_plausible(point: ScalingPoint, base: ScalingPoint) -> bool:
    """Return false for an efficiency above 1: ranks do not speed each other up, so the measurements were unequal.

    On other processors, or with more threads a rank, they can be faster.
    """
    more_threads = (point.threads or 1) > (base.threads or 1)
    return efficiency(point, base) <= 1 + _PLAUSIBLE_EXCESS or not are_alike(point, base) or more_threads


def _compare_speeds(base: ScalingPoint, point: ScalingPoint) -> str:
    """Return `two ranks were faster than one rank: A against B, 1.8 times the speed`."""
    ratio = point.tokens_per_s / base.tokens_per_s
    compared = "faster than" if ratio > 1 else "slower than"
    if abs(ratio - 1) < _NEGLIGIBLE:
        compared = "about as fast as"
    verb = "were" if point.label.endswith("s") else "was"
    label = point.label if point.name else point.label.capitalize()
    figures = f"{format_speed(point.tokens_per_s)} against {format_speed(base.tokens_per_s)}, {ratio:.2f} times"
    return f"{label} {verb} {compared} {base.label}: {figures} the speed"


def _contrast(base: ScalingPoint, point: ScalingPoint) -> list[str]:
    """Compare two runs on different processors, of which none is an ideal for the other."""
    sentences = [f"{_compare_speeds(base, point)}, on other processors ({point.processors}, not {base.processors})."]
    parts = {"compute": point.compute_s, **{name: point.phases.get(name, 0.0) for name in ("exposed", "wait")}}
    named = [
        f"{format_percent(seconds / point.step_s)} into {PHASE_TEXTS[name]}"
        for name, seconds in parts.items()
        if seconds >= _WORTH_NAMING * point.step_s
    ]
    if named:
        sentences.append(
            f"Of its step of {format_ms(point.step_s)}, {join_words(named)}.".replace(" into", " went into", 1)
        )
    return sentences


def _explain_point(comparison: IdealComparison) -> list[str]:
    base, point, lost_s = comparison.base, comparison.point, comparison.lost_s
    verdict = f"{_compare_speeds(base, point)} and an efficiency of {format_percent(efficiency(point, base))}."
    if abs(lost_s) < _NEGLIGIBLE * point.step_s:
        return [
            verdict,
            f"A step took {format_ms(point.step_s)} where a perfect division gives {format_ms(comparison.ideal_s)}: "
            f"the difference is under {format_percent(_NEGLIGIBLE)} of the step, too little to look for a cause.",
        ]
    ideal = "Divided perfectly" if point.ranks > base.ranks else "At the same speed a rank"
    against_ideal = (
        f"{ideal}, a step of {format_amount(point.tokens_per_step)} would take "
        f"{format_ms(comparison.ideal_s)}; "
        f"it took {format_ms(point.step_s)}, {format_ms(abs(lost_s))} {'more' if lost_s > 0 else 'less'}."
    )
    if not (base.phases and point.phases):
        no_phases = f"The phases of the step were not measured {_NO_PHASES}, so the cause is unknown."
        return [verdict, against_ideal, no_phases]
    same, against = comparison.split_by_sign()
    if not same:
        no_cause = f"No single part stands out: each is under {format_percent(_NEGLIGIBLE)} of the step."
        return [verdict, against_ideal, no_cause]
    demand = _explain_demand(point.demand, point.other_load, point.label) if lost_s > 0 else ""
    (cause, seconds), *further = same
    what = "cost" if seconds > 0 else "gain"
    amount = f"{format_ms(abs(seconds))} ({format_percent(abs(seconds) / point.step_s)} of the step)"
    reason = _SCALING_REASONS[cause](comparison)
    sentences = [verdict, against_ideal, f"The largest {what}, {amount}, is {PHASE_TEXTS[cause]}: {reason}."]
    if further:
        sentences.append(f"{'More time went into' if lost_s > 0 else 'Time was also saved in'} {_list_parts(further)}.")
    if against:
        sentences.append(f"{'Time was saved in' if lost_s > 0 else 'Time was lost in'} {_list_parts(against)}.")
    return [*sentences, demand]


def _list_parts(parts: list[tuple[str, float]]) -> str:
    return join_words([f"{PHASE_TEXTS[cause]} ({format_ms(abs(seconds))})" for cause, seconds in parts])


def _compute_reason(comparison: IdealComparison) -> str:
    base, point = comparison.base, comparison.point
    ideal_s = comparison.ideal_s / base.step_s * base.compute_s
    took = f"they took {format_ms(point.compute_s)} where their share of the work gives {format_ms(ideal_s)}"
    if base.threads is None or point.threads is None or not (base.compute_s and point.compute_s):
        return took
    if point.compute_s > ideal_s and _explain_demand(point.demand, point.other_load):
        return f"{took}; their threads had too few processors"
    before, after = base.ranks * base.threads, point.ranks * point.threads
    per_rank = f"each rank computed with {pluralize(point.threads, 'thread')} ({base.threads} with {base.label})"
    if point.cores is not None and after > point.cores and point.compute_s > ideal_s:
        return f"{took}; {after} threads shared {pluralize(point.cores, 'core')}, so the ranks slowed each other down"
    if after > before:
        return f"{took}; {per_rank}, {after} threads in all instead of {before}"
    gain = (point.tokens_per_step / point.compute_s) / (base.tokens_per_step / base.compute_s)
    if gain < 1 + _NEGLIGIBLE:
        return f"{took}; {per_rank}, so more ranks divided the same computing power instead of adding to it"
    shared = "so the ranks shared the computing power that one had alone"
    return f"{took}; {per_rank}, {shared}, and used it {gain:.2f} times as well"


def _exposed_reason(comparison: IdealComparison) -> str:
    point = comparison.point
    waited = f"ranks waited {format_ms(point.phases.get('exposed', 0.0))} a step for it"
    hidden_s = point.hidden_s
    if point.allreduce_s is None or hidden_s is None:
        return waited
    if hidden_s < _NEGLIGIBLE * point.step_s:
        return f"the all-reduce took {format_ms(point.allreduce_s)}, and almost none of it was hidden behind backward"
    hidden = f"{format_ms(hidden_s)} of it hidden behind backward"
    return f"the all-reduce took {format_ms(point.allreduce_s)}, {hidden}; {waited}"


def _wait_reason(comparison: IdealComparison) -> str:
    wait_s = comparison.point.phases.get("wait", 0.0)
    return f"on average a rank was ready {format_ms(wait_s)} before the slowest one and had to wait"


def _optimizer_reason(comparison: IdealComparison) -> str:
    base_s, point_s = (point.phases.get("optimizer", 0.0) for point in (comparison.base, comparison.point))
    return (
        f"every rank updates all weights itself, so this work does not shrink with more ranks "
        f"({format_ms(point_s)} a step, {format_ms(base_s)} with {comparison.base.label})"
    )


def _rest_reason(_: IdealComparison) -> str:
    return "loading data, recording events and time that no phase covers"


_SCALING_REASONS = {
    "compute": _compute_reason,
    "exposed": _exposed_reason,
    "wait": _wait_reason,
    "optimizer": _optimizer_reason,
    "rest": _rest_reason,
}


def _explain_trend(base: ScalingPoint, others: list[ScalingPoint]) -> str:
    first, last = others[0], others[-1]
    a, b = efficiency(first, base), efficiency(last, base)
    ends = f"from {format_percent(a)} on {first.label} to {format_percent(b)} on {last.label}"
    if abs(a - b) < _NEGLIGIBLE:
        return f"Efficiency stays the same from {first.label} to {last.label}."
    if b > a:
        return f"Efficiency rises {ends}."
    if base.phases and first.phases and last.phases:
        before, after = compare_with_ideal(base, first).parts, compare_with_ideal(base, last).parts
        growth = {cause: after[cause] / last.step_s - before[cause] / first.step_s for cause in _SCALING_REASONS}
        grown = max(growth, key=lambda cause: growth[cause])
        if growth[grown] >= _NEGLIGIBLE:
            return f"Efficiency falls {ends}; the part of a step that grew most is {PHASE_TEXTS[grown]}."
    return f"Efficiency falls {ends}."


def read_choice(event: Event) -> ChoiceRecord | None:
    """Parse a `choice` event; None where nothing was chosen."""
    choice, step = choice_of_event(event), event.get("step")
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


def explain_choice(config: SyncConfig, chosen: ChoiceRecord | None, summary: RunSummary) -> str | None:
    """Explain what `--sync auto` chose; None for any other setting."""
    if config.mode != "auto":
        return None
    if chosen is None:
        return f"Nothing was chosen by step {summary.steps_done}: until then gradients are exchanged in every step."
    text = f"After step {chosen.step} the run continued with {chosen.why}."
    if summary.step_s is None or chosen.expected_step_s is None or summary.steps_done <= chosen.step:
        return text
    return f"{text} Since then a step took {format_duration(summary.step_s.median)}."


@dataclass(frozen=True)
class PhaseError:
    phase: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s


def phase_errors(prediction: PredictionRecord, summary: RunSummary) -> list[PhaseError]:
    """Compare predicted and measured phases of a typical step, in the order of a step."""
    phases = summary.phases
    measured = {
        "compute": phases.get("forward", 0.0) + phases.get("backward", 0.0),
        "exposed": phases.get("exposed", 0.0),
        "wait": phases.get("wait", 0.0),
        "optimizer": phases.get("optimizer", 0.0),
        "other": phases.get("data", 0.0) + phases.get("other", 0.0),
    }
    return [PhaseError(name, getattr(prediction, f"{name}_s"), seconds) for name, seconds in measured.items()]


def prediction_line(prediction: PredictionRecord) -> str:
    """Return the line that is printed before a run."""
    parts = {name: getattr(prediction, f"{name}_s") for name in ("compute", "exposed", "wait", "optimizer", "other")}
    named = [
        f"{PHASE_TEXTS[name]} {format_ms(seconds)}"
        for name, seconds in parts.items()
        if seconds >= _WORTH_NAMING * prediction.step_s
    ]
    basis = "" if prediction.is_measured else " (estimated: the profile has only other models)"
    speed = (
        format_speed(prediction.samples_per_s, SAMPLES)
        if prediction.tokens_per_s is None and prediction.samples_per_s is not None
        else format_speed(prediction.tokens_per_s or 0.0)
    )
    figures = f"{format_ms(prediction.step_s)}, {speed}"
    return f"predicted: a step takes {figures}{basis}: {join_words(named)}"


def explain_prediction(
    prediction: PredictionRecord | None, summary: RunSummary, chosen: ChoiceRecord | None = None
) -> str | None:
    """Explain how wrong the prediction was, phase by phase."""
    if prediction is None or summary.step_s is None:
        return None
    if chosen is not None and chosen.agrees is False:
        return (
            f"A step was predicted for {chosen.planned}, but the run continued with another sync method: "
            "they cannot be compared."
        )
    grad_bytes = summary.start.get("grad_bytes")
    if prediction.grad_bytes is not None and prediction.grad_bytes != grad_bytes:
        return (
            f"A step was predicted for a model with {format_si(prediction.grad_bytes, 'B')} of gradients, as in "
            f"{prediction.measured_in}, and this one has {format_si(grad_bytes or 0, 'B')}: they cannot be compared."
        )
    measured_s = summary.step_s.median
    error = prediction.step_s / measured_s - 1
    verdict = (
        f"A step was predicted to take {format_ms(prediction.step_s)} and took {format_ms(measured_s)}: "
        f"the prediction was {abs(error):.1%} too {'long' if error > 0 else 'short'}."
    )
    if not summary.phases:
        return f"{verdict} Phases were not measured {_NO_PHASES}, so they cannot be compared."
    reasons = [
        _explain_phase_error(phase, prediction, summary)
        for phase in sorted(phase_errors(prediction, summary), key=lambda phase: -abs(phase.difference_s))
        if abs(phase.difference_s) >= _NEGLIGIBLE * measured_s
    ]
    if not reasons:
        return f"{verdict} No phase is off by more than {format_percent(_NEGLIGIBLE)} of a step."
    return f"{verdict} The difference: {join_words(reasons)}."


def _explain_phase_error(error: PhaseError, prediction: PredictionRecord, summary: RunSummary) -> str:
    amount_s, is_longer = abs(error.difference_s), error.difference_s > 0
    text = f"{PHASE_TEXTS[error.phase]} took {format_ms(amount_s)} {'more' if is_longer else 'less'}"
    match error.phase:
        case "compute":
            if is_longer and summary.other_load is not None and summary.other_load >= DISTURBING_CORES:
                return f"{text} (contention: other programs kept {summary.other_load:.1f} cores busy)"
            if not prediction.is_measured:
                return f"{text} (the profile has only other models; shoal probe --model measures this one)"
            return f"{text} (cores were {'slower' if is_longer else 'faster'} than probed)"
        case "exposed":
            if summary.allreduce_s is None:
                return f"{text} (the exchange itself was not timed)"
            took_s, expected_s = summary.allreduce_s.median, prediction.comm_s
            took = f"the exchange took {format_ms(took_s)}, {format_ms(expected_s)} were expected"
            if abs(took_s - expected_s) < _OTHER_LINK_SPEED * expected_s:
                return f"{text} ({took}: latency and bucketing, backward hid {'less' if is_longer else 'more'} of it)"
            return f"{text} ({took}: the link was {'slower' if took_s > expected_s else 'faster'} than probed)"
        case "wait":
            waits = _wait_times(summary)
            if is_longer and len(waits) > 1:
                slowest = min(waits, key=lambda rank: waits[rank])
                return f"{text} (a straggler: the others waited for rank {slowest} on {summary.ranks[slowest].node})"
    return text
