"""The load of a machine during a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shoal.engine.loop import LoadMeter


def test_time_at_work_is_what_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores for ten seconds: the kernel measured 13 s without work, and at its ticks it saw 9 s of work."""
    readings = [
        (0.0, SimpleNamespace(user=100.0, system=0.0, idle=50.0, iowait=1.0, steal=0.0)),
        (10.0, SimpleNamespace(user=109.0, system=0.0, idle=62.0, iowait=1.5, steal=0.5)),
    ]
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    monkeypatch.setattr("psutil.cpu_times", lambda: readings[0][1])
    monkeypatch.setattr("time.perf_counter", lambda: readings[0][0])
    meter = LoadMeter()
    readings.pop(0)
    spent = meter.since_start()
    assert (spent["wall_s"], spent["machine_busy_s"]) == (10.0, 7.0)
