"""The training loop: steps, periodic tasks, checkpoints, comparison, garbage collection, recovery, and a clean end.

`Loop.steps` yields before every step and continues when the step is done. What happens in between, the forward and
backward passes of the step, belongs to the program that drives the engine.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil
from safetensors import SafetensorError
from safetensors.torch import save_file

from shoal.engine.checkpoint import CheckpointFolder, savable
from shoal.engine.divergence import Comparison
from shoal.engine.observers import StepObserver
from shoal.engine.part_copies import describe_parts
from shoal.engine.recover import GenerationChanger
from shoal.engine.replica import Replica
from shoal.engine.saving import WRITE_TIMEOUT_S, Saver, replica_state, write_patiently
from shoal.engine.step import DoneStep, TrainingStep
from shoal.engine.training_state import digest_tensors
from shoal.errors import RunFailed, UsageError
from shoal.events import FLUSH_S
from shoal.host.node_stats import ThreadTimes, usable_cpus
from shoal.run_folder import RunFolder
from shoal.sync.world import barrier

# `ru_maxrss` is in kilobytes on Linux, in bytes on macOS.
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Task:
    """A function that all ranks call after the steps where it is due, and after the last one. It may exchange."""

    name: str
    is_due: Callable[[Replica], bool]  # After the step that was done last.
    function: Callable[[], object]


class LoadMeter:
    """Measures the load of process and machine: other programs spoil a measurement, and a full memory ends it."""

    def __init__(self) -> None:
        self._began = self._read()
        self._threads = ThreadTimes()

    def since_start(self) -> dict[str, float]:
        """Return seconds of wall time, of this process's CPU time and of all cores at work, and the peak memory.

        Also how many threads wanted a processor and waited for one on average, and the processors for them, as
        `NodeStats` has them.
        """
        names = ("wall_s", "cpu_s", "machine_busy_s")
        spent = {name: round(now - then, 3) for name, now, then in zip(names, self._read(), self._began, strict=True)}
        wanted, waited = self._threads.since_last()
        cpus, run_cpus = usable_cpus()
        spent |= {"wanted": round(wanted, 3), "waited": round(waited, 3), "cpus": len(cpus), "run_cpus": len(run_cpus)}
        return {**spent, "peak_memory_bytes": _MAXRSS_UNIT_BYTES * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

    def _read(self) -> tuple[float, float, float]:
        now, times = time.perf_counter(), psutil.cpu_times()
        # Linux samples times of work at the ticks of its clock, far too many where a quota stops a program again and
        # again; times without work it measures. Waiting for a disk or for the hypervisor is none.
        passive = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "steal"))
        return now, time.process_time(), (psutil.cpu_count() or 1) * now - passive


class StepOutcome:
    """How a step ended, as the program that did it reports."""

    def __init__(self) -> None:
        self.done: DoneStep | None = None
        self.error: Exception | None = None  # A lost peer: the step is repeated in the next generation.
        self.is_repeated = False  # The step comes again in the same generation.


class Loop:
    def __init__(
        self,
        replica: Replica,
        step: TrainingStep,
        run: RunFolder,
        observers: Sequence[StepObserver] = (),
        tasks: Sequence[Task] = (),
        membership: GenerationChanger | None = None,
    ) -> None:
        # `shoal verify` would compare the final state of an earlier launch with that of this one.
        run.state(replica.world.id).unlink(missing_ok=True)
        self._replica = replica
        self._step = step
        self._run = run
        self._observers = observers
        self._tasks = tasks
        # Enters the next world when this one breaks; without it, an error ends the training.
        self._membership = membership
        checkpoints = CheckpointFolder(run.checkpoints, replica.config.train.keep_checkpoints)
        self._saver = Saver(replica, checkpoints, replica.progress.step, step.add_disk_time)
        self._comparison = Comparison(replica, checkpoints, step.settle)
        self.is_finished = False  # The last step is done, and not only those up to a request to stop.

    def steps(self) -> Iterator[StepOutcome]:
        """Yield for every step of the training, again for one that lost a peer; return after a clean end."""
        # Collect garbage at the same step on every rank: a collection on one rank makes all others wait.
        gc.collect()
        gc.disable()
        load = LoadMeter()
        try:
            while True:
                try:
                    yield from self._steps_of_generation()
                    self._end(load)
                    return
                except Exception as error:
                    if self._membership is None:
                        raise
                    failure = error
                self._membership.change_generation(failure)
        finally:
            gc.enable()

    def _steps_of_generation(self) -> Iterator[StepOutcome]:
        replica = self._replica
        wants_stop = self._after_step(DoneStep())
        while replica.progress.step < replica.steps.last_step and not wants_stop:
            outcome = StepOutcome()
            yield outcome
            if outcome.error is not None:
                raise outcome.error
            if outcome.is_repeated:
                continue
            if outcome.done is None:
                raise UsageError(
                    f"step {replica.progress.step + 1} was not done",
                    why="the loop went on to the next step without step.update()",
                    fix="do every step of the session: with step: … step.update()",
                )
            wants_stop = self._after_step(outcome.done)
            replica.leave_at_boundary()
        self._step.settle()
        barrier(replica.world)
        replica.recorder.commit()

    def _after_step(self, done: DoneStep) -> bool:
        """Do what is due after the current step, once, also if the last world broke before it was done.

        Return whether any rank wants to stop.
        """
        replica, step, train = self._replica, self._replica.progress.step, self._replica.config.train
        wants_stop = done.wants_stop
        if step == replica.periodic.done_step:
            return wants_stop
        if step < replica.steps.last_step:
            for observer in self._observers:
                observer.after_step(done)
        for task in self._tasks:
            if task.is_due(replica):
                self._run_task(task)
                replica.periodic.tasks_done[task.name] = step
        if step % train.checkpoint_every == 0 or replica.periodic.best is not None:
            wants_stop |= self._checkpoint()
        elif self._comparison.is_due(step):
            self._comparison.compare()
        if step % train.gc_every == 0:
            gc.collect()
        replica.periodic.done_step, replica.periodic.is_judged = step, False
        return wants_stop

    def _run_task(self, task: Task) -> None:
        periodic = self._replica.periodic
        with self._replica.shards.whole_weights(self._replica.outer):
            periodic.running = task.name
            try:
                task.function()
            finally:
                periodic.running = ""

    def _checkpoint(self, must: bool = False) -> bool:
        """Save a checkpoint; return whether any rank wants to stop."""
        # A resumed run skips these steps: all ranks must have done them, and the ledger must have them.
        wants_stop = self._step.settle()
        barrier(self._replica.world)
        self._replica.recorder.commit()
        if self._comparison.compare(must):
            self._saver.save(must)
        self._replica.periodic.best = None
        return wants_stop

    def _end(self, load: LoadMeter) -> None:
        replica, step = self._replica, self._replica.progress.step
        self.is_finished = step >= replica.steps.last_step
        is_due = self.is_finished
        due = [task for task in self._tasks if is_due and replica.periodic.tasks_done.get(task.name) != step]
        for task in due:
            self._run_task(task)
        self._checkpoint(must=True)
        # Not before: a task may have asked for this checkpoint.
        replica.periodic.tasks_done |= dict.fromkeys((task.name for task in due), step)
        replica.recorder.finish()
        if self.is_finished:
            self._save_state(step)
        replica.shards.end()
        barrier(replica.world, timeout_s=WRITE_TIMEOUT_S)
        status = "finished" if self.is_finished else "interrupted"
        is_early = self.is_finished and step < replica.config.train.steps
        replica.recorder.event("end", step=step, status=status, is_early=is_early, **load.since_start())

    def _save_state(self, step: int) -> None:
        """Write this rank's final state, for `shoal verify` to compare."""
        replica = self._replica
        state = savable(replica_state(replica))
        path = self._run.state(replica.world.id)

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
        divided = replica.state.divided
        parts = describe_parts(divided, replica.world) if divided is not None else {}
        replica.recorder.event("digest", step=step, sha256=digest_tensors(state), **parts)
