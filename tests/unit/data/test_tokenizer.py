"""Tokenizers round-trip text, and damage to token files is detected."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    build_tokenizer,
    digest,
    load_tokenizer,
    save_tokenizer,
    to_text,
)
from shoal.data.tokens import open_tokens, write_tokens
from shoal.errors import ConfigError, DataError

TEXT = "She sells sea shells.\nDoes she sell sea shells? Zoë 🐟 does not.\n" * 20
KINDS = ("char", "byte", "bpe")


def build(kind: str, text: str = TEXT) -> Tokenizer:
    return build_tokenizer(kind, text, bpe_vocab=300)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_undoes_encode(kind: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids.dtype == np.uint16
    assert int(ids.max()) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_encodes_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = build(kind)
    save_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.name, loaded.vocab_size, digest(loaded)) == (kind, tokenizer.vocab_size, digest(tokenizer))
    assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_has_no_tokens(kind: str) -> None:
    ids = build(kind).encode("")
    assert ids.size == 0
    assert ids.dtype == np.uint16


@pytest.mark.parametrize("kind", KINDS)
def test_unassigned_ids_do_not_stop_decoding(kind: str) -> None:
    tokenizer = build(kind)
    ids = [*tokenizer.encode("She"), tokenizer.vocab_size, 50_000, *tokenizer.encode("sells")]
    decoded = tokenizer.decode(ids)
    assert decoded.startswith("She")
    assert decoded.endswith("sells")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokens_round_trip_any_text(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_character_tokens_round_trip_any_text(text: str) -> None:
    tokenizer = CharTokenizer.from_text(text)
    assert tokenizer.vocab_size == len(set(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text


BPE = BpeTokenizer.train(TEXT, 280)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_round_trips_text_it_was_not_trained_on(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


def test_character_ids_follow_the_code_points() -> None:
    assert CharTokenizer.from_text("banana").encode("abn").tolist() == [0, 1, 2]


def test_more_characters_than_uint16_holds_give_wider_ids() -> None:
    text = "".join(map(chr, range(0x10000, 0x10000 + 65_537)))
    ids = CharTokenizer.from_text(text).encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == list(range(65_537))


@pytest.mark.parametrize("char", ["x", "\u00e9", "\U0001f41f", "\udcff"])
def test_an_unknown_character_is_named(char: str) -> None:
    with pytest.raises(DataError) as caught:
        CharTokenizer.from_text("abc").encode(f"ab{char}c")
    assert ascii(char) in caught.value.seen
    assert "tokenizer=byte" in caught.value.fix


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="half a character"):
        tokenizer.encode("ab\udcff")


def test_a_truncated_character_decodes_to_a_replacement() -> None:
    assert ByteTokenizer().decode([0x41, 0xC3]) == "A\ufffd"


def test_long_texts_encoded_in_pieces_decode_to_the_whole() -> None:
    text = "one two three " * 20_000 + "\n" + TEXT * 100
    for kind in KINDS:
        tokenizer = build(kind, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_reaches_the_requested_vocabulary_and_shortens_the_text() -> None:
    assert BPE.vocab_size == 280
    assert BPE.encode(TEXT).size < len(TEXT.encode()) / 2


def test_bpe_of_a_tiny_text_stays_below_the_requested_vocabulary() -> None:
    assert 256 <= BpeTokenizer.train("ab", 5_000).vocab_size < 260


def test_an_unknown_tokenizer_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="wordpiece"):
        build("wordpiece")


BROKEN = {
    "empty": "",
    "half": to_text(CharTokenizer.from_text("abc"))[:-5],
    "list": "[]",
    "no kind": "{}",
    "unknown kind": '{"kind": "wordpiece"}',
    "no chars": '{"kind": "char", "chars": ""}',
    "repeated chars": '{"kind": "char", "chars": "aba"}',
    "chars are a number": '{"kind": "char", "chars": 7}',
    "bpe of nothing": '{"kind": "bpe", "bpe": {}}',
    "bpe without vocabulary": json.dumps({"kind": "bpe", "bpe": {"model": {"type": "BPE"}}}),
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_tokenizer_file_is_a_data_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_a_binary_tokenizer_file_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\x00")
    with pytest.raises(DataError):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_missing_tokenizer_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_tokenizer(tmp_path / "tokenizer.json")


def write_token_file(folder: Path, count: int = 1_000) -> Path:
    path = folder / "train.tokens"
    write_tokens(path, np.arange(count, dtype=np.uint16), vocab_size=count, tokenizer="abc")
    return path


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("count", [0, 1, 1_000])
def test_tokens_are_read_as_an_aligned_memory_map(tmp_path: Path, dtype: type[np.generic], count: int) -> None:
    path = tmp_path / "train.tokens"
    header = write_tokens(path, np.arange(count).astype(dtype), vocab_size=5, tokenizer="abc")
    file = open_tokens(path, check=True)
    assert file.header == header
    assert (file.header.count, file.header.vocab_size, file.header.tokenizer) == (count, 5, "abc")
    assert file.tokens.tolist() == list(range(count))
    assert file.tokens.dtype == dtype
    assert (path.stat().st_size - file.tokens.nbytes) % 64 == 0
    assert [child.name for child in tmp_path.iterdir()] == ["train.tokens"]


def test_the_memory_map_is_read_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        open_tokens(write_token_file(tmp_path)).tokens[0] = 1


def test_a_file_that_memory_has_no_room_for_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("shoal.data.tokens._map", refuse)
    with pytest.raises(MemoryError, match="cannot map"):
        open_tokens(write_token_file(tmp_path))


def test_tokens_of_a_wrong_type_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="i8"):
        write_tokens(tmp_path / "train.tokens", np.arange(4), vocab_size=4, tokenizer="abc")
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_is_detected_with_check(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)
    assert open_tokens(path).tokens.size == 1_000
    with pytest.raises(DataError, match="SHA-256") as caught:
        open_tokens(path, check=True)
    assert caught.value.fix.startswith(f"rm {path}")


@pytest.mark.parametrize("kept", [0, 5, 16, 40, 191, 193, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = write_token_file(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match="not a usable token file"):
        open_tokens(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"SHOALTOK", b"PARQUET1", "begins with"),
        (b"\x01\x00\x00\x00", b"\x09\x00\x00\x00", "format is 9"),
        (b'"<u2"', b'"<f2"', "impossible values"),
        (b'"count": 1000', b'"count": -100', "impossible values"),
        (b'"count": 1000', b'"count": 9000', "cut short"),
        (b'"count": 1000', b'"count": 0999', "header is not readable"),
        (b'"count": 1000', b'"count": 1e10', "impossible values"),
        (b'"dtype"', b'"other"', "header is not readable"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = write_token_file(tmp_path)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        open_tokens(path)


def test_a_file_with_appended_bytes_is_refused(tmp_path: Path) -> None:
    path = write_token_file(tmp_path)
    path.write_bytes(path.read_bytes() + b"xx")
    with pytest.raises(DataError, match="longer than its header says"):
        open_tokens(path)


def test_a_missing_token_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        open_tokens(tmp_path / "train.tokens")
