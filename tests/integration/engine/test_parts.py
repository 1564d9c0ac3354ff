"""Several updates in a step, parameters that a step leaves out, epochs, and a training that needs no more steps.

Exercises engine.parts, engine.epochs, engine.loss_terms, sync.gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import RunFailed, UsageError
from shoal.sync.world import World
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.sessions import make_folder, open_session

GAN = ROOT / "tests/support/scripts/gan.py"
DATA = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(96, 3, generator=torch.Generator().manual_seed(2))


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    train = {"steps": 12, "global_batch": 12, "pin": "off", **sections.get("train", {})}
    return {**sections, "train": train}


class Gan:
    """Two models, each with an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
        self.judge_optimizer = torch.optim.Adam(self.judge.parameters(), lr=0.01)
        self.maker_optimizer = torch.optim.Adam(self.maker.parameters(), lr=0.01)

    def judge_loss(self, real: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        fake = self.maker(seeds).detach()
        return F.softplus(-self.judge(real)).sum() + F.softplus(self.judge(fake)).sum()

    def maker_loss(self, seeds: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.judge(self.maker(seeds))).sum()

    def weights(self) -> list[float]:
        parameters = [*self.judge.parameters(), *self.maker.parameters()]
        values: list[float] = torch.cat([parameter.detach().flatten() for parameter in parameters]).tolist()
        return values


def train_plainly(order: list[list[int]], judge_updates: int = 1, clip: float | None = None) -> list[float]:
    """Train as a plain loop does, on the samples of these steps."""
    gan = Gan()
    for samples in order:
        real, seeds = DATA[samples], NOISE[samples]
        for _ in range(judge_updates):
            gan.judge_optimizer.zero_grad()
            (gan.judge_loss(real, seeds) / len(samples)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(gan.judge.parameters(), clip)
            gan.judge_optimizer.step()
        gan.maker_optimizer.zero_grad()
        (gan.maker_loss(seeds) / len(samples)).backward()
        gan.maker_optimizer.step()
    return gan.weights()


def train_in_parts(
    world: World, path: Path, options: dict[str, Any], judge_updates: int, clip: float | None
) -> tuple[list[float], list[list[int]]]:
    session, gan = open_session(world, path, options), Gan()
    order: list[list[int]] = []
    session.attach(gan.judge, gan.maker, gan.judge_optimizer, gan.maker_optimizer)
    numbers = torch.arange(96)
    for step in session:
        with step:
            for _ in range(judge_updates):
                with step.part(gan.judge_optimizer, clip=clip):
                    for real, seeds, _ in step.batches((DATA, NOISE, numbers)):
                        step.backward(gan.judge_loss(real, seeds))
            order.append([])
            for _, seeds, samples in step.batches((DATA, NOISE, numbers)):
                order[-1] += samples.tolist()
                step.backward(gan.maker_loss(seeds))
            step.update()
    return gan.weights(), order


@pytest.mark.parametrize(
    ("ranks", "options", "judge_updates", "clip"),
    [
        (1, {}, 1, None),
        (2, {}, 1, None),
        (2, {"sync": {"inside": "gloo"}}, 3, 0.05),
        (2, {"run": {"weights": "3/1"}}, 1, None),
        (3, {"train": {"micro_batch": 2}}, 1, 0.05),
        (2, {"sync": {"measure": "barrier"}}, 1, None),
        (2, {"sync": {"mode": "stock"}}, 1, None),
    ],
    ids=["one rank", "two ranks", "three updates", "unequal shares", "micro-batches", "barrier", "stock"],
)
def test_two_updates_in_a_step_are_those_of_a_plain_loop(
    ranks: int, options: dict[str, Any], judge_updates: int, clip: float | None, tmp_path: Path
) -> None:
    chosen = settings(**options)
    path = make_folder(tmp_path / "run", chosen)
    results = run_ranks(train_in_parts, ranks, tmp_path, path, chosen, judge_updates, clip)
    by_step = zip(*(order for _, order in results), strict=True)
    order: list[list[int]] = [list(chain.from_iterable(parts)) for parts in by_step]
    expected = train_plainly(order, judge_updates, clip)
    for weights, _ in results:
        assert weights == pytest.approx(expected, abs=2e-5)
        assert weights == results[0][0]


@pytest.mark.parametrize("sync", [{"wire": "fp16"}, {"wire": "int8"}, {"mode": "diloco", "every": 4}])
def test_parts_train_with_every_wire_and_with_outer_steps(sync: dict[str, Any], tmp_path: Path) -> None:
    chosen = settings(sync=sync)
    path = make_folder(tmp_path / "run", chosen)
    (first, order), (second, _) = run_ranks(train_in_parts, 2, tmp_path, path, chosen, 1, None)
    assert first == second
    start = torch.tensor(Gan().weights())
    assert (torch.tensor(first) - start).norm() > 0.1
    assert len(order) == 12


def kill(script: Path, on: str, folder: Path) -> dict[str, Any]:
    run, result = folder / "run", folder / "result.json"
    with ended_afterwards(run):
        done = shoal("run", "--on", on, "--out", run, script, result)
    assert done.returncode == 0, done.stderr
    assert result.with_suffix(".killed").exists(), "no rank was killed"
    assert {commit["step"] for commit in read_jsonl(run / "commits.jsonl")} == set(range(1, 17))
    verified = shoal("verify", run)
    assert verified.returncode == 0, verified.stdout
    document: dict[str, Any] = json.loads(result.read_text())
    return document


def test_a_rank_that_dies_between_two_updates_leaves_no_half_step(tmp_path: Path) -> None:
    lost = kill(GAN, "local:3", tmp_path)
    alone = tmp_path / "alone.json"
    alone.with_suffix(".killed").touch()
    assert shoal("run", "--on", "local:1", "--out", tmp_path / "alone", GAN, alone).returncode == 0
    undisturbed = json.loads(alone.read_text())
    assert lost["losses"] == pytest.approx(undisturbed["losses"], abs=1e-5)
    assert lost["weights"] == pytest.approx(undisturbed["weights"], abs=1e-4)


def spoil_part(world: World, path: Path, what: str, sync: dict[str, Any]) -> str:
    session, gan = open_session(world, path, settings(sync=sync)), Gan()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=what == "scaled")
    session.attach(gan.judge, gan.maker, gan.judge_optimizer, gan.maker_optimizer, scaler)
    try:
        for step in session:
            with step:
                is_bad = step.number == 3 and session.rank == 1
                with step.part(gan.judge_optimizer):
                    for real, seeds in step.batches((DATA, NOISE)):
                        loss = gan.judge_loss(real, seeds)
                        if is_bad:
                            # Of the loss alone: its gradient is that of the finite part.
                            loss = loss + float("nan") if what == "loss" else loss * float("nan")
                        step.backward(loss)
                for _, seeds in step.batches((DATA, NOISE)):
                    step.backward(gan.maker_loss(seeds))
                step.update()
    except RunFailed as error:
        return error.render()
    return ""


@pytest.mark.parametrize(
    ("what", "sync"), [("gradient", {}), ("loss", {}), ("scaled", {}), ("gradient", {"mode": "local", "every": 4})]
)
def test_a_part_that_is_not_finite_is_refused_on_all_ranks(what: str, sync: dict[str, Any], tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings(sync=sync))
    for text in run_ranks(spoil_part, 2, tmp_path, path, what, sync):
        assert "was not finite in step 3" in text
        assert "rank 1" in text


def refuse_parts(world: World, path: Path, mistake: str) -> str:
    session, gan = open_session(world, path, settings()), Gan()
    session.attach(gan.judge, gan.maker, gan.judge_optimizer, gan.maker_optimizer)
    other = torch.optim.SGD(gan.judge.parameters(), lr=0.1)
    try:
        for step in session:
            with step:
                if mistake == "late":
                    for _, seeds in step.batches((DATA, NOISE)):
                        step.backward(gan.maker_loss(seeds))
                with step.part(other if mistake == "foreign" else gan.judge_optimizer):
                    if mistake == "nested":
                        with step.part(gan.maker_optimizer):
                            pass
                    if mistake != "empty":
                        for real, seeds in step.batches((DATA, NOISE)):
                            step.backward(gan.judge_loss(real, seeds))
                if mistake == "nothing left":
                    with step.part(gan.maker_optimizer):
                        for _, seeds in step.batches((DATA, NOISE)):
                            step.backward(gan.maker_loss(seeds))
                    for _, seeds in step.batches((DATA, NOISE)):
                        step.backward(gan.maker_loss(seeds))
                    step.update()
    except UsageError as error:
        return error.render()
    return ""


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("late", "a part began after a backward outside of it"),
        ("foreign", "step.part got an optimizer that is not attached"),
        ("nested", "a part began inside another part"),
        ("empty", "was updated after 0 of its 1 micro-batches"),
        ("nothing left", "step.update has no optimizer left to update"),
    ],
)
def test_wrong_parts_are_refused(mistake: str, words: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings())
    for text in run_ranks(refuse_parts, 2, tmp_path, path, mistake):
        assert words in text


class CountingSgd(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] += 1
        return super().step(closure)


def repeat_parts(world: World, path: Path, repeated: list[int]) -> tuple[list[float], int]:
    """Lose a peer, as far as the session knows, after the part of these steps."""
    session, model = open_session(world, path, settings()), Branches()
    first = CountingSgd([*model.trunk.parameters(), *model.left.parameters()], lr=0.05, momentum=0.9)
    second = torch.optim.Adam(model.right.parameters(), lr=0.05)
    first.param_groups[0]["count"] = 0
    session.attach(model, first, second)
    for step in session:
        with step:
            for attempt in range(2 if step.number in repeated else 1):
                if attempt:
                    session.entry.step.drop()
                    session.entry.step.begin()
                with step.part(first):
                    for (inputs,) in step.batches((DATA,)):
                        step.backward(model(inputs, "left").square().sum())
            for (inputs,) in step.batches((DATA,)):
                step.backward(model(inputs, "right").square().sum())
            step.update()
    weights: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return weights, first.param_groups[0]["count"]


def test_a_part_that_is_repeated_is_undone_with_all_that_its_optimizer_knows(tmp_path: Path) -> None:
    results = []
    for repeated in ([], [1, 3]):
        path = make_folder(tmp_path / f"run-{len(repeated)}", settings())
        results += run_ranks(repeat_parts, 1, tmp_path, path, repeated)
    assert results[0] == results[1]
    assert results[0][1] == 12


# Parameters that a step leaves out


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, side: str) -> torch.Tensor:
        output: torch.Tensor = getattr(self, side)(torch.tanh(self.trunk(inputs)))
        return output


def choose_by_step(step: int, rank: int) -> str:
    return "left" if step % 3 else "right"


def choose_by_rank(step: int, rank: int) -> str:
    return "left" if rank else "right"


def train_branches(
    world: World, path: Path, options: dict[str, Any], choose: Callable[[int, int], str]
) -> tuple[list[float], float]:
    session, model = open_session(world, path, options), Branches()
    # A moment and a decay: an optimizer that updates a parameter without a gradient would move it.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    session.attach(model, optimizer)
    for step in session:
        with step:
            for (inputs,) in step.batches((DATA,)):
                step.backward(model(inputs, choose(step.number, session.rank)).square().sum())
            step.update()
    weights: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return weights, float(optimizer.state[model.right.weight]["step"])


def test_a_parameter_that_no_rank_uses_in_a_step_keeps_still(tmp_path: Path) -> None:
    chosen, results = settings(train={"unused_parameters": True}), []
    for ranks in (1, 2):
        path = make_folder(tmp_path / f"on-{ranks}", chosen)
        results += run_ranks(train_branches, ranks, tmp_path, path, chosen, choose_by_step)
    assert results[0][1] == 4, "the right branch has a gradient in steps 3, 6, 9 and 12 only"
    for weights, updates in results[1:]:
        assert weights == pytest.approx(results[0][0], abs=1e-5)
        assert updates == 4


def test_ranks_may_use_different_parameters(tmp_path: Path) -> None:
    chosen = settings(train={"unused_parameters": True})
    path = make_folder(tmp_path / "run", chosen)
    (first, updates), (second, _) = run_ranks(train_branches, 2, tmp_path, path, chosen, choose_by_rank)
    assert first == second
    assert updates == 12


def refuse_unused(world: World, path: Path) -> str:
    try:
        train_branches(world, path, settings(), choose_by_step)
    except UsageError as error:
        return error.render()
    return ""


def test_without_the_setting_unused_parameters_are_refused_with_it(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings())
    for text in run_ranks(refuse_unused, 2, tmp_path, path):
        assert "backward made no gradient of right.weight" in text
        assert "unused_parameters=True" in text


def thaw(world: World, path: Path, options: dict[str, Any]) -> list[float]:
    session, model = open_session(world, path, options), Branches()
    model.trunk.requires_grad_(False)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in session:
        model.trunk.requires_grad_(step.number > 6)
        with step:
            for (inputs,) in step.batches((DATA,)):
                step.backward(model(inputs, "left").square().sum() + model(inputs, "right").square().sum())
            step.update()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def test_frozen_parts_thaw(tmp_path: Path) -> None:
    chosen, results = settings(train={"unused_parameters": True}), []
    for ranks in (1, 2):
        path = make_folder(tmp_path / f"on-{ranks}", chosen)
        results += run_ranks(thaw, ranks, tmp_path, path, chosen)
    for sums in results[1:]:
        assert sums == pytest.approx(results[0], abs=1e-5)
    assert results[0][0] != pytest.approx(float(Branches().trunk.weight.detach().sum()), abs=1e-6)


def take_turns(world: World, path: Path, options: dict[str, Any]) -> str:
    """Update one branch in one step and the other in the next."""
    session, model = open_session(world, path, options), Branches()
    optimizers = [
        torch.optim.SGD([*model.trunk.parameters(), *model.left.parameters()], lr=0.05),
        torch.optim.SGD(model.right.parameters(), lr=0.05),
    ]
    session.attach(model, *optimizers)
    try:
        for step in session:
            turn = step.number % 2
            with step:
                for (inputs,) in step.batches((DATA,)):
                    step.backward(model(inputs, ("left", "right")[turn]).square().sum())
                step.update(only=optimizers[turn])
    except UsageError as error:
        return error.render()
    return "trained"


@pytest.mark.parametrize("inside", ["auto", "gloo"])
def test_updates_in_turn_need_the_setting_with_every_exchange(inside: str, tmp_path: Path) -> None:
    for unused, words in ((False, "unused_parameters=True"), (True, "trained")):
        chosen = settings(sync={"inside": inside}, train={"unused_parameters": unused})
        path = make_folder(tmp_path / f"run-{unused}", chosen)
        for text in run_ranks(take_turns, 2, tmp_path, path, chosen):
            assert words in text


# Epochs and the end


EPOCHS = """
import json, sys, torch, shoal
from torch import nn
torch.manual_seed(0)
data = torch.randn(20, 4)
session = shoal.Session(epochs=3, samples=20, global_batch=8, settings={{"train.pin": "off"}})
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
session.attach(model, optimizer, epoch_schedulers=[scheduler])
seen, called, norms = [], [], []

@session.every(epochs=1)
def note():
    called.append(session.step)

for epoch in session.epochs():
    steps = []
    for step in epoch:
        with step:
            for inputs in step.batches(data):
                step.backward(model(inputs).square().sum())
            done = step.update()
        norms.append(done.norm)
        steps.append(step.number)
        {body}
    seen.append([epoch.number, steps, optimizer.param_groups[0]["lr"]])
if session.is_main:
    print(json.dumps({{"seen": seen, "called": called, "norms": norms}}))
"""


def run_epochs(folder: Path, body: str = "", on: str = "local:2", *words: str) -> tuple[Any, str]:
    script = folder / "epochs.py"
    script.write_text(EPOCHS.format(body=body or "pass"))
    done = shoal("run", "--on", on, "--out", folder / "run", *words, script)
    lines = [line for line in done.stdout.splitlines() if "{" in line]
    return (json.loads(lines[0][lines[0].index("{") :]) if lines else done.returncode), done.stdout + done.stderr


def test_epochs_have_the_steps_that_begin_in_them(tmp_path: Path) -> None:
    document, text = run_epochs(tmp_path)
    # 20 samples in batches of 8: positions 0 to 23 begin in the first epoch, the second ends with position 39.
    assert document["seen"] == [[1, [1, 2, 3], 0.05], [2, [4, 5], 0.025], [3, [6, 7, 8], 0.0125]], text
    assert document["called"] == [3, 5, 8]
    assert all(norm > 0 for norm in document["norms"])
    assert shoal("verify", tmp_path / "run").returncode == 0


def test_a_training_that_needs_no_more_steps_is_finished(tmp_path: Path) -> None:
    document, text = run_epochs(tmp_path, "session.finish() if step.number == 4 else None")
    assert [steps for _, steps, _ in document["seen"]] == [[1, 2, 3], [4, 5]], text
    verified = shoal("verify", tmp_path / "run")
    assert verified.returncode == 0, verified.stdout
    assert "finished" in shoal("runs", "--in", tmp_path).stdout
    again = shoal("run", "--resume", tmp_path / "run")
    assert again.returncode == 2
    assert "is finished" in again.stderr


def test_a_training_that_is_stopped_can_be_verified_and_resumed(tmp_path: Path) -> None:
    document, text = run_epochs(tmp_path, "session.stop() if step.number == 4 else None")
    assert [steps for _, steps, _ in document["seen"]] == [[1, 2, 3], [4, 5]], text
    verified = shoal("verify", tmp_path / "run")
    assert verified.returncode == 0, verified.stdout
    again = shoal("run", "--resume", tmp_path / "run")
    assert again.returncode == 0, again.stderr
    assert shoal("verify", tmp_path / "run").returncode == 0


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_replicas_of_outer_steps_are_equal_after_an_early_end(mode: str, tmp_path: Path) -> None:
    document, text = run_epochs(tmp_path, "session.finish() if step.number == 2 else None", "local:2", "--sync", mode)
    assert document["seen"], text
    verified = shoal("verify", tmp_path / "run")
    assert verified.returncode == 0, verified.stdout
    assert "equal to the bit" in verified.stdout


def test_an_epoch_that_is_left_is_refused(tmp_path: Path) -> None:
    code, text = run_epochs(tmp_path, "break", "local:1")
    assert code == 2
    assert "the loop over epoch 1 was left before its end" in text


def test_a_loop_over_epochs_that_is_left_is_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS.format(body="pass").replace("    seen.append", "    break\n    seen.append"))
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", script)
    assert "the loop over the session was left after 3 of 8 steps" in done.stdout + done.stderr


def test_epochs_of_another_length_than_the_dataset_are_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS.format(body="pass").replace("samples=20", "samples=16"))
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", script)
    assert "an epoch has 16 samples, and the dataset 20" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "the session has no global_batch"),
        ("global_batch=8", "does not know how long it trains"),
        ("epochs=3, global_batch=8", "does not know how long it trains"),
        ("steps=3, epochs=3, samples=8, global_batch=8", "does not know how long it trains"),
    ],
)
def test_a_session_without_a_length_is_refused(arguments: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(f"import shoal\nshoal.Session({arguments})\n")
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", script)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
