"""Starts a training in its first world, or again from a checkpoint; describes rank and machine for `start` events."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import shoal
from shoal.config.schema import EngineConfig
from shoal.control.processes import is_of_own_run
from shoal.cost.batch_plan import micro_batch, plan_global_batch
from shoal.engine.agreement import check_same_training
from shoal.engine.auto_sync import SyncChooser
from shoal.engine.balance import describe_first_shares
from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.exchanges import describe_exchanges
from shoal.engine.recorder import Recorder, last_step
from shoal.engine.replica import InitialState, Replica
from shoal.engine.resume import NewestCheckpoint, resume_training
from shoal.engine.state_transfer import fill_ledger_gaps
from shoal.engine.training_state import TrainingState, digest_tensors
from shoal.host.facts import boot_id, cpu_name
from shoal.host.memory import total_bytes
from shoal.host.node_stats import NodeWatch
from shoal.host.proc import parent_of
from shoal.host.topology import this_topology
from shoal.run_folder import RunFolder
from shoal.sync.fence import Fence
from shoal.sync.replicas import broadcast_tensors, gather_integers, have_equal_digests
from shoal.sync.step_stats import StepTimer, WholeStepTimer
from shoal.sync.world import World, gpu_runtime


def make_replica(
    config: EngineConfig,
    state: TrainingState,
    world: World,
    recorder: Recorder,
    fence: Fence | None = None,
    initial: InitialState | None = None,
) -> Replica:
    """Make everything that needs no other rank: all but the exchanges."""
    config = config.model_copy(update={"sync": config.sync.first_settings})
    if config.train.profile_steps:
        recorder.profile(config.train.profile_steps)
    replica = Replica(config, world, state, recorder, fence, initial)
    # All of this lives as long as the process. Frozen, it is not scanned again: a collection of the later objects
    # takes milliseconds instead of a fifth of a second.
    gc.collect()
    gc.freeze()
    return replica


def watch_node(recorder: Recorder, world: World) -> NodeWatch:
    """Sample this machine beside training. One rank of a node keeps the samples."""

    def is_own(pid: int) -> bool:
        # Under torchrun and the like, the ranks of a machine have one parent.
        return is_of_own_run(pid) or parent_of(pid) == os.getppid()

    keep = recorder.sample if world.is_node_main else lambda sample: None
    watch = NodeWatch(is_own, keep, threads=torch.get_num_threads())
    watch.start()
    return watch


@dataclass(frozen=True)
class ResumeContext:
    """What is known when a world returns to a checkpoint."""

    launched: int  # Ranks at launch.
    newest: NewestCheckpoint  # This machine's newest checkpoint, which takes long to check.


def start_training(
    replica: Replica, chooser: SyncChooser, run: RunFolder, resume: bool, recovery: ResumeContext | None = None
) -> None:
    """Make all ranks equal, divide the batch, connect the exchanges and load a checkpoint if asked to.

    Called in the first world of a launch, or with `recovery` in a world that returns to a checkpoint. After a recovery
    there may be fewer or more ranks than at launch: the global batch stays that of the launch.
    """
    config, world = replica.config, replica.world
    launched = world.size if recovery is None else recovery.launched
    plan = plan_global_batch(config, launched)
    # First shares by a profile may need small micro-batches. Later ones may have the size of equal shares.
    most = max(plan.micro_batch, micro_batch(config.train, (1.0,) * launched))
    check_same_training(world, replica.state, None if recovery is None else 0)
    _make_equal(replica)
    if recovery is not None and world.ids != tuple(range(launched)):
        replica.division.redivide(plan.global_batch, most, world.ids)
    else:
        replica.division.set(plan, most)
    replica.connect()
    if resume:
        chooser.recall(run)
        checkpoints = CheckpointFolder(run.checkpoints, config.train.keep_checkpoints)
        newest = recovery.newest if recovery is not None else None
        resume_training(replica, checkpoints, chooser.resume_at, config.run.lineage, newest)
        fill_ledger_gaps(replica, run.commits)
    # Steps that an earlier launch, or the lost ranks, have reported already are not reported again.
    own_step = max(replica.progress.step, last_step(run.commits) if world.keeps_files else 0)
    reported_step = max(step for [step] in gather_integers(world, [max(own_step, replica.periodic.reported_step)]))
    replica.restore_periodic(replica.progress.step, reported_step=reported_step)


def announce(replica: Replica, run: RunFolder, **fields: object) -> None:
    """Record the start of this rank: process, settings, and more fields of the program that drives it."""
    digest = hashlib.sha256(run.config.read_bytes()).hexdigest()
    replica.recorder.event("start", **describe_start(replica), **fields, config_sha256=digest)


def describe_start(replica: Replica) -> dict[str, object]:
    """Return the fields of the `start` event about the training itself."""
    follows_speed = replica.division.follows_speed(replica.world)
    divided = replica.state.divided
    return {
        "params": sum(parameter.numel() for parameter in replica.model.parameters()),
        **describe_exchanges(replica.config.sync, replica.exchanges, replica.state),
        "global_batch": replica.plan.global_batch,
        "micro_batch": replica.plan.micro_batch,
        "share": replica.share,
        "micro_batches": replica.plan.counts[replica.world.rank],
        "shares_why": describe_first_shares(replica.plan, _shares_source(replica), follows_speed),
        **({} if divided is None else {"copies": int(divided.layout.copy_shift > 0)}),
        "seed": replica.config.train.seed,
        "steps": replica.config.train.steps,
        "resumed_from": replica.progress.step,
    }


def _shares_source(replica: Replica) -> str:
    """Return where unequal shares come from; nothing for equal ones."""
    if replica.division.balance.weights(replica.world.ids):
        return "by the speeds that were measured before"
    if replica.config.run.weights is not None:
        return "as run.weights sets them"
    return "by the speeds that shoal probe measured" if replica.config.run.speeds else ""


def _make_equal(replica: Replica) -> None:
    """Copy rank 0's weights if they differ: the same seed gives the same weights, except on another kind of CPU."""
    weights = replica.state.weights()
    if not have_equal_digests(replica.world, digest_tensors(weights)):
        broadcast_tensors(replica.world, 0, weights.values())
    torch.manual_seed(replica.config.train.seed + replica.world.rank)


def make_timer(config: EngineConfig, world: World) -> StepTimer:
    return (WholeStepTimer if config.sync.measure == "off" else StepTimer)(world.device)


def describe_hardware() -> dict[str, Any]:
    topology = this_topology()
    return {
        "cpu": cpu_name(),
        "cores": topology.usable,
        "quota": topology.quota and topology.quota.cores,
        "memory_bytes": total_bytes(),
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "boot_id": boot_id(),
        "gpu": f"{torch.cuda.get_device_name()} ({gpu_runtime()})" if torch.cuda.is_available() else None,
    }


def describe_versions() -> dict[str, str]:
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
        "backend": "nccl" if world.gpu_group is not None else world.backend,
        "threads": torch.get_num_threads(),
        "interface": world.interface,
        "link_mbps": world.link_mbps,
        "versions": describe_versions(),
        "hardware": describe_hardware(),
    }
