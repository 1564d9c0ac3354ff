"""`shoal plan`: its rows, its recommendations and its errors."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from shoal.cli.main import run
from shoal.config.load import build_config, write_profile
from shoal.config.sync_choice import BLOCK_NUMBERS, WIRE_FORMATS, WireFormat
from shoal.cost.data_sheets import SheetOverrides, find_link, find_machines, make_cluster_model
from shoal.cost.strategy import SyncStrategy
from shoal.cost.workload import workload_of
from shoal.tools.plan.advise import advise, make_plan
from shoal.tools.plan.figures import draw_plan
from shoal.tools.probe.run import assemble
from tests.unit.config.test_profile import measured, with_gpus

Call = Callable[..., tuple[int, str, str]]
Plan = Callable[..., dict[str, Any]]

ROW = {"nodes", "payload_factor", "comm_s", "compute_s", "exposed_s", "step_s", "tokens_per_s", "speedup", "efficiency"}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run `shoal WORDS` in this process, on a terminal that is narrower than the table."""
    monkeypatch.setenv("COLUMNS", "80")

    def called(*words: str) -> tuple[int, str, str]:
        code = run(list(words), debug=False)
        out, err = capsys.readouterr()
        return code, out, err

    return called


@pytest.fixture
def plan(call: Call) -> Plan:
    def planned(*words: str) -> dict[str, Any]:
        code, out, err = call("plan", *words, "--json")
        assert (code, err) == (0, "")
        document: dict[str, Any] = json.loads(out)
        return document

    return planned


# GPUs of a profile


def test_a_plan_is_for_the_gpus_of_a_profile_unless_the_settings_say_otherwise(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "profile.toml"
    write_profile(assemble(with_gpus(measured(), "nccl"), "now", 60.0, 51.0), file)
    on_gpus = plan("--profile", str(file))
    assert "2 of 2 ranks on GPUs, which exchange by NCCL" in on_gpus["notes"][0]
    on_cpus = plan("--profile", str(file), "--set", "train.device=cpu")
    assert "GPU" not in on_cpus["notes"][0]
    assert on_gpus["rows"][0]["tokens_per_s"] > 10 * on_cpus["rows"][0]["tokens_per_s"]
    mixed = plan("--profile", str(file), "--set", "run.devices=cuda/cpu")
    assert "1 of 2 ranks on GPUs, which exchange by gloo through pinned memory" in mixed["notes"][0]
    # The slow machine does not help: every step waits for it.
    assert mixed["rows"][1]["speedup"] < 0.2
    assert not mixed["advice"]["distribute"]


# The picture


@pytest.mark.parametrize(
    ("preset", "link", "counts", "unit"),
    [
        ("gpt2-124m", "100mbit", (1, 2, 4, 8, 16), "seconds"),
        ("grammar", "wifi", (1, 2, 3), "seconds"),
        ("grammar", "1gbe", (1, 2, 3, 4), "milliseconds"),
    ],
)
def test_the_picture_is_legible(preset: str, link: str, counts: tuple[int, ...], unit: str) -> None:
    """The legend once covered the bars, and the logarithmic axis had the single tick 1."""
    wired = find_link(link)
    setting = make_cluster_model((wired,), find_machines(None, wired), 1, SheetOverrides())
    sequences = {"global_batch": 16}
    workload = workload_of(build_config(preset, flags={"train": sequences}), "fp32")
    plan = make_plan(workload, SyncStrategy(), setting, counts)
    figure = draw_plan(plan, advise(plan))
    figure.draw_without_rendering()
    split, gain = figure.axes
    assert split.get_ylabel() == f"{unit} per step"
    legend = split.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().overlaps(split.patch.get_window_extent())
    low, high = gain.get_ylim()
    ticks = zip(gain.get_yticklabels(), gain.get_yticks(), strict=True)
    numbers = [label.get_text() for label, at in ticks if low <= at <= high]
    assert len(numbers) > 1
    assert all(numbers)
    axis = [label.get_window_extent() for label in gain.get_xticklabels()]
    assert not [note.get_text() for note in gain.texts for box in axis if note.get_window_extent().overlaps(box)]


def test_the_picture_shows_the_strategy_of_the_verdict() -> None:
    """It once drew plain ddp under a verdict that recommended fp16, and did not explain why 3 nodes gained nothing."""
    wired = find_link("1gbe")
    setting = make_cluster_model((wired,), find_machines(None, wired), 1, SheetOverrides())
    made = make_plan(workload_of(build_config("gpt2-124m"), "fp32"), SyncStrategy(), setting, (1, 2, 3, 4))
    advice = advise(made)
    assert advice.best is not None
    assert advice.best.strategy != made.strategy
    figure = draw_plan(made, advice)
    assert f"4 nodes by {advice.best.strategy} train {advice.best.row.speedup:.2f} times" in figure.get_suptitle()
    _, gain = figure.axes
    assert str(advice.best.strategy) in gain.get_legend_handles_labels()[1]
    texts = [" ".join(text.get_text().split()) for text in gain.texts]
    assert any(text.startswith(f"{advice.best.row.speedup:.2f}×") for text in texts)
    assert "3 nodes divide 4 sequences unequally (2 for 1 rank, 1 for 2 ranks): every step waits for the largest " \
        "part." in texts  # fmt: skip


# Rows


def test_there_is_one_row_for_every_number_of_nodes(plan: Plan) -> None:
    rows = plan("gpt2-124m", "--link", "1gbe", "--nodes", "1..8")["rows"]
    assert [row["nodes"] for row in rows] == list(range(1, 9))
    assert all(row.keys() >= ROW for row in rows)
    assert [round(row["payload_factor"], 2) for row in rows[:3]] == [0.0, 1.0, 1.33]
    assert rows[0]["speedup"] == pytest.approx(1.0)
    for row in rows:
        parts = sum(row[f"{part}_s"] for part in ("compute", "exposed", "wait", "optimizer", "other"))
        assert row["step_s"] == pytest.approx(parts)
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])


def test_communication_times_match_known_figures(plan: Plan) -> None:
    def comm_s(*words: str) -> list[float]:
        return [row["comm_s"] for row in plan(*words)["rows"]]

    assert comm_s("gpt2-124m", "--nodes", "2,3", "--efficiency", "0.9") == pytest.approx([4.5, 6.0], rel=0.02)
    bare = ("--params", "760e6", "--grad-dtype", "bf16", "--efficiency", "0.85", "--nodes", "2")
    times = [comm_s(*bare, "--link", link)[0] for link in ("1gbe", "10gbe", "400gbe")]
    assert times == pytest.approx([14.3, 1.43, 0.036], rel=0.04)


def test_links_are_compared_in_one_table(plan: Plan, call: Call) -> None:
    words = ("--params", "760e6", "--grad-dtype", "bf16", "--nodes", "1,2", "--links", "1gbe, 10gbe,300mbit")
    rows = {row["link"]: row for row in plan(*words)["links"]}
    assert list(rows) == ["1gbe", "10gbe", "300mbit"]
    assert rows["10gbe"] == {"link": "10gbe", **plan(*words[:-2], "--link", "10gbe")["rows"][1]}
    code, out, _ = call("plan", *words)
    assert code == 0
    assert re.search(r"(?m)^1gbe +13 s ", out)
    assert all(len(line) <= 120 for line in out.splitlines())


def test_the_limit_is_that_of_what_a_node_sends(plan: Plan, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--params", "7e6", "--nodes", "1,2,4,inf")
    assert plan(*words)["limit"] == {"payload_factor": 2.0}
    assert [row["nodes"] for row in plan(*words)["rows"]] == [1, 2, 4]
    assert re.search(r"(?m)^ *∞ +2\.00( +–)+$", call("plan", *words)[1])
    # The payload is the first column that a narrow terminal has no room for.
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "payload" in call("plan", *words)[1]
    # Parts of a divided model are gathered for every micro-batch: its factor is another one.
    assert plan(*words, "--sync", "zero3")["limit"] == {"payload_factor": None}


def test_the_batch_of_a_preset_grows_with_the_ranks_and_a_stated_one_does_not(plan: Plan, call: Call) -> None:
    grown = plan("gpt2-124m", "--nodes", "1..8")
    assert {row["tokens"] for row in grown["rows"]} == {8 * 1024}
    assert "global batch 8 instead of 4: each of 8 ranks needs a sequence" in grown["notes"]
    assert {row["tokens"] for row in plan("gpt2-124m", "--nodes", "1..4")["rows"]} == {4 * 1024}
    code, _, err = call("plan", "gpt2-124m", "--nodes", "1..8", "--global-batch", "4")
    assert code == 2
    assert "5 ranks cannot share a global batch of 4 sequences" in err


def test_flags_override_the_data_sheets(plan: Plan) -> None:
    def first(*words: str) -> dict[str, Any]:
        row: dict[str, Any] = plan("gpt2-124m", "--nodes", "2", *words)["rows"][0]
        return row

    plain = first()
    assert first("--flops", "716e9")["compute_s"] == pytest.approx(plain["compute_s"] / 2, rel=0.01)
    assert first("--mfu", "0.25")["compute_s"] == pytest.approx(plain["compute_s"] * 2, rel=0.01)
    assert first("--link", "500mbit")["comm_s"] == pytest.approx(2 * plain["comm_s"], rel=0.05)
    assert first("--latency", "100ms")["comm_s"] > plain["comm_s"] + 1
    assert not first("--memory-gb", "2")["fits"]
    assert first("--wire", "fp16")["wire_bytes"] == plain["wire_bytes"] / 2
    assert first("--set", "sync.wire=fp16")["wire_bytes"] == plain["wire_bytes"] / 2
    assert first("--accumulate", "4")["tokens"] == 4 * plain["tokens"]
    assert first("--tokens", "8192")["tokens"] == 8192
    assert first("--scaling", "weak")["tokens"] == 2 * plain["tokens"]
    assert first("--sync", "diloco:50")["wire_bytes"] == pytest.approx(plain["wire_bytes"] / 50)
    assert first("--machine", "desktop")["compute_s"] < 0.5 * plain["compute_s"]
    assert first("--set", "sync.measure=barrier")["exposed_s"] == pytest.approx(plain["comm_s"], rel=0.01)


def test_several_ranks_per_node_are_planned(plan: Plan) -> None:
    words = ("--params", "1e9", "--grad-dtype", "bf16", "--link", "400gbe", "--nodes", "1,2", "--tokens", "1e6")
    document = plan(*words, "--ranks-per-node", "8")
    assert [row["ranks"] for row in document["rows"]] == [8, 16]
    assert document["rows"][0]["speedup"] == pytest.approx(1.0)
    assert any(option["strategy"] == "ddp, hierarchical" for option in document["advice"]["strategies"])


# Advice


def test_levers_are_ranked_and_state_their_costs(plan: Plan) -> None:
    options = plan("gpt2-124m", "--nodes", "1..4")["advice"]["strategies"]
    speeds = [option["tokens_per_s"] for option in options]
    assert speeds == sorted(speeds, reverse=True)
    assert all(option["costs"] for option in options)
    wanted = {"ddp", "ddp, fp16", "ddp, bf16", "ddp, int8", "ddp, powersgd rank 4", "ddp, batch ×4"}
    wanted |= {
        "local every 8 steps",
        "diloco every 50 steps",
        "streaming every 50 steps",
        "diloco every 50 steps, int8",
    }
    assert wanted <= {option["strategy"] for option in options}
    assert not any("zero" in option["strategy"] for option in options), "memory is not short"


def test_only_available_levers_have_a_command(plan: Plan) -> None:
    options = plan("gpt2-124m", "--nodes", "2")["advice"]["strategies"]
    assert all(option["available"] == (option["command"] is not None) for option in options)


def test_a_lever_that_becomes_possible_is_recommended(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    int8 = WIRE_FORMATS["int8"]
    monkeypatch.setitem(WIRE_FORMATS, "int8", replace(int8, is_available=False))
    words = ("gpt2-124m", "--nodes", "4", "--link", "300mbit")
    before = plan(*words)["advice"]["recommended"]
    monkeypatch.setitem(WIRE_FORMATS, "int8", int8)
    after = plan(*words)["advice"]["recommended"]
    assert (before["strategy"], after["strategy"]) == ("ddp, fp16", "ddp, int8")


def test_a_format_that_is_not_marked_as_safe_is_listed_but_not_recommended(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    int4 = WireFormat("int4", "an eighth of the bytes", "keep 4 bits a block", BLOCK_NUMBERS // 2 + 4, has_blocks=True)
    words = ("gpt2-124m", "--nodes", "4", "--link", "300mbit")
    monkeypatch.setitem(WIRE_FORMATS, "int4", int4)
    advice = plan(*words)["advice"]
    speeds = {option["strategy"]: option["tokens_per_s"] for option in advice["strategies"]}
    assert speeds["ddp, int4"] > speeds["ddp, int8"]
    assert advice["recommended"]["strategy"] == "ddp, int8"
    monkeypatch.setitem(WIRE_FORMATS, "int4", replace(int4, keeps_training=True))
    assert plan(*words)["advice"]["recommended"]["strategy"] == "ddp, int4"


def test_a_lever_that_changes_the_training_is_offered_and_never_recommended(plan: Plan, call: Call) -> None:
    advice = plan("gpt2-124m", "--link", "100mbit", "--nodes", "1,2")["advice"]
    assert advice["strategies"][0]["strategy"].startswith(("diloco", "streaming"))
    assert advice["recommended"] is None or advice["recommended"]["strategy"].startswith("ddp, int8")
    other = advice["other_training"]
    assert other["strategy"].startswith(("diloco", "streaming", "ddp, powersgd"))
    line = shlex.split(other["command"])
    code, _, err = call(*line[line.index("train") :], "--on", "local:2", "--dry-run")
    assert (code, err) == (0, "")
    quick = plan("--params", "1e9", "--link", "400gbe", "--nodes", "2", "--tokens", "1e6")["advice"]
    assert quick["other_training"] is None


@pytest.mark.parametrize(
    "words",
    [
        ("gpt2-124m", "--nodes", "2", "--link", "1gbe"),
        ("gpt2-124m", "--nodes", "2", "--set", "train.global_batch=8", "--wire", "fp16"),
        ("--depth", "8", "--nodes", "2", "--set", "train.lr=1e-3", "--scaling", "weak", "--link", "10gbe"),
        ("gpt2-124m", "--nodes", "2", "--machine", "desktop,laptop", "--global-batch", "16", "--link", "10gbe"),
    ],
)
def test_the_recommended_command_starts_the_planned_run(plan: Plan, call: Call, words: tuple[str, ...]) -> None:
    document = plan(*words, "--on", "local:2")
    advice = document["advice"]["recommended"]
    line = shlex.split(advice["command"])
    code, out, err = call(*line[line.index("train") :], "--dry-run")
    assert (code, err) == (0, "")
    assert out.count("# ") == 2
    assert ("--wire fp16" in advice["command"]) == ("fp16" in advice["strategy"])
    assert ("run.weights=1/0.37" in line) == ("balanced" in advice["strategy"])


DILOCO = "[sync]\nmode = 'diloco'\nevery = 20\naccumulate = 2\n"
INT8 = "[sync]\nwire = 'int8'\n[run]\nweights = '1/0.5'\n"


@pytest.mark.parametrize(
    ("settings", "words", "planned"),
    [
        (DILOCO, (), {"mode": "diloco", "every": 20, "wire": "fp32", "batch": 64}),
        (DILOCO, ("--accumulate", "1"), {"mode": "diloco", "every": 20, "wire": "fp32", "batch": 32}),
        (DILOCO, ("--sync", "ddp", "--accumulate", "1"), {"mode": "ddp", "wire": "fp32", "batch": 32}),
        (INT8, (), {"mode": "ddp", "wire": "int8", "batch": 32}),
        (INT8, ("--wire", "fp32"), {"mode": "ddp", "wire": "fp32", "batch": 32}),
        ("[train]\nglobal_batch = 32\n", ("--global-batch", "16"), {"mode": "ddp", "wire": "fp32", "batch": 16}),
        ("[sync]\nmode = 'stock'\n", (), {"mode": "stock", "wire": "fp32", "batch": 32}),
        ("", ("--sync", "local:1"), {"mode": "local", "every": 1, "wire": "fp32", "batch": 32}),
        ("", ("--sync", "diloco"), {"mode": "diloco", "every": 50, "wire": "fp32", "batch": 32}),
    ],
)
def test_the_command_trains_what_was_planned_with_any_settings_file(
    plan: Plan, call: Call, tmp_path: Path, settings: str, words: tuple[str, ...], planned: dict[str, Any]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(settings, encoding="utf-8")
    batch = () if "global_batch" in settings or "--global-batch" in words else ("--set", "train.global_batch=32")
    document = plan("--config", str(file), "--nodes", "2", "--on", "local:2", *batch, *words)
    # The strategy that was requested, not another that the plan suggests.
    strategy = document["strategy"]
    [line] = [option["command"] for option in document["advice"]["strategies"] if option["strategy"] == strategy]
    command = shlex.split(line)
    code, out, err = call(*command[command.index("train") :], "--dry-run", "--json")
    assert (code, err) == (0, "")
    config = json.loads(out)["config"]
    trained = {name: config["sync"][name] for name in ("mode", "wire", *(["every"] if "every" in planned else []))}
    sequences = config["sync"]["accumulate"] * config["train"]["global_batch"]
    assert trained | {"batch": sequences} == planned
    assert sequences * config["model"]["seq_len"] == document["rows"][-1]["tokens"]
    assert config["run"]["weights"] in (None, "1/1")


def test_the_command_runs_on_the_cluster_of_the_setting(plan: Plan) -> None:
    command = plan("--nodes", "2", "--set", "run.on=local:2", "--link", "10gbe")["advice"]["strategies"][0]["command"]
    assert "--on local:2" in command
    assert "run.on" not in command


def test_of_equally_fast_levers_the_simplest_is_recommended(plan: Plan) -> None:
    """On a fast link fp16 gains too little for its cost."""
    words = ("--params", "1e9", "--link", "400gbe", "--nodes", "2", "--tokens", "1e6")
    assert plan(*words)["advice"]["recommended"]["strategy"] == "ddp"


def test_distribution_is_not_advised_where_one_machine_is_faster(plan: Plan, call: Call) -> None:
    advice = plan("--link", "100mbit", "--nodes", "1..4")["advice"]
    assert advice["distribute"] is False
    assert advice["recommended"] is None
    _, out, _ = call("plan", "--link", "100mbit", "--nodes", "1..4")
    assert re.search(r"in every step: one machine is faster, with [\d,]+\s+tokens/s\.", out)
    assert "to do that on" not in out
    assert "train grammar --on hosts.toml --sync" in out


def test_a_larger_batch_is_offered_where_it_alone_helps(plan: Plan) -> None:
    sentences = plan("gpt2-124m", "--link", "100mbit", "--nodes", "1,2", "--machine", "desktop")["advice"]["sentences"]
    assert sentences[0].startswith("Don't distribute this")
    quick = plan("gpt2-124m", "--link", "100mbit", "--nodes", "1,2")["advice"]["sentences"]
    assert any("A global batch of 16 sequences would allow" in line for line in quick)


# Sharding


@pytest.mark.parametrize("words", [("gpt2-124m", "--link", "10gbe"), (), ("--params", "7e9", "--machine", "laptop")])
def test_sharding_is_planned_but_not_advised_for_speed(plan: Plan, words: tuple[str, ...]) -> None:
    document = plan(*words, "--sync", "zero3", "--nodes", "1..4")
    text = " ".join(document["advice"]["sentences"])
    for speedup in re.findall(r"one machine is faster, .* reach ([\d.]+) times", text):
        assert float(speedup) <= 1
    for before, after in re.findall(r"send (\S+ \S+) instead of (\S+ \S+) a step", text):
        assert before != after
    assert "DDP does not add up" not in text
    assert "ZeRO-3 divides moments, gradients and weights among 4 ranks, with a copy of each part" in text
    assert {"ddp", "zero1", "zero2", "zero3"} <= {option["strategy"] for option in document["advice"]["strategies"]}
    recommended = document["advice"]["recommended"]
    assert recommended is None or recommended["strategy"].startswith("ddp")
    assert ("never for speed" in text) == document["rows"][-1]["fits"]


def test_a_model_that_ddp_cannot_hold_is_planned_with_the_least_division(plan: Plan, call: Call) -> None:
    document = plan("gpt2-760m", "--nodes", "1..4", "--on", "local:4")
    advice = document["advice"]
    first = "This fits only with zero1 on 2 or more machines: a rank may fill 14.4 GB of 16 GB, and needs 12.5 GB " \
        "instead of 15.6 GB."  # fmt: skip
    assert advice["sentences"][0].startswith(first)
    [fitting] = advice["fitting"]
    assert (fitting["strategy"], fitting["nodes"], fitting["fits"]) == ("zero1", 2, True)
    assert document["strategy"] == "zero1"
    assert [row["fits"] for row in document["rows"]] == [False, True, True, True]
    line = shlex.split(advice["recommended"]["command"])
    assert line[line.index("--sync") + 1] == "zero1"
    code, _, err = call(*line[line.index("train") :], "--dry-run")
    assert (code, err) == (0, "")
    assert "speed-ups are against one machine that had the memory for it: none has" in document["notes"]


def test_fewer_machines_need_a_higher_level(plan: Plan) -> None:
    words = ("gpt2-760m", "--nodes", "1..5", "--set", "sync.mode=ddp")
    sentence = plan(*words, "--memory-gb", "13.3")["advice"]["sentences"][0]
    assert sentence.startswith("This fits only with zero1 on 5 machines, or with zero2 on 2: ")
    [bare] = plan("gpt2-760m", "--nodes", "3", "--memory-gb", "13")["advice"]["fitting"]
    assert bare["strategy"] == "zero1, no copies"
    assert "--set sync.copies=0" in bare["command"]
    tight = plan("gpt2-760m", "--nodes", "1..3", "--memory-gb", "9")["advice"]
    assert tight["sentences"][0].startswith("This does not fit into the memory of these machines, not even with zero3")


def test_ddp_that_is_asked_for_is_shown_where_it_does_not_fit(plan: Plan) -> None:
    document = plan("gpt2-760m", "--nodes", "2", "--sync", "ddp")
    assert (document["strategy"], document["rows"][0]["fits"]) == ("ddp", False)
    assert document["advice"]["recommended"]["strategy"].startswith("zero1")


def test_parts_of_unequal_machines_follow_their_memory(plan: Plan) -> None:
    document = plan("--params", "1.2e9", "--machine", "desktop,laptop", "--sync", "zero1")
    machines = document["rows"][-1]["machines"]
    assert [machine["machine"] for machine in machines] == ["desktop", "laptop"]
    assert machines[0]["part"] > machines[1]["part"]
    assert sum(machine["part"] for machine in machines) == pytest.approx(1)
    text = " ".join(document["advice"]["sentences"])
    assert "Parts follow the machines' memory; the largest of each kind: desktop 9" in text


def test_a_pipeline_is_compared_by_its_bytes(plan: Plan) -> None:
    document = plan("gpt2-760m", "--nodes", "1..2")
    pipeline = document["pipeline"]
    assert pipeline["activation_bytes"] == 1024 * 1536 * 4
    assert pipeline["wire_bytes"] == 2 * 4 * pipeline["activation_bytes"]
    assert pipeline["gradient_bytes"] == document["workload"]["gradient_bytes"]
    assert pipeline["idle"] == 1 / 5
    assert pipeline["available"] is False
    text = " ".join(document["advice"]["sentences"])
    assert (
        "sends the activations at a cut: 6.29 MB a micro-batch, 50.3 MB a step there and back, against 3.03 GB" in text
    )
    assert plan("--nodes", "1")["pipeline"] is None


def test_memory_is_stated_for_the_planned_lever(plan: Plan) -> None:
    text = " ".join(plan("gpt2-124m", "--sync", "diloco", "--nodes", "2")["advice"]["sentences"])
    assert "DiLoCo does not add up the machines' memory" in text


def test_the_named_machines_are_planned_for(plan: Plan, call: Call) -> None:
    assert [row["nodes"] for row in plan("--machine", "desktop,laptop")["rows"]] == [1, 2]
    assert [row["nodes"] for row in plan("--machine", "laptop")["rows"]] == list(range(1, 9))
    more = plan("--machine", "desktop,laptop", "--nodes", "4")["notes"]
    assert "nodes beyond the 2 named ones are assumed to equal the last of them" in more


def test_nodes_with_links_of_their_own_exchange_over_the_slowest(plan: Plan) -> None:
    def comm_s(link: str) -> list[float]:
        return [row["comm_s"] for row in plan("gpt2-124m", "--link", link, "--nodes", "1..4")["rows"]]

    document = plan("gpt2-124m", "--link", "1gbe,10gbe,100mbit")
    assert [row["nodes"] for row in document["rows"]] == [1, 2, 3]
    assert "over 1gbe, 10gbe, 100mbit by gloo: as the slowest of these links, 12.1 MB/s" in document["notes"][0]
    fast, slow, mixed = comm_s("1gbe"), comm_s("100mbit"), comm_s("1gbe,10gbe,100mbit")
    # The last link is also that of the fourth node.
    assert mixed == [*fast[:2], *slow[2:]]
    per_node = plan("gpt2-124m", "--link", "1gbe,100mbit", "--nodes", "2", "--ranks-per-node", "2")["rows"][0]
    assert per_node == plan("gpt2-124m", "--link", "100mbit", "--nodes", "2", "--ranks-per-node", "2")["rows"][0]


def test_only_the_nodes_on_wifi_share_the_air(plan: Plan) -> None:
    def comm_s(*links: str) -> float:
        row = plan("gpt2-124m", "--link", ",".join(links), "--nodes", "3", "--latency", "0ms")["rows"][0]
        return float(row["comm_s"])

    alone, two, all_of_them = comm_s("1gbe", "1gbe", "wifi"), comm_s("1gbe", "wifi"), comm_s("wifi")
    assert two == pytest.approx(2 * alone)
    assert all_of_them == pytest.approx(3 * alone)


def test_unequal_parts_of_a_batch_are_explained(plan: Plan) -> None:
    def sentences(*words: str) -> list[str]:
        made = plan("gpt2-124m", "--global-batch", "8", *words)
        return [text for text in made["advice"]["sentences"] if "largest part" in text]

    among = "8 sequences cannot be divided equally among 3, 5, 6, 7 nodes: every step waits for the largest part."
    assert sentences("--nodes", "1..8") == [among]
    assert sentences("--nodes", "1,2,4,8") == []
    assert sentences("--nodes", "3", "--scaling", "weak") == []


@pytest.mark.parametrize("machines", ["laptop,desktop", "desktop,laptop", "laptop,laptop,desktop"])
def test_all_speedups_of_a_plan_have_one_base(plan: Plan, machines: str) -> None:
    document = plan("--machine", machines)
    alone = plan("--machine", "desktop", "--nodes", "1")["rows"][0]["tokens_per_s"]
    for row in (*document["rows"], *document["advice"]["strategies"]):
        if "batch" not in row.get("strategy", ""):
            assert row["speedup"] == pytest.approx(row["tokens_per_s"] / alone)
    assert document["rows"][0]["efficiency"] == pytest.approx(1.0)
    base_speed = f"{alone:,.0f} tokens/s"
    assert f"speed-ups are against desktop alone, which trains {base_speed}" in document["notes"]
    assert f"desktop alone is faster, with {base_speed}." in document["advice"]["sentences"][0]


def test_the_base_is_the_fastest_machine_even_without_a_row_of_its_own(plan: Plan) -> None:
    [row] = plan("--machine", "laptop,desktop", "--nodes", "1")["rows"]
    assert (row["base"], row["speedup"] < 0.5) == ("desktop", True)


def test_one_rank_shards_nothing(call: Call) -> None:
    _, out, _ = call("plan", "--sync", "zero3", "--nodes", "1")
    assert "1 ranks" not in out
    assert "of gradients (ddp)" in out
    assert "With one rank there is nothing to divide, and zero3 is ddp: it holds 674 MB" in out


def test_latency_is_named_where_it_dominates_communication(plan: Plan) -> None:
    """Bytes over bandwidth give 8.5 s on a thousand nodes, and the table has 26.6 s."""
    document = plan("gpt2-124m", "--nodes", "1000")
    [row], workload = document["rows"], document["workload"]
    bytes_s = row["payload_factor"] * workload["gradient_bytes"] / (0.94 * 1e9 / 8)
    assert row["comm_s"] - row["comm_latency_s"] == pytest.approx(bytes_s)
    text = " ".join(document["advice"]["sentences"])
    assert "Of the 26.6 s of communication on 1000 nodes the bytes take 8.46 s; the other 18.2 s is latency" in text
    assert "is latency" not in " ".join(plan("gpt2-124m", "--nodes", "4")["advice"]["sentences"])


def test_memory_is_always_mentioned(plan: Plan) -> None:
    roomy = " ".join(plan("gpt2-124m", "--nodes", "2")["advice"]["sentences"])
    assert "DDP does not add up the machines' memory" in roomy
    assert "Divided among 2 ranks: zero1" in roomy
    assert "save memory, never for speed" in roomy
    words = ("gpt2-124m", "--nodes", "2", "--global-batch", "64", "--micro-batch", "32")
    tight = plan(*words, "--memory-gb", "12")["advice"]["sentences"]
    assert tight[0].startswith("This does not fit into the memory of these machines; with --micro-batch ")
    suggested = re.search(r"with --micro-batch (\d+) it would", " ".join(tight))
    assert suggested
    assert plan(*words[:-1], suggested[1], "--memory-gb", "12")["rows"][0]["fits"]
    huge = " ".join(plan("--params", "7e9", "--nodes", "8", "--machine", "laptop")["advice"]["sentences"])
    assert "not even one sequence at a time" in huge


def test_the_learning_rate_follows_the_batch(plan: Plan) -> None:
    def last_sentence(*words: str) -> str:
        line: str = plan("gpt2-124m", "--nodes", "2", *words)["advice"]["sentences"][-1]
        return line

    assert "0.0006 for a global batch of 4" in last_sentence()
    assert "changes neither" in last_sentence()
    assert "0.0012 for a global batch of 8" in last_sentence("--global-batch", "8")
    assert "0.0012 for a global batch of 8" in last_sentence("--scaling", "weak")
    assert "changes in proportion" in last_sentence("--scaling", "weak")
    assert "square root" in last_sentence("--global-batch", "64")
    assert "0.0024 for a global batch of 16" in last_sentence("--accumulate", "4")


# Output


def test_the_table_fits_a_hundred_columns(call: Call) -> None:
    code, out, err = call("plan", "gpt2-124m", "--nodes", "1..8")
    assert (code, err) == (0, "")
    before_command = out.partition("to do that")[0]
    assert max(map(len, before_command.splitlines())) <= 100
    assert re.search(r"nodes +payload +comm +compute +exposed +wait +step +tokens/s +speed-up +eff\. +memory", out)
    assert "…" not in before_command
    assert "T_comm/T_compute is 0.22 on 2 nodes" in out
    assert "train gpt2-124m --on hosts.toml --global-batch 8 --wire int8" in out


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_plan_fits_the_terminal_and_begins_with_its_answer(
    call: Call, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = call("plan", "gpt2-124m", "--link", "wifi", "--nodes", "1..4")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert [line for line in lines if len(line) > width and " train " not in line] == []
    assert lines[0].startswith("Don't distribute this")
    command, table = (next(n for n, line in enumerate(lines) if word in line) for word in (" train gpt2-", "nodes  "))
    assert command < table
    assert ("payload" in lines[table]) == (width == 120)
    assert any("comm: time to exchange" in line for line in lines)


def test_very_long_steps_keep_their_columns(call: Call) -> None:
    _, out, _ = call("plan", "gpt2-124m", "--link", "1mbit", "--nodes", "1..3")
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out


def test_a_plan_for_one_node_has_no_levers(call: Call) -> None:
    code, out, _ = call("plan", "--nodes", "1")
    assert code == 0
    assert "One node: nothing is exchanged." in out
    assert "strategy" not in out
    _, out, _ = call("plan", "--nodes", "1", "--ranks-per-node", "2")
    assert "One node: its 2 ranks exchange gradients inside the machine." in out


def test_every_recommendation_has_its_row_and_its_command_follows_it(call: Call) -> None:
    _, out, _ = call("plan")
    lines = out.splitlines()
    best, other = (re.search(rf"(\d) nodes by ({words})", out) for words in ("ddp, int8", "streaming every 50 steps"))
    assert best is not None
    assert other is not None
    assert any(line.startswith(f"ddp, int8 ({best[1]} nodes) ") for line in lines)
    words = ("by streaming", "--sync streaming", "payload")
    places = [next(number for number, line in enumerate(lines) if word in line) for word in words]
    assert places == sorted(places)
    assert f"to do that on {best[1]} machines (hosts.toml lists them):" in lines
    assert f"to do that at its price on {other[1]} machines (hosts.toml lists them):" in lines


def test_a_batch_that_was_enlarged_for_the_ranks_is_not_said_to_stay(call: Call) -> None:
    _, out, _ = call("plan", "--nodes", "100")
    assert "Another number of nodes changes neither" not in " ".join(out.split())
    assert "more nodes need a larger one" in " ".join(out.split())


def test_an_unknown_wire_format_is_refused_with_the_known_ones(call: Call) -> None:
    code, _, err = call("plan", "--wire", "fp8")
    assert code == 2
    assert "fp32, fp16, bf16, int8, powersgd; with a number as in powersgd:4\n" in err


def test_a_picture_is_written_on_request(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    code, out, _ = call("plan", "gpt2-124m", "-o", str(path))
    assert code == 0
    assert f"picture: {path}" in out
    assert imread(path).shape[:2] == (552, 1320)
    call("plan", "--params", "1e9", "--nodes", "1,2,4,8,16,32", "--link", "400gbe", "-o", str(path), "--tokens", "1e6")
    assert imread(path).shape[:2] == (552, 1320)


LOADED = """
import contextlib, io, sys
from shoal.cli.main import run
with contextlib.redirect_stdout(io.StringIO()):
    code = run(["plan", "gpt2-124m"], debug=False)
print(code, [name for name in ("matplotlib", "numpy", "torch", "tokenizers") if name in sys.modules])
"""


# Bad input


@pytest.mark.parametrize(
    ("words", "seen", "why", "fix"),
    [
        (["--nodes", "0"], "--nodes 0 is not a list of numbers of nodes", "from 1 to 16,384", "--nodes 1..8"),
        (
            ["--nodes", "8..1"],
            "--nodes 8..1 is not a list of numbers of nodes",
            "the smaller one first",
            "--nodes 1..8",
        ),
        (["--nodes", "-2"], "--nodes -2 is not a list", "from 1", "--nodes 4"),
        (["--nodes", "two"], "--nodes two is not a list", "from 1", "--nodes 1,2,4"),
        (["--nodes", "1..99999"], "is not a list of numbers", "16,384", "--nodes 1..8"),
        (["--nodes", "inf"], "--nodes inf: there is no plan without an end", "a highest point", "--nodes 1,4,16"),
        (["--links", "1gbe,wify"], "there is no link 'wify'", "did you mean 'wifi'?", "nvlink"),
        (["--links", "1gbe", "--link", "wifi"], "--link has no effect with --links", "a row for each", "leave one out"),
        (["--nodes", "1..1000"], "--nodes 1..1000 gives 1000 rows", "at most 64", "--nodes 1,2,4,8"),
        (["--link", "-1gbit"], "'-1gbit' is not a link rate", "a number above zero", "100mbit"),
        (["--link", "0gbit"], "'0gbit' is not a link rate", "a number above zero", "100mbit"),
        (["--link", "10gb"], "'10gb' is not a link rate", "did you mean '10gbe'?", "1gbit"),
        (["--link", "wify"], "there is no link 'wify'", "did you mean 'wifi'?", "nvlink"),
        (["--latency", "5"], "'5' is not a delay", "with its unit", "2ms"),
        (["--efficiency", "1.5"], "--efficiency 1.5 is out of range", "1 at most", "--efficiency 0.85"),
        (["--efficiency", "nan"], "--efficiency nan is out of range", "above 0", "--efficiency 0.85"),
        (["--machine", "h10"], "there is no machine 'h10'", "did you mean 'h100'?", "laptop"),
        (["--flops", "-1"], "--flops -1 is out of range", "above 0", "--flops"),
        (["--mfu", "2"], "--mfu 2 is out of range", "1 at most", "--mfu"),
        (["--memory-gb", "0"], "--memory-gb 0 is out of range", "above 0", "--memory-gb"),
        (["gpt2"], "there is no preset 'gpt2'", "did you mean 'gpt2-124m'?", "grammar"),
        (["--params", "1e6", "gpt2-124m"], "--params does not go with gpt2-124m", "by its size only", "leave"),
        (["--params", "1e6", "--depth", "3"], "--params does not go with --depth", "by its size only", "leave"),
        (["--params", "1e6", "--set", "train.lr=1"], "--params does not go with --set", "by its size", "leave"),
        (["--params", "0"], "--params 0 is out of range", "above 0", "--params"),
        (["--params", "-5"], "--params -5 is out of range", "above 0", "--params"),
        (["--params", "nan"], "--params nan is out of range", "above 0", "--params"),
        (["--params", "inf"], "--params inf is out of range", "above 0", "--params"),
        (["--params", "1e6", "--tokens", "0"], "--tokens 0 is out of range", "above 0", "--tokens"),
        (["--params", "1e6", "--global-batch", "0"], "--global-batch 0", "command line", "--global-batch"),
        (["--grad-dtype", "fp8"], "--grad-dtype 'fp8' is not known", "did you mean", "fp32 or bf16"),
        (["--accumulate", "0"], "--accumulate 0 is out of range", "above 0", "--accumulate"),
        (["--wire", "int7"], "--wire 'int7' is not known", "did you mean 'int8'?", "powersgd:4"),
        (["--sync", "dilco"], "--sync 'dilco' is not known", "did you mean 'diloco'?", "diloco:50"),
        (["--sync", "diloco:0"], "--sync 'diloco:0' is not known", "did you mean", "diloco:50"),
        (["--global-batch", "4", "--set", "train.global_batch=8"], "train.global_batch is given twice", "one", "leave"),
        (["--tokens", "4096", "--set", "train.global_batch=8"], "train.global_batch is given twice", "one", "--tokens"),
        (["--wire", "int8", "--set", "sync.wire=bf16"], "sync.wire is given twice", "only one", "--wire"),
        (["--sync", "ddp", "--set", "sync.mode=local"], "sync.mode is given twice", "only one", "--sync"),
        (["--sync", "diloco:20", "--set", "sync.every=8"], "sync.every is given twice", "one", "--sync diloco:20"),
        (["--on", "local:2", "--set", "run.on=local:3"], "run.on is given twice", "only one", "--on"),
        (["--set", "sync.every=8"], "sync.every has no effect here", "this run has ddp", "sync.mode=local"),
        (["--sync", "ddp:8"], "sync.every has no effect here", "this run has ddp", "leave it out"),
        (["--params", "1e9", "--sync", "ddp:8"], "sync.every has no effect here", "this run has ddp", "leave it out"),
        (["--sync", "diloco", "--wire", "powersgd"], "--wire powersgd is made for gradients", "command line", "one"),
        (["--set", "run.weights=1/0.5"], "run.weights has no effect here", "equally", "--machine desktop,laptop"),
        (["--scaling", "medium"], "--scaling 'medium'", "'strong' or 'weak'", "--scaling"),
        (["-o", "plan.pdf"], "plan.pdf is not a PNG file", "as PNG", "plan.png"),
        (["-o", "/nowhere/plan.png"], "cannot write /nowhere/plan.png", "where -o says", "df -h"),
    ],
)
def test_bad_input_is_refused_with_reason_and_fix(call: Call, words: list[str], seen: str, why: str, fix: str) -> None:
    code, out, err = call("plan", *words)
    assert code in (2, 3)
    assert out == ""
    assert err.startswith(f"error: {seen}") or seen in err.splitlines()[0]
    assert why in err
    assert fix in err.rpartition("next: ")[2]
