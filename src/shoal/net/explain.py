"""From what was printed to what it means: text in, explanations out. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from shoal.net.pattern import Pattern, Weight
from shoal.net.patterns import PATTERNS
from shoal.net.ports import with_true_ports

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
    weight: Weight
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
        return self.best is not None and self.best.weight <= Weight.LIKELY


def explain(lines: Iterable[Line], source: str = "") -> Findings:
    """Lines may be as many as they like: only what was recognised is kept."""
    reader = _Reader(source)
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
    return found.best is not None and found.best.weight == Weight.CONSEQUENCE and found.unknown is None


def merge(found: Iterable[Findings]) -> Findings:
    """Several texts about one failure, the most telling one first."""
    parts = list(found)
    each = [explanation for part in parts for explanation in part.explanations]
    unknown = next((part.unknown for part in parts if part.unknown), None)
    return Findings(_in_order(_settled(_once(each))), unknown)


class _Reader:
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
