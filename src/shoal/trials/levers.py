"""Every lever on the same model and the same cluster, one run each, measured beside each other."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.cluster.first_node import first_node
from shoal.cluster.spec import parse_on, rank_count
from shoal.config.presets import did_you_mean
from shoal.config.schema import Config, SyncConfig
from shoal.cost.batch import micro_batch, rank_weights
from shoal.errors import UsageError
from shoal.report.finish import writing
from shoal.report.levers import CEILING, ONE_NODE, LeverPoint, LeverTable, compare, lever_point, median_point, to_json
from shoal.report.levers_picture import plot_levers
from shoal.report.summary import summarize
from shoal.runfolder import RunFolder
from shoal.trials.training import MakeDisplay, train_new

_WIRES = ("fp32", "fp16", "bf16", "int8", "powersgd")
_OUTER = ("local", "diloco", "streaming")
_COUNT = re.compile(r"\d{1,9}")
_WORDS = ("stock", "ddp", "accumulate", *_OUTER, *_WIRES)
_ALONE = 10**9


@dataclass(frozen=True)
class LeversResult:
    """`runs` by name, those of the median round; `picture` and `figures` belong to the whole."""

    table: LeverTable
    runs: dict[str, RunFolder]
    picture: Path
    figures: Path


def measure_levers(config: Config, levers: str, out: Path, watch: MakeDisplay, repeat: int = 1) -> LeversResult:
    """Rounds over all levers rather than one lever after another, so that a noisy minute hits all alike."""
    experiments = plan_experiments(config, levers, out)
    tries: dict[str, list[tuple[LeverPoint, RunFolder]]] = {name: [] for name in experiments}
    for round_ in range(1, repeat + 1):
        for number, (name, chosen) in enumerate(experiments.items()):
            folder = f"{number:02}-{_file_name(name)}" + (f"-round-{round_}" if repeat > 1 else "")
            run, _ = train_new(chosen, out / folder, watch)
            tries[name].append((lever_point(name, summarize(run.read_all_events())), run))
    points = {name: median_point([point for point, _ in found]) for name, found in tries.items()}
    runs = {name: next(run for point, run in tries[name] if point is points[name]) for name in tries}
    return _conclude(out, list(points.values()), runs)


def plan_experiments(config: Config, levers: str, out: Path) -> dict[str, Config]:
    """All are checked before the first run: nobody wants to learn after ten minutes that the last is wrong."""
    on = parse_on(config.run.on)
    if rank_count(on) < 2:
        raise UsageError(
            f"--on {config.run.on} is one rank, which has nobody to exchange with",
            fix="use a cluster: --on local:2, or --on lab:2,link=1gbit",
        )
    # That all ranks get a part of a batch, which no lever makes smaller.
    micro_batch(config.train, rank_weights(config.run, rank_count(on)))
    names = list(dict.fromkeys(name.strip() for name in levers.split(",")))
    alone = first_node(on, out)
    found = {} if alone is None else {ONE_NODE: _one_node(config, alone)}
    found[CEILING] = with_sync(config, {"mode": "local", "every": _ALONE})
    return found | {name: with_sync(config, parse_lever(name)) for name in names}


def parse_lever(text: str) -> dict[str, Any]:
    """`diloco:50+int8`: a way to agree, how often, and a format on the wire; each may be left out."""
    chosen: dict[str, Any] = {}
    for word in text.split("+"):
        name, _, number = word.partition(":")
        if name not in _WORDS or (number and not _COUNT.fullmatch(number)) or (number and name in ("stock", "ddp")):
            raise UsageError(
                f"{text!r} is no lever",
                why=did_you_mean(name, _WORDS) or f"a lever is made of {', '.join(_WORDS)}",
                fix="write for example: --levers stock,ddp,int8,accumulate:4+fp16,diloco:50+int8",
            )
        if name in _WIRES:
            chosen["wire"] = word
        elif name == "accumulate":
            chosen |= {"mode": "ddp", "accumulate": int(number or 4)}
        else:
            chosen |= {"mode": name} | ({"every": int(number)} if number else {})
    return chosen


def with_sync(config: Config, changes: dict[str, Any]) -> Config:
    """As many tokens as without: whoever takes more at a step takes fewer steps."""
    try:
        sync = SyncConfig.model_validate(config.sync.model_dump() | changes)
    except ValidationError as error:
        raise UsageError(
            f"these levers cannot be together: {', '.join(f'{name}={value}' for name, value in changes.items())}",
            why=error.errors()[0]["msg"].removeprefix("Value error, "),
            fix="name the levers that you want: --levers stock,ddp,int8",
        ) from None
    train = config.train
    steps = math.ceil(train.steps * config.sync.accumulate / sync.accumulate)
    asked = max(1, train.eval_every * config.sync.accumulate // sync.accumulate)
    # Inside a round what is common is that of its beginning: it would be the same loss again.
    eval_every = math.ceil(asked / sync.round_steps) * sync.round_steps
    fewer = train.model_copy(update={"steps": steps, "eval_every": eval_every})
    return config.model_copy(update={"sync": sync, "train": fewer})


def _one_node(config: Config, on: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"on": on, "weights": None})})


def _file_name(name: str) -> str:
    return name.replace(" ", "-").replace(":", "-")


def _conclude(out: Path, points: list[LeverPoint], runs: dict[str, RunFolder]) -> LeversResult:
    table, picture, figures = compare(points), out / "levers.png", out / "levers.json"
    with writing(out):
        plot_levers(table, picture)
        figures.write_text(to_json(points))
    return LeversResult(table, runs, picture, figures)
