"""Weights that are still on their way, or on other ranks: a call of torch that uses one waits for it, or is refused.

With ZeRO-1 and ZeRO-2 a step's new weights travel while the next one begins. A program may use a weight anywhere: in
the forward of a module, of another module that shares it, or in a line of its own that prints it. So each call of torch
that gets one of these weights is intercepted, and waits first until this weight has arrived. That costs a few
microseconds a call, and ends with the backward of the step. With ZeRO-3 a weight that is not gathered has no memory,
and reading it would end the process: such a call raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# What a weight has without its numbers.
_FIELDS = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_mkldnn", "retains_grad"),
    "_backward_hooks",
)
_METHODS = (
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "storage_offset", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "untyped_storage", "register_hook", "register_post_accumulate_grad_hook"),
    *("__len__", "requires_grad_", "get_device", "is_inference"),
)
_WITHOUT_NUMBERS = {
    *(getattr(Tensor, name).__get__ for name in _FIELDS),
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(Tensor.grad, access) for access in ("__get__", "__set__", "__delete__")),
}


def can_intercept(model: nn.Module) -> bool:
    """Return whether every use of a weight can be intercepted: not inside compiled code."""
    is_compiled = any(
        isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )
    return not is_compiled and all(parameter.device.type == "cpu" for parameter in model.parameters())


class WeightGuard(TorchFunctionMode):
    """Intercepts the uses of weights between `begin` and `end`; each weight's first one calls `before_use`."""

    def __init__(self, before_use: Callable[[int], bool]) -> None:
        """`before_use` gets the weight's bucket, and returns whether further uses need not be intercepted."""
        super().__init__()
        self._before_use = before_use
        self._buckets: dict[int, int] = {}  # By the identity of a weight that is on its way.
        self._is_entered = False

    def begin(self, buckets: Mapping[nn.Parameter, int]) -> bool:
        """Begin to intercept; return False where the program intercepts calls itself.

        A block of its own that ends before ours would take ours off instead.
        """
        if _get_current_function_mode_stack():
            return False
        self._buckets = {id(weight): bucket for weight, bucket in buckets.items()}
        self.__enter__()  # type: ignore[no-untyped-call]
        self._is_entered = True
        return True

    def end(self) -> None:
        """Stop intercepting; inside a block of the program that began later, only pass calls on."""
        self._buckets = {}
        if self._is_entered and (stack := _get_current_function_mode_stack()) and stack[-1] is self:
            self.__exit__(None, None, None)
            self._is_entered = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._buckets and function not in _WITHOUT_NUMBERS:
            self._await_all_of(args)
            if kwargs:
                self._await_all_of(kwargs.values())
        return function(*args, **(kwargs or {}))

    def _await_all_of(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                bucket = self._buckets.get(id(value))
                if bucket is not None and self._before_use(bucket):
                    self._buckets.pop(id(value), None)
            elif isinstance(value, list | tuple):
                self._await_all_of(value)
