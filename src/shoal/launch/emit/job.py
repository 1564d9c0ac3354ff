"""A job: one training that somebody else's launcher is to start, and what it asks of the machines."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster.node import Node
from shoal.config.load import build_config, parse_set
from shoal.config.presets import PRESETS
from shoal.config.schema import Config
from shoal.cost.batch import micro_batch, rank_weights
from shoal.errors import ConfigError

# Nothing but the schema's defaults, so every configuration can be reached from it.
_PLAIN_PRESET = "grammar"
_COMMENT_WIDTH = 118


@dataclass(frozen=True)
class Job:
    """`out` is the run folder, `python` the interpreter with shoal in it, both as the machines of the job see them."""

    config: Config
    nodes: tuple[Node, ...]
    out: Path
    python: str

    @property
    def ranks(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def cache_dir(self) -> Path | None:
        """Rank 0 encodes the text and tells the others where it lies, so several nodes need it where all can read."""
        if self.config.data.cache_dir is not None or len(self.nodes) == 1:
            return self.config.data.cache_dir
        return self.out.parent / ".cache"


def make_job(config: Config, nodes: Iterable[Node], out: Path, python: str) -> Job:
    """Refuses here what every rank would refuse there, after a wait in somebody's queue."""
    job = Job(config, tuple(nodes), out, python)
    try:
        micro_batch(config.train, rank_weights(config.run, job.ranks))
    except ConfigError as error:
        fix = "change it: --set train.global_batch=N, --set train.micro_batch=N, or --on with fewer ranks"
        raise ConfigError(error.seen, why=error.why, fix=fix) from None
    return job


def worker_words(job: Job) -> list[str]:
    """Preset and settings, from which `shoal.train.worker` builds this very configuration. Placement is not in them."""
    wanted = _settings(job.config)
    if job.cache_dir is not None:
        wanted["data.cache_dir"] = str(job.cache_dir)
    preset = job.config.run.preset
    base = _settings(build_config(preset)) if preset in PRESETS else None
    if job.config.run.weights:
        wanted["run.weights"] = job.config.run.weights
    if base is None or not base.keys() <= wanted.keys():
        # A file may call its preset what it likes, and no --set takes away what a preset sets: begin at the defaults.
        base, wanted["run.preset"], preset = _settings(build_config(_PLAIN_PRESET)), preset, _PLAIN_PRESET
    changed = [_assignment(key, value) for key, value in wanted.items() if base.get(key) != value]
    return [preset, *(word for assignment in changed for word in ("--set", assignment))]


def _settings(config: Config) -> dict[str, Any]:
    sections = config.model_dump(mode="json", exclude={"run"})
    values = ((f"{section}.{key}", value) for section, keys in sections.items() for key, value in keys.items())
    return {key: value for key, value in values if value is not None}


def _assignment(key: str, value: Any) -> str:
    """A word as it is where that reads back as the same word, otherwise as TOML."""
    section, _, name = key.partition(".")
    bare = f"{key}={value}"
    if isinstance(value, str) and value.isprintable() and parse_set(bare) == {section: {name: value}}:
        return bare
    return f"{key}={quoted(value)}"


def quoted(value: Any) -> str:
    """As JSON, which is TOML and YAML too, but for DEL, which both want escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def threads_on(job: Job, node: Node) -> int | None:
    """Threads of each rank there; None where nobody has counted the node's cores yet."""
    if job.config.run.threads or not node.cores:
        return job.config.run.threads
    return max(1, node.cores // node.slots)


def cores_per_node(job: Job) -> int:
    """A scheduler gives every node the same, so this is what the largest needs."""
    return max(node.slots * (threads_on(job, node) or 1) for node in job.nodes)


def summary(job: Job) -> str:
    return f"{job.config.run.preset}: {_count(job.ranks, 'rank')} on {_count(len(job.nodes), 'node')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def needs(job: Job, first: str, shared: str) -> list[str]:
    """What must be true before this can work. `first` is where rank 0 runs, `shared` what all nodes can write to."""
    wanted = [f"the same shoal and torch on every node, in {job.python}"]
    if len(job.nodes) > 1:
        wanted += [
            f"{shared}: {first} makes the run folder and the encoded text there, and the others read them. Without "
            "it their ranks end with 'is not a run folder'",
            "every TCP port open between the nodes: gloo listens on those that the kernel picks",
        ]
    if job.config.data.path is not None:
        wanted.append(f"the text {job.config.data.path} on {first}, at this path")
    return wanted


def comment(text: str, bullet: str = "") -> str:
    """Whatever a user's file is called, no line of it leaves the comment."""
    flat = " ".join(text.split())
    first, rest = f"# {bullet}", "# " + " " * len(bullet)
    return textwrap.fill(
        flat,
        _COMMENT_WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def slug(name: str) -> str:
    """For job names: what Slurm, and DNS behind a Kubernetes service, allow."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "run"
