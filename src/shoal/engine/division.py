"""How the ranks of a world divide the batch: equally, as set, or by their measured speeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.config.schema import EngineConfig
from shoal.cost.batch_plan import BatchPlan, redivide_batch, weights_of
from shoal.engine.balance import Balance, Division
from shoal.engine.checkpoint import Shares
from shoal.sync.world import World


class BatchDivision:
    """The present division, and what the next one depends on. `Replica.change_plan` changes it between two steps."""

    def __init__(self, config: EngineConfig, model: nn.Module, world_size: int) -> None:
        self._run, self._train = config.run, config.train
        self._model = model
        self.plan = BatchPlan(1, (1,) * world_size)
        self.largest_micro_batch = 1  # The largest micro-batch that there is memory for.
        # Micro-batches keep their shape when the batch is divided anew: the model is compiled for it.
        self.has_fixed_shapes = False
        self.balance = Balance(_balance_mode(config))  # Makes the shares follow the ranks' speeds.

    def set(self, plan: BatchPlan, largest_micro_batch: int) -> None:
        self.plan, self.largest_micro_batch = plan, largest_micro_batch

    def fix_shapes(self, is_fixed: bool) -> None:
        self.has_fixed_shapes = is_fixed

    def at_once(self) -> BatchPlan:
        """Return the same shares, each in one micro-batch. Ranks that join learn of the size."""
        self.largest_micro_batch = self.plan.global_batch
        return BatchPlan(self.largest_micro_batch, self.plan.shares)

    def keep_equal(self) -> None:
        """Never follow the ranks' speeds."""
        self.balance = Balance("off")

    def weights_of(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the shares of the ranks with these ids, relative to each other: by speed if that was measured."""
        return self.balance.weights(ids) or weights_of(self._run, ids)

    def redivide(self, global_batch: int, largest_micro_batch: int, ids: Sequence[int]) -> None:
        """Divide this batch over the ranks with these ids."""
        plan = redivide_batch(global_batch, largest_micro_batch, self.weights_of(ids), self.has_fixed_shapes)
        self.set(plan, largest_micro_batch)

    def to_save(self, world: World) -> Shares | None:
        """Return the shares of the next step for a checkpoint; None if they do not follow speeds."""
        if not self.balance.weights(world.ids):
            return None
        return Shares(self.plan.micro_batch, world.ids, self.plan.shares, dict(self.balance.speeds))

    def as_saved(self, saved: Shares, world: World) -> BatchPlan:
        """Return the division of a checkpoint's ranks, or one by their speeds if its ranks were others."""
        self.balance.adopt(saved.speeds)
        plan = BatchPlan(saved.micro_batch, saved.shares)
        if saved.ids == world.ids and plan.global_batch == self.plan.global_batch:
            return plan
        weights = self.weights_of(world.ids)
        return redivide_batch(self.plan.global_batch, self.largest_micro_batch, weights, self.keeps_micro_batch)

    def with_best_micro_batches(self, world: World) -> BatchPlan:
        """Return the division with the right size of micro-batches, when it is known whether the model is compiled.

        The first shares are whole micro-batches, which are small where the shares are unequal: where their size may
        change, a share is computed in as few as there is memory for. Shares of a resumed run may be of any size: a
        model that was compiled since needs whole micro-batches.
        """
        plan, most = self.plan, self.largest_micro_batch
        if not self.keeps_micro_batch:
            return BatchPlan(most, plan.shares) if plan.micro_batch < most else plan
        if plan.is_whole:
            return plan
        return redivide_batch(plan.global_batch, most, self.weights_of(world.ids), is_compiled=True)

    def follows_speed(self, world: World) -> bool:
        """Return whether shares follow speed.

        Without a setting, ranks of one machine and of one kind count as equal.
        """
        run = self._run
        is_set = run.balance is not None or run.speeds is not None or run.devices is not None
        can_differ = is_set or world.local_size < world.size
        return self.balance.is_on and world.size > 1 and can_differ

    def limits(self) -> Division:
        """Return how the batch may be divided: in whole micro-batches where they keep their size.

        After a recovery they may no longer be whole ones (see `redivide_batch`).
        """
        if not self.keeps_micro_batch:
            return Division(1, self.largest_micro_batch)
        micro_batch = self.plan.micro_batch
        return Division(micro_batch if self.plan.is_whole else 1, micro_batch)

    @property
    def keeps_micro_batch(self) -> bool:
        """Whether micro-batches keep their size: it was set, or the model is compiled or normalised over them."""
        return self.has_fixed_shapes or self._train.micro_batch is not None or self._has_fixed_layers

    @cached_property
    def _has_fixed_layers(self) -> bool:
        return any(isinstance(module, _BatchNorm) or _is_compiled(module) for module in self._model.modules())


def _balance_mode(config: EngineConfig) -> str | None:
    """Return how shares follow speeds. Given weights are kept, unless the user wants them to follow."""
    run = config.run
    if config.sync.measure == "off" or (run.weights is not None and run.balance != "live"):
        return "off"
    # The speeds of a profile may be wrong, also where machines turn out to be equal.
    return run.balance or ("live" if run.speeds else None)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether a program compiled this module, by `torch.compile(module)` or `module.compile()`.

    shoal's own blocks do not count: they differ between CPUs and GPUs, and all ranks agree on `has_fixed_shapes`.
    """
    is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return is_compiled and not hasattr(module, "takes_any_batch")
