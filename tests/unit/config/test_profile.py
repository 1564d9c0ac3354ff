"""From a probe's measurements to the profile: its file, notes, verdicts, tables and picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli.probe import picture_of, print_profile, verdicts
from shoal.cluster.node import Node
from shoal.config.load import check_profile_writable, profile_to_toml, read_profile, write_profile
from shoal.config.profile import SMALL_GPT, ConnectionTrial, LinkProfile, Profile
from shoal.config.schema import ModelConfig
from shoal.cost.machines import Roofline
from shoal.cost.model_size import flops_per_token, intensity
from shoal.cost.network import SIZES, LinearFit
from shoal.errors import DataError, RunFailed, UsageError
from shoal.events import Event
from shoal.tools.probe.figure import draw_probe, plot_probe
from shoal.tools.probe.run import ProbeData, assemble, fastest, summarize

GIGABIT = LinearFit(1e-3, 8 / 0.96e9)


def collective(
    op: str, size: int, seconds: float, kind: str = "collective", element_bytes: int = 4, backend: str = "gloo"
) -> Event:
    times = {"bytes": size, "seconds": seconds, "rounds": 5, "world_size": 2, "backend": backend}
    return {"event": kind, "op": op, "element_bytes": element_bytes, "cores": size / SIZES[6], **times}


def timing(
    node: str, rank: int, micro_batch: int, forward_s: float, device: str = "cpu", precision: str = "fp32"
) -> Event:
    shape = {"name": "small", "model": SMALL_GPT.model_dump(), "threads": 1, "micro_batch": micro_batch}
    shape |= {"device": device, "precision": precision}
    times = {"forward_s": forward_s, "backward_s": 2 * forward_s, "optimizer_s": 0.006, "spread": 0.01}
    return {"event": "model-time", "rank": rank, "node": node, **shape, **times}


def compute(node: str) -> Event:
    training = [
        {"threads": 1, "tokens_per_s": 2000.0, "gflops": 21.6},
        {"threads": 2, "tokens_per_s": 3700.0, "gflops": 40.0},
    ]
    peaks = {"threads": 2, "fp32_gflops": 95.0, "bf16_gflops": 3.0, "memory_gbytes_per_s": 28.0}
    return {
        "event": "compute",
        "node": node,
        **peaks,
        "parameters": 1_740_480,
        "tokens_per_step": 512,
        "intensity": 21.3,
        "training": training,
    }


def events_of(nodes: list[Node]) -> list[Event]:
    hardware = {"cpu": "Neoverse-N1", "cores": 2}
    facts = [
        {
            "event": "facts",
            "node": node.name,
            "interface": "eth0",
            "versions": {"torch": "2.13.0"},
            "hardware": hardware,
        }
        for node in nodes
    ]
    sweep = [collective("all-reduce", size, GIGABIT.seconds(size)) for size in SIZES[:7]]
    halves = [collective("all-reduce", size, 2 * GIGABIT.seconds(size), element_bytes=2) for size in (4096, 1 << 20)]
    others = [*halves, *(collective("broadcast", size, 2e-3 + 9e-9 * size) for size in (4096, 1 << 20))]
    held_out = collective("all-reduce", 8 << 20, 1.02 * GIGABIT.seconds(8 << 20), kind="held-out")
    trials = [{"event": "connections", "count": count, "seconds": seconds} for count, seconds in ((1, 0.1), (4, 0.05))]
    cut = {
        "event": "size-skipped",
        "op": "all-reduce",
        "element_bytes": 2,
        "bytes": SIZES[7],
        "once_s": 0.56,
        "backend": "gloo",
    }
    timings = [
        timing(node.name, rank, size, 0.01 * size * (1 + 0.1 * rank))
        for node in nodes
        for rank in (0, 1)
        for size in (1, 2, 4)
    ]
    return [
        *facts,
        *sweep,
        *others,
        held_out,
        *trials,
        cut | {"once_s": 0.56},
        *timings,
        *(compute(node.name) for node in nodes),
    ]


def link(source: str, target: str, together_gbps: float = 0.96) -> LinkProfile:
    rates = {"gbps": 0.95, "gbps_4_streams": 0.96, "together_gbps": together_gbps}
    return LinkProfile(source=source, target=target, tool="shoal", latency_s=2e-4, **rates)


def measured(machines: tuple[str, str] = ("a", "b"), together_gbps: float = 0.96, load: float = 0.0) -> ProbeData:
    nodes = [Node(f"node{number}", f"10.0.0.{number}", "eth0", 1, 2) for number in (1, 2)]
    facts = {
        node.name: {
            "memory_bytes": 8 << 30,
            "arch": "aarch64",
            "os": "Linux",
            "machine": machine,
        }
        for node, machine in zip(nodes, machines, strict=True)
    }
    links = [link("node1", "node2", together_gbps), link("node2", "node1")]
    # Each rank used 30 of 60 s of one core; its machine was busy with all its ranks and the other programs.
    ranks_per_machine = {node.name: machines.count(machine) for node, machine in zip(nodes, machines, strict=True)}
    spent = [
        {"event": "load", "node": name, "wall_s": 60.0, "cpu_s": 30.0, "machine_busy_s": 30.0 * ranks + 60.0 * load}
        for name, ranks in ranks_per_machine.items()
    ]
    return ProbeData("lab:2", nodes, facts, links, [*events_of(nodes), *spent], ("a note of the plan",))


@pytest.fixture
def profile() -> Profile:
    return assemble(measured(), "2026-11-15T10:00:00+00:00", 60.0, 51.0)


def test_a_profile_has_the_measurements(profile: Profile) -> None:
    reduce_ = profile.collective("all-reduce")
    assert reduce_ is not None
    assert reduce_.seconds(25 << 20) == pytest.approx(GIGABIT.seconds(25 << 20), rel=1e-3)
    assert reduce_.held_out is not None
    assert reduce_.held_out.error == pytest.approx(-0.0196, abs=1e-3)
    assert profile.summary.wire_gbps == 0.96
    assert profile.summary.stack_efficiency == pytest.approx(1.0, rel=0.02)
    assert profile.summary.connections == 4
    assert profile.node("node2").compute.bound == "arithmetic"
    assert reduce_.cores == 1.0
    halves = profile.collective("all-reduce", 2)
    assert halves is not None
    assert halves.seconds(1 << 20) == pytest.approx(2 * GIGABIT.seconds(1 << 20), rel=1e-3)
    # The slowest rank of a node counts.
    assert [(pace.micro_batch, pace.forward_s) for pace in profile.node("node1").timings] == [
        (1, 0.011),
        (2, 0.022),
        (4, 0.044),
    ]
    assert profile.node("node1").versions == {"torch": "2.13.0"}
    assert profile.notes == (
        "a note of the plan",
        "left out for lack of time, a larger --budget has room for them: all-reduce in fp16 from 64 MiB on "
        "(560 ms a time)",
    )


def gpu(node: str, **changes: object) -> Event:
    """Return the figures of an H200 that its ranks measured; rates of an earlier generation where they differ."""
    figures = {
        "name": "NVIDIA H200",
        "runtime": "CUDA 13.0",
        "memory_bytes": 150_000_000_000,
        "bf16_tflops": 675.0,
        "tf32_tflops": 390.0,
        "fp32_tflops": 51.0,
        "memory_gbytes_per_s": 4100.0,
        "to_gpu_gbytes_per_s": 55.0,
        "from_gpu_gbytes_per_s": 52.0,
        "to_gpu_pageable_gbytes_per_s": 11.0,
        "from_gpu_pageable_gbytes_per_s": 6.0,
    }
    return {"event": "gpu", "node": node, **figures, **changes}


def with_gpus(data: ProbeData, *backends: str) -> ProbeData:
    extra = [
        *(gpu(node.name) for node in data.nodes),
        *(timing(node.name, 0, 8, 1e-3, "cuda", precision) for node in data.nodes for precision in ("bf16", "fp32")),
        *(
            collective("all-reduce", size, 1e-5 + size * 1e-11, backend=backend)
            for backend in backends
            for size in SIZES[:7]
        ),
    ]
    return replace(data, events=[*data.events, *extra])


def test_gpus_are_in_the_profile_and_its_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assembled = assemble(with_gpus(measured(), "nccl"), "now", 60.0, 51.0)
    write_profile(assembled, tmp_path / "profile.toml")
    profile = read_profile(tmp_path / "profile.toml")
    assert profile == assembled
    assert profile.node("node1").gpus[0].bf16_tflops == 675
    on_gpu = [entry for entry in profile.node("node1").timings if entry.device == "cuda"]
    assert [(entry.precision, entry.micro_batch) for entry in on_gpu] == [("bf16", 8), ("fp32", 8)]
    nccl, over_gloo = profile.collective("all-reduce", backend="nccl"), profile.collective("all-reduce")
    assert nccl is not None
    assert over_gloo is not None
    assert nccl.seconds(1 << 20) < over_gloo.seconds(1 << 20) / 100
    assert profile.summary.bus_gbps == pytest.approx(over_gloo.points[-1].bus_gbps)
    print_profile(profile)
    printed = capsys.readouterr().out
    assert "node1: NVIDIA H200, CUDA 13.0" in printed
    assert "over NCCL" in printed
    assert not any("NCCL" in note for note in profile.notes)


def test_gpus_that_ranks_share_are_noted_and_a_full_one_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    data = with_gpus(measured(), "staged")
    full = {"event": "gpu-skipped", "node": "node2", "gpu": "cuda:0", "free_bytes": 20_000_000}
    others = [event for event in data.events if not (event["event"] == "gpu" and event["node"] == "node2")]
    profile = assemble(replace(data, events=[*others, full]), "now", 60.0, 51.0)
    assert profile.node("node2").gpus == ()
    assert "a GPU of node2 was left out: it has 20 MB of free memory" in profile.notes
    assert any("NCCL was not measured: it needs two ranks" in note for note in profile.notes)
    print_profile(profile)
    assert "between GPUs, by pinned memory and gloo" in capsys.readouterr().out


def test_a_card_without_bf16_has_no_rate_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    data = measured()
    old = gpu("node1", name="AMD Instinct MI60", runtime="ROCm 7.2.26015", bf16_tflops=None)
    print_profile(assemble(replace(data, events=[*data.events, old]), "now", 60.0, 51.0))
    row = next(line for line in capsys.readouterr().out.splitlines() if "ROCm" in line)
    assert row.split("ROCm 7.2.26015")[1].split()[:2] == ["–", "390"]


def test_a_profile_of_an_older_shoal_is_read(profile: Profile, tmp_path: Path) -> None:
    newer = ("backend = ", "device = ", "precision = ")
    lines = [line for line in profile_to_toml(profile).splitlines() if not line.startswith(newer)]
    file = tmp_path / "profile.toml"
    file.write_text("\n".join(lines) + "\n")
    assert read_profile(file) == profile


def test_shared_machines_slow_links_and_other_programs_are_noted() -> None:
    assembled = assemble(measured(("a", "a"), together_gbps=0.5, load=1.5), "now", 60.0, 51.0)
    notes = assembled.notes
    assert any("share a machine" in note and "one after another" in note for note in notes)
    assert any("52% of alone" in note for note in notes)
    assert notes[-1] == (
        "Other programs kept cores busy meanwhile (1.5 on node1 and 1.5 on node2, on average): measure again when it "
        "is quiet before you believe these figures."
    )
    assert [node.other_programs_cores for node in assembled.nodes] == [1.5, 1.5]
    assert [node.other_programs_cores for node in assemble(measured(load=0.1), "now", 60.0, 51.0).nodes] == [0.1, 0.1]


def test_each_profile_has_its_own_picture(tmp_path: Path) -> None:
    """A second `probe -o p2.toml` once overwrote the picture of the first."""
    first, second = tmp_path / "p1.toml", tmp_path / "p2.toml"
    assert (picture_of(first), picture_of(second)) == (tmp_path / "p1.png", tmp_path / "p2.png")
    (tmp_path / "p2.png").touch()
    with pytest.raises(DataError, match=r"p2\.png is there already"):
        picture_of(second)
    second.touch()
    assert picture_of(second) == tmp_path / "p2.png"
    with pytest.raises(UsageError, match="the name of a picture"):
        picture_of(tmp_path / "p3.png")


def test_a_rank_without_measurements_is_an_error() -> None:
    data = measured()
    incomplete = ProbeData(
        data.on, data.nodes, data.facts, data.links, [e for e in data.events if e["event"] != "compute"]
    )
    with pytest.raises(RunFailed, match="node1 ended without"):
        assemble(incomplete, "now", 60.0, 51.0)


def test_more_connections_are_chosen_only_for_a_gain_above_noise() -> None:
    def fastest_of(**seconds: float) -> int:
        return fastest(
            [ConnectionTrial(connections=int(name[1:]), seconds=trial_s) for name, trial_s in seconds.items()]
        )

    assert fastest_of(n1=1.0, n2=0.95, n4=0.97) == 1
    assert fastest_of(n1=1.0, n2=0.7, n4=0.68) == 2
    assert fastest_of(n1=1.0, n2=0.9, n4=0.5) == 4


def test_the_roofline_names_the_bound() -> None:
    roof = Roofline(peak_gflops=100.0, memory_gbytes_per_s=20.0)
    assert roof.ridge == 5.0
    assert roof.bound(intensity=20.0, gflops=60.0) == "arithmetic"
    assert roof.bound(intensity=2.0, gflops=30.0) == "memory"
    assert roof.bound(intensity=20.0, gflops=10.0) == "overhead"
    assert roof.bound(intensity=0.5, gflops=9.0) == "memory"
    assert [roof.is_plausible(gflops) for gflops in (30.0, 105.0, 130.0)] == [True, True, False]


def test_the_flops_of_gpt2_match_the_usual_estimate() -> None:
    gpt2 = ModelConfig(layers=12, heads=12, width=768, seq_len=1024, vocab_size=50_257)
    assert flops_per_token(gpt2) == pytest.approx(6 * 124e6 + 12 * 12 * 768 * 1024, rel=0.01)
    assert intensity(gpt2, 4096) > intensity(gpt2, 256)


def test_no_stack_efficiency_is_given_where_latency_dominates(profile: Profile) -> None:
    """The link has a long delay, and the buffers are too small to fill it."""
    late = [
        entry.model_copy(update={"alpha_s": 1.01 * entry.beta_s_per_byte * max(point.bytes for point in entry.points)})
        for entry in profile.collectives
    ]
    assert summarize(profile.nodes, profile.links, profile.collectives, ()).stack_efficiency is not None
    assert summarize(profile.nodes, profile.links, late, ()).stack_efficiency is None


def test_the_tables_have_every_measurement(
    profile: Profile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_profile(profile)
    output = capsys.readouterr().out
    parts = ("node1 → node2", "200 µs", "950 Mbit/s", "960 Mbit/s (100%)", "link, by shoal", "64 KiB")
    assert [part for part in parts if part not in output] == []
    row = next(line for line in output.splitlines() if line.startswith("node1 ") and "→" not in line)
    assert " ".join(row.split()) == "node1 95 3 28 1: 2,000, 2: 3,700 arithmetic"
    lines = verdicts(profile)
    assert lines[0].startswith(
        "all-reduce of 2 ranks takes 1 ms + bytes × 8.33 ns, 960 Mbit/s; test on another size: 8 MiB"
    )
    assert "stack efficiency" in lines[1]
    assert lines[2].startswith("parallel gloo connections: 4 are enough")
    assert "bound by arithmetic" in lines[3]


def test_the_picture_has_titles_legends_and_ticks(profile: Profile, tmp_path: Path) -> None:
    titles = [axes.get_title(loc="left") for axes in draw_probe(profile).axes]
    assert titles[1] == "gloo's all-reduce of 2 ranks"
    assert titles[3] == "Is training bound by memory or by arithmetic?"
    for axes in draw_probe(profile).axes:
        if legend := axes.get_legend():
            labels = [text.get_text() for text in legend.get_texts()]
            assert len(labels) == len(set(labels)), "two series have the same name"
        assert len(axes.get_xticks()) > 1
        assert len(axes.get_yticks()) > 1
    plot_probe(profile, tmp_path / "probe.png")
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


# The file


def test_a_written_profile_is_read_unchanged(profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "profile.toml"
    write_profile(profile, file)
    assert read_profile(file) == profile
    check_profile_writable(file)
    assert list(tmp_path.iterdir()) == [file]


def refusal(file: Path) -> DataError:
    with pytest.raises(DataError) as refused:
        read_profile(file)
    assert refused.value.fix
    return refused.value


@pytest.mark.parametrize(
    ("before", "after", "seen", "why"),
    [
        ("shoal_profile = 1", "shoal_profile = 7", "of version 7", "a newer shoal"),
        ("shoal_profile = 1", "", "is no profile", "no shoal_profile"),
        ("latency_s = 0.0002", "latency_s = -3", "is damaged", "links.0.latency_s: input should be greater than 0"),
        ("latency_s = 0.0002", "latency_s = nan", "is damaged", "links.0.latency_s: input should be a finite number"),
        ('target = "node2"', 'target = "moon"', "is damaged", "a link goes to moon"),
        ('name = "node2"', 'name = "node1"', "is damaged", "two nodes called node1"),
        ("cores = 2", "coers = 2", "is damaged", "nodes.0.c"),
        ("world_size = 2", "world_size = 5", "is damaged", "world_size is 5"),
        ("[summary]", "[summary", "not valid TOML", "line"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_reason(
    profile: Profile, tmp_path: Path, before: str, after: str, seen: str, why: str
) -> None:
    text = profile_to_toml(profile)
    assert before in text
    file = tmp_path / "profile.toml"
    file.write_text(text.replace(before, after, 1))
    error = refusal(file)
    assert seen in error.seen
    assert why in error.why


def test_a_truncated_profile_is_refused_at_every_length(profile: Profile, tmp_path: Path) -> None:
    lines = profile_to_toml(profile).splitlines(keepends=True)
    file = tmp_path / "profile.toml"
    for count in range(len(lines)):
        file.write_text("".join(lines[:count]))
        refusal(file)


def test_other_files_are_refused_as_profiles(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert "there is no profile" in refusal(missing).seen
    (tmp_path / "config.toml").write_text("[train]\nsteps = 3\n")
    assert "is no profile" in refusal(tmp_path / "config.toml").seen
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "not valid TOML" in refusal(tmp_path / "binary.toml").seen
    assert "cannot read" in refusal(tmp_path).seen
