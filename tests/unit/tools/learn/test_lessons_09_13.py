"""Lessons 9 to 13 pass with the right predictions, and fail with a wrong one and with a broken measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import UsageError
from shoal.tools.learn.experiment import Value
from tests.support.lessons import Recorded, play_recorded, shoal_lesson, write_events

Files = Callable[[Path], dict[str, Any]]


def wrong_of(judgements: Mapping[str, str]) -> list[str]:
    return [name for name, judgement in judgements.items() if judgement == "wrong"]


def writing(files: Mapping[str, Any]) -> Files:
    """Return a command that leaves these files: texts, or JSON documents."""

    def write(folder: Path) -> dict[str, Any]:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return {}

    return write


# 9: the maximum of N


def simulated(slowest: float) -> dict[str, Any]:
    """Return what `shoal simulate` prints where the slowest rank takes this many times the usual step."""
    return {"policies": {"live": {"mean_s": {"useful": 1.0, "straggling": slowest - 1}}}}


def two_ranks(slow: float = 1.0) -> Files:
    """Return a run of two ranks that vary independently; the slower one has `slow` times as much to do in all."""
    random = np.random.default_rng(35_000)

    def train(folder: Path) -> dict[str, Any]:
        own = np.exp(0.1 * random.standard_normal((2, 120)))
        own[1] *= slow
        events = [
            {"event": "step", "rank": rank, "step": step + 1, "loss": 1.0}
            | {"step_s": float(own[:, step].max()), "wait_s": float(own[:, step].max() - own[rank, step])}
            for rank in (0, 1)
            for step in range(120)
        ]
        write_events(folder / "two-ranks", events)
        return {}

    return train


def maxima(
    three: float = 1.198, eight: float = 1.340, many: float = 1.92, train: Files | None = None
) -> dict[str, Recorded]:
    values = {"three.toml": simulated(three), "eight.toml": simulated(eight), "many.toml": simulated(many)}
    return {**values, "shoal train": train or two_ranks()}


RIGHT_9: dict[str, Value] = {"three": 17.0, "eight": 28.0}


def test_the_slowest_of_several_is_predicted(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(9, tmp_path, maxima(), RIGHT_9)
    assert verdict == "passed"
    # Of a normal distribution it would be 16.9 and 28.5.
    assert result.theory == pytest.approx({"three": 17.4, "eight": 31.3}, abs=0.1)
    assert result.measured == pytest.approx({"three": 17.4, "eight": 31.4}, abs=0.2)


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (maxima(), {"three": 0.0, "eight": 28.0}, ["three"]),
        (maxima(), {"three": 17.0, "eight": 60.0}, ["eight"]),
        (maxima(three=1.5), RIGHT_9, ["three"]),
        (maxima(many=1.2), RIGHT_9, ["1,024 simulated ranks: within 20% of the integral"]),
        (
            maxima(train=two_ranks(slow=6.0)),
            RIGHT_9,
            ["two real ranks: the slowest is within 20% of the integral over their own steps"],
        ),
    ],
)
def test_a_wrong_maximum_fails_lesson_9(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(9, tmp_path, recorded, answers)
    assert (verdict, wrong_of(judgements)) == ("not passed", wrong)


# 10: who must open the firewall

LAB = {"nodes": [{"name": "node1", "address": "10.77.0.1"}, {"name": "node2", "address": "10.77.0.2"}]}
OPEN_NODE1 = {
    "id": "reach.pair",
    "node": "node1",
    "fix": "sudo nft insert rule inet shoal input ip saddr 10.77.0.2 accept",
}
ROUNDS = [
    [{"from": "node1", "to": "node2", "chunk": chunk} for chunk in (0, 1)],
    [{"from": "node2", "to": "node1", "chunk": chunk} for chunk in (1, 0)],
]


class Doctor:
    """Prints one document before and another after the rule."""

    def __init__(self, findings: list[dict[str, str]], is_healthy: bool) -> None:
        self._documents = [{"findings": findings, "healthy": False}, {"findings": [], "healthy": is_healthy}]

    def __call__(self, _: Path) -> dict[str, Any]:
        return self._documents.pop(0)


def firewalled(
    findings: list[dict[str, str]] | None = None,
    is_healthy: bool = True,
    dialled: int = 1,
    is_equal: bool = True,
    sent: float = 1.0,
) -> dict[str, Recorded]:
    ranks = {
        f"ring-{rank}.json": {
            "node": f"node{rank + 1}",
            "dialled": ["10.77.0.1"] if rank == dialled else [],
            "rounds": ROUNDS[rank],
            "is_equal": is_equal,
            "sent_of_gradients": sent,
        }
        for rank in (0, 1)
    }
    return {
        "lab up": LAB,
        "lab firewall": "",
        "lab exec": "",
        "lab down": "",
        "shoal doctor": Doctor([OPEN_NODE1] if findings is None else findings, is_healthy),
        "shoal run": writing(ranks),
    }


RIGHT_10: dict[str, Value] = {"machine": "node1", "rule": "address"}


def test_the_lower_address_must_open(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(10, tmp_path, firewalled(), RIGHT_10)
    assert verdict == "passed"
    assert result.figures["dialled"] == "node2 dialled 10.77.0.1."
    assert str(result.figures["story"]).startswith(
        "1: node1 sends chunk 1 to node2 and node2 sends chunk 2 to node1; 2:"
    )


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (lambda: firewalled(), {"machine": "node2", "rule": "address"}, ["machine"]),
        (lambda: firewalled(), {"machine": "node1", "rule": "range"}, ["rule"]),
        (lambda: firewalled(findings=[]), RIGHT_10, ["machine", "rule"]),
        (lambda: firewalled(findings=[OPEN_NODE1, OPEN_NODE1 | {"node": "node2"}]), RIGHT_10, ["machine", "rule"]),
        (
            lambda: firewalled(is_healthy=False),
            RIGHT_10,
            ["after the rule that doctor printed, doctor is content"],
        ),
        (lambda: firewalled(dialled=0), RIGHT_10, ["node2 dialled node1, once"]),
        (lambda: firewalled(sent=0.5), RIGHT_10, ["each rank sent 2(N−1)/N of the gradients"]),
        (lambda: firewalled(is_equal=False), RIGHT_10, ["the ring by hand gave what gloo's all-reduce gave"]),
    ],
)
def test_a_wrong_machine_fails_lesson_10(
    recorded: Callable[[], dict[str, Recorded]], answers: dict[str, Value], wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(10, tmp_path, recorded(), answers)
    assert (verdict, wrong_of(judgements)) == ("not passed", wrong)


# 11: pull the plug


def plugs(
    kill_s: float = 0.2, freeze_s: float = 8.1, steps: int = 120, is_ok: bool = True, generations: int = 2
) -> dict[str, Recorded]:
    errors = {
        f"{name}.json": {"step": 12, "error_after_s": seconds, "error": "Connection closed by peer"}
        for name, seconds in (("kill", kill_s), ("freeze", freeze_s))
    }
    # After step 20 the session takes 0.6 s longer.
    events = [
        json.dumps({"event": "step", "step": step, "time": 0.1 * step + (0.6 if step > 20 else 0.0)})
        for step in range(1, steps + 1)
    ]
    return {
        **dict.fromkeys(("lab up", "lab start", "lab thaw", "lab down", "lab exec", "lab kill", "shoal attach"), ""),
        ">kill-1.log": writing({"kill.steps": "12"}),
        ">freeze-1.log": writing({"freeze.steps": "12"}),
        "lab kill": writing({"kill.json": errors["kill.json"]}),
        "lab freeze": writing({"freeze.json": errors["freeze.json"]}),
        "shoal run": writing({"session/events/rank-0.jsonl": "\n".join(events)}),
        "shoal verify": {"ok": is_ok, "ledger": {"ok": True, "generations": generations}},
    }


RIGHT_11: dict[str, Value] = {"kill": "at once", "freeze": "timeout", "session": "continues"}


def test_death_silence_and_a_session_are_told_apart(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(11, tmp_path, plugs(), RIGHT_11)
    assert verdict == "passed"
    assert {name: result.figures[name] for name in ("last", "next", "lost")} == {"last": 20, "next": 21, "lost": 0}
    assert result.figures["pause_s"] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (plugs(), RIGHT_11 | {"kill": "hangs"}, ["kill"]),
        (plugs(), RIGHT_11 | {"freeze": "at once"}, ["freeze"]),
        (plugs(), RIGHT_11 | {"session": "at once"}, ["session"]),
        # The end of the connection was lost on its way.
        (plugs(kill_s=8.1), RIGHT_11, ["kill"]),
        (plugs(steps=30), RIGHT_11, ["session", "the session lost no step"]),
        # node2 was killed after the session had ended.
        (plugs(generations=1), RIGHT_11, ["it continued in a second generation of ranks"]),
        (plugs(is_ok=False), RIGHT_11, ["the ledger is complete, and verify is content"]),
    ],
)
def test_another_end_fails_lesson_11(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(11, tmp_path, recorded, answers)
    assert (verdict, wrong_of(judgements)) == ("not passed", wrong)


# 12: levers in order


def levers(int8_bytes: float | None = 1_805_034.0, stock: float = 1500.0) -> dict[str, Recorded]:
    figures = {
        "one node": (None, 3000.0),
        "no exchange": (None, 6000.0),
        "stock": (7_085_075.0, stock),
        "ddp": (7_096_635.0, 1600.0),
        "accumulate:4": (7_067_803.0, 4200.0),
        "fp16": (3_540_551.0, 2900.0),
        "int8": (int8_bytes, 4000.0),
    }
    rows = [
        {"lever": lever, "wire_bytes_per_step": sent, "tokens_per_s": speed, "other_programs_cores": 0.1}
        for lever, (sent, speed) in figures.items()
    ]
    return {"bench levers": {"rows": rows}}


RIGHT_12: dict[str, Value] = {"ddp": 6.65, "accumulate": 1.66, "fp16": 3.33, "int8": 1.69, "order": "a i f d s"}


@pytest.mark.parametrize("order", ["aifds", "IAFDS", "a, i, f, s, d"])
def test_the_order_of_levers_may_have_one_swap(order: str, tmp_path: Path) -> None:
    read = shoal_lesson(12).lesson.predict[-1].read(order)
    verdict, result, _ = play_recorded(12, tmp_path, levers(), RIGHT_12 | {"order": read})
    assert verdict == "passed"
    assert result.figures["order"] == "accumulate:4 4,200, int8 4,000, fp16 2,900, ddp 1,600, stock 1,500"


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (
            levers(),
            {"order": "faids"},
            ["your order, with at most one swap of neighbours that are more than 10% apart"],
        ),
        (levers(), {"accumulate": 6.65}, ["accumulate"]),
        (levers(), {"fp16": 6.65}, ["fp16"]),
        (levers(int8_bytes=None), {}, ["int8"]),
        (levers(stock=9000.0), {}, ["your order, with at most one swap of neighbours that are more than 10% apart"]),
    ],
)
def test_wrong_bytes_or_another_order_fail_lesson_12(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(12, tmp_path, recorded, RIGHT_12 | answers)
    assert (verdict, wrong_of(judgements)) == ("not passed", wrong)


@pytest.mark.parametrize("order", ["aifd", "aifdd", "fast"])
def test_what_is_no_order_is_refused_before_anything_runs(order: str) -> None:
    with pytest.raises(UsageError, match="does not have the form of an answer to order"):
        shoal_lesson(12).lesson.predict[-1].read(order)


# 13: does memory add up?


def trained(name: str, ranks: int, moments: float, peak_mb: float) -> Files:
    kept = {"parameters": 1000, "weights": 4000, "gradients": 4000, "moments": 1000 * moments}

    def run(folder: Path) -> dict[str, Any]:
        writing({f"{name}-{rank}.json": kept for rank in range(ranks)})(folder)
        ends = [{"event": "end", "rank": rank, "peak_memory_bytes": 1e6 * peak_mb} for rank in range(ranks)]
        steps = [{"event": "step", "rank": rank, "step": 1, "step_s": 0.1, "loss": 1.0} for rank in range(ranks)]
        write_events(folder / name, [*steps, *ends])
        return {}

    return run


def memories(
    ddp: float = 8.0, zero1: float = 4.0, zero1_mb: float = 550.0, ddp_mb: float = 660.0
) -> dict[str, Recorded]:
    return {
        "--out one": trained("one", 1, 8.0, 650.0),
        "--out ddp": trained("ddp", 2, ddp, ddp_mb),
        "--out zero1": trained("zero1", 2, zero1, zero1_mb),
        "--sync ddp --json": {"rows": [{"memory_bytes": 15.6e9}, {"memory_bytes": 15.6e9}]},
        "--sync zero1 --json": {"rows": [{"memory_bytes": 15.6e9}, {"memory_bytes": 12.5e9}]},
    }


RIGHT_13: dict[str, Value] = {"ddp": 100.0, "zero1": 75.0}


def test_ddp_adds_no_memory_and_zero1_divides_the_moments(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(13, tmp_path, memories(), RIGHT_13)
    assert verdict == "passed"
    assert result.measured == pytest.approx(RIGHT_13)
    assert result.figures["moments"] == 4.0


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (memories(), {"ddp": 50.0, "zero1": 75.0}, ["ddp"]),
        (memories(), {"ddp": 100.0, "zero1": 50.0}, ["zero1"]),
        (memories(ddp=4.0), RIGHT_13, ["ddp", "ddp: 16 bytes on each of two"]),
        (memories(zero1=8.0), RIGHT_13, ["zero1", "zero1: 8 + 8/2 bytes on each of two"]),
        (memories(ddp_mb=900.0), RIGHT_13, ["the whole process with ddp needs as much as alone, within 10%"]),
        (
            memories(zero1_mb=700.0),
            RIGHT_13,
            ["the whole process with zero1 needs less than with ddp"],
        ),
    ],
)
def test_other_memory_fails_lesson_13(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(13, tmp_path, recorded, answers)
    assert (verdict, wrong_of(judgements)) == ("not passed", wrong)
