"""Prepare data and run folders: encode the text once, reuse it from a cache, and create or reopen a run with it.

A cache entry is one folder, complete or absent, whose files are checked against their SHA-256 before use. It is built
in a hidden folder beside its place and renamed into it. Of two processes that build the same entry at once, the first
rename wins; the other process removes its own folder and uses the winner's.

Called once per run by the launcher, or by rank 0 where plain torchrun started the worker. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shoal.config.load import load_config, to_toml
from shoal.config.schema import Config, DataConfig
from shoal.control.rank_env import user_cache
from shoal.cost.batch_plan import plan_global_batch, world_batch
from shoal.data.corpus import (
    GRAMMAR_VERSION,
    digest_files,
    file_stamps,
    find_texts,
    generate,
    read_texts,
    write_corpus,
)
from shoal.data.tokenizer import Tokenizer, build_tokenizer, save_tokenizer
from shoal.data.tokenizer import digest as tokenizer_digest
from shoal.data.tokens import FORMAT_VERSION, TokenHeader, open_tokens, window_count, write_tokens
from shoal.errors import ConfigError, DataError, UsageError
from shoal.events import EventLog
from shoal.run_folder import RunFolder, write_atomically
from shoal.units import format_si, pluralize

TRAIN = "train.tokens"
VAL = "val.tokens"
TOKENIZER = "tokenizer.json"
_INDEX = "index"
# Part of the package; see "Texts" in docs/train.md.
SHAKESPEARE = Path(__file__).with_name("shakespeare.txt")
_SHAKESPEARE_SOURCE = "Coriolanus and Romeo and Juliet (288 kB, part of shoal)"
# Raise it when the same text and settings would be split or encoded differently.
_PREPARE_VERSION = 1
# Tries to rename an entry into place. A try fails only when another process has just finished the same entry.
_RENAME_ATTEMPTS = 5
# Advice for a short text names no shorter sequences: from fewer tokens a model learns nothing.
_MIN_USEFUL_SEQ_LEN = 8

Index = dict[str, Any]


@dataclass(frozen=True)
class PreparedData:
    """Encoded text, ready to be mapped."""

    folder: Path
    train: Path
    val: Path
    tokenizer: Path
    vocab_size: int
    train_tokens: int
    val_tokens: int
    digest: str  # The same on every node that has the same data and tokenizer.
    source: str
    sentences: int | None


@dataclass(frozen=True)
class DataFacts:
    """`data.json`: where this node keeps the encoded text, and which text it is."""

    train: str
    val: str
    digest: str
    source: str


def cache_root(configured: Path | None) -> Path:
    """Return `data.cache_dir`, or the user's cache folder by the XDG rules, which ignore a relative path."""
    try:
        if configured is not None:
            return configured.expanduser().absolute()
        return user_cache(os.environ)
    except RuntimeError:
        raise UsageError(
            "cannot tell where your cache folder is: there is no home folder",
            why="the encoded text is kept there, to be reused",
            fix="--set data.cache_dir=FOLDER",
        ) from None


def _get_or_build(entry: Path, build: Callable[[Path], Index]) -> Index:
    """Return the index of a cache entry; call `build(folder)` if the entry is missing or damaged."""
    index = read_entry(entry)
    if index is not None:
        return index
    temporary = _hidden_name(entry)
    try:
        temporary.mkdir(parents=True)
        index = build(temporary)
        # A token file's header has its digest: gigabytes need not be hashed twice.
        index["files"] = {path.name: _file_digest(path, check=False) for path in sorted(temporary.iterdir())}
        body = json.dumps(index, indent=1) + "\n"
        # The index lists the digests of the files; its first line is the digest of the index itself.
        (temporary / _INDEX).write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}", encoding="utf-8")
        return _rename_into_place(temporary, entry, index)
    except OSError as error:
        raise UsageError(
            f"cannot write the encoded text to {entry.parent}: {error.strerror}",
            why="it is kept there, to be reused; the folder is read-only, full or not yours",
            fix="choose another one: --set data.cache_dir=FOLDER",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_entry(entry: Path) -> Index | None:
    """Return the index if every file it lists is there with the right SHA-256, otherwise None."""
    try:
        digest, _, body = (entry / _INDEX).read_text(encoding="utf-8").partition("\n")
        if digest != hashlib.sha256(body.encode()).hexdigest():
            return None
        index: Index = json.loads(body)
        is_whole = all(_file_digest(entry / name, check=True) == digest for name, digest in index["files"].items())
    except (OSError, ValueError, DataError):
        return None
    return index if is_whole else None


def _rename_into_place(temporary: Path, entry: Path, index: Index) -> Index:
    for _ in range(_RENAME_ATTEMPTS):
        try:
            temporary.rename(entry)
        except OSError:
            if not os.path.lexists(entry):
                raise
        else:
            return index
        winner = read_entry(entry)
        if winner is not None:
            return winner
        _remove_entry(entry)
    raise FileExistsError(0, f"{entry.name} is damaged and cannot be replaced")


def _remove_entry(entry: Path) -> None:
    """Rename the entry before removing it: a half-removed entry must not look like an entry."""
    renamed = _hidden_name(entry)
    try:
        entry.rename(renamed)
    except FileNotFoundError:
        return
    if renamed.is_dir():
        shutil.rmtree(renamed, ignore_errors=True)
    else:
        renamed.unlink()


def _hidden_name(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.{secrets.token_hex(4)}")


def _file_digest(path: Path, check: bool) -> str:
    if path.suffix == ".tokens":
        return open_tokens(path, check=check).header.sha256
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepare(config: DataConfig) -> PreparedData:
    """Encode the configured text, or find it in the cache."""
    root = cache_root(config.cache_dir)
    if config.path is None and config.builtin == "grammar":
        entry = root / _key(config, f"grammar {GRAMMAR_VERSION} {config.sentences} {config.seed}")
        index = _get_or_build(entry, partial(_build_grammar, config))
        return _prepared(entry, index, f"{config.sentences:,} generated English sentences", config.sentences)
    path = config.path or SHAKESPEARE
    files = find_texts(path)
    stamps = file_stamps(files)
    entry = root / _key(config, digest_files(files))
    index = _get_or_build(entry, partial(_build_text, config, path, files, stamps))
    return _prepared(entry, index, _describe_files(path, stamps) if config.path else _SHAKESPEARE_SOURCE, None)


def _key(config: DataConfig, content: str) -> str:
    """Return the name of the cache entry: a digest of exactly what changes the encoded files."""
    merges = config.bpe_vocab if config.tokenizer == "bpe" else None
    parts = [content, config.tokenizer, merges, config.val_fraction, _PREPARE_VERSION, FORMAT_VERSION]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _describe_files(path: Path, stamps: Sequence[tuple[int, int]]) -> str:
    size = format_si(sum(size for size, _ in stamps), "B")
    return f"{path} ({size})" if len(stamps) == 1 else f"{path} ({len(stamps)} files, {size})"


def _prepared(entry: Path, index: Index, source: str, sentences: int | None) -> PreparedData:
    return PreparedData(
        folder=entry,
        train=entry / TRAIN,
        val=entry / VAL,
        tokenizer=entry / TOKENIZER,
        **{name: index[name] for name in ("vocab_size", "train_tokens", "val_tokens", "digest")},
        source=source,
        sentences=sentences,
    )


def _build_grammar(config: DataConfig, folder: Path) -> Index:
    sentences = generate(config.sentences, config.seed)
    train, val = write_corpus(folder, sentences, config.val_fraction, config.seed)
    train_text, val_text = ("\n".join(sentence.text for sentence in part) for part in (train, val))
    return _encode(config, folder, train_text, val_text)


def _build_text(
    config: DataConfig, path: Path, files: Sequence[Path], stamps: Sequence[tuple[int, int]], folder: Path
) -> Index:
    text = "\n".join(read_texts(path))
    # The cache key is the digest of the files as they were before this read.
    if (find_texts(path), file_stamps(files)) != (files, stamps):
        raise DataError(
            f"{path} changed while it was being read",
            why="something is still writing to it",
            fix="run the same command again when the text is complete",
        )
    return _encode(config, folder, *split_text(text, config.val_fraction))


def split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """Hold out the tail for validation. The cut moves back to a line end, by at most the length of the tail."""
    held_out = max(round(len(text) * val_fraction), 1)
    cut = len(text) - held_out
    cut = text.rfind("\n", max(cut - held_out, 0), cut) + 1 or cut
    return text[:cut], text[cut:]


def _encode(config: DataConfig, folder: Path, train: str, val: str) -> Index:
    # Characters of validation must be known too; merges are learned from the training text alone.
    known = train + val if config.tokenizer == "char" else train
    tokenizer = build_tokenizer(config.tokenizer, known, config.bpe_vocab)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    encoded_by = tokenizer_digest(tokenizer)
    headers = [
        write_tokens(folder / name, tokenizer.encode(text), vocab_size=tokenizer.vocab_size, tokenizer=encoded_by)
        for name, text in ((TRAIN, train), (VAL, val))
    ]
    return {
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": headers[0].count,
        "val_tokens": headers[1].count,
        "digest": _combine_digests(encoded_by, headers),
    }


def digest_token_files(tokenizer: Tokenizer, train: Path, val: Path) -> str:
    """Compute `PreparedData.digest` from the bytes of files that this machine was sent.

    The digest covers the payloads and the tokenizer. The other header fields must follow from the tokenizer, or the
    same payload could be read as other numbers.
    """
    encoded_by = tokenizer_digest(tokenizer)
    expected = (encoded_by, tokenizer.vocab_size, tokenizer.encode("").dtype.newbyteorder("<").str)
    headers = [open_tokens(path, check=True).header for path in (train, val)]
    for path, header in zip((train, val), headers, strict=True):
        if (header.tokenizer, header.vocab_size, header.dtype) != expected:
            raise DataError(
                f"the header of {path} does not match the tokenizer",
                why="the text was encoded with another one, or the header was changed",
                fix="prepare the text again where it comes from",
            )
    return _combine_digests(encoded_by, headers)


def _combine_digests(tokenizer: str, headers: list[TokenHeader]) -> str:
    return hashlib.sha256(" ".join([tokenizer, *(header.sha256 for header in headers)]).encode()).hexdigest()


def check_enough(
    prepared: PreparedData,
    seq_len: int,
    global_batch: int,
    batch_unit: int = 1,
    can_deal: Callable[[int], bool] = lambda batch: True,
) -> None:
    """Refuse a corpus shorter than one batch before any process is started.

    A batch of `global_batch` sequences is `batch_unit` times the setting `train.global_batch`. `can_deal` tells which
    values of that setting the ranks can share. Both serve to advise only settings that work.
    """
    parts = (("training", prepared.train_tokens, global_batch), ("validation", prepared.val_tokens, 1))
    for part, tokens, needed in parts:
        sequences = window_count(tokens, seq_len)
        if sequences < needed:
            raise DataError(
                f"the {part} text has {pluralize(sequences, 'sequence')} of {seq_len:,} tokens, "
                f"{needed:,} {'is' if needed == 1 else 'are'} needed ({prepared.source})",
                why=f"its {tokens:,} tokens are shorter than {'one batch' if needed > 1 else 'one sequence'}",
                fix=_advise_settings(prepared, seq_len, global_batch, batch_unit, can_deal),
            )


def _advise_settings(
    prepared: PreparedData, seq_len: int, global_batch: int, batch_unit: int, can_deal: Callable[[int], bool]
) -> str:
    """Name settings with which this text is long enough, or the length of text that the present settings need.

    Uses `--set`, which every command that trains has; not every one has `--seq-len`.
    """
    setting = global_batch // batch_unit
    largest = min(setting, window_count(prepared.train_tokens, seq_len) // batch_unit)
    smaller = next(filter(can_deal, range(largest, 0, -1)), None)
    if smaller is not None and window_count(prepared.val_tokens, seq_len):
        return f"use --set train.global_batch={smaller}, or more text: --set data.path=LONGER.txt"
    least = next(filter(can_deal, range(1, setting)), setting)
    for batch, flag in ((global_batch, ""), (batch_unit * least, f" --set train.global_batch={least}")):
        shorter = min((prepared.train_tokens - 1) // batch, prepared.val_tokens - 1)
        if shorter >= _MIN_USEFUL_SEQ_LEN:
            return f"use --set model.seq_len={shorter}{flag}, or more text: --set data.path=LONGER.txt"
    part = prepared.val_tokens / max(1, prepared.train_tokens + prepared.val_tokens)
    whole = max(global_batch * seq_len / (1 - part), seq_len / part) if part else global_batch * seq_len
    return f"name a longer text, of at least {math.ceil(1.1 * whole):,} tokens: --set data.path=LONGER.txt"


def create_run(config: Config, out: Path, world_size: int) -> RunFolder:
    """Create a run folder: check the input, encode the text, resolve the configuration.

    Refuses bad input before anything is written. `config.toml` is written last and makes the folder a run.
    """
    check_shares(config, world_size)
    config = _with_absolute_paths(config)
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
        write_atomically(run.data, facts_to_json(_facts(prepared)))
        write_atomically(run.config, to_toml(resolved))
    except OSError as error:
        shutil.rmtree(run.path, ignore_errors=True)
        raise DataError(
            f"cannot write into {run.path}: {error.strerror}",
            why="the folder could be made, but the disk is full or read-only",
            fix=f"free space or choose another --out: df -h {run.path}",
        ) from error
    return run


def reopen_run(path: Path, config: Config | None = None, lineage: str = "", changed: Sequence[str] = ()) -> RunFolder:
    """Reopen a run for `--resume` with the same text, and with the saved settings unless `config` is given.

    `lineage` applies to this resume only. `changed` lists the changed settings for the event log.
    """
    run = RunFolder.open(path)
    config = config or load_config(run.config)
    prepared = prepare(config.data)
    if prepared.digest != read_data_facts(run).digest:
        raise DataError(
            f"the text of {run.path} has changed since the run began",
            why=f"its digest was {read_data_facts(run).digest[:12]}, now it is {prepared.digest[:12]}",
            fix=f"restore {prepared.source}, or start a new run",
        )
    config = config.model_copy(update={"run": config.run.model_copy(update={"lineage": lineage})})
    write_atomically(run.data, facts_to_json(_facts(prepared)))
    change_config(run, config, changed)
    return run


def change_config(run: RunFolder, config: Config, changed: Sequence[str] = ()) -> None:
    """Write changed settings into a run folder and record the change in `supervisor.jsonl`.

    `shoal verify` compares the file with the digest that the ranks recorded at their start. A resume may end before any
    rank has started, and a newer version may format the same settings differently: neither is damage.
    """
    if config == load_config(run.config):
        return
    text, before = to_toml(config), run.config.read_bytes()
    # A run started by torchrun has no supervisor; its ranks record the new digest at once.
    if run.supervisor.exists():
        log = EventLog(run.supervisor, 0, private=True)
        log.write(
            "config",
            before=hashlib.sha256(before).hexdigest(),
            after=hashlib.sha256(text.encode()).hexdigest(),
            steps=config.train.steps,
            changed=list(changed),
        )
        log.close()
    write_atomically(run.config, text)


def facts_to_json(facts: DataFacts) -> str:
    return json.dumps(asdict(facts), indent=1)


def read_data_facts(run: RunFolder) -> DataFacts:
    try:
        return TypeAdapter(DataFacts).validate_json(run.data.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run.data} cannot be used: {str(error).splitlines()[0]}",
            why="it names the files of the encoded text and is written when a run is created",
            fix="start a new run with shoal train",
        ) from error


def check_shares(config: Config, world_size: int) -> None:
    """Refuse a batch that cannot be shared by these ranks so that every sample is used once."""
    dealt = plan_global_batch(config, world_size)
    can_change = config.run.launcher == "shoal" and config.members.on_loss != "end"
    if config.data.sharding == "modulo" and can_change:
        raise ConfigError(
            "data.sharding=modulo does not go with machines that leave and join",
            why="the shards depend on the number of ranks: with another number some samples would be used twice, and "
            "others not at all",
            fix="add --set members.on_loss=end, or use --set data.sharding=cursor",
        )
    if config.data.sharding == "modulo" and len(set(dealt.shares)) > 1:
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


def _with_absolute_paths(config: Config) -> Config:
    """Make the paths absolute: a run may be resumed from another working directory."""
    paths = {
        name: path.expanduser().absolute()
        for name, path in (("path", config.data.path), ("cache_dir", config.data.cache_dir))
        if path is not None
    }
    return config.model_copy(update={"data": config.data.model_copy(update=paths)})


def _with_vocabulary(config: Config, needed: int) -> Config:
    size = config.model.vocab_size or needed
    if size < needed:
        raise ConfigError(
            f"model.vocab_size={size} is too small: the {config.data.tokenizer} tokenizer has {needed:,} tokens",
            why="every token needs an embedding",
            fix="leave model.vocab_size out, or set it higher",
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})


def _facts(prepared: PreparedData) -> DataFacts:
    return DataFacts(str(prepared.train), str(prepared.val), prepared.digest, prepared.source)
