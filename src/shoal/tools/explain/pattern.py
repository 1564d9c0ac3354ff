"""One kind of failure: by which line it is recognised, what the line means, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

# Longer than any message, and short enough that no line keeps a regex busy.
_MOST_CHARACTERS = 4096


class CauseOrder(IntEnum):
    """How near a line is to what really went wrong. Of all that is found, the first by weight and place is the answer.

    A line that names its cause comes before one that fits few causes; both before somebody's summary of what happened,
    and that before what the other ranks saw of it.
    """

    CAUSE = 1
    LIKELY = 2
    REPORT = 3
    CONSEQUENCE = 4
    HARMLESS = 5


@dataclass(frozen=True)
class Pattern:
    """`signs` are words of which the line holds at least one; a `regex` must match besides, and its named groups can be
    used in `cause` and `fix`. `check` is the id of the check that would have found it, where one can.

    `covers` are ids that say the same less exactly: where both are found, theirs is left out. A line that may pass by
    without harm counts `only_with` one of those ids. In `own_words` shoal itself speaks: the lines that follow say why
    and what next, better than we could; `needs_words` demands them.
    """

    id: str
    weight: CauseOrder
    signs: tuple[str, ...]
    cause: str
    fix: str
    regex: str = ""
    check: str = ""
    covers: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()
    own_words: bool = False
    needs_words: bool = False

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.regex)

    def match(self, line: str) -> dict[str, str] | None:
        """The groups of a line that holds one of the signs, or None where it is something else after all."""
        found = self._compiled.search(line[:_MOST_CHARACTERS])
        return None if found is None else {name: value for name, value in found.groupdict().items() if value}

    def say(self, text: str, groups: Mapping[str, str]) -> str:
        return text.format_map(_Groups(groups))


class _Groups(dict[str, str]):
    """What a line does not name stays a word to be filled in: HOST."""

    def __missing__(self, name: str) -> str:
        return name.upper()
