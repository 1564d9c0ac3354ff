"""Several updates in one step, such as those of the two models of a GAN.

A *part* of a step updates some of the optimizers before the step ends: what comes after it in the step computes with
their new weights. The end of the step, `step.update`, is still what all ranks do or none. So a part keeps what it is
about to change, and puts it back when the step is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.engine.replica import Replica
from shoal.engine.training_state import load_options, options_of
from shoal.errors import UsageError

# Allows the program's own calls of optimizers and scalers while it is entered.
AtWork = Callable[[], AbstractContextManager[None]]


class PartUpdates:
    """The parts of the present step."""

    def __init__(self, replica: Replica, at_work: AtWork) -> None:
        self._replica = replica
        self._at_work = at_work
        self._copies: dict[Optimizer, OptimizerCopy] = {}
        self._scaler_state: dict[str, Any] | None = None
        self.current: tuple[Optimizer, ...] = ()  # The optimizers of the part that is under way.
        self.updated: list[Optimizer] = []  # Those that parts of this step have updated.
        self.exchange_s = 0.0  # How long their exchanges took in this step.

    def begin_step(self) -> None:
        self.current, self.updated, self.exchange_s = (), [], 0.0
        self._scaler_state = None

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        attached = self._replica.state.optimizers
        self.current = tuple(optimizers)
        if not self.current or any(optimizer not in attached for optimizer in self.current):
            raise UsageError(
                "step.part got an optimizer that is not attached",
                why="a part of a step updates one or more of the optimizers that session.attach got",
                fix="attach it before the loop, and write: with step.part(optimizer): …",
            )

    def rest(self, only: Iterable[Optimizer] | None) -> list[Optimizer]:
        """Return what the end of the step updates: `only` these, or all that no part has updated."""
        attached = self._replica.state.optimizers
        chosen = [optimizer for optimizer in attached if optimizer not in self.updated] if only is None else list(only)
        if not chosen or any(optimizer not in attached for optimizer in chosen):
            raise UsageError(
                "step.update has no optimizer left to update"
                if only is None
                else "step.update got an optimizer that is not attached",
                why="the last update of a step ends it, on all ranks or on none",
                fix="end the step with the last update in place of a part: step.update(only=optimizer)",
            )
        return chosen

    def end(self) -> None:
        """Update the optimizers of the present part, unless a result was not finite: the step will be refused."""
        optimizers, self.current, scaler = self.current, (), self._replica.scaler
        with self._at_work():
            for optimizer in optimizers:
                if optimizer not in self.updated:
                    self._copies.setdefault(optimizer, OptimizerCopy(optimizer)).take()
                    self.updated.append(optimizer)
            if scaler is not None and self._scaler_state is None:
                self._scaler_state = scaler.state_dict()
            if self._replica.steps.nonfinite is not None:
                if scaler is not None:
                    # That only forgets that gradients were unscaled, which it refuses to do twice.
                    scaler.update(scaler.get_scale())
                return
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()

    def undo(self) -> None:
        """Put back what the parts of this step have changed."""
        for optimizer in self.updated:
            self._copies[optimizer].restore()
        if self._scaler_state is not None and self._replica.scaler is not None:
            with self._at_work():
                self._replica.scaler.load_state_dict(self._scaler_state)
        self.begin_step()


class OptimizerCopy:
    """The parameters, the state and the options of an optimizer, as they were. Its memory is used again."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        self._options: list[dict[str, Any]] = []

    @torch.no_grad()
    def take(self) -> None:
        parameters = parameters_of([self._optimizer])
        # Some optimizers count their steps there.
        self._options = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in options_of(self._optimizer)
        ]
        if not self._weights:
            self._weights = [torch.empty_like(parameter) for parameter in parameters]
            self._states = [{} for _ in parameters]
        for parameter, weight, kept in zip(parameters, self._weights, self._states, strict=True):
            weight.copy_(parameter)
            state = self._optimizer.state.get(parameter, {})
            for name in kept.keys() - state.keys():
                del kept[name]
            for name, value in state.items():
                before = kept.get(name)
                if isinstance(value, Tensor) and isinstance(before, Tensor) and before.shape == value.shape:
                    before.copy_(value)
                else:
                    kept[name] = value.clone() if isinstance(value, Tensor) else value

    @torch.no_grad()
    def restore(self) -> None:
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            load_options(group, options)
        for parameter, weight, kept in zip(parameters_of([self._optimizer]), self._weights, self._states, strict=True):
            parameter.copy_(weight)
            state = self._optimizer.state[parameter]
            for name in state.keys() - kept.keys():
                del state[name]
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    state[name].copy_(value)
                else:
                    state[name] = value
            if not kept:
                # The optimizer makes its state with the first update, and takes an empty one for made.
                del self._optimizer.state[parameter]


def parameters_of(optimizers: Collection[Optimizer]) -> list[Tensor]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]
