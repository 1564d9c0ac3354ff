"""`session.evaluate` and `session.best` with real ranks, against plain torch.

Exercises engine.evaluation, engine.best_checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.session import Session
from shoal.errors import ShoalError, UsageError
from shoal.sync.world import World
from tests.support.paths import ROOT
from tests.support.programs import read_jsonl, shoal
from tests.support.ranks import run_ranks
from tests.support.runs import ended_afterwards
from tests.support.sessions import make_folder, open_session

SCRIPT = ROOT / "tests/support/scripts/evaluated.py"
INPUTS = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long()
# Neither a multiple of the batch nor of the ranks; one that has fewer samples than there are ranks.
TESTS, FEW = torch.randn(53, 8, generator=torch.Generator().manual_seed(1)), INPUTS[:2]
Check = Callable[[Session, nn.Sequential], Any]


def settings(**run: Any) -> dict[str, Any]:
    return {"train": {"steps": 4, "global_batch": 12, "checkpoint_every": 100, "pin": "off"}, "run": run}


def train(session: Session, check: Check, every: int = 2) -> list[Any]:
    """Train a few steps; return what the check returns after every second one, on this rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Tanh(), nn.Linear(16, 2))
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    results: list[Any] = []
    session.every(every)(lambda: results.append(check(session, model)))
    for step in session:
        with step:
            for inputs, labels in step.batches((INPUTS, LABELS)):
                step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
            step.update()
    return results


def run(world: World, path: Path, options: dict[str, Any], check: Check) -> list[Any]:
    try:
        return train(open_session(world, path, settings(**options)), check)
    except ShoalError as error:
        return [type(error).__name__, " ".join(error.render().split())]


def on_ranks(ranks: int, check: Check, folder: Path, **options: Any) -> list[list[Any]]:
    path = make_folder(folder / f"on-{ranks}-{len(list(folder.iterdir()))}", settings(**options))
    return run_ranks(run, ranks, folder, path, options, check)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(TESTS)


def all_kinds(session: Session, model: nn.Sequential) -> list[Any]:
    """Evaluate every kind of data; return all means, and the mean of plain torch at the end."""
    model[2].eval()
    modes = [module.training for module in model.modules()]

    def measure(inputs: Tensor) -> dict[str, Any]:
        assert not model.training
        assert not torch.is_grad_enabled()
        outputs = model(inputs)
        return {"score": outputs[:, 0].sum(), "above": (outputs.sum(), (inputs > 0).sum())}

    def first(batch: Any) -> dict[str, Any]:
        return measure(batch[0])

    kinds: list[Any] = [
        session.evaluate(TESTS, measure, batch=8),
        session.evaluate(Stream(), measure, batch=8),
        session.evaluate(TensorDataset(TESTS), first, batch=8),
        session.evaluate(DataLoader(TensorDataset(TESTS), num_workers=1), first, batch=8),
    ]
    assert all(means == kinds[0] for means in kinds)
    results = [*kinds[0].values(), session.evaluate(FEW, lambda inputs: model(inputs).sum(), batch=1)]
    assert [module.training for module in model.modules()] == modes
    # Plain torch, on all samples at once.
    modes_before = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        outputs = model(TESTS)
        expected = [outputs[:, 0].mean(), outputs.sum() / (TESTS > 0).sum(), model(FEW).sum() / 2]
    for module, is_training in modes_before:
        module.training = is_training
    assert results == pytest.approx([value.item() for value in expected], abs=1e-5)
    return results


@pytest.mark.parametrize("options", [{}, {"weights": "4/1/1"}], ids=["equal", "unequal"])
def test_three_ranks_and_one_evaluate_with_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    """Only in the same state: the weights of one and of three ranks differ in their last bits."""
    same = on_ranks(3, untrained, tmp_path, **options)
    assert same == [same[0]] * 3
    assert same[0] == on_ranks(1, untrained, tmp_path)[0]
    trained = on_ranks(3, all_kinds, tmp_path, **options)
    assert trained == [trained[0]] * 3
    assert len(trained[0]) == 2
    assert trained[0][0] != trained[0][1]


def untrained(session: Session, _: nn.Module) -> Any:
    torch.manual_seed(5)
    other = nn.Linear(8, 1)
    return session.evaluate(TESTS, lambda inputs: {"mean": torch.tanh(other(inputs)).sum()}, batch=4)


def test_each_sample_is_evaluated_once_on_one_rank(tmp_path: Path) -> None:
    parts = on_ranks(2, samples_here, tmp_path, weights="3/1")
    for one, other in zip(*parts, strict=True):
        assert sorted([*one, *other]) == list(range(53))
        assert len(one) > 2 * len(other) > 0


def samples_here(session: Session, _: nn.Module) -> list[int]:
    seen: list[int] = []

    def note(rows: Tensor) -> int:
        seen.extend(rows.tolist())
        return int(rows.sum())

    assert session.evaluate(torch.arange(53), note, batch=4) == 26
    # The first batch is looked at in two halves the first time.
    return list(dict.fromkeys(seen))


def mean_of_batch(session: Session, model: nn.Module) -> Any:
    return session.evaluate((INPUTS, LABELS), lambda batch: {"loss": F.cross_entropy(model(batch[0]), batch[1])})


def whole_tensor(session: Session, model: nn.Module) -> Any:
    return session.evaluate(INPUTS, model)


def other_names(session: Session, _: nn.Module) -> Any:
    return session.evaluate(INPUTS, lambda inputs: {f"value{float(inputs[0, 0])}": 1.0 * len(inputs)}, batch=5)


def no_samples(session: Session, _: nn.Module) -> Any:
    return session.evaluate(INPUTS[:0], lambda inputs: inputs.sum())


def other_length(session: Session, _: nn.Module) -> Any:
    return session.evaluate(INPUTS[session.rank :], lambda inputs: inputs.sum())


def other_stream(session: Session, _: nn.Module) -> Any:
    return session.evaluate([INPUTS[:40].unbind(), INPUTS.unbind()][session.rank].__iter__, len)


def other_best(session: Session, _: nn.Module) -> Any:
    return session.best(0.5 + session.rank)


def best_twice(session: Session, _: nn.Module) -> Any:
    return session.best(0.5), session.best(0.4)


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (mean_of_batch, "session.evaluate got a mean for loss"),
        (whole_tensor, "session.evaluate got a Tensor of shape (12, 2) of a batch"),
        (other_names, "session.evaluate cannot form a mean: some batches have value"),
        (no_samples, "session.evaluate cannot form a mean: the dataset has no samples"),
        (other_length, "rank 0 has a dataset of 48 samples, rank 1 one of 47"),
        (other_stream, "is no dataset that can be shared by ranks"),
        (other_best, "session.best got 0.5 on rank 0 and 1.5 on rank 1"),
        (best_twice, "session.best was called twice after step 2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_use_is_refused_on_all_ranks(check: Check, words: str, tmp_path: Path) -> None:
    for kind, text in on_ranks(2, check, tmp_path):
        assert kind == UsageError.__name__, text
        assert words in text
        assert "next:" in text


def evaluate_in_loop(world: World, path: Path) -> str:
    session = open_session(world, path, settings())
    model = nn.Linear(8, 2)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in session:
            session.evaluate(INPUTS, lambda inputs: inputs.sum())
    except UsageError as error:
        return error.render()
    return ""


def test_an_evaluation_that_would_not_be_repeated_is_refused(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings())
    [text] = run_ranks(evaluate_in_loop, 1, tmp_path, path)
    assert "session.evaluate was called outside of a function of session.every" in text
    assert "next: put it into a function: @session.every(100)" in text


# The best checkpoint.

VALUES = [5.0, 3.0, float("nan"), 4.0, 3.0, 6.0, 2.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def judge(world: World, path: Path, values: list[float], lower: bool, stop_after: int | None) -> list[bool]:
    """Train a step for each value; return which of them were the best so far."""
    options = {**settings(), "train": {**settings()["train"], "steps": len(values), "keep_checkpoints": 2}}
    session = open_session(world, path, {**options, "train": {**options["train"], "checkpoint_every": 3}})
    results: list[bool] = []
    model = nn.Linear(8, 2)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.every(1)(lambda: results.append(session.best(values[session.step - 1], lower=lower)))
    for step in session:
        if step.number == stop_after:
            session.stop()
        with step:
            for inputs in step.batches(INPUTS):
                step.backward(model(inputs).sum())
            step.update()
    return results


@pytest.mark.parametrize("lower", [True, False])
def test_the_best_checkpoint_stays(lower: bool, tmp_path: Path) -> None:
    values = VALUES if lower else [-value for value in VALUES]
    path = make_folder(tmp_path / "run", settings())
    results = run_ranks(judge, 2, tmp_path, path, values, lower, None)
    assert [step for step, is_best in enumerate(results[0], 1) if is_best] == [1, 2, 7]
    assert results[0] == results[1]
    folder = CheckpointFolder(path / "checkpoints", 2)
    assert folder.load_best().progress.step == 7
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["step-00000007", "step-00000009", "step-00000012"]
    assert folder.load_latest().progress.step == 12


def test_a_resumed_run_knows_the_best_value(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings())
    run_ranks(judge, 2, tmp_path, path, VALUES, True, 4)
    [results] = run_ranks(judge, 1, tmp_path, path, VALUES, True, None)
    assert [step for step, is_best in enumerate(results, len(VALUES) + 1 - len(results)) if is_best] == [7]


def judge_at_the_end(world: World, path: Path) -> None:
    options = {"train": {**settings()["train"], "steps": 6, "checkpoint_every": 3}}
    session = open_session(world, path, options)
    model = nn.Linear(8, 2)
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.every(4)(lambda: session.best(1.0 / session.step))
    for step in session:
        with step:
            for inputs in step.batches(INPUTS):
                step.backward(model(inputs).sum())
            step.update()


def test_a_checkpoint_that_is_there_already_can_become_the_best_one(tmp_path: Path) -> None:
    """That of the last step is saved before the functions that are called only at the end."""
    path = make_folder(tmp_path / "run", settings())
    run_ranks(judge_at_the_end, 2, tmp_path, path)
    assert CheckpointFolder(path / "checkpoints", 3).load_best().progress.step == 6


def test_a_checkpoint_without_a_mark_is_not_the_best_one(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"no checkpoint in .* is marked as the best one"):
        CheckpointFolder(tmp_path, 2).load_best()


def test_metrics_have_no_best_checkpoint(tmp_path: Path) -> None:
    make_folder(tmp_path / "run", settings())
    done = shoal("export", tmp_path / "run", "--format", "csv", "--best")
    assert done.returncode == 2
    assert "--best says nothing about --format csv" in done.stderr


@pytest.mark.parametrize("way", ["evaluate", "best"])
def test_an_evaluation_that_loses_a_rank_is_repeated(way: str, tmp_path: Path) -> None:
    run, results = tmp_path / "run", tmp_path / "results.jsonl"
    with ended_afterwards(run):
        done = shoal("run", "--on", "local:3", "--out", run, SCRIPT, way, results)
    assert done.returncode == 0, done.stderr
    assert results.with_suffix(".killed").exists(), "no rank was killed"
    lines = read_jsonl(results)
    assert [line["step"] for line in lines if line["rank"] == 0] == [4, 8, 12]
    assert all(line["value"] == json.loads(lines[0]["expected"]) for line in lines)
    # Of all ranks, also of the one that was started again and copied it.
    assert all(line["seen"] == 12 * line["step"] for line in lines)
    verified = shoal("verify", run)
    assert verified.returncode == 0, verified.stdout
    exported = shoal("export", run, "--format", "state-dict", "--best", "--json")
    assert json.loads(exported.stdout)["steps"] == 4, exported.stderr
    bests = CheckpointFolder(run / "checkpoints", 2).best_values()
    assert [best.step for best in bests] == [4]
