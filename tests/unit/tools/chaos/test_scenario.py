"""Chaos scenarios: every shipped one is complete, and a wrong one is refused with reason and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.cli.chaos import list_document, read_script, rows_without_scenario
from shoal.config.load import validate_session
from shoal.errors import ConfigError, UsageError
from shoal.tools.chaos.actions import Cut, Flap, Freeze, KillNode, KillRank, action_names, describe
from shoal.tools.chaos.run import choose_scenarios
from shoal.tools.chaos.scenario import (
    FAULT_ROWS,
    SCENARIOS,
    all_scenarios,
    find_scenario,
    load_scenario,
    parse_scenario,
)
from shoal.tools.chaos.testbed import why_not
from shoal_lab.commands import ControlGroup, ControlGroups
from tests.support.paths import ROOT

CUSTOM: dict[str, Any] = {
    "name": "mine",
    "row": 3,
    "text": "a node goes",
    "steps": [{"at_step": 10, "do": "kill-node", "node": "node2"}],
}


def test_every_file_has_a_scenario_of_the_same_name() -> None:
    scenarios = all_scenarios()
    assert {scenario.name for scenario in scenarios} == {file.stem for file in SCENARIOS.glob("*.toml")}
    assert [scenario.row for scenario in scenarios] == sorted(scenario.row for scenario in scenarios)
    assert all(not why_not(scenario, "lab:3") or scenario.disk_mb or scenario.limits_cpu for scenario in scenarios)


def test_a_scenario_that_limits_the_cpu_is_refused_where_that_is_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = find_scenario("slow-node")
    monkeypatch.setattr("shoal.cluster.lab.read_groups", lambda: ControlGroups())
    assert "control group with a cpu controller" in why_not(scenario, "lab:3")
    monkeypatch.setattr(
        "shoal.cluster.lab.read_groups",
        lambda: ControlGroups(cpu=ControlGroup(parent=Path("/sys/fs/cgroup"), version=2)),
    )
    assert why_not(scenario, "lab:3") == ""


def test_every_row_of_the_fault_table_has_a_scenario_or_tests() -> None:
    assert [row.number for row in FAULT_ROWS] == list(range(1, 29))
    tests_only = rows_without_scenario(all_scenarios())
    assert {row.number for row in tests_only} == {17, 20, 21, 25, 28}
    assert all(row.why for row in tests_only)
    assert all((ROOT / "tests" / f"{test}.py").is_file() for row in FAULT_ROWS for test in row.tests)


def test_the_list_has_faults_and_expectations() -> None:
    document = list_document(all_scenarios())
    scenario = next(entry for entry in document["scenarios"] if entry["name"] == "freeze-long")
    assert (scenario["row"], scenario["does"], scenario["on"], scenario["target_s"]) == (
        6,
        "freeze node1 for 30 s",
        ["lab:3"],
        4.0,
    )
    assert scenario["expect"]["stale_commits"] == 0
    assert 25 in document["by_tests_alone"]


def test_a_scenario_is_played_with_another_sync_method() -> None:
    [scenario] = choose_scenarios(["kill-rank"], "lab:3", sync="zero1+fp16")
    sync = scenario.config("lab:3", seed=1).sync
    assert (sync.mode, sync.wire) == ("zero1", "fp16")
    with pytest.raises(UsageError) as refused:
        choose_scenarios(["kill-rank"], "lab:3", sync="zero1+powersgd")
    assert "cannot be trained" in refused.value.seen


def test_a_custom_scenario_becomes_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nrow = 9\ntext = "twice"\ntraining.train.steps = 70\ntraining.members.min_nodes = 2\n'
        'steps = [{ at_step = 5, do = "flap", node = "node2", for_s = 2.0 }]\n[expect]\nreconfigurations = 0\n'
    )
    scenario = find_scenario(str(file))
    config = scenario.config("local:2", seed=7)
    assert (config.train.steps, config.members.min_nodes, config.train.seed, config.run.on) == (70, 2, 7, "local:2")
    assert scenario.ends_by_itself
    assert scenario.needs_lab
    assert not find_scenario("freeze-long").ends_by_itself


@pytest.mark.parametrize(
    ("change", "seen", "helps"),
    [
        ({"nmae": "x"}, "unknown key nmae", "did you mean 'name'?"),
        ({"expect": {"stale_commit": 0}}, "unknown key expect.stale_commit", "did you mean 'stale_commits'?"),
        ({"steps": [{"do": "kil-node"}]}, "steps.0 has do = 'kil-node'", "did you mean 'kill-node'?"),
        ({"steps": [{"at_step": 3}]}, "steps.0 has do = None", "every step names its action"),
        ({"steps": []}, "steps: ", ""),
        ({"row": 40}, "row: ", "it says 40"),
        ({"steps": [{"do": "kill-node", "node": "node9"}]}, "kill-node node9: the scenario has nodes = 3", ""),
        ({"steps": [{"do": "kill-rank"}]}, "kill-rank takes a rank or a node", ""),
        ({"steps": [{"do": "kill-rank", "rank": 3}]}, "ranks count from 0", ""),
        ({"steps": [{"do": "heal", "at_step": 1, "after_s": 1.0}]}, "give one of them", ""),
        ({"steps": [{"do": "heal", "after_regroup": True}]}, "follows another step", ""),
        ({"steps": [{"do": "fill-disk"}]}, "disk_mb = 4", ""),
        ({"trains": False}, "at_step needs a training", ""),
        ({"expect": {"command_code": 1}}, "no step is one", ""),
        ({"expect": {"sentence_within_steps": 3}}, "needs a sentence", ""),
        ({"expect": {"sentence": "("}}, "not a regular expression", ""),
        ({"training": {"train": {"stepz": 3}}}, "unknown setting train.stepz in scenario mine", "train.steps"),
    ],
)
def test_a_wrong_scenario_is_refused_with_reason_and_fix(change: dict[str, Any], seen: str, helps: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_scenario({**CUSTOM, **change}, "mine.toml")
    assert seen in refused.value.seen
    assert helps in refused.value.why
    assert refused.value.fix


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_scenario(tmp_path / "x.toml")
    with pytest.raises(UsageError, match="there is no scenario file"):
        load_scenario(tmp_path / "y.toml")


def test_a_scenario_the_cluster_cannot_play_is_refused() -> None:
    for words, on, why in (
        (["kill-node"], "local:3", "emulated nodes"),
        (["kill-node"], "lab:2", "it needs 3 nodes"),
        (["kill-rank"], "local:2", "it needs 3 ranks"),
        (["kill-rank"], "lab:3,slots=2", "one rank on each node"),
        (["kill-rank"], "join:3", "made for them"),
    ):
        with pytest.raises(UsageError) as refused:
            choose_scenarios(words, on)
        assert why in refused.value.why
    with pytest.raises(UsageError, match="no scenario 'kil-rank'"):
        choose_scenarios(["kil-rank"], "lab:3")
    assert "did you mean 'kill-rank'?" in _refusal("kil-rank")


def _refusal(name: str) -> str:
    with pytest.raises(UsageError) as refused:
        find_scenario(name)
    return refused.value.why


def test_all_selects_the_scenarios_that_the_cluster_can_play() -> None:
    names = {scenario.name for scenario in choose_scenarios(["all"], "local:2")}
    assert {"interrupt", "checkpoint-flip", "terminal-closed"} <= names
    assert not names & {"kill-node", "kill-rank", "freeze-long"}


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Freeze(node="node2", for_s=1.5), "freeze node2 for 1.5 s"),
        (KillRank(rank=2), "kill-rank rank 2"),
        (KillNode(node="node1", silent=True), "kill-node node1 silent"),
        (Cut(between=("node1", "node2"), one_way=True), "cut node1 node2 one-way"),
        (Flap(node="node1", for_s=0.5, at_step=3), "flap node1 for 0.5 s"),
    ],
)
def test_an_action_is_described_briefly(action: Freeze, words: str) -> None:
    assert describe(action) == words


def test_every_kind_of_action_has_a_name() -> None:
    assert {"kill-rank", "freeze", "cut", "heal", "power-on", "unknown-connections", "shoal"} <= set(action_names())


def test_the_settings_of_a_scenario_apply_to_the_session_of_a_script() -> None:
    for scenario in all_scenarios():
        settings = scenario.session("lab:3", 7)
        config = validate_session(settings)
        assert (config.run.on, config.train.seed) == ("lab:3", 7)
        assert config.train.steps == scenario.config("lab:3", 7).train.steps
        assert config.members == scenario.config("lab:3", 7).members
        # Its batch is the script's own.
        assert "global_batch" not in settings["train"]


def test_scenarios_that_cannot_be_played_on_a_script_are_refused_with_reason(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    script = read_script(f"{tmp_path / 'mine.py'} --width 64")
    assert script == (str(tmp_path / "mine.py"), "--width", "64")
    names = {scenario.name for scenario in choose_scenarios(["all"], "lab:3", script)}
    assert {"kill-rank", "kill-node", "freeze-long", "checkpoint-flip", "interrupt"} <= names
    assert names.isdisjoint({"bit-flip", "not-a-number", "one-way-doctor"})
    with pytest.raises(UsageError) as raised:
        choose_scenarios(["not-a-number"], "lab:3", script)
    assert "the learning rate of a script is its own" in raised.value.why
    for wrong in ("", "'", "no-such-script.py"):
        with pytest.raises(UsageError) as raised:
            read_script(wrong)
        assert raised.value.fix
