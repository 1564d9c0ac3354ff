"""Event files on a disk that is temporarily full: no line is lost or torn, and the order is kept."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from shoal.events import EventLog, EventTail, FileMark, FileMarker, has_mark, read_events
from tests.support.programs import read_jsonl
from tests.support.runs import file_size_limit


def numbers(path: Path) -> list[int]:
    return [record["n"] for record in read_jsonl(path)]


@pytest.mark.parametrize("size", [0, 7, 100, 345, 346, 347])
def test_lines_of_a_full_disk_are_kept_and_written_in_order(tmp_path: Path, size: int) -> None:
    messages: list[str] = []
    log = EventLog(tmp_path / "log.jsonl", 0, messages.append)
    with file_size_limit(size):
        for n in range(50):
            log.append({"n": n})
        assert numbers(log.path) == list(range(len(numbers(log.path)))), "a line is torn or out of order"
        assert len(numbers(log.path)) + log.kept == 50
    log.append({"n": 50})
    log.close()
    assert numbers(log.path) == list(range(51))
    kept = 50 - size // 8 if size <= 80 else None
    assert len(messages) == 2, messages
    assert "kept in memory and written later" in messages[0]
    assert messages[1].startswith(f"writing {log.path} works again; ")
    assert kept is None or f"; {kept} lines were kept and are written" in messages[1]


def test_no_line_is_lost_on_a_disk_that_fills_and_empties_often(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl", 0, lambda text: None)
    for n in range(300):
        with file_size_limit(log.path.stat().st_size + n % 13) if n % 3 else contextlib.nullcontext():
            log.append({"n": n})
    assert log.flush() == 0
    assert numbers(log.path) == list(range(300))


def test_lines_beyond_the_memory_limit_are_dropped_and_reported(tmp_path: Path) -> None:
    messages: list[str] = []
    log = EventLog(tmp_path / "log.jsonl", 0, messages.append, most_kept=10)
    with file_size_limit(0):
        for n in range(25):
            log.append({"n": n})
        assert (log.kept, log.dropped, log.flush(timeout_s=0)) == (10, 15, 25)
    assert log.flush() == 15
    assert numbers(log.path) == list(range(15, 25))
    assert "its oldest lines are dropped from now on" in messages[1]
    assert messages[2].endswith("10 lines were kept and are written; 15 older ones are lost")


def test_sync_fails_while_lines_are_kept_in_memory(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl", 0, lambda text: None)
    with file_size_limit(0):
        log.append({"n": 0})
        with pytest.raises(OSError, match="File too large"):
            log.sync()
    log.sync()
    assert numbers(log.path) == [0]


@pytest.mark.parametrize("torn", [b'{"n":2', b"\0" * 5000, b"{"], ids=["half", "zeros", "byte"])
def test_the_torn_line_of_a_killed_writer_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":0}\n{"n":1}\n' + torn)
    log = EventLog(path, 0)
    log.append({"n": 3})
    log.close()
    assert path.read_bytes() == b'{"n":0}\n{"n":1}\n{"n":3}\n'


def test_a_record_without_its_line_end_gets_one(tmp_path: Path) -> None:
    """Readers accept it as a record, so the next writer does not write that step again: removed, it would be lost."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":0}\n{"n":1}')
    log = EventLog(path, 0)
    log.append({"n": 2})
    log.close()
    assert path.read_bytes() == b'{"n":0}\n{"n":1}\n{"n":2}\n'


def test_a_line_appended_while_a_torn_line_is_removed_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writer appends after the end of the file was read and before it is truncated."""
    path = tmp_path / "log.jsonl"
    log, other = EventLog(path, 0), EventLog(path, 1)
    path.write_bytes(b'{"n":0}\n{"n":')
    cut, writers = os.ftruncate, []

    def append_first(fd: int, size: int) -> None:
        writers.append(threading.Thread(target=other.append, args=({"n": 1},)))
        writers[0].start()
        writers[0].join(0.05)
        cut(fd, size)

    monkeypatch.setattr(os, "ftruncate", append_first)
    log.cut_torn_line()
    writers[0].join()
    assert numbers(path) == [0, 1]
    log.close()
    other.close()


def test_a_lock_held_by_a_frozen_process_only_delays_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = EventLog(path, 0)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        log.append({"n": 0})
        assert numbers(path) == [0]
    log.close()


def test_a_reader_that_starts_at_a_torn_line_gets_the_first_new_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event":"old"}\n{"event":"ol')
    tail = EventTail(path)
    tail.skip_to_end()
    log = EventLog(path, 0)
    log.write("first")
    log.write("second")
    log.close()
    assert [event["event"] for event in tail.poll()] == ["first", "second"]


def test_unreadable_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n":0}\nnonsense\n\0\0\0\n[1]\n{"n":1}\n{"n"')
    tail = EventTail(path)
    assert [record["n"] for record in read_events(path)] == [record["n"] for record in tail.poll()] == [0, 1]
    assert tail.unreadable == 3, "the torn last line may still be completed"


def test_a_mark_covers_whole_lines_and_detects_any_change(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    marker = FileMarker(path)
    assert marker.mark() == FileMark(0, hashlib.sha256().hexdigest())
    for n in range(3):
        with path.open("a") as file:
            file.write(json.dumps({"n": n}) + "\n")
        mark = marker.mark()
        assert mark == FileMark(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    with path.open("a") as file:
        file.write("half")
    assert marker.mark() == mark
    assert has_mark(path, mark)
    content = path.read_bytes()
    for changed in (content[: mark.size - 1], b"[" + content[1:], b""):
        path.write_bytes(changed)
        assert not has_mark(path, mark)


def test_a_log_can_record_its_own_write_errors(tmp_path: Path) -> None:
    """A rank's warning that its events cannot be written is one of these events."""
    log: EventLog

    def record_warning(text: str) -> None:
        log.append({"n": text.split(" ")[0]})

    log = EventLog(tmp_path / "log.jsonl", 0, record_warning)
    with file_size_limit(0):
        for n in range(3):
            log.append({"n": n})
    log.close()
    assert [record["n"] for record in read_jsonl(log.path)] == [0, "cannot", 1, 2, "writing"]
