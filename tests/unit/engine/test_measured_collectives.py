"""Changed classes of torch.distributed: calls are counted, and subclasses in Python still reach C++."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.control.rank_env import Placement
from shoal.engine.measure import Measurement
from shoal.engine.measured_collectives import measure_collectives, measure_futures
from shoal.run_folder import RunFolder


@pytest.fixture
def measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """Return a measurement whose changes of torch end with the test."""
    for owner in (dist.ProcessGroup, dist.Work, torch._C.Future):
        for name in vars(owner):
            if not name.startswith("__"):
                monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(dist, "_broadcast_coalesced", dist._broadcast_coalesced)
    monkeypatch.setattr(torch.futures, "collect_all", torch.futures.collect_all)
    measurement = Measurement(RunFolder(tmp_path), Placement(rank=0, world_size=1, local_rank=0, local_world_size=1))
    for change, module in ((measure_collectives, dist), (measure_futures, torch.futures)):
        measurement.change_module(change, module)
    return measurement


class Group(dist.ProcessGroup):
    """A group in Python that calls what it overrides, without a backend."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]


def test_a_group_in_python_reaches_the_method_of_torch(measurement: Measurement) -> None:
    with pytest.raises(RuntimeError, match="No backend type"):
        Group().allreduce([torch.ones(2)])
    assert measurement.is_on
    # A collective that failed has no time.
    assert dict(measurement._current.collectives) == {"all-reduce": [1, 8, 0.0]}


def test_futures_of_other_origin_are_waited_for_as_before(measurement: Measurement) -> None:
    futures: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(2)]
    for number, future in enumerate(futures):
        future.set_result(number)
    assert [future.wait() for future in torch.futures.collect_all(futures).wait()] == [0, 1]
    assert torch.futures.wait_all(futures) == [0, 1]
    assert measurement.is_on
    assert measurement._current.stayed_until is None


def test_nothing_is_counted_once_measuring_is_off(measurement: Measurement) -> None:
    measurement.turn_off("of a test")
    with pytest.raises(RuntimeError, match="No backend type"):
        Group().broadcast([torch.ones(2)])
    assert not measurement._current.collectives


def test_a_torch_that_cannot_be_changed_does_not_end_the_script(
    measurement: Measurement, capsys: pytest.CaptureFixture[str]
) -> None:
    measurement.change_module(measure_futures, dist)
    assert not measurement.is_on
    assert "--measure is off: it failed with AttributeError" in capsys.readouterr().err
