"""What a replica keeps of a model that is divided among the ranks, and the only methods that change it.

Of a model that is not divided it keeps nothing, and everything here is as in plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from shoal.config.schema import SyncConfig
from shoal.engine.sharded_state import DividedOptimizers, UpdateProgress, WaitingUpdate
from shoal.engine.sharding import agree_on_layout, divide, wants_copies
from shoal.engine.training_state import TrainingState
from shoal.engine.update import gradient_norm
from shoal.errors import OutOfMemory
from shoal.host.memory import return_freed_memory
from shoal.sync.gradients import GradientSync, check_gradients
from shoal.sync.outer import OuterSync
from shoal.sync.sharded.exchange import PartExchange
from shoal.sync.sharded.held import give_memory
from shoal.sync.sharded.sync import ShardedSync
from shoal.sync.world import World


class ReplicaShards:
    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self.sync: ShardedSync | None = None  # Sums gradients of parts; None where the model is not divided.
        self.wants_copies = False  # A second rank is to keep each part.
        self.has_whole_weights = True  # This rank has all weights of its last step.

    def __bool__(self) -> bool:
        return self.sync is not None

    @property
    def exchange(self) -> PartExchange | None:
        """What gathers the parts; None for a single rank, or where nothing is divided."""
        return None if self.sync is None else self.sync.exchange

    @contextmanager
    def whole_weights(self, outer: OuterSync) -> Iterator[None]:
        """Inside, the model has all the weights that the ranks have in common. All ranks enter it together."""
        units = None if self.sync is None else self.sync.units
        with outer.common(), nullcontext() if units is None else units.whole():
            yield

    # How the model is divided.

    def connect(self, config: SyncConfig, world: World) -> None:
        """Divide the model over a world, unless a recovery has done it."""
        if config.shard_level > 1:
            return_freed_memory()
        if config.is_sharded and self._state.divided is None:
            wanted = self.wants_copies or wants_copies(config, world.size)
            layout, self.wants_copies = agree_on_layout(config, self._state, world, wanted)
            self._state.divided = divide(config, self._state, layout, world)

    def use(self, sync: GradientSync) -> None:
        """Take the exchanges of a new world."""
        self.sync = sync if isinstance(sync, ShardedSync) else None

    def leave_world(self) -> None:
        if self.sync is not None and self.sync.weights is not None:
            self.has_whole_weights = self.sync.weights.is_complete
        self.sync = None

    def adopt(self, divided: DividedOptimizers) -> None:
        """Take other parts in place of those that this rank has kept."""
        if self._state.divided is not None:
            self._state.divided.release()
        self._state.divided = divided

    def forget(self) -> None:
        """Forget how the model was divided, and what this rank knows of its parts."""
        if self._state.divided is not None:
            self._state.divided.release()
            self._state.divided, self._state.are_weights_divided = None, False
        give_memory(self._state.all_parameters)

    def end(self) -> None:
        """Give the model all its weights, for what the program does with it after the training.

        The moments make room for them: they are in the last checkpoint.
        """
        if self.sync is not None and self.sync.units is not None and self._state.divided is not None:
            self._state.divided.release()
            self.sync.free_sums()
            self.sync.units.keep_whole()

    def can_lose_parts(self, config: SyncConfig, world: World) -> bool:
        """Whether a rank that is lost may have had the only copy of its part."""
        if not config.is_sharded or world.size == 1:
            return False
        if self._state.divided is not None:
            return not self._state.divided.layout.copy_shift
        return not (self.wants_copies or wants_copies(config, world.size))

    def missing_copies(self, world: World) -> OutOfMemory | None:
        """Return the warning that the ranks of a world have no room for copies of the parts, if that is so."""
        divided = self._state.divided
        if divided is None or not self.wants_copies or divided.layout.copy_shift or world.size == 1:
            return None
        return OutOfMemory(
            f"no second copy of the parts of the model: {world.size} ranks have no room for it",
            why="each rank would keep its own part and that of another one",
            fix="after the next loss the run returns to its newest checkpoint; add a machine, or save more often: "
            "--set train.checkpoint_every=…",
        )

    # A step.

    @property
    def keeps_gradients(self) -> bool:
        """Whether the model has its gradients until the update: they are not exchanged during the step."""
        return self.sync is None or self.sync.keeps_gradients

    def check_gradients(self, only: Collection[Tensor] | None) -> None:
        """Raise `UnusedParameters` if backward has left out a parameter, or one of `only` these."""
        if self.keeps_gradients:
            check_gradients(self._state.model, only)

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the norm of all ranks' summed gradients of what this rank updates."""
        return gradient_norm(parameters) if self.sync is None else self.sync.gradient_norm(parameters)

    def begin_step(self) -> None:
        """Begin a step, or the same one anew."""
        if self._state.divided is not None:
            self._state.divided.update.waiting = None
        if self.sync is not None:
            self.sync.begin_step()

    def await_update(self, update: WaitingUpdate | None) -> None:
        """Note a step whose sums are complete."""
        if self._state.divided is not None:
            self._state.divided.update.waiting = update

    def note_update(self, norm: float, after: Callable[[], object] | None) -> None:
        """Note that this rank has applied a step, whose gradients had this norm, and what is to be called after it."""
        if (divided := self._state.divided) is not None:
            divided.update = UpdateProgress(None, norm, after)

    def call_after(self) -> None:
        """Call what belongs to the step that was applied last: all weights of it have arrived."""
        if (divided := self._state.divided) is not None and divided.update.after is not None:
            divided.update.after()
            divided.update.after = None

    def take_waited_s(self) -> dict[str, float]:
        """Return how long the phases of a step have waited for weights since the last call."""
        return {} if self.sync is None else self.sync.take_waited_s()

    def drop_gradients(self) -> None:
        """Forget the sums of the parts, unless they wait for an update that other ranks may have applied."""
        divided = self._state.divided
        if divided is not None and divided.update.waiting is None:
            divided.drop_gradients()
