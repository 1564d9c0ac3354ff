"""Measure whether the processes of a long run grow: memory, descriptors, sockets and threads of agents and ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shoal.control.processes import find_processes
from shoal.host.proc import fd_targets

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A process must be observed at least this long: in a shorter time one reopened connection looks like growth.
LEAST_S = 240.0
LEAST_SHARE = 1 / 3


@dataclass(frozen=True)
class ResourceSample:
    at_s: float
    world: int  # ranks at that moment: more of them have more connections and buckets
    pid: int
    part: str
    node: str
    rss_bytes: int
    files: int
    sockets: int
    threads: int


class Growth(BaseModel):
    """Growth of one process per minute, by least squares over the second half of its time in a complete world.

    The first half fills caches.
    """

    model_config = ConfigDict(frozen=True)

    part: str
    node: str
    pid: int
    minutes: float
    rss_mb: float
    rss_mb_a_minute: float
    files_a_minute: float
    sockets_a_minute: float
    threads_a_minute: float


def sample_resources(run: Path, began: float, world: int) -> list[ResourceSample]:
    """Read the resources of all agents and ranks from /proc, without processes that end meanwhile."""
    samples = []
    for process in find_processes(run):
        if process.part != "agent" and not process.part.startswith("rank-"):
            continue
        folder = Path("/proc") / str(process.pid)
        with contextlib.suppress(OSError, ValueError, IndexError):
            rss_bytes = int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES
            threads = len(list((folder / "task").iterdir()))
            targets = fd_targets(process.pid)
            samples.append(
                ResourceSample(
                    at_s=time.monotonic() - began,
                    world=world,
                    pid=process.pid,
                    part=process.part,
                    node=process.node,
                    rss_bytes=rss_bytes,
                    files=len(targets),
                    sockets=sum(target.startswith("socket:") for target in targets),
                    threads=threads,
                )
            )
    return samples


def growth(samples: Sequence[ResourceSample]) -> list[Growth]:
    """Return the growth of every process that was observed long enough: a starting rank grows for half a minute."""
    times = [sample.at_s for sample in samples]
    least_s = max(LEAST_S, (max(times) - min(times)) * LEAST_SHARE) if times else LEAST_S
    complete_world = max((sample.world for sample in samples), default=0)
    by_pid: dict[int, list[ResourceSample]] = {}
    for sample in samples:
        if sample.world == complete_world:
            by_pid.setdefault(sample.pid, []).append(sample)
    return [_growth(series) for series in by_pid.values() if series[-1].at_s - series[0].at_s >= least_s]


def _growth(series: Sequence[ResourceSample]) -> Growth:
    late = series[len(series) // 2 :]
    minutes = [sample.at_s / 60 for sample in late]
    first, last = series[0], series[-1]
    return Growth(
        part=first.part,
        node=first.node,
        pid=first.pid,
        minutes=(last.at_s - first.at_s) / 60,
        rss_mb=last.rss_bytes / 1e6,
        rss_mb_a_minute=slope(minutes, [sample.rss_bytes / 1e6 for sample in late]),
        files_a_minute=slope(minutes, [float(sample.files) for sample in late]),
        sockets_a_minute=slope(minutes, [float(sample.sockets) for sample in late]),
        threads_a_minute=slope(minutes, [float(sample.threads) for sample in late]),
    )


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the least-squares slope; 0 for fewer than two different moments."""
    if len(xs) < 2 or xs[0] == xs[-1]:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)
