"""The explanations of scaling and of step times follow the numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.schema import Config
from shoal.cost.causes import Demand
from shoal.errors import DataError
from shoal.events import Event
from shoal.records.explain_run import compare_with_ideal, explain_scaling, explain_step_time, is_plausible
from shoal.records.scaling import SCALING_FILE, ScalingPoint, make_scaling_point, read_scaling, to_json
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder
from shoal.sync.step_stats import CommTimes
from shoal.tools.bench.scaling import ScalingResult, ScalingRow, scaling_document
from shoal.tools.draw.pictures import log_ticks
from shoal.tools.report.figures import draw_scaling, plot_scaling, step_parts
from tests.support.run_samples import TOKENS, all_events, demo_points, make_run, point, rank_events, start, step

ONE = point(1, 100, 2, forward=30, backward=60, optimizer=8, other=2)


def test_exposed_communication_is_named_as_the_largest_cost() -> None:
    two = point(2, 90, 1, forward=15, backward=30, exposed=35, optimizer=8, other=2, allreduce=50, hidden=15)
    text = explain_scaling([ONE, two])
    assert "Two ranks were faster than one rank: 17,067 tokens/s against 15,360 tokens/s" in text
    assert "1.11 times the speed and an efficiency of 56%" in text
    assert "would take 50 ms; it took 90 ms, 40 ms more" in text
    assert "The largest cost, 35 ms (39% of the step), is communication that backward did not hide" in text
    assert "the all-reduce took 50 ms, 15 ms of it hidden behind backward" in text


def test_shared_cores_are_named_as_the_largest_cost() -> None:
    text = explain_scaling(
        [ONE, point(2, 105, 1, forward=29, backward=62, exposed=4, optimizer=8, other=2, allreduce=10)]
    )
    assert "Two ranks were slower than one rank" in text
    assert "is forward and backward: they took 91 ms where their share of the work gives 45 ms" in text
    assert "each rank computed with 1 thread (2 with one rank), so more ranks divided the same computing power" in text


def test_more_threads_than_cores_is_mentioned_only_when_true() -> None:
    crowded = point(2, 120, 2, forward=35, backward=73, exposed=2, optimizer=8, other=2)
    assert "4 threads shared 2 cores" in explain_scaling([ONE, crowded])
    roomy = crowded.model_copy(update={"cores": 8})
    assert "shared" not in explain_scaling([ONE, roomy])
    assert "4 threads in all instead of 2" in explain_scaling([ONE, roomy])


def test_threads_that_are_more_efficient_apart_are_not_called_divided() -> None:
    text = explain_scaling([ONE, point(2, 60, 1, forward=18, backward=34, exposed=2, optimizer=5, other=1)])
    assert "so the ranks shared the computing power that one had alone, and used it 1.73 times as well" in text
    assert "divided the same computing power" not in text


def test_threads_that_wait_for_each_other_are_the_cause_and_not_divided_computing_power() -> None:
    spinning = Demand(wanted=15.6, waited=7.6, cpus=8, threads=8)
    phases = {"forward": 29, "backward": 62, "exposed": 4, "optimizer": 8, "other": 2, "allreduce": 10}
    two = point(2, 105, 1, **phases).model_copy(update={"demand": spinning})
    text = explain_scaling([ONE, two])
    assert "divided the same computing power" not in text
    assert "where their share of the work gives 45 ms; their threads had too few processors" in text
    named = "the threads of one rank want 15.6 processors and may use 8: they wait for one 49% of the time"
    assert f"With two ranks, {named}" in text
    assert f"With one rank, {named}" in explain_scaling([ONE.model_copy(update={"demand": spinning}), two])
    assert "OMP_WAIT_POLICY=passive" in text
    # Other programs that use the processors are named instead, and threads that have enough are not.
    disturbed = two.model_copy(update={"other_load": 4.0})
    calm = two.model_copy(update={"demand": Demand(wanted=8.1, waited=0.4, cpus=8, threads=8)})
    for other in (disturbed, calm):
        assert "processors" not in explain_scaling([ONE, other])
    assert read_back(two).demand == spinning


def read_back(one: ScalingPoint) -> ScalingPoint:
    return ScalingPoint.model_validate_json(one.model_dump_json())


def test_the_report_of_one_run_names_threads_that_wait_for_each_other() -> None:
    crowded = {"wanted": 1.0, "waited": 0.35, "cpus": 2, "run_cpus": 2}
    events = [event | crowded if event["event"] == "end" else event for event in all_events(3)]
    text = explain_step_time(summarize(events))
    assert "The threads of three ranks on one machine want 3.0 processors and may use 2" in text
    assert "To change that, start at most two ranks there." in text
    assert "processors" not in explain_step_time(summarize(all_events(3)))


def test_waiting_is_named_as_the_largest_cost() -> None:
    text = explain_scaling([ONE, point(2, 85, 1, forward=15, backward=30, exposed=3, wait=27, optimizer=8, other=2)])
    assert "is waiting for the slowest rank: on average a rank was ready 27 ms before the slowest one" in text


def test_the_optimizer_is_named_as_the_largest_cost() -> None:
    one = point(1, 100, 2, forward=20, backward=30, optimizer=48, other=2)
    text = explain_scaling([one, point(2, 77, 1, forward=10, backward=15, exposed=2, optimizer=48, other=2)])
    assert "is the optimizer: every rank updates all weights itself" in text
    assert "(48 ms a step, 48 ms with one rank)" in text


def test_overhead_is_named_as_the_largest_cost() -> None:
    text = explain_scaling([ONE, point(2, 80, 1, forward=15, backward=30, exposed=1, optimizer=4, data=28, other=2)])
    assert "is overhead outside the named phases" in text


def test_faster_than_ideal_is_called_a_gain() -> None:
    text = explain_scaling(
        [ONE, point(2, 40, 1, forward=12, backward=17, exposed=2, optimizer=8, other=1, allreduce=3)]
    )
    assert "an efficiency of 125%" in text
    assert "it took 40 ms, 10 ms less" in text
    assert "The largest gain, 16 ms (40% of the step), is forward and backward" in text
    assert "cost" not in text
    assert "Time was lost in the optimizer (4 ms) and communication that backward did not hide (2 ms)." in text


def test_near_ideal_scaling_gets_no_cause() -> None:
    text = explain_scaling([ONE, point(2, 50.5, 2, forward=15, backward=30, optimizer=4, other=1.5)])
    assert "too little to look for a cause" in text
    assert "largest" not in text


def test_weak_scaling_compares_the_same_work_per_rank() -> None:
    two = point(2, 130, 1, tokens=2 * TOKENS, forward=30, backward=60, exposed=30, optimizer=8, other=2)
    text = explain_scaling([ONE, two])
    assert "would take 100 ms; it took 130 ms" in text
    assert "The largest cost, 30 ms" in text


def test_unmeasured_phases_give_no_cause() -> None:
    text = explain_scaling([point(1, 100), point(2, 90)])
    assert "so the cause is unknown" in text
    assert "largest" not in text


def test_a_single_point_is_not_compared() -> None:
    assert "needs a second rank count" in explain_scaling([ONE])
    assert "efficiency" not in explain_scaling([ONE])
    assert "Nothing was measured" in explain_scaling([])


def test_several_points_end_with_the_trend() -> None:
    text = explain_scaling(list(reversed(demo_points())))
    assert text.index("Two ranks") < text.index("Four ranks")
    assert text.endswith(
        "from 77% on two ranks to 41% on four ranks; the part of a step that grew most is forward and backward."
    )


TIMES = st.floats(0, 1000)


@given(st.integers(2, 64), st.floats(0.01, 5000), TIMES, TIMES, TIMES, TIMES)
def test_the_parts_always_add_up(
    ranks: int, step_ms: float, forward: float, exposed: float, wait: float, optimizer: float
) -> None:
    comparison = compare_with_ideal(
        ONE, point(ranks, step_ms, forward=forward, exposed=exposed, wait=wait, optimizer=optimizer)
    )
    assert sum(comparison.parts.values()) == pytest.approx(comparison.lost_s, abs=1e-9)
    assert explain_scaling([comparison.base, comparison.point])


def test_bytes_are_compared_only_where_they_tell_something() -> None:
    def explain(**fields: object) -> str:
        events = [event | fields if event["event"] == "start" else event for event in all_events()]
        return explain_step_time(summarize(events))

    assert ", mostly headers: 2(N−1)/N·S is 44 B." in explain(grad_bytes=44)
    assert "% against the" in explain(round_steps=50)
    short = explain(round_steps=60)
    assert "; the run is too short to compare that with 2(N−1)/N·S: a round has 60 steps." in short
    assert "% against the" not in short


def test_a_run_is_explained_from_its_own_numbers() -> None:
    text = explain_step_time(summarize(all_events()))
    assert text.startswith("On two ranks a step took 99 ms")
    assert "(median of steps 51–100)" in text
    assert "(median of steps 1,001–2,000)" in explain_step_time(summarize(all_events(1, 2000)))
    assert "74% went into forward and backward, 12% into communication that backward did not hide" in text
    assert "Each rank sent 5.42 MB a step, +0.4% against the 5.4 MB of 2(N−1)/N·S." in text
    assert "Rank 0 was the slowest: rank 1 waited 6 ms a step for it." in text


def shares_in(text: str) -> list[int]:
    split = re.search(r"Of this, (.*?)\.", text)
    assert split is not None
    return [int(share) for share in re.findall(r"(\d+)%", split[1])]


@given(st.lists(st.floats(0.001, 30), min_size=1, max_size=24), st.floats(0.01, 0.99))
def test_shares_of_a_step_add_up_on_a_busy_machine(seconds: list[float], part: float) -> None:
    """Steps differ by orders of magnitude; the load slows forward in one step and the optimizer in another."""
    events = [start(0, world_size=1), *(busy_step(n, took, part) for n, took in enumerate(seconds, 1))]
    summary = summarize(events)
    assert summary.step_s is not None
    assert sum(summary.phases.values()) == pytest.approx(summary.step_s.median)
    assert min(summary.phases.values()) >= 0
    assert sum(shares_in(explain_step_time(summary))) == 100


def busy_step(number: int, step_s: float, part: float) -> Event:
    parts = [part * step_s, (1 - part) * step_s]
    forward, optimizer = parts if number % 3 else reversed(parts)
    none = {f"{name}_s": 0.0 for name in ("data", "backward", "exposed", "wait", "other")}
    return step(number) | none | {"step_s": step_s, "forward_s": forward, "optimizer_s": optimizer}


def test_steps_of_two_speeds_give_no_share_above_the_step() -> None:
    """The mean of the middle half was 1.5 times the median, which once gave 107% to forward and backward."""
    times = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3]
    steps = [busy_step(n, took, 0.9 if n % 3 else 0.1) for n, took in enumerate([*times, *times], 1)]
    text = explain_step_time(summarize([start(0, world_size=1), *steps]))
    assert "a step took 100 ms" in text
    assert "90% went into forward and backward and 10% into the optimizer" in text


def test_time_outside_all_phases_is_named() -> None:
    steps = [{"event": "step", "rank": 0, "step": n, "step_s": 0.2, "forward_s": 0.15} for n in range(1, 9)]
    assert "75% went into forward and backward and 25% into everything else" in explain_step_time(
        summarize([start(), *steps])
    )


def test_waiting_for_a_peer_is_not_hidden_communication() -> None:
    """The all-reduce runs while a rank waits for the slowest one, but backward hides nothing then."""
    assert CommTimes(ready_at=0.0, tail_s=0.018, allreduce_s=0.020).hidden_s == pytest.approx(0.002)
    assert CommTimes(ready_at=0.0, tail_s=0.018, allreduce_s=0.012, wait_s=0.006).hidden_s == pytest.approx(0.0)
    assert CommTimes(ready_at=0.0, tail_s=0.018, allreduce_s=None).hidden_s is None
    assert re.search(r", 6(\.\d+)? ms of it hidden behind backward\.", explain_step_time(summarize(all_events())))


def test_stock_ddp_reports_no_all_reduce_time() -> None:
    untimed = {"allreduce_s", "hidden_s"}
    steps = [
        {key: value for key, value in step(n, rank).items() if key not in untimed} for n in range(9) for rank in (0, 1)
    ]
    summary = summarize([start(0, sync="stock"), start(1, sync="stock"), *steps])
    text = explain_step_time(summary)
    assert "hidden" not in text
    assert "How long stock DDP's all-reduces took is not measured" in text
    assert "hidden" not in explain_scaling([ONE, replace_ranks(make_scaling_point(summary), exposed=0.2)])


def replace_ranks(scaling_point: ScalingPoint, **phases: float) -> ScalingPoint:
    return scaling_point.model_copy(update={"phases": scaling_point.phases | phases})


def test_one_rank_has_no_all_reduce_to_explain() -> None:
    text = explain_step_time(summarize(rank_events(0, world_size=1)))
    assert "all-reduce" not in text
    assert "slowest:" not in text


def test_a_run_without_steps_has_nothing_to_explain() -> None:
    assert "recorded no step" in explain_step_time(summarize([start()]))
    with pytest.raises(DataError, match="no finished step"):
        make_scaling_point(summarize([start()]))


def test_a_run_is_converted_to_a_scaling_point() -> None:
    scaling_point = make_scaling_point(summarize(all_events()))
    assert (scaling_point.ranks, scaling_point.threads, scaling_point.cores, scaling_point.tokens_per_step) == (
        2,
        1,
        2,
        TOKENS,
    )
    assert scaling_point.compute_s == pytest.approx(0.073, abs=0.002)
    assert scaling_point.tokens_per_s == pytest.approx(TOKENS / scaling_point.step_s)


def test_cores_of_all_nodes_add_up() -> None:
    events = [start(0, node="a"), start(1, node="b"), step(1, 0), step(1, 1)]
    assert make_scaling_point(summarize(events)).cores == 4


def test_scaling_points_survive_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert read_scaling(run) == []
    (run.path / SCALING_FILE).write_text(to_json(list(reversed(demo_points()))))
    assert read_scaling(run) == demo_points()


@pytest.mark.parametrize("content", ["[{", '[{"ranks": 0}]', "{}"])
def test_a_broken_scaling_file_is_a_data_error(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run")
    (run.path / SCALING_FILE).write_text(content)
    with pytest.raises(DataError, match="cannot be used"):
        read_scaling(run)


@given(st.floats(1, 1000), TIMES, TIMES)
def test_stacked_parts_fill_the_step(step_ms: float, forward: float, exposed: float) -> None:
    parts = step_parts(point(2, step_ms, forward=forward, exposed=exposed))
    assert all(value >= 0 for value in parts.values())
    assert 1e3 * sum(parts.values()) == pytest.approx(max(step_ms, forward + exposed))


@pytest.mark.parametrize("points", [demo_points(), demo_points()[:1]], ids=["three", "one"])
def test_the_plot_is_a_png_of_the_documented_width(tmp_path: Path, points: list[ScalingPoint]) -> None:
    plot_scaling(points, tmp_path / "scaling.png")
    content = (tmp_path / "scaling.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) == 1200


def slow_points() -> list[ScalingPoint]:
    """Make points with steps of many seconds that get slower with more ranks."""
    one = point(1, 12_400, 2, forward=4100, backward=8000, optimizer=250)
    two = point(2, 9300, 1, forward=2500, backward=4600, exposed=1500, wait=400, optimizer=250)
    return [one, two, point(4, 45_000, 1, forward=2500, backward=4600, exposed=36_500, wait=1100, optimizer=250)]


@pytest.mark.parametrize("points", [slow_points(), demo_points()], ids=["seconds", "milliseconds"])
def test_labels_of_the_picture_are_short_and_do_not_overlap(points: list[ScalingPoint]) -> None:
    """Steps of seconds were once labelled `1.24e+04`, and labels of slow points covered those of the axis."""
    figure = draw_scaling(points)
    figure.draw_without_rendering()
    for axes in figure.axes:
        notes = [text for text in axes.texts if text.get_text()]
        assert notes
        assert not [text.get_text() for text in notes if "e+" in text.get_text() or len(text.get_text()) > 14]
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes._left_title]  # type: ignore[attr-defined]
        boxes = [text.get_window_extent() for text in ticks if text.get_text()]
        for note in notes:
            # The box of an annotation has a margin, which may touch.
            box = note.get_window_extent().padded(-2)
            assert not [other for other in boxes if box.overlaps(other)], note.get_text()
    unit = "seconds" if points[0].step_s > 1 else "milliseconds"
    assert figure.axes[1].get_ylabel() == f"{unit} per step"


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e9))
def test_a_log_axis_has_at_least_three_ticks(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert len(ticks) >= 3
    assert all(low <= tick <= low * factor for tick in ticks)
    assert len(ticks) <= 20


def test_a_busy_machine_is_reported() -> None:
    points = [
        demo_points()[0].model_copy(update={"other_load": 0.04}),
        demo_points()[1].model_copy(update={"other_load": 0.9}),
    ]
    assert "busy meanwhile (0.0 with one rank and 0.9 with two ranks, on average)" in explain_scaling(points)
    quiet = [point.model_copy(update={"other_load": 0.1}) for point in points]
    assert "busy meanwhile" not in explain_scaling(quiet)
    run = RunFolder(Path("run"))
    rows = [ScalingRow(point.label, point.label, Config(), "", tries=[(point, run)]) for point in points]
    document = scaling_document(ScalingResult(rows, Path("out"), None))
    assert "busy meanwhile" in str(document["warning"])
    assert [row["other_programs_cores"] for row in document["rows"]] == [0.04, 0.9]


def test_an_efficiency_above_one_is_not_plausible() -> None:
    fast = point(2, 45, 1, forward=15, backward=24, optimizer=6)
    text = explain_scaling([ONE, fast])
    assert (
        "An efficiency above 100% (111% on two ranks) is not plausible: something slowed down the run on one rank"
        in text
    )
    assert not is_plausible(fast, ONE)
    assert "plausible" not in explain_scaling([ONE, point(2, 49, 1, forward=15, backward=28, optimizer=6)])


def test_clusters_are_compared_with_the_first_that_is_given() -> None:
    base = demo_points()[1].model_copy(update={"name": "local:2", "processors": "A CPU"})
    lab = demo_points()[2].model_copy(update={"name": "lab:4,link=1gbit", "processors": "A CPU"})
    text = explain_scaling([lab, base])
    assert text.startswith("local:2 was slower than lab:4,link=1gbit: 15,673 tokens/s against 16,696 tokens/s")
    assert "At the same speed a rank, a step of" in text
    one, two, _ = demo_points()
    quick = two.model_copy(update={"name": "local:1,device=cuda", "processors": "A GPU", "tokens_per_s": 1e6})
    text = explain_scaling([one.model_copy(update={"name": "local:1", "processors": "A CPU"}), quick])
    assert "times the speed, on other processors (A GPU, not A CPU)." in text
    assert "Of its step of 98 ms, 72% went into forward and backward, 12% into communication" in text
    assert "plausible" not in text
    assert "second cluster" in explain_scaling([base])


def test_emulated_nodes_share_the_cores_of_their_machine() -> None:
    def points(boots: str, cores: Sequence[int | None], quotas: Sequence[float | None]) -> ScalingPoint:
        events = []
        for rank in range(2):
            hardware = {"cpu": "A CPU", "cores": cores[rank], "quota": quotas[rank], "boot_id": boots[rank]}
            started = {"node": f"node{rank}", "hardware": {**hardware, "gpu": None}}
            events += [event | (started if event["event"] == "start" else {}) for event in rank_events(rank)]
        return make_scaling_point(summarize(events), "lab:2")

    made = points("aa", (2, 2), (None, None))
    assert (made.cores, made.processors, made.name) == (2, "A CPU", "lab:2")
    assert points("ab", (2, 2), (None, None)).cores == 4
    # Each node has a quota of its own, or one of them.
    assert points("aa", (1, 1), (1.0, 1.5)).cores == 2
    assert points("aa", (1, 2), (0.3, None)).cores == 2
    assert points("ab", (1, None), (0.3, None)).cores is None
