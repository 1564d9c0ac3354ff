"""A trainer's exchanges with the other ranks: made from the configuration, and replaced between two steps."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from shoal.config.schema import Config, SyncConfig
from shoal.cost.batch import Deal
from shoal.cost.sizes import grad_bytes
from shoal.model.gpt import GPT
from shoal.sync.agreement import make_outer
from shoal.sync.exchange import StepExchange
from shoal.sync.gradients import Alone, GradientSync, make_gradient_sync
from shoal.sync.outer import Outer
from shoal.sync.wires import made_by
from shoal.sync.world import World, bear_with
from shoal.train.trainer import Trainer


@dataclass(frozen=True)
class Exchanges:
    sync: GradientSync
    outer: Outer
    steps: StepExchange


def make_exchanges(config: Config, model: GPT, world: World, deal: Deal) -> Exchanges:
    share = deal.share(world.rank)
    outer = make_outer(config.sync, model, world, weight=share / deal.global_batch)
    if config.sync.is_outer:
        sync: GradientSync = Alone(model, own_tokens=share * config.model.seq_len)
    else:
        sync = make_gradient_sync(config.sync, model, world, tokens=deal.micro_batch * config.model.seq_len)
    bear_with(world, exchange_timeout_s(config.sync, outer))
    return Exchanges(sync, outer, StepExchange(world, outer.lag_steps))


def exchange_timeout_s(sync: SyncConfig, outer: Outer) -> float:
    """A rank that may be so many steps ahead waits for as many steps of the slowest before a rank counts as dead."""
    return sync.timeout_s * (1 + outer.lag_steps)


def change_exchanges(trainer: Trainer, sync: SyncConfig) -> None:
    """Between two steps, when all ranks are known to have done the last one: what the model holds is common to all."""
    trainer.sync.close()
    # What is not needed any more goes before new room is taken: gradients of 124M parameters are 496 MB.
    trainer.sync = Alone(trainer.model)
    gc.collect()
    trainer.config = trainer.config.model_copy(update={"sync": sync})
    made = make_exchanges(trainer.config, trainer.model, trainer.world, trainer.batches.shard.deal)
    trainer.sync, trainer.outer, trainer.exchange = made.sync, made.outer, made.steps
    trainer.outer.rewind(trainer.progress.step, flying=0)


def describe_exchanges(trainer: Trainer) -> dict[str, object]:
    """What `start` and `choice` events say of it."""
    shapes = shapes_of(trainer.model)
    sync = trainer.config.sync
    return {
        "sync": sync.mode,
        "wire": sync.wire,
        "grad_bytes": grad_bytes(shapes, sync.wire) + trainer.sync.extra_bytes,
        "round_steps": trainer.outer.round_steps,
        "wire_made_by": made_by(sync.wire),
        "inside": trainer.sync.inside.way,
        "inside_note": trainer.sync.inside.note,
    }


def shapes_of(model: GPT) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in model.parameters())
