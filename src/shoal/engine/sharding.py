"""How the ranks of a world divide a model: they agree on a layout, and make the exchanges of its parts."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.engine.sharded_state import DividedOptimizers, check_elementwise
from shoal.engine.training_state import TrainingState
from shoal.sync.outer import EveryStep, OuterSync
from shoal.sync.replicas import gather_integers
from shoal.sync.sharded.exchange import ExactPart, PartExchange, make_codecs
from shoal.sync.sharded.layout import Piece, ShardLayout, choose_copy_shift, fill_buckets, lay_out_parts
from shoal.sync.sharded.sync import ShardedSync, UpdatedWeights
from shoal.sync.shared_memory.ddp import in_backward_order
from shoal.sync.world import World, with_second_group


def divided_parameters(state: TrainingState) -> dict[str, nn.Parameter]:
    """Return the trained parameters in the order of backward, by name."""
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    return {names[parameter]: parameter for parameter in in_backward_order(state.model)}


def agree_on_layout(
    config: SyncConfig, state: TrainingState, world: World, wants_copies: bool
) -> tuple[ShardLayout, bool]:
    """Divide the model over the ranks of a world, and return whether any rank wants copies. All of them call this."""
    parameters = list(divided_parameters(state).values())
    sizes = [parameter.numel() for parameter in parameters]
    bucket_mb = config.bucket_mb or bucket_mb_for(sum(parameter.nbytes for parameter in parameters))
    kinds = [parameter.dtype for parameter in parameters]
    buckets = fill_buckets(sizes, kinds, bucket_mb * 2**20 / parameters[0].itemsize)
    [has_copies] = map(max, zip(*gather_integers(world, [wants_copies]), strict=True))
    shift = choose_copy_shift(world.nodes or [world.node] * world.size) if has_copies and world.size > 1 else 0
    return lay_out_parts(sizes, buckets, [1 / world.size] * world.size, shift), bool(has_copies)


def wants_copies(config: SyncConfig, ranks: int) -> bool:
    """Return whether a second rank keeps each part, in a run that is launched with this many ranks.

    With two ranks copies would be everything on both: no less memory than DDP.
    """
    return ranks > 2 if config.copies is None else config.copies > 0


def divide(config: SyncConfig, state: TrainingState, layout: ShardLayout, world: World) -> DividedOptimizers:
    """Return the optimizers with this rank's pieces of the model. What they know already is divided with them."""
    check_elementwise(state.optimizers, config.mode)
    parameters = divided_parameters(state)
    if world.size == 1 or not make_codecs(config.wire).is_lossy:
        return DividedOptimizers(state.optimizers, parameters, layout, world.rank)
    exact = _make_exact_parts(layout, world.rank, list(parameters.values()))

    def numbers(bucket: int, owner: int, place: Piece) -> Tensor:
        return exact[bucket, owner].view(place.offset, place.offset + place.count)

    return DividedOptimizers(state.optimizers, parameters, layout, world.rank, numbers, exact)


def _make_exact_parts(
    layout: ShardLayout, rank: int, parameters: Sequence[nn.Parameter]
) -> Mapping[tuple[int, int], ExactPart]:
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
    exchange = None
    if world.size > 1:
        dtypes = [parameters[bucket.parameters[0]].dtype for bucket in layout.buckets]
        exchange = PartExchange(
            with_second_group(world, config.timeout_s), layout, config.wire, _are_alike(world), dtypes
        )
    sync = ShardedSync(
        state.model, world, layout, parameters, divided.held, exchange, config.shard_level, may_leave_out
    )
    sync.rounds = rounds
    if exchange is None:
        return sync, EveryStep()
    sync.weights = UpdatedWeights(state.model, world, layout, parameters, exchange, divided.exact)
    return sync, sync.weights


def _are_alike(world: World) -> bool:
    """Return whether all ranks make the same update of the same numbers, to the bit."""
    kind = (world.device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), str(torch.__version__))
    own = zlib.crc32(repr(kind).encode())
    return len({number for [number] in gather_integers(world, [own])}) == 1
