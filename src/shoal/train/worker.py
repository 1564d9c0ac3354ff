"""The process of one rank: `python -m shoal.train.worker`.

shoal's launchers start it with `--folder FOLDER` on a prepared run folder. Under plain torchrun it prepares one itself:

    torchrun --nproc-per-node=2 -m shoal.train.worker grammar --out runs/mine --set train.steps=200

If torchrun restarts its ranks (`--max-restarts`, `--nnodes=1:3`), they resume from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from shoal.config.load import build_config, load_config
from shoal.config.schema import Config
from shoal.control.processes import tie_to
from shoal.control.rank_env import Placement, use_private_caches
from shoal.control.rank_messages import MEMBERSHIP_FD, EnterGeneration
from shoal.cost.memory import OUT_OF_MEMORY_ADVICE, out_of_memory_advice
from shoal.data.prepare import change_config, create_run, reopen_run
from shoal.errors import Interrupted, OutOfMemory, PeerLost, RunFailed, ShoalError, UsageError
from shoal.events import EventLog
from shoal.host.facts import link_mbps, physical_cores
from shoal.run_folder import RunFolder
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.membership_client import AgentConnection, MembershipClient
from shoal.sync.process_groups import drop_groups
from shoal.sync.replicas import broadcast_integers
from shoal.sync.world import (
    RankIdentity,
    World,
    choose_device,
    choose_interface,
    common_attempt,
    form_world,
    join_world,
    leave_world,
    unjoined_world,
)
from shoal.train.auto_sync import SyncChooser
from shoal.train.autotune import ComputeChoice
from shoal.train.build import announce, build_trainer, describe_process, make_trainer, pin, pin_to, start_training
from shoal.train.loop import Loop
from shoal.train.recorder import Recorder, last_event, last_step
from shoal.train.recover import GenerationChanger
from shoal.train.trainer import StopRequest, Trainer
from shoal.units import format_si

# torch's allocator has two messages for it, and the third is the kernel's. From inside a communication hook the class
# of an error is only a word in the message of another one.
_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "MemoryError",
    "std::bad_alloc",
)
# A thread needs memory for its stack; but the number of threads of a user or container may also be limited.
_NO_THREAD_TEXTS = ("can't start new thread", "Resource temporarily unavailable")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse_options(argv)
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


def report_error(error: ShoalError) -> int:
    """Write the error to stderr (the rank's log, or a terminal); return the exit code."""
    with contextlib.suppress(OSError):
        sys.stderr.write(error.render())
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
    if not is_elastic:
        signal.signal(signal.SIGTERM, request_stop)


def _run(options: argparse.Namespace, placement: Placement, stop: StopRequest) -> int:
    """Train as this process was started: by an agent, by another launcher of shoal, or by plain torchrun."""
    config = _load_config(options)
    if placement.launcher != "shoal":
        # shoal's own launcher has divided the node's cores already; torchrun sets one thread on any machine.
        torch.set_num_threads(config.run.threads or max(1, physical_cores() // placement.local_world_size))
    device = choose_device(config.train.device, placement)
    if MEMBERSHIP_FD in os.environ:
        run = RunFolder.open(options.folder)
        on_fault = partial(_record_exception, options, placement)
        is_finished = _train_elastic(config, run, placement, device, stop, options.resume, on_fault)
        return 0 if is_finished else Interrupted.exit_code
    if options.folder is None:
        # All nodes see the one folder that rank 0 makes: one rank keeps checkpoints, not one of every node.
        attempt = common_attempt(placement, config.sync.join_timeout_s)
        placement = replace(placement, restarts=attempt, keeps_files=placement.rank == 0)
    with contextlib.ExitStack() as held:
        if options.folder is None and placement.rank == 0:
            # Before the rendezvous: the other ranks wait for this one at the store, where timeouts are long.
            _prepare_run(options, config, placement, held)
        warnings: list[ShoalError] = []
        world = join_world(
            placement, device, None, config.sync.join_timeout_s, config.sync.timeout_s, warn=warnings.append
        )
        run = RunFolder.open(options.folder or options.out)
        # Ranks that torchrun restarts before the first checkpoint start anew.
        has_checkpoint = run.checkpoints.is_dir() and any(run.checkpoints.glob("step-*"))
        resume = options.resume or bool(placement.restarts and broadcast_integers(world, 0, [has_checkpoint])[0])
        is_finished = _train_static(load_config(run.config), run, world, stop, placement.launcher, resume, warnings)
        leave_world(world)
    if not placement.launcher and world.is_main:
        # Under plain torchrun no launcher writes the manifest.
        subprocess.run([sys.executable, "-P", "-m", "shoal.tools.report.manifest", str(run.path)], check=True)
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


def _train_static(
    config: Config,
    run: RunFolder,
    world: World,
    stop: StopRequest,
    launcher: str,
    resume: bool,
    warnings: Iterable[ShoalError],
) -> bool:
    """Train in a world whose members do not change; return False if interrupted.

    `warnings` are from the time before there was an event log.
    """
    recorder = Recorder(run, world)
    for warning in warnings:
        recorder.warn(warning)
    world = replace(world, warn=recorder.warn)
    # Before pinning: it has the number of cores that the machine gives this process.
    process = describe_process(world)
    cpus = pin(world, config.train.pin)
    trainer = build_trainer(config, run, world, recorder, stop, resume)
    announce(trainer, run, launcher=launcher or "torchrun", **process, cpus=cpus)
    try:
        return Loop(trainer, run).run()
    finally:
        recorder.close()


def _train_elastic(
    config: Config,
    run: RunFolder,
    placement: Placement,
    device: torch.device,
    stop: StopRequest,
    resume: bool,
    on_fault: Callable[[Exception], None],
) -> bool:
    """Train in a run whose members change, through any number of generations; return False if interrupted.

    The agent sends the generation to enter: the first one and every later one. A rank that was restarted, or that comes
    from a new machine, runs the same code: it enters a generation that trains already, and copies its state.
    """
    if placement.agent_fd is None:
        raise RunFailed("an agent started this rank without a store", why="that is a bug in shoal")
    member = MembershipClient(AgentConnection(int(os.environ[MEMBERSHIP_FD])), lambda: stop.wanted, on_fault)
    interface = choose_interface(placement)
    mbps = placement.link_mbps or link_mbps(interface)
    world = unjoined_world(placement, device)
    recorder = Recorder(run, world, member)
    trainer = make_trainer(config, run, world, recorder, stop, member.fence)
    membership = GenerationChanger(
        member=member,
        store=AgentStore(placement.agent_fd, timedelta(seconds=config.sync.join_timeout_s), member.is_superseded),
        place=RankIdentity(placement.node, device, interface, mbps, member.release, recorder.warn),
        trainer=trainer,
        chooser=SyncChooser(trainer, config.sync),
        run=run,
    )
    if not resume:
        _warm_up(trainer, run)
    member.send_ready(last_step(run.commits, placement.rank))
    enter = member.await_enter()
    if enter.first:
        enter_first_generation(membership, enter, resume)
    else:
        _join_generation(membership, enter)
    is_finished = Loop(trainer, run, membership).run()
    member.send_finished()
    recorder.close()
    drop_groups()
    return is_finished


def enter_first_generation(membership: GenerationChanger, enter: EnterGeneration, resume: bool) -> None:
    """Form the first world of a launch. If that fails, it is an error: the run does not start with fewer ranks."""
    trainer, sync = membership.trainer, membership.trainer.config.sync
    world = form_world(enter, membership.store, membership.place, sync.join_timeout_s, sync.timeout_s)
    trainer.enter_world(world, 0, 0, launched_ranks=world.size)
    trainer.recorder.enter_world(world, [])
    # Before pinning: it has the number of cores that the machine gives this process.
    process = describe_process(world)
    cpus = pin(world, trainer.config.train.pin)
    start_training(trainer, membership.chooser, membership.run, resume)
    membership.member.fence.set_step(trainer.outer.common_step(trainer.progress.step))
    announce(trainer, membership.run, launcher="shoal", **process, cpus=cpus)
    membership.record_entry(how="first")
    membership.member.send_formed(enter.generation, 0.0)


def _join_generation(membership: GenerationChanger, enter: EnterGeneration) -> None:
    """Join a generation that trains already, on the cores of this rank's last start: its neighbours keep theirs."""
    trainer = membership.trainer
    cpus = last_event(membership.run.events(trainer.world.id), "start").get("cpus")
    pinned = pin_to(tuple(cpus) if cpus else None, trainer.config.train.pin)
    membership.has_state = False
    trainer.between_steps = membership.chooser.after_step
    began = time.perf_counter()
    while not membership.try_to_enter(enter, began):
        enter = membership.member.await_enter()
    announce(trainer, membership.run, launcher="shoal", **describe_process(trainer.world), cpus=pinned)


def _warm_up(trainer: Trainer, run: RunFolder) -> None:
    """Compile the model of a restarted rank before it joins: all others would wait for seconds in its first step."""
    start = last_event(run.events(trainer.world.id), "start")
    if start.get("compiled"):
        trainer.set_compute(ComputeChoice(True, start["precision"], "as before"))
        shape = start["micro_batch"], trainer.config.model.seq_len
        tokens = torch.zeros(shape, dtype=torch.int64, device=trainer.world.device)
        trainer.model(tokens, tokens).backward()
        trainer.optimizer.zero_grad(set_to_none=True)


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
    with contextlib.suppress(OSError):
        log = EventLog(RunFolder(folder).events(placement.rank), placement.rank)
        log.write("fault", node=placement.node, **error.as_dict())
        log.close()


def as_fault(error: Exception, placement: Placement, relief: str) -> ShoalError:
    """Classify an exception of this rank's own."""
    text = str(error).strip().split("\n")[0]
    rank = placement.rank
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text for sign in _OUT_OF_MEMORY_TEXTS):
        requested = re.search(r"tried to allocate (\d+) bytes", text, re.IGNORECASE)
        what = f"it asked for {format_si(int(requested[1]), 'B')} more" if requested else text or "an allocation failed"
        return OutOfMemory(
            f"rank {rank} on {placement.node} is out of memory: {what}",
            why="its weights, moments and activations need more than the memory, or the limit, of the machine",
            fix=relief,
        )
    if any(sign in text for sign in _NO_THREAD_TEXTS):
        return OutOfMemory(
            f"rank {rank} on {placement.node} is out of memory, or of threads: {text}",
            why="a thread needs memory; and a user or a container may have a limited number of threads",
            fix=f"{relief}; or raise the limit: ulimit -u, the container's pids",
        )
    return RunFailed(f"rank {rank} raised {type(error).__name__}: {text}")


if __name__ == "__main__":
    sys.exit(main())
