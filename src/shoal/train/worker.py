"""The process of one rank: `python -m shoal.train.worker`.

shoal's launchers start it with `--folder FOLDER` on a prepared run folder. Under plain torchrun it prepares one itself:

    torchrun --nproc-per-node=2 -m shoal.train.worker grammar --out runs/mine --set train.steps=200

If torchrun restarts its ranks (`--max-restarts`, `--nnodes=1:3`), they resume from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

import torch

from shoal.config.load import build_config, load_config
from shoal.config.schema import Config
from shoal.control.processes import tie_to
from shoal.control.rank_env import TERM_IS_FOR_ALL, Placement, use_private_caches
from shoal.control.rank_messages import MEMBERSHIP_FD
from shoal.control.rank_stacks import register_stacks
from shoal.cost.memory import OUT_OF_MEMORY_ADVICE, out_of_memory_advice
from shoal.data.prepare import change_config, create_run, reopen_run
from shoal.engine.console import Console
from shoal.engine.environment import SessionStart
from shoal.engine.faults import as_fault, record_fault
from shoal.engine.session import Session
from shoal.engine.step import StopRequest
from shoal.errors import Interrupted, PeerLost, RunFailed, ShoalError, UsageError
from shoal.host.topology import this_topology, threads_for
from shoal.run_folder import RunFolder
from shoal.sync.replicas import broadcast_integers
from shoal.sync.world import choose_device, common_attempt, join_world
from shoal.train.gpt_training import train_gpt


class _CompilerPart(ModuleType):
    """A module of the compiler of which some functions are known."""

    def __init__(self, name: str, **known: Callable[[], object]) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self.__name__), name)


class LateCompiler(ModuleType, Loader, MetaPathFinder):
    """Takes the place of `torch._dynamo` until something of it is needed that an uncompiled training does not need.

    torch imports its compiler in the first call of any optimizer and in DistributedDataParallel, to exempt them from
    compilation. The import costs a rank 1.5 s of processor time and 70 MB (docs/measurements.md), and a rank that joins
    a training would make all others wait for it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.trace_rules = _CompilerPart(f"{name}.trace_rules", clear_lru_cache=lambda: None)
        self.utils = _CompilerPart(f"{name}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")

    @staticmethod
    def graph_break(msg: str = "") -> None:
        pass

    @staticmethod
    def disable(fn: Callable[..., object], *_: object, **__: object) -> Callable[..., object]:
        return fn

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._import_compiler(), name)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{self.__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        """Import the compiler, then its submodule; the import system takes what is in `sys.modules` afterwards."""
        del sys.modules[module.__name__]
        self._import_compiler()
        importlib.import_module(module.__name__)

    def _import_compiler(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            sys.meta_path.remove(self)
        return importlib.import_module(self.__name__)

    @classmethod
    def install(cls) -> None:
        if "torch._dynamo" not in sys.modules:
            sys.modules["torch._dynamo"] = compiler = cls("torch._dynamo")
            sys.meta_path.insert(0, compiler)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_options(argv)
    register_stacks()
    LateCompiler.install()
    stop = StopRequest()
    _catch_stop_signals(stop, is_elastic=MEMBERSHIP_FD in os.environ)
    try:
        use_private_caches()
        placement = Placement.from_env(os.environ)
    except ShoalError as error:
        return report_error(error)
    if placement.is_supervised:
        tie_to(os.getppid())()
    try:
        return _run(options, placement, stop)
    except PeerLost as error:
        fault = PeerLost(f"rank {placement.rank} lost a peer: {error.seen}", why=error.why, fix=error.fix)
        _record_fault(options, placement, fault)
        if not fault.why:
            # torch's own error: only the traceback shows in which exchange.
            with contextlib.suppress(OSError):
                traceback.print_exc()
        return report_error(fault)
    except ShoalError as error:
        _record_fault(options, placement, error)
        return report_error(error)
    except Exception as error:
        _record_exception(options, placement, error)
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return RunFailed.exit_code


def report_error(error: ShoalError, width: int | None = None) -> int:
    """Write the error to stderr (the rank's log, or a terminal); return the exit code."""
    with contextlib.suppress(OSError):
        sys.stderr.write(error.render(width))
    return error.exit_code


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.train.worker", description=__doc__.split("\n")[0])
    parser.add_argument("preset", nargs="?", default="grammar")
    parser.add_argument("--folder", type=Path, help="a run folder that shoal prepared")
    parser.add_argument("--out", type=Path, help="the run folder to create (or, with --resume, to continue in)")
    parser.add_argument("--config", type=Path, help="a TOML file with settings")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint")
    return parser.parse_args(argv)


def _catch_stop_signals(stop: StopRequest, is_elastic: bool) -> None:
    """Stop after the current step on SIGINT, and on SIGTERM unless the run `is_elastic`.

    A second signal changes nothing: the launcher kills ranks that it cannot wait for. In an elastic run SIGTERM ends
    the process as usual: a machine sends it before it is switched off, and the other ranks can continue.
    """

    def request_stop(signum: int, frame: FrameType | None) -> None:
        stop.wanted = True

    signal.signal(signal.SIGINT, request_stop)
    if not is_elastic or TERM_IS_FOR_ALL in os.environ:
        signal.signal(signal.SIGTERM, request_stop)


def _run(options: argparse.Namespace, placement: Placement, stop: StopRequest) -> int:
    """Train as this process was started: by an agent, by another launcher of shoal, or by plain torchrun."""
    config = _load_config(options)
    # Here, and not only in the session's loop: torch's threads have the setting of the moment they are started.
    torch.set_flush_denormal(True)
    if placement.launcher != "shoal":
        # shoal's own launcher has divided the node's cores already; torchrun sets one thread on any machine.
        torch.set_num_threads(config.run.threads or threads_for(this_topology(), placement.local_world_size))
    note_fault = partial(_record_exception, options, placement)
    with contextlib.ExitStack() as held:
        world, resume = None, options.resume
        if options.folder is None:
            # All nodes see the one folder that rank 0 makes: one rank keeps checkpoints, not one of every node.
            attempt = common_attempt(placement, config.sync.join_timeout_s)
            placement = replace(placement, restarts=attempt, keeps_files=placement.rank == 0)
            if placement.rank == 0:
                # Before the rendezvous: the other ranks wait for this one at the store, where timeouts are long.
                _prepare_run(options, config, placement, held)
            device = choose_device(config.device_of(placement.rank), placement)
            world = join_world(placement, device, None, config.sync.join_timeout_s, config.sync.timeout_s)
        run = RunFolder.open(options.folder or options.out)
        if world is not None and placement.restarts:
            # Ranks that torchrun restarts before the first checkpoint start anew.
            has_checkpoint = run.has_checkpoint()
            resume |= bool(broadcast_integers(world, 0, [has_checkpoint])[0])
        config = load_config(run.config)
        start = SessionStart(
            config,
            run,
            placement,
            resume,
            config.data.sharding,
            stop,
            note_fault,
            world,
            seeds_steps=config.model.dropout > 0,
            lower_rate_advice=f"start a new run with a lower rate: --set train.lr={config.train.lr / 3:.2g}",
        )
        if not placement.launcher and placement.rank == 0:
            start.console = Console(run, config.train.steps, "the same command with --resume")
        is_finished = train_gpt(Session.of(start), config, run)
    return 0 if is_finished else Interrupted.exit_code


def _load_config(options: argparse.Namespace) -> Config:
    if options.folder is not None:
        return load_config(RunFolder.open(options.folder).config)
    if options.out is None:
        raise UsageError("no run folder given", why="all ranks must write into the same one", fix="add --out runs/NAME")
    if options.resume:
        return load_config(RunFolder.open(options.out).config)
    return build_config(options.preset, options.config, sets=options.sets)


def _prepare_run(options: argparse.Namespace, config: Config, placement: Placement, held: contextlib.ExitStack) -> None:
    """Create or reopen the run folder, as shoal's launcher does, and write down how it really runs."""
    actual = {"on": f"local:{placement.world_size}", "launcher": "torchrun"}

    def as_started(config: Config) -> Config:
        return config.model_copy(update={"run": config.run.model_copy(update=actual)})

    if options.resume or (placement.restarts and RunFolder(options.out).config.is_file()):
        held.enter_context(RunFolder.open(options.out).held())
        run = reopen_run(options.out)
        change_config(run, as_started(load_config(run.config)))
        return
    held.enter_context(create_run(as_started(config), options.out, placement.world_size).held())


def _record_exception(options: argparse.Namespace, placement: Placement, error: Exception) -> None:
    try:
        advice = out_of_memory_advice(_load_config(options), placement.world_size)
    except ShoalError:
        # The fault must be recorded even if the configuration cannot be read: then the advice has no numbers.
        advice = OUT_OF_MEMORY_ADVICE
    _record_fault(options, placement, as_fault(error, placement, advice))


def _record_fault(options: argparse.Namespace, placement: Placement, error: ShoalError) -> None:
    folder = options.folder or options.out
    if folder is None or not (folder / "events").is_dir():
        return
    record_fault(RunFolder(folder), placement, error)


if __name__ == "__main__":
    sys.exit(main())
