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
the optimizers change only in `update`, which all ranks do or none, so a step that is repeated starts from the same
state. See docs/your-model.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.config import defaults
from shoal.config.load import merge
from shoal.control.membership.types import Ballot
from shoal.engine.agreement import check_same_data
from shoal.engine.batches import BatchAhead, Source, move, open_source, read_ahead
from shoal.engine.best_checkpoint import note_best
from shoal.engine.entry import Attached, ElasticEntry, Entry, Hooks, StaticEntry
from shoal.engine.environment import SessionStart, open_session
from shoal.engine.epochs import Epoch, ends_epoch, epoch_samples, iterate_epochs
from shoal.engine.evaluation import evaluate
from shoal.engine.loop import Loop, StepOutcome, Task
from shoal.engine.misuse import check_mean, check_scale
from shoal.engine.parts import parameters_of
from shoal.engine.replica import Replica
from shoal.engine.sampling import SHARDS, Shard
from shoal.engine.sharded_state import check_elementwise
from shoal.engine.step import UnequalMicroBatches, flush_denormals
from shoal.engine.step_callbacks import StepCallbacks, StepRecord
from shoal.engine.streams import Carried, carried_of, with_carried
from shoal.engine.training_state import Stateful, TrainingState, check_trainable
from shoal.errors import UsageError
from shoal.event_schema import LOG_FIELDS, STEP_FIELDS
from shoal.sync.gather import GatheredRows
from shoal.sync.step_stats import Mark, sum_over_world
from shoal.sync.world import World, choose_device

Function = TypeVar("Function", bound=Callable[[], object])
StepFunction = TypeVar("StepFunction", bound=Callable[[StepRecord], object])

_NO_BATCH = object()
# Datasets that are kept open at once.
_MOST_SOURCES = 16
# Positions of a stream are used, and not its samples' numbers.
_STREAM_COUNT = 1 << 40


class Session:
    """A training of `steps` steps on `global_batch` samples each, on all ranks that there are.

    In place of `steps`: a number of `epochs`, and the `samples` of one. `micro_batch` is the most samples that a rank
    computes at once; `accumulate` multiplies the batch between two exchanges. `sync` and `wire` are the method and the
    number format of the exchange, as for `shoal train --sync --wire`. `checkpoint_every` counts steps. `device` is
    `auto`, `cpu` or `cuda`. `count_varies` is for samples with different numbers of terms, `unused_parameters` for
    losses that do not reach every parameter.

    A setting of the command line (`shoal run --wire int8 my_train.py`) wins over one given here. `settings` has any
    other one by its full name, for example `{"members.min_nodes": 2}`. `out` is the run folder where no launcher of
    shoal made one; a folder that has a checkpoint is continued. `seed=None` leaves torch's random numbers alone: a
    step that is repeated then draws other ones.
    """

    def __init__(
        self,
        steps: int | None = None,
        global_batch: int | None = None,
        *,
        epochs: int | None = None,
        samples: int | None = None,
        micro_batch: int | None = None,
        accumulate: int | None = None,
        sync: str | None = None,
        wire: str | None = None,
        seed: int | None = defaults.SEED,
        checkpoint_every: int | None = None,
        device: str | None = None,
        count_varies: bool = False,
        unused_parameters: bool = False,
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
            "unused_parameters": unused_parameters,
            "epochs": epochs,
            "epoch_samples": samples,
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
        self._attached: Attached | None = None
        self._entry: Entry | None = None
        self._tasks: list[Task] = []
        self._callbacks = StepCallbacks(start.run.path)
        self.data = SessionData(start.sharding)
        self.hooks = Hooks()
        self.is_finished = False
        # shoal's own worker records the errors that end it; a user's program does not.
        self._records_faults = False
        self._has_failed = False  # A step ended with an error that no later generation can repair.

    @property
    def entry(self) -> Entry:
        """How this rank takes part in the training."""
        if self._entry is None:
            raise UsageError(
                "the session has not begun",
                why="ranks meet when the loop over its steps begins",
                fix="iterate over it first: for step in session: …",
            )
        return self._entry

    @property
    def replica(self) -> Replica:
        """What this rank holds of the training."""
        return self.entry.replica

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.replica.progress.step

    @property
    def rank(self) -> int:
        """The number of this rank: of the launch before the loop begins, and of this moment inside it."""
        return self._start.placement.rank if self._entry is None else self._entry.replica.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks: of the launch before the loop begins, and of this moment inside it."""
        return self._start.placement.world_size if self._entry is None else self._entry.replica.world.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0. If that one is lost, another one becomes rank 0."""
        return self.rank == 0

    @property
    def global_batch(self) -> int:
        """The samples of a step on all ranks together; it does not change when a rank is lost."""
        return self.replica.global_batch

    def attach(
        self,
        model: nn.Module,
        *objects: nn.Module | Optimizer | Stateful,
        epoch_schedulers: Sequence[LRScheduler] = (),
        reset: Callable[[], None] | None = None,
    ) -> None:
        """Name what is trained: a model or several, their optimizers, and other objects with `state_dict` and
        `load_state_dict`.

        All of it is exchanged, copied to ranks that join, saved in checkpoints and compared between ranks. Learning
        rate schedulers among the objects take a step with every update, `epoch_schedulers` with the last one of an
        epoch. `reset` puts everything back to its state before the first step; without it a copy of that state is kept
        until the first checkpoint.
        """
        if self._attached is not None:
            raise UsageError("the session has a model already", fix="attach everything in one call")
        optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        trained = set(map(id, parameters_of(optimizers)))
        # A module that no optimizer changes, such as an average of weights, is an object with a state.
        models = [
            thing
            for thing in objects
            if isinstance(thing, nn.Module) and not trained.isdisjoint(map(id, thing.parameters()))
        ]
        others = [thing for thing in objects if thing not in optimizers and thing not in models]
        others += [scheduler for scheduler in epoch_schedulers if scheduler not in others]
        if epoch_schedulers:
            epoch_samples(self._start.config.train)
        if models:
            model = nn.ModuleList([model, *models])
        for thing in others:
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"a {type(thing).__qualname__} cannot be attached",
                    why="it has no state_dict() and load_state_dict()",
                    fix="attach the model first, then optimizers, schedulers and other objects with a state",
                )
            if isinstance(thing, Carried):
                thing.attach_to(self.device)
        state = TrainingState(model, optimizers, others, epoch_schedulers)
        check_trainable(state, self.device)
        if self._start.config.sync.is_sharded:
            check_elementwise(optimizers, self._start.config.sync.mode)
        self._attached = Attached(state, reset)

    def every(self, steps: int | None = None, *, epochs: int | None = None) -> Callable[[Function], Function]:
        """Call the decorated function after every `steps` steps or `epochs`, and after the last one, on all ranks.

        It may exchange with other ranks by `session.sum`. After a lost peer it is called again.
        """
        period = steps if epochs is None else epochs
        if period is None or period < 1 or (steps is not None and epochs is not None):
            raise UsageError(
                f"session.every({'' if period is None else period}) names no step",
                why="it counts steps, or epochs, from 1 on",
                fix="session.every(1), or session.every(epochs=1)",
            )

        def is_due(replica: Replica) -> bool:
            if epochs is None:
                return replica.progress.step % period == 0
            return ends_epoch(replica, replica.progress.cursor, period)

        def register(function: Function) -> Function:
            self._tasks.append(Task(f"{function.__qualname__}/{len(self._tasks)}", is_due, function))
            return function

        return register

    def on_step(self, function: StepFunction) -> StepFunction:
        """Call the decorated function on the main rank once for each step, in order, when all ranks have done it.

        It gets a `StepRecord`, mostly one step later. An error in it ends the training, as any error of the program.
        """
        self._callbacks.functions.append(function)
        return function

    def log(self, **values: float) -> None:
        """Record values of this step, for `shoal report`."""
        self.replica.recorder.event("log", step=self.step, **_checked_values("session.log", values, LOG_FIELDS))

    def sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks. All must call it, inside a step or a function of `every`."""
        return sum_over_world(self.replica.world, [float(value) for value in values])

    def evaluate(self, data: Any, function: Callable[[Any], Any], batch: int | None = None) -> Any:
        """Return the mean of a value, or of several by name, over all samples of a dataset, in a function of `every`.

        `function` returns sums over a batch of at most `batch` samples: a number, or a dictionary of them. A sum of
        other terms than samples stands there with their number, as in `{"loss": (loss.sum(), tokens)}`.
        """
        return evaluate(self.replica, data, function, batch)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Give the model all its weights inside the block, with `zero3` too. All ranks enter it together."""
        return self.replica.shards.whole_weights(self.replica.outer)

    def best(self, value: float, lower: bool = True) -> bool:
        """Keep the checkpoint of this step beside the newest ones if `value` is the best so far; return whether it is.

        All ranks call it in a function of `every`, with the same value.
        """
        return note_best(self.replica, self._start.run, value, lower)

    def stop(self) -> None:
        """End the training after a step on which all ranks agree; it can be resumed."""
        self._start.stop.wanted = True

    def finish(self) -> None:
        """Complete the training after a step on which all ranks agree, before its last step: it needs no more."""
        self._start.stop.is_complete = True

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left; each yields its steps."""
        return iterate_epochs(self)

    def __iter__(self) -> Iterator[Step]:
        return self.iterate()

    def iterate(self) -> Generator[Step]:
        if self._attached is None:
            raise UsageError(
                "nothing is attached to the session", fix="before the loop: session.attach(model, optimizer)"
            )
        try:
            with flush_denormals():
                loop = self._enter(self._attached)
                for outcome in loop.steps():
                    self._callbacks.begin_step(self.replica)
                    yield Step(self, outcome)
                self._callbacks.begin_step(self.replica)
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
            if self._entry is not None:
                self._entry.close()
            self._start.held.close()

    def _warn_of_break(self) -> None:
        """Warn on the first rank that the program left the loop before its end, unless by an error."""
        if self._entry is None or not self.is_main or self._has_failed or hasattr(sys, "last_value"):
            return
        warning = UsageError(
            f"the loop over the session was left after {self.step} of {self.replica.config.train.steps} steps",
            why="it ended by break or return, and nothing was saved after the last checkpoint",
            fix="call session.stop() instead and let the loop end: it saves a checkpoint to resume from",
        )
        self.replica.recorder.warn(warning)

    def _enter(self, attached: Attached) -> Loop:
        kind = ElasticEntry if self._start.is_elastic else StaticEntry
        # Set before it begins: the program's hooks use the session.
        self._entry = kind(self._start, attached, self.hooks, self.device)
        self._callbacks.watch(self.replica)
        self._entry.begin()
        return self._entry.make_loop(self._tasks)

    def _leave(self) -> None:
        self.data.close()
        self.entry.leave()
        if self._start.console is not None:
            # After the barrier: all ranks have written their last event.
            self._start.console.finish()

    # For `Step`.

    def is_recoverable(self, error: BaseException) -> bool:
        return self._entry is not None and self._entry.is_recoverable(error)

    def as_loss(self, error: BaseException) -> BaseException:
        """Return the loss of a peer that this error of the program's own exchange means, or the error."""
        return error if self._entry is None else self._entry.as_loss(error)

    def note_fault(self, error: BaseException) -> None:
        self._has_failed = True
        if self._records_faults and isinstance(error, Exception):
            self._start.note_fault(error)


def identity_of(data: Any) -> object:
    """Return what tells a dataset from others: a tuple made anew in every step has the same tensors."""
    return tuple(map(id, data)) if isinstance(data, tuple) else id(data)


class SessionData:
    """The datasets of a session, and the micro-batch that was read ahead."""

    def __init__(self, sharding: str) -> None:
        self._sharding = sharding
        self._sources: dict[object, tuple[object, Source]] = {}  # By the identities of the datasets.
        self._checked: dict[object, Ballot] = {}
        self._draws = False
        self.batch_ahead: BatchAhead | None = None

    def open(self, data: Any, world: World) -> Source:
        """Return the source for a dataset; compare it with those of the other ranks once in every generation."""
        key = identity_of(data)
        if key not in self._sources:
            if len(self._sources) >= _MOST_SOURCES:
                # A program that makes its dataset anew in every step.
                oldest = next(iter(self._sources))
                self._sources.pop(oldest)[1].close()
                self._checked.pop(oldest, None)
            # The dataset is kept too: another one could get its id otherwise.
            self._sources[key] = data, data if isinstance(data, Source) else open_source(data)
        source = self._sources[key][1]
        if self._checked.get(key) != world.generation:
            self._checked[key] = world.generation
            check_same_data(world, source)
        return source

    def shard(self, source: Source, replica: Replica) -> Shard:
        """Return this rank's part of the source's samples."""
        kind, count = SHARDS[self._sharding], source.count
        samples = _STREAM_COUNT if count is None else count
        shard = kind(replica.world.rank, replica.plan, samples, replica.config.train.seed)
        draw = getattr(source, "draw", None)
        if draw is None:
            return shard
        if not self._draws:
            self._draws = True
            # For `shoal verify`: a position of the ledger is a draw.
            replica.recorder.event("draw")
        return replace(shard, draw=draw)

    def close(self) -> None:
        for _, source in self._sources.values():
            source.close()


class Updated(NamedTuple):
    """What a loop may want to print of a step."""

    step: int
    loss: float  # The mean over all ranks, the newest that is known: with outer steps of some steps ago.
    norm: float  # Of the gradients, before clipping.


class Step(AbstractContextManager["Step"]):
    """One global batch. Use it as a context: `with step:`."""

    def __init__(self, session: Session, outcome: StepOutcome) -> None:
        self._session = session
        self._replica = session.replica
        self._training = session.entry.step
        self._outcome = outcome
        self._is_open = False
        self._batch_at: Mark = 0.0
        self._source: Source | None = None
        self._kept_of: object = _NO_BATCH  # The dataset whose micro-batches are kept for the next part of the step.
        self._kept: list[Any] = []
        self.number = self._replica.progress.step + 1

    def __enter__(self) -> Step:
        self._is_open = True
        self._training.begin()
        for carried in carried_of(self._replica):
            carried.begin_step()
        self._batch_at = self._training.timer.mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._is_open = False
        if error is None:
            return False
        if isinstance(error, UnequalMicroBatches):
            self._training.drop()
            self._training.divide_for_gather()
            self._outcome.is_repeated = True
            return True
        error = self._session.as_loss(error)
        if self._session.is_recoverable(error) and isinstance(error, Exception):
            if self._replica.progress.step < self.number:
                self._training.drop()
            self._outcome.error = error
            return True
        self._session.note_fault(error)
        return False

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield this rank's micro-batches of the step, on the session's device: in every part the same ones."""
        self._require_open("batches")
        timer = self._training.timer
        if identity_of(data) == self._kept_of:
            self._batch_at = timer.mark()
            yield from self._kept
            return
        with timer.phase("data"):
            items = self._open(data)
        is_kept = bool(self._training.parts.current)
        if is_kept:
            self._kept_of, self._kept = identity_of(data), []
        while True:
            with timer.phase("data"):
                batch = next(items, _NO_BATCH)
                if batch is not _NO_BATCH:
                    batch = move(batch, self._replica.world.device)
            if batch is _NO_BATCH:
                return
            if is_kept:
                self._kept.append(batch)
            self._batch_at = timer.mark()
            yield batch

    def _open(self, data: Any) -> Iterator[Any]:
        """Return the step's micro-batches of a dataset, of which one may have been read ahead."""
        replica, sources = self._replica, self._session.data
        self._source = source = sources.open(data, replica.world)
        samples = replica.config.train.epoch_samples
        if self.number == 1 and self._session.is_main and source.count not in (None, samples) and samples is not None:
            replica.recorder.warn(
                UsageError(
                    f"an epoch has {samples:,} samples, and the dataset {source.count:,}",
                    why="the session counts its epochs by the samples that it was given",
                    fix="shoal.Session(epochs=…, samples=len(dataset), global_batch=…)",
                )
            )
        shard, cursor = sources.shard(source, replica), replica.progress.cursor
        ahead, sources.batch_ahead = sources.batch_ahead, None
        if ahead is not None and ahead.serves(source, shard, cursor):
            return chain([ahead.batch], ahead.rest)
        return source.fetch(shard, cursor)

    def backward(self, loss: Tensor, count: int | None = None, *, mean_of: int | None = None) -> None:
        """Add the gradients of a micro-batch.

        `loss` is the sum over its samples; the session divides by the number of samples of all ranks. With `count` the
        loss is a sum of that many terms instead, such as the tokens that are not padding; with `mean_of` it is the mean
        of that many.
        """
        self._require_open("backward")
        if self._source is None:
            raise UsageError(
                f"step {self.number} has a loss, and step.batches was not called in it",
                why="shoal divides the samples of a step over the ranks and counts them: other ones would be used by "
                "every rank, and the loss divided by the wrong number",
                fix="take them from it: for inputs, targets in step.batches(dataset): …",
            )
        if loss.dim() or not loss.requires_grad:
            raise UsageError(
                f"the loss is a tensor of shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " that depends on no parameter"),
                why="backward starts from one number that the model has computed",
                fix="pass the sum over the samples of the batch, for example loss_fn(...).sum()",
            )
        self._training.timer.add_since("forward", self._batch_at)
        count, mean_of = _whole("count", count), _whole("mean_of", mean_of)
        if mean_of is not None:
            if count is not None or mean_of < 1:
                raise UsageError(
                    f"step.backward got mean_of={mean_of}" + ("" if count is None else f" and count={count}"),
                    why="a loss is either a sum or a mean of its terms, at least of one",
                    fix="step.backward(loss, mean_of=len(inputs)) for a mean, step.backward(loss) for a sum",
                )
            if self._training.unchecked_samples is not None:
                check_mean(loss, mean_of)
            loss, count = loss * mean_of, mean_of
        elif (samples := self._training.unchecked_samples) is not None:
            check_scale(loss, samples, count, self._replica.recorder.warn if self._session.is_main else None)
        self._training.backward(loss, count)
        self._batch_at = self._training.timer.mark()

    def gather(self, tensor: Tensor) -> GatheredRows:
        """Return the rows of all ranks' micro-batches, and which of them are this rank's, for a loss that compares
        samples with each other. All ranks call it equally often; gradients flow back to the rank of each row."""
        self._require_open("gather")
        return self._training.gather(tensor)

    @contextmanager
    def part(self, *optimizers: Optimizer, clip: float | None = None) -> Iterator[None]:
        """Update only these optimizers when the block ends; the rest of the step computes with their new weights.

        The block has the micro-batches of the step, as the last update after it has. Together they are one step.
        """
        self._require_open("part")
        self._training.begin_part(optimizers)
        yield
        self._training.update_part(clip)
        self._batch_at = self._training.timer.mark()

    def update(
        self,
        clip: float | None = None,
        after: Callable[[], object] | None = None,
        only: Optimizer | Sequence[Optimizer] | None = None,
        **fields: float,
    ) -> Updated:
        """Exchange the gradients, clip them to this norm, and let the optimizers take their step.

        `after` is called with the step: both happen on all ranks, or none. `only` some optimizers take it, or all but
        those that a part of the step has updated. `fields` are recorded with the step.
        """
        self._require_open("update")
        if self._outcome.done is not None:
            raise UsageError(
                f"step {self.number} was updated twice", why="a step has one update", fix="call step.update once"
            )
        values = _rate_of(self._replica) | _checked_values("step.update", fields, STEP_FIELDS)
        self._read_ahead()
        after = with_carried(self._replica, after)
        chosen = [only] if isinstance(only, Optimizer) else only
        self._outcome.done = done = self._training.update(clip, after, lambda: values, chosen)
        return Updated(self.number, done.loss, done.norm)

    def _read_ahead(self) -> None:
        """Read the next step's first micro-batch while a GPU still computes this one."""
        sources, replica, source = self._session.data, self._replica, self._source
        if source is not None and self.number < replica.config.train.steps:
            cursor = replica.progress.cursor + replica.global_batch
            sources.batch_ahead = read_ahead(source, sources.shard(source, replica), cursor, replica.world.device)

    def _require_open(self, method: str) -> None:
        if not self._is_open:
            raise UsageError(
                f"step.{method} was called outside of its step",
                why="a peer can be lost at any time, and only the block can be done again",
                fix="put it into the block: with step: …",
            )


def _rate_of(replica: Replica) -> dict[str, float]:
    """Return the learning rate of this step, before a scheduler changes it."""
    optimizers = replica.state.optimizers
    rate: Any = optimizers[0].param_groups[0].get("lr") if optimizers else None
    # Not from a GPU, for which this rank would wait.
    is_known = isinstance(rate, int | float) or (isinstance(rate, Tensor) and rate.device.type == "cpu")
    return {"lr": float(rate)} if is_known else {}


def _whole(name: str, value: Any) -> int | None:
    """Return a number of terms, which may be a tensor such as `mask.sum()`."""
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"step.backward got {name}={value!r:.60}",
            why="it is the number of terms of the loss on this rank",
            fix=f"pass a whole number: step.backward(loss, {name}=len(inputs))",
        ) from None


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
