"""What a test needs of the machine. Missing, it is skipped by name, or fails where everything is promised."""

from __future__ import annotations

import os

import pytest

from shoal.cluster.lab.tools import find_tool


def need_tool(*names: str) -> str:
    """The path of the first tool that is installed. With SHOAL_REQUIRE_ALL=1, as in CI, a missing one is a failure."""
    for name in names:
        if path := find_tool(name):
            return path
    reason = f"{' or '.join(names)} is not installed"
    if os.environ.get("SHOAL_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason}, and SHOAL_REQUIRE_ALL=1 promises that it is")
    pytest.skip(reason)
