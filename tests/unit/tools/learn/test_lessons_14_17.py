"""Lessons 14 to 17: right predictions pass; a wrong one and a broken measurement fail. Output is recorded."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.tools.chaos.scenario import parse_scenario
from shoal.tools.learn.experiment import FinishedCommand, Value
from tests.support.lessons import Recorded, play_recorded, write_events

# 14: check a war story


def story(comm_s: float = 4.313, gflops: float = 110.0, gbytes_per_s: float = 20.0) -> dict[str, Recorded]:
    compute = {"fp32_gflops": gflops, "memory_gbytes_per_s": gbytes_per_s}
    node: dict[str, Any] = {"compute": compute, "other_programs_cores": 0.1}
    return {"shoal plan": {"rows": [{"comm_s": comm_s}]}, "shoal probe": {"nodes": [node]}}


def test_the_network_was_not_what_slowed_the_story(tmp_path: Path) -> None:
    verdict, result, judgements = play_recorded(14, tmp_path, story(), {"part": 8.5, "limit": "neither"})
    assert verdict == "passed"
    assert result.theory["part"] == pytest.approx(6.0, abs=0.01)
    assert "wrong" not in judgements.values()


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (story(), {"part": 50.0, "limit": "neither"}, "part"),
        (story(), {"part": 3.5, "limit": "neither"}, "part"),
        (story(), {"part": 6.0, "limit": "memory"}, "limit"),
        (story(), {"part": 6.0, "limit": "network"}, "limit"),
        (story(comm_s=8.6), {"part": 6.0, "limit": "neither"}, "shoal plan gives the same time"),
        (story(gflops=9000.0, gbytes_per_s=0.5), {"part": 6.0, "limit": "neither"}, "on this machine, too"),
    ],
)
def test_a_wrong_cause_or_another_measurement_fails_lesson_14(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(14, tmp_path, recorded, answers)
    assert verdict == "not passed"
    [name] = [name for name, judgement in judgements.items() if judgement == "wrong"]
    assert name.startswith(wrong)


# 15: a learning rate for a large batch


def trained(name: str, rate: float, val_loss: float, batch: int = 128) -> Recorded:
    def train(folder: Path) -> dict[str, Any]:
        assert "threads = 1" in (folder / "small.toml").read_text()
        steps = [
            {"event": "step", "rank": 0, "step": step, "step_s": 0.1, "loss": 3.0, "samples": batch, "lr": rate}
            for step in range(1, 61)
        ]
        write_events(folder / name, steps)
        return {"val_loss": val_loss}

    return train


def rates(root: float = 2.3, linear_rate: float = 0.128, linear: float = 3.0, batch: int = 128) -> dict[str, Recorded]:
    return {
        "--steps 60 --set train.lr=0.002 --set train.base_batch=128 --out keep": trained("keep", 0.002, 2.7),
        "--steps 60 --set train.lr=0.002 --set train.base_batch=2 --out linear": trained("linear", linear_rate, linear),
        "--steps 60 --set train.lr=0.016 --set train.base_batch=128 --out root": trained("root", 0.016, root, batch),
    }


def test_the_square_root_ends_lowest(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(15, tmp_path, rates(), {"best": "root", "worst": "linear"})
    assert verdict == "passed"
    assert result.figures == {"keep": 2.7, "linear": 3.0, "root": 2.3}


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (rates(), {"best": "linear", "worst": "linear"}, "best"),
        (rates(), {"best": "root", "worst": "keep"}, "worst"),
        (rates(root=2.9), {"best": "root", "worst": "linear"}, "best"),
        (rates(linear_rate=0.002), {"best": "root", "worst": "linear"}, "each run reached the rate"),
        (rates(linear=2.72), {"best": "root", "worst": "linear"}, "the losses are at least"),
        (rates(batch=64), {"best": "root", "worst": "linear"}, "each run had 60 batches"),
    ],
)
def test_a_wrong_rule_or_another_training_fails_lesson_15(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(15, tmp_path, recorded, answers)
    assert verdict == "not passed"
    [name] = [name for name, judgement in judgements.items() if judgement == "wrong"]
    assert name.startswith(wrong)


# 16: three mistakes


def ranks(*seconds: float, outcome: str = "error", digests: Sequence[str] = ("", "")) -> str:
    results = [
        {"outcome": outcome, "seconds": one, "timeout_s": 3.0, "digest": digest, "error": ""}
        for one, digest in zip(seconds, digests, strict=True)
    ]
    return json.dumps(results)


SILENT = ranks(0.2, 0.2, outcome="trained", digests=("aa", "bb"))
RIGHT = ranks(0.2, 0.2, outcome="trained", digests=("aa", "aa"))
FOUND = [
    {"id": "names.loopback", "node": "node1", "fix": "true"},
    {"id": "names.loopback", "node": "node2", "fix": "true"},
    {"id": "sameness.torch", "node": "node2", "fix": "shoal setup"},
    {"id": "speed.cores", "node": "node1", "fix": ""},
]


def mistakes(
    interface: str = ranks(0.1, 0.1),
    name: str = ranks(15.0, 0.1),
    versions: str = SILENT,
    corrected: str = RIGHT,
    explained: str = "gloo.loopback",
    found: Sequence[dict[str, str]] = FOUND,
    refused: str = "error: node1 and node2 cannot train together: torch 2.13.0 on node1, 2.12.0 on node2",
) -> dict[str, Recorded]:
    findings = iter([found, []])
    return {
        "shoal lab": "",
        " interface GLOO": interface,
        " name": name,
        " versions GLOO": versions,
        " corrected": corrected,
        "explain interface": {"explanations": [{"id": "gloo.interface"}]},
        "explain name": {"explanations": [{"id": explained}, {"id": "gloo.timeout"}]},
        "shoal doctor": lambda _: {"findings": next(findings)},
        "shoal train": FinishedCommand("shoal train", 3 if refused else 0, "", refused, 1.0),
    }


RIGHT_ANSWERS: dict[str, Value] = {"interface": "error", "name": "hang", "versions": "silence"}


def test_three_mistakes_look_different(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(16, tmp_path, mistakes(), RIGHT_ANSWERS)
    assert verdict == "passed"
    assert result.measured == RIGHT_ANSWERS
    assert "127.0.1.1 node2\n10.77.0.1 node1" in (tmp_path / "try-1/hosts-node2").read_text()
    assert "weight_decay=0.01" in (tmp_path / "try-1/sgd.py").read_text()


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (mistakes(), {"name": "error"}, "name"),
        (mistakes(), {"versions": "error"}, "versions"),
        (mistakes(interface=ranks(4.0, 0.1)), {}, "interface"),
        (mistakes(name=ranks(0.1, 0.1)), {}, "name"),
        (mistakes(versions=RIGHT), {}, "versions"),
        (mistakes(corrected=SILENT), {}, "corrected, the same script"),
        (mistakes(explained="gloo.connect-timeout"), {}, "shoal explain names"),
        (mistakes(found=FOUND[1:]), {}, "shoal doctor names"),
        (mistakes(refused=""), {}, "shoal train refuses two versions"),
    ],
)
def test_a_wrong_answer_or_another_outcome_fails_lesson_16(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(16, tmp_path, recorded, RIGHT_ANSWERS | answers)
    assert verdict == "not passed"
    [name] = [name for name, judgement in judgements.items() if judgement == "wrong"]
    assert name.startswith(wrong)


# 17: split brain

ALL, FIRST, LAST = [0, 1], [0], [1]
CLEAN = {"ok": True, "ledger": {"forked": [], "gaps": [], "steps": 40, "abandoned": 12}}


def played(name: str, during: Sequence[tuple[list[int], str]], abandoned: str = "", ok: bool = True) -> Recorded:
    """A run that was cut from second 100 to 108: who committed meanwhile, and in which lineage."""

    def play(folder: Path) -> dict[str, Any]:
        run = folder / name / f"{name}-1"
        run.mkdir(parents=True)
        # The last common step is committed after the cut began.
        moments = [
            (100.1, ALL, "1-0"),
            *((107.0, members, lineage) for members, lineage in during),
            (109.0, ALL, "9-0"),
        ]
        ledger: list[dict[str, Any]] = [
            {"step": 1, "time": moment, "members": members, "lineage": lineage} for moment, members, lineage in moments
        ]
        ledger += [{"time": 109.0, "abandoned": abandoned}] if abandoned else []
        for file, lines in (("chaos.jsonl", [{"time": 100.0}, {"time": 108.0}]), ("commits.jsonl", ledger)):
            (run / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        measured = {"longest_pause_s": 3.0}
        return {"runs": [{"measured": measured, "assertions": [{"name": "members: 3", "ok": ok}]}]}

    return play


def splits(
    two_and_one: Sequence[tuple[list[int], str]] = (([0, 1], "1-0"),),
    tie: Sequence[tuple[list[int], str]] = ((FIRST, "2-0"), (LAST, "2-1")),
    pause: Sequence[tuple[list[int], str]] = (),
    abandoned: str = "2-1",
    verified: dict[str, Any] = CLEAN,
    ok: bool = True,
) -> dict[str, Recorded]:
    return {
        "run two-and-one.toml": played("two-and-one", two_and_one, ok=ok),
        "run one-and-one.toml": played("one-and-one", tie, abandoned),
        "run one-and-one-pause.toml": played("one-and-one-pause", pause),
        "shoal verify": verified,
    }


SIDES: dict[str, Value] = {"majority": "the two", "tie": "both sides", "pause": "none", "lineages": "1"}


def test_a_majority_trains_and_a_tie_leaves_one_lineage(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(17, tmp_path, splits(), SIDES)
    assert verdict == "passed"
    assert result.measured == SIDES
    assert 'between = ["node3"]' in (tmp_path / "try-1/two-and-one.toml").read_text()
    assert parse_scenario(tomllib.loads((tmp_path / "try-1/one-and-one-pause.toml").read_text()), "lesson").nodes == 2


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (splits(), {"majority": "both sides"}, "majority"),
        (splits(), {"tie": "none"}, "tie"),
        (splits(), {"lineages": "2"}, "lineages"),
        (splits(two_and_one=[([2], "1-0")]), {}, "majority"),
        (splits(pause=[(FIRST, "2-0")]), {}, "pause"),
        (splits(abandoned=""), {}, "lineages"),
        (splits(ok=False), {}, "all nodes were together"),
        (splits(verified={**CLEAN, "ok": False}), {}, "verify finds no step twice"),
    ],
)
def test_a_wrong_answer_or_another_outcome_fails_lesson_17(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(17, tmp_path, recorded, SIDES | answers)
    assert verdict == "not passed"
    [name] = [name for name, judgement in judgements.items() if judgement == "wrong"]
    assert name.startswith(wrong)
