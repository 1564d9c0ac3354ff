"""Each lesson passes with the right predictions, and fails with a wrong one and with a broken measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.tools.learn.experiment import Value
from shoal.tools.learn.judge import explain_lesson
from shoal.tools.learn.lesson import find_lessons
from tests.support.lessons import Recorded, play_recorded, shoal_lesson, write_events
from tests.support.paths import ROOT


def test_every_lesson_is_complete() -> None:
    for folder in find_lessons().values():
        assert callable(folder.load_check())
        assert folder.path.name.startswith(f"lesson_{folder.lesson.number:02}_")
        assert len(folder.lesson.title) <= 40


def test_the_documentation_lists_every_lesson() -> None:
    page = (ROOT / "docs/learn.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \| ([^|]+) \|.*\| (\d+) s \|$", page)
    assert {int(number): (title, float(seconds)) for number, title, seconds in rows} == {
        number: (folder.lesson.title, folder.lesson.seconds) for number, folder in find_lessons().items()
    }


# 1: same weights, other losses


def two_ranks(own: float = 5.5, loss: float = 5.25) -> Callable[[Path], dict[str, Any]]:
    def train(folder: Path) -> dict[str, Any]:
        steps = [
            {"event": "step", "rank": rank, "step": step, "step_s": 0.1, "loss": loss, "own_loss": value}
            for rank, value in enumerate((5.0, own))
            for step in range(1, 21)
        ]
        write_events(folder / "two-ranks", steps)
        return {}

    return train


def verified(second: str = "aa") -> dict[str, Any]:
    return {"digests": {"0": "aa", "1": second}, "ledger": {"ok": True}}


def test_own_losses_differ_and_weights_do_not(tmp_path: Path) -> None:
    recorded: dict[str, Recorded] = {"shoal train": two_ranks(), "shoal verify": verified()}
    assert play_recorded(1, tmp_path, recorded, {"losses": "no", "weights": "yes"})[0] == "passed"


@pytest.mark.parametrize(
    ("train", "digest", "answers", "wrong"),
    [
        (two_ranks(), "aa", {"losses": "yes", "weights": "yes"}, "losses"),
        (two_ranks(), "aa", {"losses": "no", "weights": "no"}, "weights"),
        (two_ranks(), "bb", {"losses": "no", "weights": "yes"}, "weights"),
        (two_ranks(own=5.0, loss=5.0), "aa", {"losses": "no", "weights": "yes"}, "losses"),
        (two_ranks(loss=5.5), "aa", {"losses": "no", "weights": "yes"}, "the loss of the training is the mean of both"),
    ],
)
def test_a_wrong_answer_or_another_run_fails_lesson_1(
    train: Callable[[Path], dict[str, Any]], digest: str, answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    recorded: dict[str, Recorded] = {"shoal train": train, "shoal verify": verified(digest)}
    verdict, _, judgements = play_recorded(1, tmp_path, recorded, answers)
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == [wrong]


# 2: count the bytes


def counted(two: float | None = 6_672_872.0, three: float | None = 8_902_210.0) -> dict[str, Recorded]:
    parameters = {"model_params": 1_663_488}
    return {
        "--on lab:2": {**parameters, "wire_bytes_per_step": two},
        "--on lab:3": {**parameters, "wire_bytes_per_step": three},
    }


def test_the_bytes_of_an_all_reduce_are_predicted(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(2, tmp_path, counted(), {"two": 6.65, "three": 8.87})
    assert verdict == "passed"
    assert result.theory == pytest.approx({"two": 6.653952, "three": 8.871936})


@pytest.mark.parametrize(
    ("recorded", "two", "three", "wrong"),
    [
        # Twice the gradients, as some guides count.
        (counted(), 13.3, 8.87, ["two"]),
        (counted(), 6.65, 6.65, ["three"]),
        (counted(two=13_300_000.0), 6.65, 8.87, ["two"]),
        (counted(three=None), 6.65, 8.87, ["three"]),
    ],
)
def test_a_wrong_count_fails_lesson_2(
    recorded: dict[str, Recorded], two: float, three: float, wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(2, tmp_path, recorded, {"two": two, "three": three})
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == wrong


# 3: before you burn a weekend


def planned(**comm_s: float) -> dict[str, Recorded]:
    seconds = {"1gbe": 13.0, "2.5gbe": 5.24, "10gbe": 1.8, "400gbe": 0.0337} | comm_s
    rows = [{"link": link, "comm_s": one, "wire_bytes": 1.52e9, "compute_s": 209.0} for link, one in seconds.items()]
    return {"shoal plan": {"links": rows}}


FOUR_LINKS: dict[str, Value] = {"gbit_1": 12.9, "gbit_2_5": 5.17, "gbit_10": 1.29, "gbit_400": 0.032}


def test_the_exchange_over_four_links_is_arithmetic(tmp_path: Path) -> None:
    assert play_recorded(3, tmp_path, planned(), FOUR_LINKS)[0] == "passed"


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        # Bits taken for bytes; twice the gradients; milliseconds.
        (planned(), {"gbit_1": 1.6}, "gbit_1"),
        (planned(), {"gbit_10": 2.6}, "gbit_10"),
        (planned(), {"gbit_400": 32.0}, "gbit_400"),
        (planned(**{"1gbe": 26.0}), {}, "where the wire is the limit, the plan is within 10% of the formula"),
        (planned(**{"10gbe": 1.29}), {}, "on 10 Gbit/s gloo is the limit, so the plan is longer"),
    ],
)
def test_a_wrong_time_or_another_plan_fails_lesson_3(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(3, tmp_path, recorded, FOUR_LINKS | answers)
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == [wrong]


# 4: compute, then measure


def probed(
    p50: float = 560.0, beta: float = 8.3e-8, efficiency: float = 0.98, wire: float = 6.68e6
) -> dict[str, Recorded]:
    line = {"op": "all-reduce", "element_bytes": 4, "alpha_s": 0.001, "beta_s_per_byte": beta}
    nodes = [{"other_programs_cores": 0.1}, {"other_programs_cores": None}]
    return {
        "shoal probe": {
            "nodes": nodes,
            "collectives": [line, line | {"element_bytes": 2}],
            "summary": {"stack_efficiency": efficiency},
        },
        "shoal train": {"model_params": 1_663_488, "allreduce_p50_ms": p50, "wire_bytes_per_step": wire},
    }


def test_the_exchange_over_a_slow_link_is_predicted(tmp_path: Path) -> None:
    assert play_recorded(4, tmp_path, probed(), {"exchange": 532.0})[0] == "passed"
    busy = play_recorded(4, tmp_path, probed(p50=900.0), {"exchange": 532.0}, cores=0.5)
    assert busy[0] == "too noisy"


@pytest.mark.parametrize(
    ("recorded", "answer", "wrong"),
    [
        (probed(), 66.5, ["exchange"]),
        (probed(p50=700.0), 532.0, ["the probe's line is within 20% of the training"]),
        (probed(efficiency=0.5), 532.0, ["gloo uses the link well: stack efficiency from 0.85 to 1.05"]),
        (
            probed(wire=13.3e6),
            532.0,
            ["each node sent its gradients once in a step, and at most 10% for headers and messages of the run"],
        ),
    ],
)
def test_a_wrong_prediction_or_another_link_fails_lesson_4(
    recorded: dict[str, Recorded], answer: float, wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(4, tmp_path, recorded, {"exchange": answer})
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == wrong


# 5: why two are not twice as fast


def compared(
    exposed: float = 0.01, backward: float = 0.05, wait: float = 0.0, second: bytes = b"a", **manifest: Any
) -> Recorded:
    phases = {"data": 0.0, "forward": 0.03, "backward": 0.05, "optimizer": 0.005, "other": 0.0, "wait": 0.0}

    def bench(folder: Path) -> dict[str, Any]:
        run = folder / "scaling" / "ranks-2"
        run.mkdir(parents=True)
        (folder / "scaling" / "scaling.png").write_bytes(b"png")
        (run / "timings.jsonl").write_text("{}\n")
        for rank, state in enumerate((b"a", second)):
            (run / f"state-rank-{rank}.safetensors").write_bytes(state)
        known = {
            "seed": 35000, "backend": "gloo", "world_size": 2, "model_params": 7, "steps": 100, "byte_equivalent": True,
            "allreduce_p50_ms": 9.0, "allreduce_p95_ms": 10.0, "tokens_per_sec_1proc": 1e4, "tokens_per_sec_2proc": 1e4,
            "lesson_notes": "Two ranks were about as fast as one rank: the cores.", "preset": "grammar",
        }  # fmt: skip
        (run / "manifest.json").write_text(json.dumps(known | manifest))
        row = {"step_s": 0.085, "speedup": 1.0, "other_programs_cores": 0.0}
        two = phases | {"exposed": exposed, "backward": backward, "wait": wait}
        return {"rows": [row | {"phases": phases | {"exposed": 0.0}}, row | {"phases": two, "speedup": 0.95}]}

    return bench


CORES: dict[str, Value] = {"speedup": 1.0, "cause": "cores"}


def test_the_cores_are_the_largest_cost_and_the_sheet_is_written(tmp_path: Path) -> None:
    assert play_recorded(5, tmp_path, {"bench scaling": compared()}, CORES)[0] == "passed"
    sheet = tmp_path / "lab-01"
    names = {"train.py", "timings.jsonl", "scaling.png", "manifest.json"}
    assert {path.name for path in sheet.iterdir()} == names | {f"state-rank-{rank}.safetensors" for rank in (0, 1)}
    manifest = json.loads((sheet / "manifest.json").read_text())
    assert len(manifest) == 12
    assert (manifest["lab"], manifest["seed"]) == ("01-ddp-on-cpu", 35000)


@pytest.mark.parametrize(
    ("bench", "explained"),
    [
        (compared(), "the computing itself costs the most"),
        (compared(exposed=0.2), "backward hid too little"),
        (compared(wait=0.2), "waiting cost the most"),
    ],
)
def test_the_explanation_of_lesson_5_follows_what_was_measured(bench: Recorded, explained: str, tmp_path: Path) -> None:
    _, result, _ = play_recorded(5, tmp_path, {"bench scaling": bench}, CORES)
    assert explained in explain_lesson(shoal_lesson(5), result.figures)


@pytest.mark.parametrize(
    ("bench", "answers", "wrong"),
    [
        (compared(), CORES | {"cause": "all-reduce"}, "cause"),
        (compared(), CORES | {"speedup": 2.0}, "speedup"),
        (compared(exposed=0.2), CORES, "cause"),
        (compared(second=b"b"), CORES, "both states are equal to the bit"),
        (
            compared(allreduce_p50_ms=None),
            CORES,
            "the manifest has its twelve fields, and the paragraph that compares one with two",
        ),
    ],
)
def test_another_cause_or_an_incomplete_sheet_fails_lesson_5(
    bench: Recorded, answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(5, tmp_path, {"bench scaling": bench}, answers)
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == [wrong]


# 6: write ddp.py and train.py


def facts(rank: int, **changes: Any) -> dict[str, Any]:
    shard = list(range(47))[rank::2]
    return {
        "rank": rank, "group_size": 2, "backend": "gloo", "shard": shard, "samples": 47, "is_ddp": True,
        "gradient_as_bucket_view": True, "is_main": rank == 0, "steps": 5, "micro_batches": 2, "exchanged": [1] * 5,
        "digest": "abc",
    } | changes  # fmt: skip


def trained(first: dict[str, Any], second: dict[str, Any]) -> Recorded:
    def run(folder: Path) -> dict[str, Any]:
        for one in (first, second):
            (folder / f"facts-{one['rank']}.json").write_text(json.dumps(one))
        return {}

    return run


def fill_gaps(folder: Path) -> None:
    solution = shoal_lesson(6).path / "solution.py"
    (folder / "ddp.py").write_text(solution.read_text())


def test_the_file_has_five_gaps_and_what_is_filled_passes(tmp_path: Path) -> None:
    verdict, _, judgements = play_recorded(6, tmp_path, {}, {})
    assert verdict == "not passed"
    text = (tmp_path / "ddp.py").read_text()
    assert re.findall(r'raise NotImplementedError\("gap (\d): ', text) == ["1", "2", "3", "4", "5"]
    assert "gradient_as_bucket_view" not in text
    [(seen, _)] = judgements.items()
    assert "are filled" in seen
    fill_gaps(tmp_path)
    assert play_recorded(6, tmp_path, {"shoal run": trained(facts(0), facts(1))}, {})[0] == "passed"
    assert (tmp_path / "train.py").is_file()


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ({"group_size": 1}, {"group_size": 1}, "gap 1"),
        ({"shard": list(range(24))}, {"shard": list(range(23))}, "gap 2"),
        ({"shard": list(range(46))}, {"shard": [46]}, "gap 2"),
        ({"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": False}, "gap 3"),
        ({"is_main": True}, {"is_main": True}, "gap 4"),
        ({"exchanged": [0, 1] * 5}, {"exchanged": [0, 1] * 5}, "gap 5"),
        ({"exchanged": [0] * 5}, {"exchanged": [0] * 5}, "gap 5"),
        ({"digest": "abd"}, {}, "gaps 1, 3 and 5"),
    ],
)
def test_a_wrong_filling_is_named(first: dict[str, Any], second: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    fill_gaps(tmp_path)
    recorded = {"shoal run": trained(facts(0, **first), facts(1, **second))}
    verdict, _, judgements = play_recorded(6, tmp_path, recorded, {})
    assert verdict == "not passed"
    assert [name.split(",")[0].split(":")[0] for name, one in judgements.items() if one == "wrong"] == [
        wrong.split(",")[0]
    ]


# 7: two clocks


def clocks(barrier: float = 80.0, hook: float = 65.0, alone: float = 50.0, steps: int = 60) -> Recorded:
    def run(folder: Path) -> dict[str, Any]:
        times = {"barrier_s": barrier, "hook_s": hook, "alone_s": alone}
        document = {name: [one / 1e3] * steps for name, one in times.items()}
        (folder / "times.json").write_text(json.dumps(document))
        return {}

    return run


CLOCKS: dict[str, Value] = {"longer": "barriers", "added": "shorter", "why": "they enclose it"}


def test_barriers_enclose_what_the_hook_sees(tmp_path: Path) -> None:
    assert play_recorded(7, tmp_path, {"shoal run": clocks()}, CLOCKS)[0] == "passed"


@pytest.mark.parametrize(
    ("run", "answers", "wrong"),
    [
        (clocks(), CLOCKS | {"longer": "hook"}, ["longer"]),
        (clocks(), CLOCKS | {"added": "longer"}, ["added"]),
        (clocks(alone=5.0), CLOCKS, ["added"]),
        (clocks(hook=90.0), CLOCKS, ["longer", "the hook's time is within that of the barriers in every step"]),
        (clocks(hook=0.0), CLOCKS | {"added": "longer"}, ["the hook measured an exchange in every step"]),
        (clocks(steps=59), CLOCKS, ["every step was timed by both clocks"]),
    ],
)
def test_another_order_fails_lesson_7(
    run: Recorded, answers: dict[str, Value], wrong: list[str], tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(7, tmp_path, {"shoal run": run}, answers)
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == wrong


# 8: the slowest decides


def unequal(wait: float, step: float, *shares: int) -> Recorded:
    def train(folder: Path) -> dict[str, Any]:
        run = folder / ("shared" if (folder / "equal").exists() else "equal")
        events = [
            {
                "event": "step", "rank": rank, "step": number, "step_s": step, "tokens": 1024, "loss": 5.0,
                "forward_s": step - own, "wait_s": own, "exposed_s": 0.0,
            }
            for rank, own in enumerate((wait, 0.0))
            for number in range(1, 25)
        ]  # fmt: skip
        write_events(run, events)
        (run / "commits.jsonl").write_text(json.dumps({"step": 1, "shares": shares}) + "\n")
        return {}

    return train


EQUAL_REPLICAS = {"byte_equivalent": True, "ledger": {"ok": True}}
IDLE: dict[str, Value] = {"idle": 67.0, "gain": 2.0}


def unequal_runs(wait: float = 0.13, after: float = 0.1, **shared: Any) -> dict[str, Recorded]:
    shares = shared.pop("shares", (24, 8))
    verified = EQUAL_REPLICAS | shared
    return {
        "--balance off": unequal(wait, 0.2, 16, 16),
        "--balance live": unequal(0.0, after, *shares),
        "shoal verify": verified,
    }


def test_shares_by_speed_repair_the_wait(tmp_path: Path) -> None:
    verdict, result, _ = play_recorded(8, tmp_path, unequal_runs(), IDLE)
    assert verdict == "passed"
    assert result.measured == pytest.approx({"idle": 65.0, "gain": 2.0})


@pytest.mark.parametrize(
    ("recorded", "answers", "wrong"),
    [
        (unequal_runs(), IDLE | {"idle": 33.0}, "idle"),
        (unequal_runs(), IDLE | {"gain": 1.0}, "gain"),
        (unequal_runs(wait=0.02), IDLE, "idle"),
        (unequal_runs(shares=(16, 16)), IDLE, "shares that follow the speed: the first node had more"),
        (
            unequal_runs(byte_equivalent=False),
            IDLE,
            "the replicas are equal to the bit, and no sample was lost or used twice",
        ),
        (unequal_runs(after=0.16), IDLE | {"gain": 1.25}, "the training became at least 1.3 times as fast"),
    ],
)
def test_another_wait_or_a_slow_cure_fails_lesson_8(
    recorded: dict[str, Recorded], answers: dict[str, Value], wrong: str, tmp_path: Path
) -> None:
    verdict, _, judgements = play_recorded(8, tmp_path, recorded, answers)
    assert verdict == "not passed"
    assert [name for name, judgement in judgements.items() if judgement == "wrong"] == [wrong]
