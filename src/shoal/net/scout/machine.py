"""To be filled."""

from __future__ import annotations

from typing import Any


def observe(request: dict[str, Any]) -> dict[str, Any]:
    return {}
