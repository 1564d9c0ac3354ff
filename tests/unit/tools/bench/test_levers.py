"""`shoal bench levers`: lever names, experiments, clusters, and the table of comparisons."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from shoal.cli.bench import explain_levers, levers_document, print_levers
from shoal.cluster.target import first_nodes, parse_on
from shoal.config.load import build_config
from shoal.errors import UsageError
from shoal.records.summary import summarize
from shoal.tools.bench.levers import (
    CEILING,
    ONE_NODE,
    STOCK,
    Evaluation,
    LeverPoint,
    LeversResult,
    compare,
    lever_point,
    median_point,
    parse_lever,
    plan_experiments,
    plot_levers,
    with_sync,
)
from tests.support.run_samples import all_events, end


def point(name: str, tokens_per_s: float, **more: object) -> LeverPoint:
    nodes = 1 if name == ONE_NODE else 2
    base = {"name": name, "nodes": nodes, "tokens_per_s": tokens_per_s, "tokens_per_step": 100.0}
    return LeverPoint.model_validate(base | {"step_s": 100.0 / tokens_per_s} | more)


def curve(*losses: float, seconds: float = 1.0, tokens: float = 100.0) -> tuple[Evaluation, ...]:
    """Make one evaluation after every `tokens`, which take `seconds`."""
    places = enumerate(losses, start=1)
    return tuple(Evaluation(tokens=tokens * at, seconds=seconds * at, loss=loss) for at, loss in places)


# Names


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("stock", {"mode": "stock"}),
        ("int8", {"wire": "int8"}),
        ("powersgd:2", {"wire": "powersgd:2"}),
        ("diloco", {"mode": "diloco"}),
        ("diloco:25+int8", {"mode": "diloco", "every": 25, "wire": "int8"}),
        ("accumulate:8+fp16", {"mode": "ddp", "accumulate": 8, "wire": "fp16"}),
        ("accumulate", {"mode": "ddp", "accumulate": 4}),
    ],
)
def test_a_lever_name_is_parsed_to_settings(text: str, chosen: dict[str, object]) -> None:
    assert parse_lever(text) == chosen


@pytest.mark.parametrize("text", ["", "diloko", "diloco:x", "ddp:4", "diloco:-1", "int8+", "diloco 50"])
def test_an_unknown_lever_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a lever"):
        parse_lever(text)


@given(st.text(max_size=20))
def test_any_text_is_a_lever_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_lever(text)


def test_every_lever_trains_the_same_number_of_tokens() -> None:
    config = build_config("grammar", sets=["train.steps=40", "train.eval_every=10"])
    larger = with_sync(config, {"accumulate": 4})
    assert (larger.train.steps, larger.train.eval_every) == (10, 2)
    assert larger.train.steps * larger.sync.accumulate == config.train.steps


def test_outer_methods_are_evaluated_at_the_end_of_a_round() -> None:
    config = build_config("grammar", sets=["train.steps=100", "train.eval_every=10"])
    assert with_sync(config, {"mode": "diloco", "every": 25}).train.eval_every == 25
    assert with_sync(config, {"mode": "local", "every": 4}).train.eval_every == 12


def test_an_experiment_includes_one_node_and_the_ceiling(tmp_path: Path) -> None:
    config = build_config("grammar", sets=["run.on=lab:2,cpu=1/0.5,link=100mbit"])
    experiments = plan_experiments(config, "ddp, int8,ddp", tmp_path)
    assert list(experiments) == [ONE_NODE, CEILING, "ddp", "int8"]
    assert experiments[ONE_NODE].run.on == "lab:1,cpu=1"
    assert experiments[CEILING].sync.round_steps > config.train.steps
    assert experiments["int8"].sync.wire == "int8"


# Clusters


def test_the_first_node_of_a_cluster_is_extracted(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[[host]]\nhost = "me@one"\naddress = "10.0.0.1"\nslots = 2\n[[host]]\nhost = "two"\n')
    assert first_nodes(parse_on("local:4"), 1, tmp_path) == "local:1"
    assert first_nodes(parse_on("lab:3"), 1, tmp_path) == "lab:1"
    assert first_nodes(parse_on("join:2"), 1, tmp_path) is None
    alone = first_nodes(parse_on(str(hosts)), 1, tmp_path / "new")
    assert alone is not None
    single, whole = parse_on(alone), parse_on(str(hosts))
    assert single.hosts == whole.hosts[:1]  # type: ignore[union-attr]


# The table


def test_ratios_are_against_one_node_stock_and_ceiling() -> None:
    table = compare([point(ONE_NODE, 100), point(CEILING, 180), point(STOCK, 60), point("int8", 150)])
    one, top, stock, int8 = table.rows
    assert (one.of_one_node, one.of_stock, one.of_ceiling) == (1.0, None, None)
    assert (top.of_one_node, top.of_stock, top.of_ceiling) == (1.8, None, 1.0)
    assert stock.of_stock == 1.0
    assert (int8.of_one_node, int8.of_stock) == (1.5, 2.5)
    assert int8.of_ceiling == pytest.approx(150 / 180)


def test_a_lever_above_the_ceiling_is_not_plausible() -> None:
    """Without any exchange the nodes were slower than with one: other programs used the machine."""
    fast = point("fp16", 229, evaluations=curve(4.0), other_load=0.1)
    near = point("int8", 175, evaluations=curve(4.0), other_load=0.0)
    larger = point("accumulate:4", 200, evaluations=curve(4.0), tokens_per_step=400.0)
    table = compare([point(ONE_NODE, 100), point(CEILING, 180, other_load=0.9), fast, near, larger])
    assert [row.is_plausible for row in table.rows] == [True, True, False, True, True]
    lines = explain_levers(table)
    assert "int8: within 5% of what these nodes compute without any exchange." in lines
    assert any(
        line.startswith("! fp16 (1.27×): not plausible. An exchange takes time, so the run without any was")
        for line in lines
    )
    assert any(line.startswith("accumulate:4: faster than no exchange, because larger batches") for line in lines)
    assert lines[-1] == (
        "Other programs kept cores busy meanwhile (0.9 with no exchange, 0.1 with fp16 and 0.0 with int8, on average): "
        "measure again when it is quiet before you believe these figures."
    )
    document = levers_document(LeversResult(table, {}, Path("levers.png"), Path("levers.json")))
    assert document["warning"] == lines[-1]
    rows: Any = document["rows"]
    assert [(row["plausible"], row["other_programs_cores"]) for row in rows[1:4]] == [
        (True, 0.9),
        (False, 0.1),
        (True, 0.0),
    ]


def test_the_table_marks_implausible_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_levers(compare([point(CEILING, 180), point("fp16", 229), point("int8", 170)]))
    assert re.search(r"fp16 .* 1\.27×! ", capsys.readouterr().out)


def test_the_load_of_a_run_is_in_its_point() -> None:
    spent = {"wall_s": 10.0, "cpu_s": 5.0, "machine_busy_s": 22.0}
    events = [*(event for event in all_events() if event["event"] != "end"), *(end(rank) | spent for rank in (0, 1))]
    assert lever_point("ddp", summarize(events)).other_load == pytest.approx(1.2)


def test_losses_are_compared_after_equal_tokens_and_after_equal_time() -> None:
    slow = point(STOCK, 50, evaluations=curve(5.0, 4.0, 3.0, seconds=2.0))
    fast = point("diloco", 100, evaluations=curve(5.2, 4.2, 3.2))
    table = compare([slow, fast])
    assert (table.tokens, table.seconds) == (300, 3.0)
    assert [row.loss_at_tokens for row in table.rows] == [3.0, 3.2]
    assert [row.loss_at_time for row in table.rows] == [4.5, 3.2]
    assert "Most learned in the same time: diloco." in explain_levers(table)


def test_a_lever_not_evaluated_in_time_is_not_compared_by_time() -> None:
    late = point(ONE_NODE, 50, evaluations=(Evaluation(tokens=300, seconds=9.0, loss=1.0),))
    table = compare([late, point("fp16", 100, evaluations=curve(5.2, 4.2, 3.2))])
    assert table.rows[0].loss_at_time is None
    assert any(
        line.startswith("Most learned in the same time: fp16 (not compared, since not evaluated by then: one node")
        for line in explain_levers(table)
    )


def test_a_curve_has_no_loss_outside_its_range() -> None:
    evaluated = point("ddp", 50, evaluations=curve(5.0, 4.0))
    assert evaluated.loss_at(tokens=99) is None
    assert evaluated.loss_at(tokens=201) == 4.0
    assert evaluated.loss_at(tokens=300) is None
    assert point("ddp", 50).loss_at(seconds=1.0) is None


def test_the_median_round_is_used() -> None:
    assert median_point([point("ddp", speed) for speed in (9, 1, 5)]).tokens_per_s == 5


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    points = [point(ONE_NODE, 100), point(CEILING, 180), point(STOCK, 60, exposed_s=1.0, evaluations=curve(5.0, 4.0))]
    plot_levers(compare(points), tmp_path / "levers.png")
    assert imread(tmp_path / "levers.png").shape[1] == 1320
    plot_levers(compare(points[:2]), tmp_path / "levers.png")
