"""The public API for any training loop: `Session` joins the world, `Step` is one global batch.

    session = shoal.Session(steps=2000, global_batch=64)
    model = MyModel().to(session.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.attach(model, optimizer)

    for step in session:
        with step:
            for inputs, targets in step.batches(dataset):
                step.backward(loss_sum(model(inputs), targets))
            step.update(clip=1.0)

A peer that is lost ends the block: the session enters the next generation, and the same step comes again. The model and
the optimizers change only in `update`, which all ranks do or none, so a step that is done again starts from the same
state. See docs/your-model.md.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config import defaults
from shoal.config.load import merge
from shoal.control.membership.types import Ballot
from shoal.control.rank_messages import MEMBERSHIP_FD, EnterGeneration
from shoal.cost.batch_plan import world_batch
from shoal.engine.auto_sync import SyncChooser
from shoal.engine.balance import Balance
from shoal.engine.batches import BatchAhead, Source, move, open_source, read_ahead
from shoal.engine.engine import Engine, flush_denormals
from shoal.engine.environment import open_session
from shoal.engine.loop import Loop, StepOutcome, Task
from shoal.engine.machine_trial import CorePins, MachineTrial, choose_cores, thread_ids
from shoal.engine.recorder import Recorder, last_event, last_step
from shoal.engine.recover import GenerationChanger
from shoal.engine.sampling import SHARDS, Shard
from shoal.engine.session_start import SessionStart
from shoal.engine.start_training import announce, describe_process, make_engine, start_training
from shoal.engine.training_state import Stateful, TrainingState, check_trainable
from shoal.errors import PeerLost, RunFailed, ShoalError, UsageError
from shoal.events import LOG_FIELDS, STEP_FIELDS
from shoal.host.network import link_mbps
from shoal.sync.fence import GenerationEnded, StepBoundary
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.membership_client import AgentConnection, MembershipClient
from shoal.sync.process_groups import drop_groups
from shoal.sync.replicas import gather_integers
from shoal.sync.step_stats import Mark, sum_over_world
from shoal.sync.world import (
    RankIdentity,
    World,
    choose_device,
    choose_interface,
    form_world,
    join_world,
    leave_world,
    unjoined_world,
)
from shoal.units import rank_list

Function = TypeVar("Function", bound=Callable[[], object])

_NO_BATCH = object()
# Positions of a stream are used, and not its samples' numbers.
_STREAM_COUNT = 1 << 40


class Session:
    """A training of `steps` steps on `global_batch` samples each, on all ranks that there are.

    A setting of the command line (`shoal run --wire int8 my_train.py`) wins over one given here. `settings` has any
    other one by its full name, for example `{"members.min_nodes": 2}`. `out` is the run folder where no launcher of
    shoal made one; a folder that has a checkpoint is continued. `seed=None` leaves torch's random numbers alone: a
    step that is done again then draws other ones.
    """

    def __init__(
        self,
        steps: int,
        global_batch: int,
        *,
        micro_batch: int | None = None,
        accumulate: int | None = None,
        sync: str | None = None,
        wire: str | None = None,
        seed: int | None = defaults.SEED,
        checkpoint_every: int | None = None,
        device: str | None = None,
        count_varies: bool = False,
        out: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        train = {
            "steps": steps,
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "seed": seed,
            "checkpoint_every": checkpoint_every,
            "device": device,
            "count_varies": count_varies,
        }
        sections = [{"train": train, "sync": {"mode": sync, "wire": wire, "accumulate": accumulate}}]
        for name, value in (settings or {}).items():
            section, _, key = name.partition(".")
            sections.append({section: {key: value}})
        given = {
            section: {key: value for key, value in values.items() if value is not None}
            for section, values in merge(sections).items()
        }
        start = open_session(given, None if out is None else Path(out))
        self._begin(replace(start, seeds_steps=seed is not None))
        self._records_faults = True

    @classmethod
    def of(cls, start: SessionStart) -> Self:
        """Return a session whose launcher has decided everything."""
        session = cls.__new__(cls)
        session._begin(start)
        return session

    def _begin(self, start: SessionStart) -> None:
        self._start = start
        self.device = choose_device(start.config.device_of(start.placement.rank), start.placement)
        self._state: TrainingState | None = None
        self._engine: Engine | None = None
        self._membership: GenerationChanger | None = None
        self.trial: MachineTrial | None = None
        self._tasks: list[Task] = []
        self._sources: dict[int, tuple[object, Source]] = {}
        self.batch_ahead: BatchAhead | None = None
        self._checked: dict[int, Ballot] = {}
        # Called on every rank of a launch when the world has formed, before the first step.
        self.on_start: Callable[[], None] = lambda: None
        # Called on a rank that was started again, before it joins.
        self.before_joining: Callable[[], None] = lambda: None
        # Returns more fields of this rank's `start` event, when it has entered its first world.
        self.describe: Callable[[], dict[str, object]] = dict
        self.is_finished = False
        # shoal's own worker records the errors that end it; a user's program does not.
        self._records_faults = False
        self._has_failed = False  # A step ended with an error that no later generation can repair.

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise UsageError(
                "the session has not begun",
                why="ranks meet when the loop over its steps begins",
                fix="iterate over it first: for step in session: …",
            )
        return self._engine

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.engine.progress.step

    @property
    def rank(self) -> int:
        return self._start.placement.rank if self._engine is None else self._engine.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks: of the launch before the loop begins, and of this moment inside it."""
        return self._start.placement.world_size if self._engine is None else self._engine.world.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def global_batch(self) -> int:
        return self.engine.global_batch

    def attach(self, model: nn.Module, *objects: Optimizer | Stateful, reset: Callable[[], None] | None = None) -> None:
        """Name what is trained: a model, its optimizers, and other objects with `state_dict` and `load_state_dict`.

        All of it is exchanged, copied to ranks that join, saved in checkpoints and compared between ranks. Learning
        rate schedulers among the objects take a step with every update. `reset` puts everything back to its state
        before the first step; without it a copy of that state is kept until the first checkpoint.
        """
        if self._state is not None:
            raise UsageError("the session has a model already", fix="attach everything in one call")
        optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        others = [thing for thing in objects if not isinstance(thing, Optimizer)]
        for thing in others:
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"a {type(thing).__qualname__} cannot be attached",
                    why="it has no state_dict() and load_state_dict()",
                    fix="attach the model first, then optimizers, schedulers and other objects with a state",
                )
        state = TrainingState(model, optimizers, others)
        check_trainable(state)
        self._state, self._reset = state, reset

    def every(self, steps: int) -> Callable[[Function], Function]:
        """Call the decorated function after every so many steps, and after the last one, on all ranks.

        It may exchange with other ranks by `session.sum`. After a lost peer it is called again.
        """

        def register(function: Function) -> Function:
            self._tasks.append(Task(f"{function.__qualname__}/{len(self._tasks)}", steps, function))
            return function

        return register

    def log(self, **values: float) -> None:
        """Record values of this step, for `shoal report`."""
        self.engine.recorder.event("log", step=self.step, **_checked_values("session.log", values, LOG_FIELDS))

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks. All must call it, inside a step or a function of `every`."""
        return sum_over_world(self.engine.world, [float(value) for value in values])

    def stop(self) -> None:
        """End the training after a step on which all ranks agree; it can be resumed."""
        self._start.stop.wanted = True

    def __iter__(self) -> Iterator[Step]:
        if self._state is None:
            raise UsageError(
                "nothing is attached to the session", fix="before the loop: session.attach(model, optimizer)"
            )
        try:
            with flush_denormals():
                loop = self._enter_elastic(self._state) if self._start.is_elastic else self._enter_static(self._state)
                for outcome in loop.steps():
                    yield Step(self, outcome)
            self.is_finished = loop.is_finished
            self._leave()
        except GeneratorExit:
            self._warn_of_break()
            raise
        except Exception as error:
            # Of a periodic function or of the loop. An error inside a step is recorded by the step.
            self.note_fault(error)
            raise
        finally:
            if self._engine is not None:
                if self._engine.watch is not None:
                    self._engine.watch.close()
                self._engine.recorder.close()
            self._start.held.close()

    def _warn_of_break(self) -> None:
        """Warn on the first rank that the program left the loop before its end, unless by an error."""
        engine = self._engine
        if engine is None or not engine.world.is_main or self._has_failed or hasattr(sys, "last_value"):
            return
        warning = UsageError(
            f"the loop over the session was left after {self.step} of {engine.config.train.steps} steps",
            why="it ended by break or return, and nothing was saved after the last checkpoint",
            fix="call session.stop() instead and let the loop end: it saves a checkpoint to resume from",
        )
        engine.recorder.warn(warning)

    # Entering and leaving the world.

    def _enter_static(self, state: TrainingState) -> Loop:
        """Join a world whose members do not change."""
        start, sync = self._start, self._start.config.sync
        warnings: list[ShoalError] = []
        computing = thread_ids() if start.world is None else ()
        world = start.world or join_world(
            start.placement, self.device, None, sync.join_timeout_s, sync.timeout_s, warnings.append
        )
        recorder = Recorder(start.run, world)
        if start.console is not None:
            recorder.on_event = start.console.show
        for warning in warnings:
            recorder.warn(warning)
        world = replace(world, warn=recorder.warn)
        engine = self._engine = make_engine(start.config, state, world, recorder, start.stop)
        self._configure_engine(engine, self._reset)
        # Before pinning: it has the number of cores that the machine gives this process.
        process = describe_process(world)
        chooser = SyncChooser(engine, start.config.sync)
        trial = self._prepare_trial(chooser, choose_cores(world, start.config.train.pin), computing)
        start_training(engine, chooser, start.run, start.resume)
        if start.resume:
            trial.recall(start.run)
        self._call_on_start(engine)
        self._announce(process, trial.cpus)
        return Loop(engine, start.run, None, tuple(self._tasks))

    def _enter_elastic(self, state: TrainingState) -> Loop:
        """Enter the run's generation: the first one of a launch, or one that trains already.

        A rank that was restarted, or that comes from a new machine, runs the same code: it copies the state.
        """
        start, placement = self._start, self._start.placement
        if placement.agent_fd is None:
            raise RunFailed("an agent started this rank without a store", why="that is a bug in shoal")
        connection = AgentConnection(int(os.environ[MEMBERSHIP_FD]))
        member = MembershipClient(connection, lambda: start.stop.wanted, start.note_fault)
        interface = choose_interface(placement)
        world = unjoined_world(placement, self.device)
        recorder = Recorder(start.run, world, member)
        engine = self._engine = make_engine(start.config, state, world, recorder, start.stop, member.fence)
        self._configure_engine(engine, self._reset or _keep_initial(state))
        engine.leave_out = member.send_too_slow
        self._membership = GenerationChanger(
            member=member,
            store=AgentStore(
                placement.agent_fd, timedelta(seconds=start.config.sync.join_timeout_s), member.is_superseded
            ),
            place=RankIdentity(
                placement.node,
                self.device,
                interface,
                placement.link_mbps or link_mbps(interface),
                member.release,
                recorder.warn,
            ),
            engine=engine,
            chooser=SyncChooser(engine, start.config.sync),
            run=start.run,
            on_start=partial(self._call_on_start, engine),
        )
        if not start.resume:
            self.before_joining()
        batch = start.config.sync.accumulate * world_batch(start.config.train, placement.world_size)
        member.send_ready(last_step(start.run.commits, placement.rank), max_ranks=batch)
        enter = member.await_enter()
        while enter.first and not self._try_to_begin(self._membership, enter):
            # A rank or a machine was lost meanwhile: the others begin without it.
            enter = member.await_enter()
        if not enter.first:
            self._join_generation(self._membership, enter)
        return Loop(engine, start.run, self._membership, tuple(self._tasks))

    def _try_to_begin(self, membership: GenerationChanger, enter: EnterGeneration) -> bool:
        """Begin a launch; return False if a rank or a machine was lost before all ranks had begun."""
        try:
            self._enter_first_generation(membership, enter)
        except Exception as error:
            membership.leave_launch(error)
            return False
        return True

    def _enter_first_generation(self, membership: GenerationChanger, enter: EnterGeneration) -> None:
        """Form the first world of a launch, of all its ranks."""
        engine, sync = membership.engine, membership.engine.config.sync
        computing = thread_ids()
        world = form_world(enter, membership.store, membership.place, sync.join_timeout_s, sync.timeout_s)
        engine.enter_world(world, 0, 0, launched_ranks=world.size)
        engine.recorder.enter_world(world, [])
        # Before pinning: it has the number of cores that the machine gives this process.
        process = describe_process(world)
        trial = self._prepare_trial(membership.chooser, choose_cores(world, engine.config.train.pin), computing)
        start_training(engine, membership.chooser, membership.run, self._start.resume)
        if self._start.resume:
            trial.recall(membership.run)
        membership.start()
        membership.member.fence.set_step(engine.outer.common_step(engine.progress.step))
        self._announce(process, trial.cpus)
        membership.record_entry(how="first")
        membership.member.send_formed(enter.generation, 0.0)

    def _call_on_start(self, engine: Engine) -> None:
        self.on_start()
        engine.settle_micro_batches()
        if engine.outer.common_step(engine.progress.step) == engine.progress.step:
            # What it changed belongs to the first round, and is not undone with it.
            engine.mark_round_start()

    def _join_generation(self, membership: GenerationChanger, enter: EnterGeneration) -> None:
        """Join a generation that trains already, on the cores of this rank's last start: its neighbours keep theirs."""
        engine = membership.engine
        cpus = last_event(membership.run.events(engine.world.id), "start").get("cpus")
        cores = tuple(cpus) if cpus and engine.config.train.pin != "off" else None
        trial = self._prepare_trial(membership.chooser, cores, thread_ids())
        membership.has_state = False
        began = time.perf_counter()
        while not membership.try_to_enter(enter, began):
            enter = membership.member.await_enter()
        self._announce(describe_process(engine.world), trial.cpus)

    def _prepare_trial(
        self, chooser: SyncChooser, cores: tuple[int, ...] | None, computing: Collection[int]
    ) -> MachineTrial:
        """Pin this rank to its cores, if it has any, and let the first steps try what is better."""
        pins = CorePins(cores, computing)
        pins.set(is_pinned=True)
        self.trial = MachineTrial(self.engine, chooser, pins)
        self.engine.between_steps = self.trial.after_step
        return self.trial

    def _configure_engine(self, engine: Engine, reset: Callable[[], None] | None) -> None:
        engine.reset, engine.is_reset_copy = reset, reset is not self._reset
        engine.seeds_steps = self._start.seeds_steps
        if self._start.sharding == "modulo":
            # Equal shards are used up at the same time only by equal shares.
            engine.balance = Balance("off")
        if self._start.lower_rate_advice:
            engine.lower_rate_advice = self._start.lower_rate_advice

    def _announce(self, process: dict[str, Any], cpus: tuple[int, ...] | None) -> None:
        placement = self._start.placement
        launcher = placement.launcher or ("torchrun" if placement.master_addr else "python")
        announce(self.engine, self._start.run, launcher=launcher, **process, cpus=cpus, **self.describe())

    def _leave(self) -> None:
        for _, source in self._sources.values():
            source.close()
        if self._membership is not None:
            self._membership.member.send_finished()
            drop_groups()
        else:
            leave_world(self.engine.world)
        if self._start.console is not None:
            # After the barrier: all ranks have written their last event.
            self._start.console.finish()

    # For `Step`.

    def is_recoverable(self, error: BaseException) -> bool:
        """Return whether the next generation can continue after this error: a peer was lost, or the generation is over.

        An error of the program itself is none of these, unless the generation ended while it was raised: then the step
        is done again, and the error comes again.
        """
        if self._membership is None or not isinstance(error, Exception):
            return False
        return isinstance(error, PeerLost | GenerationEnded | StepBoundary) or self._membership.member.fence.is_over

    def note_fault(self, error: BaseException) -> None:
        self._has_failed = True
        if self._records_faults and isinstance(error, Exception):
            self._start.note_fault(error)

    def open_data(self, data: Any) -> Source:
        """Return the source for a dataset; compare it with those of the other ranks once in every generation."""
        key = id(data)
        if key not in self._sources:
            # The dataset is kept too: another one could get its id otherwise.
            self._sources[key] = data, data if isinstance(data, Source) else open_source(data)
        source = self._sources[key][1]
        world = self.engine.world
        if self._checked.get(key) != world.generation or key not in self._checked:
            self._checked[key] = world.generation
            _check_same_data(world, source)
        return source

    def shard(self, source: Source) -> Shard:
        """Return this rank's part of the source's samples."""
        engine, count = self.engine, source.count
        kind = SHARDS[self._start.sharding]
        return kind(engine.world.rank, engine.plan, _STREAM_COUNT if count is None else count, engine.config.train.seed)


class Step(AbstractContextManager["Step"]):
    """One global batch. Use it as a context: `with step:`."""

    def __init__(self, session: Session, outcome: StepOutcome) -> None:
        self._session = session
        self._engine = session.engine
        self._outcome = outcome
        self._is_open = False
        self._batch_at: Mark = 0.0
        self._source: Source | None = None
        self.number = self._engine.progress.step + 1

    def __enter__(self) -> Step:
        self._is_open = True
        self._engine.begin_step()
        self._batch_at = self._engine.timer.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._is_open = False
        if error is None:
            return False
        if self._session.is_recoverable(error) and isinstance(error, Exception):
            if self._engine.progress.step < self.number:
                self._engine.drop_step()
            self._outcome.error = error
            return True
        self._session.note_fault(error)
        return False

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield this rank's micro-batches of the step, on the session's device."""
        self._require_open("batches")
        engine, session = self._engine, self._session
        with engine.timer.phase("data"):
            source = session.open_data(data)
            shard, cursor = session.shard(source), engine.progress.cursor
            ahead, session.batch_ahead = session.batch_ahead, None
            if ahead is not None and ahead.serves(source, shard, cursor):
                items: Iterator[Any] = chain([ahead.batch], ahead.rest)
            else:
                items = source.fetch(shard, cursor)
        self._source = source
        while True:
            with engine.timer.phase("data"):
                batch = next(items, _NO_BATCH)
                if batch is not _NO_BATCH:
                    batch = move(batch, engine.world.device)
            if batch is _NO_BATCH:
                return
            self._batch_at = engine.timer.mark()
            yield batch

    def backward(self, loss: Tensor, count: int | None = None) -> None:
        """Add the gradients of a micro-batch.

        `loss` is the sum over its samples; the session divides by the number of samples of all ranks. With `count` the
        loss is a sum of so many terms instead, such as the tokens that are not padding.
        """
        self._require_open("backward")
        if loss.dim() or not loss.requires_grad:
            raise UsageError(
                f"the loss is a tensor of shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " that depends on no parameter"),
                why="backward starts from one number that the model has computed",
                fix="pass the sum over the samples of the batch, for example loss_fn(...).sum()",
            )
        engine = self._engine
        engine.timer.add_since("forward", self._batch_at)
        engine.backward(loss, count)
        self._batch_at = engine.timer.mark()

    def update(self, clip: float | None = None, after: Callable[[], object] | None = None, **fields: float) -> None:
        """Exchange the gradients, clip them to this norm, and let the optimizers take their step.

        `after` is called with the step: both happen on all ranks, or none. `fields` are recorded with the step.
        """
        self._require_open("update")
        if self._outcome.is_done:
            raise UsageError(
                f"step {self.number} was updated twice", why="a step has one update", fix="call step.update once"
            )
        values = _checked_values("step.update", fields, STEP_FIELDS)
        self._read_ahead()
        self._outcome.wants_stop = self._engine.update(clip, after, lambda: values)
        self._outcome.is_done = True

    def _read_ahead(self) -> None:
        """Read the next step's first micro-batch while a GPU still computes this one."""
        session, engine, source = self._session, self._engine, self._source
        if source is not None and self.number < engine.config.train.steps:
            cursor = engine.progress.cursor + engine.global_batch
            session.batch_ahead = read_ahead(source, session.shard(source), cursor, engine.world.device)

    def _require_open(self, method: str) -> None:
        if not self._is_open:
            raise UsageError(
                f"step.{method} was called outside of its step",
                why="a peer can be lost at any time, and only the block can be done again",
                fix="put it into the block: with step: …",
            )


def _keep_initial(state: TrainingState) -> Callable[[], None]:
    """Copy the state before the first step; return a function that puts it back."""
    weights = {name: tensor.clone() for name, tensor in state.weights().items()}
    optimizer = state.optimizer_state()
    optimizer = replace(optimizer, tensors={name: tensor.clone() for name, tensor in optimizer.tensors.items()})

    def reset() -> None:
        state.load_weights(weights)
        state.reset_optimizers()
        state.load_optimizer_state(optimizer)

    return reset


def _checked_values(method: str, values: Mapping[str, Any], taken: frozenset[str]) -> dict[str, float]:
    """Return the values that a program records as numbers; refuse names that a record has already."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if name in taken:
            raise UsageError(
                f"{method} cannot record a value named {name}",
                why="every record has a field of that name already",
                fix=f"choose another name: {method}(my_{name}=…)",
            )
        try:
            numbers[name] = value if isinstance(value, int | float) else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"{method} cannot record {name}: it is a {type(value).__qualname__} and not a number",
                why="the values of a step are drawn as curves",
                fix="record a number: for example tensor.mean().item()",
            ) from None
    return numbers


def _check_same_data(world: World, source: Source) -> None:
    rows = gather_integers(world, [-1 if source.count is None else source.count, source.fingerprint()])
    if len({tuple(row) for row in rows}) == 1:
        return
    counts = [count for count, _ in rows]
    other = next(rank for rank, row in enumerate(rows) if row != rows[0])
    seen = (
        f"rank 0 has a dataset of {counts[0]:,} samples, {rank_list([world.ids[other]])} one of {counts[other]:,}"
        if counts[other] != counts[0]
        else f"the datasets of rank 0 and {rank_list([world.ids[other]])} have the same length and other samples"
    )
    raise UsageError(
        seen,
        why="each sample of an epoch is used once by one rank, so all ranks must have the same data in the same order",
        fix="give every rank the whole dataset: shoal divides it; data made at random needs the same seed on every "
        "rank: torch.manual_seed(…) before it is made",
    )
