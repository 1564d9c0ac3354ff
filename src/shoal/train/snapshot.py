"""What of a training is saved: what all replicas have in common, and where they differ each rank's own part."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shoal.train.checkpoint import Checkpoint, Parts
from shoal.train.state import load_moments, load_weights, moments, weights
from shoal.train.trainer import Trainer

_SYNC, _WIRE = "sync.", "wire."


def common_state(trainer: Trainer, parts: Parts | None) -> Checkpoint:
    with trainer.outer.common():
        model = weights(trainer.model)
    return Checkpoint(trainer.progress, model, _common_beside_weights(trainer), parts)


def own_state(trainer: Trainer) -> dict[str, Tensor]:
    """Nothing where every rank has the same."""
    own = {_SYNC + name: tensor for name, tensor in trainer.sync.state().items()}
    own |= {_WIRE + name: tensor for name, tensor in trainer.outer.own_state().items()}
    if trainer.outer.drifts:
        own |= moments(trainer.model, trainer.optimizer)
    if trainer.outer.apart:
        own |= weights(trainer.model)
    return own


def load_own_state(trainer: Trainer, own: Mapping[str, Tensor], step: int) -> None:
    """Over what is common and has been loaded already."""
    trainer.sync.load_state(_below(own, _SYNC))
    trainer.outer.load_own_state(_below(own, _WIRE))
    if trainer.outer.drifts:
        load_moments(trainer.model, trainer.optimizer, dict(own), step)
    if any(name.startswith("model.") for name in own):
        load_weights(trainer.model, dict(own))


def replica_state(trainer: Trainer) -> dict[str, Tensor]:
    """What must have the same bits on every rank when a training has ended, and before that in `outer.common()`."""
    beside = trainer.outer.lasting() if trainer.outer.drifts else moments(trainer.model, trainer.optimizer)
    return {**weights(trainer.model), **beside}


def describe_parts(trainer: Trainer, mark: int) -> Parts:
    """Batches are of one size since the common state was made: with another world a round begins anew."""
    progress, step = trainer.progress, trainer.outer.common_step(trainer.progress.step)
    cursor = progress.cursor - (progress.step - step) * trainer.global_batch
    return Parts(trainer.world.size, mark, step, cursor, trainer.outer.flying)


def _common_beside_weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.outer.state() if trainer.outer.drifts else moments(trainer.model, trainer.optimizer)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
