"""Checkpoints as all ranks write them together: each its own part, and one of a folder's ranks what is common."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from torch import Tensor

from shoal.errors import CheckpointError
from shoal.sync.replicas import gather
from shoal.sync.world import barrier
from shoal.train.checkpoint import CheckpointFolder, Parts
from shoal.train.part import write_part
from shoal.train.snapshot import common_state, describe_parts, own_state
from shoal.train.trainer import Trainer

# Raise this when a checkpoint takes more than ten minutes to write.
WRITE_TIMEOUT_S = 600.0
_MARK_BITS = 62


class Saver:
    def __init__(self, trainer: Trainer, folder: CheckpointFolder, saved_step: int) -> None:
        self._trainer = trainer
        self._folder = folder
        self._saved_step = saved_step

    def save(self, must: bool = False) -> None:
        """A full disk does not end a training that may still be saved later; one that `must` be saved it does."""
        own = own_state(self._trainer)
        is_wanted, parts = self._agree(own)
        if is_wanted:
            self._write(own, parts, must)
        # A slow disk is no dead peer: the others wait here, with a deadline of its own, and not in the next exchange.
        barrier(self._trainer.world, timeout_s=WRITE_TIMEOUT_S)

    def _agree(self, own: dict[str, Tensor]) -> tuple[bool, Parts | None]:
        """Whether somebody has not saved this step yet, and what marks the parts if anybody has one."""
        is_unsaved = self._saved_step != self._trainer.progress.step
        told = gather(self._trainer.world, [is_unsaved, bool(own), secrets.randbits(_MARK_BITS)])
        has_parts = any(has_part for _, has_part, _ in told)
        return any(unsaved for unsaved, _, _ in told), describe_parts(self._trainer, told[0][2]) if has_parts else None

    def _write(self, own: dict[str, Tensor], parts: Parts | None, must: bool) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        stages: list[Callable[[], object]] = [lambda: self._begin(step)]
        if parts is not None:
            folder, rank, mark = self._folder.unfinished(step), trainer.world.rank, parts.mark
            stages.append(lambda: write_part(folder, rank, own, mark))
        stages.append(lambda: self._complete(parts))
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

    def _begin(self, step: int) -> None:
        if self._trainer.world.keeps_files:
            self._folder.begin(step)

    def _complete(self, parts: Parts | None) -> None:
        if self._trainer.world.keeps_files:
            # Written in minutes, perhaps: a rank that slept meanwhile must not put an old state in the newest's place.
            fence = self._trainer.fence
            self._folder.complete(common_state(self._trainer, parts), may=fence.await_lease)

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
