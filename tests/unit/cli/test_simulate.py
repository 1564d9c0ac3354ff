"""`plan --simulate`: options, table, JSON, picture, stragglers fitted from a run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from shoal.cli import simulate as knobs
from shoal.cli.simulate import SimulateOptions, run_simulation, scenarios, simulate
from shoal.errors import ConfigError, DataError, ShoalError
from shoal.records.rank_log import step_time_factors
from shoal.tools.plan.figures import LABELS, draw_simulation
from shoal.tools.plan.scenario import MeasuredStraggling, Slowest
from tests.support.run_samples import all_events, make_run, rank_events

app = typer.Typer()


@app.command()
def tiny(
    nodes: int = 4,
    step_s: knobs.StepS = 0.5,
    tokens_per_step: knobs.TokensPerStep = 1000.0,
    hours: knobs.Hours = 2.0,
    mtbf_hours: knobs.MtbfHours = 20.0,
    recovery: knobs.RecoveryKind = SimulateOptions.recovery,
    straggler: knobs.Straggler = SimulateOptions.straggler,
    checkpoint_every: knobs.CheckpointEvery = SimulateOptions.checkpoint_every,
    picture: Path | None = None,
    json: bool = False,
) -> None:
    """Simulate with options like those of `plan`."""
    assert step_s is not None
    assert tokens_per_step is not None
    options = SimulateOptions(
        nodes, step_s, tokens_per_step, hours, mtbf_hours=mtbf_hours, recovery=recovery, straggler=straggler,
        checkpoint_every=checkpoint_every, seeds=4,
    )  # fmt: skip
    run_simulation(options, json, picture)


def call(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    if result.exception:
        raise result.exception
    return result.stdout


def options(**more: Any) -> SimulateOptions:
    return SimulateOptions(**{"nodes": 4, "step_s": 0.5, "tokens_per_step": 1000.0, "hours": 2.0, "seeds": 3} | more)


def test_the_table_compares_both_recovery_policies() -> None:
    output = call("--straggler", "lognormal:0.1")
    assert "4 nodes, 2 h, 4 seeds; a step of 500 ms; a failure about every 5 h 00 min" in output
    assert "the slowest of 4 ranks takes 1.11×" in output
    header, *rows = [line for line in output.splitlines() if line][1:]
    assert header.split()[::2] == ["restart", "live"]
    assert {"tokens/s", "failures"} <= {row.split("  ")[0] for row in rows}
    assert "regrouping live trains" in output


def test_the_best_interval_is_computed_and_shown() -> None:
    """Daly's, for checkpoints of 5 s and a failure every 5 h: 421 s."""
    assert "checkpoints every 842 steps (7 min 01 s)" in call()
    assert "checkpoints every 60 steps (30 s)" in call("--checkpoint-every", "60")
    assert "no checkpoints" in call("--checkpoint-every", "never")
    assert "no failures; no checkpoints" in call("--mtbf-hours", "inf")


def test_a_single_recovery_policy_gives_a_narrower_table() -> None:
    output = call("--recovery", "live")
    assert "regrouping live" not in output
    assert "restart  " not in output


def test_a_training_without_failures_loses_no_time() -> None:
    output = call("--mtbf-hours", "inf", "--recovery", "restart")
    assert "lost:" not in output
    assert "restart: nothing is lost" in output


@pytest.mark.parametrize("mtbf_hours", ["100", "20", "5"])
def test_no_part_of_the_loss_is_larger_than_the_whole(mtbf_hours: str) -> None:
    """With few failures most seeds have none, and the median of the whole is far below the mean of a part."""
    output = call("--mtbf-hours", mtbf_hours, "--checkpoint-every", "3000")
    sentences = re.findall(r": ([\d.]+)% is lost.*?, (.*) to .* \(([\d.]+)%\)", output)
    assert len(sentences) == 2
    for whole, wording, part in sentences:
        assert float(part) <= float(whole)
        assert (wording == "most of it") == (float(part) > float(whole) / 2)


def test_a_share_that_rounds_to_zero_has_no_sign() -> None:
    assert [knobs._percent(share) for share in (-1e-9, 0.0, -0.012, 0.25)] == [
        "0.00%",
        "0.00%",
        "-1.20%",
        "25.0%",
    ]


def test_a_training_without_progress_is_reported() -> None:
    output = call("--mtbf-hours", "0.05", "--checkpoint-every", "100000")
    assert "restarting makes no progress" in output


def test_the_json_document_has_bands_causes_and_the_curve() -> None:
    document = json.loads(call("--json", "--mtbf-hours", "inf"))
    assert document["options"]["mtbf_hours"] is None
    assert document["ideal_tokens_per_s"] == 2000.0
    live = document["policies"]["live"]
    assert live["goodput"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    assert live["mean_s"].keys() == {"useful", *LABELS}
    assert len(live["curve"]["edges_s"]) == len(live["curve"]["median"]) + 1
    assert sum(live["mean_s"].values()) == pytest.approx(7200)


def test_the_picture_is_a_png_with_both_panels(tmp_path: Path) -> None:
    path = tmp_path / "simulation.png"
    output = call("--picture", str(path), "--straggler", "lognormal:0.1")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in output
    speed, lost = draw_simulation(simulate(options(mtbf_hours=2.0))).axes
    assert [str(line.get_label()).split(":")[0] for line in speed.get_lines()] == ["undisturbed", "restart", "live"]
    assert LABELS["redone"] in [label.get_text() for label in lost.get_yticklabels()]


def test_a_training_without_failures_can_be_drawn() -> None:
    speed, lost = draw_simulation(simulate(options(mtbf_hours=math.inf, hours=100.0))).axes
    assert speed.get_xlabel() == "days"
    assert lost.get_yticks().tolist() == []


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="cannot write") as refused:
        run_simulation(options(), False, tmp_path / "missing" / "simulation.png")
    assert "df -h" in refused.value.fix


def test_a_step_time_that_depends_on_the_nodes_is_used() -> None:
    node_counts: list[int] = []

    def step_s(nodes: int) -> float:
        node_counts.append(nodes)
        return 3.0 / nodes

    forecast = simulate(options(step_s=step_s, mtbf_hours=2.0, recovery="live"))["live"]
    assert forecast.scenario.cluster.ideal_tokens_per_s == pytest.approx(1000 / 0.75)
    assert min(node_counts) < 4


def test_every_option_has_a_flag_and_its_default_can_be_simulated() -> None:
    flags = {name.lower() for name in vars(knobs)}
    renamed = {"recovery": "recoverykind"}
    options = {renamed.get(field.name, field.name.replace("_", "")) for field in fields(SimulateOptions)}
    # Options of every plan, which `cli/plan.py` declares.
    assert options - flags == {"nodes", "rankspernode", "scaling"}
    assert set(scenarios(SimulateOptions(2, 0.5, 1000.0))) == {"restart", "live"}


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
    assert "--straggler lognormal" in refused.value.fix


# Bad input


@pytest.mark.parametrize(
    ("wrong", "seen", "fix"),
    [
        ({"recovery": "pray"}, "'pray' is not restart, live or both", "--recovery both"),
        ({"scaling": "medium"}, "neither strong nor weak", "--scaling strong"),
        ({"checkpoint_every": "often"}, "'often' is not a number of steps", "--checkpoint-every best"),
        ({"checkpoint_every": "0"}, "every 0 steps", "--checkpoint-every"),
        ({"checkpoint_every": "-5"}, "'-5' is not a number of steps", "--checkpoint-every best"),
        ({"straggler": "lognormal:much"}, "states no spread", "lognormal:0.05"),
        ({"straggler": "lognormal:-1"}, "sigma of -1", "lognormal:0.05"),
        ({"straggler": "nowhere"}, "neither none, lognormal:SIGMA nor a run folder", "shoal runs"),
        ({"nodes": 0}, "0 nodes", "--nodes"),
        ({"hours": -1.0}, "simulated time", "--hours 24"),
        ({"mtbf_hours": math.nan}, "between failures", "--mtbf-hours"),
        ({"min_nodes": 5}, "at least 5", "--min-nodes"),
        ({"seeds": 0}, "0 seeds", "--seeds"),
    ],
)
def test_bad_options_are_refused_with_reason_and_fix(wrong: dict[str, Any], seen: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        simulate(options(**wrong))
    assert seen in refused.value.seen
    assert refused.value.why
    assert fix in refused.value.fix
