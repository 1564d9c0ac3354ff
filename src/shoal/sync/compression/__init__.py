"""Wire formats: how a bucket of gradients is summed over the ranks. See docs/wires.md.

To add a format: write its class here, add it to `_FORMATS`, and name it in `config/sync_choice.py` and the docs page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.config.sync_choice import WireChoice, WireName, parse_wire
from shoal.errors import UsageError
from shoal.sync.compression.base import TORCH_FP16_IS_SLOW, Compressor, Fp16, Fp32, InterruptibleCompressor
from shoal.sync.compression.codecs import bf16_codec, int8_codec
from shoal.sync.compression.native import load_kernels
from shoal.sync.compression.powersgd import PowerSGD
from shoal.sync.compression.reduce_scatter import ReduceScatter
from shoal.sync.world import World

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Format:
    make: Callable[[World, Parameters, WireChoice], Compressor]
    is_cpu_only: bool = True  # it needs gloo's collectives
    has_kernel: bool = True  # `native.py` has a kernel for it


def _make_bf16(world: World, parameters: Parameters, _: WireChoice) -> Compressor:
    return ReduceScatter(world, parameters, bf16_codec(load_kernels()))


def _make_int8(world: World, parameters: Parameters, _: WireChoice) -> Compressor:
    return ReduceScatter(world, parameters, int8_codec(load_kernels()))


_FORMATS: dict[WireName, _Format] = {
    "fp32": _Format(lambda world, *_: Fp32(world), is_cpu_only=False, has_kernel=False),
    "fp16": _Format(lambda world, *_: Fp16(world), is_cpu_only=False, has_kernel=TORCH_FP16_IS_SLOW),
    "bf16": _Format(_make_bf16),
    "int8": _Format(_make_int8),
    "powersgd": _Format(lambda world, parameters, choice: PowerSGD(world, parameters, choice.rank)),
}


def make_compressor(text: str, world: World, parameters: Parameters) -> Compressor:
    """Return the compressor of a wire format. `parameters`, named as in the model, are those of all later buckets."""
    choice = parse_wire(text)
    wire_format = _FORMATS[choice.name]
    if world.device.type != "cpu" and wire_format.is_cpu_only:
        raise UsageError(
            f"sync.wire={text} works on the CPU only, and this rank computes on {world.device}",
            why="its exchange is made of gloo's collectives",
            fix="use --wire fp16, or --device cpu",
        )
    compressor = wire_format.make(world, parameters, choice)
    if world.release is None or world.backend != "gloo":
        # A guarded future does not know a GPU's streams: waiting for it would not wait for them.
        return compressor
    return InterruptibleCompressor(compressor, world.release)


def made_by(text: str) -> str:
    """Return `kernel` where this machine has a compiled kernel for the format, `plain` otherwise."""
    has_kernel = _FORMATS[parse_wire(text).name].has_kernel
    return "kernel" if has_kernel and load_kernels() is not None else "plain"
