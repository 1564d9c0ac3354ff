"""Predictions from a profile, calibration from runs, and the explanation of the difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.cluster import planned_nodes
from shoal.config.load import build_config, read_profile, validate_session, write_profile
from shoal.config.manifest import PredictionRecord
from shoal.config.profile import SMALL_GPT, ModelTiming, NodeProfile, Profile
from shoal.config.schema import ModelConfig
from shoal.cost.batch_plan import plan_global_batch
from shoal.cost.measured import (
    MeasuredSpeed,
    cluster_model_of,
    contention,
    gpu_backend,
    interpolate,
    link_factors,
    measured_network,
    model_speed_of,
    rank_devices,
    spare_cores,
    staging_s_per_byte,
)
from shoal.cost.model_size import flops_per_token
from shoal.cost.network import MeasuredNetwork
from shoal.cost.predict import predict
from shoal.cost.strategy import SyncStrategy
from shoal.cost.workload import StepTime, workload_of
from shoal.errors import ConfigError, DataError
from shoal.events import Event
from shoal.records.explain_run import explain_prediction, prediction_line
from shoal.records.summary import MeanMedianP95, RunSummary, summarize
from shoal.tools.plan.compare import (
    ComparedRun,
    calibrate,
    first_speeds,
    predict_script,
    refuse_another_cluster,
    sync_options,
)
from shoal.tools.plan.request import PlanRequest, make_basis
from shoal.tools.probe.run import assemble
from tests.support.run_samples import all_events, make_session_run, session_events
from tests.unit.config.test_profile import measured, with_gpus

TIMES = ((1, 0.3), (2, 0.5), (8, 1.7))


@pytest.fixture
def profile() -> Profile:
    return assemble(measured(), "2026-11-15T10:00:00+00:00", 60.0, 51.0)


# Links


def test_fewer_nodes_than_measured_exchange_over_their_own_links(profile: Profile) -> None:
    """The third of three nodes has a link of a tenth: two nodes do not use it."""
    names = ("node1", "node2", "node3")
    links = tuple(
        profile.links[0].model_copy(
            update={"source": source, "target": target, "gbps_4_streams": 0.01 if "node3" in (source, target) else 0.1}
        )
        for source in names
        for target in names
        if source != target
    )
    nodes = tuple(profile.nodes[0].model_copy(update={"name": name}) for name in names)
    uneven = profile.model_copy(update={"nodes": nodes, "links": links})
    assert link_factors(uneven) == {2: pytest.approx(0.1)}
    network = measured_network(uneven)
    assert isinstance(network, MeasuredNetwork)
    own = replace(network, world_size=3)
    plain = replace(own, link_factors={})
    slow, fast = (model.all_reduce(2, 1e8, 4) for model in (plain, own))
    assert fast.seconds - fast.latency_s == pytest.approx(0.1 * (slow.seconds - slow.latency_s))
    assert own.all_reduce(3, 1e8, 4) == plain.all_reduce(3, 1e8, 4)
    # Where a link of the first nodes was not measured, nothing is assumed about it.
    assert link_factors(uneven.model_copy(update={"links": links[1:]})) == {}


def test_a_command_names_the_measured_machines_only_where_they_are_as_many(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "profile.toml")
    made_from = make_basis(PlanRequest(profile=tmp_path / "profile.toml"))
    assert (made_from.where(2), made_from.where(3)) == ("lab:2", "hosts.toml")


def test_a_file_that_is_no_profile_is_not_to_be_replaced_by_one(tmp_path: Path) -> None:
    for text in ("# shoal: training\n", "not = [valid"):
        (tmp_path / "README.md").write_text(text)
        with pytest.raises(DataError) as caught:
            read_profile(tmp_path / "README.md")
        assert "README-profile.toml" in caught.value.fix


# The first shares


def of_unequal_lab(profile: Profile, slower: float) -> Profile:
    """Return the profile of a lab of two nodes, of which the second takes so many times as long."""
    first, _ = profile.nodes
    timings = tuple(
        timing.model_copy(update={"forward_s": slower * timing.forward_s, "backward_s": slower * timing.backward_s})
        for timing in first.timings
    )
    nodes = (
        first.model_copy(update={"name": "node1", "address": "10.77.0.1"}),
        first.model_copy(update={"name": "node2", "address": "10.77.0.2", "timings": timings}),
    )
    return profile.model_copy(update={"on": "lab:2", "nodes": nodes})


def test_the_first_shares_follow_the_speeds_of_a_profile(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    write_profile(of_unequal_lab(profile, 3.0), path)

    def speeds(*sets: str) -> str | None:
        return first_speeds(build_config(sets=["run.on=lab:2", *sets]), path)

    assert speeds() == "1.000/0.333"
    config = build_config(sets=["run.on=lab:2", f"run.speeds={speeds()}"])
    first, second = plan_global_batch(config, 2).shares
    assert first / second == pytest.approx(3, abs=0.5)
    assert first_speeds(validate_session({"run": {"on": "lab:2"}}), path) == "1.000/0.333"
    for fixed in ("run.weights=1/1", "run.balance=off", "sync.measure=off"):
        assert speeds(fixed) is None
    with pytest.raises(ConfigError, match="another cluster"):
        first_speeds(build_config(sets=["run.on=lab:3"]), path)
    write_profile(of_unequal_lab(profile, 1.05), path)
    assert speeds() is None


# Speed of a rank


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.3), (2, 0.5), (5, 1.1), (8, 1.7), (16, 3.4)])
def test_an_unmeasured_size_is_interpolated(size: int, seconds: float) -> None:
    assert interpolate(TIMES, size) == pytest.approx(seconds)


def test_a_size_below_all_measured_ones_is_proportional() -> None:
    assert interpolate(((4, 0.8), (8, 1.6)), 1) == pytest.approx(0.2)


def pace(name: str, model: ModelConfig, flops_per_s: float) -> list[ModelTiming]:
    """Make timings of a constant speed for all micro-batches."""
    seconds = flops_per_token(model) * model.seq_len / flops_per_s
    times = {"forward_s": seconds / 3, "backward_s": 2 * seconds / 3, "optimizer_s": 0.01, "spread": 0.0}
    scaled = [{key: size * value for key, value in times.items()} for size in (1, 4)]
    shape = {"name": name, "model": model, "threads": 1}
    return [ModelTiming(**shape, micro_batch=size, **timing) for size, timing in zip((1, 4), scaled, strict=True)]


WIDE = ModelConfig(layers=1, heads=12, width=768, seq_len=128, vocab_size=4096)


def test_another_model_is_interpolated_between_the_measured_ones() -> None:
    paces = [*pace("small", SMALL_GPT, 20e9), *pace("wide", WIDE, 40e9)]
    halfway = ModelConfig(layers=6, heads=6, width=384, seq_len=64, vocab_size=1632)
    speed_model = model_speed_of(paces, halfway)
    assert not speed_model.is_measured
    whole_s = interpolate(speed_model.forward, 4) + interpolate(speed_model.backward, 4)
    speed = 4 * 64 * flops_per_token(halfway) / whole_s
    assert speed == pytest.approx((20e9 * 40e9) ** 0.5, rel=0.01)


def test_another_vocabulary_only_changes_the_head() -> None:
    paces = pace("small", SMALL_GPT, 20e9)
    speed_model = model_speed_of(paces, SMALL_GPT.model_copy(update={"vocab_size": 1632, "dropout": 0.1}))
    assert speed_model.is_measured
    assert interpolate(speed_model.forward, 4) < paces[1].forward_s


def with_nodes(profile: Profile, **changes: object) -> Profile:
    nodes = tuple(node.model_copy(update=changes) for node in profile.nodes)
    return profile.model_copy(update={"nodes": nodes})


def test_nodes_of_one_machine_share_cores_and_memory(profile: Profile) -> None:
    apart, shared = profile, with_nodes(profile, machine="one")
    first: NodeProfile = apart.nodes[0]
    assert spare_cores(apart, first) == 1.0
    assert spare_cores(shared, shared.nodes[0]) == 0.0
    assert MeasuredSpeed(shared, 2).memory_bytes(0) == MeasuredSpeed(apart, 2).memory_bytes(0) / 2
    limited = with_nodes(shared, has_own_memory=True)
    assert MeasuredSpeed(limited, 2).memory_bytes(0) == MeasuredSpeed(apart, 2).memory_bytes(0)
    assert contention(apart, first) == 1.0


def test_one_node_alone_is_faster_than_two_on_its_machine(profile: Profile) -> None:
    shared = with_nodes(profile, machine="one")
    workload = workload_of(build_config("grammar", None, {}, []))
    assert contention(shared, shared.nodes[0]) > 1
    alone, both = (MeasuredSpeed(shared, 2).in_world(size).work(workload, 0, 8, 1).compute_s for size in (1, 2))
    assert both == pytest.approx(contention(shared, shared.nodes[0]) * alone)


def test_a_profile_of_one_rank_cannot_predict_exchanges(profile: Profile) -> None:
    single_rank = profile.model_copy(update={"collectives": ()})
    with pytest.raises(ConfigError, match="has no measured exchange"):
        measured_network(single_rank).all_reduce(2, 1e6, 4)
    assert measured_network(single_rank).all_reduce(1, 1e6, 4).seconds == 0


# The prediction


def test_a_prediction_follows_the_measurements(profile: Profile) -> None:
    workload = workload_of(build_config("grammar", None, {"train": {"micro_batch": 4}}, []))
    prediction = predict(workload, SyncStrategy(bucket_mb=25), cluster_model_of(profile), 2)
    assert prediction.batch_plan.counts == (2, 2)
    network = measured_network(profile)
    whole_s = network.all_reduce(2, 4 * workload.parameters, 4).seconds
    assert prediction.step.comm_s == pytest.approx(whole_s, rel=0.05)
    assert 0 < prediction.step.exposed_s < prediction.step.comm_s + 0.01
    halves = predict(workload, SyncStrategy(wire="fp16", bucket_mb=25), cluster_model_of(profile), 2)
    # gloo was twice as slow with fp16 in this profile, so nothing is gained.
    assert halves.step.comm_s == pytest.approx(prediction.step.comm_s, rel=0.05)


def test_an_older_profile_is_refused(profile: Profile) -> None:
    with pytest.raises(ConfigError, match="does not contain how fast a model trains"):
        cluster_model_of(with_nodes(profile, timings=()))


@pytest.mark.parametrize("on", ["local:2", "lab:3", "lab:2,link=100mbit"])
def test_a_profile_of_another_cluster_is_refused(profile: Profile, tmp_path: Path, on: str) -> None:
    addresses = [node.model_copy(update={"address": f"10.77.0.{n}"}) for n, node in enumerate(profile.nodes, 1)]
    here = profile.model_copy(update={"on": "lab:2,link=1gbit", "nodes": tuple(addresses)})
    refuse_another_cluster(here, tmp_path, "lab:2,link=1gbit")
    with pytest.raises(ConfigError, match="another cluster") as caught:
        refuse_another_cluster(here, tmp_path, on)
    assert f"shoal probe --on {on}" in caught.value.fix


# Calibration from past runs


STEP = StepTime(compute_s=0.2, comm_s=0.1, exposed_s=0.08, wait_s=0.0, optimizer_s=0.01, other_s=0.002)


def outcome(compute: float, comm: float | None) -> ComparedRun:
    comm_s = None if comm is None else comm * STEP.comm_s
    return ComparedRun(STEP, compute * STEP.compute_s, 0.02, comm_s or 0.0, comm_s, 0.004, step_s=0.3)


def test_constants_are_medians_over_runs() -> None:
    constants = calibrate([outcome(1.1, 1.3), outcome(1.2, None), outcome(3.0, 1.3)])
    assert (constants.runs, constants.compute, constants.comm, constants.other_s) == (3, 1.2, 1.3, 0.004)


def test_a_hidden_exchange_does_not_calibrate_communication() -> None:
    assert calibrate([replace(outcome(1.0, 1.6), exposed_s=0.01)]).comm == 1.0


def test_a_very_short_phase_does_not_calibrate() -> None:
    assert calibrate([replace(outcome(1.0, 1.0), optimizer_s=0.001)]).optimizer == 1.0


@given(st.lists(st.floats(0.3, 3.9), min_size=1, max_size=9))
def test_a_constant_is_within_the_observed_factors(factors: list[float]) -> None:
    constants = calibrate([outcome(factor, factor) for factor in factors])
    assert min(factors) * 0.999 <= constants.compute <= max(factors) * 1.001


# Explanation of the difference


def record(**changes: float) -> PredictionRecord:
    phases = {"compute_s": 0.2, "exposed_s": 0.05, "wait_s": 0.0, "optimizer_s": 0.01, "other_s": 0.002, "comm_s": 0.06}
    phases |= changes
    step_s = sum(seconds for name, seconds in phases.items() if name != "comm_s")
    about = {"tokens_per_s": 1000.0, "profile": "p.toml", "profile_created": "now", "is_measured": True}
    return PredictionRecord(step_s=step_s, **phases, **about)


def run_of(allreduce_s: float = 0.06, load: float = 0.0, **phases: float) -> RunSummary:
    phases = {
        "forward": 0.07,
        "backward": 0.13,
        "exposed": 0.05,
        "wait": 0.0,
        "optimizer": 0.01,
        "data": 0.002,
    } | phases
    took_s = sum(phases.values())
    return replace(
        summarize(all_events()),
        phases=phases,
        step_s=MeanMedianP95(took_s, took_s, took_s),
        allreduce_s=MeanMedianP95(allreduce_s, allreduce_s, allreduce_s),
        other_load=load,
    )


def test_a_good_prediction_is_confirmed() -> None:
    text = explain_prediction(record(), run_of())
    assert text is not None
    assert "0.0% too" in text
    assert "No phase is off by more than 3%" in text


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(backward=0.2, load=1.2), "contention: other programs kept 1.2 cores busy"),
        (run_of(backward=0.2), "cores were slower than probed"),
        (run_of(backward=0.08), "cores were faster than probed"),
        (run_of(exposed=0.15, allreduce_s=0.16), "the link was slower than probed"),
        (run_of(exposed=0.1), "latency and bucketing, backward hid less of it"),
        (run_of(wait=0.05), "a straggler: the others waited for rank"),
        (run_of(optimizer=0.05), "the optimizer took 40 ms more"),
    ],
)
def test_a_difference_is_named_with_its_cause(run: RunSummary, words: str) -> None:
    assert words in (explain_prediction(record(), run) or "")


def test_the_prediction_line_lists_the_expected_phases() -> None:
    line = prediction_line(record())
    assert "a step takes 262 ms, 1,000 tokens/s" in line
    assert "communication that backward did not hide 50 ms" in line
    assert "waiting" not in line


# End to end


def record_of(run: Path) -> PredictionRecord:
    return PredictionRecord.model_validate_json((run / "prediction.json").read_text())


# A user's script


@pytest.fixture
def profile_path(profile: Profile, tmp_path: Path) -> Path:
    nodes = tuple(
        node.model_copy(update={"name": planned.name, "address": planned.address})
        for node, planned in zip(profile.nodes, planned_nodes(profile.on), strict=True)
    )
    path = tmp_path / "profile.toml"
    write_profile(profile.model_copy(update={"nodes": nodes}), path)
    return path


def alone_events(profile: Profile, **changes: object) -> list[Event]:
    """Return the events of a session on one rank, measured like a rank of the profile."""
    node = profile.nodes[0]
    fields = {"threads": node.timings[0].threads, "hardware": {"cpu": node.cpu}, "grad_bytes": 4_000_000, **changes}
    return [{**event, **fields} if event["event"] == "start" else event for event in session_events(world_size=1)]


def test_a_script_is_predicted_from_a_run_on_one_rank(profile: Profile, profile_path: Path, tmp_path: Path) -> None:
    make_session_run(tmp_path / "alone", alone_events(profile))
    settings = {"run": {"on": profile.on}}
    record = predict_script(settings, tmp_path / "alone", profile_path)
    phases = summarize(alone_events(profile)).phases
    # Two ranks compute half of the samples each.
    assert record.compute_s == pytest.approx((phases["forward"] + phases["backward"]) / 2)
    assert record.optimizer_s == pytest.approx(phases["optimizer"])
    assert record.comm_s > 0
    assert (record.tokens_per_s, record.grad_bytes) == (None, 4_000_000)
    assert record.samples_per_s == pytest.approx(48 / record.step_s)
    assert f"{record.samples_per_s:,.0f} samples/s" in prediction_line(record)
    twice = predict_script({**settings, "sync": {"accumulate": 2}}, tmp_path / "alone", profile_path)
    assert twice.compute_s == pytest.approx(2 * record.compute_s)
    assert twice.comm_s == record.comm_s


def test_a_run_that_cannot_predict_a_script_is_refused(profile: Profile, profile_path: Path, tmp_path: Path) -> None:
    settings = {"run": {"on": profile.on}}
    make_session_run(tmp_path / "two")
    with pytest.raises(ConfigError, match="does not show how fast the script computes on one rank"):
        predict_script(settings, tmp_path / "two", profile_path)
    make_session_run(tmp_path / "threads", alone_events(profile, threads=64))
    with pytest.raises(ConfigError, match="was measured with 64 threads"):
        predict_script(settings, tmp_path / "threads", profile_path)
    make_session_run(tmp_path / "alone", alone_events(profile))
    with pytest.raises(ConfigError, match="was measured on another cluster"):
        predict_script({"run": {"on": "local:3"}}, tmp_path / "alone", profile_path)


def test_a_prediction_for_another_model_is_not_compared(profile: Profile, profile_path: Path, tmp_path: Path) -> None:
    make_session_run(tmp_path / "alone", alone_events(profile))
    record = predict_script({"run": {"on": profile.on}}, tmp_path / "alone", profile_path)
    same, other = (summarize(alone_events(profile, grad_bytes=size)) for size in (4_000_000, 5_000_000))
    assert "was predicted to take" in (explain_prediction(record, same) or "")
    assert "this one has 5 MB: they cannot be compared" in (explain_prediction(record, other) or "")


# GPUs


def gpu_profile(*backends: str) -> Profile:
    return assemble(with_gpus(measured(), *backends), "now", 60.0, 51.0)


def test_ranks_compute_where_a_run_would(profile: Profile) -> None:
    gpus = gpu_profile("nccl")
    assert rank_devices(gpus, lambda _: "auto") == ("cuda", "cuda")
    assert rank_devices(gpus, ["cuda", "cpu"].__getitem__) == ("cuda", "cpu")
    # One GPU for two ranks: `auto` takes it for none of them.
    shared = with_nodes(gpus, ranks=2).model_copy(update={"world_size": 4})
    assert rank_devices(shared, lambda _: "auto") == ("cpu",) * 4
    assert rank_devices(shared, lambda _: "cuda") == ("cuda",) * 4
    assert rank_devices(profile, lambda _: "auto") == ("cpu", "cpu")
    with pytest.raises(ConfigError, match="rank 0 on node1 is to use a GPU, and the profile has none"):
        rank_devices(profile, lambda _: "cuda")


def test_gradients_go_by_nccl_only_where_every_rank_has_a_gpu() -> None:
    nccl, staged = gpu_profile("nccl"), gpu_profile("staged")
    assert gpu_backend(nccl, ("cuda", "cuda")) == "nccl"
    assert gpu_backend(nccl, ("cuda", "cpu")) == "staged"
    assert gpu_backend(nccl, ("cpu", "cpu")) == "gloo"
    assert gpu_backend(staged, ("cuda", "cuda")) == "staged"
    assert staging_s_per_byte(nccl, ("cuda", "cuda")) == 0
    # Where it was not measured: by the rates of copies from pinned memory.
    assert staging_s_per_byte(nccl, ("cuda", "cpu")) == pytest.approx(1e-9 / 52 + 1e-9 / 55)


def test_a_step_on_gpus_is_predicted_from_their_times() -> None:
    profile = gpu_profile("nccl")
    config = build_config(sets=["train.global_batch=16", "train.micro_batch=8"])
    config = config.model_copy(update={"model": SMALL_GPT})
    workload = workload_of(config)
    by_nccl = predict(workload, SyncStrategy(), cluster_model_of(profile, ("cuda", "cuda")), 2)
    # One micro-batch of 8 takes 1 ms forward and 2 ms backward.
    assert by_nccl.step.compute_s == pytest.approx(3e-3)
    grad_bytes = 4 * workload.parameters
    assert by_nccl.step.comm_s == pytest.approx(1e-11 * grad_bytes, rel=0.9)
    on_cpus = predict(workload, SyncStrategy(), cluster_model_of(profile), 2)
    assert on_cpus.step.compute_s > 50 * by_nccl.step.compute_s
    mixed = predict(workload, SyncStrategy(), cluster_model_of(profile, ("cuda", "cpu")), 2)
    assert mixed.step.compute_s == pytest.approx(on_cpus.step.compute_s)
    copied_s = staging_s_per_byte(profile, ("cuda", "cpu")) * grad_bytes
    assert mixed.step.comm_s == pytest.approx(on_cpus.step.comm_s + copied_s)
    # A format with fewer bytes does not shorten the copies.
    half = SyncStrategy(wire="fp16")
    halves = [predict(workload, half, cluster_model_of(profile, devices), 2) for devices in (("cuda", "cpu"), ("cpu",))]
    assert halves[0].step.comm_s - halves[1].step.comm_s == pytest.approx(copied_s)


def test_ranks_that_share_a_gpu_take_turns_and_divide_its_memory() -> None:
    profile = with_nodes(gpu_profile("staged"), ranks=2).model_copy(update={"world_size": 4})
    alone, both = (MeasuredSpeed(profile, size, ("cuda",)) for size in (1, 4))
    workload = workload_of(build_config().model_copy(update={"model": SMALL_GPT}))
    assert both.work(workload, 0, 8, 1).compute_s == pytest.approx(2 * alone.work(workload, 0, 8, 1).compute_s)
    assert both.memory_bytes(0) == alone.memory_bytes(0) / 2


def test_the_configured_precision_chooses_the_times() -> None:
    profile = gpu_profile("nccl")
    node = profile.nodes[0]
    slower = [
        timing.model_copy(update={"forward_s": 5e-3}) if timing.precision == "fp32" else timing
        for timing in node.timings
        if timing.device == "cuda"
    ]
    cpu = [timing for timing in node.timings if timing.device == "cpu"]
    speed = MeasuredSpeed(with_nodes(profile, timings=(*cpu, *slower)), 1, ("cuda",))
    times = {
        precision: speed.model_speed(SMALL_GPT, 0, precision).forward[0][1] for precision in (None, "bf16", "fp32")
    }
    assert times == {None: 1e-3, "bf16": 1e-3, "fp32": 5e-3}


@pytest.mark.parametrize(("backend", "wires"), [("nccl", ["fp32", "fp16"]), ("staged", ["fp32", "fp16", "int8"])])
def test_a_plan_tries_every_wire_format_where_gloo_exchanges_for_gpus(
    backend: str, wires: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.tools.plan.compare.refuse_another_cluster", lambda *_: None)
    settings = ["train.device=cuda", "sync.mode=auto", "run.on=local:2", "sync.inside=gloo", "train.steps=10"]
    config = build_config(sets=settings).model_copy(update={"model": SMALL_GPT})
    options = sync_options(config, gpu_profile(backend), Path("profile.toml"))
    assert [option.choice.wire for option in options if option.choice.mode == "ddp"] == wires
