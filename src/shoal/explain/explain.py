"""Explains printed text: finds known error messages in logs, streams and run folders, and orders them by cause.

Memory is bounded however long the input is: only recognised lines are kept.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import DataError, RunFailed, from_dict
from shoal.event_schema import Event, parse_event
from shoal.explain.pattern import CauseOrder, Pattern, fill_in
from shoal.explain.patterns import PATTERNS
from shoal.run_folder import RunFolder

# A line's number in its file, and its text.
Line = tuple[int, str]

_MOST_EVIDENCE = 500
# Nearly all lines of a long log hold no error: this many are tested at once.
_BATCH = 256
# No relevant line is longer; a file without newlines is read in pieces.
_MOST_LINE_BYTES = 1 << 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# A frame of a Python traceback; its source line follows, two columns further in.
_FRAME = re.compile(r'(.*)File "[^"]+", line \d+')
# The last line of a Python traceback, after the prefixes of launchers and loggers.
_EXCEPTION = re.compile(
    r"^[\s|]*(?:\[[^\]]*\]:?\s*)*(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Failure|Interrupt|Exit)(?:: .*)?$"
)
_ERROR_WORDS = (
    "error",
    "exception",
    "fatal",
    "panic",
    "aborted",
    "segmentation fault",
    "core dumped",
    "failed",
    "failure",
)
_ERROR_WORD = re.compile(rf"\b(?:{'|'.join(_ERROR_WORDS)})\b", re.IGNORECASE)
# The lines below an error of shoal's, perhaps after the number of its rank.
_OWN_ADVICE = re.compile(r"(?:\[[\w-]+\] )?  (?:(why|next): {1,2}| {6})(.*)")
# gloo prints the ports of its connections with their two bytes swapped: 14215 is really 34615. Only its transport does:
# torch's store prints ports as they are.
_GLOO = "gloo/transport/"
_GLOO_ADDRESS = re.compile(r"(\[[0-9a-fA-F.:]+\]):(\d{1,5})(?!\d)")
_SIGNS = [(sign, pattern) for pattern in PATTERNS for sign in pattern.signs]
_BY_ID = {pattern.id: pattern for pattern in PATTERNS}


@dataclass(frozen=True)
class Evidence:
    text: str  # the line as it was printed, with gloo's real ports added
    line: int
    source: str = ""  # the file, where there are several


@dataclass(frozen=True)
class Explanation:
    id: str
    weight: CauseOrder
    cause: str
    fix: str
    check: str
    evidence: Evidence  # the first line that matched
    count: int = 1  # how many lines matched

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "certainty": self.weight.name.lower(),
            "cause": self.cause,
            "evidence": self.evidence.text,
            "line": self.evidence.line,
            "source": self.evidence.source,
            "count": self.count,
            "fix": self.fix,
            "check": self.check,
        }


@dataclass(frozen=True)
class Findings:
    explanations: tuple[Explanation, ...] = ()  # the closest to the cause first
    unknown: Evidence | None = None  # the first error that no pattern explains

    @property
    def best(self) -> Explanation | None:
        return self.explanations[0] if self.explanations else None

    @property
    def is_explained(self) -> bool:
        """Whether a cause is known, and not only a consequence or a report of it."""
        return self.best is not None and self.best.weight <= CauseOrder.LIKELY


def explain(lines: Iterable[Line], source: str = "") -> Findings:
    reader = _LogReader(source)
    rest = iter(lines)
    while batch := list(islice(rest, _BATCH)):
        if reader.awaits_advice or _may_hold_error("\n".join(text for _, text in batch)):
            for number, text in batch:
                reader.read(number, text)
    return reader.findings()


def explain_text(text: str) -> Findings:
    return explain(enumerate(text.splitlines(), 1))


def explain_stream(stream: BinaryIO, source: str = "") -> Findings:
    return explain(_read_lines(stream), source)


def explain_file(path: Path, source: str = "") -> Findings:
    try:
        with path.open("rb") as file:
            return explain(_read_lines(file), source)
    except FileNotFoundError:
        raise DataError(
            f"there is no file {str(path)!r}",
            why="shoal explain reads a log file or a run folder",
            fix="shoal explain FILE, or: … 2>&1 | shoal explain",
        ) from None
    except OSError as error:
        fix = f"look at it: ls -ld {shlex.quote(str(path))}"
        raise DataError(f"cannot read {path}: {error.strerror}", fix=fix) from None


def explain_run(run: RunFolder) -> Findings:
    """Explain a run's failure; nothing if its last launch ended well.

    The supervisor's events come first: it knows which rank failed first.
    """
    if run.supervisor.is_file():
        ends = [event for _, event in _last_launch(run.supervisor) if event.get("event") == "ended"]
        if ends and ends[-1].get("code") == 0:
            return Findings()
    journals = [run.supervisor, *sorted(run.path.glob("agents/*.jsonl"))]
    logs = [
        *sorted(run.path.glob("logs/*/*.log")),
        *sorted(run.path.glob("agents/*.log")),
        run.supervisor.with_suffix(".log"),
    ]

    def name(path: Path) -> str:
        return str(path.relative_to(run.path))

    return merge(
        [
            *(explain(_event_texts(path), name(path)) for path in journals if path.is_file()),
            *(explain_file(path, name(path)) for path in logs if path.is_file()),
        ]
    )


def is_consequence(text: str) -> bool:
    """Return whether an error reports only that another rank is gone."""
    findings = explain_text(text)
    best = findings.best
    return best is not None and best.weight == CauseOrder.CONSEQUENCE and findings.unknown is None


def add_explanation(error: RunFailed) -> None:
    """Add cause and fix to an error that only names the failed rank, if the ends of its logs are known failures."""
    findings = merge(explain_file(log) for log in map(Path, error.logs) if log.is_file())
    best = findings.best
    if best is None or best.id.startswith("shoal.") or not findings.is_explained:
        return
    if best.weight == CauseOrder.LIKELY and findings.unknown:
        # A guess beside an error that no pattern knows would mislead.
        return
    error.why = "\n".join(filter(None, (f"{best.cause} ({best.id})", error.why)))
    error.fix = "; ".join(filter(None, (best.fix, error.fix)))


def merge(parts: Iterable[Findings]) -> Findings:
    """Join the findings of several texts about one failure, the most important text first."""
    parts = list(parts)
    by_id: dict[str, Explanation] = {}
    for explanation in (explanation for part in parts for explanation in part.explanations):
        known = by_id.get(explanation.id)
        by_id[explanation.id] = explanation if known is None else replace(known, count=known.count + explanation.count)
    unknown = next((part.unknown for part in parts if part.unknown), None)
    return Findings(_select(list(by_id.values())), unknown)


class _LogReader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._number = 0
        self._by_id: dict[str, Explanation] = {}
        self._awaiting_advice: list[str] = []
        self._unconfirmed: set[str] = set()
        self._frame_column: int | None = None
        self._exception: Evidence | None = None
        self._error_line: Evidence | None = None

    @property
    def awaits_advice(self) -> bool:
        """Whether the next line may give the cause or the fix of shoal's error in the last one."""
        return bool(self._awaiting_advice)

    def read(self, number: int, text: str) -> None:
        self._number = number
        line = (_COLOURS.sub("", text) if "\x1b" in text else text).rstrip()
        if self.awaits_advice:
            self._take_advice(line)
        if self._is_in_traceback(line):
            return
        # Each pattern once, however many of its signs the line holds.
        candidates = {pattern.id: pattern for sign, pattern in _SIGNS if sign in line}.values()
        matches = [(pattern, groups) for pattern in candidates if (groups := pattern.match(line)) is not None]
        for pattern, groups in matches:
            self._add(pattern, groups, line)
        if matches:
            return
        if self._exception is None and _EXCEPTION.match(line):
            self._exception = self._evidence(line)
        elif self._error_line is None and _ERROR_WORD.search(line):
            self._error_line = self._evidence(line)

    def findings(self) -> Findings:
        sure = [explanation for explanation in self._by_id.values() if explanation.id not in self._unconfirmed]
        return Findings(_select(sure), self._exception or (None if sure else self._error_line))

    def _is_in_traceback(self, line: str) -> bool:
        """Return whether the line is source code in a traceback, which may quote a message: `raise ValueError("…")`."""
        column, frame = self._frame_column, _FRAME.match(line)
        self._frame_column = frame.end(1) if frame else None
        return frame is not None or (column is not None and line[column : column + 2] == "  ")

    def _add(self, pattern: Pattern, groups: dict[str, str], line: str) -> None:
        if known := self._by_id.get(pattern.id):
            self._by_id[pattern.id] = replace(known, count=known.count + 1)
            return
        self._by_id[pattern.id] = Explanation(
            id=pattern.id,
            weight=pattern.weight,
            cause=fill_in(pattern.cause, groups),
            fix=fill_in(pattern.fix, {name: shlex.quote(value) for name, value in groups.items()}),
            check=pattern.check,
            evidence=self._evidence(line),
        )
        if pattern.has_own_advice:
            self._awaiting_advice.append(pattern.id)
        if pattern.needs_advice:
            self._unconfirmed.add(pattern.id)

    def _take_advice(self, line: str) -> None:
        """Read the `why:` and `next:` lines, which shoal prints right below its error."""
        advice = _OWN_ADVICE.match(line)
        if advice and advice[1]:
            text = advice[2]
            for name in self._awaiting_advice:
                known = self._by_id[name]
                if advice[1] == "next":
                    self._by_id[name] = replace(known, fix=text)
                else:
                    cause = text if known.cause in text else f"{known.cause}; shoal adds: {text}"
                    self._by_id[name] = replace(known, cause=cause)
                self._unconfirmed.discard(name)
        if advice is None or advice[1] == "next":
            self._awaiting_advice.clear()

    def _evidence(self, line: str) -> Evidence:
        text = with_true_ports(line.strip())
        short = text if len(text) <= _MOST_EVIDENCE else text[: _MOST_EVIDENCE - 1] + "…"
        return Evidence(short, self._number, self._source)


def _may_hold_error(text: str) -> bool:
    """Return whether a line of the text may be a known failure or an error of another kind."""
    lower = text.lower()
    return any(word in lower for word in _ERROR_WORDS) or any(sign in text for sign, _ in _SIGNS)


def _select(explanations: list[Explanation]) -> tuple[Explanation, ...]:
    """Drop explanations that lack the pattern they need, then those that a more exact one covers; sort by cause."""
    ids = {explanation.id for explanation in explanations}

    def has_company(explanation: Explanation) -> bool:
        needed = _BY_ID[explanation.id].only_with
        return not needed or bool(ids.intersection(needed))

    kept = [explanation for explanation in explanations if has_company(explanation)]
    covered = {name for explanation in kept for name in _BY_ID[explanation.id].covers}
    # The sort is stable: the first line that was read stays first among equals.
    exact = (explanation for explanation in kept if explanation.id not in covered)
    return tuple(sorted(exact, key=lambda explanation: explanation.weight))


def true_port(printed: int) -> int:
    return int.from_bytes(printed.to_bytes(2, "little"), "big")


def with_true_ports(line: str) -> str:
    """Add the real ports to gloo's addresses, for a search with `ss` or in a firewall's log."""

    def add_port(match: re.Match[str]) -> str:
        printed = int(match[2])
        return match[0] if printed > 65535 else f"{match[0]} (really port {true_port(printed)})"

    return _GLOO_ADDRESS.sub(add_port, line) if _GLOO in line else line


def _read_lines(stream: BinaryIO) -> Iterator[Line]:
    """Yield numbered lines. Bytes that are not text are replaced; the pieces of a very long line share its number."""
    number, is_new = 0, True
    while piece := stream.readline(_MOST_LINE_BYTES):
        number += is_new
        is_new = piece.endswith(b"\n")
        yield number, piece.decode(errors="replace").rstrip("\r\n")


def _last_launch(path: Path) -> list[tuple[int, Event]]:
    """Return the numbered events of the last launch: from the supervisor's newest start, or with an agent's newest
    id."""
    with path.open("rb") as file:
        events = [(number, event) for number, line in enumerate(file, 1) if (event := parse_event(line)) is not None]
    starts = [place for place, (_, event) in enumerate(events) if event.get("event") == "supervising"]
    newest = events[starts[-1] :] if starts else events
    return [(number, event) for number, event in newest if event.get("launch") == newest[-1][1].get("launch")]


def _event_texts(path: Path) -> Iterator[Line]:
    """Yield the texts in an event file: errors as a user sees them, and notes."""
    for number, event in _last_launch(path):
        text = from_dict(event).render() if "seen" in event else str(event.get("text") or event.get("how") or "")
        yield from ((number, line) for line in text.splitlines())
