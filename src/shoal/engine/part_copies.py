"""The parts of a divided model that a rank keeps: their digests, and the comparison of the two copies of each.

All ranks have the weights, but only two have the moments of a part: its owner, and the *holder* of its copy. Both make
the same updates, of the same numbers. Ranks that compute differently round differently: there the holder's moments
drift, and the owner's take their place at each comparison.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.replica import Replica
from shoal.engine.sharded_state import DividedOptimizers
from shoal.engine.sharding import are_alike
from shoal.engine.state_transfer import gather_json
from shoal.engine.training_state import digest_tensors
from shoal.sync.interruptible import await_work
from shoal.sync.replicas import combine_digests, gather_integers, tensor_digests
from shoal.sync.sharded.layout import Range, ShardLayout
from shoal.sync.world import World
from shoal.units import format_si, pluralize

_ADAM_BYTES = 8  # Of the two moments of an element.
# Rounding changes the norm of a tensor by less than this part of it. A bit that changes it less is harmless.
ROUNDING = 1e-3


@dataclass(frozen=True)
class CopyDifference:
    """A part whose two copies differ."""

    owner: int
    holder: int
    tensor: str  # The first tensor by name that differs.
    is_rounding: bool  # The ranks compute differently, and the tensors are as similar as that leaves them.


def part_tensors(divided: DividedOptimizers, owner: int) -> dict[str, Tensor]:
    """Return what the two ranks that keep a part have in common of it, by name and place: weights and moments."""
    names = list(divided.parameters)
    weights = {
        f"model.{names[piece.parameter]}.{piece.place.start}": piece.weight.detach()
        for piece in divided.held
        if piece.owner == owner and piece.place.count
    }
    return weights | {f"optimizer.state.{name}": tensor for name, tensor in divided.moments_of(owner).items()}


def find_differing_copies(replica: Replica) -> list[CopyDifference]:
    """Return the parts whose copies differ, in order of their owners. All ranks call it."""
    divided, world = replica.state.divided, replica.world
    if divided is None or world.size == 1 or not divided.layout.copy_shift:
        return []
    with replica.outer.common():
        own, copy = divided.layout.held_by(world.rank)
        digests = {owner: tensor_digests(part_tensors(divided, owner)) for owner in (own, copy)}
        rows = gather_integers(world, [combine_digests(digests[owner]) for owner in (own, copy)])
        holders = {owner: divided.layout.holders(owner)[1] for owner in range(world.size)}
        differing = [owner for owner, holder in holders.items() if rows[owner][0] != rows[holder][1]]
        if not differing:
            return []
        facts = {str(owner): _describe(part_tensors(divided, owner), digests[owner]) for owner in (own, copy)}
        documents = gather_json(world, facts)
        is_alike = are_alike(world)
    return [
        _compare(owner, holders[owner], documents[owner][str(owner)], documents[holders[owner]][str(owner)], is_alike)
        for owner in differing
    ]


def _describe(tensors: Mapping[str, Tensor], digests: Mapping[str, int]) -> dict[str, list[float]]:
    """Return the digest and the norm of every tensor."""
    norms = {name: float(torch.linalg.vector_norm(tensor.double())) for name, tensor in tensors.items()}
    return {name: [digests[name], norms[name]] for name in tensors}


def _compare(
    owner: int, holder: int, own: Mapping[str, list[float]], copy: Mapping[str, list[float]], is_alike: bool
) -> CopyDifference:
    tensor = min(name for name in own.keys() | copy.keys() if own.get(name) != copy.get(name))
    norms = [(own[name][1], copy[name][1]) for name in own.keys() & copy.keys()]
    are_similar = own.keys() == copy.keys() and all(map(math.isfinite, sum(norms, ())))
    are_similar &= all(abs(one - other) <= ROUNDING * max(one, other) for one, other in norms)
    return CopyDifference(owner, holder, tensor, is_rounding=are_similar and not is_alike)


def copy_from_owners(divided: DividedOptimizers, world: World) -> None:
    """Give every holder of a copy the exact numbers of the part's owner. All ranks call it."""
    keys = sorted({item for keys in divided.divided_keys().values() for item in keys.items()}, key=str)
    for index, bucket in enumerate(divided.layout.buckets):
        own, copied = (bucket.part(owner) for owner in divided.layout.held_by(world.rank))
        for key, dtype in keys:
            numbers = _send_to_holder(divided.read(index, key, *own, dtype), copied, divided.layout, world)
            divided.write(index, key, copied[0], numbers)
        if weights := divided.parts or divided.exact:
            sent, kept = (weights[index, owner].numbers for owner in divided.layout.held_by(world.rank))
            kept.copy_(_send_to_holder(sent, copied, divided.layout, world))


def _send_to_holder(own: Tensor, copied: Range, layout: ShardLayout, world: World) -> Tensor:
    """Send a tensor to the rank that keeps a copy of this rank's part; return the one of the part it keeps itself."""
    holder, source, rank = layout.holders(world.rank)[1], layout.held_by(world.rank)[1], world.rank
    # A number for itself: gloo takes no message without any.
    sizes = [1 if other == rank else len(own) * (other == holder) for other in range(world.size)]
    received = [1 if other == rank else (copied[1] - copied[0]) * (other == source) for other in range(world.size)]
    parts = [own.cpu()[:size] if other != rank else own.new_zeros(1).cpu() for other, size in enumerate(sizes)]
    arrived = torch.empty(sum(received), dtype=own.dtype)
    work = dist.all_to_all_single(arrived, torch.cat(parts), received, sizes, group=world.group, async_op=True)
    await_work(work, world.release)
    begin = sum(received[:source])
    return arrived[begin : begin + received[source]]


def describe_risk(replica: Replica) -> str:
    """Return what a lost machine means where no second rank keeps a part; empty where nothing is lost with it."""
    divided, every = replica.state.divided, replica.config.train.checkpoint_every
    if divided is None or replica.world.size == 1 or divided.layout.copy_shift:
        return ""
    level = replica.config.sync.shard_level
    element_bytes = max(parameter.itemsize for parameter in divided.parameters.values())
    # Two moments, exact weights beside rounded ones, the sums of gradients, the weights themselves.
    kept_bytes = _ADAM_BYTES + 4 * bool(divided.exact) + element_bytes * max(0, level - 1)
    elements = sum(bucket.elements for bucket in divided.layout.buckets) * divided.layout.largest_held
    return (
        f"a lost machine returns this run to its newest checkpoint (every {pluralize(every, 'step')}): no other rank "
        f"has a copy of its part. A copy needs about {format_si(kept_bytes * elements, 'B')} more a rank (with Adam): "
        "--copies 1"
    )


def describe_parts(divided: DividedOptimizers, world: World) -> dict[str, object]:
    """Return the fields of a `digest` event about the parts that this rank keeps, for `shoal verify` to compare.

    Ranges are places in the whole model: its parameters lie one after the other, in the order of the layout.
    """
    layout = divided.layout
    return {
        "elements": sum(bucket.elements for bucket in layout.buckets),
        "copies": int(layout.copy_shift > 0),
        "parts": [
            {
                "owner": world.ids[owner],
                "ranges": part_ranges(layout, owner),
                "sha256": digest_tensors(part_tensors(divided, owner)),
            }
            for owner in layout.held_by(divided.rank)
        ],
    }


def part_ranges(layout: ShardLayout, owner: int) -> list[Range]:
    """Return the places of a part in the whole model; neighbouring ranges are one."""
    ranges: list[Range] = []
    offset = 0
    for bucket in layout.buckets:
        begin, end = (offset + place for place in bucket.part(owner))
        offset += bucket.elements
        if ranges and ranges[-1][1] == begin and begin < end:
            begin = ranges.pop()[0]
        if begin < end:
            ranges.append((begin, end))
    return ranges
