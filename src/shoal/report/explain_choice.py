"""What a run with `--sync auto` chose, in words, and what came of it."""

from __future__ import annotations

from shoal.config.choice import choice_in
from shoal.config.manifest import ChoiceRecord
from shoal.config.schema import SyncConfig
from shoal.events import Event
from shoal.report.ranklog import is_number, is_step
from shoal.report.summary import Summary
from shoal.units import format_duration


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


def explain_choice(asked: SyncConfig, chosen: ChoiceRecord | None, summary: Summary) -> str | None:
    """None where nothing was to be chosen."""
    if asked.mode != "auto":
        return None
    if chosen is None:
        return f"Nothing was chosen by step {summary.steps_done}: gradients are exchanged in every step until then."
    said = f"After step {chosen.step} the run went on with {chosen.why}."
    if summary.step_s is None or chosen.expected_step_s is None or summary.steps_done <= chosen.step:
        return said
    return f"{said} Since then a step took {format_duration(summary.step_s.median)}."
