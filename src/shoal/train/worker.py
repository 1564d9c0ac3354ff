"""A rank: `python -m shoal.train.worker`.

shoal's launchers start it with `--folder FOLDER` on a prepared run folder. Under plain torchrun it prepares one itself:

    torchrun --nproc-per-node=2 -m shoal.train.worker grammar --out runs/mine --set train.steps=200

Where torchrun starts its ranks again (`--max-restarts`, `--nnodes=1:3`), they go on from the newest checkpoint.
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
from collections import deque
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
from shoal.control.rank_messages import LINE_FD, EnterGeneration
from shoal.cost.memory import RELIEF, relief
from shoal.data.prepare import change_config, create_run, reopen_run
from shoal.errors import Interrupted, OutOfMemory, PeerLost, RunFailed, ShoalError, UsageError
from shoal.events import Event, EventLog, read_events
from shoal.host.facts import link_mbps, physical_cores
from shoal.run_folder import RunFolder
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.membership_client import AgentConnection, MembershipClient
from shoal.sync.process_groups import unform
from shoal.sync.replicas import tell_all
from shoal.sync.world import (
    RankIdentity,
    World,
    choose_device,
    choose_interface,
    common_attempt,
    form,
    is_lost_peer,
    join,
    leave,
    nowhere,
)
from shoal.train import recorder as train_recorder
from shoal.train.auto_sync import SyncChooser
from shoal.train.autotune import ComputeChoice, apply
from shoal.train.build import announce, build_trainer, describe_process, found, make_trainer, pin, pin_to
from shoal.train.loop import Loop
from shoal.train.recorder import Recorder
from shoal.train.recover import GenerationChanger
from shoal.train.trainer import StopRequest, Trainer

# SECTION train/process
# A rank as a process: it takes a signal as a wish, and says why it failed.


def catch_stop_signals(stop: StopRequest, is_elastic: bool) -> None:
    """Finish the step, save, leave. Asking twice does not help here: the launcher ends those it cannot wait for. Where
    the others can go on, SIGTERM is what it is for any process: a machine says it before it is switched off."""

    def wish(signum: int, frame: FrameType | None) -> None:
        stop.wanted = True

    signal.signal(signal.SIGINT, wish)
    if not is_elastic:
        signal.signal(signal.SIGTERM, wish)


def say(error: ShoalError) -> int:
    """Into the log, or onto the terminal when a person started us; returns the exit code."""
    with contextlib.suppress(OSError):
        sys.stderr.write(error.render())
    return error.exit_code


# SECTION train/elastic
# A rank of a run whose machines come and go: its agent tells it which generation to enter, the first one and every
# later one. A rank that is started again, or comes from a new machine, is the same program: it enters one that trains
# already, and copies what the others have.


def train_as_member(
    config: Config,
    run: RunFolder,
    placement: Placement,
    device: torch.device,
    stop: StopRequest,
    resume: bool,
    note_fault: Callable[[Exception], None],
) -> bool:
    """To the end of the training, in however many generations; False when it was interrupted."""
    member = MembershipClient(AgentConnection(int(os.environ[LINE_FD])), lambda: stop.wanted, note_fault)
    interface = choose_interface(placement)
    mbps = placement.link_mbps or link_mbps(interface)
    recorder = Recorder(run, nowhere(placement, device), member)
    place = RankIdentity(placement.node, device, interface, mbps, member.release, recorder.warn)
    trainer = make_trainer(config, run, nowhere(placement, device), recorder, stop)
    trainer.fence = member.fence
    membership = GenerationChanger(
        member=member,
        store=_store(placement, member, config.sync.join_timeout_s),
        place=place,
        trainer=trainer,
        chooser=SyncChooser(trainer, config.sync),
        run=run,
    )
    if not resume:
        _warm_up(trainer, run)
    member.here(train_recorder.last_step(run.commits, placement.rank))
    enter = member.await_enter()
    (_begin if enter.first else _join)(membership, enter, resume)
    finished = Loop(trainer, run, membership).run()
    member.finished()
    recorder.close()
    unform()
    return finished


def _store(placement: Placement, member: MembershipClient, timeout_s: float) -> AgentStore:
    if placement.agent_fd is None:
        raise RunFailed("an agent started this rank without a store", why="that is a bug in shoal")
    return AgentStore(placement.agent_fd, timedelta(seconds=timeout_s), member.is_called)


def _begin(membership: GenerationChanger, enter: EnterGeneration, resume: bool) -> None:
    """The first generation of a launch: a world that does not form is an error, never a smaller run."""
    trainer, sync = membership.trainer, membership.trainer.config.sync
    world = form(enter, membership.store, membership.place, sync.join_timeout_s, sync.timeout_s)
    trainer.begin_anew(world, 0, 0)
    trainer.recorder.begin_anew(world, [])
    # Before we are pinned: it says how many cores the machine gives us.
    process = describe_process(world)
    cpus = pin(world, trainer.config.train.pin)
    found(trainer, membership.chooser, membership.run, resume)
    membership.member.fence.moved(trainer.outer.common_step(trainer.progress.step))
    announce(trainer, membership.run, launcher="shoal", **process, cpus=cpus)
    membership.note_entered(how="first")
    membership.member.formed(enter.generation, 0.0)


def _join(membership: GenerationChanger, enter: EnterGeneration, resume: bool) -> None:
    """A generation that trains already. The ranks beside us stay on their cores, and we go to those we had before."""
    trainer = membership.trainer
    cpus = pin_to(_last_cores(membership.run, trainer.world.id), trainer.config.train.pin)
    membership.has_state = False
    trainer.between_steps = membership.chooser.after_step
    began = time.perf_counter()
    while not membership.try_to_enter(enter, began):
        enter = membership.member.await_enter()
    announce(trainer, membership.run, launcher="shoal", **describe_process(trainer.world), cpus=cpus)


def _warm_up(trainer: Trainer, run: RunFolder) -> None:
    """Whoever is started again knows how its model computes: to compile it takes seconds, for which all others would
    wait in its first step."""
    last = _last_start(run, trainer.world.id)
    if last.get("compiled"):
        trainer.compute = ComputeChoice(True, last["precision"], "as before")
        apply(trainer.compute, trainer.model)
        shape = last["micro_batch"], trainer.config.model.seq_len
        tokens = torch.zeros(shape, dtype=torch.int64, device=trainer.world.device)
        trainer.model(tokens, tokens).backward()
        trainer.optimizer.zero_grad(set_to_none=True)


def _last_cores(run: RunFolder, rank: int) -> tuple[int, ...] | None:
    cpus = _last_start(run, rank).get("cpus")
    return tuple(cpus) if cpus else None


def _last_start(run: RunFolder, rank: int) -> Event:
    """Nothing of a rank that was never here."""
    with contextlib.suppress(OSError):
        starts = deque((event for event in read_events(run.events(rank)) if event.get("event") == "start"), maxlen=1)
        return starts[-1] if starts else {}
    return {}


# torch's allocator has two ways to say it, and the third is the kernel's. From inside a communication hook the class of
# an error comes as a word of another one's message.
_SIGNS_OF_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "MemoryError",
    "std::bad_alloc",
)
# A thread needs room for its stack; but a user, or a container, may also have as many as it may.
_SIGNS_OF_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.train.worker", description=__doc__.split("\n")[0])
    parser.add_argument("preset", nargs="?", default="grammar")
    parser.add_argument("--folder", type=Path, help="a run folder that shoal prepared")
    parser.add_argument("--out", type=Path, help="the run folder to create (or, with --resume, to go on in)")
    parser.add_argument("--config", type=Path, help="a TOML file with settings")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    stop = StopRequest()
    catch_stop_signals(stop, is_elastic=LINE_FD in os.environ)
    try:
        use_private_caches()
        placement = Placement.from_env(os.environ)
    except ShoalError as error:
        return say(error)
    if placement.is_supervised:
        tie_to(os.getppid())()
    try:
        return _work(options, placement, stop)
    except ShoalError as error:
        _note_fault(options, placement, error)
        return say(error)
    except Exception as error:
        _note_error(options, placement, error)
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return RunFailed.exit_code


def _work(options: argparse.Namespace, placement: Placement, stop: StopRequest) -> int:
    config = _config(options)
    if placement.launcher != "shoal":
        # Our own launcher has divided the node's cores already; torchrun sets one thread whatever the machine has.
        torch.set_num_threads(config.run.threads or max(1, physical_cores() // placement.local_world_size))
    device = choose_device(config.train.device, placement)
    if LINE_FD in os.environ:
        run = RunFolder.open(options.folder)
        note_fault = partial(_note_error, options, placement)
        finished = train_as_member(config, run, placement, device, stop, options.resume, note_fault)
        return 0 if finished else Interrupted.exit_code
    if options.folder is None:
        # All nodes see the one folder that rank 0 makes, so one rank keeps its checkpoints, and not one of every node.
        attempt = common_attempt(placement, config.sync.join_timeout_s)
        placement = replace(placement, restarts=attempt, keeps_files=placement.rank == 0)
    with contextlib.ExitStack() as held:
        if options.folder is None and placement.rank == 0:
            # Before the others are met: they wait for us at the store, where deadlines are long.
            _prepare(options, config, placement, held)
        warnings: list[ShoalError] = []
        world = join(placement, device, None, config.sync.join_timeout_s, config.sync.timeout_s, warn=warnings.append)
        run = RunFolder.open(options.folder or options.out)
        resume = options.resume or bool(placement.restarts and tell_all(world, 0, [_has_checkpoint(run)])[0])
        finished = _train(load_config(run.config), run, world, stop, placement.launcher, resume, warnings)
        leave(world)
    if not placement.launcher and world.is_main:
        # Nobody else is there to sum up: plain torchrun started us.
        subprocess.run([sys.executable, "-P", "-m", "shoal.tools.report.manifest", str(run.path)], check=True)
    return 0 if finished else Interrupted.exit_code


def _train(
    config: Config,
    run: RunFolder,
    world: World,
    stop: StopRequest,
    launcher: str,
    resume: bool,
    warnings: Iterable[ShoalError],
) -> bool:
    """`warnings`: of the time before there were events to write them to."""
    recorder = Recorder(run, world)
    for warning in warnings:
        recorder.warn(warning)
    world = replace(world, warn=recorder.warn)
    # Before we are pinned: it says how many cores the machine gives us.
    process = describe_process(world)
    cpus = pin(world, config.train.pin)
    trainer = build_trainer(config, run, world, recorder, stop, resume)
    announce(trainer, run, launcher=launcher or "torchrun", **process, cpus=cpus)
    try:
        return Loop(trainer, run).run()
    finally:
        recorder.close()


def _config(options: argparse.Namespace) -> Config:
    if options.folder is not None:
        return load_config(RunFolder.open(options.folder).config)
    if options.out is None:
        raise UsageError("no run folder given", why="all ranks must write into the same one", fix="add --out runs/NAME")
    if options.resume:
        return load_config(RunFolder.open(options.out).config)
    return build_config(options.preset, options.config, sets=options.sets)


def _prepare(options: argparse.Namespace, config: Config, placement: Placement, held: contextlib.ExitStack) -> None:
    """What shoal's launcher does otherwise. The configuration says what really runs, for whoever resumes it."""
    if options.resume or (placement.restarts and RunFolder(options.out).config.is_file()):
        held.enter_context(RunFolder.open(options.out).held())
        run = reopen_run(options.out)
        change_config(run, _as_it_runs(load_config(run.config), placement))
        return
    held.enter_context(create_run(_as_it_runs(config, placement), options.out, placement.world_size).held())


def _as_it_runs(config: Config, placement: Placement) -> Config:
    really = {"on": f"local:{placement.world_size}", "launcher": "torchrun"}
    return config.model_copy(update={"run": config.run.model_copy(update=really)})


def _has_checkpoint(run: RunFolder) -> bool:
    """Ranks that were started again before the first one was written begin anew."""
    return run.checkpoints.is_dir() and any(run.checkpoints.glob("step-*"))


def _note_error(options: argparse.Namespace, placement: Placement, error: Exception) -> None:
    _note_fault(options, placement, as_fault(error, placement, _relief(options, placement)))


def _note_fault(options: argparse.Namespace, placement: Placement, error: ShoalError) -> None:
    folder = options.folder or options.out
    if folder is None or not (folder / "events").is_dir():
        return
    with contextlib.suppress(OSError):
        log = EventLog(RunFolder(folder).events(placement.rank), placement.rank)
        log.write("fault", node=placement.node, **error.as_dict())
        log.close()


def as_fault(error: Exception, placement: Placement, relief: str) -> ShoalError:
    """A broken connection means that somebody else is gone: the launcher must not take this rank for the culprit."""
    text = str(error).strip().split("\n")[0]
    rank = placement.rank
    if is_lost_peer(error):
        return PeerLost(f"rank {rank} lost a peer: {text}")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text for sign in _SIGNS_OF_NO_MEMORY):
        return OutOfMemory(
            f"rank {rank} on {placement.node} is out of memory: {_asked_for(text)}",
            why="its weights, moments and activations are more than the machine, or its limit, has room for",
            fix=relief,
        )
    if any(sign in text for sign in _SIGNS_OF_NO_THREAD):
        return OutOfMemory(
            f"rank {rank} on {placement.node} is out of memory, or of threads: {text}",
            why="a thread needs memory; and a user or a container may have only so many",
            fix=f"{relief}; or raise the limit: ulimit -u, the container's pids",
        )
    return RunFailed(f"rank {rank} raised {type(error).__name__}: {text}")


def _asked_for(text: str) -> str:
    asked = re.search(r"tried to allocate (\d+) bytes", text, re.IGNORECASE)
    return f"it asked for {int(asked[1]) / 1e9:.2f} GB more" if asked else text or "it was refused what it asked for"


def _relief(options: argparse.Namespace, placement: Placement) -> str:
    """Whatever failed, its message must come: where the configuration cannot be read, it names no number."""
    try:
        return relief(_config(options), placement.world_size)
    except ShoalError:
        return RELIEF


if __name__ == "__main__":
    sys.exit(main())
