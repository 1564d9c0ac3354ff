"""Puts a trainer together from a run folder and a world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim import AdamW

from shoal.config.schema import Config, TrainConfig
from shoal.cost.batch import scaled_lr
from shoal.cost.sizes import grad_bytes, parameter_count
from shoal.data.batches import Batches
from shoal.data.order import window_count
from shoal.data.run_setup import read_facts
from shoal.data.shards import SHARDS, deal_for
from shoal.data.tokenfile import open_tokens
from shoal.data.tokenizer import load_tokenizer
from shoal.model.gpt import GPT
from shoal.runfolder import RunFolder
from shoal.sync.exchange import StepExchange
from shoal.sync.gradients import make_gradient_sync
from shoal.sync.replicas import all_agree, copy_from, tell_all
from shoal.sync.timer import StepTimer, WholeStepTimer
from shoal.sync.world import World
from shoal.train.checkpoint import Checkpoint, CheckpointFolder, Progress
from shoal.train.recorder import Recorder
from shoal.train.state import digest, empty_moments, load_moments, load_weights, moments, weights
from shoal.train.trainer import StopWish, Trainer


def build_trainer(
    config: Config, run: RunFolder, world: World, recorder: Recorder, stop: StopWish, resume: bool
) -> Trainer:
    model = _make_model(config, world)
    optimizer = _make_optimizer(model, config.train)
    progress = Progress(step=0, cursor=0)
    if resume:
        progress = _resume(model, optimizer, CheckpointFolder(run.checkpoints, config.train.keep_checkpoints), world)
    return Trainer(
        config=config,
        world=world,
        model=model,
        optimizer=optimizer,
        sync=make_gradient_sync(config.sync, model, world),
        exchange=StepExchange(world),
        batches=make_batches(config, run, world),
        timer=_make_timer(config, world),
        recorder=recorder,
        stop=stop,
        peak_lr=scaled_lr(config.train, world.size),
        progress=progress,
    )


def make_batches(config: Config, run: RunFolder, world: World) -> Batches:
    tokens = open_tokens(Path(read_facts(run).train)).tokens
    seq_len = config.model.seq_len
    dealt = deal_for(config, world.size)
    count = window_count(len(tokens), seq_len)
    return Batches(tokens, seq_len, SHARDS[config.data.sharding](world.rank, dealt, count, config.data.seed))


def describe_start(trainer: Trainer) -> dict[str, object]:
    """What the `start` event says of the training itself."""
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    dealt = trainer.batches.shard.deal
    return {
        "params": parameters,
        "params_expected": parameter_count(trainer.config.model),
        "grad_bytes": grad_bytes(parameters, trainer.config.sync.wire),
        "inside": trainer.sync.inside.way,
        "inside_note": trainer.sync.inside.note,
        "global_batch": dealt.global_batch,
        "micro_batch": dealt.micro_batch,
        "share": dealt.micro_batches[trainer.world.rank],
        "tokens_per_step": trainer.global_tokens,
        "lr": trainer.peak_lr,
        "seed": trainer.config.train.seed,
        "resumed_from": trainer.progress.step,
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


def _make_model(config: Config, world: World) -> GPT:
    """The same seed on every rank gives the same weights; where it doesn't (another CPU), rank 0's are copied."""
    torch.manual_seed(config.train.seed)
    model = GPT(config.model).to(world.device)
    if not all_agree(world, digest(weights(model))):
        copy_from(world, 0, weights(model).values())
    torch.manual_seed(config.train.seed + world.rank)
    return model


def _make_optimizer(model: GPT, train: TrainConfig) -> AdamW:
    # Fused updates all moments in one pass: measured five times faster than the plain loop on CPU for 124M parameters.
    groups = model.decay_groups(train.weight_decay)
    return AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def _resume(model: GPT, optimizer: AdamW, folder: CheckpointFolder, world: World) -> Progress:
    """Rank 0 picks the newest whole checkpoint and everybody copies it, whatever lies on other disks."""
    checkpoint = folder.load_latest(set_aside=True) if world.is_main else None
    step, cursor = tell_all(world, 0, [checkpoint.progress.step, checkpoint.progress.cursor] if checkpoint else [0, 0])
    if checkpoint is not None:
        load_weights(model, checkpoint.model)
    tensors = checkpoint.optimizer if checkpoint is not None else empty_moments(model)
    load_moments(model, optimizer, tensors, step)
    copy_from(world, 0, [*weights(model).values(), *moments(model, optimizer).values()])
    return Progress(step, cursor, world.generation)


def _make_timer(config: Config, world: World) -> StepTimer:
    synchronize: Callable[[], None] | None = torch.cuda.synchronize if world.device.type == "cuda" else None
    return (WholeStepTimer if config.sync.measure == "off" else StepTimer)(synchronize)


def snapshot(trainer: Trainer) -> Checkpoint:
    return Checkpoint(trainer.progress, weights(trainer.model), moments(trainer.model, trainer.optimizer))
