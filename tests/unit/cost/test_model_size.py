"""The cost model of a GPT compared with the real model: parameters, FLOPs, activations, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoal.config.load import build_config
from shoal.config.schema import DataConfig, ModelConfig, TrainConfig
from shoal.config.sync_choice import SHARDED_METHODS
from shoal.cost.memory import USABLE, fits, gathered_bytes, largest_micro_batch, needed, rank_memories
from shoal.cost.model_size import activation_bytes, flops_per_token, head_elements, parameter_count, saved_elements
from shoal.cost.strategy import SyncStrategy, bytes_per_parameter, is_encoded
from shoal.cost.workload import Workload, assumed_shape, assumed_vocabulary, bare_workload, workload_of
from shoal.data.prepare import prepare
from shoal.model.gpt import GPT

SHAPES = [
    ModelConfig(layers=2, heads=4, width=64, seq_len=32, vocab_size=300),
    ModelConfig(layers=3, heads=2, width=128, seq_len=64, vocab_size=100),
]
GPT2 = workload_of(build_config("gpt2-124m"))
GPT2_LARGE = workload_of(build_config("gpt2-760m"))


def loss_of(model: GPT, sequences: int) -> Tensor:
    config = model.config
    tokens = torch.randint(config.vocab_size, (sequences, config.seq_len))
    loss: Tensor = model(tokens, tokens)
    return loss


def kept_bytes(shape: ModelConfig, sequences: int, recompute: bool = False) -> int:
    """Count the bytes that forward saves for backward: each storage once, without the weights."""
    model = GPT(shape, recompute)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and tensor.dim() and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # otherwise another tensor could reuse its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, sequences)
    return sum(kept.values())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_activations_are_those_the_model_saves(shape: ModelConfig, recompute: bool) -> None:
    # The inputs of blocks are not kept for autograd, but to compute again.
    inputs = (2 * shape.layers - 1) * shape.width if recompute else 0
    elements = 3 * shape.seq_len * (saved_elements(shape, recompute) - inputs) + head_elements(shape)
    assert kept_bytes(shape, 3, recompute) == 4 * elements


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_flops_are_those_torch_counts(shape: ModelConfig, recompute: bool) -> None:
    """Use plain attention: torch does not count FLOPs inside the fused kernel on a CPU."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(GPT(shape, recompute), 3).backward()
    assert counter.get_total_flops() == pytest.approx(3 * shape.seq_len * flops_per_token(shape, recompute))


def test_the_peak_holds_the_logits_of_one_chunk() -> None:
    """Measured on an H200: 11.8 GB for 124M parameters and 16 sequences, without gradients; 32.1 GB for 850M and 8."""
    small = activation_bytes(GPT2.shape, 16) + 12 * GPT2.parameters
    shape = ModelConfig(layers=25, heads=25, width=1600, seq_len=1024, vocab_size=50_257)
    large = activation_bytes(shape, 8) + 12 * parameter_count(shape)
    assert small == pytest.approx(11.76e9, rel=0.03)
    assert large == pytest.approx(32.07e9, rel=0.03)


# Workloads


def test_a_preset_with_a_known_vocabulary_has_its_size() -> None:
    assert (GPT2.parameters, GPT2.seq_len, GPT2.gradient_bytes) == (124_439_808, 1024, 4)
    assert GPT2.tokens(2) == 4096


def test_the_assumed_vocabulary_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    data = DataConfig(cache_dir=tmp_path)
    assert assumed_vocabulary(data) == prepare(data).vocab_size
    assert assumed_vocabulary(DataConfig(bpe_vocab=500)) == 500
    assert assumed_vocabulary(DataConfig(path=Path("some.txt"))) == 2048
    assert assumed_vocabulary(DataConfig(tokenizer="byte")) == 256


def test_weak_scaling_and_accumulation_make_the_batch_larger() -> None:
    weak = workload_of(build_config("gpt2-124m", sets=["train.scaling=weak"]))
    assert weak.tokens(3) == 3 * 4096
    assert GPT2.accumulated(4).tokens(3) == 4 * 4096
    assert GPT2.accumulated(1) is GPT2


@pytest.mark.parametrize("parameters", [10_000_000, 124_439_808, 760_000_000, 7_000_000_000])
def test_an_assumed_shape_has_about_the_given_parameter_count(parameters: int) -> None:
    assert parameter_count(assumed_shape(parameters, 1024)) == pytest.approx(parameters, rel=0.15)


def test_the_assumed_shape_for_the_size_of_gpt2_is_gpt2() -> None:
    shape = assumed_shape(GPT2.parameters, 1024)
    assert (shape.layers, shape.width) == (12, 768)


@given(st.integers(1, 10**14))
def test_every_parameter_count_has_an_assumed_shape(parameters: int) -> None:
    assert assumed_shape(parameters, 1024).vocab_size <= max(1, parameters)


def test_a_bare_workload_can_have_bf16_gradients() -> None:
    bare = bare_workload(760_000_000, 1024, TrainConfig(), "bf16")
    assert (bare.gradient_bytes, bare.flops_per_token, bare.model) == (2, 6 * 760e6, None)


# Wire formats


@pytest.mark.parametrize(("wire", "size"), [("fp32", 4), ("fp16", 2), ("bf16", 2), ("int8", 1.015625)])
def test_bytes_per_parameter_depend_on_the_wire_format(wire: str, size: float) -> None:
    assert bytes_per_parameter(SyncStrategy().with_(wire=wire), GPT2) == size


def test_bf16_gradients_are_not_compressed_to_fp16() -> None:
    bare = bare_workload(10**9, 1024, TrainConfig(), "bf16")
    assert bytes_per_parameter(SyncStrategy(wire="fp16"), bare) == 2
    assert not is_encoded(SyncStrategy(wire="fp16"), bare)
    assert is_encoded(SyncStrategy(wire="int8"), bare)


def test_low_rank_factors_are_counted_matrix_by_matrix() -> None:
    """Counted by the real model's matrices; vectors are sent whole."""
    shape = SHAPES[0]
    sizes = [tuple(parameter.shape) for parameter in GPT(shape).parameters()]
    sent = sum(min(size[0] * size[1], 2 * sum(size)) if len(size) == 2 else size[0] for size in sizes)
    workload = Workload("small", parameter_count(shape), flops_per_token(shape), shape.seq_len, TrainConfig(), shape)
    strategy = SyncStrategy(wire="powersgd", rank=2)
    assert bytes_per_parameter(strategy, workload) * workload.parameters == pytest.approx(4 * sent)


# Memory


def test_ddp_replicates_the_state_and_sharding_divides_it() -> None:
    alone, eight = (needed(GPT2, SyncStrategy(), 1, world) for world in (1, 8))
    assert alone == eight
    assert alone.weights + alone.gradients + alone.moments == 16 * GPT2.parameters
    for sync in SHARDED_METHODS:
        assert needed(GPT2, SyncStrategy(sync=sync), 1, 1) == alone
        assert needed(GPT2, SyncStrategy(sync=sync), 1, 8).activations == alone.activations


# Bytes a parameter of weights, gradients and moments.
@pytest.mark.parametrize(
    ("sync", "copies", "two", "three"),
    [
        ("ddp", None, 16, 16),
        ("zero1", 0, 8 + 8 / 2, 8 + 8 / 3),
        ("zero1", None, 8 + 8 / 2, 8 + 16 / 3),
        ("zero2", 0, 4 + 12 / 2, 4 + 12 / 3),
        ("zero2", None, 4 + 12 / 2, 4 + 24 / 3),
        ("zero3", 0, 16 / 2, 16 / 3),
        ("zero3", None, 16 / 2, 32 / 3),
        ("zero1", 1, 16, 8 + 16 / 3),
    ],
)
def test_a_level_divides_what_its_table_says(sync: str, copies: int | None, two: float, three: float) -> None:
    memories = (needed(GPT2, SyncStrategy(sync=sync, copies=copies), 1, world) for world in (2, 3))
    held = [(memory.weights + memory.gradients + memory.moments) / GPT2.parameters for memory in memories]
    assert held == pytest.approx([two, three])


@pytest.mark.parametrize(
    ("sync", "two", "three"),
    [("ddp", 15.6e9, 15.6e9), ("zero1", 12.5e9, 11.5e9), ("zero2", 11.0e9, 9.5e9), ("zero3", 10.28e9, 8.25e9)],
)
def test_the_memory_of_760_million_parameters_has_known_sizes(sync: str, two: float, three: float) -> None:
    """Without copies, one sequence at a time: 2.84 GB of activations and 0.6 GB of the process are in all of them."""
    totals = [needed(GPT2_LARGE, SyncStrategy(sync=sync, copies=0), 1, world).total for world in (2, 3)]
    assert totals == pytest.approx([two, three], rel=0.005)


def test_zero3_gathers_two_layers_and_the_embedding() -> None:
    layer, embedding = 12 * 1536**2 + 13 * 1536, 50_257 * 1536
    assert gathered_bytes(GPT2_LARGE) == pytest.approx(2 * 8 * layer + 4 * embedding, rel=0.01)
    small, large = (needed(GPT2_LARGE, SyncStrategy(sync=sync, copies=0), 1, 2).buffers for sync in ("zero2", "zero3"))
    assert (small, large) == (0, gathered_bytes(GPT2_LARGE))


@pytest.mark.parametrize(
    ("sync", "wire", "bytes_a_parameter"),
    [("zero1", "fp16", 4 / 2), ("zero2", "bf16", 4 / 2), ("zero1", "int8", 4 + 4 / 2), ("zero3", "int8", 4)],
)
def test_a_lossy_wire_keeps_the_own_part_exact(sync: str, wire: str, bytes_a_parameter: float) -> None:
    exact, lossy = (needed(GPT2, SyncStrategy(sync=sync, wire=name), 1, 2).buffers for name in ("fp32", wire))
    assert lossy - exact == pytest.approx(bytes_a_parameter * GPT2.parameters)


def test_parts_follow_the_memory_of_the_machines() -> None:
    equal = rank_memories(GPT2_LARGE, SyncStrategy(sync="zero1"), 1, [16e9, 16e9])
    assert [memory.part for memory in equal] == [0.5, 0.5]
    large, small = rank_memories(GPT2_LARGE, SyncStrategy(sync="zero1"), 1, [32e9, 13e9])
    assert large.part + small.part == 1
    assert small.part < 0.25
    assert large.fits
    assert small.fits
    assert not needed(GPT2_LARGE, SyncStrategy(sync="zero1"), 1, 2).total <= USABLE * 13e9
    assert {memory.part for memory in rank_memories(GPT2_LARGE, SyncStrategy(), 1, [32e9, 13e9])} == {1.0}


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        (SyncStrategy(wire="fp16"), 0),
        (SyncStrategy(wire="int8"), 4),
        (SyncStrategy(wire="powersgd"), 4),
        (SyncStrategy(sync="local", every=8), 4),
        (SyncStrategy(sync="diloco", every=100), 8),
        (SyncStrategy(sync="diloco", every=100, wire="int8"), 12),
    ],
)
def test_a_lever_needs_its_extra_memory(strategy: SyncStrategy, more: int) -> None:
    plain, other = needed(GPT2, SyncStrategy(), 1, 2), needed(GPT2, strategy, 1, 2)
    assert other.total - plain.total == more * GPT2.parameters


def test_bf16_training_needs_sixteen_bytes_per_parameter() -> None:
    memory = needed(bare_workload(10**9, 1024, TrainConfig(), "bf16"), SyncStrategy(), 0, 1)
    assert memory.weights + memory.gradients + memory.moments + memory.buffers == 16e9


@pytest.mark.parametrize("available", [1e9, 4e9, 16e9, 80e9])
def test_the_largest_micro_batch_fits_and_one_more_does_not(available: float) -> None:
    most = largest_micro_batch(GPT2, SyncStrategy(), [available, available])
    assert fits(needed(GPT2, SyncStrategy(), most, 2), available) == (available > 3e9)
    assert not fits(needed(GPT2, SyncStrategy(), most + 1, 2), available)
