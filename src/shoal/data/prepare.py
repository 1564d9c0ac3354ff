"""From a `DataConfig` to encoded training and validation text on disk, made once and reused while nothing changed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.config.schema import DataConfig
from shoal.data.cache import Index, cache_root, obtain
from shoal.data.corpus import digest_files, find_texts, read_texts, stamps
from shoal.data.grammar import GRAMMAR_VERSION, Sentence, generate, write_corpus
from shoal.data.order import window_count
from shoal.data.tokenfile import FORMAT_VERSION, TokenHeader, open_tokens, write_tokens
from shoal.data.tokenizer import Tokenizer, build_tokenizer, save_tokenizer
from shoal.data.tokenizer import digest as tokenizer_digest
from shoal.errors import DataError
from shoal.units import format_si

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
class Prepared:
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


def prepare(config: DataConfig) -> Prepared:
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


def _prepared(entry: Path, index: Index, source: str, sentences: int | None) -> Prepared:
    return Prepared(
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
    """What `Prepared.digest` is for these files, from their own bytes: for a machine that was sent them.

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
    prepared: Prepared,
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
    prepared: Prepared, seq_len: int, global_batch: int, batch_unit: int, can_deal: Callable[[int], bool]
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
