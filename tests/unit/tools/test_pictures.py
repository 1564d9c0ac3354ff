"""Every picture at its real size: no text covers another or leaves the picture, no two series share a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from shoal.config.load import build_config
from shoal.config.profile import Profile
from shoal.cost.data_sheets import SheetOverrides, find_link, find_machines, make_cluster_model
from shoal.cost.strategy import SyncStrategy
from shoal.cost.workload import workload_of
from shoal.records.scaling import ScalingPoint
from shoal.tools.bench.levers import CEILING, ONE_NODE, compare, draw_levers
from shoal.tools.plan.advise import advise, make_plan
from shoal.tools.plan.figures import draw_plan, draw_simulation
from shoal.tools.plan.scenario_file import simulate
from shoal.tools.probe.figure import draw_probe
from shoal.tools.probe.run import assemble
from shoal.tools.report.figures import draw_clusters, draw_scaling
from tests.support.run_samples import demo_points, point
from tests.unit.cli.test_simulate import options
from tests.unit.config.test_profile import measured
from tests.unit.records.test_explain_run import slow_points
from tests.unit.tools.bench.test_levers import curve
from tests.unit.tools.bench.test_levers import point as lever


def texts_of(figure: Figure) -> Iterator[Text]:
    """Yield the visible texts of a figure."""
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip():
            yield text


def hidden_ticks(figure: Figure) -> set[Text]:
    """Return the labels of ticks outside the limits of their axis, which are not drawn."""
    hidden: set[Text] = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
    return hidden


def problems(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    hidden = hidden_ticks(figure)
    # The box of an annotation has a margin, which may touch.
    boxes = [(text, text.get_window_extent().padded(-2)) for text in texts_of(figure) if text not in hidden]
    found = [
        f"{one.get_text()!r} over {other.get_text()!r}"
        for (one, box), (other, other_box) in combinations(boxes, 2)
        if box.overlaps(other_box)
    ]
    page = figure.bbox
    found += [
        f"{text.get_text()!r} leaves the picture"
        for text, box in boxes
        if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1
    ]
    for axes in figure.axes:
        labels = axes.get_legend_handles_labels()[1]
        found += [f"two series are named {name}" for name in {name for name in labels if labels.count(name) > 1}]
        for scale, axis in ((axes.get_xscale(), axes.xaxis), (axes.get_yscale(), axes.yaxis)):
            shown = [tick for tick in axis.get_ticklabels() if tick.get_text() and tick not in hidden]
            if scale == "log" and len(shown) < 2:
                found.append(f"a logarithmic axis with {len(shown)} ticks")
    return found


def probe_of(nodes: int = 2) -> Profile:
    profile = assemble(measured(), "2026-11-15T10:00:00+00:00", 60.0, 51.0)
    if nodes == 2:
        return profile
    names = [f"node{number}" for number in range(1, nodes + 1)]
    links = [profile.links[0].model_copy(update={"source": a, "target": b}) for a in names for b in names if a != b]
    machines = tuple(profile.nodes[0].model_copy(update={"name": name}) for name in names)
    return profile.model_copy(update={"nodes": machines, "links": tuple(links)})


def plan_of(preset: str, link: str, counts: tuple[int, ...]) -> Figure:
    wired = find_link(link)
    setting = make_cluster_model((wired,), find_machines(None, wired), 1, SheetOverrides())
    workload = workload_of(build_config(preset, flags={"train": {"global_batch": 64}}), "fp32")
    plan = make_plan(workload, SyncStrategy(), setting, counts)
    return draw_plan(plan, advise(plan))


def clusters(scale: float = 1.0) -> list[ScalingPoint]:
    names = ("local:1", "local:2", "lab:2,link=100mbit,delay=2ms,cpu=1/0.5", "hosts-of-the-lab.toml")
    times = ((98, 40, 0), (61, 20, 3), (450, 21, 380), (98, 20, 2))
    return [
        point(1 + place, scale * step, forward=scale * forward, backward=scale * forward, exposed=scale * exposed)
        .model_copy(update={"name": name})
        for place, (name, (step, forward, exposed)) in enumerate(zip(names, times, strict=True))
    ]  # fmt: skip


def levers(scale: float = 1.0) -> Figure:
    names = (
        "stock",
        "ddp",
        "fp16",
        "bf16",
        "int8",
        "powersgd:4",
        "accumulate:4",
        "local:8",
        "diloco:50+int8",
        "streaming:50",
    )
    points = [lever(ONE_NODE, scale * 1000, evaluations=curve(5.0, 4.0)), lever(CEILING, scale * 1900)]
    for number, name in enumerate(names):
        speed = scale * (700 + 180 * number)
        points.append(lever(name, speed, exposed_s=0.4 * 100 / speed, evaluations=curve(5.0, 4.2 - 0.05 * number)))
    return draw_levers(compare(points))


def test_levers_name_their_ceiling_and_a_method_that_diverged() -> None:
    """Labels once crossed the line of the ceiling, which had no name, and one bad loss set the axis of all methods."""
    points = [lever(ONE_NODE, 1000, evaluations=curve(5.0, 4.0)), lever(CEILING, 1900)]
    points += [lever(name, 1500, evaluations=curve(5.0, 4.2)) for name in ("ddp", "fp16")]
    figure = draw_levers(compare([*points, lever("accumulate:4", 1800, evaluations=curve(20.0, 9.0))]))
    figure.draw_without_rendering()
    speed, learned = figure.axes
    assert "no exchange: the ceiling" in speed.get_legend_handles_labels()[1]
    ceiling = speed.transData.transform((1900, 0))[0]
    assert all(text.get_window_extent().x0 > ceiling for text in speed.texts)
    assert learned.get_ylim()[1] < 8
    assert "accumulate:4 (up to 20)" in learned.get_legend_handles_labels()[1]


def test_the_headline_of_a_probe_is_its_finding() -> None:
    headline = draw_probe(probe_of()).get_suptitle()
    assert headline.startswith(
        "lab:2: gloo moves 953 Mbit/s of the 960 Mbit/s that the link gives; 498 MB of gradients"
    )


PICTURES: dict[str, Callable[[], Figure]] = {
    "scaling": lambda: draw_scaling(demo_points()),
    "scaling of one": lambda: draw_scaling(demo_points()[:1]),
    "scaling in seconds": lambda: draw_scaling(slow_points()),
    "scaling of many": lambda: draw_scaling([point(n, 2400 / n + 90, forward=700 / n, backward=1400 / n, exposed=80)
                                             for n in (1, 2, 3, 4, 6, 8, 12, 16)]),
    "clusters": lambda: draw_clusters(clusters(), "grammar: 4 layers", ["A note."]),
    "clusters in seconds": lambda: draw_clusters(clusters(40), "grammar: 4 layers", ["A note. " * 60]),
    "levers": lambda: levers(),
    "fast levers": lambda: levers(1000),
    "probe of one node": lambda: draw_probe(probe_of(1)),
    "probe": lambda: draw_probe(probe_of()),
    "probe of five": lambda: draw_probe(probe_of(5)),
    "plan": lambda: plan_of("grammar", "1gbe", (1, 2, 3, 4)),
    "plan in seconds": lambda: plan_of("gpt2-124m", "100mbit", (1, 2, 4, 8, 16)),
    "plan of many": lambda: plan_of("grammar", "1gbe", tuple(range(1, 17))),
    "plan of 64": lambda: plan_of("gpt2-124m", "10gbe", (1, 2, 4, 8, 16, 32, 64)),
    "simulation": lambda: draw_simulation(simulate(options(mtbf_hours=2.0))),
    "simulation of days": lambda: draw_simulation(simulate(options(mtbf_hours=20.0, hours=200.0))),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_legible(name: str) -> None:
    assert problems(PICTURES[name]()) == []


def test_rates_below_a_gigabit_are_drawn_in_megabits() -> None:
    slow = probe_of()
    links = tuple(
        link.model_copy(update={"gbps": 0.00965, "gbps_4_streams": 0.0097, "together_gbps": 0.0097})
        for link in slow.links
    )
    wire, _, bus, _ = draw_probe(slow.model_copy(update={"links": links})).axes
    assert wire.get_xlabel() == "Mbit/s"
    assert "9.65" in {text.get_text() for text in wire.texts}
    fastest = max(point.bus_gbps for entry in slow.collectives for point in entry.points)
    assert bus.get_ylabel() == ("Mbit/s" if fastest < 1 else "Gbit/s")
