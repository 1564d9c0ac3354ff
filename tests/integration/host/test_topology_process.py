"""Threads and pins of rank processes on the cores of this machine.

Exercises host.topology.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.host.topology import this_topology
from shoal_lab.kernel import read_groups
from tests.support.programs import TINY, read_jsonl, set_flags, shoal_command
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.waiting import wait_until
from tests.unit.host.test_topology import pin_each

needs_two_cores = pytest.mark.skipif(this_topology().usable < 2, reason="needs two cores")


@pytest.mark.parametrize(("wish", "ranks"), [("off", 2), ("auto", 1), ("auto", 99)])
def test_affinity_is_unchanged_when_pinning_is_off_or_useless(wish: str, ranks: int, tmp_path: Path) -> None:
    """Instead of 99 ranks: two that may use one core only."""
    allowed = sorted(os.sched_getaffinity(0))[: 1 if ranks == 99 else None]
    for pinned, now in run_ranks(pin_each, min(ranks, 2), tmp_path, wish, allowed):
        assert pinned is None
        assert now == allowed


@needs_two_cores
def test_ranks_of_one_machine_are_pinned_to_different_cores(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    (first, now_first), (second, now_second) = run_ranks(pin_each, 2, tmp_path, "auto", allowed)
    assert list(first or ()) == now_first
    assert list(second or ()) == now_second
    assert not set(now_first) & set(now_second)


def start_events(run: Path, prefix: Sequence[str], *words: str) -> list[dict[str, Any]]:
    """Train for a moment, behind the words of another command; return the `start` event of every rank."""
    argv = [*prefix, *shoal_command("train", "--out", run, "--steps", "2", *words, *set_flags(*TINY))]
    with ended_afterwards(run):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [read_jsonl(path)[0] for path in sorted((run / "events").glob("rank-*.jsonl"))]


@needs_two_cores
@pytest.mark.long
def test_threads_and_pins_of_a_run_follow_taskset(tmp_path: Path) -> None:
    """On a machine with more than two cores, the two are not neighbours."""
    cores = [core.cpus[0] for core in this_topology().cores]
    first, last = cores[0], cores[-1]
    two = start_events(tmp_path / "two", ["taskset", "-c", f"{first},{last}"], "--on", "local:2")
    assert [(event["threads"], event["cpus"]) for event in two] == [(1, [first]), (1, [last])]
    assert [event["hardware"]["cores"] for event in two] == [2, 2]
    one = start_events(tmp_path / "one", ["taskset", "-c", str(last)], "--on", "local:1")
    assert [(event["threads"], event["cpus"], event["hardware"]["cores"]) for event in one] == [(1, None, 1)]


@contextlib.contextmanager
def cpu_quota(cores: float) -> Iterator[list[str]]:
    """Make a control group with a quota; yield the words that start a command in it."""
    group = read_groups().cpu
    if group is None:
        pytest.skip("no control group for CPU time can be made here")
    folder = group.parent / f"shoal-test-{os.getpid()}"
    folder.mkdir()
    try:
        if group.version == 2:
            (folder / "cpu.max").write_text(f"{round(cores * 100_000)} 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text(str(round(cores * 100_000)))
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        wait_until(lambda: is_removed(folder), why=(folder / "cgroup.procs").read_text)


def is_removed(folder: Path) -> bool:
    """Remove a control group; it is busy while a process that ended has not quite gone."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@needs_two_cores
@pytest.mark.parametrize(("launcher", "ranks"), [("shoal", 1), ("shoal", 2), ("spawn", 1)])
def test_threads_and_pins_of_a_run_follow_a_quota(launcher: str, ranks: int, tmp_path: Path) -> None:
    """Without the quota one rank has two threads or more, and two ranks are pinned."""
    with cpu_quota(1.5) as prefix:
        events = start_events(tmp_path / "run", prefix, "--on", f"local:{ranks}", "--launcher", launcher)
    assert len(events) == ranks
    for event in events:
        assert (event["threads"], event["cpus"]) == (1, None)
        assert (event["hardware"]["cores"], event["hardware"]["quota"]) == (1, 1.5)
