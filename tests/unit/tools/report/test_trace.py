"""The trace of a run: Chrome's trace-event format, and clocks of several machines on one axis."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import DataError
from shoal.events import Event, read_events
from shoal.run_folder import RunFolder
from shoal.tools.report import trace
from shoal.tools.report.trace import NodeClock, write_trace
from tests.support.run_samples import start, step

BEGAN = 1_790_000_000.0
PHASES = {"data_s": 0.01, "forward_s": 0.2, "backward_s": 0.4, "optimizer_s": 0.05}


def own_step(number: int, rank: int, ahead_s: float = 0.0, wait_s: float = 0.0, **more: Any) -> Event:
    """Return a step of one second by the clock of a node that is `ahead_s` ahead; both ranks end it together."""
    times = {**PHASES, "forward_s": 0.2 - wait_s, "wait_s": wait_s, "exposed_s": 0.1, "other_s": 0.24}
    fields = {**times, "allreduce_s": 0.3, "step_s": 0.999, "exchanged_s": 0.9, **more}
    return {"event": "step", "rank": rank, "time": BEGAN + number + ahead_s, "step": number, "loss": 1.0, **fields}


def make_run(path: Path, events: Mapping[int, Iterable[Event]]) -> RunFolder:
    (path / "events").mkdir(parents=True)
    run = RunFolder(path)
    run.job.write_text("{}")
    for rank, records in events.items():
        with run.events(rank).open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return run


def check_format(document: Any) -> list[dict[str, Any]]:
    """Check what the trace-event format demands of every event, as Perfetto's importer does; return the slices."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                assert isinstance(event["cat"], str)
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)
            case "i":
                assert event["ts"] >= 0
                assert event["s"] in ("g", "p", "t")
            case "C":
                assert event["ts"] >= 0
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case other:
                pytest.fail(f"unexpected phase {other}")
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for thread in {(event["pid"], event["tid"]) for event in slices}:
        # Slices of a thread are nested or apart: viewers drop others.
        open_until: list[float] = []
        own = [event for event in slices if (event["pid"], event["tid"]) == thread]
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.002
            open_until.append(event["ts"] + event["dur"])
    return slices


def test_ranks_of_machines_with_other_clocks_are_on_one_axis(tmp_path: Path) -> None:
    """The second clock is 100 s ahead and gains 1 ms a second."""
    ahead = [start(1, node="cellar", time=BEGAN + 100)]
    ahead += [own_step(number, 1, 100 + number / 1e3, wait_s=0.05) for number in range(1, 200)]
    here = [start(0, node="attic", time=BEGAN), *(own_step(number, 0) for number in range(1, 200))]
    summary = write_trace(make_run(tmp_path, {0: here, 1: ahead}))
    document = json.loads(summary.path.read_text())
    slices = check_format(document)
    assert summary.ranks == 2
    assert summary.unaligned == ()
    assert summary.offsets_s["cellar"] == pytest.approx(-100.19, abs=0.02)
    begins = {(event["tid"], event["name"]): event["ts"] for event in slices if event["cat"] == "step"}
    for number in range(1, 200):
        assert begins[0, f"step {number}"] == pytest.approx(begins[1, f"step {number}"], abs=20e3)
    assert {"compute", "communication", "wait", "data", "step"} <= {event["cat"] for event in slices}
    # The exchange of a step ends 0.9 s after its begin, on both ranks.
    ends = {e["tid"]: e["ts"] + e["dur"] for e in slices if e["name"] == "communication" and e["ts"] < 1.5e6}
    assert ends[0] == pytest.approx(begins[0, "step 1"] + 0.9e6, abs=2)


def test_checkpoints_recovery_and_warnings_are_shown(tmp_path: Path) -> None:
    entered = {"event": "membership", "rank": 0, "generation": "2-0", "lineage": "1-0", "ids": [0], "step": 2}
    events = [
        start(0, time=BEGAN),
        *(own_step(number, 0) for number in (1, 2)),
        {"event": "checkpoint", "rank": 0, "time": BEGAN + 2.5, "step": 2, "write_s": 0.4},
        {**entered, "time": BEGAN + 5, "how": "regrouped", "waited_s": 1.0, "formed_s": 0.5, "copied_s": 0.25},
        {"event": "warning", "rank": 0, "time": BEGAN + 5.5, "seen": "slow", "fix": "hurry", "why": "it is"},
        own_step(3, 0, 5.0, loss=float("nan")),
    ]
    run = make_run(tmp_path, {0: events})
    run.journal("here").parent.mkdir()
    run.journal("here").write_text(
        json.dumps({"event": "note", "rank": 0, "time": BEGAN + 1, "text": "a note of the agent"}) + "\n"
    )
    run.samples("here").parent.mkdir()
    run.samples("here").write_text(json.dumps({"event": "sample", "time": BEGAN + 3, "throttled": 0.5}) + "\n{}\n")
    document = json.loads(write_trace(run).path.read_text())
    slices = check_format(document)
    assert [event["args"] for event in document["traceEvents"] if event["ph"] == "C"] == [{"throttled": 0.5}]
    found = {event["cat"]: event["dur"] for event in slices}
    assert found["checkpoint"] == pytest.approx(0.4e6)
    assert found["recovery"] == pytest.approx(1.75e6)
    moments = {event["name"]: event["args"]["text"] for event in document["traceEvents"] if event["ph"] == "i"}
    assert moments == {"warning": "slow", "note": "a note of the agent"}


def test_a_measured_script_waits_for_its_slowest_rank(tmp_path: Path) -> None:
    def measured(rank: int, ready_s: float) -> list[Event]:
        times = {"step_s": 1.0, "optimizer_s": 0.1, "tail_s": 0.9 - ready_s, "ready_s": ready_s, "exchanged_s": 0.9}
        steps = [{"event": "step", "rank": rank, "time": BEGAN + n, "step": n, **times} for n in range(1, 5)]
        return [start(rank, measured=True, time=BEGAN), *steps]

    slices = check_format(
        json.loads(write_trace(make_run(tmp_path, {0: measured(0, 0.3), 1: measured(1, 0.8)})).path.read_text())
    )
    waits = {event["tid"]: event["dur"] for event in slices if event["name"] == "wait"}
    assert waits == {0: pytest.approx(0.5e6)}


def test_what_the_profiler_saw_is_shifted_to_the_axis(tmp_path: Path) -> None:
    run = make_run(tmp_path, {0: [start(0, time=BEGAN), own_step(1, 0)]})
    run.profile(0).parent.mkdir()
    operation = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 9, "ts": 500_000.0, "dur": 20.0}
    metadata = {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}
    run.profile(0).write_text(
        json.dumps({"baseTimeNanoseconds": int(BEGAN * 1e9), "traceEvents": [metadata, operation]})
    )
    slices = check_format(json.loads(write_trace(run).path.read_text()))
    [shown] = [event for event in slices if event["cat"] == "profile"]
    assert (shown["name"], shown["ts"], shown["dur"]) == ("aten::mm", pytest.approx(0.5e6, abs=1), 20.0)


class CountedEvent(dict[str, Any]):
    alive = most = 0

    def __init__(self, event: Event) -> None:
        super().__init__(event)
        CountedEvent.alive += 1
        CountedEvent.most = max(CountedEvent.most, CountedEvent.alive)

    def __del__(self) -> None:
        CountedEvent.alive -= 1


def test_no_more_than_a_few_events_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "read_events", lambda path: map(CountedEvent, read_events(path)))
    ranks = {rank: [start(rank, node=f"n{rank}"), *(step(n, rank) for n in range(80))] for rank in range(3)}
    run = make_run(tmp_path, ranks)
    write_trace(run, tmp_path / "trace.json.gz")
    assert 3 <= CountedEvent.most < 20
    with gzip.open(tmp_path / "trace.json.gz") as file:
        check_format(json.load(file))


def test_the_knots_of_a_long_run_are_bounded() -> None:
    clock = NodeClock()
    for number in range(20_000):
        clock.add(float(number), 5.0 + number / 2e4)
    clock.flush()
    assert len(clock.knots) <= 257
    assert clock.correct(10_000.0) == pytest.approx(10_005.5, abs=0.01)
    assert clock.correct(-10.0) == pytest.approx(-5.0, abs=0.01)


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has recorded a step"):
        write_trace(make_run(tmp_path, {0: [start(0)]}))
