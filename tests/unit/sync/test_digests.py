"""Digests of tensors: every bit, name and shape counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.sync.replicas import combine_digests, tensor_digests

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=6), min_size=1, max_size=6, unique=True))
    return {name: draw(tensors()) for name in names}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(TYPES)), draw(SHAPES)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), dtype=dtype).view(shape)


def flip(tensor: Tensor, bit: int) -> None:
    tensor.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@given(state=states(), data=st.data())
def test_any_flipped_bit_is_detected_and_located(state: dict[str, Tensor], data: st.DataObject) -> None:
    before = tensor_digests(state)
    name = data.draw(st.sampled_from(sorted(state)))
    flip(state[name], data.draw(st.integers(0, 8 * state[name].nbytes - 1)))
    after = tensor_digests(state)
    assert [key for key in state if before[key] != after[key]] == [name]
    assert combine_digests(before) != combine_digests(after)


@given(state=states())
def test_equal_states_have_equal_digests_in_any_order(state: dict[str, Tensor]) -> None:
    backwards = {name: state[name].clone() for name in reversed(state)}
    assert tensor_digests(backwards) == tensor_digests(state)
    assert list(tensor_digests(backwards)) == list(backwards)
    assert combine_digests(tensor_digests(backwards)) == combine_digests(tensor_digests(state))
    assert -(2**63) <= combine_digests(tensor_digests(state)) < 2**63


def test_names_shapes_and_types_change_the_digest() -> None:
    tensor = torch.arange(6.0)
    others: list[dict[str, Tensor]] = [
        {"a": tensor},
        {"b": tensor},
        {"a": tensor.view(2, 3)},
        {"a": tensor.view(torch.int32)},
        {},
    ]
    assert len({combine_digests(tensor_digests(state)) for state in others}) == len(others)


@pytest.mark.parametrize("threads", [1, 3])
def test_digests_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    state = {f"tensor {index}": torch.arange(index * 500_000) for index in range(8)}
    previous = torch.get_num_threads()
    expected = tensor_digests(state)
    torch.set_num_threads(threads)
    try:
        assert tensor_digests(state) == expected
    finally:
        torch.set_num_threads(previous)


def test_a_non_contiguous_tensor_has_the_digest_of_its_values() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert tensor_digests({"a": whole.t()}) == tensor_digests({"a": whole.t().contiguous()})
