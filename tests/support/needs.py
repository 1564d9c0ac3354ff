"""Requirements of a test on the machine. A missing one skips the test, or fails it with SHOAL_REQUIRE_ALL=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shoal_lab.kernel import find_tool

# Each has several machines or environments at work, and four such tests at once miss their deadlines: two groups, of
# which pytest-xdist gives each to one worker.
HEAVY = (pytest.mark.xdist_group("heavy-1"), pytest.mark.xdist_group("heavy-2"))


def need_tool(*names: str) -> str:
    """Return the path of the first installed tool. With SHOAL_REQUIRE_ALL=1, as in CI, a missing one fails the test."""
    return _present(next(filter(None, map(find_tool, names)), None), " or ".join(names))


def need_library(name: str) -> str:
    """Return the path of a library. Debian keeps libraries in a folder per architecture."""
    return _present(next(map(str, Path("/usr/lib").glob(f"*/{name}")), None), name)


def need_gpu() -> None:
    """Skip the test on a machine without a GPU, also in CI: `make test-gpu` runs these where there is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def _present(path: str | None, what: str) -> str:
    if path:
        return path
    reason = f"{what} is not installed"
    if os.environ.get("SHOAL_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason}, and SHOAL_REQUIRE_ALL=1 promises that it is")
    pytest.skip(reason)
