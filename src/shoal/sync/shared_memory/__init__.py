"""Gradient exchange between ranks of one host through shared memory."""

from __future__ import annotations

from torch import nn

from shoal.config.schema import SyncConfig
from shoal.sync.shared_memory.ddp import SharedCompressor, SharedDDP, in_backward_order, lay_out_rows, row_bytes
from shoal.sync.shared_memory.group import (
    InsideChoice,
    make_inter_host_compressor,
    open_host_sharing,
    preferred_way,
)
from shoal.sync.world import World


def open_shared_memory(
    config: SyncConfig, model: nn.Module, world: World, bucket_mb: float, in_place: bool = True
) -> tuple[InsideChoice, SharedDDP | SharedCompressor | None]:
    """Return a whole gradient exchange, or a compressor for buckets, or None: gloo between all ranks.

    A whole exchange keeps the gradients `in_place`, in the shared memory.
    """
    inside = preferred_way(config, world, model)
    if inside.way == "shared" and not in_place:
        inside = InsideChoice("copies")
    if inside.way == "shared":
        parameters = in_backward_order(model)
        itemsize = parameters[0].itemsize
        layout = lay_out_rows([parameter.numel() for parameter in parameters], bucket_mb * 2**20 / itemsize)
        inside, sharing = open_host_sharing(config, world, "shared", lambda _: itemsize * layout.elements)
        if sharing is not None:
            between_hosts = make_inter_host_compressor(config, world, sharing.group, model)
            return inside, SharedDDP(model, sharing, layout, between_hosts, timed=config.measure == "hook")
    elif inside.way == "copies":
        inside, sharing = open_host_sharing(config, world, "copies", lambda group: row_bytes(len(group.first_ranks)))
        if sharing is not None:
            return inside, SharedCompressor(sharing, make_inter_host_compressor(config, world, sharing.group, model))
    return inside, None
