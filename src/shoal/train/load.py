"""How busy the machine was while we trained, how much of that was us, and how much memory we had at most: other
programs spoil a measurement, and a full memory ends it."""

from __future__ import annotations

import resource
import sys
import time

import psutil

# Linux counts in kilobytes, macOS in bytes.
_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class LoadMeter:
    def __init__(self) -> None:
        self._began = self._read()

    def since_start(self) -> dict[str, float]:
        """Seconds of wall time, of this process's CPU time, and of all cores of this machine at work; the most memory
        that this process ever had."""
        names = ("wall_s", "cpu_s", "machine_busy_s")
        spent = {name: round(now - then, 3) for name, now, then in zip(names, self._read(), self._began, strict=True)}
        return {**spent, "peak_memory_bytes": _UNIT_BYTES * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        # Guests are counted in user time already; waiting for a disk or for the hypervisor is nobody's work.
        passive = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "steal", "guest", "guest_nice"))
        return time.perf_counter(), time.process_time(), sum(times) - passive
