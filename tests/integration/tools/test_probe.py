"""The probe: fits, budget and rates from given figures, the link meter on loopback, and probes of real clusters.

Exercises tools.probe, config.profile.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.node import Node
from shoal.cluster.node_program import LocalProgram, RemoteProgram, module_command
from shoal.config.load import read_profile
from shoal.config.profile import Profile
from shoal.cost.network import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    SIZES,
    LinearFit,
    bus_gbps,
    expected_s,
    fit_alpha_beta,
    held_out_size,
    is_affordable,
    repeats_for,
    rounds_for,
)
from shoal.errors import ControlError
from shoal.host.memory import total_bytes
from shoal.tools.probe.link_meter import rate_bps
from shoal.tools.probe.run import LINK_METER, plan_flows, ring_of
from tests.support.labs import need_lab, running_lab
from tests.support.needs import need_tool
from tests.support.programs import shoal, shoal_command
from tests.support.waiting import wait_until

GIGABIT = LinearFit(1e-3, 8 / 0.96e9)
OTHERS = ("reduce-scatter", "all-gather", "broadcast")


# The fit


@given(st.floats(1e-6, 1e-1), st.floats(1e-11, 1e-6))
def test_a_fit_of_exact_times_returns_alpha_and_beta(alpha_s: float, beta: float) -> None:
    fit = fit_alpha_beta([(size, alpha_s + beta * size) for size in SIZES])
    assert fit.beta_s_per_byte == pytest.approx(beta, rel=1e-3)
    assert fit.alpha_s == pytest.approx(alpha_s, rel=1e-3, abs=beta * SIZES[0] * 1e-3)


@pytest.mark.parametrize("factor", [0.2, 3.0, 20.0])
@pytest.mark.parametrize("place", range(len(SIZES)))
def test_one_disturbed_size_does_not_change_the_fit(factor: float, place: int) -> None:
    noise = random.Random(place)
    samples = [(size, GIGABIT.seconds(size) * noise.uniform(0.98, 1.02)) for size in SIZES]
    samples[place] = (samples[place][0], factor * samples[place][1])
    fit = fit_alpha_beta(samples)
    for size in SIZES:
        assert fit.seconds(size) == pytest.approx(GIGABIT.seconds(size), rel=0.1)


def test_on_a_shaped_link_the_smallest_message_gives_the_latency() -> None:
    """A shaped link passes 25 kB at once and delays only the rest."""
    beta = 8 / 96e6
    fit = fit_alpha_beta([(size, 9e-4 + beta * max(0, size - 25_000)) for size in SIZES[:7]])
    assert 0 < fit.alpha_s <= 9e-4
    assert fit.seconds(8 << 20) == pytest.approx(9e-4 + beta * ((8 << 20) - 25_000), rel=0.05)


def test_one_size_is_not_enough_for_two_parameters() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_alpha_beta([(4096, 1e-3), (4096, 1.1e-3)])


def test_bus_bandwidth_is_defined_as_in_nccl_tests() -> None:
    assert bus_gbps("all-reduce", 4, 1_000_000_000, 8.0) == pytest.approx(1.5)
    assert bus_gbps("all-gather", 4, 1_000_000_000, 8.0) == pytest.approx(0.75)
    assert bus_gbps("reduce-scatter", 4, 1_000_000_000, 8.0) == pytest.approx(0.75)
    assert bus_gbps("broadcast", 4, 1_000_000_000, 8.0) == pytest.approx(1.0)


# The budget


def sweep_at(line: LinearFit, budget_s: float) -> tuple[list[int], float]:
    """Return the sizes that a sweep over such a link would measure, and its duration."""
    tries: list[tuple[int, float]] = []
    spent_s = 0.0
    for size in SIZES:
        expected = expected_s(size, tries)
        if not is_affordable(expected, tries, budget_s - spent_s - expected):
            break
        tries.append((size, line.seconds(size)))
        spent_s += line.seconds(size)
    sizes = [size for size, _ in tries]
    round_s = sum(map(line.seconds, [*sizes, held_out_size(sizes)]))
    return sizes, spent_s + round_s * rounds_for(round_s, budget_s - spent_s)


def test_a_fast_link_is_measured_with_every_size() -> None:
    assert sweep_at(LinearFit(1e-4, 8 / 40e9), 10.0)[0] == list(SIZES)


@pytest.mark.parametrize("mbps", [1, 10, 100, 1000])
def test_a_slow_link_is_measured_with_smaller_sizes_within_the_budget(mbps: int) -> None:
    sizes, spent_s = sweep_at(LinearFit(1e-3, 8 / (mbps * 1e6)), 8.0)
    assert sizes == list(SIZES[: len(sizes)])
    assert 3 <= len(sizes) < len(SIZES)
    assert spent_s <= 8.0


def test_two_sizes_are_measured_even_with_little_time() -> None:
    assert sweep_at(LinearFit(1e-3, 8 / 1e6), 0.0)[0] == list(SIZES[:2])


def test_rounds_stay_within_their_limits() -> None:
    assert rounds_for(1e-6, 10.0) == MOST_ROUNDS
    assert rounds_for(1.0, 9.5) == 9
    assert rounds_for(5.0, 4.0) == LEAST_ROUNDS
    assert repeats_for(1e-3, 10.0) == 8
    assert repeats_for(1e-1, 10.0) == 2
    assert repeats_for(8.0, 10.0) == 1


def test_the_time_of_the_next_size_is_predicted_from_smaller_ones() -> None:
    assert expected_s(4096, []) == 0.0
    assert expected_s(16384, [(4096, 1e-3)]) == pytest.approx(4e-3)
    assert expected_s(1 << 20, [(1000, 2e-3), (2000, 3e-3)]) == pytest.approx(1e-3 + 1e-6 * (1 << 20))


def test_the_held_out_size_was_not_fitted() -> None:
    assert held_out_size(SIZES[:6]) not in SIZES
    assert SIZES[4] < held_out_size(SIZES[:6]) < SIZES[5]


def named(count: int) -> list[Node]:
    return [Node(f"node{number}", f"10.0.0.{number}", "eth0", 1, 2) for number in range(1, count + 1)]


def test_a_few_nodes_have_every_pair_measured_both_ways() -> None:
    plan = plan_flows(named(3), 21.0)
    assert len(plan.directions) == 6
    assert plan.ring == (("node1", "node2"), ("node2", "node3"), ("node3", "node1"))
    assert plan.seconds == pytest.approx(1.35)
    assert plan.notes == ()


def test_two_nodes_are_a_ring_of_one_pair() -> None:
    plan = plan_flows(named(2), 21.0)
    assert plan.pairs == (("node1", "node2"),)
    assert plan.ring == (("node1", "node2"), ("node2", "node1"))


def test_of_many_nodes_only_the_ring_is_measured_with_a_note() -> None:
    plan = plan_flows(named(12), 21.0)
    assert len(plan.pairs) == 12
    assert "66 pairs are too many" in plan.notes[0]


def test_ranks_on_one_machine_are_a_ring_over_its_loopback() -> None:
    assert ring_of([Node("local", "127.0.0.1", "lo", 3, 2)]) == (("local", "local"),) * 3
    alone = plan_flows([Node("local", "127.0.0.1", "lo", 1, 2)], 21.0)
    assert (alone.pairs, alone.ring, alone.notes) == ((), (), ())


# Rates


def steady(begin: float, bps: float, seconds: float, burst: int = 0) -> list[tuple[float, int]]:
    steps = int(seconds * 100)
    return [(begin + step / 100, burst + int(bps / 8 * step / 100)) for step in range(steps + 1)]


def test_a_rate_omits_the_start_and_counts_the_time_shared_by_all_streams() -> None:
    assert rate_bps([steady(5.0, 8e6, 1.0, burst=500_000)], 1.0) == pytest.approx(8e6, rel=1e-6)
    stalled = [(at + 0.1 * (at > 5.5), bytes_) for at, bytes_ in steady(5.0, 8e6, 1.0)]
    assert rate_bps([stalled], 1.0) == pytest.approx(8e6, rel=1e-2)
    late = [steady(5.0, 8e6, 1.0), steady(5.1, 4e6, 1.0)]
    assert rate_bps(late, 1.0) == pytest.approx(12e6, rel=1e-3)
    nothing: list[list[list[tuple[float, int]]]] = [[], [[]], [[(1.0, 5)]]]
    for streams in nothing:
        with pytest.raises(ValueError, match="stream"):
            rate_bps(streams, 1.0)


# The link meter


@pytest.fixture
def meter() -> Iterator[RemoteProgram]:
    source = str(Path(read_profile.__code__.co_filename).parents[2])
    with closing(RemoteProgram("here", LocalProgram(module_command(LINK_METER), {"PYTHONPATH": source}))) as program:
        yield program


def listen(program: RemoteProgram) -> dict[str, Any]:
    place = {"address": "127.0.0.1", "token": "secret"}
    return {**place, "port": program.ask(10, do="listen", **place)["port"]}


def flow_bps(program: RemoteProgram, place: dict[str, Any], streams: int, seconds: float) -> float:
    order = {**place, "session": f"flow-{streams}", "streams": streams, "seconds": seconds}
    for step in ("expect", "send", "sent"):
        program.ask(20, do=step, **order)
    return float(program.ask(20, do="received", **order)["bps"])


def test_the_link_meter_needs_only_python(meter: RemoteProgram) -> None:
    facts = meter.ask(10, do="facts")
    assert facts["memory_bytes"] == total_bytes()
    place = listen(meter)
    trips = meter.ask(10, do="round_trip", count=50, seconds=5, **place)
    assert trips["count"] == 50
    assert trips["median_s"] > 0
    for streams in (1, 4):
        assert flow_bps(meter, place, streams, 0.3) > 0
    with pytest.raises(ControlError, match="KeyError"):
        meter.ask(5, do="nonsense")


def test_a_connection_without_the_token_is_closed(meter: RemoteProgram) -> None:
    place = listen(meter)
    with socket.create_connection((place["address"], place["port"]), timeout=5) as connection:
        connection.sendall(b"guess echo -\n")
        assert connection.recv(100) == b""


# Order of the compute measurements


def test_nodes_of_one_machine_compute_in_turn_and_machines_in_parallel() -> None:
    from shoal.tools.probe.worker import assign_turns

    assert assign_turns({"node1": "a", "node2": "a", "node3": "b"}) == {"node1": 0, "node2": 1, "node3": 0}


def test_thread_counts_double_up_to_all_cores() -> None:
    from shoal.train.compute_speed import thread_counts

    assert [thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


# Real clusters


@pytest.mark.long
def test_two_ranks_on_this_machine_are_probed(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    done = shoal("probe", "--on", "local:2", "--budget", "5", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = read_profile(folder / "profile.toml")
    assert profile == Profile.model_validate_json(done.stdout)
    assert sorted(path.name for path in folder.iterdir()) == ["profile.png", "profile.toml"]
    [loopback] = profile.links
    assert (loopback.tool, loopback.source, loopback.target) == ("shoal", "local", "local")
    measured = [(entry.op, entry.element_bytes) for entry in profile.collectives]
    assert measured == [("all-reduce", 4), ("all-reduce", 2), *((op, 4) for op in OTHERS)]
    assert {pace.name for pace in profile.nodes[0].timings} == {"small", "wide"}
    assert profile.nodes[0].fp16_s_per_parameter is not None
    assert [trial.connections for trial in profile.connections] == [1, 2, 4]
    assert profile.nodes[0].compute.training[0].threads == 1
    assert profile.summary.stack_efficiency is not None


@pytest.mark.long
def test_an_interrupted_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    """Interrupt while links are measured; conftest checks for children of any kind."""
    words = shoal_command("probe", "--on", "local:2", "-o", tmp_path / "profile.toml")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as probing:
        wait_until(psutil.Process(probing.pid).children)
        children = psutil.Process(probing.pid).children(recursive=True)
        probing.send_signal(signal.SIGINT)
        assert probing.wait(20) == 130
    psutil.wait_procs(children, timeout=5)
    assert not [child for child in children if child.is_running()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_shaped_link_is_measured_correctly(tmp_path: Path) -> None:
    """The rate is within 5% of the requested one, including TCP headers (3.5%)."""
    need_lab()
    file = tmp_path / "profile.toml"
    done = shoal("probe", "--on", "lab:2,link=100mbit", "--budget", "45", "-o", file, "--json", timeout_s=180)
    assert done.returncode == 0, done.stderr
    profile = read_profile(file)
    assert json.loads(done.stdout)["world_size"] == 2
    for link in profile.links:
        assert link.gbps == pytest.approx(0.1, rel=0.05)
        assert link.gbps_4_streams == pytest.approx(0.1, rel=0.05)
    reduce_ = profile.collective("all-reduce")
    assert reduce_ is not None
    assert reduce_.points[-1].bytes < SIZES[-1]
    assert any("left out for lack of time" in note for note in profile.notes)
    assert profile.nodes[0].machine == profile.nodes[1].machine


@pytest.mark.exhaustive
def test_hosts_over_ssh_are_probed_and_keep_no_file(tmp_path: Path) -> None:
    """Nodes of a lab share one disk, so every host gets its own folder as its disk."""
    need_tool("sshd")
    with running_lab(2, sshd=True) as lab:
        if not lab.state.spec.sshd:
            pytest.skip("; ".join(lab.state.notes))
        tables = [
            f'[[host]]\nhost = "node{number}"\npython = "{sys.executable}"\nfolder = "{tmp_path}/disk{number}"\n'
            for number in (1, 2)
        ]
        hosts, file = tmp_path / "hosts.toml", tmp_path / "profile.toml"
        hosts.write_text(f'ssh_config = "{lab.folder}/ssh/config"\n' + "".join(tables))
        words = shoal_command("probe", "--on", hosts, "--budget", "20", "-o", file)
        done = subprocess.run(lab.command("switch", words), capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr
    profile = read_profile(file)
    assert [node.interface for node in profile.nodes] == ["eth0", "eth0"]
    assert [(link.source, link.target) for link in profile.links] == [("node1", "node2"), ("node2", "node1")]
    assert not [path for path in tmp_path.glob("disk*/runs/*") if path.is_dir()]
