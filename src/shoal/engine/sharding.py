"""How the ranks of a world divide a model: they agree on a layout, and make the exchanges of its parts."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Sequence

import torch
from torch import nn

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.cost.sharding import held_fractions, part_shares
from shoal.engine.sharded_state import DividedOptimizers, check_elementwise
from shoal.engine.training_state import TrainingState
from shoal.host.memory import available_bytes
from shoal.sync.outer import EveryStep, OuterSync
from shoal.sync.replicas import gather_integers
from shoal.sync.sharded.exchange import ExactPart, Part, PartExchange, Spread, make_codecs
from shoal.sync.sharded.held import flat, give_memory, own_memory
from shoal.sync.sharded.layout import ShardLayout, choose_copy_shift, fill_buckets, lay_out_parts
from shoal.sync.sharded.modules import UnitWeights
from shoal.sync.sharded.sync import ShardedSync, UpdatedWeights
from shoal.sync.sharded.units import ModuleUnit, find_units
from shoal.sync.shared_memory.ddp import in_backward_order
from shoal.sync.world import World, with_second_group

# What each level divides, in copies of the weights: two moments of each, gradients too, weights too.
_DIVIDED_COPIES = {1: 2, 2: 3, 3: 4}


def divided_parameters(config: SyncConfig, state: TrainingState) -> dict[str, nn.Parameter]:
    """Return the trained parameters in the order of backward, by name; with ZeRO-3 one unit after the other."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    if config.shard_level == 3:
        return {names[p]: p for unit in _units(config, state) for p in unit.parameters}
    return {names[parameter]: parameter for parameter in in_backward_order(state.model)}


def _units(config: SyncConfig, state: TrainingState) -> list[ModuleUnit]:
    return find_units(state.model, config.units.split(",") if config.units else ())


def _buckets(config: SyncConfig, state: TrainingState, parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Return the buckets as numbers of parameters: the units of ZeRO-3, otherwise what fills a bucket."""
    if config.shard_level == 3:
        numbers = iter(range(len(parameters)))
        return [[next(numbers) for _ in unit.parameters] for unit in _units(config, state)]
    sizes = [parameter.numel() for parameter in parameters]
    bucket_mb = config.bucket_mb or bucket_mb_for(sum(parameter.nbytes for parameter in parameters))
    kinds = [parameter.dtype for parameter in parameters]
    return fill_buckets(sizes, kinds, bucket_mb * 2**20 / parameters[0].itemsize)


def agree_on_layout(
    config: SyncConfig, state: TrainingState, world: World, wants_copies: bool
) -> tuple[ShardLayout, bool]:
    """Divide the model over the ranks of a world, and return whether any rank wants copies. All of them call this.

    Parts follow the memory of the ranks where that is short. Where copies do not fit, there are none.
    """
    parameters = list(divided_parameters(config, state).values())
    sizes, buckets = [parameter.numel() for parameter in parameters], _buckets(config, state, parameters)
    rows = gather_integers(world, [wants_copies, _room_bytes(world) + _state_bytes(state, parameters)])
    has_copies, rooms = any(wanted for wanted, _ in rows), [room for _, room in rows]
    weight_bytes = sum(parameter.nbytes for parameter in parameters)
    divided_bytes = _DIVIDED_COPIES[config.shard_level] * weight_bytes
    fixed_bytes = (_DIVIDED_COPIES[3] - _DIVIDED_COPIES[config.shard_level]) * weight_bytes
    shift = choose_copy_shift(world.nodes or [world.node] * world.size) if has_copies else 0
    shares = part_shares(rooms, fixed_bytes, (2 if shift else 1) * divided_bytes)
    held = held_fractions(shares, copies=int(shift > 0), copy_shift=shift)
    if shift and any(fixed_bytes + part * divided_bytes > room for part, room in zip(held, rooms, strict=True)):
        shift, shares = 0, part_shares(rooms, fixed_bytes, divided_bytes)
    return lay_out_parts(sizes, buckets, shares, shift), has_copies


def _room_bytes(world: World) -> int:
    """Return what this rank can still take of its machine's memory, which the ranks of the machine share."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    return available_bytes() // max(1, world.local_size)


def _state_bytes(state: TrainingState, parameters: Sequence[nn.Parameter]) -> int:
    """Return the memory of this rank that weights and moments have now: they are divided anew."""
    weights = sum(parameter.untyped_storage().nbytes() for parameter in parameters)
    if state.divided is None:
        return weights
    exact = sum(part.numbers.nbytes for part in state.divided.exact.values())
    return (
        weights
        + exact
        + sum(t.nbytes for owner in state.divided.owners for t in state.divided.moments_of(owner).values())
    )


def wants_copies(config: SyncConfig, ranks: int) -> bool:
    """Return whether a second rank keeps each part, in a run that is launched with this many ranks.

    With two ranks copies would be everything on both: no less memory than DDP.
    """
    return ranks > 2 if config.copies is None else config.copies > 0


def divide(config: SyncConfig, state: TrainingState, layout: ShardLayout, world: World) -> DividedOptimizers:
    """Return the optimizers with this rank's pieces of the model. What they know already is divided with them."""
    check_elementwise(state.optimizers, config.mode)
    named = divided_parameters(config, state)
    parameters = list(named.values())
    parts: dict[tuple[int, int], Part] = {}
    exact: dict[tuple[int, int], ExactPart] = {}
    if world.size == 1:
        # It was taken away, if weights were divided in the world before.
        give_memory(parameters)
    elif config.shard_level == 3:
        own_memory(parameters)
        parts = _copy_parts(layout, world.rank, parameters)
    elif make_codecs(config.wire, config.shard_level).is_lossy:
        exact = _make_exact_parts(layout, world.rank, parameters)
    return DividedOptimizers(state.optimizers, named, layout, world.rank, parts, exact)


def _copy_parts(layout: ShardLayout, rank: int, parameters: Sequence[nn.Parameter]) -> dict[tuple[int, int], Part]:
    """Copy the weights of the parts that this rank keeps; zeros, where weights are divided already."""
    parts = {}
    for index, bucket in enumerate(layout.buckets):
        own = [parameters[number] for number in bucket.parameters]
        is_there = all(parameter.untyped_storage().nbytes() for parameter in own)
        for owner in layout.held_by(rank):
            begin, end = bucket.part(owner)
            numbers = torch.zeros(end - begin, dtype=own[0].dtype, device=own[0].device)
            if is_there:
                Spread(bucket, [flat(parameter) for parameter in own]).read(begin, end, numbers)
            parts[index, owner] = Part(begin, numbers)
    return parts


def _make_exact_parts(
    layout: ShardLayout, rank: int, parameters: Sequence[nn.Parameter]
) -> dict[tuple[int, int], ExactPart]:
    """Make the exact weights of the parts that this rank keeps, where all ranks have rounded ones."""
    parts = {}
    for index, bucket in enumerate(layout.buckets):
        like = parameters[bucket.parameters[0]].detach()
        for owner in layout.held_by(rank):
            begin, end = bucket.part(owner)
            parts[index, owner] = ExactPart(begin, like.new_zeros(end - begin))
    return parts


def make_sharded_exchanges(
    config: SyncConfig, state: TrainingState, world: World, rounds: int, may_leave_out: bool = False
) -> tuple[ShardedSync, OuterSync]:
    divided = state.divided
    assert divided is not None  # noqa: S101 - the replica has divided the model before
    layout, parameters = divided.layout, list(divided.parameters.values())
    exchange = units = None
    if world.size > 1:
        dtypes = [parameters[bucket.parameters[0]].dtype for bucket in layout.buckets]
        codecs = make_codecs(config.wire, config.shard_level)
        exchange = PartExchange(with_second_group(world, config.timeout_s), layout, codecs, are_alike(world), dtypes)
        if config.shard_level == 3:
            units = UnitWeights(_units(config, state), layout, world.rank, divided.parts, exchange)
    state.are_weights_divided = units is not None
    sync = ShardedSync(
        state.model, world, layout, parameters, divided.held, exchange, config.shard_level, units, may_leave_out
    )
    sync.rounds = rounds
    if exchange is None or units is not None:
        return sync, EveryStep()
    sync.weights = UpdatedWeights(state.model, world, layout, parameters, exchange, divided.exact)
    return sync, sync.weights


def are_alike(world: World) -> bool:
    """Return whether all ranks make the same update of the same numbers, to the bit."""
    kind = (world.device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), str(torch.__version__))
    own = zlib.crc32(repr(kind).encode())
    return len({number for [number] in gather_integers(world, [own])}) == 1
