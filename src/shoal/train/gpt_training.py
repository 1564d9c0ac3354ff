"""shoal's own GPT, trained by the engine as any user's model is: model, text, schedule, evaluation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from shoal.config.schema import Config, TrainConfig
from shoal.cost.batch_plan import learning_rate
from shoal.cost.model_size import parameter_count
from shoal.data.prepare import read_data_facts
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokens import Tokens, TokenWindows, open_tokens, validation_batches, window_count
from shoal.engine.batches import micro_batch_indices
from shoal.engine.entry import Hooks
from shoal.engine.machine_trial import MachineTrial
from shoal.engine.recorder import last_event
from shoal.engine.replica import Replica
from shoal.engine.sampling import Shard
from shoal.engine.session import Session
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.sync.step_stats import max_over_world
from shoal.sync.world import barrier
from shoal.train.autotune import ComputeChoice, apply, choose, has_compiler, precision_on, work_left

# In a shorter run it would not pay to compute two steps more.
_MIN_STEPS_TO_COMPARE = 200
_COMPARE_TIMEOUT_S = 600.0


def train_gpt(session: Session, config: Config, run: RunFolder) -> bool:
    """Train to the end, or until a rank wants to stop; return True if the end was reached."""
    for _ in GptTrainer(session, config, run).steps():
        pass
    return session.is_finished


class GptTrainer:
    """The training loop of shoal's GPT: what a user's own loop does, and a choice of how to compute."""

    def __init__(self, session: Session, config: Config, run: RunFolder) -> None:
        torch.manual_seed(config.train.seed)
        self.session, self.config, self.run = session, config, run
        self.model = GPT(config.model, config.train.recompute).to(session.device)
        self.optimizer = make_optimizer(self.model, config.train)
        self.compute = Compute(self.model)
        facts = read_data_facts(run)
        self.text = TextSource(TokenWindows(open_tokens(Path(facts.train)).tokens, config.model.seq_len))
        self.validation = open_tokens(Path(facts.val)).tokens
        session.attach(self.model, self.optimizer, self.compute, reset=self.reset)
        session.hooks = Hooks(partial(choose_compute, session, config, self.compute), self.warm_up, self.describe)
        session.every(config.train.eval_every)(self.evaluate)

    def steps(self) -> Iterator[int]:
        """Train; yield the number of each step after it was tried."""
        session, seq_len = self.session, self.config.model.seq_len
        has_recorded_shard = False
        for step in session:
            if not has_recorded_shard:
                # After the `start` event, which begins a launch for all readers.
                describe_shard(session, self.text, self.run, self.config)
                has_recorded_shard = True
            with step:
                lr = self.set_learning_rate(step.number)
                for rows in step.batches(self.text):
                    inputs, targets = split_inputs_targets(rows)
                    # The model sums over tokens, and the session divides by the number of samples.
                    step.backward(self.model(inputs, targets) / seq_len)
                step.update(clip=self.config.train.clip, lr=lr, tokens=session.global_batch * seq_len)
            yield step.number

    def set_learning_rate(self, step: int) -> float:
        train = self.config.train
        lr = learning_rate(step, peak_rate(train, self.session.global_batch), train)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def evaluate(self) -> None:
        session, replica, began = self.session, self.session.replica, time.perf_counter()
        loss = evaluate(self.model, self.validation, self.config, replica.plan.micro_batch, session)
        common_step = replica.outer.common_step(session.step)
        older = {} if common_step == session.step else {"common_step": common_step}
        eval_s = round(time.perf_counter() - began, 6)
        replica.recorder.event("eval", step=session.step, val_loss=loss, eval_s=eval_s, **older)

    def reset(self) -> None:
        """Put the weights of step 0 back: the same seed gives the same ones."""
        torch.manual_seed(self.config.train.seed)
        with torch.no_grad():
            for parameter, initial in zip(self.model.parameters(), GPT(self.config.model).parameters(), strict=True):
                parameter.copy_(initial)
        self.optimizer.state.clear()

    def warm_up(self) -> None:
        """Compute once as a restarted rank before it joins: all others would wait seconds in its first step.

        Compiling takes that long, and so does loading the first kernels of a GPU.
        """
        device = self.session.device
        start = last_event(self.run.events(self.session.replica.world.id), "start")
        is_compiled = bool(start.get("compiled"))
        if is_compiled or (start and device.type == "cuda"):
            self.compute.set(ComputeChoice(is_compiled, start["precision"], "as before"))
            shape = (start["micro_batch"], self.config.model.seq_len)
            tokens = torch.zeros(shape, dtype=torch.int64, device=device)
            self.model(tokens, tokens).backward()
            self.optimizer.zero_grad(set_to_none=True)

    def describe(self) -> dict[str, object]:
        """Return what the `start` event of a rank says of the model."""
        session, choice = self.session, self.compute.choice
        return {
            "params_expected": parameter_count(self.config.model),
            "tokens_per_step": session.global_batch * self.config.model.seq_len,
            "lr": peak_rate(self.config.train, session.global_batch),
            "compiled": choice.compiled,
            "precision": precision_on(choice, session.device),
            "compute_why": choice.why,
        }


def make_optimizer(model: GPT, train: TrainConfig) -> AdamW:
    # Fused: one pass over all moments. Measured five times faster than the plain loop on CPU for 124M parameters.
    groups = model.decay_groups(train.weight_decay)
    return AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def peak_rate(train: TrainConfig, global_batch: int) -> float:
    """Scale the learning rate linearly from the batch it was tuned for."""
    return train.lr * global_batch / train.base_batch


def choose_compute(session: Session, config: Config, compute: Compute) -> None:
    """Compile the model and choose its precision: as when the run began, or by a trial without a trace."""
    replica, trial = session.replica, session.entry.trial
    own = compute.choice
    must_choose = not compute.is_chosen or (own.compiled and not has_compiler())
    if not max_over_world(replica.world, [float(must_choose)])[0]:
        compute.set(ComputeChoice(own.compiled, own.precision, "as when the run began"))
    else:
        steps = max(0, config.train.steps - session.step)
        work = work_left(config.model, replica.plan.micro_batch, max(replica.plan.counts), steps)
        note = partial(_note, replica)
        compute.set(choose(compute.model, config, replica.plan.micro_batch, work, replica.world, note))
    # A model compiled on a GPU needs micro-batches of one size, and all ranks divide the batch in the same way.
    is_fixed = compute.choice.compiled and session.device.type != "cpu"
    replica.division.fix_shapes(bool(max_over_world(replica.world, [float(is_fixed)])[0]))
    if trial is not None and not session.step:
        trial.alone_s = measure_one_process(trial, replica, compute, config)


def measure_one_process(trial: MachineTrial, replica: Replica, compute: Compute, config: Config) -> float | None:
    """Time the gradients of a whole batch in one process on all cores, while the other ranks of this machine wait.

    Return None where there is nothing to compare with, the run is too short, or the code is compiled for its threads.
    """
    world, size = replica.world, replica.division.largest_micro_batch
    is_one_machine = world.local_size == world.size > 1 and set(world.devices) == {"cpu"}
    if not is_one_machine or compute.choice.compiled or config.train.steps < _MIN_STEPS_TO_COMPARE:
        return None
    seconds = None
    if world.is_main and compute.model.take_head is None:
        generator = torch.Generator().manual_seed(0)
        parameters = [parameter for parameter in compute.model.parameters() if parameter.requires_grad]
        with trial.as_one_process():
            for batch in (min(size, replica.global_batch), replica.global_batch):
                began = time.perf_counter()
                for first in range(0, batch, size):
                    shape = (min(size, batch - first), config.model.seq_len)
                    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
                    # `backward` would leave gradients in the parameters.
                    torch.autograd.grad(compute.model(tokens, tokens), parameters)
                seconds = time.perf_counter() - began
    barrier(world, timeout_s=_COMPARE_TIMEOUT_S)
    return seconds


def _note(replica: Replica, text: str) -> None:
    """Tell the user what takes long before the first step."""
    if replica.world.rank == 0:
        replica.recorder.event("doing", text=text)


class Compute:
    """How the model computes, as a part of the training's state: ranks that join must round as the others do."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.choice = ComputeChoice()
        self.is_chosen = False

    def set(self, choice: ComputeChoice) -> None:
        self.choice, self.is_chosen = choice, True
        apply(choice, self.model)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.choice) | {"is_chosen": self.is_chosen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values = dict(state_dict)
        is_chosen, choice = values.pop("is_chosen"), ComputeChoice(**{**values, "why": "as the others do"})
        device = self.model.token.weight.device
        own, others = ((one.compiled, precision_on(one, device)) for one in (self.choice, choice))
        if is_chosen and own != others:
            self.set(choice)
        self.is_chosen = is_chosen


class TextSource:
    """The windows of a text: rows of `seq_len` inputs and, shifted by one, as many targets."""

    is_pure = True

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows
        self.count: int | None = len(windows)

    def fetch(self, shard: Shard, cursor: int) -> Iterator[Tensor]:
        for indices in micro_batch_indices(shard, cursor):
            yield torch.from_numpy(self.windows.rows(indices))

    def fingerprint(self) -> int:
        """Return 0: agents compare the digests of the texts before the ranks start."""
        return 0

    def close(self) -> None: ...


def split_inputs_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model: GPT, tokens: Tokens, config: Config, micro_batch: int, session: Session) -> float:
    """Return the mean loss per token over the first `eval_sequences` windows, the same on every rank."""
    seq_len = config.model.seq_len
    sequences = min(config.train.eval_sequences, window_count(len(tokens), seq_len))
    loss_sum, count = 0.0, 0
    model.eval()
    # Compiled blocks would be compiled again: without gradients, without dropout, with a shorter last batch.
    with model.run_eagerly():
        for rows in validation_batches(tokens, seq_len, sequences, micro_batch, session.rank, session.world_size):
            inputs, targets = split_inputs_targets(torch.from_numpy(rows).to(session.device))
            loss_sum += model(inputs, targets).item()
            count += targets.numel()
    model.train()
    total_loss, total_count = session.sum(loss_sum, float(count))
    return total_loss / total_count


def describe_shard(session: Session, text: TextSource, run: RunFolder, config: Config) -> None:
    """Record this rank's part of the data; the sizes of all ranks add up to the total."""
    shard = session.data.shard(text, session.replica)
    words = load_tokenizer(run.tokenizer).decode(text.windows.text_at(int(shard.indices(0)[0])).tolist())
    # A sample seldom begins at the start of a sentence: show the first one that follows a line end.
    first = words.partition("\n")[2].partition("\n")[0] or words.partition("\n")[0]
    session.replica.recorder.event(
        "shard",
        size=shard.size,
        total=shard.count,
        first=first,
        sharding=config.data.sharding,
        seed=config.train.seed + session.rank,
    )
    with contextlib.suppress(OSError):
        # A full disk must not end a training because its log cannot grow.
        print(f"rank {session.rank} of {session.world_size}: {shard.size:,} of {shard.count:,} samples, first: {first}")
