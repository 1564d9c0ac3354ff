"""Inputs of fuzz tests: noise, and valid documents with some values changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from shoal.errors import ShoalError

QUICK = 25
MANY = 1000
# For one example on a busy machine; a slower reader counts as hanging.
DEADLINE_MS = 5000

ODD_NUMBERS = st.sampled_from([-1, 0, 2**31, 2**53, 2**63, 2**64, 10**400, 1e308, -0.5, float("nan"), float("inf")])
ODD_TEXTS = st.sampled_from(
    [
        "",
        "\0",
        "../../etc/passwd",
        "/",
        "~no-such-user/x",
        "\ud800",
        "x" * 5000,
        "9" * 5000,
        "٣",
        "-1",
        "1e999",
        "\x1b[2J",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | ODD_NUMBERS | st.text(max_size=20) | ODD_TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10) | ODD_TEXTS, inner, max_size=4),
    max_leaves=8,
)
TEXT = st.text(max_size=200) | ODD_TEXTS
NOISE = st.binary(max_size=300) | st.sampled_from([b"[" * 20_000, b'{"a":' * 9_000, b"9" * 5000, b"\xff\xfe\0"])


@st.composite
def bent(draw: DrawFn, document: Any) -> Any:
    """Change or remove one to three values of a valid document."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(changed))
        if not places:
            return draw(JSON)
        holder, key = draw(st.sampled_from(places))
        if draw(st.booleans()) and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = draw(JSON)
    return changed


def _places(document: Any) -> Any:
    pairs = document.items() if isinstance(document, dict) else enumerate(document) if _is_list(document) else ()
    for key, value in list(pairs):
        yield document, key
        yield from _places(value)


def _is_list(document: Any) -> bool:
    return isinstance(document, list)


@st.composite
def torn(draw: DrawFn, whole: bytes) -> bytes:
    """Remove, repeat, change or insert some bytes."""
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted((draw(st.integers(0, len(whole))), draw(st.integers(0, len(whole)))))
        part = draw(st.sampled_from([b"", whole[a:b] * 2, b"\0", b"\xff", b"\n"]) | st.binary(max_size=8))
        whole = whole[:a] + part + whole[b if draw(st.booleans()) else min(a + 1, len(whole)) :]
    return whole


def as_json(documents: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    return documents.map(lambda document: json.dumps(document).encode())


def around(document: Any) -> SearchStrategy[bytes]:
    """Return anything that may be in place of this JSON document."""
    return as_json(bent(document)) | torn(json.dumps(document).encode()) | as_json(JSON) | NOISE


@dataclass(frozen=True)
class Reader:
    """`read` gets the drawn value and its own folder. `allowed`: documented exceptions besides shoal's errors."""

    drawn: SearchStrategy[Any]
    read: Callable[[Any, Path], object]
    allowed: tuple[type[Exception], ...] = ()

    def holds(self, value: Any, folder: Path) -> None:
        """Check that the value is read, or refused with a printable message."""
        refused: ShoalError | None = None
        try:
            self.read(value, folder)
        except ShoalError as error:
            refused = error
        except self.allowed:
            return
        assert refused is None or (refused.seen and refused.render().encode(errors="replace"))

    def try_out(self, count: int, folder: Path) -> None:
        @settings(
            max_examples=count,
            deadline=DEADLINE_MS,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(self.drawn)
        def holds(value: Any) -> None:
            self.holds(value, folder)

        holds()
