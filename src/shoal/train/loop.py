"""The training loop: steps, periodic evaluation, checkpoints, comparison and garbage collection, and a clean end."""

from __future__ import annotations

import gc
import resource
import sys
import time
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from shoal.config.schema import Config
from shoal.data.prepare import read_data_facts
from shoal.data.sampling import Tokens, open_tokens, validation_batches, window_count
from shoal.errors import RunFailed
from shoal.events import FLUSH_S
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.sync.step_stats import sum_over_world
from shoal.sync.world import World, barrier
from shoal.train.checkpoint import CheckpointFolder, digest
from shoal.train.divergence import Comparison
from shoal.train.recover import GenerationChanger
from shoal.train.saving import WRITE_TIMEOUT_S, Saver, replica_state, write_patiently
from shoal.train.trainer import Trainer, split_inputs_targets

# `ru_maxrss` is in kilobytes on Linux, in bytes on macOS.
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@torch.no_grad()
def evaluate(model: GPT, tokens: Tokens, config: Config, micro_batch: int, world: World) -> float:
    """Return the mean loss per token over the first `eval_sequences` windows, the same on every rank."""
    seq_len = config.model.seq_len
    sequences = min(config.train.eval_sequences, window_count(len(tokens), seq_len))
    loss_sum, count = 0.0, 0
    model.eval()
    # Compiled blocks would be compiled again: without gradients, without dropout, with a shorter last batch.
    with model.run_eagerly():
        for rows in validation_batches(tokens, seq_len, sequences, micro_batch, world.rank, world.size):
            inputs, targets = split_inputs_targets(rows, world.device)
            loss_sum += model(inputs, targets).item()
            count += targets.numel()
    model.train()
    total_loss, total_count = sum_over_world(world, [loss_sum, float(count)])
    return total_loss / total_count


class LoadMeter:
    """Measures the load of process and machine: other programs spoil a measurement, and a full memory ends it."""

    def __init__(self) -> None:
        self._began = self._read()

    def since_start(self) -> dict[str, float]:
        """Return seconds of wall time, of this process's CPU time and of all cores at work, and the peak memory."""
        names = ("wall_s", "cpu_s", "machine_busy_s")
        spent = {name: round(now - then, 3) for name, now, then in zip(names, self._read(), self._began, strict=True)}
        return {**spent, "peak_memory_bytes": _MAXRSS_UNIT_BYTES * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # Guests are counted in user time already; waiting for a disk or for the hypervisor is not work.
        passive = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "steal", "guest", "guest_nice"))
        return time.perf_counter(), time.process_time(), sum(times) - passive


class Loop:
    def __init__(self, trainer: Trainer, run: RunFolder, membership: GenerationChanger | None = None) -> None:
        # `shoal verify` would compare the final state of an earlier launch with that of this one.
        run.state(trainer.world.id).unlink(missing_ok=True)
        self._trainer = trainer
        self._run = run
        # Enters the next world when this one breaks; without it, an error ends the training.
        self._membership = membership
        self._validation = open_tokens(Path(read_data_facts(run).val)).tokens
        checkpoints = CheckpointFolder(run.checkpoints, trainer.config.train.keep_checkpoints)
        self._saver = Saver(trainer, checkpoints, saved_step=trainer.progress.step)
        self._comparison = Comparison(trainer, checkpoints)

    def run(self) -> bool:
        """Train to the end, or until a rank wants to stop; return True if the end was reached."""
        # Collect garbage at the same step on every rank: a collection on one rank makes all others wait.
        gc.collect()
        gc.disable()
        load = LoadMeter()
        while True:
            try:
                return self._train(load)
            except Exception as error:
                if self._membership is None:
                    raise
                failure = error
            self._membership.change_generation(failure)

    def _train(self, load: LoadMeter) -> bool:
        trainer, last_step = self._trainer, self._trainer.config.train.steps
        wants_stop = self._run_periodic_tasks()
        while trainer.progress.step < last_step and not wants_stop:
            wants_stop = trainer.step()
            wants_stop |= self._run_periodic_tasks()
            trainer.leave_at_boundary()
        trainer.settle()
        barrier(trainer.world)
        trainer.recorder.commit()
        is_finished = trainer.progress.step >= last_step
        self._end(is_finished, load)
        return is_finished

    def _run_periodic_tasks(self) -> bool:
        """Do what is due after the current step, once, also if the last world broke before it was done.

        Return whether any rank wants to stop.
        """
        step, train = self._trainer.progress.step, self._trainer.config.train
        if step == self._trainer.periodic_done_step:
            return False
        wants_stop = False
        if step < train.steps:
            self._trainer.between_steps()
        if step % train.eval_every == 0:
            self._evaluate(step)
        if step % train.checkpoint_every == 0:
            wants_stop = self._checkpoint()
        elif self._comparison.is_due(step):
            self._comparison.compare()
        if step % train.gc_every == 0:
            gc.collect()
        self._trainer.mark_periodic_done(step)
        return wants_stop

    def _evaluate(self, step: int) -> None:
        trainer = self._trainer
        began = time.perf_counter()
        micro_batch = trainer.batch_plan.micro_batch
        with trainer.outer.common():
            loss = evaluate(trainer.model, self._validation, trainer.config, micro_batch, trainer.world)
        trainer.mark_evaluated(step)
        common_step = trainer.outer.common_step(step)
        older = {} if common_step == step else {"common_step": common_step}
        eval_s = round(time.perf_counter() - began, 6)
        trainer.recorder.event("eval", step=step, val_loss=loss, eval_s=eval_s, **older)

    def _checkpoint(self, must: bool = False) -> bool:
        """Save a checkpoint; return whether any rank wants to stop."""
        # A resumed run skips these steps: all ranks must have done them, and the ledger must have them.
        wants_stop = self._trainer.settle()
        barrier(self._trainer.world)
        self._trainer.recorder.commit()
        if self._comparison.compare(must):
            self._saver.save(must)
        return wants_stop

    def _end(self, is_finished: bool, load: LoadMeter) -> None:
        trainer, step = self._trainer, self._trainer.progress.step
        if is_finished and trainer.evaluated_step != step:
            self._evaluate(step)
        self._checkpoint(must=True)
        trainer.recorder.finish()
        if is_finished:
            self._save_state(step)
        barrier(trainer.world, timeout_s=WRITE_TIMEOUT_S)
        status = "finished" if is_finished else "interrupted"
        trainer.recorder.event("end", step=step, status=status, **load.since_start())

    def _save_state(self, step: int) -> None:
        """Write this rank's final state, for `shoal verify` to compare."""
        trainer = self._trainer
        state = replica_state(trainer)
        path = self._run.state(trainer.world.id)

        def write() -> None:
            try:
                save_file(state, path)
            except (OSError, SafetensorError) as error:
                raise RunFailed(
                    f"the training is done, but its state cannot be written to {path}: {error}",
                    why="the disk is full or read-only",
                    fix=f"free space (df -h {path.parent}), then resume the run",
                ) from error

        write_patiently(write, FLUSH_S)
        trainer.recorder.event("digest", step=step, sha256=digest(state))
