"""`shoal simulate`: the scenario file, table, JSON, picture, stragglers fitted from a run."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli.main import run
from shoal.cli.simulate import _percent
from shoal.errors import ConfigError, DataError
from shoal.records.rank_log import step_time_factors
from shoal.tools.plan.figures import LABELS, draw_simulation
from shoal.tools.plan.scenario import MeasuredStraggling, Slowest
from shoal.tools.plan.scenario_file import ScenarioFile, read_scenario, scenarios, simulate
from tests.support.run_samples import all_events, make_run, rank_events

TINY = "nodes = 4\nstep_s = 0.5\ntokens_per_step = 1000\nhours = 2\nseeds = 4\n"
Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Simulate a small scenario with more keys, written as `key = value`; return what is printed."""

    def called(*lines: str, options: Sequence[str] = (), code: int = 0) -> str:
        file = tmp_path / "scenario.toml"
        own = {line.partition(" ")[0] for line in lines}
        tiny = [line for line in TINY.splitlines() if line.partition(" ")[0] not in own]
        file.write_text("\n".join([*tiny, *("mtbf_hours = 20",) * ("mtbf_hours" not in own), *lines]))
        assert run(["simulate", str(file), *options], debug=False) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return called


def options(**more: Any) -> ScenarioFile:
    return ScenarioFile(**{"nodes": 4, "step_s": 0.5, "tokens_per_step": 1000.0, "hours": 2.0, "seeds": 3} | more)


def test_the_table_compares_both_recovery_policies(call: Call) -> None:
    output = call('straggler = "lognormal:0.1"')
    assert "4 nodes, 2 h, 4 seeds; a step of 500 ms; a failure about every 5 h 00 min" in output
    assert "the slowest of 4 ranks takes 1.11×" in output
    header, *rows = [line for line in output.splitlines() if line][1:]
    assert header.split()[::2] == ["restart", "live"]
    assert {"tokens/s", "failures"} <= {row.split("  ")[0] for row in rows}
    assert "regrouping live trains" in output


def test_the_best_interval_is_computed_and_shown(call: Call) -> None:
    """Daly's, for checkpoints of 5 s and a failure every 5 h: 421 s."""
    assert "checkpoints every 842 steps (7 min 01 s)" in call()
    assert "checkpoints every 60 steps (30 s)" in call("checkpoint_every = 60")
    assert "no checkpoints" in call('checkpoint_every = "never"')
    assert "no failures; no checkpoints" in call("mtbf_hours = inf")


def test_a_single_recovery_policy_gives_a_narrower_table(call: Call) -> None:
    output = call('recovery = "live"')
    assert "regrouping live" not in output
    assert "restart  " not in output


def test_a_training_without_failures_loses_no_time(call: Call) -> None:
    output = call("mtbf_hours = inf", 'recovery = "restart"')
    assert "lost:" not in output
    assert "restart: nothing is lost" in output


@pytest.mark.parametrize("mtbf_hours", ["100", "20", "5"])
def test_no_part_of_the_loss_is_larger_than_the_whole(mtbf_hours: str, call: Call) -> None:
    """With few failures most seeds have none, and the median of the whole is far below the mean of a part."""
    output = call(f"mtbf_hours = {mtbf_hours}", "checkpoint_every = 3000")
    sentences = re.findall(r": ([\d.]+)% is lost.*?, (.*) to .* \(([\d.]+)%\)", output)
    assert len(sentences) == 2
    for whole, wording, part in sentences:
        assert float(part) <= float(whole)
        assert (wording == "most of it") == (float(part) > float(whole) / 2)


def test_a_share_that_rounds_to_zero_has_no_sign() -> None:
    assert [_percent(share) for share in (-1e-9, 0.0, -0.012, 0.25)] == [
        "0.00%",
        "0.00%",
        "-1.20%",
        "25.0%",
    ]


def test_a_training_without_progress_is_reported(call: Call) -> None:
    output = call("mtbf_hours = 0.05", "checkpoint_every = 100000")
    assert "restarting makes no progress" in output


def test_the_json_document_has_bands_causes_and_the_curve(call: Call) -> None:
    document = json.loads(call("mtbf_hours = inf", options=["--json"]))
    assert document["options"]["mtbf_hours"] is None
    assert document["ideal_tokens_per_s"] == 2000.0
    live = document["policies"]["live"]
    assert live["goodput"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert live["mean_s"].keys() == {"useful", *LABELS}
    assert len(live["curve"]["edges_s"]) == len(live["curve"]["median"]) + 1
    assert sum(live["mean_s"].values()) == pytest.approx(7200)


def test_the_picture_is_a_png_with_both_panels(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "simulation.png"
    output = call('straggler = "lognormal:0.1"', options=["-o", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in output
    speed, lost = draw_simulation(simulate(options(mtbf_hours=2.0))).axes
    assert [str(line.get_label()).split(":")[0] for line in speed.get_lines()] == ["undisturbed", "restart", "live"]
    assert LABELS["redone"] in [label.get_text() for label in lost.get_yticklabels()]


def test_a_training_without_failures_can_be_drawn() -> None:
    speed, lost = draw_simulation(simulate(options(mtbf_hours=math.inf, hours=100.0))).axes
    assert speed.get_xlabel() == "days"
    assert lost.get_yticks().tolist() == []


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path, call: Call) -> None:
    error = call(options=["-o", str(tmp_path / "missing" / "simulation.png")], code=3)
    assert "cannot write" in error
    assert "df -h" in error.rpartition("next: ")[2]
    assert "simulation.pdf is not a PNG file" in call(options=["-o", "simulation.pdf"], code=2)


def test_a_step_time_that_depends_on_the_nodes_is_used() -> None:
    node_counts: list[int] = []

    def step_s(nodes: int) -> float:
        node_counts.append(nodes)
        return 3.0 / nodes

    forecast = simulate(options(step_s=step_s, mtbf_hours=2.0, recovery="live"))["live"]
    assert forecast.scenario.cluster.ideal_tokens_per_s == pytest.approx(1000 / 0.75)
    assert min(node_counts) < 4


def test_the_defaults_can_be_simulated() -> None:
    assert set(scenarios(ScenarioFile(2, 0.5, 1000.0))) == {"restart", "live"}


def test_a_plan_predicts_the_step_of_a_scenario(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text('nodes = 3\nranks_per_node = 2\nscaling = "weak"\n[plan]\npreset = "gpt2-124m"\nlink = "10gbe"\n')
    scenario = read_scenario(file)
    assert (scenario.nodes, scenario.ranks_per_node, scenario.scaling) == (3, 2, "weak")
    assert scenario.tokens_per_step == 6 * 4 * 1024
    assert callable(scenario.step_s)
    words = "plan gpt2-124m --link 10gbe --nodes 2,3 --ranks-per-node 2 --scaling weak --json"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert run(words.split(), debug=False) == 0
    for row in json.loads(output.getvalue())["rows"]:
        assert scenario.step_s(row["nodes"]) == pytest.approx(row["step_s"])
    # Without a word about the step it is the plan of `shoal plan`.
    file.write_text("hours = 1\n")
    assert read_scenario(file).nodes == 8
    file.write_text('step_s = 9\n[plan]\nset = ["train.global_batch=16"]\n')
    stated = read_scenario(file)
    assert (stated.step_s, stated.tokens_per_step) == (9.0, 16 * 64)


@pytest.mark.parametrize(
    ("text", "seen", "why", "fix"),
    [
        ("node = 3", "unknown key node in", "did you mean 'nodes'?", "the keys are nodes, step_s"),
        ("[plan]\nlnk = 'wifi'", "unknown key plan.lnk in", "did you mean 'link'?", "the keys are link"),
        ("[plan]\non = 'local:2'", "unknown key plan.on in", "", "the keys are"),
        ("hours = 'long'", "hours = 'long': input should be a valid number", "this comes from", "docs/simulate.md"),
        ("[plan]\ndepth = 'x'", "plan.depth = 'x': input should be a valid integer", "this comes from", "correct it"),
        ("[plan]\nlink = 'wify'", "there is no link 'wify'", "did you mean 'wifi'?", "nvlink"),
        ("recovery = 'fast'", "recovery = 'fast': input should be 'both', 'restart' or 'live'", "this", "correct it"),
        ("scaling = 'odd'", "scaling = 'odd': input should be 'strong' or 'weak'", "this comes from", "correct it"),
        ("nodes = 'x'", "nodes = 'x': input should be a valid integer", "this comes from", "correct it"),
        ("nodes = 0", "a cluster of 0 nodes cannot be simulated", "at least 1", "nodes = 8"),
        ("ranks_per_node = 0", "nodes with 0 ranks each", "at least 1", "ranks_per_node = 1"),
        ("plan = 3", "plan in", "", "write [plan] and its keys below"),
        ("recovery = 'restart'\nrejoin_s = 3", "rejoin_s has no effect with recovery = 'restart'", "see", "leave one"),
        ("checkpoint_every = 'never'\ncheckpoint_s = 3", "checkpoint_s has no effect with", "see", "leave one"),
        ("hours = ", "is not valid TOML", "", "https://toml.io"),
    ],
)
def test_a_wrong_scenario_file_is_refused_with_the_nearest_key(
    text: str, seen: str, why: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    assert run(["simulate", str(file)], debug=False) == 2
    error = capsys.readouterr().err
    assert seen in error.splitlines()[0]
    assert why in error
    assert fix in error.rpartition("next: ")[2]


def test_a_missing_scenario_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "nowhere.toml"], debug=False) == 2
    assert "nowhere.toml" in capsys.readouterr().err


# Stragglers from a run


def test_stragglers_are_fitted_to_each_ranks_own_step_times(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    straggling = scenarios(options(straggler=str(tmp_path / "run"), recovery="live"))["live"].straggling
    assert isinstance(straggling, MeasuredStraggling)
    assert 1.0 < Slowest(straggling, 64).mean < 1.2


def test_own_step_times_exclude_the_wait_and_a_ranks_constant_speed() -> None:
    """Rank 1 always takes twice as long, which is not straggling. Rank 0 is late once, and rank 1 waits for it."""
    events = []
    for rank, usual_s in ((0, 1.0), (1, 2.0)):
        for number in range(1, 81):
            own_s = 3.0 if (rank, number) == (0, 70) else usual_s
            wait_s = (3.0 if number == 70 else 2.0) - own_s
            record = {"event": "step", "rank": rank, "step": number, "step_s": own_s + wait_s, "wait_s": wait_s}
            events.append(record)
    factors = np.sort(step_time_factors(events))
    assert (len(factors), factors[0], factors[-2], factors[-1]) == (80, 1.0, 1.0, 3.0)


def test_a_single_rank_needs_no_wait_times() -> None:
    events = [{**event, "wait_s": None} for event in rank_events(0, world_size=1)]
    assert len(step_time_factors(events)) == 50


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([], "no rank of this run has recorded a step"),
        ([{**event, "wait_s": None} for event in all_events()], "rank 0 has not recorded how long it waited"),
    ],
)
def test_a_run_with_too_few_records_is_refused(events: list[dict[str, Any]], seen: str) -> None:
    with pytest.raises(DataError, match=seen) as refused:
        step_time_factors(events)
    assert 'straggler = "lognormal' in refused.value.fix


# Bad input


@pytest.mark.parametrize(
    ("wrong", "seen", "fix"),
    [
        ({"checkpoint_every": "often"}, "'often' is not a number of steps", 'checkpoint_every = "best"'),
        ({"checkpoint_every": "0"}, "every 0 steps", "checkpoint_every"),
        ({"checkpoint_every": "-5"}, "'-5' is not a number of steps", 'checkpoint_every = "best"'),
        ({"straggler": "lognormal:much"}, "states no spread", "lognormal:0.05"),
        ({"straggler": "lognormal:-1"}, "sigma of -1", "lognormal:0.05"),
        ({"straggler": "nowhere"}, "neither none, lognormal:SIGMA nor a run folder", "shoal runs"),
        ({"nodes": 0}, "0 nodes", "nodes ="),
        ({"hours": -1.0}, "simulated time", "hours = 24"),
        ({"mtbf_hours": math.nan}, "between failures", "mtbf_hours ="),
        ({"min_nodes": 5}, "at least 5", "min_nodes"),
        ({"seeds": 0}, "0 seeds", "seeds ="),
    ],
)
def test_bad_options_are_refused_with_reason_and_fix(wrong: dict[str, Any], seen: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        simulate(options(**wrong))
    assert seen in refused.value.seen
    assert refused.value.why
    assert fix in refused.value.fix
