"""The parts of the wire formats by themselves: who owns what, how blocks are packed, in whic: what starts processes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shoal.sync.compression import native as compression_native
from shoal.sync.compression.native import load_kernels


def test_a_compiler_that_fails_leaves_nothing(uncached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_native, "_FLAGS", (*compression_native._FLAGS, "-no-such-flag"))
    assert load_kernels.__wrapped__() is None
    assert not uncached.exists() or not list(uncached.iterdir())


def test_kernels_are_built_once(uncached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if load_kernels.__wrapped__() is None:
        pytest.skip("no compiler")
    [library] = uncached.iterdir()
    assert stat.S_IMODE(uncached.stat().st_mode) == 0o700
    written = library.stat().st_mtime_ns
    assert load_kernels.__wrapped__() is not None
    assert [found.stat().st_mtime_ns for found in uncached.iterdir()] == [written]
    monkeypatch.setattr(compression_native, "_FLAGS", (*compression_native._FLAGS, "-DANOTHER"))
    assert load_kernels.__wrapped__() is not None
    assert len(list(uncached.iterdir())) == 2
