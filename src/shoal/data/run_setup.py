"""A run folder ready to train in: configuration resolved, text encoded, everything that can be checked checked.

Called once per run by the launcher, or by rank 0 where the worker was started by plain torchrun. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from shoal.config.load import load_config, to_toml
from shoal.config.schema import Config
from shoal.cost.batch import world_batch
from shoal.data.prepare import Prepared, check_enough, prepare
from shoal.data.shards import deal_for
from shoal.errors import ConfigError, DataError
from shoal.events import EventLog
from shoal.runfolder import RunFolder, write_atomically


@dataclass(frozen=True)
class DataFacts:
    """`data.json`: where this node has the encoded text, and which text it is."""

    train: str
    val: str
    digest: str
    source: str


def create_run(config: Config, out: Path, world_size: int) -> RunFolder:
    """Refuses bad input before anything is written; `config.toml` comes last and makes the folder a run."""
    check_shares(config, world_size)
    config = _with_absolute_path(config)
    prepared = prepare(config.data)
    resolved = _with_vocabulary(config, prepared.vocab_size)
    batch = resolved.sync.accumulate * world_batch(resolved.train, world_size)
    batch_unit = batch // resolved.train.global_batch
    check_enough(
        prepared, resolved.model.seq_len, batch, batch_unit, lambda size: _can_deal(resolved, world_size, size)
    )
    run = RunFolder.create(out)
    try:
        write_atomically(run.tokenizer, prepared.tokenizer.read_text(encoding="utf-8"))
        write_atomically(run.data, to_json(_facts(prepared)))
        write_atomically(run.config, to_toml(resolved))
    except OSError as error:
        run.discard()
        raise DataError(
            f"cannot write into {run.path}: {error.strerror}",
            why="the folder could be made, but the disk is full or read-only",
            fix=f"free space or choose another --out: df -h {run.path}",
        ) from error
    return run


def reopen_run(path: Path, config: Config | None = None, lineage: str = "", changed: Sequence[str] = ()) -> RunFolder:
    """For `--resume`: the same text or none at all, and the saved settings unless others are given.

    `lineage` counts for this once. `changed` says what is different, for the record.
    """
    run = RunFolder.open(path)
    config = config or load_config(run.config)
    prepared = prepare(config.data)
    if prepared.digest != read_facts(run).digest:
        raise DataError(
            f"the text of {run.path} has changed since the run began",
            why=f"its digest was {read_facts(run).digest[:12]}, now it is {prepared.digest[:12]}",
            fix=f"restore {prepared.source}, or start a new run",
        )
    config = config.model_copy(update={"run": config.run.model_copy(update={"lineage": lineage})})
    write_atomically(run.data, to_json(_facts(prepared)))
    change_config(run, config, changed)
    return run


def change_config(run: RunFolder, config: Config, changed: Sequence[str] = ()) -> None:
    """Writes other settings into a run folder and records that in `keeper.jsonl`; does nothing where they are the same.

    `shoal verify` compares the file with the digest that the ranks recorded when they started. A resume may end before
    any rank has started, and a newer version may format the same settings in another way: neither is damage.
    """
    if config == load_config(run.config):
        return
    text, before = to_toml(config), run.config.read_bytes()
    # A run that torchrun started has no keeper; there the ranks start at once.
    if run.keeper.exists():
        log = EventLog(run.keeper, 0, private=True)
        log.write(
            "config",
            before=hashlib.sha256(before).hexdigest(),
            after=hashlib.sha256(text.encode()).hexdigest(),
            steps=config.train.steps,
            changed=list(changed),
        )
        log.close()
    write_atomically(run.config, text)


def to_json(facts: DataFacts) -> str:
    return json.dumps(asdict(facts), indent=1)


def read_facts(run: RunFolder) -> DataFacts:
    try:
        return TypeAdapter(DataFacts).validate_json(run.data.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run.data} cannot be used: {str(error).splitlines()[0]}",
            why="it says where the encoded text lies and is written when a run is created",
            fix="start a new run with shoal train",
        ) from error


def check_shares(config: Config, world_size: int) -> None:
    dealt = deal_for(config, world_size)
    if config.data.sharding == "modulo" and len(set(dealt.micro_batches)) > 1:
        raise ConfigError(
            f"data.sharding=modulo cannot share a global batch of {dealt.global_batch} over {world_size} ranks",
            why="each rank has an equal shard, so unequal shares would use some samples twice before others once",
            fix=f"use a train.global_batch that {world_size} divides, or --set data.sharding=cursor",
        )


def _can_deal(config: Config, world_size: int, global_batch: int) -> bool:
    train = config.train.model_copy(update={"global_batch": global_batch})
    try:
        check_shares(config.model_copy(update={"train": train}), world_size)
    except ConfigError:
        return False
    return True


def _with_absolute_path(config: Config) -> Config:
    """A run is resumed from wherever its user stands by then."""
    places = {
        name: place.expanduser().absolute()
        for name, place in (("path", config.data.path), ("cache_dir", config.data.cache_dir))
        if place is not None
    }
    return config.model_copy(update={"data": config.data.model_copy(update=places)})


def _with_vocabulary(config: Config, needed: int) -> Config:
    size = config.model.vocab_size or needed
    if size < needed:
        raise ConfigError(
            f"model.vocab_size={size} is too small: the {config.data.tokenizer} tokenizer has {needed} tokens",
            why="every token needs an embedding",
            fix="leave model.vocab_size out, or set it higher",
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def _facts(prepared: Prepared) -> DataFacts:
    return DataFacts(str(prepared.train), str(prepared.val), prepared.digest, prepared.source)
