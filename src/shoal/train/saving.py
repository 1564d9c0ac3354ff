"""Checkpoints as all ranks write them together: each its own part, and one of a folder's ranks what is common."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping

from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import CheckpointError, ShoalError
from shoal.events import FLUSH_S, FileMark
from shoal.sync.replicas import gather
from shoal.sync.world import barrier
from shoal.train.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    RankShards,
    load_moments,
    load_weights,
    moments,
    weights,
    write_part,
)
from shoal.train.trainer import Trainer

# SECTION train/snapshot
# What of a training is saved: what all replicas have in common, and where they differ each rank's own part.


_SYNC, _WIRE = "sync.", "wire."


def common_state(trainer: Trainer, parts: RankShards | None) -> Checkpoint:
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


def describe_parts(trainer: Trainer, mark: int) -> RankShards:
    """Batches are of one size since the common state was made: with another world a round begins anew."""
    progress, step = trainer.progress, trainer.outer.common_step(trainer.progress.step)
    cursor = progress.cursor - (progress.step - step) * trainer.global_batch
    return RankShards(trainer.world.size, mark, step, cursor, trainer.outer.flying)


def _common_beside_weights(trainer: Trainer) -> dict[str, Tensor]:
    return trainer.outer.state() if trainer.outer.drifts else moments(trainer.model, trainer.optimizer)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# Raise this when a checkpoint takes more than ten minutes to write.
WRITE_TIMEOUT_S = 600.0
_MARK_BITS = 62
_RETRY_S = 0.2


class Saver:
    def __init__(self, trainer: Trainer, folder: CheckpointFolder, saved_step: int) -> None:
        self._trainer = trainer
        self._folder = folder
        self._saved_step = saved_step
        self._ledger: FileMark | None = None

    def save(self, must: bool = False) -> None:
        """A full disk does not end a training that may still be saved later; one that `must` be saved it does."""
        own = own_state(self._trainer)
        is_wanted, parts = self._agree(own)
        if is_wanted:
            self._write(own, parts, must)
        # A slow disk is no dead peer: the others wait here, with a deadline of its own, and not in the next exchange.
        barrier(self._trainer.world, timeout_s=WRITE_TIMEOUT_S)

    def _agree(self, own: dict[str, Tensor]) -> tuple[bool, RankShards | None]:
        """Whether somebody has not saved this step yet, and what marks the parts if anybody has one."""
        is_unsaved = self._saved_step != self._trainer.progress.step
        told = gather(self._trainer.world, [is_unsaved, bool(own), secrets.randbits(_MARK_BITS)])
        has_parts = any(has_part for _, has_part, _ in told)
        return any(unsaved for unsaved, _, _ in told), describe_parts(self._trainer, told[0][2]) if has_parts else None

    def _write(self, own: dict[str, Tensor], parts: RankShards | None, must: bool) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        stages: list[Callable[[], object]] = [lambda: self._begin(step, must)]
        if parts is not None:
            folder, rank, mark = self._folder.unfinished(step), trainer.world.rank, parts.mark
            stages.append(lambda: write_part(folder, rank, own, mark))
        stages.append(lambda: self._complete(parts, must))
        began = time.perf_counter()
        problem = self._together(stages)
        if problem is not None:
            if must:
                raise problem
            trainer.recorder.warn(problem)
            return
        self._saved_step = step
        if trainer.world.keeps_files:
            trainer.recorder.event("checkpoint", step=step, write_s=round(time.perf_counter() - began, 6))

    def _begin(self, step: int, must: bool) -> None:
        """The ledger is on disk before the checkpoint that relies on it; so are every rank's events."""
        recorder = self._trainer.recorder
        if self._trainer.world.keeps_files:
            self._ledger = recorder.secure(FLUSH_S if must else 0.0)
            write_patiently(lambda: self._folder.begin(step), FLUSH_S if must else 0.0)
        else:
            with contextlib.suppress(CheckpointError):
                recorder.secure()

    def _complete(self, parts: RankShards | None, must: bool) -> None:
        if not self._trainer.world.keeps_files:
            return

        def write() -> None:
            # Written in minutes, perhaps: a rank that slept meanwhile must not put an old state in the newest's place.
            fence, state = self._trainer.fence, common_state(self._trainer, parts)
            if not self._folder.unfinished(state.progress.step).is_dir():
                self._folder.begin(state.progress.step)
            self._folder.complete(state, may=fence.await_lease, ledger=self._ledger)

        # A failed try removes the folder, and with it the parts that other ranks have put there.
        write_patiently(write, FLUSH_S if must and parts is None else 0.0)

    def _together(self, stages: list[Callable[[], object]]) -> CheckpointError | None:
        """The first that goes wrong here is the last that is tried; everybody goes through all the same."""
        problem: CheckpointError | None = None
        for number, stage in enumerate(stages):
            if number and len(stages) > 2:
                barrier(self._trainer.world, timeout_s=WRITE_TIMEOUT_S)
            try:
                if problem is None:
                    stage()
            except CheckpointError as error:
                problem = error
        return problem


def write_patiently(write: Callable[[], object], for_s: float) -> None:
    """Tries again for a while: a disk that is full now may have room in some seconds."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            write()
            return
        except ShoalError as error:
            if not isinstance(error.__cause__, (OSError, SafetensorError)) or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
