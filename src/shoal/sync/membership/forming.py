"""From an order to enter a generation to a world: the group formed under the generation's own keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.control.rankline import Enter
from shoal.errors import ShoalError
from shoal.sync.groups import Forming, Warn, pair_key, warn_in_log
from shoal.sync.waiting import Release
from shoal.sync.world import World, backend_for, form_group, meet

# gloo waits five times as long. Everybody has said that it is there by then.
_CONNECT_S = 0.5
_FIRST_ATTEMPTS, _LATER_ATTEMPTS = 5, 20

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
    # Receives what the user should know of a group that was formed.
    warn: Warn = warn_in_log


def form(enter: Enter, store: dist.Store, place: Place, meet_s: float, timeout_s: float) -> World:
    """Raises what torch or the store raises when somebody does not come."""
    base = store if enter.size > 1 else dist.HashStore()
    keys = dist.PrefixStore(enter.prefix, base)
    meet(keys, enter.rank, enter.size, meet_s)
    backend = backend_for(place.device)
    label = enter.prefix
    key = b"" if enter.size == 1 else pair_key(store, keys, label, enter.rank)
    names = tuple(
        f"rank {id}" + (f" on {node}" if node else "") for id, node in zip(enter.ids, enter.nodes, strict=True)
    )
    # A launch that cannot form its first group tells so soon; a training that runs holds out longer.
    attempts = _FIRST_ATTEMPTS if enter.first else _LATER_ATTEMPTS
    forming = Forming(keys, enter.rank, enter.size, key, label, _CONNECT_S, names, place.release, place.warn, attempts)
    group = form_group(forming, place.device, backend, timeout_s)
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
        pair_key=key,
        warn=place.warn,
    )


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what a missing peer looks like from inside: a consequence, never a cause."""
    text = error.seen if isinstance(error, ShoalError) else str(error)
    return any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
