"""Weights that are still on their way, or on other ranks: a call of torch that uses one waits for it, or is refused.

With ZeRO-1 and ZeRO-2 a step's new weights travel while the next one begins. A program may use a weight anywhere: in
the forward of a module, of another module that shares it, or in a line of its own that prints it. So each call of torch
that gets one of these weights, or another tensor in the same memory, is intercepted, and waits first until this weight
has arrived. That costs a few microseconds a call, and ends with the backward of the step. With ZeRO-3 a weight that is
not gathered has no memory, and reading it would end the process: such a call raises an error.

Calls of other threads are not intercepted, and those inside of compiled code cannot be: a process that compiles waits
for all weights at the end of each step.
"""

from __future__ import annotations

import sys
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
    *("is_floating_point", "is_complex", "register_hook", "register_post_accumulate_grad_hook"),
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


def has_compiled_code() -> bool:
    """Return whether this process has functions of `torch.compile` or `torch.jit`: they may use any weight."""
    scripted: Any = torch.jit._state._python_cu
    if scripted.get_functions():
        return True
    if (dynamo := sys.modules.get("torch._dynamo.eval_frame")) is None:
        return False
    # torch makes one context of its own, for code that is not to be compiled.
    return any(backend is not None for backend in dynamo.cached_backends.values())


def _memory_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others; 0 for one that has no memory of its own kind."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    try:
        memory: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0
    return memory


class WeightGuard(TorchFunctionMode):
    """Intercepts the uses of weights between `begin` and `end`; each weight's first one calls `before_use`."""

    def __init__(self, before_use: Callable[[int], bool]) -> None:
        """`before_use` gets the weight's bucket, and returns whether further uses need not be intercepted."""
        super().__init__()
        self._before_use = before_use
        self._buckets: dict[int, set[int]] = {}  # By the memory of weights that are not here.
        self._is_entered = False

    def begin(self, buckets: Mapping[nn.Parameter, int]) -> bool:
        """Begin to intercept; return False where the program intercepts calls itself, or has compiled code.

        A block of its own that ends before ours would take ours off instead.
        """
        if _get_current_function_mode_stack() or has_compiled_code():
            return False
        self._buckets = {}
        for weight, bucket in buckets.items():
            self._buckets.setdefault(_memory_of(weight), set()).add(bucket)
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
                memory = _memory_of(value)
                if all(self._before_use(bucket) for bucket in self._buckets.get(memory, ())):
                    self._buckets.pop(memory, None)
            elif isinstance(value, list | tuple):
                self._await_all_of(value)
            elif isinstance(value, dict):
                self._await_all_of(value.values())
