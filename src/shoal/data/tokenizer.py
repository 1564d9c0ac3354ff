"""Tokenizers: characters, bytes, or byte-level BPE trained on the text itself. Saved as JSON.

A model may have a larger vocabulary than its tokenizer (`model.vocab_size`), so `decode` can meet unassigned ids: it
shows them as U+FFFD or leaves them out, and never fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.errors import ConfigError, DataError
from shoal.run_folder import write_atomically

if TYPE_CHECKING:
    import tokenizers


# uint16 where the vocabulary allows it, else uint32.
Tokens = npt.NDArray[np.unsignedinteger[Any]]

# Bounds the memory for a text of gigabytes: UTF-32 takes four bytes a character, and the library allocates per token.
_CHUNK_CHARS = 1 << 16
# Chunks that BPE encodes in one call; the library spreads them over the cores.
_BATCH_CHUNKS = 64
_NO_ID = -1
_UNASSIGNED = "\ufffd"


class Tokenizer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Tokens: ...

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


class CharTokenizer:
    """One id for each character, in the order of code points."""

    name = "char"

    def __init__(self, chars: str) -> None:
        self._chars = chars
        points = _code_points(chars)
        self._ids = np.full(int(points.max(initial=0)) + 1, _NO_ID, dtype=np.int32)
        self._ids[points] = np.arange(len(chars), dtype=np.int32)

    @classmethod
    def from_text(cls, text: str) -> CharTokenizer:
        return cls("".join(sorted(set(text))))

    @property
    def vocab_size(self) -> int:
        return len(self._chars)

    def encode(self, text: str) -> Tokens:
        return _joined((self._encode_chunk(chunk) for chunk in _chunks(text)), self.vocab_size)

    def _encode_chunk(self, text: str) -> npt.NDArray[np.int32]:
        points = _code_points(text)
        ids = self._ids[np.minimum(points, self._ids.size - 1)]
        unknown = (ids == _NO_ID) | (points >= self._ids.size)
        if unknown.any():
            raise DataError(
                f"the character {chr(points[unknown.argmax()])!a} is not in the vocabulary",
                why=f"a character tokenizer knows only the {self.vocab_size} characters of the text it was built from",
                fix="leave that character out, or train with --set data.tokenizer=byte, which knows them all",
            )
        return ids

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return "".join(self._chars[i] if 0 <= i < len(self._chars) else _UNASSIGNED for i in map(int, ids))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.name, "chars": self._chars}


class ByteTokenizer:
    """The bytes of UTF-8."""

    name = "byte"
    vocab_size = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        known = (bytes((i,)) if 0 <= i < self.vocab_size else _UNASSIGNED.encode() for i in map(int, ids))
        return b"".join(known).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.name}


class BpeTokenizer:
    """Byte pairs merged by frequency. Every byte is in the vocabulary, so any text can be encoded."""

    name = "bpe"

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BpeTokenizer:
        """Learn the merges; a text with too few pairs to merge gives fewer than `vocab_size` tokens."""
        # Imported here: most commands never need the library.
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
        inner.train_from_iterator(_chunks(text), trainer)
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> Tokens:
        _utf8(text)
        return _joined(self._encode_batches(_chunks(text)), self.vocab_size)

    def _encode_batches(self, chunks: Iterator[str]) -> Iterator[npt.NDArray[np.int32]]:
        while batch := list(islice(chunks, _BATCH_CHUNKS)):
            yield from (np.array(encoded.ids, dtype=np.int32) for encoded in self._inner.encode_batch_fast(batch))

    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return str(self._inner.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size]))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.name, "bpe": json.loads(self._inner.to_str())}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> BpeTokenizer:
        from tokenizers import Tokenizer as Inner

        return cls(Inner.from_str(json.dumps(content)))


def build_tokenizer(kind: str, text: str, bpe_vocab: int) -> Tokenizer:
    if kind == "char":
        return CharTokenizer.from_text(text)
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return BpeTokenizer.train(text, bpe_vocab)
    raise ConfigError(f"there is no tokenizer {kind!r}", fix="use --set data.tokenizer=char, byte or bpe")


def to_text(tokenizer: Tokenizer) -> str:
    return json.dumps(tokenizer.to_json(), sort_keys=True) + "\n"


def digest(tokenizer: Tokenizer) -> str:
    """Return a digest that is equal for equal tokenizers; a token file names the tokenizer it was made with."""
    return hashlib.sha256(to_text(tokenizer).encode()).hexdigest()


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    write_atomically(path, to_text(tokenizer))


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        return parse_tokenizer(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(
            f"cannot read the tokenizer {path}: {error.strerror}",
            why="every run keeps the tokenizer it was trained with",
            fix=f"look at it: ls -l {path}",
        ) from None


def parse_tokenizer(text: str | bytes, name: str) -> Tokenizer:
    """Parse a saved tokenizer; error messages call it `name`."""
    try:
        return _from_json(json.loads(text))
    # The library raises plain `Exception` for JSON that is not one of its tokenizers.
    except Exception as error:
        raise DataError(
            f"{name} is not a tokenizer: {type(error).__name__}: {error}",
            why="the file is damaged, or something else wrote it",
            fix="copy it from another rank or node of the same run, or train again",
        ) from None


def _from_json(content: dict[str, Any]) -> Tokenizer:
    kind = content["kind"]
    if kind == "char":
        chars = content["chars"]
        if not chars or len(set(chars)) != len(chars):
            raise ValueError("its characters are missing or not distinct")
        return CharTokenizer("".join(chars))
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return BpeTokenizer.from_json(content["bpe"])
    raise ValueError(f"unknown kind {kind!r}")


def _chunks(text: str) -> Iterator[str]:
    """Yield chunks of `_CHUNK_CHARS`, cut after a newline if there is one: BPE never merges across a cut."""
    start = 0
    while start < len(text):
        end = min(start + _CHUNK_CHARS, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    # Half surrogates (from a command line that is not UTF-8) pass, to be reported as unknown characters.
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _joined(chunks: Iterator[npt.NDArray[np.int32]], vocab_size: int) -> Tokens:
    dtype = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
    parts = [chunk.astype(dtype) for chunk in chunks]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text holds {text[error.start]!a}, which is half a character",
            why="it was read from something that is not UTF-8",
            fix="check the encoding of your terminal or file: locale; file my.txt",
        ) from None
