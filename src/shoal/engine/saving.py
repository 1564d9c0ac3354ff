"""Save a checkpoint from all ranks together: each rank its shard, and one rank of every folder the common state."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, RankShards, write_shard
from shoal.engine.replica import Replica
from shoal.engine.sharded_checkpoint import write_joined, write_joined_weights
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


def _common_state(replica: Replica, shards: RankShards | None) -> Checkpoint:
    """Return what all replicas have in common."""
    outer = replica.outer
    with outer.common():
        model = replica.common_weights()
    optimizer = StateTree(outer.state(), None) if outer.replicas_differ else replica.state.optimizer_state()
    return Checkpoint(
        replace(replica.progress, shares=replica.division.to_save(replica.world)), model, optimizer, shards
    )


def _own_state(replica: Replica) -> StateTree:
    """Return this rank's shard: what differs between replicas. Without tensors if nothing does."""
    own = {_SYNC + name: tensor for name, tensor in replica.sync.state().items()}
    own |= {_WIRE + name: tensor for name, tensor in replica.outer.own_state().items()}
    values: dict[str, Any] = {}
    if replica.outer.replicas_differ:
        optimizer = replica.state.optimizer_state()
        own |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.tensors.items()}
        values[_OPTIMIZER] = optimizer.values
    if replica.outer.differs_now:
        own |= replica.state.weights()
        if replica.round_start.schedule is not None:
            own |= {_SCHEDULE + name: tensor for name, tensor in replica.round_start.schedule.tensors.items()}
            values[_SCHEDULE] = replica.round_start.schedule.values
    return StateTree(own, values)


def load_own_state(replica: Replica, own: StateTree) -> None:
    """Load a shard over the common state, which has been loaded already."""
    replica.sync.load_state(_select(own.tensors, _SYNC))
    replica.outer.load_own_state(_select(own.tensors, _WIRE))
    if _OPTIMIZER in own.values:
        replica.state.load_optimizer_state(optimizer_of_shard(own))
        replica.mark_round_start(schedule_of_shard(own))
    if any(name.startswith("model.") for name in own.tensors):
        replica.state.load_weights(own.tensors)


def optimizer_of_shard(own: StateTree) -> StateTree:
    return StateTree(_select(own.tensors, _OPTIMIZER), own.values[_OPTIMIZER])


def schedule_of_shard(own: StateTree) -> StateTree | None:
    """Return the schedule at the start of the round in which a shard was saved."""
    if _SCHEDULE not in own.values:
        return None
    return StateTree(_select(own.tensors, _SCHEDULE), own.values[_SCHEDULE])


def replica_state(replica: Replica) -> dict[str, Tensor]:
    """Return what has the same bits on every rank: at the end of a training, and before that in `outer.common()`."""
    outer = replica.outer
    optimizer = outer.persistent_state() if outer.replicas_differ else replica.state.optimizer_state().tensors
    return {**replica.common_weights(), **optimizer}


def _describe_shards(replica: Replica, mark: int) -> RankShards:
    # All batches since the common state have one size: a round starts anew in another world.
    progress, step = replica.progress, replica.outer.common_step(replica.progress.step)
    cursor = progress.cursor - (progress.step - step) * replica.global_batch
    return RankShards(replica.world.size, mark, step, cursor, replica.outer.in_flight)


def _select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class Saver:
    def __init__(
        self,
        replica: Replica,
        folder: CheckpointFolder,
        saved_step: int,
        add_disk_time: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._replica = replica
        self._folder = folder
        self._saved_step = saved_step
        self._add_disk_time = add_disk_time  # Receives how long this rank wrote.
        self._ledger: FileMark | None = None
        self._joined_values: Any = None  # Of the optimizers of all ranks; their tensors are in the file.

    def save(self, must: bool = False) -> None:
        """Save the current step, unless all ranks have saved it. Without `must` a full disk is only a warning."""
        replica = self._replica
        own = _own_state(replica)
        is_unsaved = self._saved_step != replica.progress.step or replica.periodic.best is not None
        rows = gather_integers(replica.world, [is_unsaved, bool(own.tensors), secrets.randbits(_MARK_BITS)])
        has_shards = any(has_shard for _, has_shard, _ in rows)
        # All ranks use the mark that the first one has drawn.
        shards = _describe_shards(replica, mark=rows[0][2]) if has_shards else None
        if any(unsaved for unsaved, _, _ in rows):
            self._write(own, shards, must)
        # A slow disk is not a dead peer: the others wait here, with a longer timeout, and not in the next exchange.
        barrier(replica.world, timeout_s=WRITE_TIMEOUT_S)

    def _write(self, own: StateTree, shards: RankShards | None, must: bool) -> None:
        replica, step = self._replica, self._replica.progress.step
        stages: list[Callable[[], object]] = [lambda: self._begin(step, must)]
        if replica.state.divided is not None:
            stages.append(self._join)
        if shards is not None:
            folder, rank, mark = self._folder.unfinished(step), replica.world.rank, shards.mark
            stages.append(lambda: write_shard(folder, rank, own, mark))
        stages.append(lambda: self._complete(shards, must))
        began = time.perf_counter()
        problem = self._run_stages(stages)
        if problem is not None:
            if must:
                raise problem
            replica.recorder.warn(problem)
            return
        self._saved_step = step
        replica.initial.free_copy()
        if replica.world.keeps_files:
            replica.recorder.event("checkpoint", step=step, write_s=round(time.perf_counter() - began, 6))

    def _begin(self, step: int, must: bool) -> None:
        """Put the ledger and every rank's events on disk before the checkpoint that relies on them."""
        recorder = self._replica.recorder
        if self._replica.world.keeps_files:
            self._ledger = recorder.secure(FLUSH_S if must else 0.0)
            write_patiently(lambda: self._folder.begin(step), FLUSH_S if must else 0.0)
        else:
            with contextlib.suppress(CheckpointError):
                recorder.secure()

    def _join(self) -> None:
        """Write what the optimizers of all ranks know, which no rank has as a whole."""
        replica = self._replica
        files: tuple[Path | None, Path | None] = self._folder.unfinished_files(replica.progress.step)
        if not (replica.world.keeps_files and self._folder.unfinished(replica.progress.step).is_dir()):
            files = (None, None)
        self._joined_values = write_joined(replica.state, replica.shards.exchange, files[1])
        if replica.state.are_weights_divided:
            write_joined_weights(replica.state, replica.shards.exchange, files[0])

    def _complete(self, shards: RankShards | None, must: bool) -> None:
        if not self._replica.world.keeps_files:
            return

        def write() -> None:
            # Writing may take minutes: a rank that was suspended must not put an old state in place of a newer one.
            fence, state = self._replica.fence, _common_state(self._replica, shards)
            if self._replica.state.divided is not None:
                state = replace(state, optimizer=StateTree({}, self._joined_values), has_optimizer_file=True)
                state = replace(state, has_weights_file=self._replica.state.are_weights_divided)
            elif not self._folder.unfinished(state.progress.step).is_dir():
                self._folder.begin(state.progress.step)
            best = self._replica.periodic.best
            self._folder.complete(state, before_rename=fence.await_lease, ledger=self._ledger, best=best)

        # A failed attempt removes the folder, and with it the shards of other ranks: retry only without shards.
        can_retry = must and shards is None and self._replica.state.divided is None
        write_patiently(write, FLUSH_S if can_retry else 0.0)

    def _run_stages(self, stages: list[Callable[[], object]]) -> CheckpointError | None:
        """Run the stages with a barrier between them. After a local failure skip the work but join every exchange."""
        problem: CheckpointError | None = None
        for number, stage in enumerate(stages):
            if number and len(stages) > 2:
                barrier(self._replica.world, timeout_s=WRITE_TIMEOUT_S)
            try:
                if problem is None or stage == self._join:
                    began = time.perf_counter()
                    stage()
                    # Not the barriers: only this rank's own writing.
                    self._add_disk_time(time.perf_counter() - began)
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
