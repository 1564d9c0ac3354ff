"""How replicas agree on parameters now and then, from the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from torch import nn

from shoal.config.schema import SyncConfig
from shoal.cost.buckets import bucket_mb_for
from shoal.sync.flight import Exchange
from shoal.sync.fragments import cut_blocks, cut_pieces
from shoal.sync.outer import LAG_STEPS, EveryStep, Outer, Rounds
from shoal.sync.piece import AVERAGE, Descent, Piece
from shoal.sync.streaming import Streaming
from shoal.sync.wires import make_wire
from shoal.sync.world import World, beside


def make_outer(config: SyncConfig, model: nn.Module, world: World, weight: float) -> Outer:
    """`weight` is this rank's part of the tokens of a round. An average over one rank is that rank: plain training."""
    if not config.is_outer or (config.mode == "local" and world.size == 1):
        return EveryStep()
    descent = AVERAGE if config.mode == "local" else Descent(config.outer_lr, config.outer_momentum)
    parameters = dict(model.named_parameters())
    if config.mode == "streaming":
        cut = cut_blocks([(name, parameter.numel()) for name, parameter in parameters.items()], config.fragments)
        fragments = _pieces(config, parameters, cut, descent)
        world = beside(world, config.timeout_s * (1 + LAG_STEPS))
        exchange = _exchange(config, world, weight, parameters)
        return Streaming(fragments, exchange, config.round_steps, config.overlap_steps, descent)
    [pieces] = _pieces(config, parameters, [list(parameters)], descent)
    return Rounds(pieces, _exchange(config, world, weight, parameters), config.round_steps, descent)


def _exchange(config: SyncConfig, world: World, weight: float, parameters: dict[str, nn.Parameter]) -> Exchange:
    return Exchange(world, make_wire(config.wire, world, parameters), weight, timed=config.measure != "off")


def _pieces(
    config: SyncConfig, parameters: dict[str, nn.Parameter], cut: Sequence[Sequence[str]], descent: Descent
) -> list[list[Piece]]:
    model_bytes = sum(parameter.nbytes for parameter in parameters.values())
    piece_bytes = int((config.bucket_mb or bucket_mb_for(model_bytes)) * 2**20)
    number = count()

    def pieces_of(names: Sequence[str]) -> Iterator[Piece]:
        for chosen in cut_pieces([(name, parameters[name].nbytes) for name in names], piece_bytes):
            yield Piece(next(number), {name: parameters[name] for name in chosen}, descent)

    return [list(pieces_of(names)) for names in cut]
