"""Puts a trainer together from a run folder and a world."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
from torch.optim import AdamW

import shoal
from shoal.config.schema import Config, TrainConfig
from shoal.cost.batch_plan import BatchPlan, deal_anew, scaled_lr, weights_of
from shoal.cost.model_size import parameter_count
from shoal.data.prepare import read_facts
from shoal.data.sampling import SHARDS, Batches, deal_for, open_tokens, window_count
from shoal.data.tokenizer import load_tokenizer
from shoal.host.facts import cpu_name, deal_cores, physical_cores, usable_cores
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.sync.gradients import NoExchange
from shoal.sync.interruptible import await_work
from shoal.sync.outer import EveryStep
from shoal.sync.replicas import all_agree, copy_from
from shoal.sync.step_stats import StepGather, StepTimer, WholeStepTimer
from shoal.sync.world import World
from shoal.train.auto_sync import SyncChooser
from shoal.train.autotune import ComputeChoice, apply, choose, earlier_choice, work_left
from shoal.train.checkpoint import CheckpointFolder, Progress, digest, load_weights, weights
from shoal.train.recorder import Recorder
from shoal.train.resume import NewestCheckpoint
from shoal.train.resume import resume as go_on
from shoal.train.state_transfer import mend_ledger
from shoal.train.trainer import StopRequest, Trainer, describe_exchanges, make_exchanges


def build_trainer(
    config: Config, run: RunFolder, world: World, recorder: Recorder, stop: StopRequest, resume: bool
) -> Trainer:
    trainer = make_trainer(config, run, world, recorder, stop)
    found(trainer, SyncChooser(trainer, config.sync), run, resume)
    return trainer


def make_trainer(config: Config, run: RunFolder, world: World, recorder: Recorder, stop: StopRequest) -> Trainer:
    """What a rank can make by itself, before it has met anybody: all but the exchanges."""
    config = config.model_copy(update={"sync": config.sync.begun})
    torch.manual_seed(config.train.seed)
    model = GPT(config.model).to(world.device)
    trainer = Trainer(
        config=config,
        world=world,
        model=model,
        optimizer=_make_optimizer(model, config.train),
        sync=NoExchange(model),
        outer=EveryStep(),
        exchange=StepGather(world),
        batches=deal_batches(config, run, world, BatchPlan(1, (1,) * world.size)),
        timer=_make_timer(config, world),
        recorder=recorder,
        stop=stop,
        peak_lr=0.0,
        progress=Progress(step=0, cursor=0),
    )
    # All of this lives as long as the process. Collections that look only at what comes later, exchanges above all,
    # take milliseconds instead of a fifth of a second.
    gc.collect()
    gc.freeze()
    return trainer


@dataclass(frozen=True)
class ResumeContext:
    """What is known when a world goes back to a checkpoint. `launched`: how many ranks the launch had. `newest`: what
    this machine has; it takes long to find out."""

    launched: int
    is_compiled: bool
    newest: NewestCheckpoint


def found(
    trainer: Trainer, chooser: SyncChooser, run: RunFolder, resume: bool, recovery: ResumeContext | None = None
) -> None:
    """The first world of a launch, or with `recovery` a world that goes back to a checkpoint: all ranks begin alike, or
    go on from one checkpoint.

    After a recovery there may be fewer or more ranks than the launch had. The global batch and the learning rate stay
    those of the launch, and the model keeps computing as it does.
    """
    config, world = trainer.config, trainer.world
    launched = world.size if recovery is None else recovery.launched
    dealt = at_launch = deal_for(config, launched)
    if recovery is not None and world.ids != tuple(range(launched)):
        weights = weights_of(config.run, world.ids)
        dealt = deal_anew(at_launch.global_batch, at_launch.micro_batch, weights, recovery.is_compiled)
    _make_equal(trainer)
    trainer.batches = deal_batches(config, run, world, dealt)
    trainer.largest_micro_batch = at_launch.micro_batch
    trainer.launched = launched
    trainer.judge_stragglers_anew()
    exchanges = make_exchanges(config, trainer.model, world, trainer.batches.shard.deal)
    trainer.sync, trainer.outer, trainer.exchange = exchanges.sync, exchanges.outer, exchanges.steps
    trainer.peak_lr = scaled_lr(config.train, launched, config.sync.accumulate)
    trainer.between_steps = chooser.after_step
    if resume:
        chooser.recall(run)
        checkpoints = CheckpointFolder(run.checkpoints, config.train.keep_checkpoints)
        newest = recovery.newest if recovery is not None else None
        trainer.progress = go_on(trainer, checkpoints, chooser.resume_at, config.run.lineage, newest)
        mend_ledger(trainer, run.commits)
    trainer.tended_step = trainer.progress.step
    if recovery is None:
        trainer.compute = _tune(trainer, run if resume else None)


def initialize(trainer: Trainer) -> None:
    """Back to the weights of step 0: the same seed gives the same ones."""
    torch.manual_seed(trainer.config.train.seed)
    load_weights(trainer.model, weights(GPT(trainer.config.model).to(trainer.world.device)))
    trainer.optimizer.state.clear()


def deal_batches(config: Config, run: RunFolder, world: World, dealt: BatchPlan) -> Batches:
    tokens = open_tokens(Path(read_facts(run).train)).tokens
    seq_len = config.model.seq_len
    count = window_count(len(tokens), seq_len)
    return Batches(tokens, seq_len, SHARDS[config.data.sharding](world.rank, dealt, count, config.data.seed))


def announce(trainer: Trainer, run: RunFolder, **process: object) -> None:
    """That this rank begins, and with what."""
    recorder, world, shard = trainer.recorder, trainer.world, describe_shard(trainer, run)
    digest = hashlib.sha256(run.config.read_bytes()).hexdigest()
    recorder.event("start", **process, **describe_start(trainer), config_sha256=digest)
    recorder.event("shard", **shard)
    with contextlib.suppress(OSError):
        # A full disk must not end a training because its log cannot grow.
        print(
            f"rank {world.rank} of {world.size}: {shard['size']} of {shard['total']} samples, first: {shard['first']}"
        )


def describe_start(trainer: Trainer) -> dict[str, object]:
    """What the `start` event says of the training itself."""
    dealt = trainer.batches.shard.deal
    return {
        "params": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "params_expected": parameter_count(trainer.config.model),
        **describe_exchanges(trainer),
        "global_batch": dealt.global_batch,
        "micro_batch": dealt.micro_batch,
        "share": dealt.micro_batches[trainer.world.rank],
        "tokens_per_step": trainer.global_tokens,
        "lr": trainer.peak_lr,
        "seed": trainer.config.train.seed,
        "steps": trainer.config.train.steps,
        "resumed_from": trainer.progress.step,
        "compiled": trainer.compute.compiled,
        "precision": trainer.compute.precision,
        "compute_why": trainer.compute.why,
    }


def describe_shard(trainer: Trainer, run: RunFolder) -> dict[str, object]:
    """This rank's part of the data; the sizes of all ranks add up to the total."""
    shard = trainer.batches.shard
    text = load_tokenizer(run.tokenizer).decode(trainer.batches.first_tokens().tolist())
    # A sample seldom begins where a sentence does: the first that begins inside it stands behind a line's end.
    first = text.partition("\n")[2].partition("\n")[0] or text.partition("\n")[0]
    return {
        "size": shard.size,
        "total": shard.count,
        "first": first,
        "sharding": trainer.config.data.sharding,
        "seed": trainer.config.train.seed + trainer.world.rank,
    }


def _make_equal(trainer: Trainer) -> None:
    """The same seed on every rank gives the same weights; where it doesn't (another CPU), rank 0's are copied."""
    world, model = trainer.world, trainer.model
    if not all_agree(world, digest(weights(model))):
        copy_from(world, 0, weights(model).values())
    torch.manual_seed(trainer.config.train.seed + world.rank)


def _tune(trainer: Trainer, resumed: RunFolder | None) -> ComputeChoice:
    """A trial asks for gradients without leaving them anywhere: neither DDP nor the training sees it."""
    config, deal = trainer.config, trainer.batches.shard.deal
    steps = max(0, config.train.steps - trainer.progress.step)
    work = work_left(config.model, deal.micro_batch, max(deal.micro_batches), steps)
    earlier = earlier_choice(resumed, trainer.world) if resumed else None
    choice = earlier or choose(trainer.model, config, deal.micro_batch, work, trainer.world)
    apply(choice, trainer.model)
    return choice


def _make_optimizer(model: GPT, train: TrainConfig) -> AdamW:
    # Fused updates all moments in one pass: measured five times faster than the plain loop on CPU for 124M parameters.
    groups = model.decay_groups(train.weight_decay)
    return AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def _make_timer(config: Config, world: World) -> StepTimer:
    synchronize: Callable[[], None] | None = torch.cuda.synchronize if world.device.type == "cuda" else None
    return (WholeStepTimer if config.sync.measure == "off" else StepTimer)(synchronize)


# SECTION train/pinning
# Keeps this rank's computing on cores of its own, apart from the other ranks of the same machine.


def pin(world: World, wish: str) -> tuple[int, ...] | None:
    """Pins the calling thread and those it will start; the cores, or None where all stays as it was.

    gloo's threads are there by now and stay free: they go to whatever core has nothing to do. Emulated nodes share the
    cores of one machine, so what counts is not who is on the same node but who is on the same machine.
    """
    if wish == "off" or world.device.type != "cpu":
        return None
    machines = _machines(world)
    neighbours = [rank for rank, machine in enumerate(machines) if machine == machines[world.rank]]
    cores = deal_cores(usable_cores(), neighbours.index(world.rank), len(neighbours), torch.get_num_threads())
    if cores is None or (wish == "auto" and len(neighbours) == 1):
        return None
    return pin_to(cores, wish)


def pin_to(cores: tuple[int, ...] | None, wish: str) -> tuple[int, ...] | None:
    """These cores, where it is wished and allowed."""
    if cores is None or wish == "off":
        return None
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        # A container may forbid it; then whoever runs it has decided.
        return None
    return cores


def _machines(world: World) -> list[int]:
    """A number for every rank's machine, equal for those on the same one."""
    mine = torch.tensor([_machine_id()], dtype=torch.int64, device=world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    await_work(dist.all_gather(everyone, mine, group=world.group, async_op=True), world.release)
    return [int(number) for number in everyone]


def _machine_id() -> int:
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        name = socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


# SECTION train/facts
# What this machine and this process are, for the `start` event.


def _boot_id() -> str | None:
    """The same for all emulated nodes of one machine, which share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def hardware() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "boot_id": _boot_id(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "shoal": shoal.__version__,
        "numpy": numpy.__version__,
    }


def describe_process(world: World) -> dict[str, Any]:
    return {
        "world_size": world.size,
        "node": world.node,
        "local_rank": world.local_rank,
        "generation": str(world.generation),
        "lineage": str(world.lineage.name),
        "pid": os.getpid(),
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
        "interface": world.interface,
        "link_mbps": world.link_mbps,
        "versions": versions(),
        "hardware": hardware(),
    }
