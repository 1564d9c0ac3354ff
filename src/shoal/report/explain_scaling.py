"""Why N ranks are faster or slower than one, in words, from the measured numbers.

The account is exact: a perfect division would give every rank 1/N of the work and nothing more; the measured step took
longer or shorter than that, and the difference is the sum of the parts named below. Nothing is said that no number
shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.report.scaling import ScalingPoint, efficiency, in_order
from shoal.report.wording import count, join, ms, percent, ranks, speed, tokens, warn_of_other_programs

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
