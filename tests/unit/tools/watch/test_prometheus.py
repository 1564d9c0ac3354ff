"""`/metrics`: read by a parser of the exposition format that shares nothing with the writer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.run_folder import RunFolder
from shoal.tools.watch.prometheus import CONTENT_TYPE, _format_value, format_metrics
from shoal.tools.watch.run_state import LiveState
from tests.support.run_samples import all_events, make_run, make_session_run, start, step
from tests.unit.tools.watch.test_run_state import append, read
from tests.unit.tools.watch.test_server import TOKEN, ask

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def parse(text: str) -> Samples:
    """Parse the text, and check what Prometheus demands of it."""
    assert text.endswith("\n")
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    for line in text[:-1].split("\n"):
        if match := re.fullmatch(rf"# HELP ({_NAME}) (.+)", line):
            assert match[1] not in helped
            helped.add(match[1])
        elif match := re.fullmatch(rf"# TYPE ({_NAME}) (gauge|counter)", line):
            # Once for each name, and before its samples.
            assert match[1] not in kinds
            assert not any(name == match[1] for name, _ in samples)
            kinds[match[1]] = match[2]
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            labels = match[2] or ""
            pairs = _LABEL.findall(labels)
            assert "".join(found[0] for found in _LABEL.finditer(labels)) == labels
            key = (match[1], frozenset((name, unescape(value)) for name, value in pairs))
            assert key not in samples
            assert list(kinds)[-1] == match[1]
            samples[key] = float(match[3])
    assert helped == kinds.keys()
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    return samples


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)


def value(samples: Samples, name: str, /, **labels: str) -> float:
    return samples[f"shoal_{name}", frozenset(labels.items())]


def metrics(run: RunFolder) -> Samples:
    return parse(format_metrics(read(run)))


def test_a_training_has_its_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", all_events(2, 100))
    status, headers, body = ask(run, "/metrics")
    assert (status, headers[b"content-type"].decode()) == (200, CONTENT_TYPE)
    samples = parse(body)
    assert (value(samples, "step"), value(samples, "members"), value(samples, "nodes")) == (100, 2, 1)
    assert value(samples, "loss") == step(100)["loss"]
    assert value(samples, "val_loss") == pytest.approx(1.0549, abs=1e-3)
    assert value(samples, "tokens_per_second") == pytest.approx(1536 / value(samples, "step_seconds"))
    for rank in ("0", "1"):
        labels = {"rank": rank, "node": "here"}
        parts = [
            value(samples, "rank_step_part_seconds", **labels, part=part)
            for part in ("compute", "communication", "wait")
        ]
        assert sum(parts) == pytest.approx(value(samples, "rank_step_seconds", **labels), rel=1e-5)
        assert value(samples, "rank_step", **labels) == 100
    assert value(samples, "run_state", state="finished") == 1
    assert value(samples, "run_state", state="running") == 0
    assert value(samples, "recoveries_total") == 0


def test_the_token_is_needed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1)])
    assert ask(run, "/metrics", query="")[0] == 403
    assert ask(run, "/metrics", query="", authorization=f"Bearer {TOKEN}")[0] == 200


def test_changes_verdicts_and_faults_are_counted(tmp_path: Path) -> None:
    events = [event for rank in (0, 1) for event in (start(rank), step(1, rank))]
    run = make_run(tmp_path / "run", events)
    entered = {"event": "membership", "rank": 0, "lineage": "1-0", "step": 1}
    append(
        run.events(0),
        {**entered, "time": 1.0, "generation": "1-0", "ids": [0, 1], "how": "first"},
        {"event": "choice", "rank": 0, "time": 2.0, "step": 1, "why": "int8 is faster"},
        {"event": "warning", "rank": 0, "time": 3.0, "seen": "the disk is full", "fix": "df -h"},
        {**entered, "time": 4.0, "generation": "3-0", "ids": [0], "how": "changed"},
        step(2),
    )
    samples = metrics(run)
    assert (value(samples, "generation"), value(samples, "recoveries_total"), value(samples, "members")) == (3, 1, 1)
    assert value(samples, "events_total", kind="verdict") == 1
    assert value(samples, "events_total", kind="warning") == 1
    assert value(samples, "events_total", kind="fault") == 0


def test_events_that_are_no_longer_kept_stay_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1)])
    warnings = [{"event": "warning", "rank": 0, "time": 3.0, "seen": f"seen {n}", "fix": ""} for n in range(300)]
    append(run.events(0), *warnings)
    assert value(metrics(run), "events_total", kind="warning") == 300


def test_values_of_a_users_program_are_metrics(tmp_path: Path) -> None:
    samples = metrics(make_session_run(tmp_path / "run"))
    assert value(samples, "value", name="accuracy") == 0.2
    assert value(samples, "samples_per_second") > 0
    assert ("shoal_tokens_per_second", frozenset()) not in samples


def test_any_name_is_a_label(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    odd = 'a "b" \\n {c="d"} ü'
    append(run.events(0), {"event": "log", "rank": 0, "time": 5.0, "step": 20, odd: 7})
    assert value(metrics(run), "value", name=odd) == 7


def test_a_run_that_has_not_begun_has_a_state(tmp_path: Path) -> None:
    samples = metrics(make_run(tmp_path / "run", []))
    assert value(samples, "step") == 0
    assert ("shoal_loss", frozenset()) not in samples
    assert sum(number for (name, _), number in samples.items() if name == "shoal_run_state") == 1


def test_numbers_are_written_as_the_format_has_them() -> None:
    written = [_format_value(number) for number in (3, 0.25, 1e-9, float("nan"), float("inf"), float("-inf"))]
    assert written == ["3", "0.25", "1e-09", "NaN", "+Inf", "-Inf"]


def test_reading_metrics_takes_no_news_from_viewers(tmp_path: Path) -> None:
    state = LiveState(make_run(tmp_path / "run"))
    state.poll()
    format_metrics(state)
    assert state.has_news
