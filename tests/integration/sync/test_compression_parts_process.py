"""Building and loading the compression kernels, and the bytes that every wire format sends.

Exercises sync.compression.
"""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from shoal.cost.model_size import grad_bytes
from shoal.cost.network import ring_bytes
from shoal.sync.compression import native as compression_native
from shoal.sync.compression.native import load_kernels
from tests.support.ranks import run_ranks
from tests.unit.sync.test_compression_parts import (
    BYTES_SHAPES,
    FORMATS,
    count_bytes,
    uncached,  # noqa: F401 - a fixture
)


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Load the library from the usual cache: a library loaded from a test's folder stays loaded under its name."""
    load_kernels()


def test_a_failing_compiler_leaves_no_file(uncached: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(compression_native, "_FLAGS", (*compression_native._FLAGS, "-no-such-flag"))
    assert load_kernels.__wrapped__() is None
    assert not uncached.exists() or not list(uncached.iterdir())


def test_kernels_are_built_once(uncached: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    if load_kernels.__wrapped__() is None:
        pytest.skip("no compiler")
    [library] = uncached.iterdir()
    assert stat.S_IMODE(uncached.stat().st_mode) == 0o700
    written = library.stat().st_mtime_ns
    assert load_kernels.__wrapped__() is not None
    assert [path.stat().st_mtime_ns for path in uncached.iterdir()] == [written]
    monkeypatch.setattr(compression_native, "_FLAGS", (*compression_native._FLAGS, "-DANOTHER"))
    assert load_kernels.__wrapped__() is not None
    assert len(list(uncached.iterdir())) == 2


def test_a_damaged_library_is_not_used(uncached: Path) -> None:  # noqa: F811
    if load_kernels() is None:
        pytest.skip("no compiler")
    library = compression_native._find_or_build(uncached)
    library.write_bytes(b"\x7fELF of old")
    assert load_kernels.__wrapped__() is None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", FORMATS)
def test_sent_bytes_match_the_theoretical_bytes(form: str, size: int, tmp_path: Path) -> None:
    wanted = ring_bytes(size, grad_bytes(BYTES_SHAPES.values(), form))
    for sent_bytes in run_ranks(count_bytes, size, tmp_path, form, 4):
        assert sent_bytes / 4 == pytest.approx(wanted, rel=0.03)
