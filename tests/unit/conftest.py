"""A unit test starts no process: an audit hook refuses it. What starts one belongs to tests/integration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
# The unit test that runs now. An audit hook cannot be removed, and integration tests may run in this process too.
_running: list[str] = []


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    # matplotlib lists the fonts once, when it has no cache of them yet.
    if _running and event in _STARTS and not str(arguments[0]).endswith("fc-list"):
        raise AssertionError(f"{_running[0]} starts a process ({event}); move it to tests/integration")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def starts_no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A fork server starts the ranks of `run_ranks` without an event in this process.
    monkeypatch.setattr(BaseProcess, "start", lambda process: _refuse("os.fork", (process.name,)))
    _running.append(request.node.nodeid)
    yield
    _running.clear()
