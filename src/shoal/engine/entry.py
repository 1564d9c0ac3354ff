"""How a rank enters and leaves its run: with all others at a launch, or a generation that trains already."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.control.rank_messages import MEMBERSHIP_FD, EnterGeneration
from shoal.cost.batch_plan import world_batch
from shoal.engine.auto_sync import SyncChooser
from shoal.engine.environment import SessionStart
from shoal.engine.loop import Loop, Task
from shoal.engine.machine_trial import CorePins, MachineTrial, choose_cores, thread_ids
from shoal.engine.observers import SpeedObserver, StepObserver
from shoal.engine.part_copies import describe_risk
from shoal.engine.recorder import Recorder, last_event, last_step
from shoal.engine.recover import LOSS_KNOWN_S, GenerationChanger
from shoal.engine.replica import InitialState, Replica
from shoal.engine.start_training import (
    announce,
    describe_process,
    make_replica,
    make_timer,
    start_training,
    watch_node,
)
from shoal.engine.step import TrainingStep
from shoal.engine.training_state import StateTree, TrainingState
from shoal.errors import PeerLost, RunFailed, ShoalError
from shoal.host.network import link_mbps
from shoal.sync.communication import is_timeout, lost_peer
from shoal.sync.fence import Fence, GenerationEnded
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.membership_client import AgentConnection, MembershipClient
from shoal.sync.process_groups import drop_groups
from shoal.sync.replicas import flat_bytes
from shoal.sync.world import (
    RankIdentity,
    World,
    choose_interface,
    form_world,
    join_world,
    leave_world,
    unjoined_world,
)


@dataclass
class Hooks:
    """What a program does when its session begins."""

    # On every rank of a launch when the world has formed, before the first step.
    on_start: Callable[[], None] = lambda: None
    # On a rank that an agent started and that resumes nothing, before it meets the others.
    before_joining: Callable[[], None] = lambda: None
    # Returns more fields of this rank's `start` event, when it has entered its first world.
    describe: Callable[[], dict[str, object]] = dict


@dataclass
class Attached:
    """What a program trains."""

    state: TrainingState
    reset: Callable[[], None] | None = None  # Puts everything back to its state before the first step.


class Entry:
    """A rank with its replica, before `begin` outside of the training and after it a part of it."""

    def __init__(
        self,
        start: SessionStart,
        attached: Attached,
        hooks: Hooks,
        world: World,
        recorder: Recorder,
        initial: InitialState,
        fence: Fence | None = None,
        leave_out: Callable[[], None] | None = None,
    ) -> None:
        self.start = start
        self.hooks = hooks
        self.watch = watch_node(recorder, world)
        self.replica: Replica = make_replica(start.config, attached.state, world, recorder, fence, initial)
        if start.sharding == "modulo":
            # Equal shards are used up at the same time only by equal shares.
            self.replica.division.keep_equal()
        timer = make_timer(start.config, world)
        self.step = TrainingStep(
            self.replica, timer, start.stop, self.watch, start.seeds_steps, start.lower_rate_advice
        )
        self.speed = SpeedObserver(self.replica, self.watch, leave_out=leave_out)
        self.chooser = SyncChooser(self.replica, start.config.sync)
        self.trial: MachineTrial | None = None

    def begin(self) -> None:
        """Enter the world, and come to the state in which the training begins or continues."""
        raise NotImplementedError

    def make_loop(self, tasks: Collection[Task]) -> Loop:
        return self._loop(tasks, None)

    def leave(self) -> None:
        """Leave the world after the last step."""
        leave_world(self.replica.world)

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether the next generation can continue after this error."""
        return False

    def as_loss(self, error: BaseException) -> BaseException:
        """Return the loss of a peer that an error means which the program's own exchange has raised; else the error."""
        return error

    def close(self) -> None:
        shards = self.replica.shards.sync
        if shards is not None and shards.weights is not None:
            # After an error of the program too it sees whole weights: it may save them.
            with suppress(OSError, RuntimeError, ShoalError, GenerationEnded):
                shards.weights.complete()
        self.step.guard.close()
        self.watch.close()
        self.replica.recorder.close()

    def _loop(self, tasks: Collection[Task], membership: GenerationChanger | None) -> Loop:
        observers: list[StepObserver] = [self.speed, self.chooser, *([self.trial] if self.trial else [])]
        return Loop(self.replica, self.step, self.start.run, observers, tuple(tasks), membership)

    def _prepare_trial(self, cores: tuple[int, ...] | None, computing: Collection[int]) -> MachineTrial:
        """Pin this rank to its cores, if it has any, and let the first steps try what is better."""
        pins = CorePins(cores, computing)
        pins.set(is_pinned=True)
        self.trial = MachineTrial(self.replica, self.chooser, pins, self.speed)
        return self.trial

    def _start_training(self, computing: Collection[int], on_start: Callable[[], None]) -> None:
        """Begin a launch in a world that has formed, or continue from its newest checkpoint."""
        replica, run, resume = self.replica, self.start.run, self.start.resume
        # Before pinning: it has the number of cores that the machine gives this process.
        process = describe_process(replica.world)
        trial = self._prepare_trial(choose_cores(replica.world, replica.config.train.pin), computing)
        start_training(replica, self.chooser, run, resume)
        if resume:
            trial.recall(run)
        on_start()
        self._announce(process)
        if replica.world.is_main and (risk := describe_risk(replica)):
            replica.recorder.event("note", step=replica.progress.step, text=risk)

    def _call_on_start(self) -> None:
        replica = self.replica
        with self.step.guard.session_at_work():
            self.hooks.on_start()
        replica.settle_micro_batches()
        if replica.is_at_common_step:
            # What it changed belongs to the first round, and is not undone with it.
            replica.mark_round_start()

    def _announce(self, process: dict[str, Any]) -> None:
        placement, cpus = self.start.placement, self.trial and self.trial.cpus
        launcher = placement.launcher or ("torchrun" if placement.master_addr else "python")
        announce(self.replica, self.start.run, launcher=launcher, **process, cpus=cpus, **self.hooks.describe())


class StaticEntry(Entry):
    """Joins a world whose members do not change."""

    def __init__(self, start: SessionStart, attached: Attached, hooks: Hooks, device: torch.device) -> None:
        sync = start.config.sync
        warnings: list[ShoalError] = []
        # Threads that exist before the group forms: all others are gloo's.
        self._computing: Collection[int] = thread_ids() if start.world is None else ()
        world = start.world or join_world(
            start.placement, device, None, sync.join_timeout_s, sync.timeout_s, warnings.append
        )
        recorder = Recorder(start.run, world)
        if start.console is not None:
            recorder.on_event = start.console.show
        for warning in warnings:
            recorder.warn(warning)
        world = replace(world, warn=recorder.warn)
        super().__init__(start, attached, hooks, world, recorder, InitialState(attached.reset))

    def begin(self) -> None:
        self._start_training(self._computing, self._call_on_start)


class ElasticEntry(Entry):
    """Enters the run's generation: the first one of a launch, or one that trains already.

    A rank that was restarted, or that comes from a new machine, runs the same code: it copies the state.
    """

    def __init__(self, start: SessionStart, attached: Attached, hooks: Hooks, device: torch.device) -> None:
        placement, sync = start.placement, start.config.sync
        if placement.agent_fd is None:
            raise RunFailed("an agent started this rank without a store", why="that is a bug in shoal")
        connection = AgentConnection(int(os.environ[MEMBERSHIP_FD]))
        member = MembershipClient(connection, lambda: start.stop.wanted, start.note_fault)
        interface = choose_interface(placement)
        world = unjoined_world(placement, device)
        recorder = Recorder(start.run, world, member)
        # Where the model is divided for want of memory, there is none for a copy of it.
        folder = start.run.path if sync.is_sharded else None
        initial = InitialState(attached.reset or _keep_initial(attached.state, folder), is_copy=attached.reset is None)
        super().__init__(
            start, attached, hooks, world, recorder, initial, fence=member.fence, leave_out=member.send_too_slow
        )
        rate_mbps = placement.link_mbps or link_mbps(interface)
        self.membership = GenerationChanger(
            member=member,
            store=AgentStore(placement.agent_fd, timedelta(seconds=sync.join_timeout_s), member.is_superseded),
            place=RankIdentity(placement.node, device, interface, rate_mbps, member.release, recorder.warn),
            replica=self.replica,
            chooser=self.chooser,
            run=start.run,
            on_start=self._call_on_start,
            at_work=self.step.guard.session_at_work,
        )

    def begin(self) -> None:
        start, member = self.start, self.membership.member
        if not start.resume:
            with self.step.guard.session_at_work():
                self.hooks.before_joining()
        batch = start.config.sync.accumulate * world_batch(start.config.train, start.placement.world_size)
        member.send_ready(last_step(start.run.commits, start.placement.rank), max_ranks=batch)
        enter = member.await_enter()
        while enter.first and not self._try_to_begin(enter):
            # A rank or a machine was lost meanwhile: the others begin without it.
            enter = member.await_enter()
        if not enter.first:
            self._join_generation(enter)

    def make_loop(self, tasks: Collection[Task]) -> Loop:
        return self._loop(tasks, self.membership)

    def leave(self) -> None:
        self.membership.member.send_finished()
        drop_groups()

    def as_loss(self, error: BaseException) -> BaseException:
        """Take the error of a collective of the program itself for the loss that it means.

        A closed connection is one. After a timeout the agents' word decides: a rank of the program may have left the
        collective out.
        """
        loss = lost_peer(error)
        if loss is None:
            return error
        return loss if not is_timeout(loss) or self.membership.member.await_end(LOSS_KNOWN_S) else error

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether the next generation can continue after this error: a peer was lost, or the generation is over.

        An error of the program itself is none of these, unless the generation ended while it was raised: then the step
        is repeated, and the error comes again.
        """
        if not isinstance(error, Exception):
            return False
        return isinstance(error, PeerLost | GenerationEnded) or self.membership.member.fence.is_over

    def _try_to_begin(self, enter: EnterGeneration) -> bool:
        """Begin a launch; return False if a rank or a machine was lost before all ranks had begun."""
        try:
            self._enter_first_generation(enter)
        except Exception as error:
            self.membership.leave_launch(error)
            return False
        return True

    def _enter_first_generation(self, enter: EnterGeneration) -> None:
        """Form the first world of a launch, of all its ranks."""
        membership, replica, sync = self.membership, self.replica, self.replica.config.sync
        computing = thread_ids()
        world = form_world(enter, membership.store, membership.place, sync.join_timeout_s, sync.timeout_s)
        replica.enter_world(world, 0, 0)
        replica.recorder.enter_world(world, [])
        self._start_training(computing, self._start_membership)
        membership.record_entry(how="first")
        can_lose_parts = replica.shards.can_lose_parts(sync, world)
        membership.member.send_formed(enter.generation, 0.0, can_lose_parts=can_lose_parts)

    def _start_membership(self) -> None:
        self.membership.start()
        self.membership.member.fence.set_step(self.replica.outer.common_step(self.replica.progress.step))

    def _join_generation(self, enter: EnterGeneration) -> None:
        """Join a generation that trains already, on the cores of this rank's last start: its neighbours keep theirs."""
        membership, replica = self.membership, self.replica
        cpus = last_event(self.start.run.events(replica.world.id), "start").get("cpus")
        cores = tuple(cpus) if cpus and replica.config.train.pin != "off" else None
        self._prepare_trial(cores, thread_ids())
        membership.has_state = False
        began = time.perf_counter()
        while not membership.try_to_enter(enter, began):
            enter = membership.member.await_enter()
        self._announce(describe_process(replica.world))


def _keep_initial(state: TrainingState, folder: Path | None) -> Callable[[], None]:
    """Copy the state before the first step, to a file without a name in `folder` if that is given; return a function
    that puts it back."""
    optimizer = state.optimizer_state()
    # Not the tensors: they are those in use, and are freed when the model is divided.
    values = optimizer.values
    read_weights, read_moments = _copy(state.weights(), folder), _copy(optimizer.tensors, folder)

    def reset() -> None:
        state.load_weights(read_weights())
        state.reset_optimizers()
        state.load_optimizer_state(StateTree(read_moments(), values))

    return reset


def _copy(tensors: Mapping[str, Tensor], folder: Path | None) -> Callable[[], dict[str, Tensor]]:
    """Copy tensors, and return a function that returns the copies. On a full disk they are kept in memory."""
    if folder is not None:
        with suppress(OSError):
            return _copy_to_file(tensors, folder)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return lambda: copies


def _copy_to_file(tensors: Mapping[str, Tensor], folder: Path) -> Callable[[], dict[str, Tensor]]:
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as it may be read
    kinds = {name: (tensor.nbytes, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    try:
        for tensor in tensors.values():
            rest = memoryview(flat_bytes(tensor)).cast("B") if tensor.numel() else memoryview(b"")
            while len(rest):
                rest = rest[file.write(rest) or 0 :]
    except BaseException:
        file.close()
        raise

    def read() -> dict[str, Tensor]:
        file.seek(0)
        copies = {}
        for name, (count, dtype, shape) in kinds.items():
            copies[name] = tensor = torch.empty(shape, dtype=dtype)
            rest = memoryview(flat_bytes(tensor)).cast("B") if count else memoryview(b"")
            while len(rest):
                got = file.readinto(rest)
                if not got:
                    raise RunFailed("the state before the first step is gone", why="its file has become shorter")
                rest = rest[got:]
        return copies

    return read
