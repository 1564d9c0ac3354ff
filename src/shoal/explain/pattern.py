"""One known failure: the line by which it is recognised, its cause and its fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

# Longer than any message, and short enough that no line keeps a regex busy.
_MOST_CHARACTERS = 4096


class CauseOrder(IntEnum):
    """How close a line is to the real cause. The answer is the first explanation by this order, then by place."""

    CAUSE = 1  # the line names its cause
    LIKELY = 2  # the line fits few causes
    REPORT = 3  # another program's summary of the failure
    CONSEQUENCE = 4  # what other ranks saw of it
    HARMLESS = 5


@dataclass(frozen=True)
class Pattern:
    id: str
    signs: tuple[str, ...]  # texts of which the line holds at least one
    cause: str  # may use the named groups of `regex`, as may `fix`
    fix: str
    weight: CauseOrder = CauseOrder.CAUSE
    regex: str = ""  # must match the line as well
    check: str = ""  # the id of the doctor's check that finds it beforehand, if there is one
    covers: tuple[str, ...] = ()  # ids of less exact patterns, which are dropped where this one matches
    only_with: tuple[str, ...] = ()  # a line that may be harmless counts only together with one of these ids
    has_own_advice: bool = False  # shoal's own error: the next lines give cause and fix
    needs_advice: bool = False  # counts only if those lines follow

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.regex)

    def match(self, line: str) -> dict[str, str] | None:
        """Return the named groups that matched in a line with one of the signs; None if the regex does not match."""
        match = self._compiled.search(line[:_MOST_CHARACTERS])
        return None if match is None else {name: value for name, value in match.groupdict().items() if value}


def fill_in(text: str, groups: Mapping[str, str]) -> str:
    """Fill the groups into a text. A name that the line did not contain stays in capitals: HOST."""
    return text.format_map(_Groups(groups))


class _Groups(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return name.upper()
