"""One training run from configuration to manifest: what `train`, `demo` and `bench` all do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Protocol

from shoal.cluster.cluster import open_cluster
from shoal.cluster.spec import parse_on, rank_count
from shoal.config.load import load_config
from shoal.config.manifest import Manifest
from shoal.config.schema import Config
from shoal.data.run_setup import create_run, reopen_run
from shoal.errors import ShoalError
from shoal.events import Event
from shoal.launch.supervise import run_ranks
from shoal.report.finish import finish
from shoal.report.replicas import compare_replicas
from shoal.runfolder import RunFolder


class Display(Protocol):
    """Shows events as they come, until it is closed."""

    def __call__(self, events: list[Event]) -> None: ...
    def close(self) -> None: ...


MakeDisplay = Callable[[Config], Display]


def train_new(config: Config, out: Path, watch: MakeDisplay) -> tuple[RunFolder, Manifest]:
    """A new run; `watch` makes the display once the configuration is resolved."""
    run = create_run(config, out, rank_count(parse_on(config.run.on)))
    with run.held():
        return run, _train(run, watch, resume=False)


def train_on(path: Path, watch: MakeDisplay, steps: int | None = None) -> tuple[RunFolder, Manifest]:
    """Goes on with an interrupted or finished run from its newest whole checkpoint."""
    with RunFolder.open(path).held():
        run = reopen_run(path, steps)
        return run, _train(run, watch, resume=True)


def _train(run: RunFolder, watch: MakeDisplay, resume: bool) -> Manifest:
    config = load_config(run.config)
    try:
        with open_cluster(config.run.on) as cluster, contextlib.closing(watch(config)) as display:
            run_ranks(config.run, run, cluster, display, resume)
    except ShoalError:
        with contextlib.suppress(ShoalError):
            finish(run)
        raise
    return finish(run, compare_replicas(run.state_files(), rank_count(parse_on(config.run.on))))


def default_out(name: str) -> Path:
    """`runs/grammar-20260131-235959`, with a number behind it when two start in the same second."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs") / (stem if count == 1 else f"{stem}-{count}") for count in range(1, 1000))
    return next(path for path in candidates if not path.exists())
