"""Where a session of a user's script trains: by shoal's launcher, under torchrun, or alone.

`shoal run` gives its settings to the ranks in a variable; they win over those of the script. Under other launchers, and
without one, the session makes its own run folder.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from shoal.config.load import merge, refuse_without_effect, to_toml, typed_settings, validate_session
from shoal.config.schema import EngineConfig
from shoal.control.processes import RUN_MARK
from shoal.control.rank_env import RESUME, SESSION_FD, SETTINGS, TERM_IS_FOR_ALL, Placement, use_private_caches
from shoal.control.rank_messages import MEMBERSHIP_FD
from shoal.control.rank_stacks import register_stacks
from shoal.cost.batch_plan import world_batch
from shoal.cost.memory import OUT_OF_MEMORY_ADVICE
from shoal.engine.console import Console
from shoal.engine.faults import as_fault, record_fault
from shoal.engine.state_transfer import broadcast_json
from shoal.engine.step import StopRequest
from shoal.errors import ShoalError, UsageError
from shoal.run_folder import RunFolder, write_atomically
from shoal.sync.world import World, choose_device, join_world


@dataclass
class SessionStart:
    """What a launcher decided about a session."""

    config: EngineConfig
    run: RunFolder
    placement: Placement
    resume: bool = False
    sharding: str = "cursor"
    stop: StopRequest = field(default_factory=StopRequest)
    # Records an error that ends this rank.
    note_fault: Callable[[Exception], None] = lambda error: None
    world: World | None = None  # Where the ranks have met already.
    seeds_steps: bool = True  # torch's random numbers follow from seed, rank and step.
    lower_rate_advice: str = ""  # How to train with a lower learning rate, if the program has a setting for it.
    console: Console | None = None  # Of rank 0 where no launcher of shoal shows the progress.
    held: ExitStack = field(default_factory=ExitStack)  # Closed when the session ends: the lock of its run folder.

    @property
    def is_elastic(self) -> bool:
        """Whether an agent moves this rank from generation to generation."""
        return MEMBERSHIP_FD in os.environ


def open_session(given: Mapping[str, Any], out: Path | None) -> SessionStart:
    """Read the launcher's decisions; `given` are the settings of the script, section by section."""
    recorded: list[Exception] = []

    def record_last(error: ShoalError) -> None:
        if RUN_MARK in os.environ and error not in recorded:
            record_fault(RunFolder(Path(os.environ[RUN_MARK])), Placement.from_env(os.environ), error)

    register_stacks()
    _print_errors_plainly(record_last)
    _check_length(given.get("train", {}))
    use_private_caches()
    placement = Placement.from_env(os.environ)
    if SESSION_FD in os.environ:
        placement = replace(placement, agent_fd=int(os.environ[SESSION_FD]))
    name = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "session"
    is_launched = RUN_MARK in os.environ and placement.launcher == "shoal"
    actual = {"preset": name, "on": f"local:{placement.world_size}", "launcher": "shoal" if is_launched else "torchrun"}
    launched = json.loads(os.environ.get(SETTINGS, "{}"))
    config = validate_session(merge([given, {"run": actual}, launched]))
    refuse_without_effect(config, typed_settings(launched, ()))
    if config.train.epochs is not None and "steps" not in launched.get("train", {}):
        config = _with_epochs(config, config.train.epochs, placement.world_size)
    stop = StopRequest()
    _catch_stop_signals(stop)
    held, console = ExitStack(), None
    if is_launched:
        run, world, resume = RunFolder(Path(os.environ[RUN_MARK])), None, RESUME in os.environ
        _write_config(run, config)
    else:
        run, world, resume = _open_folder(config, placement, choose_folder(name, out, os.environ), held)
        placement = replace(placement, keeps_files=placement.rank == 0)
        if placement.rank == 0:
            console = Console(run, config.train.steps, f'start it again with shoal.Session(..., out="{run.path}")')

    def note_fault(error: Exception) -> None:
        fault = error if isinstance(error, ShoalError) else as_fault(error, placement, OUT_OF_MEMORY_ADVICE)
        # The error that is printed is this one: its advice names the folder.
        fault.fix = run.name_in(fault.fix)
        record_fault(run, placement, fault)
        recorded.append(error)

    return SessionStart(
        config, run, placement, resume, stop=stop, note_fault=note_fault, world=world, console=console, held=held
    )


def _check_length(train: Mapping[str, Any]) -> None:
    """Refuse a session that names no global batch, or neither its steps nor its epochs."""
    has_epochs = "epochs" in train
    if "global_batch" in train and ("steps" in train) != has_epochs and (not has_epochs or "epoch_samples" in train):
        return
    raise UsageError(
        "the session does not know how long it trains"
        if "global_batch" in train
        else "the session has no global_batch",
        why="it needs its number of steps, or of epochs with the samples of one, and the samples of a step",
        fix="shoal.Session(steps=2000, global_batch=64), or "
        "shoal.Session(epochs=10, samples=len(dataset), global_batch=64)",
    )


def _with_epochs(config: EngineConfig, epochs: int, world_size: int) -> EngineConfig:
    """Return the settings with as many steps as the epochs have."""
    train, batch = config.train, config.sync.accumulate * world_batch(config.train, world_size)
    steps = math.ceil(epochs * (train.epoch_samples or batch) / batch)
    return config.model_copy(update={"train": train.model_copy(update={"steps": steps})})


def _open_folder(
    config: EngineConfig, placement: Placement, out: Path, held: ExitStack
) -> tuple[RunFolder, World, bool]:
    """Create a run folder on rank 0, or continue in one that has a checkpoint; return the world that has met for it.

    `held` gets the folder's lock.
    """
    device = choose_device(config.device_of(placement.rank), placement)
    world = join_world(placement, device, None, config.sync.join_timeout_s, config.sync.timeout_s)
    document: dict[str, Any] = {}
    if world.is_main:
        try:
            has_checkpoint = _has_checkpoint(out)
            run = RunFolder.open(out) if has_checkpoint else RunFolder.create(out, is_training=False)
            held.enter_context(run.held())
            _write_config(run, config)
            document = {"path": str(run.path), "resume": has_checkpoint}
        except ShoalError as error:
            document = error.as_dict()
    document = broadcast_json(world, 0, document)
    if "path" not in document:
        raise UsageError(document["seen"], why=document.get("why", ""), fix=document.get("fix", ""))
    return RunFolder(Path(document["path"])), world, bool(document["resume"])


def _write_config(run: RunFolder, config: EngineConfig) -> None:
    """Write the settings that are used. Every rank of a node writes the same."""
    write_atomically(run.config, to_toml(config))


def choose_folder(name: str, out: Path | None, env: Mapping[str, str]) -> Path:
    """Return the run folder: `out`, or one named after the time at which this program or its torchrun was started.

    When torchrun has started its workers again, that is the folder of the last attempt that has a checkpoint. An
    attempt that finds none begins a folder of its own: a run never overwrites another one.
    """
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    began = psutil.Process(os.getppid()).create_time() if "TORCHELASTIC_RUN_ID" in env else time.time()
    first = out or Path("runs") / f"{name}-{datetime.fromtimestamp(began):%Y%m%d-%H%M%S}"
    folders = [first, *(first.with_name(f"{first.name}-{number}") for number in range(1, attempt + 1))]
    return next(filter(_has_checkpoint, reversed(folders)), folders[-1])


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step-*"))


def _print_errors_plainly(record: Callable[[ShoalError], None]) -> None:
    """End the process with the message and the exit code of an error of shoal's own, without a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShoalError):
            before(kind, error, trace)
            return
        # Not sys.stderr: torch's hook calls this one with a buffer there, which the exit below would drop.
        stderr = sys.__stderr__ or sys.stderr
        record(error)
        stderr.write(error.render())
        sys.stdout.flush()
        stderr.flush()
        # An exit code other than 1 is not possible otherwise; and other threads may wait for peers that are gone.
        os._exit(error.exit_code)

    sys.excepthook = hook


def _catch_stop_signals(stop: StopRequest) -> None:
    """Stop after the current step on SIGINT, and on SIGTERM unless an agent decides what that means."""

    def request_stop(signum: int, frame: FrameType | None) -> None:
        if stop.wanted and signum == signal.SIGINT and MEMBERSHIP_FD not in os.environ:
            raise KeyboardInterrupt
        stop.wanted = True

    try:
        signal.signal(signal.SIGINT, request_stop)
        if MEMBERSHIP_FD not in os.environ or TERM_IS_FOR_ALL in os.environ:
            signal.signal(signal.SIGTERM, request_stop)
    except ValueError:
        # Only the main thread can; a session in another one is stopped by `session.stop()`.
        return
