"""Logs of several ranks read as one: in the order of writing, line by line, nothing lost."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from shoal.launch.found import Found, is_alive
from shoal.launch.logs import LogFollower
from shoal.launch.ranks import LogClock, times_of
from shoal.runfolder import RunFolder


class Rank:
    """Writes into its log, and its agent notes the time as often as it is asked to."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self.log = run.log(f"node{rank + 1}", f"rank-{rank}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.now = 0.0
        self.clock = LogClock(self.log, lambda: self.now)

    def says(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)

    def noted(self, now: float) -> None:
        self.now = now
        self.clock.note()


def texts(follower: LogFollower) -> list[str]:
    return [line.text for line in follower.poll()]


def test_lines_come_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first, second = Rank(run, 0), Rank(run, 1)
    first.says("a\nb\n")
    first.noted(1.0)
    second.says("c\n")
    second.noted(2.0)
    first.says("d\n\n")
    first.noted(3.0)
    second.says("e\n")
    second.noted(4.0)
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


def test_a_line_whose_time_is_not_noted_yet_is_the_newest(tmp_path: Path) -> None:
    """The first rank was silent for long: its last note is old, and what it says now is not."""
    run = RunFolder(tmp_path)
    first, second = Rank(run, 0), Rank(run, 1)
    first.says("long ago\n")
    first.noted(1.0)
    second.says("just now\n")
    second.noted(100.0)
    first.says("this moment\n")
    assert texts(LogFollower(run)) == ["long ago", "just now", "this moment"]


def test_whole_lines_only_until_nobody_writes_any_more(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    follower = LogFollower(run)
    assert texts(follower) == []
    rank = Rank(run, 0)
    rank.says("whole\nha")
    assert texts(follower) == ["whole"]
    rank.says("lf\nlast words")
    assert texts(follower) == ["half"]
    assert texts(follower) == []
    assert [line.text for line in follower.last_words()] == ["last words"]


def test_times_that_a_full_disk_cut_short_do_no_harm(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    rank = Rank(run, 0)
    rank.says("a\n")
    with times_of(rank.log).open("a") as file:
        file.write("1.0")
    rank.noted(2.0)
    rank.says("b\n")
    rank.noted(3.0)
    assert texts(LogFollower(run)) == ["a", "b"]


def test_a_process_with_the_number_of_an_earlier_one_is_another(tmp_path: Path) -> None:
    me = psutil.Process()
    found = Found(os.getpid(), tmp_path, "rank-0", "local", "sleep", me.create_time())
    assert not is_alive(found), "unmarked: nobody's run"
    child = psutil.Popen(["sleep", "60"], env={"SHOAL_RUN": str(tmp_path), "PATH": os.environ["PATH"]})
    try:
        alive = replace(found, pid=child.pid, started_at=child.create_time())
        assert is_alive(alive)
        assert not is_alive(replace(alive, started_at=alive.started_at - 5))
    finally:
        child.kill()
        child.wait()
