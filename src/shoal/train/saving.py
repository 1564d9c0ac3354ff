"""Save a checkpoint from all ranks together: each rank its shard, and one rank of every folder the common state."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping

from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import CheckpointError, ShoalError
from shoal.events import FLUSH_S, FileMark
from shoal.sync.replicas import gather_integers
from shoal.sync.world import barrier
from shoal.train.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    RankShards,
    load_moments,
    load_weights,
    moments,
    weights,
    write_shard,
)
from shoal.train.trainer import Trainer

# Raise this when a checkpoint takes more than ten minutes to write.
WRITE_TIMEOUT_S = 600.0
_MARK_BITS = 62
_RETRY_S = 0.2
# Prefixes of names in a shard.
_SYNC, _WIRE = "sync.", "wire."


def _common_state(trainer: Trainer, shards: RankShards | None) -> Checkpoint:
    """Return what all replicas have in common."""
    outer = trainer.outer
    with outer.common():
        model = weights(trainer.model)
    optimizer = outer.state() if outer.replicas_differ else moments(trainer.model, trainer.optimizer)
    return Checkpoint(trainer.progress, model, optimizer, shards)


def _own_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return this rank's shard: what differs between replicas. Empty if nothing does."""
    own = {_SYNC + name: tensor for name, tensor in trainer.sync.state().items()}
    own |= {_WIRE + name: tensor for name, tensor in trainer.outer.own_state().items()}
    if trainer.outer.replicas_differ:
        own |= moments(trainer.model, trainer.optimizer)
    if trainer.outer.differs_now:
        own |= weights(trainer.model)
    return own


def load_own_state(trainer: Trainer, own: Mapping[str, Tensor], step: int) -> None:
    """Load a shard over the common state, which has been loaded already."""
    trainer.sync.load_state(_select(own, _SYNC))
    trainer.outer.load_own_state(_select(own, _WIRE))
    if trainer.outer.replicas_differ:
        load_moments(trainer.model, trainer.optimizer, dict(own), step)
    if any(name.startswith("model.") for name in own):
        load_weights(trainer.model, dict(own))


def replica_state(trainer: Trainer) -> dict[str, Tensor]:
    """Return what has the same bits on every rank: at the end of a training, and before that in `outer.common()`."""
    outer = trainer.outer
    optimizer = outer.persistent_state() if outer.replicas_differ else moments(trainer.model, trainer.optimizer)
    return {**weights(trainer.model), **optimizer}


def _describe_shards(trainer: Trainer, mark: int) -> RankShards:
    # All batches since the common state have one size: a round starts anew in another world.
    progress, step = trainer.progress, trainer.outer.common_step(trainer.progress.step)
    cursor = progress.cursor - (progress.step - step) * trainer.global_batch
    return RankShards(trainer.world.size, mark, step, cursor, trainer.outer.in_flight)


def _select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Saver:
    def __init__(self, trainer: Trainer, folder: CheckpointFolder, saved_step: int) -> None:
        self._trainer = trainer
        self._folder = folder
        self._saved_step = saved_step
        self._ledger: FileMark | None = None

    def save(self, must: bool = False) -> None:
        """Save the current step, unless all ranks have saved it. Without `must` a full disk is only a warning."""
        trainer = self._trainer
        own = _own_state(trainer)
        is_unsaved = self._saved_step != trainer.progress.step
        rows = gather_integers(trainer.world, [is_unsaved, bool(own), secrets.randbits(_MARK_BITS)])
        has_shards = any(has_shard for _, has_shard, _ in rows)
        # All ranks use the mark that the first one has drawn.
        shards = _describe_shards(trainer, mark=rows[0][2]) if has_shards else None
        if any(unsaved for unsaved, _, _ in rows):
            self._write(own, shards, must)
        # A slow disk is not a dead peer: the others wait here, with a longer timeout, and not in the next exchange.
        barrier(trainer.world, timeout_s=WRITE_TIMEOUT_S)

    def _write(self, own: dict[str, Tensor], shards: RankShards | None, must: bool) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        stages: list[Callable[[], object]] = [lambda: self._begin(step, must)]
        if shards is not None:
            folder, rank, mark = self._folder.unfinished(step), trainer.world.rank, shards.mark
            stages.append(lambda: write_shard(folder, rank, own, mark))
        stages.append(lambda: self._complete(shards, must))
        began = time.perf_counter()
        problem = self._run_stages(stages)
        if problem is not None:
            if must:
                raise problem
            trainer.recorder.warn(problem)
            return
        self._saved_step = step
        if trainer.world.keeps_files:
            trainer.recorder.event("checkpoint", step=step, write_s=round(time.perf_counter() - began, 6))

    def _begin(self, step: int, must: bool) -> None:
        """Put the ledger and every rank's events on disk before the checkpoint that relies on them."""
        recorder = self._trainer.recorder
        if self._trainer.world.keeps_files:
            self._ledger = recorder.secure(FLUSH_S if must else 0.0)
            write_patiently(lambda: self._folder.begin(step), FLUSH_S if must else 0.0)
        else:
            with contextlib.suppress(CheckpointError):
                recorder.secure()

    def _complete(self, shards: RankShards | None, must: bool) -> None:
        if not self._trainer.world.keeps_files:
            return

        def write() -> None:
            # Writing may take minutes: a rank that was suspended must not put an old state in place of a newer one.
            fence, state = self._trainer.fence, _common_state(self._trainer, shards)
            if not self._folder.unfinished(state.progress.step).is_dir():
                self._folder.begin(state.progress.step)
            self._folder.complete(state, before_rename=fence.await_lease, ledger=self._ledger)

        # A failed attempt removes the folder, and with it the shards of other ranks: retry only without shards.
        write_patiently(write, FLUSH_S if must and shards is None else 0.0)

    def _run_stages(self, stages: list[Callable[[], object]]) -> CheckpointError | None:
        """Run the stages with a barrier between them. After a local failure skip the work but join every barrier."""
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
    """Retry a failed write for `for_s` seconds: a disk that is full now may have room soon."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            write()
            return
        except ShoalError as error:
            if not isinstance(error.__cause__, (OSError, SafetensorError)) or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
