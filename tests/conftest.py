"""Check that a test leaves no process, no changed variable and no file outside its own folder."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.support.paths import ROOT
from tests.support.ranks import standing_helpers
from tests.support.waiting import wait_until

_GRACE_S = 5.0
# pytest stores the running test in the first; torch sets the second when the first optimizer is created.
_IGNORED_VARIABLES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}

# The duration of one example depends on the other programs of a shared machine; pytest-timeout ends a test that hangs.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share a module's fixture, such as a finished training, on one worker of pytest-xdist."""
    for item in items:
        definitions = getattr(item, "_fixtureinfo", None)
        shared = definitions.name2fixturedefs.values() if definitions else ()
        is_shared = any(fixture.scope in ("module", "class") for fixtures in shared for fixture in fixtures)
        if is_shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    # Longest first: a long test that starts last keeps one worker busy while the others have nothing left to do.
    items.sort(key=_timeout_s, reverse=True)


def pytest_collection_finish() -> None:
    """Compute with one thread: several pytest processes share the cores, and OpenMP's idle threads would spin there."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    # Five thousand tests and all that they import stay: a collection would look at each of them, many times a minute.
    gc.collect()
    gc.freeze()


class _GroupsAreKept:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Refuse a pytest whose names of tests pytest-xdist cannot extend: each worker would repeat all trainings."""
        if not config.getoption("loadgroup", False):
            return
        grouped = [item for item in items if item.get_closest_marker("xdist_group")]
        if any("@" not in item.nodeid for item in grouped):
            raise pytest.UsageError(
                "this pytest ignores xdist_group; run `make setup` for the version in constraints.txt"
            )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_GroupsAreKept())


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write encoded corpora to one folder of this session, shared by its tests, never to the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    variables, files, children = dict(os.environ), _files(), _children()
    yield
    changed = {name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name)}
    assert not changed - _IGNORED_VARIABLES, f"left variables changed: {changed}"
    assert _files() <= files, f"left files: {_files() - files}"
    _wait_for_children(children)


def _wait_for_children(before: set[int]) -> None:
    def left() -> set[int]:
        return _children() - before - standing_helpers()

    wait_until(lambda: not left(), _GRACE_S, why=lambda: f"left processes: {[_describe(pid) for pid in left()]}")


def _children() -> set[int]:
    """Return the living descendants of this process. It runs twice per test, so it does not scan all of /proc."""
    return {pid for pid in _descendants(os.getpid()) if _alive(pid)}


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(pid: int) -> str:
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.Error:
        return str(pid)


def _files() -> set[Path]:
    """List the project folder and the current folder, without caches of tools."""
    return {path for folder in (ROOT, Path.cwd()) for path in folder.iterdir() if not path.name.startswith(".")}
