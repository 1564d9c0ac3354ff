"""Compute the durations of a measured script's step from marks of when its exchanges began and ended."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    # When something happened: by the clock of the CPU, or by an event in the GPU's queue.
    Mark = float | torch.cuda.Event


def make_mark(is_cuda: bool) -> Mark:
    """Return the time: of the current GPU, whose work is queued, or else of the CPU."""
    if not is_cuda:
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        # A step whose ends were marked in two ways began before its model was on the GPU.
        return end - begin if isinstance(begin, float) and isinstance(end, float) else 0.0
    return float(begin.elapsed_time(end)) / 1e3


@dataclass
class Exchange:
    """One all-reduce of DDP's reducer, or one call of the script's own communication hook."""

    begin: Mark
    end: Mark | None = None


@dataclass
class TimedStep:
    began: Mark
    # When the optimizer began; all exchanges were over. None where backward runs in the closure that it was given, as
    # often as it likes: then its own time is not known.
    updated: Mark | None = None
    ended: Mark | None = None
    exchanges: list[Exchange] = field(default_factory=list)  # of DDP
    grad_bytes: int = 0
    # Collectives called from Python, by kind: their number, bytes, and the seconds that a thread was in the call or in
    # the wait for it.
    collectives: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0.0]))
    stayed_s: float = 0.0  # in all of them
    stayed_before_update_s: float = 0.0
    stayed_until: float | None = None
    # The same on streams of the GPU, where times are known later.
    queued: list[tuple[str, Mark, Mark]] = field(default_factory=list)

    def add_stay(self, kind: str, begin: Mark, end: Mark) -> None:
        if isinstance(begin, float) and isinstance(end, float):
            self.collectives[kind][2] += end - begin
            self.stayed_s += end - begin
            self.stayed_until = end
        else:
            self.queued.append((kind, begin, end))

    def is_over(self) -> bool:
        """Return whether the queue of the GPU has reached all marks."""
        queued = (mark for _, begin, end in self.queued for mark in (begin, end))
        marks = (self.ended, *(exchange.end for exchange in self.exchanges), *queued)
        return all(mark is not None and (isinstance(mark, float) or mark.query()) for mark in marks)


class StepClock:
    """Divides steps, in their order. It knows when the ranks were last at the same point: the end of an exchange."""

    def __init__(self) -> None:
        self.has_ddp = False
        self.exchange_count = 0
        self._together_at: Mark | None = None
        self._has_divided = False

    def divide(self, step: TimedStep) -> dict[str, Any]:
        """Return the durations of a step, in seconds. What is not known is left out."""
        assert step.ended is not None  # noqa: S101 - only ended steps are divided
        step_s = seconds_between(step.began, step.ended)
        times = {"step_s": step_s}
        done = [(exchange.begin, exchange.end) for exchange in step.exchanges if exchange.end is not None]
        updated_s = None if step.updated is None else seconds_between(step.began, step.updated)
        if done:
            times |= self._times_of_ddp(step, done, step_s if updated_s is None else updated_s)
        elif not self.has_ddp:
            times |= self._times_of_stays(step)
        # On a GPU collectives may have a stream of their own, and what waits for it is not known.
        stayed_s = 0.0 if step.queued else step.stayed_s
        if "tail_s" in times:
            # What a rank has waited in its own collectives is no work of its own.
            times["tail_s"] = min(times["tail_s"] + stayed_s, step_s)
            if "ready_s" in times:
                times["ready_s"] = max(0.0, times["ready_s"] - stayed_s)
        if updated_s is not None:
            in_optimizer_s = stayed_s and stayed_s - step.stayed_before_update_s
            times["optimizer_s"] = max(0.0, step_s - updated_s - in_optimizer_s)
        collectives = _sum_up_collectives(step)
        if not self.has_ddp:
            # Before the end of the first step a script may only have given all ranks the same weights.
            if self._has_divided:
                calls = (sums["calls"] for kind, sums in collectives.items() if kind != "barrier")
                self.exchange_count += int(sum(calls))
            if "all-reduce" in collectives:
                times["allreduce_s"] = collectives["all-reduce"]["waited_s"]
        self._has_divided = True
        counts = {"exchanges": len(done), "grad_bytes": step.grad_bytes} if done else {}
        return (
            {name: round(value, 7) for name, value in times.items()}
            | counts
            | ({"collectives": collectives} if collectives else {})
        )

    def _times_of_ddp(self, step: TimedStep, done: list[tuple[Mark, Mark]], most_s: float) -> dict[str, float]:
        """Return the times of the exchanges of DDP's reducer, which all end before `most_s`.

        A thread of gloo that is short of processor time calls back late: never after the optimizer has begun.
        """
        self.exchange_count += len(done)
        spans = [
            (seconds_between(step.began, begin), min(seconds_between(step.began, end), most_s)) for begin, end in done
        ]
        last = max(range(len(spans)), key=lambda number: spans[number][1])
        ready_at = max(begin for begin, _ in spans)
        # Time with at least one exchange under way.
        busy_s, reached = 0.0, 0.0
        for begin_s, end_s in sorted(spans):
            busy_s += max(0.0, end_s - max(begin_s, reached))
            reached = max(reached, end_s)
        tail_s = spans[last][1] - ready_at
        times = {"allreduce_s": busy_s, "hidden_s": max(0.0, busy_s - tail_s), "tail_s": tail_s}
        times["exchanged_s"] = spans[last][1]
        if self._together_at is not None:
            times["ready_s"] = ready_at + seconds_between(self._together_at, step.began)
        is_late = step.updated is not None and spans[last][1] >= most_s
        self._together_at = step.updated if is_late else done[last][1]
        return times

    def _times_of_stays(self, step: TimedStep) -> dict[str, float]:
        """Return the times of a script with collectives of its own: ranks are together at the end of the last wait."""
        if step.stayed_until is None or step.queued or not isinstance(step.began, float):
            return {}
        times = {"tail_s": 0.0, "exchanged_s": step.stayed_until - step.began}
        if isinstance(self._together_at, float):
            times["ready_s"] = step.stayed_until - self._together_at
        self._together_at = step.stayed_until
        return times


def _sum_up_collectives(step: TimedStep) -> dict[str, dict[str, float]]:
    for kind, begin, end in step.queued:
        step.collectives[kind][2] += seconds_between(begin, end)
    return {
        kind: {"calls": calls, "bytes": sent_bytes, "waited_s": round(waited_s, 7)}
        for kind, (calls, sent_bytes, waited_s) in step.collectives.items()
    }
