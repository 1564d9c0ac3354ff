"""Where the time of one run's steps went, in words, from its own numbers."""

from __future__ import annotations

from shoal.report.summary import Spread, Summary
from shoal.report.wording import join, ms, percents, ranks, speed, times, warn_of_other_programs
from shoal.units import format_si

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


def explain_single(summary: Summary) -> str:
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


def _speed(summary: Summary, step_s: Spread) -> str:
    where = f"On {ranks(summary.world_size)} a step took {ms(step_s.median)}"
    rate = f", which is {speed(summary.tokens_per_s)}" if summary.tokens_per_s else ""
    window = f" (median of steps {summary.measured[0]}–{summary.measured[1]})" if summary.measured else ""
    return f"{where}{rate}{window}."


def _changed(summary: Summary) -> str:
    """Figures of a world that came and went say whose they are."""
    changes = sum(not stretch.is_first for stretch in summary.history)
    if not changes:
        return ""
    together = f"{ranks(summary.world_size)} did together"
    return f"Who took part changed {times(changes)}; these figures are of steps that {together}."


def _split(summary: Summary, step_s: Spread) -> str:
    if not summary.phases:
        return "Its phases were not measured (sync.measure=off)."
    named = sorted(_parts(summary, _WORTH_NAMING * step_s.median).items(), key=lambda part: -part[1])
    shares = percents([seconds for _, seconds in named])
    parts = [f"{share}% into {_NAMES[name]}" for share, (name, _) in zip(shares, named, strict=True) if share]
    return f"Of this time went {join(parts)}."


def _parts(summary: Summary, least_s: float) -> dict[str, float]:
    """The phases by name; what is not worth a name is with everything else, so that they add up to a step."""
    phases = dict(summary.phases)
    phases["compute"] = phases.pop("forward", 0.0) + phases.pop("backward", 0.0)
    small = [name for name, seconds in phases.items() if seconds < least_s and name != "other"]
    phases["other"] = phases.get("other", 0.0) + sum(phases.pop(name) for name in small)
    return phases


def _allreduce(summary: Summary) -> str:
    cost = summary.allreduce_s
    if summary.world_size < 2:
        return ""
    if cost is None:
        return _STOCK if summary.phases and summary.start.get("sync") == "stock" else ""
    hidden = summary.hidden_s or 0.0
    behind = f", {ms(hidden)} of it hidden behind backward" if hidden >= _WORTH_NAMING * cost.median else ""
    return f"The all-reduce took {ms(cost.median)} a step (mean {ms(cost.mean)}, p95 {ms(cost.p95)}){behind}."


def _bytes(summary: Summary) -> str:
    measured, theory = summary.wire_bytes_per_step, summary.theoretical_bytes_per_step
    if summary.world_size < 2 or not measured or theory is None:
        return ""
    sent = f"Each rank sent {format_si(measured, 'B')} a step"
    if not theory:
        return f"Gradients went through shared memory. {sent} over the network, of other things."
    of = "2(N−1)/N·S" if summary.start.get("inside", "gloo") == "gloo" else "one ring between the machines"
    return f"{sent}, {measured / theory - 1:+.1%} against the {format_si(theory, 'B')} of {of}."


def _slowest(summary: Summary, step_s: Spread) -> str:
    """Who waited least was waited for; said only where the wait is worth naming and the ranks differ in it."""
    waits = {rank: one.phases["wait"].median for rank, one in summary.ranks.items() if "wait" in one.phases}
    if len(waits) < 2:
        return ""
    slowest, other = min(waits, key=lambda rank: waits[rank]), max(waits, key=lambda rank: waits[rank])
    if waits[other] - waits[slowest] < 3 * _WORTH_NAMING * step_s.median:
        return ""
    return f"Rank {slowest} was the slowest: rank {other} waited {ms(waits[other])} a step for it."
