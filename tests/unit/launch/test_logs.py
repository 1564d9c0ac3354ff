"""Logs of several ranks merged into one: in the order of writing, line by line, nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.rank_processes import LogClock, times_of
from shoal.cli.host import LocalRankDisplay
from shoal.cli.output import make_console
from shoal.cli.progress import LineDisplay
from shoal.cli.runs import RunEventPrinter
from shoal.events import LONGEST_LINE, Event, LineCutter, LineTail
from shoal.launch.logs import LogFollower
from shoal.run_folder import RunFolder
from tests.support.run_samples import make_run, rank_events, start, step


class Rank:
    """A rank's log with the timestamps that its agent records."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self.log = run.log(f"node{rank + 1}", f"rank-{rank}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.now = 0.0
        self.clock = LogClock(self.log, lambda: self.now)

    def write(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def record_time(self, now: float) -> None:
        self.now = now
        self.clock.note()


def texts(follower: LogFollower) -> list[str]:
    return [line.text for line in follower.poll()]


def test_lines_are_merged_in_the_order_of_writing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first, second = Rank(run, 0), Rank(run, 1)
    first.write("a\nb\n")
    first.record_time(1.0)
    second.write("c\n")
    second.record_time(2.0)
    first.write("d\n\n")
    first.record_time(3.0)
    second.write("e\n")
    second.record_time(4.0)
    lines = LogFollower(run).poll()
    assert [(line.text, line.rank, line.node, line.time) for line in lines] == [
        ("a", 0, "node1", 1.0),
        ("b", 0, "node1", 1.0),
        ("c", 1, "node2", 2.0),
        ("d", 0, "node1", 3.0),
        ("", 0, "node1", 3.0),
        ("e", 1, "node2", 4.0),
    ]
    assert [line.text for line in LogFollower(run, rank=1).poll()] == ["c", "e"]


def test_a_line_without_a_timestamp_is_the_newest(tmp_path: Path) -> None:
    """The first rank was silent for long: its last timestamp is old, its new line is not."""
    run = RunFolder(tmp_path)
    first, second = Rank(run, 0), Rank(run, 1)
    first.write("long ago\n")
    first.record_time(1.0)
    second.write("just now\n")
    second.record_time(100.0)
    first.write("this moment\n")
    assert texts(LogFollower(run)) == ["long ago", "just now", "this moment"]


def test_only_whole_lines_are_shown_until_the_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    follower = LogFollower(run)
    assert texts(follower) == []
    rank = Rank(run, 0)
    rank.write("whole\nha")
    assert texts(follower) == ["whole"]
    rank.write("lf\nunfinished")
    assert texts(follower) == ["half"]
    assert texts(follower) == []
    assert [line.text for line in follower.last_words()] == ["unfinished"]


def test_truncated_timestamps_are_skipped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    rank = Rank(run, 0)
    rank.write("a\n")
    with times_of(rank.log).open("a") as file:
        file.write("1.0")
    rank.record_time(2.0)
    rank.write("b\n")
    rank.record_time(3.0)
    assert texts(LogFollower(run)) == ["a", "b"]


def test_a_line_without_an_end_is_read_once(tmp_path: Path) -> None:
    """Every poll once read the unfinished line again from its start: 8 s of processor time for 150 MB."""
    path, size, pieces = tmp_path / "rank-0.log", 1 << 20, 40
    tail = CountingTail(path)
    with path.open("ab") as file:
        for _ in range(pieces):
            file.write(b"x" * size)
            file.flush()
            assert tail.poll_bytes() == []
    assert tail.bytes_read == pieces * size
    assert tail.held_bytes() <= 2 * LONGEST_LINE
    with path.open("ab") as file:
        file.write(b"\nnext\n")
    (long, end), (following, _) = tail.poll_bytes()
    assert long.startswith(b"x" * LONGEST_LINE)
    note = f" … [{pieces * size - LONGEST_LINE:,} more bytes of this line are not shown]"
    assert long[LONGEST_LINE:].decode() == note
    assert (end, following) == (pieces * size + 1, b"next")


class CountingTail(LineTail):
    """Count the bytes read from the file."""

    bytes_read = 0

    def _unread(self) -> Iterator[bytes]:
        for block in super()._unread():
            self.bytes_read += len(block)
            yield block

    def held_bytes(self) -> int:
        return len(self._cutter._rest)


def test_only_the_last_state_of_a_progress_bar_is_a_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    rank, follower = Rank(run, 0), LogFollower(run)
    rank.write("begin\r\n")
    for percent in range(0, 101, 10):
        rank.write(f"\r{percent:3}%|bar| {percent} of 100")
        shown = texts(follower)
        assert shown == (["begin"] if percent == 0 else [])
    rank.write("\nafter\n")
    assert texts(follower) == ["100%|bar| 100 of 100", "after"]
    rank.write("50%\r")
    assert texts(follower) == []
    rank.write("60%\r")
    assert [line.text for line in follower.last_words()] == ["60%"]


def test_an_unfinished_progress_bar_is_shown_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    rank, follower = Rank(run, 0), LogFollower(run)
    rank.write("plain, unfinished")
    monkeypatch.setattr("shoal.launch.logs._BAR_EVERY_S", 0.0)
    assert texts(follower) == []
    rank.write("\r10%")
    assert texts(follower) == ["10%"]
    assert texts(follower) == [], "the same state is not shown twice"
    rank.write("\r20%")
    assert texts(follower) == ["20%"]


def test_the_current_line_of_each_rank_is_available_to_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    first, second, follower = Rank(run, 0), Rank(run, 1), LogFollower(run, shows_current=True)
    monkeypatch.setattr("shoal.launch.logs._BAR_EVERY_S", 0.0)
    second.write("loading")
    first.write("whole\n\r10%\r20%")
    assert texts(follower) == ["whole"], "the state of the bar is not a line where it is shown in place"
    assert [(line.rank, line.text) for line in follower.current()] == [(0, "20%"), (1, "loading")]
    first.write("\r100%\n")
    assert texts(follower) == ["100%"]
    assert [line.text for line in follower.current()] == ["loading"]


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"x" * 9]), max_size=30),
    st.lists(st.integers(1, 7), min_size=1, max_size=9),
    st.booleans(),
)
def test_lines_do_not_depend_on_how_the_stream_was_split(
    parts: list[bytes], sizes: list[int], overwrites: bool
) -> None:
    """The ends of lines do not either; timestamps refer to them."""
    stream = b"".join(parts)
    at_once, in_pieces = LineCutter(8, overwrites), LineCutter(8, overwrites)
    expected = at_once.feed(stream)
    lines, start = [], 0
    for size in itertools.cycle(sizes):
        if start >= len(stream):
            break
        lines += in_pieces.feed(stream[start : start + size])
        start += size
    assert lines == expected
    assert in_pieces.rest() == at_once.rest()
    assert sum(consumed for _, consumed in expected) + at_once.pending_bytes == len(stream)
    visible = [raw.rstrip(b"\r").rpartition(b"\r")[2] if overwrites else raw for raw in stream.split(b"\n")[:-1]]
    for (line, _), whole in zip(expected, visible, strict=True):
        assert line == whole if len(whole) <= 8 else line.startswith(whole[:8])


# Following a training


def write_events(path: Path, *events: Event) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event, separators=(",", ":")) + "\n" for event in events)


def note(kind: str, **more: object) -> Event:
    return {"event": kind, "rank": 0, "time": 1_790_000_000.0, **more}


def test_following_a_training_shows_its_progress_like_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", [], "train.steps=9")
    write_events(run.events(0), start(0), step(4))
    write_events(run.events(1), start(1), step(4, rank=1))
    write_events(run.supervisor, note("note", text="an old note"))
    printer = RunEventPrinter(run, LineDisplay(make_console()), with_progress=True)
    printer.show()
    opening = capsys.readouterr().err
    assert "1.35M parameters (1,350,000) on 2 ranks" in opening
    assert f"step 4/9  loss {step(4)['loss']:.3f}  " in opening
    fix = "go on from the last checkpoint: shoal train --resume RUN"
    write_events(run.events(0), step(5), step(6), note("eval", step=6, val_loss=1.25))
    write_events(run.events(1), step(5, rank=1), {**note("warning", seen="it is hot", why="", fix=fix), "rank": 1})
    write_events(run.supervisor, note("note", text="node2 has left"), note("ended", code=0))
    printer.show_end()
    shown = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert shown[0] == "note: node2 has left"
    # Steps 5 and 6 come too soon after step 4 for a line of their own.
    assert shown[1] == "step 6: validation loss 1.2500"
    assert shown[2].startswith(f"warning: it is hot (go on from the last checkpoint: shoal train --resume {run.path}")
    assert shown[3] == "note: the run has ended well"
    assert len(shown) == 4


def test_the_logs_of_one_rank_are_followed_without_the_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", [start(0), start(1)])
    printer = RunEventPrinter(run, LineDisplay(make_console()), with_progress=False)
    write_events(run.events(0), step(5))
    write_events(run.supervisor, note("note", text="node2 has left"))
    printer.show()
    assert capsys.readouterr().err == "note: node2 has left\n"


def test_a_joined_machine_shows_its_rank_by_its_global_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [event for event in rank_events(3, 4, 2) if event["event"] != "end"]
    run = make_run(tmp_path / "run", own, "train.steps=2")
    LocalRankDisplay()(run)
    shown = capsys.readouterr().err
    assert "rank 3: 18,000 of 36,000 samples" in shown
    assert "rank 0" not in shown
    assert "step 2/2  loss" in shown
