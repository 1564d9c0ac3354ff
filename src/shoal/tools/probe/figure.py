"""Draw a profile: the links, gloo over them, and each machine under its roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config.profile import CollectiveProfile, LinkProfile, NodeProfile, Profile
from shoal.cost.machines import Roofline, roofline_of
from shoal.cost.network import format_buffer_size
from shoal.tools.draw.palette import IDEAL, MEASURED, PHASE_COLOURS
from shoal.tools.draw.pictures import add_label, legend_below, new_figure, save_figure, set_log_ticks, set_title
from shoal.units import format_duration, format_number, format_percent, format_si, format_speed, pluralize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_ONE, _FOUR, _TOGETHER = PHASE_COLOURS["forward"], PHASE_COLOURS["backward"], PHASE_COLOURS["exposed"]
_NODES = tuple(PHASE_COLOURS[name] for name in ("backward", "exposed", "optimizer", "data", "wait"))
_MARKS = "osD^v"
_MOST_LINKS = 12
_GPT2_BYTES = 4 * 124_439_808


def plot_probe(profile: Profile, path: Path) -> None:
    """Write a PNG, 1440 pixels wide."""
    save_figure(draw_probe(profile), path, "the picture goes beside the profile")


def draw_probe(profile: Profile) -> Figure:
    reduce_ = profile.collective("all-reduce")
    if reduce_ is None or not profile.links:
        with new_figure(7, 5) as figure:
            _draw_roofline(figure.subplots(), profile.nodes)
        return figure
    with new_figure(12, 9.5, _headline(profile)) as figure:
        (links, times), (bus, roof) = figure.subplots(2, 2)
        _draw_links(links, profile.links)
        _draw_times(times, reduce_)
        _draw_bus(bus, profile)
        _draw_roofline(roof, profile.nodes)
    return figure


def _headline(profile: Profile) -> str:
    """Return what the four parts come to: what gloo makes of the link, and how long a common model's gradients take."""
    summary, reduce_ = profile.summary, profile.collective("all-reduce")
    where = f"{profile.on}: " if profile.on else ""
    if summary.bus_gbps is None or summary.wire_gbps is None or reduce_ is None:
        return f"{where}{pluralize(len(profile.nodes), 'node')}, measured"
    bus, wire = (format_si(1e9 * gbps, "bit/s") for gbps in (summary.bus_gbps, summary.wire_gbps))
    exchange = (
        f"{format_si(_GPT2_BYTES, 'B')} of gradients (GPT-2) take {format_duration(reduce_.seconds(_GPT2_BYTES))}"
    )
    return f"{where}gloo moves {bus} of the {wire} that the link gives; {exchange}"


def _draw_links(axes: Axes, links: tuple[LinkProfile, ...]) -> None:
    """Draw all links, or only the slowest where they are too many to read."""
    chosen = sorted(links, key=lambda link: link.gbps)[:_MOST_LINKS] if len(links) > _MOST_LINKS else list(links)
    names = ["loopback" if link.source == link.target else f"{link.source} → {link.target}" for link in chosen]
    bars = {
        "one stream": (_ONE, [link.gbps for link in chosen]),
        "four streams": (_FOUR, [link.gbps_4_streams for link in chosen]),
        "four, all links of the ring at once": (_TOGETHER, [link.together_gbps or 0.0 for link in chosen]),
    }
    unit, factor = _rate_unit([value for _, values in bars.values() for value in values])
    for number, (label, (colour, gbps)) in enumerate(bars.items()):
        places = [place + 0.26 * (number - 1) for place in range(len(chosen))]
        values = [factor * value for value in gbps]
        drawn = axes.barh(places, values, 0.25, color=colour, label=label)
        axes.bar_label(drawn, [format_number(value) if value else "" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(chosen)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    legend_below(axes, 3)
    set_title(axes, "The wire: raw TCP payload" + (", slowest links" if len(links) > _MOST_LINKS else ""))
    axes.set_xlabel(unit)


def _rate_unit(gbps: Sequence[float]) -> tuple[str, float]:
    """Return the unit of an axis, and the factor from Gbit/s: Mbit/s where all rates are below 1 Gbit/s."""
    return ("Mbit/s", 1e3) if max(gbps) < 1 else ("Gbit/s", 1.0)


def _draw_times(axes: Axes, entry: CollectiveProfile) -> None:
    sizes = [point.bytes for point in entry.points]
    curve = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    rate = f" + bytes at {format_si(8 / entry.beta_s_per_byte, 'bit/s')}" if entry.beta_s_per_byte else ""
    label = f"fit: {format_duration(entry.alpha_s)}{rate}"
    axes.plot(curve, [1e3 * entry.seconds(size) for size in curve], color=IDEAL, linestyle="--", label=label)
    axes.plot(sizes, [1e3 * point.seconds for point in entry.points], "o", color=MEASURED, label="measured")
    if held := entry.held_out:
        note = f"held out: {held.error:+.1%}"
        axes.plot([held.bytes], [1e3 * held.measured_s], "D", color=_TOGETHER, fillstyle="none", ms=9, label=note)
    axes.set(xscale="log", yscale="log", xlabel="size of the buffer", ylabel="milliseconds")
    _set_sizes(axes, sizes)
    set_log_ticks(axes.yaxis, *axes.get_ylim())
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    set_title(axes, f"gloo's {entry.label} of {entry.world_size} ranks")


def _set_sizes(axes: Axes, sizes: list[int]) -> None:
    axes.set_xticks(sizes, [format_buffer_size(size) for size in sizes], rotation=35, ha="right", fontsize=8)
    axes.minorticks_off()


def _draw_bus(axes: Axes, profile: Profile) -> None:
    entries = [entry for entry in profile.collectives if entry.backend == "gloo"]
    colours = zip(entries, (MEASURED, *_NODES[1:]), _MARKS, strict=False)
    rates = [point.bus_gbps for entry in entries for point in entry.points]
    unit, factor = _rate_unit([*rates, profile.summary.wire_gbps or 0.0])
    for entry, colour, mark in colours:
        values = [factor * point.bus_gbps for point in entry.points]
        axes.plot([point.bytes for point in entry.points], values, marker=mark, ms=5, color=colour, label=entry.label)
    if wire := profile.summary.wire_gbps:
        axes.axhline(factor * wire, color=IDEAL, linestyle="--", label=f"the wire: {format_si(1e9 * wire, 'bit/s')}")
    sizes = [point.bytes for point in entries[0].points]
    axes.set(xscale="log", xlabel="size of the buffer", ylabel=unit, ylim=(0, None))
    _set_sizes(axes, sizes)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    share = profile.summary.stack_efficiency
    set_title(axes, "Bus bandwidth" + (f": stack efficiency {format_percent(share)}" if share else ""))


def _draw_roofline(axes: Axes, nodes: tuple[NodeProfile, ...]) -> None:
    for node, colour, mark in zip(nodes, _NODES, _MARKS, strict=False):
        compute, roof = node.compute, roofline_of(node.compute)
        span = [roof.ridge / 16, roof.ridge, max(8 * roof.ridge, 4 * compute.intensity)]
        axes.plot(span, [roof.roof_gflops(at) for at in span], color=colour, lw=2, alpha=0.8, label=_roof_label(node))
        best = compute.best
        axes.plot([compute.intensity], [best.gflops], mark, color=colour, ms=9)
        if compute.bf16_gflops > compute.fp32_gflops:
            axes.plot(span[1:], [compute.bf16_gflops] * 2, color=colour, lw=1, linestyle="--")
        for point in compute.training:
            axes.plot([compute.intensity], [point.gflops], mark, color=colour, ms=5, fillstyle="none")
    peaks = [node.compute.fp32_gflops for node in nodes]
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (operations a byte)", ylabel="GFLOP/s")
    # Leave room above for the labels and below for the legend.
    axes.set_ylim(min(peaks) / 60, 3 * max(peaks))
    set_log_ticks(axes.xaxis, *axes.get_xlim())
    set_log_ticks(axes.yaxis, *axes.get_ylim())
    _note_ridge(axes, roofline_of(nodes[0].compute))
    _note_point(axes, nodes[0])
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    more = f" ({len(nodes)} nodes, the first {len(_NODES)} drawn)" if len(nodes) > len(_NODES) else ""
    set_title(axes, "Is training bound by memory or by arithmetic?" + more)


def _roof_label(node: NodeProfile) -> str:
    compute = node.compute
    return (
        f"{node.name}: {format_number(compute.fp32_gflops)} GFLOP/s fp32, "
        f"{format_number(compute.memory_gbytes_per_s)} GB/s; "
        f"{format_speed(compute.best.tokens_per_s)}"
    )


def _note_ridge(axes: Axes, roof: Roofline) -> None:
    axes.axvline(roof.ridge, color=IDEAL, linestyle=":", lw=1)
    for text, side, offset in (("memory", "right", -5), ("arithmetic", "left", 5)):
        axes.annotate(
            text,
            (roof.ridge, 1),
            (offset, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            va="top",
            color=IDEAL,
        )


def _note_point(axes: Axes, node: NodeProfile) -> None:
    place = (node.compute.intensity, node.compute.best.gflops)
    threads = ", ".join(str(point.threads) for point in node.compute.training)
    note = f"small GPT,\n{threads} threads"
    add_label(axes, note, place, (-10, 0), ha="right")
