"""Does a long run grow? Memory, descriptors and threads of its agents and ranks, over time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from shoal.launch.found import find

_PAGE = os.sysconf("SC_PAGE_SIZE")
# One connection that is made anew is a slope in a shorter life.
_LEAST_S = 240.0
_LEAST_PART = 1 / 3


@dataclass(frozen=True)
class Sample:
    """`world`: how many trained together at that moment. More of them have more connections and buckets."""

    at_s: float
    world: int
    pid: int
    part: str
    node: str
    rss_bytes: int
    files: int
    sockets: int
    threads: int


class Growth(BaseModel):
    """Of one process, a minute, by least squares over the second half of its time in a whole world: the first half
    fills caches."""

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


def sample(run: Path, began: float, world: int) -> list[Sample]:
    """Agents and ranks, as /proc shows them at this moment."""
    return [
        each
        for found in find(run)
        if found.part == "agent" or found.part.startswith("rank-")
        if (each := _look(found.pid, found.part, found.node, began, world)) is not None
    ]


def _look(pid: int, part: str, node: str, began: float, world: int) -> Sample | None:
    """None for one that ended while we looked."""
    place = Path("/proc") / str(pid)
    with contextlib.suppress(OSError, ValueError, IndexError):
        rss = int((place / "statm").read_text().split()[1]) * _PAGE
        threads = len(list((place / "task").iterdir()))
        targets = [_target(path) for path in (place / "fd").iterdir()]
        sockets = sum(target.startswith("socket:") for target in targets)
        return Sample(time.monotonic() - began, world, pid, part, node, rss, len(targets), sockets, threads)
    return None


def _target(path: Path) -> str:
    with contextlib.suppress(OSError):
        return str(path.readlink())
    return ""


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Of every process that was seen for long enough to say: a rank that starts is growing for half a minute, and in
    a short life one connection that is made anew is a slope."""
    times = [each.at_s for each in samples]
    least_s = max(_LEAST_S, (max(times) - min(times)) * _LEAST_PART) if times else _LEAST_S
    whole = max((each.world for each in samples), default=0)
    by_pid: dict[int, list[Sample]] = {}
    for each in samples:
        if each.world == whole:
            by_pid.setdefault(each.pid, []).append(each)
    lives = [life for life in by_pid.values() if life[-1].at_s - life[0].at_s >= least_s]
    return [_growth(life) for life in lives]


def _growth(life: Sequence[Sample]) -> Growth:
    late = life[len(life) // 2 :]
    minutes = [each.at_s / 60 for each in late]
    return Growth(
        part=life[0].part,
        node=life[0].node,
        pid=life[0].pid,
        minutes=(life[-1].at_s - life[0].at_s) / 60,
        rss_mb=life[-1].rss_bytes / 1e6,
        rss_mb_a_minute=slope(minutes, [each.rss_bytes / 1e6 for each in late]),
        files_a_minute=slope(minutes, [float(each.files) for each in late]),
        sockets_a_minute=slope(minutes, [float(each.sockets) for each in late]),
        threads_a_minute=slope(minutes, [float(each.threads) for each in late]),
    )


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least squares; flat for fewer than two different moments."""
    if len(xs) < 2 or xs[0] == xs[-1]:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)
