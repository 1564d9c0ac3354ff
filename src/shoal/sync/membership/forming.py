"""From an order to enter a generation to a world: the group formed under the generation's own keys."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.control.rankline import Enter
from shoal.errors import ShoalError
from shoal.sync.doors import shut_doors
from shoal.sync.waiting import Release
from shoal.sync.world import World, backend_for, form_group, meet

# gloo waits five times as long. Everybody has said that it is there by then.
_CONNECT_S = 0.5

_SIGNS_OF_A_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "keeps the keys",
    "in time",
    "Connect timeout",
    "connectFullMesh",
    "Socket closed",
    # What every other exchange says when one of them has met its deadline.
    "pair closure",
    "did not form",
)


@dataclass(frozen=True)
class Place:
    """What stays the same for a rank, whatever generation it is in."""

    node: str
    device: torch.device
    interface: str | None
    link_mbps: int | None
    release: Release


def form(enter: Enter, store: dist.Store, place: Place, meet_s: float, timeout_s: float) -> World:
    """Raises what torch or the store raises when somebody does not come."""
    base = store if enter.size > 1 else dist.HashStore()
    keys = dist.PrefixStore(enter.prefix, base)
    meet(keys, enter.rank, enter.size, meet_s)
    backend = backend_for(place.device)
    group = form_group(enter.rank, enter.size, place.device, backend, keys, timeout_s, _CONNECT_S)
    # Everybody is connected: gloo would take in every stranger that knocks, and keep the connection to the end.
    shut_doors()
    return World(
        rank=enter.rank,
        size=enter.size,
        local_rank=enter.local_rank,
        local_size=enter.local_size,
        node=place.node,
        backend=backend,
        device=place.device,
        interface=place.interface if enter.size > 1 else None,
        group=group,
        store=base,
        ids=enter.ids,
        nodes=enter.nodes,
        generation=enter.generation,
        lineage=enter.lineage,
        keeps_files=enter.keeps_files,
        link_mbps=place.link_mbps,
        release=place.release,
    )


def unform() -> None:
    """Drops a group that is over, whatever state it is in; and one that never came to be."""
    if dist.is_initialized():
        groups = list(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        # The last to let go of a group waits for its threads, and one of them may be stuck in gloo up to its deadline.
        threading.Thread(target=groups.clear, daemon=True).start()
        del groups
    # torch numbers its groups and writes the number into their keys. A group that did not form counts too, but only on
    # the ranks that got that far: from then on they would look for each other under different keys, for ever (seen).
    distributed_c10d._world.group_count = 0


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what a missing peer looks like from inside: a consequence, never a cause."""
    text = error.seen if isinstance(error, ShoalError) else str(error)
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
