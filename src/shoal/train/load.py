"""How busy the machine was while we trained, and how much of that was us: other programs spoil a measurement."""

from __future__ import annotations

import time

import psutil


class LoadMeter:
    def __init__(self) -> None:
        self._began = self._read()

    def since_start(self) -> dict[str, float]:
        """Seconds of wall time, of this process's CPU time, and of all cores of this machine at work."""
        names = ("wall_s", "cpu_s", "machine_busy_s")
        return {name: round(now - then, 3) for name, now, then in zip(names, self._read(), self._began, strict=True)}

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # Guests are counted in user time already; waiting for a disk or for the hypervisor is nobody's work.
        passive = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "steal", "guest", "guest_nice"))
        return time.perf_counter(), time.process_time(), sum(times) - passive
