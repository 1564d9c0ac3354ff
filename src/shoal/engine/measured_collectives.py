"""Change torch's modules so that a measured script's collectives are timed, whichever library calls them.

DDP's reducer is C++: it gets a process group that times each all-reduce of the real one. A wrapped group, and not a
communication hook: DDP divides gradients while it copies them into its buckets, but only without a hook; with one every
gradient is read and written once more. It also leaves the script's own hook in place, which is timed as a whole.

All else that calls from Python (the script, FSDP2, optimizers that divide their state) reaches a method of
`ProcessGroup`, and waits in one of `Work` or `Future`. These are wrapped in the class, so that groups, works and
functions stay the objects that they were, and code that torch.compile traces is not changed. What is called from C++,
as functional collectives of DTensor and of compiled graphs are, is not seen.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.engine.measured_steps import make_mark

if TYPE_CHECKING:
    import torch.distributed as dist

    from shoal.engine.measure import Measurement

# Methods of a process group by the kind of collective. torch 2.13 has new names for some; their old ones remain.
_METHODS = {
    "all-reduce": ("allreduce", "allreduce_coalesced"),
    "all-gather": (
        "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    "reduce-scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    "all-to-all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier",),
}  # fmt: skip


def measure_collectives(module: types.ModuleType, measurement: Measurement) -> None:
    """Time the collectives that are called from Python. `module` is torch.distributed."""
    if not module.is_available():
        return
    group_class: Any = module.ProcessGroup
    for kind, names in _METHODS.items():
        for name in names:
            if hasattr(group_class, name):
                setattr(group_class, name, _timed_collective(name, getattr(group_class, name), kind, measurement))
    # C++ sends the buffers of DDP and FSDP.
    torch_distributed: Any = module
    torch_distributed._broadcast_coalesced = _timed_collective(
        "_broadcast_coalesced", torch_distributed._broadcast_coalesced, "broadcast", measurement
    )
    _measure_waits(module.Work, measurement)


def _measure_waits(work_class: Any, measurement: Measurement) -> None:
    import torch

    future_class: Any = torch._C.Future
    get_future = work_class.get_future

    def get_timed_future(work: Any) -> Any:
        future = get_future(work)
        measurement.follow_work(future, work)
        return future

    work_class.get_future = _renamed("get_future", get_future, get_timed_future)
    for waiting_class in (work_class, future_class):
        waiting_class.wait = _timed_wait(waiting_class.wait, measurement)


def measure_futures(module: types.ModuleType, measurement: Measurement) -> None:
    """Time the wait for several collectives at once. `module` is torch.futures."""
    torch_futures: Any = module
    collect_all = torch_futures.collect_all

    @functools.wraps(collect_all)
    def collect_all_timed(futures: Any) -> Any:
        collected = collect_all(futures)
        if futures:
            # A wait for collectives of several kinds counts as one for the last.
            measurement.follow_work(collected, futures[-1])
        return collected

    torch_futures.collect_all = collect_all_timed


def _renamed(name: str, method: Any, wrapper: Any) -> Any:
    """Return the wrapper as a method of this name.

    A class in Python that inherits from one in C++ calls the method it overrides. pybind11 sees by the name of the
    calling function's code that this call must not come back to Python; under another name it would never end.
    """
    wrapper.__code__ = wrapper.__code__.replace(co_name=name)
    return functools.wraps(method, updated=())(wrapper)


def _timed_collective(name: str, method: Any, kind: str, measurement: Measurement) -> Any:
    def timed(group: Any, *args: Any, **kwargs: Any) -> Any:
        is_measured = measurement.is_on and not measurement.is_in_hook
        values = args if len(args) > 1 or not kwargs else (*args, *kwargs.values())
        is_cuda = measurement.count_collective(kind, values) if is_measured else None
        if is_cuda is None:
            return method(group, *args, **kwargs)
        begin = make_mark(is_cuda)
        work = method(group, *args, **kwargs)
        measurement.end_collective(kind, is_cuda, begin, work)
        return work

    timed.untimed = method  # type: ignore[attr-defined]
    return _renamed(name, method, timed)


def _timed_wait(method: Any, measurement: Measurement) -> Any:
    def timed(work: Any, *args: Any, **kwargs: Any) -> Any:
        known = measurement.waited.get(work) if measurement.is_on else None
        if known is None:
            return method(work, *args, **kwargs)
        kind, is_cuda = known
        begin = make_mark(is_cuda)
        result = method(work, *args, **kwargs)
        measurement.end_wait(kind, is_cuda, begin)
        return result

    return _renamed("wait", method, timed)


def size_of(value: Any) -> tuple[int, bool]:
    """Return the bytes of an argument, a tensor or lists of them, and whether they are on a GPU."""
    if isinstance(value, (list, tuple)):
        sizes = [size_of(part) for part in value]
        return sum(size for size, _ in sizes), any(is_cuda for _, is_cuda in sizes)
    # Not `nbytes`, which a sparse tensor does not have.
    return (value.numel() * value.element_size(), value.is_cuda) if hasattr(value, "element_size") else (0, False)


def measure_ddp(module: types.ModuleType, measurement: Measurement) -> None:
    """Give the reducer of every DDP model a group that is timed, and time the script's own communication hooks."""
    ddp_class: Any = module.DistributedDataParallel
    make_reducer, register_hook = ddp_class._ddp_init_helper, ddp_class.register_comm_hook

    @functools.wraps(make_reducer)
    def make_timed_reducer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not measurement.is_on:
            return make_reducer(self, *args, **kwargs)
        group = self.process_group
        self.process_group = timed = _timed_group_class()(group, measurement)
        try:
            made = make_reducer(self, *args, **kwargs)
        finally:
            # Only the reducer uses the timed group. The script may pass this attribute to torch.distributed.
            self.process_group = group
        measurement.add_model(self, timed)
        return made

    @functools.wraps(register_hook)
    def register_timed_hook(self: Any, state: object, hook: Callable[..., Any]) -> Any:
        @functools.wraps(hook)
        def timed_hook(state: object, bucket: dist.GradBucket) -> Any:
            tensor = bucket.buffer()
            exchange = measurement.begin_exchange(tensor)
            # The collectives that it calls are part of this exchange.
            measurement.is_in_hook = True
            try:
                future = hook(state, bucket)
            finally:
                measurement.is_in_hook = False
            if exchange is not None:
                future.add_done_callback(lambda _: measurement.end_exchange(exchange, tensor))
            return future

        measurement.name_comm_hook(getattr(hook, "__qualname__", type(hook).__name__))
        return register_hook(self, state, timed_hook)

    ddp_class._ddp_init_helper = make_timed_reducer
    ddp_class.register_comm_hook = register_timed_hook


@functools.cache
def _timed_group_class() -> Any:
    """Return the class of the group: torch is imported by the script, after this module."""
    import torch.distributed as dist

    class TimedGroup(dist.ProcessGroup):
        """The collectives that DDP's reducer uses; each is that of the real group."""

        def __init__(self, group: dist.ProcessGroup, measurement: Measurement) -> None:
            # torch's stubs omit this constructor, the only one whose object has methods that C++ calls.
            super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
            self._group = group
            self._measurement = measurement

        def getBackendName(self) -> str:  # noqa: N802 - torch calls it so
            """Return a name other than gloo: DDP would ask for the gloo backend to describe it in its log."""
            return "measured"

        def allreduce(self, *args: Any, **kwargs: Any) -> dist.Work:
            tensor, measurement = args[0][0], self._measurement
            # DDP also sends which parameters were used, as integers.
            exchange = measurement.begin_exchange(tensor) if tensor.is_floating_point() else None
            work: dist.Work = self._untimed("allreduce")(*args, **kwargs)
            if exchange is not None:
                work.get_future().add_done_callback(lambda _: measurement.end_exchange(exchange, tensor))
            return work

        def broadcast(self, *args: Any, **kwargs: Any) -> dist.Work:
            work: dist.Work = self._untimed("broadcast")(*args, **kwargs)
            return work

        def allgather(self, *args: Any, **kwargs: Any) -> dist.Work:
            work: dist.Work = self._untimed("allgather")(*args, **kwargs)
            return work

        def _untimed(self, name: str) -> Any:
            """Return the group's method that does not count the call as one of the script."""
            method = getattr(type(self._group), name)
            return functools.partial(getattr(method, "untimed", method), self._group)

    return TimedGroup


def measure_optimizers(module: types.ModuleType, measurement: Measurement) -> None:
    module.register_optimizer_step_pre_hook(measurement.before_optimizer_step)
    module.register_optimizer_step_post_hook(measurement.after_optimizer_step)


def leave_out_preparation(module: types.ModuleType, measurement: Measurement) -> None:
    """Do not count the step of an optimizer with which torch's checkpoints make its state, with a rate of 0.

    `module` is torch.distributed.checkpoint.state_dict.
    """
    prepare: Any = getattr(module, "_init_optim_state", None)
    if prepare is None:
        return

    @functools.wraps(prepare)
    def prepare_uncounted(*args: Any, **kwargs: Any) -> Any:
        measurement.is_counting = False
        try:
            return prepare(*args, **kwargs)
        finally:
            measurement.is_counting = True

    module._init_optim_state = prepare_uncounted  # type: ignore[attr-defined]


# What is done with a module of torch when the script has imported it.
CHANGES: dict[str, Callable[[types.ModuleType, Measurement], None]] = {
    "torch.distributed": measure_collectives,
    "torch.futures": measure_futures,
    "torch.nn.parallel.distributed": measure_ddp,
    "torch.optim.optimizer": measure_optimizers,
    "torch.distributed.checkpoint.state_dict": leave_out_preparation,
}
