"""A rank of a run whose machines come and go: its agent tells it which generation to enter, the first one and every
later one. A rank that is started again, or comes from a new machine, is the same program: it enters one that trains
already, and copies what the others have.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from shoal.config.schema import Config
from shoal.control.placement import Placement
from shoal.control.rankline import LINE_FD, Enter
from shoal.control.route import link_mbps
from shoal.errors import RunFailed
from shoal.events import Event, read_events
from shoal.runfolder import RunFolder
from shoal.sync.groups import unform
from shoal.sync.membership.forming import Place, form
from shoal.sync.membership.line import AgentLine
from shoal.sync.membership.member import Member
from shoal.sync.store import AgentStore
from shoal.sync.world import choose_interface, nowhere
from shoal.train import ledger
from shoal.train.build import announce, found, make_trainer
from shoal.train.choosing import Chooser
from shoal.train.facts import describe_process
from shoal.train.loop import Loop
from shoal.train.pinning import pin, pin_to
from shoal.train.recorder import Recorder
from shoal.train.regroup import Membership
from shoal.train.trainer import StopWish, Trainer
from shoal.train.trial import apply
from shoal.train.tuning import Choice


def train_as_member(
    config: Config,
    run: RunFolder,
    placement: Placement,
    device: torch.device,
    stop: StopWish,
    resume: bool,
    note_fault: Callable[[Exception], None],
) -> bool:
    """To the end of the training, in however many generations; False when it was interrupted."""
    member = Member(AgentLine(int(os.environ[LINE_FD])), lambda: stop.wanted, note_fault)
    interface = choose_interface(placement)
    mbps = placement.link_mbps or link_mbps(interface)
    recorder = Recorder(run, nowhere(placement, device), member)
    place = Place(placement.node, device, interface, mbps, member.release, recorder.warn)
    trainer = make_trainer(config, run, nowhere(placement, device), recorder, stop)
    trainer.fence = member.fence
    membership = Membership(
        member=member,
        store=_store(placement, member, config.sync.join_timeout_s),
        place=place,
        trainer=trainer,
        chooser=Chooser(trainer, config.sync),
        run=run,
    )
    if not resume:
        _warm_up(trainer, run)
    member.here(ledger.last_step(run.commits, placement.rank))
    enter = member.await_enter()
    (_begin if enter.first else _join)(membership, enter, resume)
    finished = Loop(trainer, run, membership).run()
    member.finished()
    recorder.close()
    unform()
    return finished


def _store(placement: Placement, member: Member, timeout_s: float) -> AgentStore:
    if placement.agent_fd is None:
        raise RunFailed("an agent started this rank without a store", why="that is a bug in shoal")
    return AgentStore(placement.agent_fd, timedelta(seconds=timeout_s), member.is_called)


def _begin(membership: Membership, enter: Enter, resume: bool) -> None:
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


def _join(membership: Membership, enter: Enter, resume: bool) -> None:
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
        trainer.compute = Choice(True, last["precision"], "as before")
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
