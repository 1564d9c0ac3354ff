"""From what was printed to what it means: text in, explanations out. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import DataError, RunFailed, from_dict
from shoal.events import Event, parse_event
from shoal.run_folder import RunFolder
from shoal.tools.explain.pattern import CauseOrder, Pattern
from shoal.tools.explain.patterns import PATTERNS

# SECTION net/ports
# gloo prints the ports of its connections with their two bytes swapped: 14215 is really 34615.


# Where gloo's transport speaks, and nowhere else: torch's store prints its ports as they are.
_GLOO = "gloo/transport/"
_PLACE = re.compile(r"(\[[0-9a-fA-F.:]+\]):(\d{1,5})(?!\d)")


def true_port(printed: int) -> int:
    return int.from_bytes(printed.to_bytes(2, "little"), "big")


def with_true_ports(line: str) -> str:
    """The line with both numbers, for whoever looks for the connection with `ss` or in a firewall's log."""
    return _PLACE.sub(_both, line) if _GLOO in line else line


def _both(match: re.Match[str]) -> str:
    printed = int(match[2])
    return match[0] if printed > 65535 else f"{match[0]} (really port {true_port(printed)})"


_MOST_EVIDENCE = 500
# Nearly all lines of a long log say nothing of interest: that is asked of so many at once.
_BATCH = 256
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# A frame of a Python traceback; what it ran stands on the next line, two columns further in.
_FRAME = re.compile(r'(.*)File "[^"]+", line \d+')
# The last line of a Python traceback, after what launchers and loggers put before it.
_EXCEPTION = re.compile(
    r"^[\s|]*(?:\[[^\]]*\]:?\s*)*(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Failure|Interrupt|Exit)(?:: .*)?$"
)
_TROUBLE_WORDS = (
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
_TROUBLE = re.compile(rf"\b(?:{'|'.join(_TROUBLE_WORDS)})\b", re.IGNORECASE)
# Where it stands in its file, and what it says.
Line = tuple[int, str]
# Under an error of shoal's, perhaps after the number of its rank.
_OWN_WORDS = re.compile(r"(?:\[[\w-]+\] )?  (?:(why|next): {1,2}| {6})(.*)")


@dataclass(frozen=True)
class Evidence:
    """A line as it was printed, with gloo's ports put right. `source` is the file, where there are several."""

    text: str
    line: int
    source: str = ""


@dataclass(frozen=True)
class Explanation:
    """`count` is how many lines say so; the evidence is the first of them."""

    id: str
    weight: CauseOrder
    cause: str
    fix: str
    check: str
    evidence: Evidence
    count: int = 1

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
    """The nearest to the cause first. `unknown` is the first error that nothing here explains."""

    explanations: tuple[Explanation, ...] = ()
    unknown: Evidence | None = None

    @property
    def best(self) -> Explanation | None:
        return self.explanations[0] if self.explanations else None

    @property
    def is_explained(self) -> bool:
        """Whether a cause was found, and not only what others saw of it or said about it."""
        return self.best is not None and self.best.weight <= CauseOrder.LIKELY


def explain(lines: Iterable[Line], source: str = "") -> Findings:
    """Lines may be as many as they like: only what was recognised is kept."""
    reader = _LogReader(source)
    rest = iter(lines)
    while batch := list(islice(rest, _BATCH)):
        if reader.listens or _is_of_interest("\n".join(text for _, text in batch)):
            for number, text in batch:
                reader.read(number, text)
    return reader.findings()


def explain_text(text: str) -> Findings:
    return explain(enumerate(text.splitlines(), 1))


def is_consequence(text: str) -> bool:
    """Whether an error says only that another rank is gone."""
    found = explain_text(text)
    return found.best is not None and found.best.weight == CauseOrder.CONSEQUENCE and found.unknown is None


def merge(found: Iterable[Findings]) -> Findings:
    """Several texts about one failure, the most telling one first."""
    parts = list(found)
    each = [explanation for part in parts for explanation in part.explanations]
    unknown = next((part.unknown for part in parts if part.unknown), None)
    return Findings(_in_order(_settled(_once(each))), unknown)


class _LogReader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._number = 0
        self._found: dict[str, Explanation] = {}
        self._words: list[str] = []
        self._unconfirmed: set[str] = set()
        self._frame_column: int | None = None
        self._exception: Evidence | None = None
        self._trouble: Evidence | None = None

    @property
    def listens(self) -> bool:
        """Whether the next line may go on with what shoal said in the last one."""
        return bool(self._words)

    def read(self, number: int, text: str) -> None:
        self._number = number
        line = (_COLOURS.sub("", text) if "\x1b" in text else text).rstrip()
        if self.listens:
            self._listen(line)
        if self._in_traceback(line):
            return
        patterns = [(pattern, groups) for pattern in _candidates(line) if (groups := pattern.match(line)) is not None]
        for pattern, groups in patterns:
            self._note(pattern, groups, line)
        if not patterns:
            self._look_for_trouble(line)

    def _in_traceback(self, line: str) -> bool:
        """A line of a program is not what it printed, though it may hold the same words: `raise ValueError("…")`."""
        column, frame = self._frame_column, _FRAME.match(line)
        self._frame_column = frame.end(1) if frame else None
        return frame is not None or (column is not None and line[column : column + 2] == "  ")

    def findings(self) -> Findings:
        sure = [each for each in self._found.values() if each.id not in self._unconfirmed]
        return Findings(_in_order(_settled(sure)), self._exception or (None if sure else self._trouble))

    def _note(self, pattern: Pattern, groups: dict[str, str], line: str) -> None:
        if known := self._found.get(pattern.id):
            self._found[pattern.id] = replace(known, count=known.count + 1)
            return
        self._found[pattern.id] = Explanation(
            id=pattern.id,
            weight=pattern.weight,
            cause=pattern.say(pattern.cause, groups),
            fix=pattern.say(pattern.fix, {name: shlex.quote(value) for name, value in groups.items()}),
            check=pattern.check,
            evidence=self._evidence(line),
        )
        if pattern.own_words:
            self._words.append(pattern.id)
        if pattern.needs_words:
            self._unconfirmed.add(pattern.id)

    def _listen(self, line: str) -> None:
        """shoal says why and what next right below its error."""
        said = _OWN_WORDS.match(line)
        if said and said[1]:
            for name in self._words:
                self._found[name] = _with_words(self._found[name], said[1], said[2])
                self._unconfirmed.discard(name)
        if said is None or said[1] == "next":
            self._words.clear()

    def _look_for_trouble(self, line: str) -> None:
        if self._exception is None and _EXCEPTION.match(line):
            self._exception = self._evidence(line)
        elif self._trouble is None and _TROUBLE.search(line):
            self._trouble = self._evidence(line)

    def _evidence(self, line: str) -> Evidence:
        text = with_true_ports(line.strip())
        short = text if len(text) <= _MOST_EVIDENCE else text[: _MOST_EVIDENCE - 1] + "…"
        return Evidence(short, self._number, self._source)


def _with_words(known: Explanation, kind: str, words: str) -> Explanation:
    if kind == "next":
        return replace(known, fix=words)
    return replace(known, cause=words if known.cause in words else f"{known.cause}; shoal adds: {words}")


_SIGNS = [(sign, pattern) for pattern in PATTERNS for sign in pattern.signs]
_BY_ID = {pattern.id: pattern for pattern in PATTERNS}


def _candidates(line: str) -> list[Pattern]:
    """Each once, however many of its signs the line holds."""
    return list({pattern.id: pattern for sign, pattern in _SIGNS if sign in line}.values())


def _is_of_interest(text: str) -> bool:
    """Whether any line of it could be recognised, or be an error of another kind."""
    small = text.lower()
    return any(word in small for word in _TROUBLE_WORDS) or any(sign in text for sign, _ in _SIGNS)


def _once(found: Iterable[Explanation]) -> list[Explanation]:
    by_id: dict[str, Explanation] = {}
    for each in found:
        known = by_id.get(each.id)
        by_id[each.id] = each if known is None else replace(known, count=known.count + each.count)
    return list(by_id.values())


def _settled(found: list[Explanation]) -> list[Explanation]:
    """Without what needs company and has none, and then without what others say better."""
    ids = {each.id for each in found}
    kept = [each for each in found if not _BY_ID[each.id].only_with or ids.intersection(_BY_ID[each.id].only_with)]
    covered = {name for each in kept for name in _BY_ID[each.id].covers}
    return [each for each in kept if each.id not in covered]


def _in_order(found: Iterable[Explanation]) -> tuple[Explanation, ...]:
    """A stable sort: what was read first stays first among equals."""
    return tuple(sorted(found, key=lambda each: each.weight))


# SECTION net/gather
# Reads what is to be explained: a log, a stream, or everything a run left behind. Bounded memory, whatever comes.


# No line that matters is longer; a file without line ends is read in pieces.
_MOST_OF_A_LINE = 1 << 16


def explain_stream(stream: BinaryIO, source: str = "") -> Findings:
    return explain(_lines(stream), source)


def explain_file(path: Path, source: str = "") -> Findings:
    try:
        with path.open("rb") as file:
            return explain(_lines(file), source)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", fix=f"look at it: ls -ld {path}") from None


def explain_run(run: RunFolder) -> Findings:
    """The supervisor's words first: it knows who failed first. Nothing of a run whose last launch ended well."""
    if _ended_well(run):
        return Findings()
    logs = [
        *sorted(run.path.glob("logs/*/*.log")),
        *sorted(run.path.glob("agents/*.log")),
        run.supervisor.with_suffix(".log"),
    ]
    journals = [run.supervisor, *sorted(run.path.glob("agents/*.jsonl"))]
    return merge(
        [
            *(explain(_said(path), _name(run, path)) for path in journals if path.is_file()),
            *(explain_file(path, _name(run, path)) for path in logs if path.is_file()),
        ]
    )


def _name(run: RunFolder, path: Path) -> str:
    return str(path.relative_to(run.path))


def _lines(stream: BinaryIO) -> Iterator[Line]:
    """What is no text becomes signs for that; a line that goes on beyond its piece keeps its number."""
    number, is_new = 0, True
    while piece := stream.readline(_MOST_OF_A_LINE):
        number += is_new
        is_new = piece.endswith(b"\n")
        yield number, piece.decode(errors="replace").rstrip("\r\n")


def _last_launch(path: Path) -> list[tuple[int, Event]]:
    """Numbered. What an earlier launch met is history: a supervisor begins anew, an agent names the launch."""
    with path.open("rb") as file:
        events = [(number, event) for number, line in enumerate(file, 1) if (event := parse_event(line)) is not None]
    begins = [place for place, (_, event) in enumerate(events) if event.get("event") == "keeping"]
    newest = events[begins[-1] :] if begins else events
    return [each for each in newest if each[1].get("launch") == newest[-1][1].get("launch")]


def _said(path: Path) -> Iterator[Line]:
    """The words in a file of events: errors as a user sees them, and notes."""
    for number, event in _last_launch(path):
        words = from_dict(event).render() if "seen" in event else str(event.get("text") or event.get("how") or "")
        yield from ((number, line) for line in words.splitlines())


def _ended_well(run: RunFolder) -> bool:
    if not run.supervisor.is_file():
        return False
    ends = [event for _, event in _last_launch(run.supervisor) if event.get("event") == "ended"]
    return bool(ends) and ends[-1].get("code") == 0


# SECTION net/after_run
# What a failed run says of itself at its end: the meaning of its ranks' last words, where it is known.


def put_into_words(error: RunFailed) -> None:
    """Adds cause and fix to an error that only says which rank failed."""
    found = merge(explain_file(log) for log in map(Path, error.logs) if log.is_file())
    if (best := _worth_saying(found)) is not None:
        error.why = "\n".join(filter(None, (f"{best.cause} ({best.id})", error.why)))
        error.fix = "; ".join(filter(None, (best.fix, error.fix)))


def _worth_saying(found: Findings) -> Explanation | None:
    """A guess is not, where another error stands beside it that nobody knows."""
    if found.best is None or found.best.id.startswith("shoal."):
        return None
    is_guess = found.best.weight == CauseOrder.LIKELY
    return found.best if found.is_explained and not (is_guess and found.unknown) else None
