"""State that follows its stream through an LSTM: one process, plain torch, unequal shares, a lost rank, a resumed run.

Exercises engine.streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.engine.session import Session, Step
from shoal.errors import ShoalError
from shoal.sync.world import World
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl
from tests.support.programs import shoal as run_shoal
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.sessions import make_folder, open_session, train

SCRIPT = ROOT / "tests/support/scripts/recurrent.py"
STREAMS, LENGTH, SEGMENTS = 7, 4, 5
TOKENS = torch.randint(11, (STREAMS * LENGTH * SEGMENTS + 3,), generator=torch.Generator().manual_seed(0))
TEXT = (TOKENS[:-1], TOKENS[1:])


def settings(steps: int = 14, **sections: dict[str, Any]) -> dict[str, Any]:
    train_section = {"steps": steps, "global_batch": STREAMS, "checkpoint_every": 5, "pin": "off"}
    return {**sections, "train": {**train_section, **sections.get("train", {})}}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.lstm, self.head = nn.Embedding(11, 6), nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 11)

    def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, state = self.lstm(self.embed(inputs), state)
        return self.head(outputs), state

    def loss(self, inputs: Tensor, targets: Tensor, state: Any) -> tuple[Tensor, Any]:
        outputs, state = self(inputs, state)
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum"), state


def recurrent(session: Session) -> Callable[[Step], None]:
    model, text = Recurrent(), shoal.streams(TEXT, LENGTH)
    memory = shoal.Carried(torch.zeros(2, 8), torch.zeros(2, 8), dim=1)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), memory)

    def do_step(step: Step) -> None:
        for inputs, targets, rows in step.batches(text):
            loss, state = model.loss(inputs, targets, memory.read(rows))
            memory.write(rows, state)
            step.backward(loss, count=targets.numel())
        step.update()

    return do_step


def plain_torch(steps: int) -> list[float]:
    """Train the same with torch alone: truncated backpropagation through time over seven streams."""
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = (part[: STREAMS * LENGTH * SEGMENTS].view(STREAMS, -1) for part in TEXT)
    losses = []
    for step in range(steps):
        at = slice(step % SEGMENTS * LENGTH, step % SEGMENTS * LENGTH + LENGTH)
        if step % SEGMENTS == 0:
            state = torch.zeros(2, STREAMS, 8), torch.zeros(2, STREAMS, 8)
        loss, state = model.loss(inputs[:, at], targets[:, at], tuple(part.detach() for part in state))
        loss = loss / (STREAMS * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"run": {"weights": "3/1"}}),
        (3, {"train": {"micro_batch": 1}, "run": {"weights": "4/2/1"}}),
    ],
    ids=["one", "two", "three in micro-batches"],
)
def test_the_losses_are_those_of_plain_torch(ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    assert train(tmp_path / "run", ranks, recurrent, settings(**options)) == pytest.approx(plain_torch(14), abs=1e-5)


def test_a_resumed_run_continues_every_stream_on_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert len(train(path, 2, recurrent, settings(), stop_after=8)) < 14
    assert train(path, 3, recurrent, settings()) == pytest.approx(plain_torch(14), abs=1e-5)


def test_a_lost_rank_changes_no_stream(tmp_path: Path) -> None:
    results = {}
    for name, words in (("whole", ()), ("lost", ("die",))):
        run, result = tmp_path / name, tmp_path / f"{name}.json"
        with ended_afterwards(run):
            done = run_shoal("run", "--on", "local:3" if words else "local:1", "--out", run, SCRIPT, result, *words)
        assert done.returncode == 0, done.stderr
        assert result.with_suffix(".killed").exists() == bool(words)
        results[name] = json.loads(result.read_text())
        assert run_shoal("verify", run).returncode == 0
    assert results["lost"] == pytest.approx(results["whole"], abs=1e-5)
    losses = [[record["loss"] for record in read_jsonl(tmp_path / name / "commits.jsonl")] for name in results]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


# Wrong use.


def no_write(session: Session) -> Callable[[Step], None]:
    return misused(session, lambda memory, rows, state: None)


def wrong_shape(session: Session) -> Callable[[Step], None]:
    return misused(session, lambda memory, rows, state: memory.write(rows, state[0]))


def not_attached(session: Session) -> Callable[[Step], None]:
    return misused(session, lambda memory, rows, state: memory.write(rows, state), is_attached=False)


def short(session: Session) -> Callable[[Step], None]:
    return misused(session, lambda memory, rows, state: None, length=40)


def misused(
    session: Session, write: Callable[[Any, Any, Any], None], is_attached: bool = True, length: int = LENGTH
) -> Callable[[Step], None]:
    model, text = Recurrent(), shoal.streams(TEXT, length)
    memory = shoal.Carried(torch.zeros(2, 8), torch.zeros(2, 8), dim=1)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.5), *([memory] if is_attached else []))

    def do_step(step: Step) -> None:
        for inputs, targets, rows in step.batches(text):
            loss, state = model.loss(inputs, targets, memory.read(rows))
            write(memory, rows, state)
            step.backward(loss, count=targets.numel())
        step.update()

    return do_step


def misuse(world: World, path: Path, recipe: Callable[[Session], Callable[[Step], None]]) -> str:
    session = open_session(world, path, settings())
    do_step = recipe(session)
    try:
        for step in session:
            with step:
                do_step(step)
    except ShoalError as error:
        return error.render()
    return ""


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (no_write, "the carried state of 0 streams was written, and this rank has 7 in this step"),
        (wrong_shape, "memory.write got (2, 7, 8) for 7 streams"),
        (not_attached, "shoal.Carried is not attached to the session"),
        (short, "shoal.streams has 142 times for 7 streams of segments of 40"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_use_is_refused(recipe: Callable[[Session], Any], words: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings())
    [text] = run_ranks(misuse, 1, tmp_path, path, recipe)
    assert words in text
    assert "next:" in text
