"""Wire formats: how a bucket of gradients is summed over the world. See docs/wires.md."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shoal.config.sync_choice import WireChoice, parse_wire
from shoal.errors import UsageError
from shoal.sync.compression.base import TORCH_GOES_ONE_BY_ONE, Bucket, Compressor, Fp16, Fp32, InterruptibleCompressor
from shoal.sync.compression.codecs import bf16_codec, int8_codec
from shoal.sync.compression.native import load_kernels
from shoal.sync.compression.powersgd import PowerSGD
from shoal.sync.compression.reduce_scatter import ReduceScatter
from shoal.sync.world import World

__all__ = ["Bucket", "Wire", "made_by", "make_wire"]


def make_wire(text: str, world: World, parameters: Mapping[str, Tensor]) -> Compressor:
    """For gradients of these parameters, named as in the model; every bucket is made of some of them."""
    choice = parse_wire(text)
    if world.device.type != "cpu" and choice.format.is_cpu_only:
        raise UsageError(
            f"sync.wire={text} works on the CPU only, and this rank computes on {world.device}",
            why="its exchange is made of gloo's collectives",
            fix="use --wire fp16, or --device cpu",
        )
    wire = _make(choice, world, parameters)
    if world.release is None or world.backend != "gloo":
        # A future of ours knows nothing of a GPU's streams: whoever waits for it would not wait for them.
        return wire
    return InterruptibleCompressor(wire, world.release)


def _make(choice: WireChoice, world: World, parameters: Mapping[str, Tensor]) -> Compressor:
    match choice.name:
        case "fp32":
            return Fp32(world)
        case "fp16":
            return Fp16(world)
        case "bf16":
            return ReduceScatter(world, parameters, bf16_codec(load_kernels()))
        case "int8":
            return ReduceScatter(world, parameters, int8_codec(load_kernels()))
        case "powersgd":
            return PowerSGD(world, parameters, choice.rank)
        case name:
            raise ValueError(f"the wire format {name} has no implementation")


def made_by(text: str) -> str:
    """`kernel` where this machine's compiler made one for the format, `plain` for all others."""
    choice = parse_wire(text)
    wanted = choice.format.is_cpu_only or (choice.name == "fp16" and TORCH_GOES_ONE_BY_ONE)
    return "kernel" if wanted and load_kernels() is not None else "plain"
