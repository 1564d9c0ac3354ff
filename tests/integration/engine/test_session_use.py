"""`shoal.Session` with real ranks: the same training on any number of them, kinds of models and data, wrong use.

Exercises engine.session.
"""

from __future__ import annotations

import math
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from shoal.config import defaults
from shoal.cost.batch_plan import BatchPlan
from shoal.engine.sampling import SHARDS
from shoal.engine.session import Session, Step
from shoal.engine.step import DoneStep
from shoal.errors import PeerLost, RunFailed, ShoalError, UsageError
from shoal.sync.step_stats import StepStats
from shoal.sync.world import World
from tests.support.programs import read_jsonl, shoal
from tests.support.ranks import run_ranks
from tests.support.sessions import Recipe, make_folder, open_session, train

INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()
DATA = (INPUTS, LABELS)


def settings(steps: int = 50, global_batch: int = 12, **sections: dict[str, Any]) -> dict[str, Any]:
    train_section = {"steps": steps, "global_batch": global_batch, "checkpoint_every": 10, "pin": "off"}
    return {**sections, "train": {**train_section, **sections.get("train", {})}}


def make_model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Tanh(), nn.Linear(16, 2))


def loss_step(model: Callable[[Tensor], Tensor], data: Any = DATA, **options: Any) -> Callable[[Step], None]:
    def do_step(step: Step) -> None:
        for inputs, labels in step.batches(data):
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
        step.update(clip=1.0, **options)

    return do_step


# Recipes: each attaches a model to the session, and returns what does one step.


def plain(session: Session) -> Callable[[Step], None]:
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return loss_step(model)


def batch_norm(session: Session) -> Callable[[Step], None]:
    model = make_model(nn.BatchNorm1d(16))
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return loss_step(model)


def two_optimizers(session: Session) -> Callable[[Step], None]:
    """Use groups of parameters, two optimizers, and a scheduler for each."""
    model = make_model()
    groups = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias], "lr": 0.01}]
    first = torch.optim.AdamW(groups, lr=0.02)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(first, step_size=5, gamma=0.5),
        torch.optim.lr_scheduler.CosineAnnealingLR(second, T_max=20),
    ]
    session.attach(model, first, second, *schedulers)
    return loss_step(model)


def frozen(session: Session) -> Callable[[Step], None]:
    model = make_model()
    model[0].requires_grad_(False)
    session.attach(model, torch.optim.AdamW(model[2].parameters(), lr=0.02))
    return loss_step(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.decode(torch.tanh(self.encode(x))))[:, :2]


def tied(session: Session) -> Callable[[Step], None]:
    torch.manual_seed(3)
    model = Tied()
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return loss_step(model)


def recomputed(session: Session) -> Callable[[Step], None]:
    """Use activation checkpointing."""
    model = make_model()
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))

    def forward(inputs: Tensor) -> Tensor:
        output: Tensor = checkpoint(model, inputs, use_reentrant=False)
        return output

    return loss_step(forward)


def compiled(session: Session) -> Callable[[Step], None]:
    """Use torch.compile on the whole model, with a backend that needs no C++ compiler."""
    model = make_model()
    model_compiled: Any = torch.compile(model, backend="aot_eager")
    session.attach(model_compiled, torch.optim.AdamW(model.parameters(), lr=0.02))
    return loss_step(model_compiled)


def with_workers(session: Session) -> Callable[[Step], None]:
    model = make_model()
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return loss_step(model, DataLoader(TensorDataset(*DATA), num_workers=1))


def averaged(session: Session) -> Callable[[Step], None]:
    """Keep a moving average of the weights, updated with every step."""
    model = make_model()
    average = AveragedModel(model)
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02), average)
    return loss_step(model, after=lambda: average.update_parameters(model))


def half_precision(session: Session) -> Callable[[Step], None]:
    model = make_model()
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))

    def forward(inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(inputs).float()  # type: ignore[no-any-return]

    return loss_step(forward)


def counted(session: Session) -> Callable[[Step], None]:
    """Count some of the samples only, as tokens that are not padding: another number in every step of every rank."""
    model = make_model()
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))

    def do_step(step: Step) -> None:
        for inputs, labels in step.batches(DATA):
            is_counted = inputs[:, 0] > -0.5
            loss = F.cross_entropy(model(inputs)[is_counted], labels[is_counted], reduction="sum")
            step.backward(loss, count=int(is_counted.sum()))
        step.update()

    return do_step


def dropout(session: Session) -> Callable[[Step], None]:
    model = make_model(nn.Dropout(0.2))
    session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return loss_step(model)


# The same training on other ranks.


def test_one_two_and_three_ranks_have_the_same_losses(tmp_path: Path) -> None:
    """Batches of all ranks together are the same, and so is the gradient up to rounding; shares may be unequal."""
    alone = train(tmp_path / "one", 1, plain, settings())
    assert len(alone) == 50
    assert alone[-1] < 0.5 * alone[0]
    others = {
        "two": train(tmp_path / "two", 2, plain, settings()),
        "three": train(tmp_path / "three", 3, plain, settings()),
        "unequal": train(tmp_path / "unequal", 2, plain, settings(run={"weights": "2/1"})),
        "accumulated": train(tmp_path / "more", 2, plain, settings(global_batch=6, sync={"accumulate": 2})),
    }
    for name, losses in others.items():
        assert losses == pytest.approx(alone, rel=1e-4, abs=1e-5), name


def plain_torch(steps: int) -> list[float]:
    """Train `plain` without shoal but for the order of samples."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        rows = order_of_samples(step)
        loss = F.cross_entropy(model(INPUTS[rows]), LABELS[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def order_of_samples(step: int) -> Tensor:
    shard = SHARDS["cursor"](0, BatchPlan(12, (12,)), len(INPUTS), defaults.SEED)
    return torch.from_numpy(shard.indices(12 * step))


def test_the_losses_are_those_of_plain_torch(tmp_path: Path) -> None:
    losses = train(tmp_path / "run", 2, plain, settings())
    assert losses == pytest.approx(plain_torch(50), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [two_optimizers, frozen, tied, recomputed, compiled, with_workers, averaged, counted],
    ids=lambda recipe: recipe.__name__,
)
def test_two_ranks_train_like_one(recipe: Recipe, tmp_path: Path) -> None:
    given = settings(steps=20, train={"count_varies": recipe is counted})
    alone = train(tmp_path / "one", 1, recipe, given)
    assert train(tmp_path / "two", 2, recipe, given) == pytest.approx(alone, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("recipe", [batch_norm, half_precision, dropout], ids=lambda recipe: recipe.__name__)
def test_replicas_end_equal(recipe: Recipe, tmp_path: Path) -> None:
    """Their losses depend on how the batch is divided; `train` compares parameters and buffers."""
    losses = train(tmp_path / "run", 2, recipe, settings(steps=20))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", [two_optimizers, batch_norm, dropout], ids=lambda recipe: recipe.__name__)
def test_a_resumed_training_repeats_the_losses_to_the_bit(recipe: Recipe, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, recipe, settings(steps=30))
    assert len(train(tmp_path / "parts", 2, recipe, settings(steps=30), stop_after=13)) < 30
    assert train(tmp_path / "parts", 2, recipe, settings(steps=30)) == whole


# Wrong use.


def no_backward(session: Session) -> None:
    plain(session)
    for step in session:
        with step:
            step.update()


def outside_the_block(session: Session) -> None:
    do_step = plain(session)
    for step in session:
        do_step(step)


def after_the_block(session: Session) -> None:
    do_step = plain(session)
    for step in session:
        with step:
            do_step(step)
        step.backward(torch.zeros((), requires_grad=True))


def no_update(session: Session) -> None:
    plain(session)
    for step in session:
        with step:
            pass


def two_updates(session: Session) -> None:
    do_step = plain(session)
    for step in session:
        with step:
            do_step(step)
            step.update()


def reserved_name(session: Session) -> None:
    plain(session)
    for step in session:
        with step:
            for name in ("samples", "loss", "step", "wait_s", "rank"):
                with pytest.raises(UsageError, match=rf"step\.update cannot record a value named {name}"):
                    step.update(**{name: 1.0})  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="cannot record note: it is a str and not a number"):
                session.log(note="text")  # type: ignore[arg-type]
            session.log(step=1.0)


def mean_of_nothing(session: Session) -> None:
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session:
        with step:
            for inputs, labels in step.batches(DATA):
                step.backward(F.cross_entropy(model(inputs), labels, reduction="none"))


def own_error(session: Session) -> None:
    do_step = plain(session)
    for step in session:
        with step:
            if step.number == 3:
                raise KeyError("my own mistake")
            do_step(step)


def other_parameters(session: Session) -> None:
    session.attach(make_model(), torch.optim.SGD(make_model().parameters(), lr=0.1))


def forgotten_parameters(session: Session) -> None:
    model = make_model()
    session.attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def no_model(session: Session) -> None:
    for step in session:
        with step:
            step.update()


def iterator_as_data(session: Session) -> None:
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    do_step = loss_step(model, iter(TensorDataset(*DATA)))
    for step in session:
        with step:
            do_step(step)


def other_length(session: Session) -> None:
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    part = slice(10 * session.rank, None)
    do_step = loss_step(model, (INPUTS[part], LABELS[part]))
    for step in session:
        with step:
            do_step(step)


def other_samples(session: Session) -> None:
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    do_step = loss_step(model, (INPUTS + session.rank, LABELS))
    for step in session:
        with step:
            do_step(step)


def unused_parameter(session: Session) -> None:
    model = make_model()
    model.register_module("unused", nn.Linear(3, 3))
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    do_step = loss_step(lambda inputs: model[2](model[1](model[0](inputs))))
    for step in session:
        with step:
            do_step(step)


def misuse(world: World, path: Path, program: Callable[[Session], None]) -> tuple[str, str, int | None]:
    """Return the error that ends the program: its type, its text and its exit code."""
    try:
        program(open_session(world, path, settings(steps=5)))
    except ShoalError as error:
        return type(error).__name__, error.render(), error.exit_code
    except Exception as error:
        return type(error).__name__, "".join(traceback.format_exception(error)), None
    return "", "", None


@pytest.mark.parametrize(
    ("program", "ranks", "words"),
    [
        (no_backward, 1, "step 1 was updated after 0 of its 1 micro-batches"),
        (outside_the_block, 1, "step.batches was called outside of its step"),
        (after_the_block, 1, "step.backward was called outside of its step"),
        (no_update, 1, "step 1 was not done"),
        (two_updates, 1, "step 1 was updated twice"),
        (reserved_name, 1, "session.log cannot record a value named step"),
        (mean_of_nothing, 1, "the loss is a tensor of shape"),
        (other_parameters, 1, "4 parameters of an optimizer are not parameters of the model"),
        (forgotten_parameters, 1, "no optimizer updates the parameter 2.weight and 1 others"),
        (no_model, 1, "nothing is attached to the session"),
        (iterator_as_data, 1, "is no dataset that can be shared by ranks"),
        (other_length, 2, "rank 0 has a dataset of 96 samples, rank 1 one of 86"),
        (other_samples, 2, "the datasets of rank 0 and rank 1 have the same length and other samples"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_use_is_refused_with_a_reason(
    program: Callable[[Session], None], ranks: int, words: str, tmp_path: Path
) -> None:
    path = make_folder(tmp_path / "run", settings(steps=5))
    for kind, text, code in run_ranks(misuse, ranks, tmp_path, path, program):
        assert kind == UsageError.__name__, text
        assert words in text
        assert "next:" in text
        assert ("torch.manual_seed" in text) == (program is other_samples or program is other_length)
        assert code == 2


def test_an_error_of_the_program_is_raised_as_it_is(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings(steps=5))
    [(kind, text, _)] = run_ranks(misuse, 1, tmp_path, path, own_error)
    assert kind == "KeyError"
    assert 'raise KeyError("my own mistake")' in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unused_parameter_is_named(ranks: int, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings(steps=5))
    for kind, text, _ in run_ranks(misuse, ranks, tmp_path, path, unused_parameter):
        assert "unused.weight" in text, (kind, text)


SCRIPT = """
import sys, torch, shoal
from torch.nn import functional as F

session = shoal.Session(steps=8, global_batch=8)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
if sys.argv[1] != "empty":
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.randn(64, 4), torch.zeros(64).long()
for step in session:
    if sys.argv[1] == "break" and step.number == 4:
        break
    with step:
        if sys.argv[1] == "raise" and step.number == 4 and session.rank == session.world_size - 1:
            print("raised once", flush=True)
            raise ValueError("my own mistake")
        if sys.argv[1] == "early":
            step.update()
        for x, y in step.batches(data):
            step.backward(F.cross_entropy(model(x), y, reduction="sum"))
        step.update()
print("after the loop", flush=True)
"""


def write_script(folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


@pytest.mark.parametrize(
    ("way", "code", "words"),
    [
        ("break", 0, "warning: the loop over the session was left after 3 of 8 steps"),
        ("early", 2, "  next: call step.backward for every batch of step.batches(...)"),
    ],
)
def test_a_script_alone_prints_what_to_do(way: str, code: int, words: str, tmp_path: Path) -> None:
    argv = [sys.executable, str(write_script(tmp_path)), way]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert ("after the loop" in done.stdout) == (code == 0)


@pytest.mark.long
def test_an_error_of_the_program_ends_an_elastic_run_without_a_retry(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", write_script(tmp_path), "raise")
    assert done.returncode == 1
    assert done.stdout.count("raised once") == 1
    assert "rank 1 on local ended with exit code 1: ValueError: my own mistake (script.py line 17)" in done.stderr


@pytest.mark.parametrize(
    ("way", "words", "advice"),
    [
        ("empty", "nothing is attached to the session", "before the loop: session.attach(model, optimizer)"),
        ("early", "step 1 was updated after 0 of its 1 micro-batches on this rank", "call step.backward for every"),
    ],
)
@pytest.mark.long
def test_an_error_of_the_session_is_that_of_the_run_and_printed_once(
    way: str, words: str, advice: str, tmp_path: Path
) -> None:
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", write_script(tmp_path), way)
    assert done.returncode == 2
    seen, why, fix = done.stderr.splitlines()[-3:]
    assert seen == f"error: {words}"
    assert why.endswith("all 2 ranks failed in the same way")
    assert fix.startswith(f"  next: {advice}")
    assert done.stdout == ""
    # The log of each rank has it too.
    assert shoal("logs", tmp_path / "run").stdout.count(words) == 2


@pytest.mark.long
def test_a_loop_that_is_left_early_ends_well_and_says_where(tmp_path: Path) -> None:
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", write_script(tmp_path), "break")
    assert done.returncode == 0, done.stderr
    assert "the loop ended at step 3 of 8" in done.stderr
    listed = shoal("runs", "--in", tmp_path).stdout.splitlines()[1]
    assert "ended early  3 of 8" in listed


def scaled_recipe(session: Session) -> Callable[[Step], None]:
    """Lose the second step after its gradients were unscaled, as when a peer leaves before the update."""
    model, scaler = make_model(), torch.amp.GradScaler("cpu")
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)

    def compute(step: Step) -> None:
        for inputs, labels in step.batches(DATA):
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))

    def do_step(step: Step) -> None:
        compute(step)
        if step.number == 2:
            session.entry.step._finish_gradients(
                step.number, 1.0, session.replica.state.optimizers, None, can_queue=False
            )
            session.entry.step.drop()
            session.entry.step.begin()
            compute(step)
        step.update(clip=1.0)
        assert scaler.get_scale() == 65536.0

    return do_step


def test_a_step_that_is_lost_after_unscaling_is_done_again(tmp_path: Path) -> None:
    assert len(train(tmp_path / "run", 1, scaled_recipe, settings(steps=4))) == 4


def lost_after_update_recipe(session: Session) -> Callable[[Step], None]:
    """Lose a peer in the second step, between the update and the statistics of all ranks."""
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def lose(*_: object) -> list[StepStats]:
        raise PeerLost("the connection was closed")

    def do_step(step: Step) -> None:
        for inputs, labels in step.batches(DATA):
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
        if step.number != 2:
            step.update()
            return
        gather = session.replica.exchanges.steps
        finish, gather.finish = gather.finish, lose  # type: ignore[method-assign]
        with pytest.raises(PeerLost):
            step.update()
        gather.finish = finish  # type: ignore[method-assign]
        # The next generation would continue from here.
        assert session.step == 2
        step._outcome.done = DoneStep()

    return do_step


def test_a_step_whose_peer_is_lost_after_the_update_is_recorded(tmp_path: Path) -> None:
    assert len(train(tmp_path / "run", 1, lost_after_update_recipe, settings(steps=4))) == 4
    events = read_jsonl(tmp_path / "run/events/rank-0.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]


def switched_off_recipe(session: Session) -> Callable[[Step], None]:
    """Attach a scaler that is switched off, and make the gradient of the second step infinite."""
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False))
    next(model.parameters()).register_hook(lambda gradient: gradient * (math.inf if session.step == 1 else 1.0))

    def do_step(step: Step) -> None:
        for inputs, labels in step.batches(DATA):
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
        if step.number == 1:
            step.update()
            return
        with pytest.raises(RunFailed, match=r"gradient norm became (inf|nan) in step 2"):
            step.update()
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        # End the training here: no rank has applied the step.
        session.replica.exchanges.steps.drain()
        step._outcome.done = DoneStep(wants_stop=True)

    return do_step


def test_a_scaler_that_is_switched_off_hides_no_infinite_gradient(tmp_path: Path) -> None:
    assert len(train(tmp_path / "run", 1, switched_off_recipe, settings(steps=4))) == 1


def lost_before_scaling_recipe(session: Session) -> Callable[[Step], None]:
    """Lose the first step after its first backward was counted, and before its loss was scaled."""
    model = make_model()
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu"))

    def do_step(step: Step) -> None:
        if step.number == 1:
            training = session.entry.step
            training._work.micro_batches = 1
            training.drop()
            training.begin()
        for inputs, labels in step.batches(DATA):
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
        step.update()

    return do_step


def test_a_step_that_is_lost_before_its_loss_was_scaled_is_done_again(tmp_path: Path) -> None:
    assert len(train(tmp_path / "run", 1, lost_before_scaling_recipe, settings(steps=3))) == 3


@pytest.mark.parametrize("steps", [0, -5])
def test_a_function_of_no_step_is_refused(steps: int, tmp_path: Path) -> None:
    session = Session.__new__(Session)
    with pytest.raises(UsageError, match="names no step"):
        session.every(steps)
