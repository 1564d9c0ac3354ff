"""Save a checkpoint from all ranks together: each rank its shard, and one rank of every folder the common state."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, RankShards, write_shard
from shoal.engine.engine import Engine
from shoal.engine.training_state import StateTree
from shoal.errors import CheckpointError, ShoalError
from shoal.events import FLUSH_S, FileMark
from shoal.sync.replicas import gather_integers
from shoal.sync.world import barrier

# Raise this when a checkpoint takes more than ten minutes to write.
WRITE_TIMEOUT_S = 600.0
_MARK_BITS = 62
_RETRY_S = 0.2
# Prefixes of names in a shard.
_SYNC, _WIRE, _OPTIMIZER, _SCHEDULE = "sync.", "wire.", "inner.", "round_start."


def _common_state(engine: Engine, shards: RankShards | None) -> Checkpoint:
    """Return what all replicas have in common."""
    outer = engine.outer
    with outer.common():
        model = engine.common_weights()
    optimizer = StateTree(outer.state(), None) if outer.replicas_differ else engine.state.optimizer_state()
    return Checkpoint(replace(engine.progress, shares=engine.saved_shares()), model, optimizer, shards)


def _own_state(engine: Engine) -> StateTree:
    """Return this rank's shard: what differs between replicas. Without tensors if nothing does."""
    own = {_SYNC + name: tensor for name, tensor in engine.sync.state().items()}
    own |= {_WIRE + name: tensor for name, tensor in engine.outer.own_state().items()}
    values: dict[str, Any] = {}
    if engine.outer.replicas_differ:
        optimizer = engine.state.optimizer_state()
        own |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.tensors.items()}
        values[_OPTIMIZER] = optimizer.values
    if engine.outer.differs_now:
        own |= engine.state.weights()
        if engine.round_start is not None:
            own |= {_SCHEDULE + name: tensor for name, tensor in engine.round_start.tensors.items()}
            values[_SCHEDULE] = engine.round_start.values
    return StateTree(own, values)


def load_own_state(engine: Engine, own: StateTree) -> None:
    """Load a shard over the common state, which has been loaded already."""
    engine.sync.load_state(_select(own.tensors, _SYNC))
    engine.outer.load_own_state(_select(own.tensors, _WIRE))
    if _OPTIMIZER in own.values:
        engine.state.load_optimizer_state(optimizer_of_shard(own))
        engine.mark_round_start(schedule_of_shard(own))
    if any(name.startswith("model.") for name in own.tensors):
        engine.state.load_weights(own.tensors)


def optimizer_of_shard(own: StateTree) -> StateTree:
    return StateTree(_select(own.tensors, _OPTIMIZER), own.values[_OPTIMIZER])


def schedule_of_shard(own: StateTree) -> StateTree | None:
    """Return the schedule at the start of the round in which a shard was saved."""
    if _SCHEDULE not in own.values:
        return None
    return StateTree(_select(own.tensors, _SCHEDULE), own.values[_SCHEDULE])


def replica_state(engine: Engine) -> dict[str, Tensor]:
    """Return what has the same bits on every rank: at the end of a training, and before that in `outer.common()`."""
    outer = engine.outer
    optimizer = outer.persistent_state() if outer.replicas_differ else engine.state.optimizer_state().tensors
    return {**engine.common_weights(), **optimizer}


def _describe_shards(engine: Engine, mark: int) -> RankShards:
    # All batches since the common state have one size: a round starts anew in another world.
    progress, step = engine.progress, engine.outer.common_step(engine.progress.step)
    cursor = progress.cursor - (progress.step - step) * engine.global_batch
    return RankShards(engine.world.size, mark, step, cursor, engine.outer.in_flight)


def _select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Saver:
    def __init__(self, engine: Engine, folder: CheckpointFolder, saved_step: int) -> None:
        self._engine = engine
        self._folder = folder
        self._saved_step = saved_step
        self._ledger: FileMark | None = None

    def save(self, must: bool = False) -> None:
        """Save the current step, unless all ranks have saved it. Without `must` a full disk is only a warning."""
        engine = self._engine
        own = _own_state(engine)
        is_unsaved = self._saved_step != engine.progress.step
        rows = gather_integers(engine.world, [is_unsaved, bool(own.tensors), secrets.randbits(_MARK_BITS)])
        has_shards = any(has_shard for _, has_shard, _ in rows)
        # All ranks use the mark that the first one has drawn.
        shards = _describe_shards(engine, mark=rows[0][2]) if has_shards else None
        if any(unsaved for unsaved, _, _ in rows):
            self._write(own, shards, must)
        # A slow disk is not a dead peer: the others wait here, with a longer timeout, and not in the next exchange.
        barrier(engine.world, timeout_s=WRITE_TIMEOUT_S)

    def _write(self, own: StateTree, shards: RankShards | None, must: bool) -> None:
        engine, step = self._engine, self._engine.progress.step
        stages: list[Callable[[], object]] = [lambda: self._begin(step, must)]
        if shards is not None:
            folder, rank, mark = self._folder.unfinished(step), engine.world.rank, shards.mark
            stages.append(lambda: write_shard(folder, rank, own, mark))
        stages.append(lambda: self._complete(shards, must))
        began = time.perf_counter()
        problem = self._run_stages(stages)
        if problem is not None:
            if must:
                raise problem
            engine.recorder.warn(problem)
            return
        self._saved_step = step
        engine.mark_saved()
        if engine.world.keeps_files:
            engine.recorder.event("checkpoint", step=step, write_s=round(time.perf_counter() - began, 6))

    def _begin(self, step: int, must: bool) -> None:
        """Put the ledger and every rank's events on disk before the checkpoint that relies on them."""
        recorder = self._engine.recorder
        if self._engine.world.keeps_files:
            self._ledger = recorder.secure(FLUSH_S if must else 0.0)
            write_patiently(lambda: self._folder.begin(step), FLUSH_S if must else 0.0)
        else:
            with contextlib.suppress(CheckpointError):
                recorder.secure()

    def _complete(self, shards: RankShards | None, must: bool) -> None:
        if not self._engine.world.keeps_files:
            return

        def write() -> None:
            # Writing may take minutes: a rank that was suspended must not put an old state in place of a newer one.
            fence, state = self._engine.fence, _common_state(self._engine, shards)
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
                barrier(self._engine.world, timeout_s=WRITE_TIMEOUT_S)
            try:
                if problem is None:
                    began = time.perf_counter()
                    stage()
                    # Not the barriers: only this rank's own writing.
                    self._engine.disk_s += time.perf_counter() - began
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
