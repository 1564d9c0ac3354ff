"""`shoal probe`: measure links, collectives, machines and GPUs of a cluster, and print the profile."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.markup import escape

from shoal.cli.command import command
from shoal.cli.options import Option
from shoal.cli.output import GAP, make_console, print_json, print_paragraph, print_table, shown, stdout_console
from shoal.config.presets import depth_overrides
from shoal.errors import DataError, UsageError
from shoal.units import format_change, format_duration, format_number, format_percent, format_si

if TYPE_CHECKING:
    from shoal.config.profile import CollectiveProfile, GpuProfile, LinkProfile, NodeProfile, Profile
    from shoal.config.schema import ModelConfig


# Columns of a table that hold words, besides the first one.
_TEXT_TITLES = ("", "bound by", "tokens/s by threads")

TitlesAndRows = tuple[tuple[str, ...], list[tuple[str, ...]]]
_BACKENDS = {"gloo": "over gloo", "nccl": "over NCCL", "staged": "between GPUs, by pinned memory and gloo"}


@command(
    on=Option("What to measure: local:N, lab[:N], slurm[:N], or a hosts file."),
    out=Option("The profile to write.", flags="--out --output -o"),
    budget=Option("Seconds to aim at; starting ranks and the shortest measurements may take longer.", low=5),
    model=Option("Also time this model: a preset, or depth:N; may be repeated."),
    depth=Option("Also time the demo's model with this depth; 12 is GPT-2."),
)
def probe(
    on: str = "local:2",
    out: Path = Path("profile.toml"),
    budget: float = 60.0,
    model: list[str] | None = None,
    depth: int | None = None,
    json: bool = False,
) -> None:
    """Measure links, gloo, machines, and where there are GPUs: products, copies, NCCL. Writes a profile and a figure.

    Models are timed on processors and GPUs alike. NCCL needs two GPUs; with fewer, gloo through pinned memory is timed.
    """
    from shoal.cluster.slurm.job import enter_allocation
    from shoal.config.load import check_profile_writable, write_profile
    from shoal.tools.probe.figure import plot_probe
    from shoal.tools.probe.run import probe as measure

    check_profile_writable(out)
    enter_allocation(on)
    picture = picture_of(out)
    names = [*(model or []), *([f"depth:{depth}"] if depth is not None else [])]
    models = {name: _find_model(name) for name in names}
    console = make_console(stderr=True)
    with console.status("") as spinner:
        profile = measure(on, budget, lambda text: spinner.update(escape(text)), models)
    write_profile(profile, out)
    plot_probe(profile, picture)
    if json:
        print_json(profile.model_dump(mode="json"))
        return
    print_profile(profile)
    sys.stdout.write(f"\nprofile: {shown(out)}\npicture: {shown(picture)}\n")


def picture_of(profile: Path) -> Path:
    """Return the figure's path: the profile's name with .png, so that two profiles have two figures."""
    if profile.suffix == ".png":
        raise UsageError(
            f"{profile} is the name of a picture",
            why="-o names the profile, a TOML file; its picture gets the same name with .png",
            fix=f"write -o {profile.with_suffix('.toml')}",
        )
    picture = profile.with_suffix(".png")
    if picture.exists() and not profile.exists():
        raise DataError(
            f"{picture} is there already, and there is no profile {profile} that it would belong to",
            why="only the picture of an older profile is replaced",
            fix="choose another file: -o FILE",
        )
    return picture


def _find_model(name: str) -> ModelConfig:
    """Return a preset's model or, for `depth:6`, the demo's with another depth; its text sets the vocabulary."""
    from shoal.config.load import build_config
    from shoal.cost.workload import workload_of

    preset, _, depth = name.partition(":")
    if depth and (preset != "depth" or not depth.removeprefix("-").isdigit()):
        raise UsageError(f"--model {name}: no such model", fix="write a preset, such as gpt2-124m, or depth:6")
    overrides = depth_overrides(int(depth)) if depth else {}
    config = build_config("grammar" if depth else preset, None, overrides, [])
    return workload_of(config).shape


def print_profile(profile: Profile) -> None:
    console = stdout_console()
    for titles, rows in _tables(profile):
        if console.is_terminal and not titles[-1] and _table_width(titles, rows) > console.width:
            # Bars without the sizes beside them mean nothing.
            titles, rows = titles[:-1], [row[:-1] for row in rows]
        right = [number for number, title in enumerate(titles) if number and title not in _TEXT_TITLES]
        print_table(titles, rows, right, console)
        console.print()
    for line in verdicts(profile):
        print_paragraph(escape(line), console)
    for note in profile.notes:
        print_paragraph(f"[yellow]note[/]: {escape(note)}", console)


def _table_width(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(max(map(cell_len, column)) + GAP for column in zip(titles, *rows, strict=True)) - GAP


def _tables(profile: Profile) -> list[TitlesAndRows]:
    tables: list[TitlesAndRows] = []
    titles: tuple[str, ...]
    if profile.links:
        titles = (f"link, by {profile.links[0].tool}", "round trip", "one stream", "four streams", "all links at once")
        tables.append((titles, [_link_row(link) for link in profile.links]))
    for backend, title in _BACKENDS.items():
        entries = [entry for entry in profile.collectives if entry.backend == backend]
        rows = [row for entry in entries for row in _collective_rows(entry)]
        if rows:
            tables.append(((title, "size", "time", "algorithm", "bus bandwidth", ""), rows))
    titles = ("node", "fp32 GFLOP/s", "bf16", "memory GB/s", "tokens/s by threads", "bound by")
    tables.append((titles, [_node_row(node) for node in profile.nodes]))
    if gpus := [_gpu_row(node, gpu) for node in profile.nodes for gpu in node.gpus]:
        titles = ("GPU", "bf16 TFLOP/s", "TF32", "fp32", "memory GB/s", "to it (pageable)", "from it (pageable)")
        tables.append((titles, gpus))
    return tables


def verdicts(profile: Profile) -> list[str]:
    from shoal.cost.machines import explain_roofline

    lines = []
    summary, reduce_ = profile.summary, profile.collective("all-reduce")
    if reduce_ is not None:
        lines.append(_fit_line(reduce_))
    if summary.stack_efficiency is not None and summary.bus_gbps and summary.wire_gbps:
        lines.append(
            f"stack efficiency {format_percent(summary.stack_efficiency)}: gloo moves {_gbps(summary.bus_gbps)} "
            f"where the link gives {_gbps(summary.wire_gbps)}"
        )
    if summary.connections is not None:
        tried = ", ".join(f"{trial.connections}: {format_duration(trial.seconds)}" for trial in profile.connections)
        enough = f"{summary.connections} {'is' if summary.connections == 1 else 'are'} enough"
        lines.append(f"parallel gloo connections: {enough} (four all-reduces at once over {tried})")
    lines += [explain_roofline(node.name, node.compute) for node in profile.nodes]
    return lines


def _fit_line(entry: CollectiveProfile) -> str:
    from shoal.cost.network import format_buffer_size

    gbps = f", {_gbps(8e-9 / entry.beta_s_per_byte)}" if entry.beta_s_per_byte else ""
    line = (
        f"{entry.op} of {entry.world_size} ranks takes {format_duration(entry.alpha_s)} + bytes × "
        f"{1e9 * entry.beta_s_per_byte:.3g} ns{gbps}"
    )
    if (test := entry.held_out) is None:
        return line
    return (
        f"{line}; test on another size: {format_buffer_size(test.bytes)} "
        f"should take {format_duration(test.predicted_s)}, took {format_duration(test.measured_s)} "
        f"({format_change(test.error)})"
    )


def _link_row(link: LinkProfile) -> tuple[str, ...]:
    name = "loopback" if link.source == link.target else f"{link.source} → {link.target}"
    together = "–"
    if link.together_gbps is not None and link.together_ratio is not None:
        together = f"{_gbps(link.together_gbps)} ({format_percent(link.together_ratio)})"
    return name, format_duration(link.latency_s), _gbps(link.gbps), _gbps(link.gbps_4_streams), together


def _collective_rows(entry: CollectiveProfile) -> list[tuple[str, ...]]:
    from shoal.config.profile import operation_label
    from shoal.cost.network import format_buffer_size

    largest = max(point.bus_gbps for point in entry.points)
    return [
        (
            "" if number else operation_label(entry.op, entry.element_bytes),
            format_buffer_size(point.bytes),
            format_duration(point.seconds),
            _gbps(point.algorithm_gbps),
            _gbps(point.bus_gbps),
            "▇" * round(16 * point.bus_gbps / largest),
        )
        for number, point in enumerate(entry.points)
    ]


def _node_row(node: NodeProfile) -> tuple[str, ...]:
    compute = node.compute
    training = ", ".join(f"{point.threads}: {point.tokens_per_s:,.0f}" for point in compute.training)
    return (
        node.name,
        format_number(compute.fp32_gflops),
        format_number(compute.bf16_gflops),
        format_number(compute.memory_gbytes_per_s),
        training,
        compute.bound,
    )


def _gpu_row(node: NodeProfile, gpu: GpuProfile) -> tuple[str, ...]:
    return (
        f"{node.name}: {gpu.name}, {gpu.runtime}",
        "–" if gpu.bf16_tflops is None else format_number(gpu.bf16_tflops),
        format_number(gpu.tf32_tflops),
        format_number(gpu.fp32_tflops),
        format_number(gpu.memory_gbytes_per_s),
        f"{gpu.to_gpu_gbytes_per_s:.3g} ({gpu.to_gpu_pageable_gbytes_per_s:.3g})",
        f"{gpu.from_gpu_gbytes_per_s:.3g} ({gpu.from_gpu_pageable_gbytes_per_s:.3g})",
    )


def _gbps(value: float) -> str:
    return format_si(1e9 * value, "bit/s")
