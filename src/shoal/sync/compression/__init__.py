"""Wire formats: how a bucket of gradients is summed over the ranks. See docs/wires.md.

To add a format: write its class in this package, add it to `_FACTORIES`, and describe it in `config/sync_choice.py` and
the docs page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from shoal.config.sync_choice import WireChoice, parse_wire
from shoal.sync.compression.base import TORCH_FP16_IS_SLOW, Compressor, Fp16, Fp32, InterruptibleCompressor
from shoal.sync.compression.codecs import NativeBf16, NativeInt8, bf16_codec, int8_codec
from shoal.sync.compression.native import load_kernels
from shoal.sync.compression.powersgd import PowerSGD
from shoal.sync.compression.reduce_scatter import ReduceScatter
from shoal.sync.compression.staging import StagedCompressor
from shoal.sync.world import World

Parameters = Mapping[str, Tensor]

_FACTORIES: dict[str, Callable[[World, Parameters, WireChoice], Compressor]] = {
    "fp32": lambda world, *_: Fp32(world),
    "fp16": lambda world, *_: Fp16(world),
    "bf16": lambda world, parameters, _: ReduceScatter(world, parameters, bf16_codec(load_kernels())),
    "int8": lambda world, parameters, _: ReduceScatter(world, parameters, int8_codec(load_kernels())),
    "powersgd": lambda world, parameters, choice: PowerSGD(world, parameters, choice.rank),
}


def make_compressor(text: str, world: World, parameters: Parameters) -> Compressor:
    """Return the compressor of a wire format. `parameters`, named as in the model, are those of all later buckets."""
    choice = parse_wire(text)
    if world.gpu_group is not None and not choice.format.needs_gloo:
        # A guarded future does not know a GPU's streams. When the generation ends, NCCL's group is aborted.
        return _FACTORIES[choice.name](replace(world, group=world.gpu_group), parameters, choice)
    compressor = _FACTORIES[choice.name](world, parameters, choice)
    if world.release is not None:
        compressor = InterruptibleCompressor(compressor, world.release)
    return stage(compressor, world)


def stage(compressor: Compressor, world: World) -> Compressor:
    """Return the compressor for this rank's gradients: those of a GPU go through the processor's memory."""
    return StagedCompressor(compressor, world.device) if world.device.type == "cuda" else compressor


def kernel_or_plain(text: str) -> str:
    """Return `kernel` where the format's compressor uses a compiled kernel on this machine, `plain` otherwise.

    A codec whose kernel fails its self-check falls back to plain torch.
    """
    name, kernels = parse_wire(text).name, load_kernels()
    if kernels is None:
        return "plain"
    uses_kernel = {
        "fp16": TORCH_FP16_IS_SLOW and kernels.has_halves,
        "bf16": isinstance(bf16_codec(kernels), NativeBf16),
        "int8": isinstance(int8_codec(kernels), NativeInt8),
        "powersgd": True,
    }
    return "kernel" if uses_kernel.get(name) else "plain"
