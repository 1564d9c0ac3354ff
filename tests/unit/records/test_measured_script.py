"""Events of a script that `shoal run --measure` recorded: waits, exchanges, stragglers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.config.schema import EngineConfig
from shoal.event_schema import RANK_EVENTS, parse_event
from shoal.events import Event
from shoal.host.node_stats import NodeStats
from shoal.records.explain_run import explain_step_time
from shoal.records.final_states import compare_digests
from shoal.records.manifest import compose_manifest
from shoal.records.measured_script import exchange_findings, find_stragglers, is_measured, name_collectives
from shoal.records.rank_log import read_rank_logs
from shoal.records.summary import summarize, timing_rows
from tests.support.run_samples import start


def measured_run(
    ready_s: tuple[float, ...] = (0.06, 0.08),
    steps: int = 40,
    exchanges: tuple[int | None, ...] = (80, 80),
    sync: str = "ddp",
) -> list[Event]:
    """Return the events of ranks whose own part of a step takes so long; 10 ms of communication follow."""
    events: list[Event] = []
    for rank, own_s in enumerate(ready_s):
        events.append(start(rank, len(ready_s), measured=True, tokens_per_step=None, sync=sync))
        for number in range(1, steps + 1):
            tail_s = max(ready_s) - own_s + 0.01
            times = {"step_s": max(ready_s) + 0.012, "optimizer_s": 0.002, "allreduce_s": tail_s, "hidden_s": 0.0}
            step = {"event": "step", "rank": rank, "time": 1_790_000_001.0 + number, "step": number, **times}
            events.append({**step, "tail_s": tail_s} | ({"ready_s": own_s} if number > 1 else {}))
        end: dict[str, Any] = {"status": "finished", "step": steps, "exchanges": exchanges[rank]}
        events.append({"event": "end", "rank": rank, "time": 1_790_000_100.0, **end})
    return events


def test_the_wait_follows_from_durations_of_all_ranks() -> None:
    rows = {(row["rank"], row["step"]): row for row in timing_rows(measured_run())}
    assert (rows[0, 5]["wait_s"], rows[0, 5]["exposed_s"]) == pytest.approx((0.02, 0.01))
    assert (rows[1, 5]["wait_s"], rows[1, 5]["exposed_s"]) == pytest.approx((0.0, 0.01))
    assert "wait_s" not in rows[0, 1], "of the first step it is not known when the ranks were at the same point"


def test_no_wait_is_known_while_a_rank_has_not_recorded_the_step() -> None:
    events = [event for event in measured_run() if event["rank"] == 0 or event.get("step", 0) < 20]
    rows = {(row["rank"], row["step"]): row for row in timing_rows(events)}
    assert "wait_s" in rows[0, 19]
    assert "wait_s" not in rows[0, 20]


def test_a_summary_without_loss_and_tokens() -> None:
    summary = summarize(measured_run())
    assert (summary.status, summary.steps_done, summary.world_size) == ("finished", 40, 2)
    assert summary.final_loss is None
    assert summary.tokens_per_s is None
    assert summary.step_s is not None
    assert summary.step_s.median == pytest.approx(0.092)
    assert summary.phases["wait"] == pytest.approx(0.01)


def test_a_script_that_was_started_again_counts_its_steps_anew() -> None:
    first = [event for event in measured_run() if event["event"] != "end"]
    logs = read_rank_logs([*first, *measured_run(steps=10)])
    assert logs[0].steps.numbers.tolist() == list(range(1, 11))


def test_events_of_a_rank_that_was_lost_before_a_restart_do_not_count() -> None:
    three = [event for event in measured_run((0.06, 0.08, 0.5), exchanges=(1, 1, 1)) if event["event"] != "end"]
    rows = {(row["rank"], row["step"]): row for row in timing_rows([*three, *measured_run()])}
    assert rows[0, 5]["wait_s"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("sync", "exchanges", "words", "is_wrong"),
    [
        ("ddp", (80, 80), "", False),
        ("ddp", (0, 0), "rank 0, 1 took part in no all-reduce", True),
        ("ddp", (80, 79), "rank 0 in 80, rank 1 in 79", True),
        ("own", (80, 79), "", False),
        ("own", (80, None), "rank 1 took part in no exchange", True),
        ("own", (None, None), "no exchange between the ranks was seen: the script does not use Distributed", False),
    ],
)
def test_exchanges_are_counted(sync: str, exchanges: tuple[int | None, ...], words: str, is_wrong: bool) -> None:
    logs = read_rank_logs(measured_run(exchanges=exchanges, sync=sync))
    assert is_measured(logs)
    findings = list(exchange_findings(logs))
    assert len(findings) == bool(words)
    for text, wrong in findings:
        assert words in text
        assert wrong == is_wrong


def with_collectives(events: list[Event], rare: int = 0) -> list[Event]:
    """Let every step have two all-gathers, and the steps up to `rare` a broadcast."""
    gather = {"calls": 2, "bytes": 64, "waited_s": 0.004}
    send = {"calls": 1, "bytes": 8, "waited_s": 3.0}
    for event in events:
        if event["event"] == "step":
            event["collectives"] = {"all-gather": gather} | ({"broadcast": send} if event["step"] <= rare else {})
    return events


def test_own_collectives_are_summed_up_by_kind() -> None:
    summary = summarize(with_collectives(measured_run(sync="own"), rare=22))
    assert summary.collectives == {"all-gather": (2, 64, 0.004)}
    assert name_collectives(summary.collectives) == "all-gather 4 ms"
    assert "was in collectives of the script's own: all-gather 4 ms." in explain_step_time(summary)
    manifest = compose_manifest(EngineConfig(), summary, None)
    assert (manifest.sync, manifest.collectives["all-gather"].waited_s) == ("own", 0.004)
    # Every step up to the middle of the measured ones has it.
    assert "broadcast" in summarize(with_collectives(measured_run(sync="own"), rare=32)).collectives


def test_what_was_not_seen_is_not_stated_as_zero() -> None:
    kept = ("event", "rank", "time", "step", "step_s", "optimizer_s")
    events = [
        {name: event[name] for name in kept if name in event} if event["event"] == "step" else event
        for event in measured_run(sync="own", exchanges=(None, None))
    ]
    summary = summarize(events)
    assert (summary.allreduce_s, summary.hidden_s, summary.collectives, summary.tail) == (None, None, {}, None)
    assert set(summary.phases) == {"optimizer", "other"}
    text = explain_step_time(summary)
    assert "No exchange between the ranks was seen." in text
    assert "into forward, backward and everything else" in text


def test_collectives_of_another_form_are_no_event() -> None:
    schema = RANK_EVENTS
    good = {"event": "step", "rank": 0, "time": 1.0, "step": 1, "step_s": 0.1}
    for collectives, is_event in (({}, True), ({"all-gather": {"calls": 1}}, False), ([1], False)):
        line = json.dumps(good | {"collectives": collectives}).encode()
        assert (parse_event(line, schema) is not None) == is_event


def test_a_straggler_is_named_once_it_is_sure() -> None:
    [warning] = find_stragglers(read_rank_logs(measured_run((0.05, 0.12))))
    assert "all ranks wait for rank 1 on here: it takes 2.4 times as long" in warning["seen"]
    assert [found["seen"] for found in summarize(measured_run((0.05, 0.12))).warnings] == [warning["seen"]]
    assert not list(find_stragglers(read_rank_logs(measured_run((0.06, 0.07)))))
    assert not list(find_stragglers(read_rank_logs(measured_run((0.05, 0.12), steps=10))))


def with_machine(events: list[Event], machine: list[float]) -> list[Event]:
    return [event | {"machine": machine, "starved": 0.7} if event["event"] == "end" else event for event in events]


def test_ranks_that_are_slow_alike_because_of_their_threads_are_named() -> None:
    crowded = NodeStats(wanted=3.9, waited=2.9, cpus=2, run_cpus=2, threads=4, machine=7)
    events = with_machine(measured_run((0.06, 0.06)), list(crowded.numbers))
    [warning] = summarize(events).warnings
    assert warning["seen"] == (
        "the threads of two ranks on here want 7.8 processors and may use 2: they wait for one 74% of the time"
    )
    assert (warning["cause"], "--threads 1" in warning["fix"]) == ("oversubscription", True)
    one = with_machine(measured_run((0.06,)), list(crowded.numbers))
    assert [warning["cause"] for warning in summarize(one).warnings] == ["oversubscription"]


def test_a_run_of_an_earlier_version_has_no_such_verdict() -> None:
    twelve_numbers = [0.0, 0.0, 0.3, 5.0, *[0.0] * 8]
    summary = summarize(with_machine(measured_run((0.06, 0.06)), twelve_numbers))
    assert (summary.warnings, summary.demand) == ([], None)
    # What it did record still explains a late rank.
    frozen = with_machine(measured_run((0.05, 0.12)), [0.0, 0.6, *[0.0] * 10])
    events = [
        event | {"machine": [0.0] * 12} if event["rank"] == 0 and "machine" in event else event for event in frozen
    ]
    assert [warning["cause"] for warning in summarize(events).warnings] == ["freezes"]


def test_sharded_parameters_are_not_called_identical() -> None:
    """Each rank of FSDP holds a shard: there are no digests, and nothing was compared."""
    manifest = compose_manifest(EngineConfig(), summarize(measured_run()), compare_digests({}))
    assert (manifest.byte_equivalent, manifest.max_abs_diff) == (None, None)
    same = compose_manifest(EngineConfig(), summarize(measured_run()), compare_digests({0: "a", 1: "a"}))
    assert same.byte_equivalent is True
