"""How a new world gets a divided model: unfinished updates are finished, lost parts found at their copies, and all
parts divided anew.

A step is applied by each rank alone, once the norm of all gradients has arrived. When a rank is lost just then, some
ranks have applied the step and some have not. Those that have not do it now: their sums were complete before the norm
could arrive anywhere.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.replica import Replica
from shoal.engine.sharded_state import WEIGHT, DividedOptimizers, WaitingUpdate
from shoal.engine.sharding import agree_on_layout, divide, divided_parameters
from shoal.engine.state_transfer import NoSurvivingState, broadcast_json
from shoal.engine.training_state import StateTree, unflatten
from shoal.engine.update import clip_gradients, step_unscaled
from shoal.sync.interruptible import await_work
from shoal.sync.replicas import broadcast_tensors, combine_digests, gather_integers, tensor_digests
from shoal.sync.sharded.exchange import Spread
from shoal.sync.sharded.held import flat
from shoal.sync.sharded.layout import BucketLayout, Move, ShardLayout, plan_moves
from shoal.sync.step_stats import max_over_world
from shoal.sync.world import World
from shoal.units import rank_list

# Allows the session's own calls of optimizers and scalers while it is entered.
AtWork = Callable[[], AbstractContextManager[None]]


def finish_update(replica: Replica, world: World, has_state: bool, step: int, at_work: AtWork) -> int:
    """Apply the step that another rank has applied already, if this rank has all it needs for it.

    All ranks of the new world call it; `step` is that of this rank's state. Return the step of the state afterwards.
    """
    divided = replica.state.divided if has_state else None
    newest = max(own for [own] in gather_integers(world, [step if has_state else 0]))
    norm = divided.update.last_norm if divided is not None and step == newest else -1.0
    # Not a number compares with nothing.
    norm, is_bad = max_over_world(world, [norm if math.isfinite(norm) else -1.0, not math.isfinite(norm)])
    if divided is None or divided.update.waiting is None or divided.update.waiting.step != newest or step == newest:
        return step
    update, divided.update.waiting = divided.update.waiting, None
    with at_work():
        _apply(replica, divided, update, math.inf if is_bad else norm)
        replica.advance(newest)
    replica.shards.note_update(math.inf if is_bad else norm, update.after)
    if update.loss_sum is not None:
        replica.exchanges.steps.note_own(float(update.loss_sum) * update.loss_factor)
    replica.shards.has_whole_weights = False
    return newest


@torch.no_grad()
def _apply(replica: Replica, divided: DividedOptimizers, update: WaitingUpdate, norm: float) -> None:
    state, scaler = replica.state, replica.scaler
    if not update.is_clipped and update.clip is not None:
        clip_gradients(state.updated_by(update.optimizers), norm, update.clip)
    with divided.updating():
        if scaler is not None:
            step_unscaled(scaler, update.optimizers, not math.isfinite(norm))
        for optimizer in update.optimizers if scaler is None else ():
            optimizer.step()
    divided.drop_gradients()
    for buffer, after_step in zip(state.buffers().values(), update.buffers, strict=True):
        buffer.copy_(after_step)


@dataclass(frozen=True)
class OldParts:
    """How the model was divided until now, as all ranks of a new world know it."""

    source: int  # A rank that has a part of this layout.
    layout: ShardLayout
    holders: Sequence[Sequence[int]]  # By part, the ranks that keep it.


def choose_parts_source(world: World, divided: DividedOptimizers | None, step: int) -> int | None:
    """Return a rank with the layout of which most parts are there, of the newest step; None if no rank has a state.

    A rank that was frozen may be at the newest step too, with a layout of an earlier world. `divided` is None on ranks
    without a state.
    """
    layout = 0 if divided is None else zlib.crc32(repr(divided.layout).encode())
    rows = gather_integers(world, [divided is not None, step, layout])
    newest = max((own for has_state, own, _ in rows if has_state), default=0)
    layouts = [(layout, rank) for rank, (has_state, own, layout) in enumerate(rows) if has_state and own == newest]
    if not layouts:
        return None
    usual = Counter(layout for layout, _ in layouts).most_common(1)[0][0]
    return next(rank for layout, rank in layouts if layout == usual)


def complete_weights(replica: Replica, world: World, source: int, is_at_step: bool) -> OldParts:
    """Give the ranks that are at the newest step all weights of it: some may not have arrived before the loss.

    Raise `NoSurvivingState` if a part was lost with all ranks that kept it.
    """
    divided = replica.state.divided
    layout = _broadcast_layout(world, source, divided.layout if divided is not None else None)
    holders = _find_holders(world, layout, divided if is_at_step else None)
    lost = [owner for owner, ranks in enumerate(holders) if not ranks]
    if lost:
        raise NoSurvivingState(
            f"the parts of {rank_list(lost)} of the optimizers' moments were lost",
            why="no other rank kept a copy of them: sync.copies is 0, or both ranks that had one were lost",
            fix="the run returns to its newest checkpoint; to lose no step next time: --set sync.copies=1",
        )
    parts = OldParts(source, layout, holders)
    if replica.config.sync.shard_level == 3:
        return parts
    digest = combine_digests(tensor_digests(replica.state.weights())) if is_at_step else 0
    rows = gather_integers(world, [is_at_step, replica.shards.has_whole_weights, digest])
    present = [row for row in rows if row[0]]
    if all(is_whole for _, is_whole, _ in present) and len({digest for *_, digest in present}) == 1:
        return parts
    flats = [flat(parameter) for parameter in divided_parameters(replica.config.sync, replica.state).values()]
    for index, bucket in enumerate(layout.buckets):
        weights = Spread(bucket, [flats[number] for number in bucket.parameters])
        for owner, ranks in enumerate(holders):
            begin, end = bucket.part(owner)
            if divided is not None and world.rank == ranks[0]:
                divided.publish(index, owner, weights)
            # Also where this rank keeps the part itself: its bits are the same, or nearly so on another processor.
            broadcast_tensors(world, ranks[0], list(weights.views(begin, end)), keep=is_at_step)
    replica.shards.has_whole_weights = True
    return parts


def move_parts(replica: Replica, world: World, parts: OldParts, common: StateTree) -> DividedOptimizers:
    """Divide the optimizers anew over a world, with the moments of the ranks that keep them; return this rank's.

    `common` is what all ranks have in common of the optimizers' state. The old pieces stay as they are.
    """
    sync, old = replica.config.sync, replica.state.divided
    known = _keys_as_json(old, sync.shard_level) if old is not None and world.rank == parts.source else {}
    keys = broadcast_json(world, parts.source, known)
    layout, replica.shards.wants_copies = agree_on_layout(sync, replica.state, world, replica.shards.wants_copies)
    new = divide(sync, replica.state, layout, world)
    new.update.last_norm = old.update.last_norm if old is not None else -1.0
    for optimizer, document in zip(replica.state.optimizers, common.values, strict=False):
        new.load(optimizer, unflatten(document, common.tensors))
    names = list(new.parameters)
    for index, (before, after) in enumerate(zip(parts.layout.buckets, layout.buckets, strict=True)):
        moves = plan_moves(before, parts.holders, after, [layout.held_by(rank) for rank in range(world.size)])
        in_bucket = [tuple(key) for number in after.parameters for key in keys.get(names[number], ())]
        for key, dtype in sorted(set(in_bucket)):
            _move(world, moves, index, key, getattr(torch, dtype), old, new)
    return new


def _move(
    world: World,
    moves: Sequence[Move],
    bucket: int,
    key: str,
    dtype: torch.dtype,
    old: DividedOptimizers | None,
    new: DividedOptimizers,
) -> None:
    """Send the moments of one bucket to where they are kept from now on."""
    sent: list[Tensor] = []
    sizes, received_sizes = [0] * world.size, [0] * world.size
    for target in range(world.size):
        for move in moves:
            if move.source != world.rank or move.target != target or old is None:
                continue
            numbers = old.read(bucket, key, move.begin, move.end, dtype)
            if target == world.rank:
                new.write(bucket, key, move.begin, numbers)
            else:
                sent.append(numbers)
                sizes[target] += len(numbers)
    incoming = [move for move in moves if move.target == world.rank and move.source != world.rank]
    for move in incoming:
        received_sizes[move.source] += move.end - move.begin
    if world.size == 1:
        return
    # A number for itself: gloo takes no message without any.
    sizes[world.rank] = received_sizes[world.rank] = 1
    place = sum(sizes[: world.rank])
    flat_sent = torch.cat([*sent, torch.zeros(0, dtype=dtype)])
    outgoing = torch.cat([flat_sent[:place], torch.zeros(1, dtype=dtype), flat_sent[place:]])
    arrived = torch.empty(sum(received_sizes), dtype=dtype)
    work = dist.all_to_all_single(arrived, outgoing, received_sizes, sizes, group=world.group, async_op=True)
    await_work(work, world.release)
    parts = list(arrived.split(received_sizes))
    # Each sender sends its moves in their order.
    for move in incoming:
        count = move.end - move.begin
        new.write(bucket, key, move.begin, parts[move.source][:count])
        parts[move.source] = parts[move.source][count:]


def _broadcast_layout(world: World, source: int, own: ShardLayout | None) -> ShardLayout:
    document: dict[str, Any] = {}
    if world.rank == source and own is not None:
        buckets = [[bucket.parameters, bucket.sizes, bucket.cuts] for bucket in own.buckets]
        document = {"buckets": buckets, "ranks": own.ranks, "copy_shift": own.copy_shift}
    document = broadcast_json(world, source, document)
    layouts = (BucketLayout(*(tuple(numbers) for numbers in bucket)) for bucket in document["buckets"])
    return ShardLayout(tuple(layouts), document["ranks"], document["copy_shift"])


def _find_holders(world: World, layout: ShardLayout, divided: DividedOptimizers | None) -> list[list[int]]:
    """Return, for every part of the old layout, the ranks of this world that keep it."""
    own = divided.rank if divided is not None and divided.layout == layout else -1
    holders: list[list[int]] = [[] for _ in range(layout.ranks)]
    for rank, [old_rank] in enumerate(gather_integers(world, [own])):
        for owner in layout.held_by(old_rank) if old_rank >= 0 else ():
            if rank not in holders[owner]:
                holders[owner].append(rank)
    return holders


def _keys_as_json(divided: DividedOptimizers, level: int) -> Mapping[str, list[tuple[str, str]]]:
    """Return the names and types of what is divided, by parameter."""
    named = divided.divided_keys()
    if level == 3:
        named = {name: {WEIGHT: divided.parameters[name].dtype, **keys} for name, keys in named.items()}
    return {
        name: [(key, str(dtype).removeprefix("torch.")) for key, dtype in keys.items()] for name, keys in named.items()
    }
