"""The text of a progress line, for shoal's commands and for a session that prints its own progress."""

from __future__ import annotations

from shoal.events import Event
from shoal.units import TOKENS, format_duration, format_loss, format_share, format_speed, unit_of


class StepLine:
    """The text of a progress line. Rates are smoothed so that they can be read."""

    def __init__(self, steps: int, is_short: bool = False) -> None:
        self.steps = steps
        self._is_short = is_short  # for a narrow terminal: without the share of waiting
        self._step_s: float | None = None
        self._seen = 0
        self._share: float | None = None

    def update(self, event: Event) -> str:
        step_s = float(event["step_s"])
        self._seen += 1
        # The first step of a run may compile for a minute: it says nothing about the others.
        self._step_s = step_s if self._seen <= 2 else _smooth(self._step_s, step_s)
        left = self.steps - int(event["step"])
        # A measured script has no loss that shoal knows.
        loss = f"loss {format_loss(event['loss'])}  " if event.get("loss") is not None else ""
        text = f"{loss}{self._speed(event)}{self._waiting(event, step_s)}"
        return f"{text}{format_duration(left * self._step_s)} left" if left > 0 and self._seen > 1 else text.rstrip()

    def _speed(self, event: Event) -> str:
        unit = unit_of(event)
        amount = event.get("tokens" if unit is TOKENS else "samples")
        return f"{format_speed(amount / self._step_s, unit)}  " if amount is not None and self._step_s else ""

    def _waiting(self, event: Event, step_s: float) -> str:
        """Return the share of a step spent waiting for gradients or slower ranks; empty with `sync.measure=off`."""
        if self._is_short or event.get("exposed_s") is None or step_s <= 0:
            return ""
        waiting_s = float(event["exposed_s"]) + float(event.get("wait_s") or 0.0)
        self._share = _smooth(self._share, waiting_s / step_s)
        return f"waiting {format_share(self._share, 1)}  "


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else 0.9 * before + 0.1 * value
