"""The parts of the wire formats: ownership of elements, packing of blocks, order of the exchanges."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.config.load import build_config
from shoal.config.sync_choice import WIRE_FORMATS, WireChoice, parse_wire
from shoal.cost.model_size import BLOCK, RECORD_BYTES, blocks_of, grad_bytes, is_low_rank
from shoal.cost.strategy import strategy_of_config
from shoal.errors import ConfigError
from shoal.sync.compression import base, kernel_or_plain, make_compressor
from shoal.sync.compression.base import Bucket, from_half, to_half
from shoal.sync.compression.codecs import Bf16, Int8, NativeBf16, NativeInt8, int8_codec
from shoal.sync.compression.native import load_kernels
from shoal.sync.compression.powersgd import multiply, ordered_sum, orthogonal
from shoal.sync.compression.reduce_scatter import Codec, OrderedQueue, Rounds, ScatterLayout, lay_out
from shoal.sync.world import World

FORMATS = [str(WireChoice(name, 64)) for name in WIRE_FORMATS]
floats = st.floats(width=32, allow_subnormal=True)
sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=8)


@pytest.fixture(scope="module", autouse=True)
def build_kernels() -> None:
    """Build before the tests: it takes longer than hypothesis allows for an example."""
    load_kernels()


# Names


@pytest.mark.parametrize("text", ["fp32", "fp16", "bf16", "int8"])
def test_a_plain_wire_name_is_parsed(text: str) -> None:
    assert parse_wire(text).name == text


def test_a_wire_name_with_a_rank_is_parsed() -> None:
    assert parse_wire("powersgd") == WireChoice("powersgd", 4)
    assert parse_wire("powersgd:16") == WireChoice("powersgd", 16)


@pytest.mark.parametrize("text", ["", "int7", "fp16:2", "powersgd:", "powersgd:0", "powersgd:-1", "powersgd:²", "FP16"])
def test_an_invalid_wire_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="powersgd:RANK"):
        parse_wire(text)


def test_a_setting_with_an_invalid_wire_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="powersgd:RANK"):
        build_config(sets=["sync.wire=int7"])


@pytest.mark.parametrize(
    ("setting", "wire"), [("int8", "int8"), ("powersgd", "powersgd:4"), ("powersgd:8", "powersgd:8")]
)
def test_a_wire_setting_survives_conversion_to_a_strategy(setting: str, wire: str) -> None:
    assert strategy_of_config(build_config(sets=[f"sync.wire={setting}"]).sync).wire_setting == wire


# Layout


def places(layout: ScatterLayout) -> list[tuple[int, int, int, int, int, int]]:
    """List for each element: parameter, index in it and in the bucket, chunk, owner and byte."""
    return [
        (run.parameter, run.start + i, run.offset + i, piece, owner, run.record * BLOCK + i)
        for piece, owners in enumerate(layout.chunks)
        for owner, runs in enumerate(owners)
        for run in runs
        for i in range(run.count)
    ]


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.sampled_from([260, 512, 400_000]))
def test_every_element_has_one_place_on_the_wire(counts: list[int], world_size: int, record_bytes: int) -> None:
    bucket = [(number, size) for number, size in enumerate(counts)]
    layout = lay_out(bucket, world_size, record_bytes)
    element_places = places(layout)
    assert sorted(place[:2] for place in element_places) == [
        (number, i) for number, size in bucket for i in range(size)
    ]
    assert sorted(place[2] for place in element_places) == list(range(sum(counts)))
    assert len({place[3:] for place in element_places}) == sum(counts)
    assert all(place[5] < layout.records * BLOCK for place in element_places)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 5))
def test_an_owner_does_not_depend_on_the_bucket(counts: list[int], others: list[int], world_size: int) -> None:
    """The block that an element is scaled with does not either."""

    def owners(bucket: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
        return {place[:2]: (place[4], place[5] % BLOCK) for place in places(lay_out(bucket, world_size, 260))}

    bucket = [(number, size) for number, size in enumerate(counts)]
    other_bucket = [(len(bucket) + number, size) for number, size in enumerate(others)]
    alone, together = owners(bucket), owners([*other_bucket, *reversed(bucket)])
    assert all(together[key] == place for key, place in alone.items())


# Codecs


def codecs() -> list[Codec]:
    native = load_kernels()
    return [Int8(), *([NativeInt8(native)] if native is not None else [])]


def bf16_codecs() -> list[Codec]:
    native = load_kernels()
    return [Bf16(), *([NativeBf16(native)] if native is not None else [])]


def is_bf16(codec: Codec) -> bool:
    return isinstance(codec, Bf16 | NativeBf16)


def passed_through(codec: Codec, values: Tensor, residual: Tensor) -> list[list[int]]:
    """Encode, reduce with the same gradient, and decode; return the bits, with one kind of NaN."""
    records, reduced = torch.zeros(2, blocks_of(values.numel()), codec.record_bytes, dtype=torch.int8)
    rest, gradient = residual.clone(), values.clone()
    codec.encode(gradient, rest, records)
    codec.reduce(gradient, rest, [records, records], reduced)
    codec.decode(reduced, gradient)
    # torch's own NaN in bf16 has other bits on processors with AVX-512.
    for numbers in (
        gradient,
        *((records.view(torch.bfloat16), reduced.view(torch.bfloat16)) if is_bf16(codec) else ()),
    ):
        numbers.masked_fill_(numbers.isnan(), float("nan"))
    return [tensor.view(torch.int8).flatten().tolist() for tensor in (records, reduced, rest, gradient)]


@pytest.mark.parametrize("make_codecs", [codecs, bf16_codecs])
@settings(deadline=None)
@given(numbers=st.lists(floats, min_size=1, max_size=600), shift=st.integers(0, 10))
def test_the_kernel_is_bit_identical_to_plain_torch(
    make_codecs: Callable[[], list[Codec]], numbers: list[float], shift: int
) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    residual = values.roll(shift).nan_to_num(0.5, 0.25, -0.25) / 100
    plain, *native = (passed_through(codec, values, residual) for codec in make_codecs())
    assert all(bits == plain for bits in native)


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600))
def test_the_error_of_a_block_is_at_most_half_a_step(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    for codec in codecs():
        rest, records = torch.zeros_like(values), torch.zeros(blocks_of(len(values)), 260, dtype=torch.int8)
        codec.encode(values, rest, records)
        unpacked = torch.empty_like(values)
        codec.decode(records, unpacked)
        for start in range(0, len(values), BLOCK):
            part = slice(start, start + BLOCK)
            largest = values[part].abs().max()
            assert (unpacked[part] - values[part]).abs().max() <= largest * (0.501 / 127) + 1e-35
        torch.testing.assert_close(unpacked + rest, values, rtol=0, atol=1e-7 * float(values.abs().max()))


def test_a_kernel_that_rounds_differently_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native = load_kernels()
    if native is None:
        pytest.skip("no compiler")
    assert isinstance(int8_codec(native), NativeInt8)
    assert (kernel_or_plain("int8"), kernel_or_plain("bf16"), kernel_or_plain("fp32")) == ("kernel", "kernel", "plain")
    decode = native.int8_decode

    def wrong(records: Tensor, gradient: Tensor) -> None:
        decode(records, gradient)
        gradient.mul_(1 + 1e-6)

    monkeypatch.setattr(native, "int8_decode", wrong)
    assert isinstance(int8_codec(native), Int8)
    assert (kernel_or_plain("int8"), kernel_or_plain("bf16")) == ("plain", "kernel")
    assert isinstance(int8_codec(None), Int8)


def test_bf16_keeps_eight_significant_bits() -> None:
    values = torch.randn(700)
    records = torch.zeros(3, RECORD_BYTES["bf16"], dtype=torch.int8)
    Bf16().encode(values, torch.empty(0), records)
    decoded = torch.empty(700)
    Bf16().decode(records, decoded)
    assert ((decoded - values).abs() <= values.abs() * 2**-8).all()
    assert (decoded != values).any()


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=40), st.sampled_from(["torch", "numpy", "kernel"]))
def test_fp16_conversion_equals_torchs(numbers: list[float], by: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "TORCH_FP16_IS_SLOW", by != "torch")
        if by == "numpy":
            patch.setattr(base, "load_kernels", lambda: None)
        check_halves(numbers)


def check_halves(numbers: list[float]) -> None:
    full = torch.tensor(numbers, dtype=torch.float32)
    half = to_half(full, torch.empty(len(full), dtype=torch.float16))
    wanted = full.mul(256.0).to(torch.float16)
    number = ~wanted.isnan()
    assert half.isnan().tolist() == wanted.isnan().tolist()
    assert half[number].view(torch.int16).tolist() == wanted[number].view(torch.int16).tolist()
    back = from_half(half, torch.empty_like(full))[number]
    assert back.view(torch.int32).tolist() == wanted.float().mul(1 / 256)[number].view(torch.int32).tolist()


# Kernels


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shoal" / "kernels"


def test_without_a_compiler_there_are_no_kernels(uncached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(uncached))
    assert load_kernels.__wrapped__() is None


# Low rank


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 4))
def test_columns_are_made_orthogonal(rows: int, columns: int) -> None:
    basis = orthogonal(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))).double()
    # With more columns than rows, the remaining columns are only rounding noise.
    wanted = torch.eye(columns)[: min(rows, columns), : min(rows, columns)].double()
    torch.testing.assert_close((basis.T @ basis)[: len(wanted), : len(wanted)], wanted, rtol=0, atol=1e-5)


def test_columns_of_zeros_stay_zero() -> None:
    assert not orthogonal(torch.zeros(5, 2)).any()


@settings(deadline=None)
@given(st.integers(1, 300))
def test_the_ordered_sum_equals_the_sum(rows: int) -> None:
    values = torch.arange(2 * rows, dtype=torch.float64).view(rows, 2)
    assert ordered_sum(values).tolist() == values.sum(dim=0).tolist()


def test_multiply_equals_the_matrix_product() -> None:
    p, lines = torch.randn(300, 3), torch.randn(3, 1000)
    plain, native = torch.empty(2, 300, 1000)
    multiply(p, lines, plain, None)
    multiply(p, lines, native, load_kernels())
    torch.testing.assert_close(plain, p @ lines)
    assert torch.equal(plain, native)


def test_small_matrices_are_not_low_rank() -> None:
    assert is_low_rank((768, 3072), 4)
    assert not is_low_rank((768,), 1)
    assert not is_low_rank((4, 4), 2)


# Lanes


def test_rounds_run_in_the_same_order_whenever_buckets_arrive() -> None:
    order: list[str] = []

    def rounds(index: int) -> Rounds:
        for number in range(3):
            order.append(f"{index}.{number}")
            if number < 2:
                yield

    queue, flat = OrderedQueue(), torch.zeros(1)
    futures = [queue.put(rounds(index), Bucket(index, flat, [], index == 2)) for index in range(3)]
    assert all(future.wait() is flat for future in futures)
    assert order == ["0.0", "1.0", "0.1", "2.0", "1.1", "0.2", "2.1", "1.2", "2.2"]


def test_an_error_reaches_all_waiting_buckets_and_later_ones_work() -> None:
    def fails() -> Rounds:
        yield
        raise RuntimeError("Connection closed by peer")

    def works() -> Rounds:
        yield
        yield

    queue, flat = OrderedQueue(), torch.ones(1)
    first = queue.put(fails(), Bucket(0, flat, [], False))
    second = queue.put(works(), Bucket(1, flat, [], True))
    for future in (first, second):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            future.wait()
    assert queue.put(works(), Bucket(0, flat, [])).wait() is flat


# Bytes

BYTES_SHAPES = {"a": (600, 1000), "b": (1000,), "c": (1500, 400), "d": (333,)}


def bytes_sent() -> int:
    """Sum the acknowledged bytes of this process's connections, as counted by the kernel."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            is_socket = stat.S_ISSOCK(link.stat().st_mode)
        except OSError:
            continue
        if is_socket:
            total += acknowledged(int(link.name))
    return total


def acknowledged(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("<Q", info, 120)[0])


def count_bytes(world: World, form: str, count: int) -> int:
    parameters = {name: torch.zeros(shape) for name, shape in BYTES_SHAPES.items()}
    wire = make_compressor(form, world, parameters)
    before = bytes_sent()
    for _ in range(count):
        futures = []
        for index, names in enumerate((["a", "b"], ["c", "d"])):
            flat = torch.randn(sum(parameters[name].numel() for name in names))
            futures.append(wire(Bucket(index, flat, [parameters[name] for name in names], index == 1)))
        torch.futures.wait_all(futures)
    # What was sent last is acknowledged once the others have answered.
    torch.distributed.barrier(group=world.group)
    return bytes_sent() - before


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("fp32", 4 * 768 * 769), ("fp16", 2 * 768 * 769), ("bf16", 2 * 768 * 769), ("int8", 260 * 3 * 769)],
)
def test_gradient_bytes_of_a_layer_match_the_format(form: str, wanted: int) -> None:
    assert grad_bytes([(768, 768), (768,)], form) == wanted
    assert grad_bytes([(768, 768), (768,)], "powersgd:8") == 4 * (8 * 2 * 768 + 768)
