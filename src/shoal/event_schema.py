"""The kinds of events that ranks, agents and the supervisor record, and the fields that readers may rely on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]

Check = Callable[[object], bool]
# The fields of each event kind that readers use without asking. Other fields may be missing or of any type.
Schema = Mapping[str, Mapping[str, Check]]
# JSON numbers have no bounds; beyond this one, Python's conversions and formats raise.
_INT_LIMIT = 2**63
_PORT_LIMIT = 2**16 - 1


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _INT_LIMIT


def _is_number(value: object) -> bool:
    """Return whether the value is a number, NaN and infinity included: a loss may be either."""
    return isinstance(value, float) or _is_int(value)


def _is_finite(value: object) -> bool:
    return math.isfinite(value) if isinstance(value, float) else _is_int(value)


def _is_positive(value: object) -> bool:
    return _is_finite(value) and value > 0  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_between(least: int, most: int) -> Check:
    return lambda value: _is_int(value) and least <= value <= most  # type: ignore[operator]


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_ranks(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(rank) and rank >= 0 for rank in value)


def _is_collectives(value: object) -> bool:
    """Return whether these are the collectives of a step, by kind."""
    return isinstance(value, dict) and all(
        isinstance(calls, dict) and all(_is_finite(calls.get(name)) for name in COLLECTIVE_FIELDS)
        for calls in value.values()
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_ALWAYS: Mapping[str, Check] = {"event": _is_text, "rank": _or_none(_is_int), "time": _or_none(_is_finite)}
_ERROR = {"seen": _is_text, "why": _or_none(_is_text), "fix": _or_none(_is_text)}
_ANNOUNCEMENT = {"text": _is_text, "generation": _or_none(_is_text)}

# Fields of a `log` event that are not values of the user's program.
LOG_FIELDS = frozenset(("event", "rank", "time", "step"))
# The phases of a step, which add up to it, in the order of reports.
PHASES = ("data", "forward", "backward", "exposed", "wait", "optimizer", "other")
# The gradient exchange: its duration, and the part of it hidden behind backward. Both overlap with the phases.
EXCHANGE_TIMES = ("allreduce_s", "hidden_s")
STEP_TIMES = ("step_s", *(f"{phase}_s" for phase in PHASES), *EXCHANGE_TIMES)
# Of each kind of collective that a measured script has called in a step: their number, their bytes, and the time that
# the rank was in them.
COLLECTIVE_FIELDS = ("calls", "bytes", "waited_s")
# Fields of a `step` event that shoal writes itself.
STEP_FIELDS = LOG_FIELDS.union(
    ("loss", "own_loss", "samples", "grad_norm", "wire_bytes", "exchanged_s", "collectives"), STEP_TIMES
)

RANK_EVENTS: Schema = {
    # The GPT counts tokens; a user's training, samples only. Runs of older versions have no `samples`. The loss of a
    # measured script is not known.
    "step": {
        "step": _is_int,
        "step_s": _is_positive,
        "loss": _or_none(_is_number),
        # The mean over this rank's own samples; only with two ranks or more.
        "own_loss": _or_none(_is_number),
        "tokens": _or_none(_is_finite),
        "samples": _or_none(_is_finite),
        # Not with `sync.measure=off`.
        "exposed_s": _or_none(_is_finite),
        "wait_s": _or_none(_is_finite),
        "collectives": _or_none(_is_collectives),
    },
    "start": {
        **dict.fromkeys(("world_size", "params", "threads", "micro_batch"), _is_int),
        **dict.fromkeys(("tokens_per_step", "global_batch"), _or_none(_is_int)),
        "device": _is_text,
        "backend": _is_text,
        "resumed_from": _or_none(_is_int),
        "shares_why": _or_none(_is_text),
    },
    "shard": {"size": _is_int, "total": _is_int, "first": _is_text},
    "choice": {"step": _is_int, "why": _is_text},
    "shares": {"step": _is_int, "why": _is_text},
    "trial": {"step": _is_int, "why": _is_text},
    "aligned": {"step": _is_int, "why": _or_none(_is_text)},
    "eval": {"step": _is_int, "val_loss": _is_number},
    "log": {"step": _is_int},
    "draw": {},
    "note": {"text": _is_text},
    "warning": {"seen": _is_text, "fix": _is_text},
    "fault": {"seen": _is_text},
    "digest": {"sha256": _is_text},
    "doing": {"text": _is_text},
}
AGENT_EVENTS: Schema = {
    "ready": {
        "agent_mark": _is_text,
        "port": _is_between(0, _PORT_LIMIT),
        "script_port": _or_none(_is_between(0, _PORT_LIMIT)),
        "interface": _or_none(_is_text),
        "cores": _is_between(1, 2**16),
        "core_speeds": _or_none(_is_ranks),
        "cpu_only": _is_bool,
        "free_memory_bytes": _or_none(_is_between(0, 2**53)),
        "incarnation": _is_between(0, 2**31),
        "highest_generation": _is_between(0, 2**53),
    },
    "ended": {
        "name": _is_text,
        "code": _is_int,
        "by_agent": _is_bool,
        "out_of_memory": _is_bool,
        "memory_limit_bytes": _or_none(_is_between(1, 2**53)),
    },
    "restart": {"name": _is_text},
    "note": {"text": _is_text},
    "announce": _ANNOUNCEMENT,
    "pause": _ANNOUNCEMENT,
    "abandon": _ANNOUNCEMENT,
    "group-failed": {"name": _is_text, "why": _is_text},
    "lost": {"node": _is_text, "how": _is_text},
    "peer-ended": {"node": _is_text, "failed": _is_bool},
    "stop-asked": {"at_once": _is_bool},
    "session": {},
    "generation": {"members": _is_texts},
    "refused": _ERROR,
    "joined-group": {"met": _is_ranks, "missing": _is_ranks, "after_s": _is_finite},
    "script-store-used": {},
    "script-store-keys": {"keys": _or_none(_is_int)},
    "state-lost": _ERROR,
    "hung": _ERROR,
}
SUPERVISOR_EVENTS: Schema = {"ended": {"code": _is_int}, "note": {"text": _is_text}}


def collective_values(event: Event) -> dict[str, float]:
    """Return the collectives of a `step` event as values with names of their own, such as `all_gather_waited_s`."""
    return {
        f"{kind.replace('-', '_')}_{name}": calls[name]
        for kind, calls in (event.get("collectives") or {}).items()
        for name in COLLECTIVE_FIELDS
    }


def schema_of(path: Path) -> Schema | None:
    """Return the schema by the file's place in a run folder, so that no reader can forget it; None accepts all."""
    if path.name == "supervisor.jsonl":
        return SUPERVISOR_EVENTS
    return {"events": RANK_EVENTS, "agents": AGENT_EVENTS}.get(path.parent.name)


def parse_event(line: bytes, schema: Schema | None = None) -> Event | None:
    """Return a line's record; None for half a line, no JSON object, or an event without a field of `schema`.

    A run folder may hold anything: output of a killed writer, of a full disk, of another version or machine. Readers
    can use the fields of `schema` without checking. A field of it that may be None is set to None if it is missing.
    """
    try:
        record = json.loads(line.decode())
        if b"\\u" in line:
            # Half of a surrogate pair is valid JSON, and cannot be printed.
            record = json.loads(json.dumps(record, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if schema is not None:
        if not _has_fields(record, _ALWAYS) or (schema is RANK_EVENTS and record["rank"] is None):
            return None
        if not _has_fields(record, schema.get(record["event"], {})):
            return None
    return record


def _has_fields(record: Event, fields: Mapping[str, Check]) -> bool:
    # Not `all` of a generator, which takes twice as long: long runs have millions of events.
    for name, check in fields.items():  # noqa: SIM110
        if not check(record.setdefault(name, None)):
            return False
    return True
