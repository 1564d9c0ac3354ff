"""Small files of a run folder, in any state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.records import documents
from shoal.records.documents import Documents, read_document


def test_json_and_toml_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"on": "local:2"}')
    (tmp_path / "config.toml").write_text('[run]\non = "local:2"\n')
    (tmp_path / "scaling.json").write_text('[{"ranks": 1}]')
    assert read_document(tmp_path / "job.json") == {"on": "local:2"}
    assert read_document(tmp_path / "config.toml") == {"run": {"on": "local:2"}}
    assert read_document(tmp_path / "scaling.json") == {"points": [{"ranks": 1}]}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"7", b'"text"', b"[" * 100_000],
    ids=["empty", "half", "bytes", "a number", "a text", "nested"],
)
def test_a_damaged_file_is_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.json").write_bytes(content)
    assert read_document(tmp_path / "job.json") == {}


def test_a_pipe_a_folder_and_a_missing_file_are_empty(tmp_path: Path) -> None:
    """To read a pipe would wait for its other end."""
    os.mkfifo(tmp_path / "job.json")
    assert [read_document(path) for path in (tmp_path / "job.json", tmp_path, tmp_path / "no.json")] == [{}, {}, {}]


def test_a_file_that_is_too_long_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.json").write_text('{"on": "local:2"}')
    monkeypatch.setattr(documents, "_MOST_BYTES", 10)
    assert read_document(tmp_path / "job.json") == {}


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path, cache = tmp_path / "job.json", Documents()
    assert cache.read(path) == {}
    path.write_text('{"a": 1}')
    first = cache.read(path)
    assert cache.read(path) is first
    path.write_text('{"a": 2}')
    os.utime(path, ns=(1, 1))
    assert cache.read(path) == {"a": 2}
