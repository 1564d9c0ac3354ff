"""`python -P -m shoal.engine.measure SCRIPT ARGS`: run a script unchanged and measure its training.

`shoal run --measure` starts the ranks this way. The script runs as `__main__`, as Python itself would run it; torch is
not imported before the script imports it. An import hook changes modules of torch when the script loads them:

    torch.distributed, torch.nn.parallel.distributed   collectives are timed (`measured_collectives.py`)
    torch.optim.optimizer   global hooks before and after `optimizer.step()`, which ends a step
    torch.distributed.checkpoint.state_dict   the step with which it makes the state of an optimizer is not counted

No collective is added, since ranks that take different numbers of steps would then wait for each other forever. Each
rank records durations of its own. `ready_s` is the time from the end of one exchange, when all ranks are at the same
point, until this rank has handed over its last gradient; readers of the events compare these durations to find who
waited (`records/rank_log.py`).
"""

from __future__ import annotations

import atexit
import builtins
import functools
import hashlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import platform
import resource
import runpy
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shoal
from shoal.control.processes import RUN_MARK, is_of_own_run
from shoal.control.rank_env import SETTINGS, Placement
from shoal.control.rank_stacks import register_stacks
from shoal.engine.measured_collectives import CHANGES, size_of
from shoal.engine.measured_steps import Exchange, StepClock, TimedStep, make_mark
from shoal.errors import Interrupted, RunFailed
from shoal.events import EventLog, to_stderr
from shoal.host.facts import WireCounter, boot_id, cpu_name
from shoal.host.node_stats import NodeWatch, cpu_wait_s
from shoal.host.topology import this_topology
from shoal.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

    from shoal.engine.measured_steps import Mark
    from shoal.engine.recorder import StepProfiler

# The interface's counter is read every few steps: it takes longer than all else that is done in a step.
_COUNT_WIRE_EVERY = 10
# Steps of a GPU whose queue has not reached their end yet.
_MOST_PENDING = 64


def _guarded(method: Callable[..., Any]) -> Any:
    """Do nothing while measuring is off, and turn it off after an error of its own: it must not end a training."""

    @functools.wraps(method)
    def guarded(self: Measurement, *args: Any) -> Any:
        if not self.is_on:
            return None
        try:
            return method(self, *args)
        except Exception as error:
            self.turn_off(f"it failed with {type(error).__name__}: {error}")
            return None

    return guarded


class _Machine:
    """The machine of a rank: what it is, the bytes that it sends, and what else runs on it."""

    def __init__(self, run: RunFolder, placement: Placement, hardware: dict[str, Any]) -> None:
        self.hardware = hardware
        self.interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
        self._run, self._placement = run, placement
        self._wire: WireCounter | None = None
        self._wire_read_at = 0  # the step at which the counter was read last
        self._watch: NodeWatch | None = None
        self._samples: EventLog | None = None
        self._began, self._waited_s = 0.0, 0.0

    def watch(self, step: int) -> None:
        self._began, self._waited_s = time.perf_counter(), cpu_wait_s()
        # torch has been imported by the script.
        threads = sys.modules["torch"].get_num_threads()
        self._watch = NodeWatch(is_of_own_run, self._keep_sample, threads=threads)
        self._watch.start()
        if self._placement.local_rank == 0:
            self._wire, self._wire_read_at = WireCounter(self.interface), step

    def _keep_sample(self, sample: Mapping[str, Any]) -> None:
        if self._placement.local_rank == 0:
            if self._samples is None:
                self._samples = EventLog(self._run.samples(self._placement.node), self._placement.rank, most_kept=100)
            self._samples.write("sample", **sample)

    def count_wire(self, step: int) -> dict[str, int]:
        """Return the bytes that the machine has sent in a step, every few steps."""
        if self._wire is None or step % _COUNT_WIRE_EVERY:
            return {}
        sent = self._wire.since_last()
        # The first reading covers one step less than the others: the counter is opened with the first step.
        steps, self._wire_read_at = step - self._wire_read_at, step
        return {"wire_bytes": sent // steps} if sent is not None else {}

    def describe(self, steps: int) -> dict[str, Any]:
        """Return what was seen of this machine beside the training, to explain a rank that is late."""
        if self._watch is None:
            return {}
        self._watch.close()
        ran_s = max(1e-3, time.perf_counter() - self._began)
        return {
            "starved": round(min(1.0, (cpu_wait_s() - self._waited_s) / ran_s), 4),
            "gc_s": round(self._watch.take_gc_s() / max(1, steps), 6),
            "machine": [round(value, 4) for value in self._watch.overall().numbers],
            "top_process": self._watch.top_process,
        }


class Measurement:
    """Times the steps of one rank and writes them as its events."""

    def __init__(self, run: RunFolder, placement: Placement, hardware: dict[str, Any] | None = None) -> None:
        self._run = run
        self._placement = placement
        self._log: EventLog | None = None
        self._process = os.getpid()
        self.is_on = True
        self.error: BaseException | None = None  # what ended the script
        self._step = 0
        self._clock = StepClock()
        self._current = TimedStep(time.perf_counter())
        self._pending: deque[TimedStep] = deque()
        self.is_counting = True  # not while the state of an optimizer is made
        self.is_in_hook = False  # in the script's own communication hook, which is timed as a whole
        # Kinds of the collectives under way, by what is waited for, a Work or a Future; and whether on a GPU.
        self.waited: weakref.WeakKeyDictionary[object, tuple[str, bool]] = weakref.WeakKeyDictionary()
        # The optimizer whose steps are counted, and those that have stepped since it did.
        self._counted: weakref.ref[Optimizer] | None = None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._kept: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # Whose parameters are compared at the end.
        self._models: list[weakref.finalize[..., Any]] = []
        self._digests: dict[int, str] = {}
        self._parameter_count = 0
        self._is_sharded = False
        self._comm_hook: str | None = None
        self._machine = _Machine(run, placement, hardware or {})
        # The reducer holds only the C++ half of a group.
        self._groups: weakref.WeakKeyDictionary[DistributedDataParallel, object] = weakref.WeakKeyDictionary()
        self._profile_steps = json.loads(os.environ.get(SETTINGS, "{}")).get("train", {}).get("profile_steps")
        self._profiler: StepProfiler | None = None

    def turn_off(self, why: str) -> None:
        """Stop measuring; the script continues."""
        if self.is_on:
            self.is_on = False
            to_stderr(f"--measure is off: {why}")

    @_guarded
    def change_module(self, change: Callable[[types.ModuleType, Measurement], None], module: types.ModuleType) -> None:
        change(module, self)

    def add_model(self, ddp: DistributedDataParallel, group: object) -> None:
        """Take note of a model in DDP. Its digest is computed when it is freed, or at the end."""
        if not self._clock.has_ddp:
            self._clock.has_ddp = True
            self._models.clear()
            self._digests.clear()
            self._parameter_count = 0
            self._current.began = make_mark(next(ddp.module.parameters()).is_cuda)
        self._groups[ddp] = group
        self._profile(0)
        self._keep(ddp, dict(ddp.module.named_parameters()))

    def name_comm_hook(self, name: str) -> None:
        self._comm_hook = name

    def _keep(self, owner: object, parameters: dict[str, Tensor]) -> None:
        """Keep the parameters exactly as long as their owner: the script's model may be a local variable."""
        self._parameter_count += sum(parameter.numel() for parameter in parameters.values())
        # DTensor (FSDP2) and FlatParameter (FSDP) hold a shard, which differs on every rank.
        if any(hasattr(p, "to_local") or type(p).__name__ == "FlatParameter" for p in parameters.values()):
            self._is_sharded = True
            return
        self._models.append(weakref.finalize(owner, self._digest, len(self._models), parameters))

    @_guarded
    def _digest(self, number: int, parameters: dict[str, Tensor]) -> None:
        if self.error is None and os.getpid() == self._process:
            self._digests[number] = _digest(parameters)

    @_guarded
    def begin_exchange(self, tensor: Tensor) -> Exchange | None:
        """Return the exchange of DDP that begins now, or None where it is not measured."""
        exchange = Exchange(make_mark(tensor.is_cuda))
        self._current.exchanges.append(exchange)
        self._current.grad_bytes += tensor.nbytes
        # An optimizer that is at work runs backward itself.
        self._current.updated = None
        return exchange

    @_guarded
    def end_exchange(self, exchange: Exchange, tensor: Tensor) -> None:
        exchange.end = make_mark(tensor.is_cuda)

    @_guarded
    def count_collective(self, kind: str, values: Sequence[object]) -> bool | None:
        """Count a collective that is called with these arguments. Return whether a GPU runs it; None if not timed."""
        # All-gather and reduce-scatter have one tensor of a part, and one of the whole.
        (first_bytes, is_cuda), (second_bytes, _) = (size_of(value) for value in (*values, None, None)[:2])
        if is_cuda and _is_capturing():
            return None
        sums = self._current.collectives[kind]
        sums[0] += 1
        sums[1] += max(first_bytes, second_bytes)
        return is_cuda

    @_guarded
    def end_collective(self, kind: str, is_cuda: bool, begin: Mark, work: object) -> None:
        self._current.add_stay(kind, begin, make_mark(is_cuda))
        if work is not None:
            self.waited[work] = kind, is_cuda

    @_guarded
    def end_wait(self, kind: str, is_cuda: bool, begin: Mark) -> None:
        self._current.add_stay(kind, begin, make_mark(is_cuda))

    @_guarded
    def follow_work(self, future: object, work: object) -> None:
        """Take a wait for this future as one for the work."""
        if (known := self.waited.get(work)) is not None:
            self.waited[future] = known

    @_guarded
    def before_optimizer_step(self, optimizer: Optimizer, args: Sequence[Any] = (), kwargs: Any = None) -> None:
        counted = self._counted() if self._counted is not None else None
        # `args` has the optimizer itself. A closure is called in its step, and may run backward.
        has_closure = any(map(callable, (*args[1:], *(kwargs or {}).values())))
        if (counted is None or optimizer is counted) and self.is_counting:
            self._current.updated = None if has_closure else _mark_of(optimizer)
            self._current.stayed_before_update_s = self._current.stayed_s

    @_guarded
    def after_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """End a step when the counted optimizer has stepped: the first one, or one that steps without it."""
        if not self.is_counting:
            return
        counted = self._counted() if self._counted is not None else None
        is_counted = optimizer is counted
        if not is_counted and (counted is None or optimizer in self._stepped):
            self._counted, is_counted = weakref.ref(optimizer), True
            if not self._clock.has_ddp and optimizer not in self._kept:
                self._kept.add(optimizer)
                self._keep(optimizer, dict(_numbered(optimizer)))
        if not is_counted:
            self._stepped.add(optimizer)
            return
        self._stepped.clear()
        now = _mark_of(optimizer)
        self._current.ended = now
        self._pending.append(self._current)
        self._current = TimedStep(now)
        self._profile(self._step + len(self._pending))
        self._write_steps(is_last=False)

    def _profile(self, done: int) -> None:
        """Profile the steps that `--profile-steps` names; `done` steps are over."""
        if not self._profile_steps:
            return
        if self._profiler is None:
            # Not before the script has imported torch.
            from shoal.engine.recorder import StepProfiler

            path = self._run.profile(self._placement.rank)
            self._profiler = StepProfiler(self._profile_steps, path, lambda error: to_stderr(error.seen))
        self._profiler.after_step(done)
        self._profiler.before_step(done + 1)

    def _write_steps(self, is_last: bool) -> None:
        """Write the steps whose times are known: that of a CPU one step later, when callbacks have run for sure."""
        while self._pending and (is_last or len(self._pending) > 1):
            step = self._pending[0]
            if not is_last and len(self._pending) < _MOST_PENDING and not step.is_over():
                return
            self._pending.popleft()
            self._step += 1
            if self._log is None:
                self._write_start(step)
            times = self._clock.divide(step)
            times |= self._machine.count_wire(self._step)
            if isinstance(step.ended, float):
                # The event is written a step later: it has the time at which its step ended.
                times["time"] = round(time.time() - (time.perf_counter() - step.ended), 6)
            if self._log is not None and times["step_s"] > 0:
                self._log.write("step", step=self._step, **times)

    def _write_start(self, step: TimedStep | None) -> None:
        """Open the event log and describe this rank. A step is under way, so nothing here may take long."""
        import torch
        import torch.distributed as dist

        place, joined = self._placement, dist.is_available() and dist.is_initialized()
        is_cuda = step is not None and not isinstance(step.began, float)
        self._log = EventLog(self._run.events(place.rank), place.rank)
        self._log.write(
            "start",
            measured=True,
            world_size=place.world_size,
            params=self._parameter_count,
            threads=torch.get_num_threads(),
            micro_batch=0,
            device=f"cuda:{torch.cuda.current_device()}" if is_cuda else "cpu",
            backend=str(dist.get_backend()) if joined else "",
            node=place.node,
            local_rank=place.local_rank,
            pid=self._process,
            interface=self._machine.interface,
            launcher="shoal",
            sync="ddp" if self._clock.has_ddp else "own",
            comm_hook=self._comm_hook,
            grad_bytes=step.grad_bytes if step is not None and step.grad_bytes else None,
            restarts=place.restarts,
            versions={"python": platform.python_version(), "torch": torch.__version__, "shoal": shoal.__version__},
            hardware={**self._machine.hardware, "gpu": torch.cuda.get_device_name() if is_cuda else None},
        )
        self._machine.watch(self._step)

    @_guarded
    def finish(self) -> None:
        """Write the last steps, the digest of the parameters, the number of exchanges, and how the script ended."""
        if os.getpid() != self._process or "torch" not in sys.modules:
            return
        if self._pending and not isinstance(self._pending[-1].ended, float):
            import torch

            torch.cuda.synchronize()
        if self._profiler is not None:
            self._profiler.close()
        self._write_steps(is_last=True)
        for finalizer in self._models:
            finalizer()
        if self._log is None:
            return
        if self.error is None:
            if self._digests:
                parts = "".join(self._digests[number] for number in sorted(self._digests))
                self._log.write("digest", sha256=hashlib.sha256(parts.encode()).hexdigest())
            status = "finished"
        elif isinstance(self.error, KeyboardInterrupt):
            status = Interrupted.__name__.lower()
        else:
            status = "failed"
            seen = f"{type(self.error).__name__}: {self.error}"
            self._log.write("fault", **RunFailed(f"rank {self._placement.rank}: {seen}").as_dict())
        self._log.write(
            "end",
            status=status,
            step=self._step,
            # None where no exchange was seen, and the ranks may exchange in a way that is not measured.
            exchanges=self._clock.exchange_count if self._clock.has_ddp else self._clock.exchange_count or None,
            is_sharded=self._is_sharded,
            **self._machine.describe(self._step),
            peak_memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        self._log.close()


def _is_capturing() -> bool:
    """Return whether a graph of the GPU is recorded: an event in it has no time."""
    import torch

    return torch.cuda.is_current_stream_capturing()


def _mark_of(optimizer: Optimizer) -> Mark:
    parameter = next((parameter for _, parameter in _numbered(optimizer)), None)
    return make_mark(parameter is not None and parameter.is_cuda)


def _numbered(optimizer: Optimizer) -> Iterable[tuple[str, Tensor]]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return ((str(number), parameter) for number, parameter in enumerate(parameters))


def _digest(parameters: dict[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes."""
    import torch

    value = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        value.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} ".encode())
        value.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return value.hexdigest()


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when that was imported; the other finders find it."""

    def __init__(self, callbacks: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._callbacks:
            return None
        callback = self._callbacks.pop(name)
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_call(module: types.ModuleType) -> None:
                # From here on the loader is as it was.
                del loader.exec_module
                load(module)
                callback(module)

            loader.exec_module = load_and_call
        return spec


# Running the script as Python would.


def run_as_main(words: Sequence[str]) -> None:
    """Run `SCRIPT ARGS`, `-m MODULE ARGS` or `-P -m MODULE ARGS` as `__main__`, with sys.argv and sys.path to match."""
    is_safe = words[0] == "-P" or bool(os.environ.get("PYTHONSAFEPATH"))
    words = words[1:] if words[0] == "-P" else words
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__annotations__": {}})
    if words[0] == "-m":
        sys.modules["__main__"] = main
        sys.argv[:] = words[1:]
        if not is_safe:
            sys.path.insert(0, str(Path.cwd()))
        # What `python -m` itself calls. It sets sys.argv[0] to the file of the module.
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    script = words[0]
    try:
        with io.open_code(script) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {script!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    sys.argv[:] = words
    script = os.path.abspath(script)  # noqa: PTH100 - as Python does
    if not is_safe:
        # Python takes the folder of the file that a link names.
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))  # noqa: PTH120 - as Python does
    main.__dict__.update(
        {
            "__file__": script,
            "__cached__": None,
            "__loader__": importlib.machinery.SourceFileLoader("__main__", script),
        }
    )
    sys.modules["__main__"] = main
    exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - it is the user's script


def hide_own_frames(error: BaseException) -> None:
    """Let the traceback begin in the script, whichever function prints it.

    The exception propagates: Python decides how the process ends.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    show = sys.excepthook

    def show_without_own_frames(kind: type[BaseException], value: BaseException, _: types.TracebackType | None) -> None:
        show(kind, value.with_traceback(frames), frames)

    sys.excepthook = show_without_own_frames


def main(words: Sequence[str]) -> None:
    register_stacks()
    topology = this_topology()
    hardware = {
        "cpu": cpu_name(),
        "cores": topology.usable,
        "quota": topology.quota and topology.quota.cores,
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "boot_id": boot_id(),
    }
    measurement = Measurement(RunFolder(Path(os.environ[RUN_MARK])), Placement.from_env(os.environ), hardware)
    # Registered first, so that it runs after all that the script registers.
    atexit.register(measurement.finish)
    finder = AfterImport(
        {name: functools.partial(measurement.change_module, change) for name, change in CHANGES.items()}
        | {
            "shoal.engine.session": lambda _: measurement.turn_off("a script with shoal.Session is measured anyway"),
        }
    )
    sys.meta_path.insert(0, finder)
    try:
        run_as_main(words)
    except SystemExit as error:
        if error.code not in (None, 0):
            measurement.error = error
        raise
    except BaseException as error:
        measurement.error = error
        hide_own_frames(error)
        raise


if __name__ == "__main__":
    # By its own name: the script replaces the module `__main__`.
    from shoal.engine import measure

    measure.main(sys.argv[1:])
