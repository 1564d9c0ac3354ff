"""What the supervisor reads in an agent's journal, checked: the journal of another machine is that machine's word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.events import Event
from shoal.runfolder import is_plain_name

Check = Callable[[Any], bool]

_MOST_TEXT = 20_000


def _number(below: int, least: int = 0) -> Check:
    return lambda value: type(value) is int and least <= value < below


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_PORT = _number(2**16)
_ERROR: dict[str, Check] = {"seen": _text, "why": _text, "fix": _text}

# The events that the supervisor acts on, and what each must have. Others are passed over.
_FIELDS: dict[str, dict[str, Check]] = {
    "ready": {
        "life": _number(2**31),
        "interface": _or_none(_text),
        "cores": _number(2**16, least=1),
        "cpu_only": _flag,
        "script_port": _or_none(_PORT),
        "port": _PORT,
        "mark": lambda value: _text(value) and 0 < len(value) <= 256,
        "highest": _number(2**53),
    },
    "started": {},
    "ended": {"name": is_plain_name, "code": _number(2**31, least=-(2**31)), "by_us": _flag, "starved": _flag},
    "note": {"text": _text},
    "restart": {"name": is_plain_name},
    "tell": {"text": _text, "generation": _or_none(_text)},
    "pause": {"text": _text},
    "abandon": {"text": _text},
    "broken": {"name": is_plain_name, "why": _text},
    "lost": {"node": _text, "how": _text},
    "peer": {"node": _text, "failed": _flag},
    "gave-up": _ERROR,
    "refused": _ERROR,
    "done": {},
}


def problem_with(event: Event) -> str:
    """Why the supervisor cannot use an event; empty for one that it can use or pass over."""
    kind = event.get("event")
    if not isinstance(kind, str):
        return "a line without an event"
    for name, is_sound in _FIELDS.get(kind, {}).items():
        # A field that an event may lack is one whose check accepts None.
        if not is_sound(event.get(name)):
            return f"the event {kind!a:.30} whose {name} is {ascii(event.get(name))[:60]}"
    return ""
