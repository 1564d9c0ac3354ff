"""From the configuration to a gradient exchange through shared memory, or to the wire that is left without."""

from __future__ import annotations

from torch import nn

from shoal.config.schema import SyncConfig
from shoal.sync.shared_memory.ddp import SharedCompressor, SharedDDP, in_order, lay_out, row_bytes
from shoal.sync.shared_memory.group import InsideChoice, between_machines, come_together, wanted
from shoal.sync.world import World


def open_inside(
    config: SyncConfig, model: nn.Module, world: World, bucket_mb: float
) -> tuple[InsideChoice, SharedDDP | SharedCompressor | None]:
    """Either all of it, or a wire through shared memory for whoever makes buckets, or nothing: gloo between all."""
    inside = wanted(config, world, model)
    if inside.way == "shared":
        return _resident(config, model, world, bucket_mb)
    if inside.way == "copies":
        return _with_copies(config, model, world)
    return inside, None


def _resident(
    config: SyncConfig, model: nn.Module, world: World, bucket_mb: float
) -> tuple[InsideChoice, SharedDDP | None]:
    parameters = in_order(model)
    each = parameters[0].itemsize
    layout = lay_out([parameter.numel() for parameter in parameters], bucket_mb * 2**20 / each)
    inside, together = come_together(config, world, "shared", lambda _: each * layout.elements)
    if together is None:
        return inside, None
    wire = between_machines(config, world, together.kin, model)
    return inside, SharedDDP(model, together, layout, wire, timed=config.measure == "hook")


def _with_copies(config: SyncConfig, model: nn.Module, world: World) -> tuple[InsideChoice, SharedCompressor | None]:
    inside, together = come_together(config, world, "copies", lambda kin: row_bytes(len(kin.firsts)))
    if together is None:
        return inside, None
    return inside, SharedCompressor(together, between_machines(config, world, together.kin, model))
