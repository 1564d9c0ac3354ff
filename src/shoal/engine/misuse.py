"""Mistakes in a user's loop that would train something else without a word: refused where they are made.

A plain loop calls `loss.backward()`, `optimizer.step()` and the methods of its grad scaler; a session does that for it.
What is left of such a loop beside a session changes one replica and not the others, or scales twice. And a plain
loop's loss is mostly a mean, where a session divides a sum by the samples of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shoal.engine.training_state import TrainingState
from shoal.errors import ShoalError, UsageError

# Parameters of each optimizer whose gradients are watched: a call for every gradient of a model would take longer.
_WATCHED = 4
_SCALER_METHODS = ("scale", "unscale_", "step", "update")
# Operations that change neither a sum nor a mean, and those that leave a mean a mean.
_NEUTRAL = {"ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "NegBackward0"}
# `x * number` inside of torch's own functions; in Python it is MulBackward0.
_WEIGHTED = "MulBackward1"
_SUMS = {"AddBackward0", "SubBackward0"}
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


class LoopGuard:
    """Refuses what the program does itself and the session does too.

    It keeps no reference to a world: torch keeps its hooks as long as the program's objects exist.
    """

    def __init__(self, state: TrainingState) -> None:
        self._is_own = False  # The session itself is at work.
        self._watched = [parameter for optimizer in state.optimizers for parameter in _spread(optimizer)]
        self._reached: set[int] = set()  # Those of the watched that have got a gradient in this step.
        self._scalers = [other for other in state.others if isinstance(other, GradScaler)]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_gradient_hook(number))
            for number, parameter in enumerate(self._watched)
        ]
        self._hooks += [optimizer.register_step_pre_hook(self._refuse_step) for optimizer in state.optimizers]
        for scaler in self._scalers:
            for name in _SCALER_METHODS:
                setattr(scaler, name, self._guarded(scaler, name))

    def close(self) -> None:
        """Leave the program's objects as they were."""
        for hook in self._hooks:
            hook.remove()
        for scaler in self._scalers:
            for name in _SCALER_METHODS:
                vars(scaler).pop(name, None)
        self._hooks, self._scalers = [], []

    @contextmanager
    def session_at_work(self) -> Iterator[None]:
        """Allow everything inside: it is the session's own work."""
        was_own, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = was_own

    def begin_step(self) -> None:
        self._reached.clear()

    def check_gradients_kept(self, step: int) -> None:
        """Refuse a step whose gradients were removed between its backward and its update."""
        if any(self._watched[number].grad is None for number in self._reached):
            raise UsageError(
                f"step {step} has lost gradients that its backward had made",
                why="the program removed them before step.update, for example by optimizer.zero_grad()",
                fix="remove that call: the session begins every step without gradients",
            )

    def _make_gradient_hook(self, number: int) -> Any:
        def hook(_: Tensor) -> None:
            if not self._is_own:
                raise UsageError(
                    "the model got a gradient from another backward than step.backward",
                    why="only step.backward divides the loss and exchanges its gradients: this one would make the "
                    "replicas differ",
                    fix="write step.backward(loss) in place of loss.backward(); add several losses of a micro-batch "
                    "first. For gradients beside the training use torch.autograd.grad",
                )
            self._reached.add(number)

        return hook

    def _refuse_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_own:
            raise UsageError(
                f"the program called {type(optimizer).__name__}.step()",
                why="step.update calls it on all ranks or on none, with the exchanged gradients; another call would "
                "make the replicas differ",
                fix="remove that call, and call step.update() where it was",
            )

    def _guarded(self, scaler: GradScaler, name: str) -> Any:
        method = getattr(scaler, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if not self._is_own:
                raise UsageError(
                    f"the program called {type(scaler).__name__}.{name}()",
                    why="the scaler is attached: the session scales losses and gradients with it, and does so once",
                    fix="remove the scaler's calls: step.backward(loss) takes the loss as it is, and step.update() "
                    "does the rest",
                )
            return method(*arguments, **options)

        return call


def _spread(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return a few parameters of an optimizer, from its first to its last."""
    trained = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    places = {round((len(trained) - 1) * part / (_WATCHED - 1)) for part in range(_WATCHED)} if trained else set()
    return [trained[place] for place in sorted(places)]


# The scale of a loss


def check_scale(
    loss: Tensor, samples: int, count: int | None, warn: Callable[[ShoalError], None] | None = None
) -> None:
    """Raise `UsageError` for the loss of several samples that torch's graph shows to be their mean; warn of a sum of
    other terms."""
    if samples * (count or 1) > 1 and all(reduction == _MEAN for reduction in _reductions(loss.grad_fn)):
        several = f"{samples} samples" if count is None else f"{count} terms"
        raise UsageError(
            f"the loss of a micro-batch of {several} is a mean",
            why="step.backward takes a sum and divides it by the samples of all ranks: a mean would be divided twice, "
            "and the ranks' parts would have wrong weights",
            fix="say of how many terms it is the mean, as in step.backward(loss, mean_of=len(inputs)), or make it a "
            'sum: reduction="sum"',
        )
    terms = _terms_of_sum(loss.grad_fn)
    if warn is not None and count is None and terms not in (None, samples):
        warn(
            UsageError(
                f"the loss of a micro-batch of {samples} samples is a sum of {terms:,} terms",
                why="it is divided by samples, so the loss and its gradients are larger than a mean over the terms",
                fix=f"for the mean over the terms: step.backward(loss, count={terms})",
            )
        )


def check_mean(loss: Tensor, terms: int) -> None:
    """Raise `UsageError` for a loss that was said to be a mean of several terms, and is their sum."""
    if terms > 1 and all(getattr(node, "_saved_reduction", None) == _SUM for node in _parts(loss.grad_fn)):
        raise UsageError(
            f"the loss was said to be the mean of {terms:,} terms, and it is a sum",
            why="step.backward multiplies a mean by its terms, so the loss would be too large by that",
            fix="leave mean_of out for the sum over the samples, step.backward(loss), or write count for the sum of "
            f"other terms: step.backward(loss, count={terms})",
        )


def _parts(node: Any) -> Iterator[Any]:
    """Yield the operations whose results a loss is the sum of; one that is multiplied or divided counts as itself."""
    while node is not None and node.name() in _NEUTRAL:
        node = node.next_functions[0][0]
    if node is not None and node.name() in _SUMS:
        for part, _ in node.next_functions:
            yield from _parts(part)
    else:
        yield node


def _terms_of_sum(node: Any) -> int | None:
    """Return how many terms a loss is the sum of, where torch's graph shows it."""
    while node is not None and node.name() in _NEUTRAL:
        node = node.next_functions[0][0]
    if node is None or node.name() != "NllLossBackward0" or node._saved_reduction != _SUM:
        return None
    logits = node.next_functions[0][0]
    return int(logits._input_metadata[0].shape[0]) if hasattr(logits, "_input_metadata") else None


def _reductions(node: Any) -> Iterator[int | None]:
    """Yield how each part of a loss was reduced: `_MEAN`, `_SUM`, or None where that is not known."""
    while node is not None and (node.name() in {*_NEUTRAL, _WEIGHTED} or _is_weighted(node)):
        node = node.next_functions[0][0]
    if node is None:
        yield None
    elif node.name() in _SUMS:
        for part, _ in node.next_functions:
            if part is not None:
                yield from _reductions(part)
    else:
        yield _MEAN if node.name() == "MeanBackward0" else getattr(node, "_saved_reduction", None)


def _is_weighted(node: Any) -> bool:
    """Whether it divides by a number, or multiplies by one that is a weight and not a count: a mean stays a mean."""
    if node.name() not in ("MulBackward0", "DivBackward0") or node.next_functions[1][0] is not None:
        return False
    factor = getattr(node, "_saved_other", None)
    is_count = factor is None or (float(factor) >= 2 and float(factor).is_integer())
    return bool(node.name() == "DivBackward0") or not is_count
