"""Figures from events, and the files written at the end of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.manifest import Manifest
from shoal.cost.network import payload_factor, ring_bytes
from shoal.events import Event
from shoal.records.explain_run import explain_step_time
from shoal.records.final_states import ReplicaReport
from shoal.records.manifest import carry_over, current_manifest, main, read_manifest, write_derived_files
from shoal.records.summary import summarize, timing_rows
from shoal.runs.start import command_line
from tests.support.run_samples import (
    GRAD_BYTES,
    TOKENS,
    all_events,
    demo_points,
    end,
    make_run,
    rank_events,
    start,
    step,
)

VERDICT = ReplicaReport(
    equal=True, byte_equivalent=True, max_abs_diff=0.0, first_difference=None, ranks=2, tensors=3,
    differing_ranks=[], digests={0: "a", 1: "a"},
)  # fmt: skip


def test_figures_come_from_the_second_half_only() -> None:
    slow_start = [step(n, step_s=9.0 if n <= 10 else 0.5, allreduce_s=n / 1000) for n in range(1, 21)]
    summary = summarize([start(world_size=1), *slow_start])
    assert summary.measured == (11, 20)
    assert summary.step_s is not None
    assert summary.step_s.median == summary.step_s.mean == summary.step_s.p95 == 0.5
    assert summary.allreduce_s is not None
    assert summary.allreduce_s.median == pytest.approx(0.0155)
    assert summary.allreduce_s.p95 == pytest.approx(0.01955)
    assert summary.tokens_per_s == TOKENS / 0.5


def test_phases_are_averaged_over_ranks() -> None:
    summary = summarize(all_events())
    assert summary.ranks[0].phases["wait"].median == pytest.approx(0.002)
    assert summary.ranks[1].phases["wait"].median == pytest.approx(0.006)
    assert summary.phases["wait"] == pytest.approx(0.004, rel=1e-3)


def test_an_unrecorded_phase_is_absent() -> None:
    off = [{"event": "step", "rank": 0, "step": n, "loss": 1.0, "tokens": 64, "step_s": 0.1} for n in range(1, 5)]
    summary = summarize([start(world_size=1), *off])
    assert summary.phases == {}
    assert summary.allreduce_s is None
    assert summary.tokens_per_s == pytest.approx(640)


def test_a_median_step_of_no_duration_has_no_phases() -> None:
    """The clocks of two of three ranks stood still."""
    events = [start(rank, world_size=3) for rank in range(3)]
    events += [step(number, rank, step_s=0.1 if rank == 0 else 0.0) for rank in range(3) for number in range(1, 9)]
    assert summarize(events).phases == {}
    assert "a step took 0 ms" in explain_step_time(summarize(events))


def test_a_step_without_recorded_phases_is_not_counted_as_other() -> None:
    """This happens when a run was resumed with another `sync.measure`."""
    timed = [step(number, step_s=0.1) for number in (*range(1, 21), *range(31, 41))]
    bare = [{"event": "step", "rank": 0, "step": n, "loss": 1.0, "tokens": 64, "step_s": 0.1} for n in range(21, 31)]
    whole, mixed = (summarize([start(world_size=1), *events]) for events in (timed, [*timed[:20], *bare, *timed[20:]]))
    assert mixed.measured == (21, 40)
    assert mixed.phases["forward"] == pytest.approx(whole.phases["forward"], rel=0.1)


def test_hidden_exposed_and_wait_add_up_to_the_all_reduce() -> None:
    """One of three ranks hides its all-reduces: the median of the hidden time is zero."""
    none = dict.fromkeys(("data_s", "backward_s", "optimizer_s", "wait_s", "other_s"), 0.0)
    events = [start(rank, world_size=3) for rank in range(3)]
    for rank, hidden in ((0, 0.02), (1, 0.0), (2, 0.0)):
        times = {**none, "hidden_s": hidden, "exposed_s": 0.018 - 0.9 * hidden, "wait_s": 0.002 - 0.1 * hidden}
        times |= {"allreduce_s": 0.02, "forward_s": 0.08 + hidden, "step_s": 0.1}
        events += [step(number, rank, **times) for number in range(1, 21)]
    summary = summarize(events)
    assert summary.hidden_s is not None
    assert summary.hidden_s == pytest.approx(0.02 / 3)
    assert summary.hidden_s + summary.phases["exposed"] + summary.phases["wait"] == pytest.approx(0.02)


def test_wire_bytes_are_shared_by_the_ranks_of_a_node() -> None:
    summary = summarize(all_events())
    assert summary.wire_bytes_per_step == (2 * GRAD_BYTES + 40_000) / 2
    assert summary.theoretical_bytes_per_step == GRAD_BYTES


def test_wire_bytes_of_ranks_on_separate_nodes_are_averaged() -> None:
    events = [start(0, node="a"), start(1, node="b"), step(1, 0, wire_bytes=100), step(1, 1, wire_bytes=300)]
    assert summarize(events).wire_bytes_per_step == 200


def test_measurement_restarts_after_a_sync_choice() -> None:
    """The times and bytes before it belong to another sync method."""
    chosen = {"event": "choice", "rank": 0, "step": 6, "sync": "diloco", "wire": "fp16", "round_steps": 4}
    before = [step(n, step_s=9.0) for n in range(1, 7)]
    after = [step(n, step_s=0.5) for n in range(7, 23)]
    summary = summarize([start(0), start(1), *before, {**chosen, "grad_bytes": GRAD_BYTES // 2}, *after])
    assert summary.measured == (15, 22)
    assert summary.step_s is not None
    assert summary.step_s.median == 0.5
    assert summary.theoretical_bytes_per_step == GRAD_BYTES / 2 / 4
    assert (summary.start["sync"], summary.choice["step"]) == ("diloco", 6)


def test_figures_of_outer_methods_cover_whole_rounds() -> None:
    """Every fourth step has an exchange: a median of steps would not include it."""
    steps = [
        step(n, step_s=0.9, exposed_s=0.8, wire_bytes=4000, allreduce_s=0.7)
        if n % 4 == 0
        else {**step(n, step_s=0.1, exposed_s=0.0, wire_bytes=0), "allreduce_s": None}
        for n in range(1, 25)
    ]
    summary = summarize([start(world_size=2, round_steps=4), *steps])
    assert summary.step_s is not None
    assert summary.step_s.median == pytest.approx((3 * 0.1 + 0.9) / 4)
    assert summary.tokens_per_s == pytest.approx(TOKENS / 0.3)
    assert summary.phases["exposed"] == pytest.approx(0.2)
    assert summary.allreduce_s is not None
    assert summary.allreduce_s.median == 0.7
    assert summary.wire_bytes_per_step == 1000
    assert summary.theoretical_bytes_per_step == GRAD_BYTES / 4


def test_a_round_longer_than_the_measurement_uses_its_mean() -> None:
    summary = summarize([start(world_size=1, round_steps=100), *(step(n, step_s=float(n)) for n in range(1, 11))])
    assert summary.step_s is not None
    assert summary.step_s.median == 8.0


def test_the_loss_of_the_world_replaces_that_of_a_rank() -> None:
    later = [{"event": "loss", "rank": 0, "step": number, "loss": 2.0} for number in (1, 7)]
    summary = summarize([start(world_size=1), step(1, loss=1.0), step(2, loss=1.5), *later])
    assert summary.loss.tolist() == [2.0, 1.5]


@given(st.integers(1, 500), st.integers(0, 10**12))
def test_ring_bytes_are_below_two_gradients(world_size: int, grad_bytes: int) -> None:
    assert 0 <= ring_bytes(world_size, grad_bytes) <= 2 * grad_bytes
    assert payload_factor(world_size) == pytest.approx(2 - 2 / world_size)


def test_a_world_of_zero_ranks_has_no_payload_factor() -> None:
    with pytest.raises(ValueError, match="at least one"):
        payload_factor(0)


def test_the_last_record_of_a_step_wins() -> None:
    redone = [start(world_size=1, resumed_from=2), step(3, loss=7.0), step(4, loss=8.0)]
    summary = summarize([start(world_size=1), *(step(n, loss=1.0) for n in range(1, 5)), *redone])
    assert summary.loss_steps.tolist() == [1, 2, 3, 4]
    assert summary.loss.tolist() == [1.0, 1.0, 7.0, 8.0]


def test_the_speed_is_that_of_the_last_start() -> None:
    """A run resumed on another machine is not described by the times of the first."""
    before = [step(n, step_s=5.0) for n in range(1, 91)]
    after = [step(n, step_s=1.0) for n in range(91, 101)]
    summary = summarize([start(world_size=1), *before, start(world_size=1, resumed_from=90), *after])
    assert summary.measured == (96, 100)
    assert summary.step_s is not None
    assert summary.step_s.mean == 1.0


def test_resuming_a_finished_run_keeps_its_figures() -> None:
    events = [*rank_events(0, 1), start(world_size=1, resumed_from=100), end()]
    assert summarize(events).measured == (51, 100)


def test_ranks_of_an_earlier_larger_world_are_left_out() -> None:
    events = [*all_events(2, 10), start(0, 1, resumed_from=10), *(step(n) for n in range(11, 21)), end(0, 20)]
    summary = summarize(events)
    assert (list(summary.ranks), summary.world_size, summary.status) == ([0], 1, "finished")


def test_the_status_of_a_run_follows_its_events() -> None:
    whole, alive = all_events(2, 4), [event for event in all_events(2, 4) if event["event"] != "end"]
    fault = {"event": "fault", "rank": 1, "error": "RunFailed", "seen": "no memory", "why": "", "fix": ""}
    assert summarize(whole).status == "finished"
    assert summarize(alive).status == "unfinished"
    assert summarize(rank_events(0, 2, 4)).status == "unfinished", "the other rank recorded no end"
    assert summarize([*alive, end(0, 4, "interrupted"), end(1, 4, "interrupted")]).status == "interrupted"
    assert summarize([*alive, fault]).status == "failed"
    assert summarize([*alive, fault, start(0), start(1), end(0), end(1)]).status == "finished", "resumed and done"


def test_a_lost_peer_is_named_after_the_cause() -> None:
    lost = {"event": "fault", "rank": 0, "error": "PeerLost", "seen": "connection closed"}
    cause = {"event": "fault", "rank": 1, "error": "RunFailed", "seen": "no memory"}
    assert [fault["rank"] for fault in summarize([lost, cause]).faults] == [1, 0]


def test_an_empty_list_of_events_is_not_an_error() -> None:
    summary = summarize([])
    assert (summary.status, summary.steps_done, summary.final_loss) == ("unfinished", 0, None)
    assert summarize([start()]).step_s is None


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["event", "rank", "step", "loss", "step_s", "world_size", "hardware", "val_loss", "time"]),
            st.sampled_from(["start", "step", "eval", "end", 0, 1, -1, 2.5, None, True, [], {}, math.nan]),
        )
    )
)
def test_foreign_lines_never_break_a_reader(lines: list[dict[str, object]]) -> None:
    summarize(lines)
    list(timing_rows(lines))


def test_timing_rows_have_every_recorded_time() -> None:
    rows = list(
        timing_rows([start(), step(1), step(1, data_s=0.5), {"event": "step", "rank": 1, "step": 1, "step_s": 2}])
    )
    assert len(rows) == 2
    assert rows[0]["data_s"] == 0.5
    assert {"step", "rank", "step_s", "wait_s", "allreduce_s"} <= rows[0].keys()
    assert rows[1] == {"step": 1, "rank": 1, "step_s": 2.0}


def test_the_manifest_has_the_cluster_and_the_commands(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", None, "run.on=lab:2,link=1gbit")
    run.job.write_text(json.dumps({"resume": True, "commands": ["shoal train", "shoal train --resume run"]}))
    manifest = write_derived_files(run)
    assert (manifest.on, manifest.lab) == ("lab:2,link=1gbit", "lab:2,link=1gbit")
    assert manifest.commands == ["shoal train", "shoal train --resume run"]
    run.job.write_text("[]")
    assert write_derived_files(run).commands == []


@pytest.mark.parametrize(
    ("inside", "boots", "backend"),
    [
        ("gloo", ("a", "a"), "gloo"),
        ("shared", ("a", "a"), "shared memory"),
        ("copies", ("a", "b"), "shared memory, gloo between machines"),
    ],
)
def test_the_backend_in_the_manifest_is_the_one_that_carried_the_gradients(
    inside: str, boots: tuple[str, str], backend: str, tmp_path: Path
) -> None:
    starts = [
        start(rank, node=f"n{rank}", inside=inside, hardware={"boot_id": boot}) for rank, boot in enumerate(boots)
    ]
    manifest = write_derived_files(make_run(tmp_path / "run", [*starts, step(1, 0), step(1, 1)]))
    assert (manifest.backend, manifest.process_group) == (backend, "gloo")


def test_the_time_between_two_launches_does_not_count() -> None:
    def at(time: float, event: Event) -> Event:
        return event | {"time": time}

    entered = {"event": "membership", "rank": 0}
    first = [at(0.0, start(0)), at(50.0, step(1)), at(40.0, step(2))]
    later = [at(9000.0, entered), at(9001.0, start(0)), at(9011.0, step(3)), at(9011.5, entered), at(9021.0, end(0))]
    assert summarize([*first, *later]).duration_s == pytest.approx(50 + 20)
    assert summarize([]).duration_s is None


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/home/me/bin/shoal", "train", "--out", "my run"], "shoal train --out 'my run'"),
        (["/usr/lib/python3/shoal/__main__.py", "train"], "shoal train"),
        (["shoal", "train", "--set", "run.token=abc"], "shoal train --set run.token=HIDDEN"),
        (["shoal", "run", "x.py", "--api-key", "abc", "--lr", "1"], "shoal run x.py --api-key HIDDEN --lr 1"),
        (["shoal", "run", "x.py", "--password=abc"], "shoal run x.py --password=HIDDEN"),
        (["shoal", "run", "x.py", "https://me:abc@host/a"], "shoal run x.py https://me:HIDDEN@host/a"),
        (["shoal", "train", "--tokenizer", "bpe"], "shoal train --tokenizer bpe"),
        (["shoal", "plan", "--tokens", "4e6"], "shoal plan --tokens 4e6"),
    ],
)
def test_a_command_line_is_kept_without_secrets(words: list[str], shown: str) -> None:
    assert command_line(words) == shown


def test_finish_writes_timings_and_manifest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    manifest = write_derived_files(run)
    assert len(run.timings.read_text().splitlines()) == 200
    stored = json.loads(run.manifest.read_text())
    assert stored["tokens_per_sec"] == {"2": pytest.approx(manifest.tokens_per_sec[2])}
    assert stored["tokens_per_sec_2proc"] == manifest.tokens_per_sec[2]
    assert stored["tokens_per_sec_1proc"] is None
    assert stored["byte_equivalent"] is None
    assert stored["nodes"][0] | {"cpu": "Some CPU", "ranks": 2, "threads": 1} == stored["nodes"][0]
    assert (stored["preset"], stored["model_params"], stored["status"]) == ("grammar", 1_350_000, "finished")
    assert (stored["on"], stored["lab"], stored["commands"]) == ("local:2", None, [])
    assert stored["duration_s"] == pytest.approx(200)
    assert stored["allreduce_p50_ms"] == pytest.approx(22, abs=1)
    assert "all-reduce" in stored["lesson_notes"]
    assert sorted(path.name for path in run.path.iterdir()) == [
        "config.toml",
        "events",
        "manifest.json",
        "timings.jsonl",
    ]


def test_scaling_points_add_every_rank_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_derived_files(run, scaling=demo_points())
    rewritten = write_derived_files(run)
    assert list(rewritten.tokens_per_sec) == [1, 2, 4]
    assert rewritten.tokens_per_sec_1proc == pytest.approx(10_240)
    assert "Two ranks were faster than one rank" in rewritten.lesson_notes


def test_a_verdict_is_kept_until_the_run_continues(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_derived_files(run, replicas=VERDICT)
    assert write_derived_files(run).byte_equivalent is True
    with run.events(0).open("a") as file:
        file.write(json.dumps(step(101)) + "\n")
    assert write_derived_files(run).byte_equivalent is None


def test_a_new_verdict_replaces_the_stored_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    stored = write_derived_files(run, replicas=VERDICT)
    fresh = current_manifest(run, VERDICT.model_copy(update={"byte_equivalent": False, "max_abs_diff": math.inf}))
    assert carry_over(fresh, stored).byte_equivalent is False


@pytest.mark.parametrize("events", [[], [start()], all_events(2, 1)[:4]], ids=["nothing", "started", "one step"])
def test_a_run_that_died_early_still_gets_a_manifest(tmp_path: Path, events: list[dict[str, object]]) -> None:
    manifest = write_derived_files(make_run(tmp_path / "run", events))
    assert manifest.status == "unfinished"


def test_a_torn_line_loses_only_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with run.events(0).open("a") as file:
        file.write('{"event":"step","rank":0,"step":101,"lo')
    assert write_derived_files(run).steps == 100


def test_a_nan_loss_survives_the_round_trip(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(world_size=1), step(1, loss=math.nan)])
    write_derived_files(run)
    json.loads(run.manifest.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    stored = read_manifest(run)
    assert stored is not None
    assert stored.final_loss is not None
    assert math.isnan(stored.final_loss)


def test_a_broken_manifest_is_rewritten(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.manifest.write_text('{"seed": ')
    assert write_derived_files(run) == read_manifest(run)


def test_a_manifest_of_a_newer_version_is_read(tmp_path: Path) -> None:
    manifest = write_derived_files(make_run(tmp_path / "run"))
    assert Manifest.model_validate({**manifest.model_dump(), "something_new": 1}) == manifest


def test_finish_needs_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main([]) == 2


def test_other_load_excludes_the_cpu_time_of_the_ranks() -> None:
    """Two ranks of one machine used 18 of the 30 CPU seconds that its cores worked in 10 seconds."""
    ends = [{**end(rank), "wall_s": 10.0, "cpu_s": 9.0, "machine_busy_s": 30.0} for rank in (0, 1)]
    assert summarize([start(0), start(1), *ends]).other_load == pytest.approx(1.2)
    assert summarize([start(0), start(1), end(0), end(1)]).other_load is None


def test_peak_memory_is_the_maximum_over_ranks() -> None:
    ends = [{**end(rank), "peak_memory_bytes": 1000 * (rank + 1)} for rank in (0, 1)]
    assert summarize([start(0), start(1), *ends]).peak_memory_bytes == 2000
    assert summarize([start(0), end(0)]).peak_memory_bytes is None


def test_with_shared_memory_one_rank_per_node_sends() -> None:
    together = [start(rank, 3, node="a", inside="shared") for rank in range(3)]
    assert summarize(together).theoretical_bytes_per_step == 0
    apart = [start(rank, 3, node=node, inside="shared") for rank, node in enumerate("aab")]
    # A ring of two nodes: each sends the gradients once, one of them for two ranks.
    assert summarize(apart).theoretical_bytes_per_step == (GRAD_BYTES / 2 + GRAD_BYTES) / 2


def test_the_slowest_of_independent_ranks_is_as_slow_as_their_distributions_give() -> None:
    """Each rank takes 0.1 s, or 0.2 s in every tenth step, never both in the same one."""
    events = [start(rank, world_size=2) for rank in range(2)]
    for number in range(1, 401):
        for rank in range(2):
            own_s = 0.2 if number % 10 == rank else 0.1
            events.append(step(number, rank, step_s=0.25, wait_s=0.25 - own_s))
    tail = summarize(events).tail
    assert tail is not None
    assert tail.by_rank[0][0] == pytest.approx(0.1)
    assert tail.by_rank[0][3] == pytest.approx(0.2)
    assert tail.slowest_s == pytest.approx(0.12)
    # Both on time: 0.9 · 0.9; with a third, 0.9 again.
    assert tail.independent_s == pytest.approx(0.1 + 0.1 * (1 - 0.81))
    assert tail.one_more_s == pytest.approx(0.1 + 0.1 * (1 - 0.729))


def test_one_rank_has_no_tail() -> None:
    assert summarize([start(0, world_size=1), *(step(number) for number in range(100))]).tail is None
