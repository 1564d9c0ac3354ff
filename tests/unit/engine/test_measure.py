"""Steps of a measured script in one process: which optimizer counts, what is digested, what runs as `__main__`."""

from __future__ import annotations

import gc
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.control.rank_env import Placement
from shoal.engine.measure import AfterImport, Measurement
from shoal.engine.measured_collectives import leave_out_preparation
from shoal.run_folder import RunFolder
from tests.support.programs import read_jsonl


@pytest.fixture
def measurement(tmp_path: Path) -> Measurement:
    (tmp_path / "events").mkdir()
    return Measurement(RunFolder(tmp_path), Placement(rank=0, world_size=1, local_rank=0, local_world_size=1))


def step(measurement: Measurement, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        measurement.before_optimizer_step(optimizer)
        measurement.after_optimizer_step(optimizer)


def events_of(folder: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in read_jsonl(folder / "events" / "rank-0.jsonl") if event["event"] == kind]


def make_optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


def test_steps_of_two_optimizers_are_counted_once(measurement: Measurement, tmp_path: Path) -> None:
    generator, critic = make_optimizer(), make_optimizer()
    for _ in range(3):
        step(measurement, generator, critic)
    measurement.finish()
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2, 3]
    [end] = events_of(tmp_path, "end")
    assert (end["status"], end["step"], end["exchanges"]) == ("finished", 3, None)


def test_the_exchange_of_a_second_optimizer_counts_for_the_next_step(measurement: Measurement, tmp_path: Path) -> None:
    generator, critic = make_optimizer(), make_optimizer()
    gradient = torch.zeros(5)
    for _ in range(4):
        for optimizer in (generator, critic):
            exchange = measurement.begin_exchange(gradient)
            time.sleep(0.01)
            measurement.end_exchange(exchange, gradient)
            step(measurement, optimizer)
    measurement.finish()
    first, *others = events_of(tmp_path, "step")
    assert (first["exchanges"], first["grad_bytes"]) == (1, 20)
    assert "ready_s" not in first
    for event in others:
        assert event["exchanges"] == 2
        assert float(str(event["allreduce_s"])) >= 0.02
        assert float(str(event["ready_s"])) >= 0


def test_the_step_that_makes_the_state_of_an_optimizer_is_not_counted(measurement: Measurement, tmp_path: Path) -> None:
    module = types.ModuleType("state_dict")
    optimizer = make_optimizer()
    module._init_optim_state = lambda: step(measurement, optimizer)  # type: ignore[attr-defined]
    measurement.change_module(leave_out_preparation, module)
    module._init_optim_state()
    for _ in range(3):
        step(measurement, optimizer)
    measurement.finish()
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2, 3]


def test_the_time_of_an_optimizer_with_a_closure_is_not_known(measurement: Measurement, tmp_path: Path) -> None:
    optimizer = make_optimizer()
    for args, kwargs in (((optimizer,), {}), ((optimizer, None), {}), ((optimizer, step), {}), ((), {"closure": step})):
        measurement.before_optimizer_step(optimizer, args, kwargs)
        measurement.after_optimizer_step(optimizer)
    measurement.finish()
    assert ["optimizer_s" in event for event in events_of(tmp_path, "step")] == [True, True, False, False]


def test_an_optimizer_that_steps_alone_counts_from_its_second_step(measurement: Measurement, tmp_path: Path) -> None:
    warm_up, main = make_optimizer(), make_optimizer()
    step(measurement, warm_up)
    for _ in range(4):
        step(measurement, main)
    measurement.finish()
    assert [event["step"] for event in events_of(tmp_path, "step")] == [1, 2, 3, 4]


def test_a_model_that_was_freed_before_the_end_is_digested(measurement: Measurement, tmp_path: Path) -> None:
    optimizer = make_optimizer()
    step(measurement, optimizer)
    del optimizer
    gc.collect()
    measurement.finish()
    [digest] = events_of(tmp_path, "digest")
    assert len(str(digest["sha256"])) == 64


def test_a_failed_script_has_a_fault_and_no_digest(measurement: Measurement, tmp_path: Path) -> None:
    optimizer = make_optimizer()
    step(measurement, optimizer)
    measurement.error = ValueError("bad news")
    measurement.finish()
    assert not events_of(tmp_path, "digest")
    assert "ValueError: bad news" in str(events_of(tmp_path, "fault")[0]["seen"])
    assert events_of(tmp_path, "end")[0]["status"] == "failed"


def test_an_error_of_its_own_turns_measuring_off(
    measurement: Measurement, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step(measurement, None, None)  # type: ignore[arg-type]
    assert not measurement.is_on
    assert "--measure is off: it failed with AttributeError" in capsys.readouterr().err
    measurement.finish()
    assert not (tmp_path / "events" / "rank-0.jsonl").exists()


def test_a_callback_follows_the_import_and_leaves_the_loader_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    values = []
    finder = AfterImport({"late_module": lambda module: values.append(module.VALUE)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import late_module  # type: ignore[import-not-found]

    assert values == [1]
    assert "exec_module" not in vars(late_module.__spec__.loader)
    monkeypatch.delitem(sys.modules, "late_module")


def test_the_first_bytes_on_the_wire_are_those_of_nine_steps(
    measurement: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counter:
        """Counts 100 bytes a step. It is opened after the second step, whose record is written one step later."""

        def __init__(self, interface: str | None) -> None:
            self._last = len(done)

        def since_last(self) -> int:
            steps, self._last = len(done) - self._last, len(done)
            return 100 * steps

    done: list[int] = []
    monkeypatch.setattr("shoal.engine.measure.WireCounter", Counter)
    optimizer = make_optimizer()
    for number in range(25):
        done.append(number)
        step(measurement, optimizer)
    counted = [event["wire_bytes"] for event in events_of(tmp_path, "step") if "wire_bytes" in event]
    assert counted == [100, 100]
