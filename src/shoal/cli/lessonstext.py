"""What a profile learned from runs, for people and for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal.cli.output import shown, stdout_console
from shoal.config.profile import Profile
from shoal.trials.predicting import Lesson
from shoal.units import format_duration


def print_lessons(profile: Profile, lessons: Sequence[Lesson], path: Path) -> None:
    learned = profile.calibration
    assert learned is not None  # noqa: S101 - it has just been fitted
    console = stdout_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "measured", "predicted", "error", "now", "error"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for each in lessons:
        table.add_row(escape(shown(each.run)), *_cells(each))
    console.print(table)
    console.print(
        f"\ncomputing × {learned.compute:.3f}, optimizer × {learned.optimizer:.3f}, exchange × {learned.comm:.3f}, "
        f"everything else {format_duration(learned.other_s)} a step; medians over {learned.runs} runs",
        soft_wrap=True,
    )
    console.print(f"saved: {escape(shown(path))}", soft_wrap=True)


def _cells(each: Lesson) -> list[str]:
    said = ((format_duration(seconds), f"{seconds / each.measured_s - 1:+.1%}") for seconds in _said(each))
    return [format_duration(each.measured_s), *(cell for pair in said for cell in pair)]


def _said(each: Lesson) -> tuple[float, float]:
    return each.before_s, each.after_s


def lessons_document(profile: Profile, lessons: Sequence[Lesson]) -> dict[str, Any]:
    learned = profile.calibration
    return {
        "calibration": learned.model_dump(mode="json") if learned else None,
        "runs": [{**asdict(each), "run": str(each.run)} for each in lessons],
    }
