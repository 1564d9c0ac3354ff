"""From a `DataConfig` to encoded training and validation text on disk, made once and reused while nothing changed."""

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
from shoal.cost.batch_plan import world_batch
from shoal.data.corpus import (
    GRAMMAR_VERSION,
    Sentence,
    digest_files,
    find_texts,
    generate,
    read_texts,
    stamps,
    write_corpus,
)
from shoal.data.sampling import FORMAT_VERSION, TokenHeader, deal_for, open_tokens, window_count, write_tokens
from shoal.data.tokenizer import Tokenizer, build_tokenizer, save_tokenizer
from shoal.data.tokenizer import digest as tokenizer_digest
from shoal.errors import ConfigError, DataError, UsageError
from shoal.events import EventLog
from shoal.run_folder import RunFolder, write_atomically
from shoal.units import format_si

# SECTION data/cache
# The cache of encoded texts: one folder an entry, complete or absent, checked against its SHA-256s before it is used.
#
# An entry is built in a hidden folder beside its place and renamed into it, so two processes that build the same one at
# the same time both end well: the first rename wins, and the loser throws its own away and uses the winner's.


INDEX = "index"
_TOKENS = ".tokens"
# Each attempt loses only to another process that just finished, or repaired, the same entry.
_ATTEMPTS = 5

Index = dict[str, Any]


def cache_root(configured: Path | None) -> Path:
    """`data.cache_dir`, or where the XDG rules put caches; the same rules say to ignore a relative path."""
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


def obtain(entry: Path, build: Callable[[Path], Index]) -> Index:
    """The index of a whole entry, built by `build(folder)` unless a good one is there; a damaged one is replaced."""
    index = read_entry(entry)
    if index is not None:
        return index
    workshop = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}")
    try:
        workshop.mkdir(parents=True)
        index = {**build(workshop), "files": _digests(workshop)}
        (workshop / INDEX).write_text(_seal(index), encoding="utf-8")
        return _move_in(workshop, entry, index)
    except OSError as error:
        raise UsageError(
            f"cannot write the encoded text to {entry.parent}: {error.strerror}",
            why="it is kept there, to be reused; the folder is read-only, full or not yours",
            fix="choose another one: --set data.cache_dir=FOLDER",
        ) from None
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def read_entry(entry: Path) -> Index | None:
    """The index if every file it lists is there with the right SHA-256, otherwise nothing."""
    try:
        index = _unseal((entry / INDEX).read_text(encoding="utf-8"))
        whole = all(_file_digest(entry / name, check=True) == digest for name, digest in index["files"].items())
    except (OSError, ValueError, DataError):
        return None
    return index if whole else None


def _move_in(workshop: Path, entry: Path, index: Index) -> Index:
    for _ in range(_ATTEMPTS):
        try:
            workshop.rename(entry)
        except OSError:
            if not os.path.lexists(entry):
                raise
        else:
            return index
        winner = read_entry(entry)
        if winner is not None:
            return winner
        _throw_away(entry)
    raise FileExistsError(0, f"{entry.name} is damaged and cannot be replaced")


def _throw_away(entry: Path) -> None:
    """Renamed first: half of a removed entry must not look like an entry."""
    rubbish = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}")
    try:
        entry.rename(rubbish)
    except FileNotFoundError:
        return
    if rubbish.is_dir():
        shutil.rmtree(rubbish, ignore_errors=True)
    else:
        rubbish.unlink()


def _seal(index: Index) -> str:
    """The index vouches for the files, and its first line for the index."""
    body = json.dumps(index, indent=1) + "\n"
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}"


def _unseal(text: str) -> Index:
    seal, _, body = text.partition("\n")
    if seal != hashlib.sha256(body.encode()).hexdigest():
        raise ValueError("the index was changed after it was written")
    index: Index = json.loads(body)
    return index


def _digests(folder: Path) -> dict[str, str]:
    """Of files just written: a token file says its own, and gigabytes need not be hashed twice."""
    return {path.name: _file_digest(path, check=False) for path in sorted(folder.iterdir())}


def _file_digest(path: Path, check: bool) -> str:
    if path.suffix == _TOKENS:
        return open_tokens(path, check=check).header.sha256
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


TRAIN = "train.tokens"
VAL = "val.tokens"
TOKENIZER = "tokenizer.json"
# Part of the package; see "Texts" in docs/train.md.
SHAKESPEARE = Path(__file__).with_name("shakespeare.txt")
SHAKESPEARE_IS = "Coriolanus and Romeo and Juliet (288 kB, part of shoal)"
# Raise it when the same text and settings would be split or encoded in another way than before.
PREPARE_VERSION = 1
# Advice for a short text names no shorter sequences: from fewer tokens a model learns nothing.
_SHORTEST_USEFUL = 8


@dataclass(frozen=True)
class PreparedData:
    """Encoded text, ready to map. `digest` is the same on every node that has the same data and tokenizer."""

    folder: Path
    train: Path
    val: Path
    tokenizer: Path
    vocab_size: int
    train_tokens: int
    val_tokens: int
    digest: str
    source: str
    sentences: int | None


def prepare(config: DataConfig) -> PreparedData:
    root = cache_root(config.cache_dir)
    if config.path is None and config.builtin == "grammar":
        entry = root / _key(config, f"grammar {GRAMMAR_VERSION} {config.sentences} {config.seed}")
        index = obtain(entry, partial(_build_grammar, config))
        return _prepared(entry, index, f"{config.sentences} generated English sentences", config.sentences)
    path = config.path or SHAKESPEARE
    files = find_texts(path)
    seen = stamps(files)
    entry = root / _key(config, digest_files(files))
    index = obtain(entry, partial(_build_text, config, path, files, seen))
    return _prepared(entry, index, _describe(path, seen) if config.path else SHAKESPEARE_IS, None)


def _key(config: DataConfig, content: str) -> str:
    """Only what changes the encoded files, so that nothing else encodes a large text again."""
    merges = config.bpe_vocab if config.tokenizer == "bpe" else None
    parts = [content, config.tokenizer, merges, config.val_fraction, PREPARE_VERSION, FORMAT_VERSION]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _describe(path: Path, seen: Sequence[tuple[int, int]]) -> str:
    size = format_si(sum(size for size, _ in seen), "B")
    return f"{path} ({size})" if len(seen) == 1 else f"{path} ({len(seen)} files, {size})"


def _prepared(entry: Path, index: Index, source: str, sentences: int | None) -> PreparedData:
    return PreparedData(
        folder=entry,
        train=entry / TRAIN,
        val=entry / VAL,
        tokenizer=entry / TOKENIZER,
        vocab_size=index["vocab_size"],
        train_tokens=index["train_tokens"],
        val_tokens=index["val_tokens"],
        digest=index["digest"],
        source=source,
        sentences=sentences,
    )


def _build_grammar(config: DataConfig, folder: Path) -> Index:
    sentences = generate(config.sentences, config.seed)
    train, val = write_corpus(folder, sentences, config.val_fraction, config.seed)
    return _encode(config, folder, _lines(train), _lines(val))


def _lines(sentences: Sequence[Sentence]) -> str:
    return "\n".join(sentence.text for sentence in sentences)


def _build_text(
    config: DataConfig, path: Path, files: Sequence[Path], seen: Sequence[tuple[int, int]], folder: Path
) -> Index:
    text = "\n".join(read_texts(path))
    # The cache key is the digest of what was there a moment ago.
    if (find_texts(path), stamps(files)) != (files, seen):
        raise DataError(
            f"{path} changed while it was being read",
            why="something is still writing to it",
            fix="run the same command again when the text is complete",
        )
    return _encode(config, folder, *split_text(text, config.val_fraction))


def split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """The tail is for validation; the cut moves back to the end of a line, by no more than the tail's own length."""
    held_out = max(round(len(text) * val_fraction), 1)
    cut = len(text) - held_out
    cut = text.rfind("\n", max(cut - held_out, 0), cut) + 1 or cut
    return text[:cut], text[cut:]


def _encode(config: DataConfig, folder: Path, train: str, val: str) -> Index:
    # Characters of validation must be known too; merges are learned from the training text alone.
    known = train + val if config.tokenizer == "char" else train
    tokenizer = build_tokenizer(config.tokenizer, known, config.bpe_vocab)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    return {"vocab_size": tokenizer.vocab_size, **_write_parts(tokenizer, folder, train, val)}


def _write_parts(tokenizer: Tokenizer, folder: Path, train: str, val: str) -> Index:
    made_with = tokenizer_digest(tokenizer)
    headers = [
        write_tokens(folder / name, tokenizer.encode(text), vocab_size=tokenizer.vocab_size, tokenizer=made_with)
        for name, text in ((TRAIN, train), (VAL, val))
    ]
    return {
        "train_tokens": headers[0].count,
        "val_tokens": headers[1].count,
        "digest": _identity(made_with, headers),
    }


def digest_of(tokenizer: Tokenizer, train: Path, val: Path) -> str:
    """What `PreparedData.digest` is for these files, from their own bytes: for a machine that was sent them.

    The digest is of the payloads and the tokenizer. What the headers say besides must follow from the tokenizer, else
    the same payload could be read as other numbers.
    """
    made_with = tokenizer_digest(tokenizer)
    due = (made_with, tokenizer.vocab_size, tokenizer.encode("").dtype.newbyteorder("<").str)
    headers = [open_tokens(path, check=True).header for path in (train, val)]
    for path, header in zip((train, val), headers, strict=True):
        if (header.tokenizer, header.vocab_size, header.dtype) != due:
            raise DataError(
                f"the header of {path} does not go with the tokenizer",
                why="the text was encoded with another one, or the header was changed",
                fix="prepare the text again where it comes from",
            )
    return _identity(made_with, headers)


def _identity(tokenizer: str, headers: list[TokenHeader]) -> str:
    return hashlib.sha256(" ".join([tokenizer, *(header.sha256 for header in headers)]).encode()).hexdigest()


def check_enough(
    prepared: PreparedData,
    seq_len: int,
    global_batch: int,
    batch_unit: int = 1,
    can_deal: Callable[[int], bool] = lambda batch: True,
) -> None:
    """Refuse a corpus shorter than one batch before any process is started.

    A batch of `global_batch` sequences is `batch_unit` times the setting `train.global_batch`, and `can_deal` says
    which values of it the ranks can share: both serve to advise only what works.
    """
    parts = (("training", prepared.train_tokens, global_batch), ("validation", prepared.val_tokens, 1))
    for part, tokens, needed in parts:
        found = window_count(tokens, seq_len)
        if found < needed:
            raise DataError(
                f"the {part} text has {found} sequences of {seq_len} tokens, {needed} are needed ({prepared.source})",
                why=f"its {tokens} tokens are shorter than {'one batch' if needed > 1 else 'one sequence'}",
                fix=_what_fits(prepared, seq_len, global_batch, batch_unit, can_deal),
            )


def _what_fits(
    prepared: PreparedData, seq_len: int, global_batch: int, batch_unit: int, can_deal: Callable[[int], bool]
) -> str:
    """The settings with which both parts of this text suffice, if there are any that teach a model something.

    They are named with `--set`, which every verb that trains has; not every one has `--seq-len`.
    """
    setting = global_batch // batch_unit
    largest = min(setting, window_count(prepared.train_tokens, seq_len) // batch_unit)
    smaller = next(filter(can_deal, range(largest, 0, -1)), None)
    if smaller is not None and window_count(prepared.val_tokens, seq_len):
        return f"use --set train.global_batch={smaller}, or more text: --set data.path=LONGER.txt"
    least = next(filter(can_deal, range(1, setting)), setting)
    for batch, flag in ((global_batch, ""), (batch_unit * least, f" --set train.global_batch={least}")):
        shorter = min((prepared.train_tokens - 1) // batch, prepared.val_tokens - 1)
        if shorter >= _SHORTEST_USEFUL:
            return f"use --set model.seq_len={shorter}{flag}, or more text: --set data.path=LONGER.txt"
    part = prepared.val_tokens / max(1, prepared.train_tokens + prepared.val_tokens)
    whole = max(global_batch * seq_len / (1 - part), seq_len / part) if part else global_batch * seq_len
    return f"name a longer text, of at least {math.ceil(1.1 * whole):,} tokens: --set data.path=LONGER.txt"


# SECTION data/run_setup
# A run folder ready to train in: configuration resolved, text encoded, everything that can be checked checked.
#
# Called once per run by the launcher, or by rank 0 where the worker was started by plain torchrun. Torch-free.


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
    """Writes other settings into a run folder and records that in `supervisor.jsonl`; does nothing where they are the
    same.

    `shoal verify` compares the file with the digest that the ranks recorded when they started. A resume may end before
    any rank has started, and a newer version may format the same settings in another way: neither is damage.
    """
    if config == load_config(run.config):
        return
    text, before = to_toml(config), run.config.read_bytes()
    # A run that torchrun started has no supervisor; there the ranks start at once.
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


def _facts(prepared: PreparedData) -> DataFacts:
    return DataFacts(str(prepared.train), str(prepared.val), prepared.digest, prepared.source)
