"""Ranks of one machine exchange through shared memory: same sums to the bit, no hang, nothing left behind.

Exercises sync.shared_memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.config.schema import SyncConfig
from shoal.errors import PeerLost, RunFailed
from shoal.sync.compression.base import Bucket
from shoal.sync.gradients import make_gradient_sync
from shoal.sync.shared_memory import ddp, group, open_shared_memory
from shoal.sync.shared_memory.ddp import SharedCompressor, lay_out_rows, slice_of
from shoal.sync.shared_memory.group import group_by_machine, open_host_sharing
from shoal.sync.world import World
from tests.integration.launch.test_failing_ranks import LONG, training, wait_gone
from tests.integration.sync.test_gradients import alone, exchange
from tests.support.programs import read_jsonl, steps_of, train_tiny
from tests.support.ranks import run_ranks
from tests.support.sockets import living, local_sockets, shared_files

Array = npt.NDArray[np.float32]

CHUNK_BYTES = 1 << 17
# Less than one element per slice, odd, and slightly more than one chunk and than two.
SIZES = [1, 3, 200, 10_007, CHUNK_BYTES // 4 + 13, CHUNK_BYTES // 2 + 1]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 9))
def test_slices_cover_every_element_once(begin: int, length: int, count: int) -> None:
    slices = [slice_of(begin, begin + length, index, count) for index in range(count)]
    covered = [bound for low, high in slices if low < high for bound in (low, high)]
    assert all(low <= high for low, high in slices)
    assert covered == sorted(covered)
    assert sum(high - low for low, high in slices) == length
    assert covered == [] or (covered[0], covered[-1]) == (begin, begin + length)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 10_000))
def test_a_layout_has_every_gradient_in_its_bucket(sizes: list[int], bucket: int) -> None:
    layout = lay_out_rows(sizes, bucket)
    for size, begin, number in zip(sizes, layout.begins, layout.bucket_of, strict=True):
        low, high = layout.buckets[number]
        assert low <= begin
        assert begin + size <= high
    # Every element of a bucket belongs to a gradient, and the bucket was not full before its last one.
    for number, (low, high) in enumerate(layout.buckets):
        inside = [size for size, of in zip(sizes, layout.bucket_of, strict=True) if of == number]
        assert sum(inside) == high - low
        assert sum(inside[:-1]) < bucket
    assert sorted(layout.begins) == list(layout.begins)


def test_ranks_are_grouped_by_machine() -> None:
    assert group_by_machine([b"a", b"b", b"a", b"c", b"b"]) == [(0, 2), (1, 4), (3,)]


def tensor_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(size, generator=generator).to(dtype)


def on_machines(world: World, machines: list[int]) -> World:
    """Return a world in which rank r runs on machine `machines[r]`."""
    return replace(world, node=f"machine-{machines[world.rank]}")


def open_wire(world: World, wire: str = "fp32", timeout_s: float = 20.0) -> SharedCompressor:
    config = SyncConfig(inside="copies", wire=wire, timeout_s=timeout_s)
    _, compressor = open_shared_memory(config, nn.Linear(1, 1), world, 1.0)
    assert isinstance(compressor, SharedCompressor)
    return compressor


def sums(world: World, machines: list[int], wire: str, dtypes: list[str]) -> list[Array]:
    ddp.CHUNK_BYTES = CHUNK_BYTES
    placed = on_machines(world, machines)
    shared = open_wire(placed, wire)
    arrays = []
    for dtype in dtypes:
        buckets = [tensor_of(world.rank, size, getattr(torch, dtype)) for size in SIZES]
        # All at once, as backward passes them.
        arriving = [shared(Bucket(number, bucket, [])) for number, bucket in enumerate(buckets)]
        for bucket, future in zip(buckets, arriving, strict=True):
            assert future.wait().data_ptr() == bucket.data_ptr()
        arrays += [bucket.float().numpy() for bucket in buckets]
    return arrays


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_values_are_summed_in_rank_order(world_size: int, tmp_path: Path) -> None:
    dtypes = ["float32", "float16", "bfloat16"]
    results = run_ranks(sums, world_size, tmp_path, [0] * world_size, "fp32", dtypes)
    expected = [
        in_rank_order([tensor_of(rank, size, getattr(torch, dtype)) for rank in range(world_size)]).float().numpy()
        for dtype in dtypes
        for size in SIZES
    ]
    for result in results:
        for values, exact in zip(result, expected, strict=True):
            assert values.tobytes() == exact.tobytes()


@pytest.mark.parametrize("machines", [[0, 0, 1, 1], [0, 0, 1], [0, 1, 0], [0, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_sums_are_formed_inside_machines_and_then_between_them(machines: list[int], wire: str, tmp_path: Path) -> None:
    results = run_ranks(sums, len(machines), tmp_path, machines, wire, ["float32"])
    for number, size in enumerate(SIZES):
        exact = sum(tensor_of(rank, size, torch.float64) for rank in range(len(machines)))
        assert isinstance(exact, Tensor)
        tolerance = 1e-5 if wire == "fp32" else 2e-2
        np.testing.assert_allclose(results[0][number], exact.numpy(), rtol=tolerance, atol=tolerance)
        assert all(own[number].tobytes() == results[0][number].tobytes() for own in results)


def exchange_on(world: World, machines: list[int], settings: dict[str, Any]) -> tuple[str, dict[str, Array]]:
    placed = on_machines(world, machines)
    gradients, _ = exchange(placed, settings)
    return placed.node, gradients


@pytest.mark.parametrize("machines", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1]], ids=str)
@pytest.mark.parametrize("inside", ["shared", "copies"])
def test_gradients_match_those_of_one_process(machines: list[int], inside: str, tmp_path: Path) -> None:
    settings = {"inside": inside, "bucket_mb": 0.02}
    reference = alone(len(machines))
    results = run_ranks(exchange_on, len(machines), tmp_path, machines, settings)
    for _, summed in results:
        assert summed.keys() == reference.keys()
        for name, gradient in summed.items():
            np.testing.assert_allclose(gradient, reference[name], rtol=1e-4, atol=1e-6)
            assert gradient.tobytes() == results[0][1][name].tobytes(), f"{name} differs between ranks"


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(5, 5) for _ in range(3)]
        self.registered = nn.ModuleList(self.parts)


def train_some(world: World) -> list[list[float] | None]:
    """Use part 0 in the first micro-batch and part 2 in the last on rank 0; rank 1 only uses part 0."""
    torch.manual_seed(1)
    model = Halves()
    sync = make_gradient_sync(SyncConfig(inside="shared"), model, world)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        for micro in range(2):
            number = 0 if world.rank == 1 or micro == 0 else 2
            sync.backward(model.parts[number].forward(torch.ones(1, 5)).sum(), last=micro == 1)
        sync.finish()
    return [None if part.bias.grad is None else part.bias.grad.tolist() for part in model.parts]


def test_parameters_without_a_gradient_count_as_zero(tmp_path: Path) -> None:
    for gradients in run_ranks(train_some, 2, tmp_path):
        assert gradients == [[3.0] * 5, [0.0] * 5, [1.0] * 5]


def backward_before_peer(world: World, inside: str) -> float:
    """Rank 1 starts its backward after rank 0 has finished its own: a blocking hook would wait forever."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sync = make_gradient_sync(SyncConfig(inside="shared", bucket_mb=1e-5), model, world)
    if world.rank == 1:
        world.store.get("rank 0 is through")
    sync.backward(sync.module(torch.ones(1, 4)).sum(), last=True)
    world.store.set(f"rank {world.rank} is through", "yes")
    comm = sync.finish()
    assert comm.allreduce_s is not None
    return comm.allreduce_s


def test_backward_does_not_wait_for_the_exchange(tmp_path: Path) -> None:
    assert all(seconds > 0 for seconds in run_ranks(backward_before_peer, 2, tmp_path, "shared"))


def without_memory(world: World, inside: str, broken: int) -> tuple[str, str]:
    def refuse(rows: int, row_bytes: int) -> int:
        raise OSError(28, "No space left on device")

    if world.rank == broken:
        group.create_memory = refuse
    try:
        sync = make_gradient_sync(SyncConfig.model_validate({"inside": inside}), nn.Linear(2, 2), world)
    except RunFailed as error:
        return type(error).__name__, error.seen
    sync.backward(sync.module(torch.ones(1, 2)).sum(), last=True)
    sync.finish()
    return sync.inside.way, sync.inside.note


def test_without_shared_memory_every_rank_uses_gloo_and_reports_why(tmp_path: Path) -> None:
    (way, note), (other_way, other_note) = run_ranks(without_memory, 2, tmp_path, "auto", 0)
    assert way == other_way == "gloo"
    assert note == "no shared memory on local: [Errno 28] No space left on device"
    assert other_note


def test_required_but_missing_shared_memory_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for kind, seen in run_ranks(without_memory, 2, tmp_path, "shared", 0):
        assert kind == "RunFailed"
        assert seen.startswith("sync.inside=shared cannot be: ")


def open_on_separate_machines(world: World, inside: str) -> tuple[str, str]:
    return without_memory(on_machines(world, [0, 1]), inside, broken=-1)


def test_one_rank_per_machine_gives_no_note(tmp_path: Path) -> None:
    assert run_ranks(open_on_separate_machines, 2, tmp_path, "auto") == [("gloo", ""), ("gloo", "")]
    for kind, seen in run_ranks(open_on_separate_machines, 2, tmp_path, "shared"):
        assert (kind, seen) == ("RunFailed", "sync.inside=shared cannot be: no two ranks share a machine")


def end_by_signal(signum: int) -> Callable[..., None]:
    def end_now(*_: object) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(60)

    return end_now


def lose_a_peer(world: World, way: str, victim: int, signum: int, timeout_s: float, traces: Path) -> tuple[str, str]:
    """End or stop the victim in the middle of a sum, after it announced its part. Before, every rank records in
    `traces` its open files."""
    world.store.set(f"pid/{world.rank}", str(os.getpid()))
    module = {"copies": ddp, "shared": ddp}[way]
    model = nn.Linear(300, 300)
    config = SyncConfig.model_validate({"inside": way, "timeout_s": timeout_s, "bucket_mb": 0.01})
    sync = make_gradient_sync(config, model, world)
    names = {name for name in local_sockets([os.getpid()]) if name.startswith("@shoal-")}
    (traces / f"rank-{world.rank}").write_text("\n".join(names | shared_files(os.getpid())))
    if world.rank == victim:
        module.sum_rows = end_by_signal(signum)  # type: ignore[attr-defined]
    pid = int(world.store.get(f"pid/{victim}"))
    try:
        sync.backward(sync.module(torch.ones(1, 300)).sum(), last=True)
        sync.finish()
    except PeerLost as error:
        if signum == signal.SIGSTOP:
            end_stopped_victim(world, pid)
        return type(error).__name__, error.seen
    return "nothing", ""


def end_stopped_victim(world: World, pid: int) -> None:
    """Kill a stopped victim after every other rank has given up waiting for it."""
    if world.store.add("seen", 1) == world.size - 1:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("way", ["copies", "shared"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_detected_at_once_and_leaves_no_file(way: str, victim: int, tmp_path: Path) -> None:
    results = run_ranks(lose_a_peer, 3, tmp_path, way, victim, signal.SIGKILL, 600.0, tmp_path, dying=(victim,))
    for rank, result in enumerate(results):
        if rank != victim:
            assert result == ("PeerLost", f"Connection closed by peer, rank {victim} on the same machine")
    traces = {name for rank in range(3) for name in (tmp_path / f"rank-{rank}").read_text().split("\n") if name}
    assert any(name.startswith("@shoal-") for name in traces), "the ranks recorded no socket"
    assert living(traces) == set()
    assert [name for name in traces if Path(name).exists()] == []


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_stopped_rank_is_given_up_after_the_timeout(victim: int, tmp_path: Path) -> None:
    results = run_ranks(lose_a_peer, 3, tmp_path, "shared", victim, signal.SIGSTOP, 1.0, tmp_path, dying=(victim,))
    for rank, result in enumerate(results):
        if rank != victim:
            assert result == ("PeerLost", f"Timed out waiting 1 s for rank {victim} on the same machine")


def thousand_sums(world: World) -> tuple[int, int]:
    """Return how many file descriptors and threads a thousand sums added since the first one."""
    wire = open_wire(world)
    bucket = torch.ones(1000)
    counts = []
    for number in range(1001):
        wire(Bucket(0, bucket.fill_(1.0), [])).wait()
        if number in (0, 1000):
            counts.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert bucket.eq(world.size).all()
    return counts[1][0] - counts[0][0], counts[1][1] - counts[0][1]


def test_a_thousand_sums_leak_nothing(tmp_path: Path) -> None:
    assert run_ranks(thousand_sums, 2, tmp_path) == [(0, 0), (0, 0)]


def connect_as_other_user(world: World) -> tuple[str, int]:
    """Try to connect as a process of another user."""
    group._is_same_user = lambda _: False  # type: ignore[assignment]
    group._CONNECT_TIMEOUT_S = 0.5
    config = SyncConfig(inside="auto")
    inside, together = open_host_sharing(config, world, "copies", lambda _: 4096)
    return inside.note, int(together is None)


def test_another_users_process_is_refused(tmp_path: Path) -> None:
    for note, is_none in run_ranks(connect_as_other_user, 2, tmp_path):
        assert is_none
        assert note.startswith("no shared memory on local: ")


@pytest.mark.exhaustive
def test_a_run_reports_its_exchange_method_and_network_bytes(tmp_path: Path) -> None:
    shared = train_tiny(tmp_path / "shared", "--steps", "6")
    gloo = train_tiny(tmp_path / "gloo", "--steps", "6", "--inside", "gloo")
    assert (shared["inside"], gloo["inside"]) == ("shared", "gloo")
    assert shared["theoretical_bytes_per_step"] == 0
    # Other traffic over loopback is counted too: use the step with the least.
    least = {way: min(step["wire_bytes"] for step in steps_of(tmp_path / way)) for way in ("shared", "gloo")}
    assert least["shared"] < shared["model_params"] < 2 * gloo["theoretical_bytes_per_step"] <= least["gloo"]
    assert "Gradients went through shared memory" in shared["lesson_notes"]
    assert shared["byte_equivalent"] is True
    assert shared["final_loss"] == pytest.approx(gloo["final_loss"], rel=1e-4)


@pytest.mark.long
def test_the_error_of_a_training_names_its_killed_rank(tmp_path: Path) -> None:
    with training(tmp_path / "run", *LONG, "--inside", "copies", "--set", "members.on_loss=end") as run:
        pids = run.pids()
        sockets = {name for name in local_sockets(pids) if name.startswith("@shoal-")}
        os.kill(pids[1], signal.SIGKILL)
        assert run.end() == 3
        wait_gone(pids)
    assert run.error().startswith("error: rank 1 on local was killed (SIGKILL)")
    assert "why:  rank 0 then ended because a peer was gone" in run.error()
    start = next(event for event in read_jsonl(run.out / "events" / "rank-0.jsonl") if event["event"] == "start")
    assert start["inside"] == "copies"
    assert sockets
    assert living(sockets) == set()
