"""The page of a script that recorded no steps: how it was started and ended, what happened, and its last output."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from shoal.errors import DataError
from shoal.events import Event, read_events
from shoal.records.documents import read_document
from shoal.run_folder import RunFolder
from shoal.terminal import printable
from shoal.tools.draw.pages import compose_page, html_head, html_notice, html_section, html_table
from shoal.tools.report.redact import Redactor
from shoal.units import format_duration

_MOST_NOTES = 200
# Of each rank's output.
_LAST_LINES = 40
_LAST_BYTES = 64 << 10
_MOST_LOGS = 64
_STATES = {0: "finished", 130: "interrupted"}


def recorded_steps(run: RunFolder) -> bool:
    """Return whether a run trained with shoal, or was measured; any other script has output only."""
    return run.config.is_file()


def require_steps(run: RunFolder) -> None:
    if not recorded_steps(run):
        raise DataError(
            f"{run.path} recorded no steps, so it cannot be compared with other runs",
            why="a script records them only if it uses shoal.Session, or was started with --measure",
            fix=f"measure it: shoal run --measure SCRIPT\na page about this run alone: shoal report {run.path}",
        )


def render_script_page(run: RunFolder, redactor: Redactor | None = None) -> str:
    """Return the page of a script's run."""
    if redactor is not None:
        redactor.learn(run)
    shown: Callable[[str], str] = redactor.text if redactor is not None else str
    events = [redactor.event(event) if redactor else event for event in _supervisor_events(run)]
    job = read_document(run.job)
    begin = next((event["time"] for event in events if event.get("time")), None)
    launches = [place for place, event in enumerate(events) if event["event"] == "supervising"]
    newest = events[launches[-1] :] if launches else events
    end = next((event for event in newest if event["event"] == "ended"), None)
    state = "unfinished" if end is None else _STATES.get(end["code"], f"failed with exit code {end['code']}")
    facts = [
        state,
        f"script {shown(Path(str(job['script'][0])).name)}" if job.get("script") else "",
        f"on {shown(str(job['on']))}" if job.get("on") else "",
        f"took {format_duration(end['time'] - begin)}" if end and end.get("time") and begin else "",
        datetime.fromtimestamp(begin, UTC).strftime("%Y-%m-%d %H:%M UTC") if begin else "",
    ]
    is_failed = end is not None and end["code"] not in _STATES and end.get("seen")
    notes = [event for event in events if event["event"] == "note"][-_MOST_NOTES:]
    body = [
        html_head(shown(run.path.name), facts, [shown(str(command)) for command in job.get("commands", [])]),
        html_section("What went wrong", html_notice("fault", end | {"rank": None}) if is_failed and end else ""),
        html_section("What is not here", _explain_absence()),
        html_section("What happened", _notes_table(notes)),
        html_section("Last output", _logs(run, redactor)),
    ]
    return compose_page(f"{shown(run.path.name)} · {state}", "\n".join(filter(None, body)), {})


def _explain_absence() -> str:
    return (
        "<p>This script recorded no steps. <code>shoal run --measure SCRIPT</code> records their times without a "
        "change of the script; one that uses <code>shoal.Session</code> also records losses and values.</p>"
    )


def _notes_table(notes: list[Event]) -> str:
    rows = [
        [datetime.fromtimestamp(note["time"], UTC).strftime("%H:%M:%S") if note.get("time") else "", note["text"]]
        for note in notes
    ]
    return html_table(["UTC", "what"], rows) if rows else ""


def _logs(run: RunFolder, redactor: Redactor | None) -> str:
    parts = []
    for path in sorted((run.path / "logs").glob("*/*.log"))[:_MOST_LOGS]:
        lines = _last_lines(path)
        text = "\n".join(redactor.text(line) if redactor else line for line in lines)
        node = redactor.text(path.parent.name) if redactor else path.parent.name
        if text.strip():
            parts.append(f"<h3>{escape(f'{path.stem} on {node}')}</h3><pre>{escape(text)}</pre>")
    return "".join(parts)


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # Of a progress bar only the newest state.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    return [printable(line) for line in lines[-_LAST_LINES - 1 :]]


def _supervisor_events(run: RunFolder) -> list[Event]:
    return list(read_events(run.supervisor)) if run.supervisor.exists() else []
