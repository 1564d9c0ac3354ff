"""The times of faults, the faults that a soak draws, and the assertions about a soak."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.chaos import parse_every
from shoal.config.sync_choice import TRAIN_METHODS
from shoal.config.sync_choice import TRAINED_METHODS as SYNC_MODES
from shoal.errors import LabError, UsageError
from shoal.tools.chaos.actions import Action, Cut, Flap, Freeze, Heal, KillRank, PowerOn, Thaw
from shoal.tools.chaos.damage import corrupt, corrupt_newest, open_ports
from shoal.tools.chaos.growth import ResourceSample, growth, sample_resources, slope
from shoal.tools.chaos.judge import longest_pause
from shoal.tools.chaos.scenario import Injection, ScenarioRecord, is_due, plan_injections
from shoal.tools.chaos.soak import (
    ModeResult,
    SoakOrder,
    SoakResult,
    broken_off,
    compare_losses,
    growth_warning,
    judge_fault,
    judge_mode,
    judge_soak,
    read_kinds,
    read_modes,
    soak_document,
)
from shoal.tools.chaos.soak_plan import SOAK_KINDS, SoakFault, plan_blocks, plan_soak


def expand(steps: Iterable[Action]) -> list[Action]:
    return [part for step in steps for part in step.parts()]


def test_a_fault_with_a_duration_becomes_two_injections() -> None:
    steps = expand([Freeze(node="node2", for_s=1.5, at_step=9), Flap(node="node1", for_s=0.5, after_s=3)])
    assert steps == [
        Freeze(node="node2", for_s=1.5, at_step=9),
        Thaw(node="node2", after_s=1.5),
        Cut(between=("node1",), after_s=3),
        Heal(after_s=0.5),
    ]
    assert expand([Freeze(node="node2")]) == [Freeze(node="node2")]


def test_random_moments_are_the_same_for_the_same_seed_and_run() -> None:
    steps = [KillRank(rank=0, at_step=5, random_s=1.0)]
    drawn = [plan_injections(steps, seed=1, number=number)[0].extra_s for number in range(20)]
    assert drawn == [plan_injections(steps, seed=1, number=number)[0].extra_s for number in range(20)]
    assert len(set(drawn)) == 20
    assert all(0 <= extra <= 1.0 for extra in drawn)


@pytest.mark.parametrize(
    ("injection", "since_event", "since_last", "due"),
    [
        (Injection(Heal(at_step=5)), None, 99.0, False),
        (Injection(Heal(at_step=5)), 0.0, 0.0, True),
        (Injection(Heal(at_step=5), extra_s=0.3), 0.2, 9.0, False),
        (Injection(Heal(at_step=5), extra_s=0.3), 0.3, 9.0, True),
        (Injection(Heal(after_regroup=True)), None, 99.0, False),
        (Injection(Heal(after_regroup=True), extra_s=0.3), 0.3, 0.4, True),
        (Injection(Heal(after_s=2.0)), None, 1.9, False),
        (Injection(Heal(after_s=2.0), extra_s=0.5), None, 2.4, False),
        (Injection(Heal(after_s=2.0)), None, 2.0, True),
        (Injection(Heal()), None, 0.0, True),
    ],
)
def test_an_injection_is_due_after_its_event_and_delay(
    injection: Injection, since_event: float | None, since_last: float, due: bool
) -> None:
    assert is_due(injection, since_event, since_last) is due


def test_a_soak_draws_the_same_faults_from_the_same_seed() -> None:
    faults = plan_soak(40, every_s=15, seed=3, nodes=3)
    assert faults == plan_soak(40, every_s=15, seed=3, nodes=3)
    assert faults != plan_soak(40, every_s=15, seed=4, nodes=3)
    assert len(faults) == 40
    assert [fault.at_s for fault in faults[:3]] == [15, 30, 45]


def test_every_fault_of_a_soak_ends_before_the_next_one() -> None:
    for fault in plan_soak(240, every_s=15, seed=1, nodes=3):
        lasts = sum(action.after_s or 0.0 for action in expand(fault.steps))
        assert lasts <= 8.0
        kinds = [action.do for action in expand(fault.steps)]  # type: ignore[attr-defined]
        assert kinds in (
            ["kill-rank"],
            ["kill-rank", "kill-rank"],
            ["kill-node", "power-on"],
            ["freeze", "thaw"],
            ["cut", "heal"],
            ["link", "link"],
            ["fill-disk", "free-disk"],
        )


def test_a_double_kill_hits_two_different_nodes() -> None:
    for fault in plan_soak(60, every_s=15, seed=1, nodes=3, kinds=("kill-two",)):
        assert len({action.node for action in fault.steps}) == 2  # type: ignore[union-attr]


def test_faults_are_divided_into_one_block_per_mode() -> None:
    blocks = plan_blocks(50, 15.0, seed=1, nodes=3, modes=SYNC_MODES, kinds=tuple(SOAK_KINDS))
    assert [(block.sync, len(block.faults)) for block in blocks] == [
        ("ddp", 23),
        ("stock", 23),
        *((mode, 22) for mode in ("accumulate", "local", "diloco", "streaming", "zero1", "zero2", "zero3")),
    ]
    for block in blocks:
        assert [fault.at_s for fault in block.faults[:2]] == [15, 30]
        assert {fault.kind for fault in block.faults} == set(SOAK_KINDS), "a mode does not get every kind of fault"
    assert len({str(block.faults) for block in blocks}) == len(blocks)


def test_a_single_mode_gets_the_same_faults_as_among_others() -> None:
    several = plan_blocks(2, 15.0, seed=1, nodes=3, modes=("ddp", "diloco"), kinds=("cut", "flap"))
    [alone] = plan_blocks(1, 15.0, seed=1, nodes=3, modes=("diloco",), kinds=("cut", "flap"))
    assert alone == several[1]
    assert {fault.kind for fault in alone.faults} <= {"cut", "flap"}


def test_every_mode_gets_a_fault_even_in_a_short_soak() -> None:
    assert [len(block.faults) for block in plan_blocks(0.1, 15.0, 1, 3, SYNC_MODES, ("cut",))] == [1] * 9


def test_the_modes_of_a_soak_are_parsed() -> None:
    assert read_modes(["all"]) == SYNC_MODES
    assert read_modes(["diloco", "ddp+int8"]) == ("diloco", "ddp+int8")
    order = SoakOrder("lab:3", 3, 1.0, 15.0, 1, ("diloco", "ddp+int8"))
    configs = [order.scenario(mode).config("lab:3", seed=1).sync for mode in order.sync]
    assert [(sync.mode, sync.wire) for sync in configs] == [("diloco", "fp32"), ("ddp", "int8")]


def test_every_mode_that_can_be_trained_is_soaked() -> None:
    assert set(SYNC_MODES) == set(TRAIN_METHODS) - {"auto"}


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["dilco"], "is not a lever"),
        (["ddp", "ddp"], "twice"),
        (["all", "local"], "twice"),
        (["stock+int8"], "cannot be trained"),
    ],
)
def test_wrong_modes_are_refused(words: list[str], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        read_modes(words)


def test_the_kinds_of_faults_are_parsed() -> None:
    assert read_kinds(["cut", "cut", "flap"]) == ("cut", "flap")
    assert {"kill-rank", "kill-two", "cut"} <= set(read_kinds([]))
    assert "kill-node" not in read_kinds([], script=("mine.py",))
    with pytest.raises(UsageError, match="--fault kill-node does not go with --script"):
        read_kinds(["kill-node"], script=("mine.py",))
    with pytest.raises(UsageError, match="there is no fault 'kill-rnak'") as caught:
        read_kinds(["kill-rnak"])
    assert "kill-rank" in caught.value.why


@pytest.mark.parametrize(("faults", "every_s", "seconds"), [(34, 15.0, 60.0), (4, 15.0, 27.5), (9, 20.0, 60.0)])
def test_the_reference_run_is_short_and_longer_than_the_first_interval(
    faults: int, every_s: float, seconds: float
) -> None:
    assert SoakOrder("lab:3", 3, 1.0, every_s, 1).reference_s(faults) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15.0), ("4", 4.0), ("7.5 s", 7.5)])
def test_the_time_between_faults_is_parsed(text: str, seconds: float) -> None:
    assert parse_every(text) == seconds


@pytest.mark.parametrize("text", ["1s", "often", "15m"])
def test_a_wrong_time_between_faults_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no time between faults"):
        parse_every(text)


@pytest.mark.parametrize("how", ["flip", "truncate", "zero"])
def test_corruption_always_changes_the_file(how: Any) -> None:
    content = bytes(range(1, 200))
    for seed in range(50):
        assert corrupt(content, how, random.Random(seed)) != content


def test_a_flip_changes_exactly_one_bit() -> None:
    content = bytes(100)
    changed = corrupt(content, "flip", random.Random(1))
    assert sum(byte.bit_count() for byte in changed) == 1


def test_the_newest_complete_checkpoint_is_corrupted(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no checkpoint"):
        corrupt_newest(tmp_path, "flip", random.Random(1))
    for step, whole in ((50, True), (100, True), (150, False)):
        folder = tmp_path / f"step-{step:08}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        if whole:
            (folder / "manifest.json").write_text("{}")
    assert corrupt_newest(tmp_path, "zero", random.Random(1)).parent.name == "step-00000100"


def process_samples(pid: int, grows: float, seconds: int = 300, part: str = "agent") -> list[ResourceSample]:
    at = range(0, seconds, 5)
    return [ResourceSample(float(t), 3, pid, part, "node1", int(5e7 + grows * 1e6 * t / 60), 20, 8, 3) for t in at]


def test_growth_is_the_slope_of_the_second_half() -> None:
    filling = [
        ResourceSample(float(t), 3, 1, "rank-0", "node1", min(t, 60) * 1_000_000, 9, 4, 2) for t in range(0, 480, 5)
    ]
    steady, growing = growth([*filling, *process_samples(2, grows=6.0)])
    assert steady.rss_mb_a_minute == pytest.approx(0.0)
    assert growing.rss_mb_a_minute == pytest.approx(6.0, rel=1e-3)
    assert (growing.files_a_minute, growing.threads_a_minute) == (0.0, 0.0)


def test_a_short_lived_process_gives_no_growth() -> None:
    assert growth(process_samples(1, grows=50.0, seconds=200)) == []
    assert slope([1.0], [2.0]) == 0.0


def test_only_long_lived_processes_of_a_long_soak_are_judged() -> None:
    [judged] = growth([*process_samples(1, grows=0.0, seconds=900), *process_samples(2, grows=9.0, seconds=280)])
    assert judged.pid == 1


def test_samples_of_other_world_sizes_are_not_compared() -> None:
    """Two ranks have fewer connections than three: more connections after a rejoin are not growth."""
    small = [ResourceSample(float(t), 2, 1, "rank-0", "node1", 10**8, 12, 4, 2) for t in range(0, 100, 5)]
    whole = [ResourceSample(float(t), 3, 1, "rank-0", "node1", 10**8, 18, 8, 4) for t in range(100, 400, 5)]
    [judged] = growth([*small, *whole])
    assert (judged.files_a_minute, judged.sockets_a_minute, judged.threads_a_minute) == (0.0, 0.0, 0.0)


def test_no_process_is_sampled_without_a_run(tmp_path: Path) -> None:
    assert sample_resources(tmp_path, 0.0, 3) == []


def commits(loss: float, steps: int = 100, members: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "step": n,
            "samples": [12 * (n - 1), 12 * n],
            "loss": loss,
            "time": float(n),
            "generation": "1-0",
            "members": list(range(members)),
        }
        for n in range(1, steps + 1)
    ]


def soaked(**changes: Any) -> ModeResult:
    record = ScenarioRecord(commits=changes.pop("commits", commits(2.0)))
    record.ranks = [{"event": "step", "rank": 0, "step": n, "time": float(n), "step_s": 0.1} for n in range(1, 101)]
    fault = SoakFault(10.0, "kill-node", (PowerOn(node="node1"),))
    began = changes.pop("began", 50.0)
    outcomes = [judge_fault(fault, began, changes.pop("undone", 90.0), record, skipped=changes.pop("skipped", ""))]
    given: dict[str, Any] = {
        "planned": 1,
        "nodes": 3,
        "reference": commits(2.01),
        "replicas_equal": True,
        "growth": growth([*process_samples(1, grows=0.5), *process_samples(2, grows=0.5, part="rank-0")]),
        "left": (),
        "exit_code": 130,
        "seconds": 60.0,
        "runs": ("a", "b"),
        "errors": (),
    }
    return judge_mode("ddp", record, outcomes, **{**given, **changes})


def broken(result: ModeResult | SoakResult) -> list[str]:
    return [assertion.name for assertion in result.assertions if not assertion.ok]


def test_a_good_soak_passes() -> None:
    result = soaked()
    assert broken(result) == []
    assert result.ok
    assert (result.loss, result.reference_loss, result.faults[0].commits) == (2.0, 2.01, 10)
    assert (result.compared_steps, result.compared_faults, result.faults[0].step) == (100, 1, 50)
    assert result.faults[0].pause_s == longest_pause([49.0, 50.0, 51.0], 50.0)
    assert broken(judge_soak([result], planned=1)) == []


LOSS = "loss within 0.05 of the run without faults"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"errors": ("events/rank-0.jsonl: lacks step 7",)}, "shoal verify passes"),
        ({"skipped": "node1 is not running"}, "went on after every fault"),
        ({"planned": 2}, "went on after every fault"),
        ({"undone": 101.0}, "went on after every fault"),
        ({"commits": commits(2.0, members=2)}, "every node trains at the end"),
        ({"reference": commits(2.01, steps=40)}, LOSS),
        ({"reference": commits(2.2)}, LOSS),
        ({"reference": []}, LOSS),
        # The reference run ended before the first fault: equal losses prove nothing.
        ({"reference": commits(2.0, steps=60), "began": 61.0}, LOSS),
        ({"replicas_equal": False}, "replicas equal to the bit"),
        ({"replicas_equal": None}, "replicas equal to the bit"),
        ({"left": ("agent on node2 (7)",)}, "nothing left"),
        ({"exit_code": 3}, "exit code 130"),
        ({"reference": [*commits(2.2, steps=50), *commits(2.01)[50:]]}, LOSS),
        ({"growth": growth(process_samples(1, grows=9.0))}, "rss mb a minute: at most 5"),
    ],
)
def test_a_failed_assertion_of_a_soak_is_named(changes: dict[str, Any], name: str) -> None:
    result = soaked(**changes)
    assert broken(result) == [name]
    assert "every sync mode held" in broken(judge_soak([soaked(), result], planned=2))


def test_a_short_reference_run_is_compared_up_to_its_end() -> None:
    result = soaked(reference=commits(2.01, steps=70))
    assert result.ok
    [comparison] = [assertion.seen for assertion in result.assertions if assertion.name == LOSS]
    assert comparison == "2.0 and 2.01 over the 50 steps where they differ most, of steps 1 to 70, with 1 fault"


def test_with_outer_methods_only_a_worse_loss_counts() -> None:
    """A world of one rank uses the whole batch in every local step, and learns faster than three averaged ranks."""
    losses = [*commits(1.5)[:50], *commits(2.1)[50:]]
    result = soaked(commits=losses, reference=commits(2.0), is_outer=True)
    assert result.ok
    assert (result.loss, result.reference_loss) == (2.1, 2.0)
    worse = soaked(commits=losses, reference=commits(1.9), is_outer=True)
    assert broken(worse) == ["loss at most 0.15 above the run without faults"]
    assert broken(soaked(commits=losses, reference=commits(2.0))) == [LOSS]


def test_a_soak_with_a_hole_in_its_ledger_fails() -> None:
    names = broken(soaked(commits=[*commits(2.0)[:50], *commits(2.0)[51:]]))
    assert "every sample used once" in names


def test_a_soak_too_short_to_find_a_leak_says_that_growth_was_not_judged() -> None:
    """One mode may be too short for it, where another judged it."""
    short, agents = soaked(growth=[]), soaked(growth=growth(process_samples(1, grows=0.5)))
    assert short.ok
    for modes, part in (([short, short], "an agent and a rank"), ([short, agents], "a rank")):
        result = judge_soak(modes, planned=2)
        assert result.ok
        assert result.not_judged.startswith(f"growth of {part}: none lived for 4 min")
        assert "--minutes" in result.not_judged
    assert judge_soak([short, soaked()], planned=2).not_judged == ""


@pytest.mark.parametrize(("minutes", "modes", "is_short"), [(2.0, ("ddp",), True), (5.0, ("ddp",), False)])
def test_a_soak_too_short_to_judge_growth_says_so_at_its_start(
    minutes: float, modes: tuple[str, ...], is_short: bool
) -> None:
    assert bool(growth_warning(SoakOrder("lab:3", 3, minutes, 15.0, 1, modes))) == is_short


def test_no_line_of_a_soak_says_a_word_or_figure_twice() -> None:
    mode = soaked()
    result = judge_soak([mode], planned=1)
    lines = [f"{assertion.name}: {assertion.seen}" for assertion in (*result.assertions, *mode.assertions)]
    assert {"went on after every fault: 1 of 1", "every sync mode held: ddp", "no stale commits: 0"} <= set(lines)
    assert not any("1 faults" in line for line in lines)


def test_a_mode_that_could_not_be_soaked_fails_the_soak() -> None:
    failed = broken_off("stock", [], planned=3, trouble="the training did not start", seconds=1.0)
    assert not failed.ok
    names = broken(judge_soak([soaked(), failed], planned=4))
    assert names == ["went on after every fault", "every sync mode held"]


def test_the_document_of_an_interrupted_soak_shows_its_progress() -> None:
    order = SoakOrder("lab:3", 3, 1.0, 15.0, 1, ("ddp", "diloco"))
    finished, started = soaked(), ModeResult(sync="diloco", planned=2, faults=soaked().faults)
    document = soak_document(order, judge_soak([finished], planned=2), finished=False, under_way=started)
    assert (document["finished"], document["ok"], document["planned"], document["injected"]) == (False, False, 4, 2)
    assert [(mode["sync"], mode["ok"], len(mode["faults"])) for mode in document["modes"]] == [
        ("ddp", True, 1),
        ("diloco", False, 1),
    ]
    json.dumps(document)


def test_a_run_that_never_trained_fails() -> None:
    names = broken(soaked(commits=[]))
    assert {"every node trains at the end", "went on after every fault"} <= set(names)


def test_losses_are_compared_where_both_runs_have_them() -> None:
    soak = [*commits(3.0, 60), *commits(1.0, 80)]
    assert compare_losses(soak, commits(2.0, 70)) == (1.0, 2.0)
    assert compare_losses(soak, []) == (None, None)


def test_losses_are_compared_where_they_differ_most() -> None:
    soak = [*commits(1.0, 120)[:60], *commits(5.0, 120)[60:]]
    assert compare_losses(soak, commits(1.0, 120)) == (5.0, 1.0)


def test_open_ports_are_read_from_the_kernels_table() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = {f"127.0.0.1:{server.getsockname()[1]}" for server in (first, other)}
        assert addresses <= set(open_ports(os.getpid()))
    assert not addresses & set(open_ports(os.getpid()))
