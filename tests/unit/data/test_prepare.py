"""The cache of encoded text: reuse, rebuilding after damage, and errors for bad texts and folders."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.main import run
from shoal.config.load import build_config
from shoal.config.schema import DataConfig
from shoal.data.corpus import find_texts, read_texts
from shoal.data.prepare import (
    SHAKESPEARE,
    PreparedData,
    cache_root,
    check_enough,
    check_shares,
    create_run,
    prepare,
    read_entry,
    split_text,
)
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokens import open_tokens
from shoal.errors import ConfigError, DataError, UsageError

STORY = "".join(f"Line {number} of a story.\n" for number in range(200))


@pytest.fixture
def story(tmp_path: Path) -> DataConfig:
    path = tmp_path / "story.txt"
    path.write_text(STORY, encoding="utf-8")
    return DataConfig(path=path, cache_dir=tmp_path / "cache")


def decode_parts(prepared: PreparedData) -> tuple[str, str]:
    tokenizer = load_tokenizer(prepared.tokenizer)
    train, val = (open_tokens(path, check=True).tokens for path in (prepared.train, prepared.val))
    return tokenizer.decode(train), tokenizer.decode(val)


def file_states(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Drop root: permissions do not apply to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


# --- encoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_the_whole_text_is_encoded(story: DataConfig, kind: str) -> None:
    prepared = prepare(story.model_copy(update={"tokenizer": kind}))
    train, val = decode_parts(prepared)
    assert train + val == STORY
    assert train.endswith("\n")
    assert 0.08 < len(val) / len(STORY) < 0.2
    headers = [open_tokens(path).header for path in (prepared.train, prepared.val)]
    assert [header.count for header in headers] == [prepared.train_tokens, prepared.val_tokens]
    assert {header.vocab_size for header in headers} == {prepared.vocab_size}


def test_characters_only_in_the_validation_part_are_in_the_vocabulary(story: DataConfig) -> None:
    assert story.path
    story.path.write_text(STORY + "Ω", encoding="utf-8")
    assert decode_parts(prepare(story))[1].endswith("Ω")


def test_the_grammar_corpus_is_stored_with_its_sentences(tmp_path: Path) -> None:
    prepared = prepare(DataConfig(sentences=500, cache_dir=tmp_path))
    for name, text in zip(("train.jsonl", "val.jsonl"), decode_parts(prepared), strict=True):
        lines = (prepared.folder / name).read_text(encoding="ascii").splitlines()
        assert text == "\n".join(json.loads(line)["text"] for line in lines)
    assert prepared.sentences == 500
    assert "500" in prepared.source


def test_the_source_is_described(story: DataConfig) -> None:
    assert prepare(story).source == f"{story.path} (4.09 kB)"


@given(st.text(min_size=1), st.floats(0.01, 0.5))
def test_a_split_keeps_the_whole_text_and_holds_out_a_part(text: str, val_fraction: float) -> None:
    train, val = split_text(text, val_fraction)
    assert train + val == text
    assert val
    assert len(val) <= 2 * max(round(len(text) * val_fraction), 1)


def test_a_text_without_newlines_is_cut_exactly() -> None:
    assert split_text("x" * 100, 0.1) == ("x" * 90, "x" * 10)


# --- reuse and repair -----------------------------------------------------------------------------------------------


def test_an_unchanged_text_is_not_encoded_again(story: DataConfig) -> None:
    first = prepare(story)
    before = file_states(first.folder)
    assert prepare(story) == first
    assert file_states(first.folder) == before
    assert [path.name for path in first.folder.parent.iterdir()] == [first.folder.name]


def test_a_changed_text_is_encoded_again(story: DataConfig) -> None:
    first = prepare(story)
    assert story.path
    story.path.write_text(STORY.replace("story", "novel"), encoding="utf-8")
    second = prepare(story)
    assert second.folder != first.folder
    assert second.digest != first.digest
    assert "novel" in decode_parts(second)[0]


@pytest.mark.parametrize("change", [{"tokenizer": "byte"}, {"val_fraction": 0.2}])
def test_a_changed_setting_makes_another_entry(story: DataConfig, change: dict[str, object]) -> None:
    assert prepare(story).digest != prepare(story.model_copy(update=change)).digest


def test_another_seed_changes_the_grammar_corpus_and_not_a_text_file(story: DataConfig) -> None:
    grammar = DataConfig(sentences=100, cache_dir=story.cache_dir)
    assert prepare(grammar).digest != prepare(grammar.model_copy(update={"seed": 1})).digest
    assert prepare(story).folder == prepare(story.model_copy(update={"seed": 1})).folder


def test_the_same_text_elsewhere_has_the_same_digest(story: DataConfig, tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(STORY, encoding="utf-8")
    other = prepare(DataConfig(path=copy, cache_dir=tmp_path / "other"))
    assert other.digest == prepare(story).digest


def _flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [_flip_last_bit, _cut, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["train.tokens", "val.tokens", "tokenizer.json", "index", "train.jsonl"])
def test_a_damaged_entry_is_rebuilt(tmp_path: Path, damage: Callable[[Path], object], name: str) -> None:
    config = DataConfig(sentences=100, cache_dir=tmp_path)
    first = prepare(config)
    good = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    damage(first.folder / name)
    assert read_entry(first.folder) is None
    assert prepare(config) == first
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == good
    assert [path.name for path in tmp_path.iterdir()] == [first.folder.name]


def test_a_changed_number_in_the_index_is_detected(story: DataConfig) -> None:
    first = prepare(story)
    index = first.folder / "index"
    index.write_text(index.read_text(encoding="utf-8").replace('"train_tokens": ', '"train_tokens": 1'), "utf-8")
    assert read_entry(first.folder) is None
    assert prepare(story) == first


def test_a_file_in_the_place_of_an_entry_is_replaced(story: DataConfig) -> None:
    folder = prepare(story).folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("not a folder", encoding="utf-8")
    assert decode_parts(prepare(story))[0].startswith("Line 0")


def test_a_failed_build_leaves_nothing_behind(story: DataConfig) -> None:
    assert story.path
    assert story.cache_dir
    story.path.write_bytes(b"fine so far \xff")
    with pytest.raises(DataError):
        prepare(story)
    assert list(story.cache_dir.iterdir()) == []


# --- where the cache is ---------------------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert cache_root(None) == Path("/somewhere/cache/shoal")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root(None) == tmp_path / ".cache" / "shoal"
    assert cache_root(Path("~/cache")) == tmp_path / "cache"


def test_an_unwritable_cache_folder_is_a_usage_error(story: DataConfig, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot write the encoded text") as caught:
        prepare(story.model_copy(update={"cache_dir": blocked}))
    assert "data.cache_dir" in caught.value.fix


def test_a_cache_folder_of_another_user_is_a_usage_error(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    with ordinary_user(), pytest.raises(UsageError, match="Permission denied") as caught:
        prepare(DataConfig(sentences=100, cache_dir=cache))
    assert "data.cache_dir" in caught.value.fix


def test_a_disk_that_fills_up_is_a_usage_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A file size limit fails a write in the middle of a file, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        with pytest.raises(UsageError, match="cannot write the encoded text"):
            prepare(DataConfig(sentences=100, cache_dir=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_cache_with_the_entry_is_enough(story: DataConfig) -> None:
    first = prepare(story)
    first.folder.parent.chmod(0o555)
    assert prepare(story) == first
    first.folder.parent.chmod(0o755)


# --- texts ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_read_recursively_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b/one.md": "second",
        "a.txt": "first",
        "c.jsonl": '{"text": "third"}\n\n{"text": "fourth", "more": 1}\n',
        "ignored.png": "no",
        ".hidden.txt": "no",
        ".git/notes.txt": "no",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert list(read_texts(tmp_path)) == ["first", "second", "third\nfourth"]


def test_windows_line_ends_and_byte_order_marks_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    assert list(read_texts(tmp_path / "a.txt")) == ["one\ntwo\n"]


def test_symlink_loops_and_pipes_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    assert find_texts(tmp_path) == (tmp_path / "a.txt",)


def test_a_link_to_itself_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    with pytest.raises(DataError, match="cannot read"):
        find_texts(tmp_path / "self.txt")


def test_a_pipe_is_a_data_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_texts(tmp_path / "pipe")


BAD_FILES = {
    "empty.txt": (b"", "holds no text", "data.path"),
    "blank.txt": (b" \n\t\n", "holds no text", "data.path"),
    "latin.txt": (b"caf\xe9 au lait", "byte 0xe9 at offset 3", "iconv -f ISO-8859-1"),
    "wide.txt": ("wide".encode("utf-16"), "byte 0xff at offset 0", "iconv -f UTF-16"),
    "torn.jsonl": (b'{"text": "one"}\n{"text"', "line 2 is not a JSON object", "correct that line"),
    "other.jsonl": (b'{"body": "one"}', "line 1 is not a JSON object", "correct that line"),
    "list.jsonl": (b"[1]", "line 1 is not a JSON object", "correct that line"),
    "number.jsonl": (b'{"text": 1}', "line 1 is not a JSON object", "correct that line"),
    "half.jsonl": (b'{"text": "\\ud800"}', "line 1 is not a JSON object", "correct that line"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_text_is_refused_with_reason_and_fix(tmp_path: Path, name: str) -> None:
    content, seen, fix = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(DataConfig(path=tmp_path / name, cache_dir=tmp_path / "cache"))
    assert seen in caught.value.seen
    assert name in caught.value.seen
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["missing.txt", "missing/story.txt", "a\0b", "x" * 300, "~no-such-user/a.txt"])
def test_a_path_that_does_not_exist_is_a_data_error(tmp_path: Path, name: str) -> None:
    path = Path(name) if name.startswith("~") else tmp_path / name
    with pytest.raises(DataError):
        prepare(DataConfig(path=path, cache_dir=tmp_path / "cache"))


def test_a_folder_without_texts_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"png")
    with pytest.raises(DataError, match="holds no text files"):
        find_texts(tmp_path)


@pytest.mark.parametrize("inside", [False, True], ids=["the file", "a folder inside"])
def test_an_unreadable_text_is_a_data_error(tmp_path: Path, inside: bool) -> None:
    locked = tmp_path / "locked"
    if inside:
        (locked / "below").mkdir(parents=True)
        (locked / "below").chmod(0)
    else:
        locked.write_text("secret", encoding="utf-8")
        locked.chmod(0)
    with ordinary_user(), pytest.raises(DataError, match="permission denied"):
        list(read_texts(locked))
    (locked / "below" if inside else locked).chmod(0o755)


# --- enough text ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_data(story: DataConfig) -> PreparedData:
    return replace(prepare(story), train_tokens=641, val_tokens=65)


def test_exactly_one_batch_is_enough(small_data: PreparedData) -> None:
    check_enough(small_data, seq_len=64, global_batch=10)


def test_a_text_shorter_than_one_batch_names_a_batch_that_fits(small_data: PreparedData) -> None:
    with pytest.raises(DataError, match="training text has 10 sequences of 64 tokens, 11 are needed") as caught:
        check_enough(small_data, seq_len=64, global_batch=11)
    assert "--set train.global_batch=10," in caught.value.fix


def test_a_text_shorter_than_one_sequence_names_a_length_that_fits(small_data: PreparedData) -> None:
    with pytest.raises(DataError, match="training text has 0 sequences") as caught:
        check_enough(small_data, seq_len=1024, global_batch=4)
    assert "--set model.seq_len=64," in caught.value.fix
    check_enough(small_data, seq_len=64, global_batch=4)


def test_validation_needs_one_sequence(small_data: PreparedData) -> None:
    with pytest.raises(DataError, match="validation text has 0 sequences of 65 tokens, 1 is needed") as caught:
        check_enough(small_data, seq_len=65, global_batch=1)
    assert "--set model.seq_len=64" in caught.value.fix


@given(
    train=st.integers(1, 3000),
    val=st.integers(1, 300),
    seq_len=st.integers(1, 200),
    batch=st.integers(1, 40),
    unit=st.integers(1, 4),
    ranks=st.integers(1, 8),
    multiple=st.integers(1, 6),
)
def test_the_advice_for_a_short_text_works(
    train: int, val: int, seq_len: int, batch: int, unit: int, ranks: int, multiple: int
) -> None:
    def can_deal(size: int) -> bool:
        return size >= ranks and size % multiple == 0

    folder = Path("cache")
    text = PreparedData(folder, folder, folder, folder, 65, train, val, "digest", "my.txt", None)
    fix = ""
    try:
        check_enough(text, seq_len, unit * batch, unit, can_deal)
    except DataError as error:
        fix = error.fix
    seq, smaller = (re.search(rf"{name}=(\d+)", fix) for name in ("seq_len", "global_batch"))
    if seq is None and smaller is None:
        assert not fix or "a longer text, of at least" in fix
        return
    # A batch that the ranks cannot share is refused before the text is read.
    assert smaller is None or can_deal(int(smaller[1])) or int(smaller[1]) == batch
    check_enough(text, int(seq[1]) if seq else seq_len, unit * (int(smaller[1]) if smaller else batch), unit, can_deal)


@pytest.mark.parametrize(
    ("sets", "ranks", "advised"),
    [
        (["train.micro_batch=4", "train.global_batch=32"], 2, 8),
        (["data.sharding=modulo", "members.on_loss=end", "train.global_batch=32"], 4, 8),
        (["data.sharding=modulo", "members.on_loss=end", "train.global_batch=33"], 3, 9),
        (["train.global_batch=32", "run.weights=1/3"], 2, 10),
        (["train.scaling=weak", "train.global_batch=16"], 2, 5),
        (["train.scaling=weak", "train.micro_batch=4", "train.global_batch=16"], 2, 4),
        (["sync.accumulate=2", "train.micro_batch=2", "train.global_batch=16"], 2, 4),
    ],
)
def test_the_advised_batch_can_be_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_data: PreparedData, sets: list[str], ranks: int, advised: int
) -> None:
    """The text has ten sequences."""
    monkeypatch.setattr("shoal.data.prepare.prepare", lambda config: small_data)
    config = build_config("grammar", None, None, ["model.seq_len=64", *sets])
    with pytest.raises(DataError) as caught:
        create_run(config, tmp_path / "run", ranks)
    assert caught.value.fix.startswith(f"use --set train.global_batch={advised},")
    corrected = build_config("grammar", None, None, ["model.seq_len=64", *sets, f"train.global_batch={advised}"])
    create_run(corrected, tmp_path / "run", ranks)


def test_the_advice_names_the_flag_that_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--set` as well, the setting would be given twice."""
    (tmp_path / "short.txt").write_text("ten words of a text that is too short\n" * 20, encoding="ascii")
    words = ["train", "--tokenizer", "byte", "--set", f"data.cache_dir={tmp_path}", "--seq-len", "32"]
    words += ["--data", str(tmp_path / "short.txt"), "--out", str(tmp_path / "run")]
    assert run([*words, "--global-batch", "32"], debug=False) == 2
    fix = capsys.readouterr().err.rpartition("next: ")[2]
    assert re.fullmatch(r"use --global-batch \d+, or more text: --data LONGER.txt\n", fix)
    assert run([*words, "--global-batch", "32", "--micro-batch", "5"], debug=False) == 2
    assert "use --micro-batch 4, or leave it out" in capsys.readouterr().err


def test_the_error_for_a_text_of_three_bytes_names_the_needed_length(tmp_path: Path) -> None:
    (tmp_path / "three.txt").write_text("abc", encoding="ascii")
    text = prepare(DataConfig(path=tmp_path / "three.txt", tokenizer="byte", cache_dir=tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        check_enough(text, seq_len=64, global_batch=16, can_deal=lambda batch: batch >= 2)
    assert "seq_len" not in caught.value.fix
    assert re.search(r"a longer text, of at least 1,\d\d\d tokens: --set data.path=LONGER.txt", caught.value.fix)


# --- the text that comes with shoal ---------------------------------------------------------------------------------


def test_the_shakespeare_preset_has_a_built_in_text(tmp_path: Path) -> None:
    config = build_config("shakespeare-char", None, {"data": {"cache_dir": tmp_path}})
    prepared = prepare(config.data)
    train, val = decode_parts(prepared)
    assert train.startswith("First Citizen:\nBefore we proceed any further")
    assert (train + val).endswith("Than this of Juliet and her Romeo.\n")
    assert prepared.source == "Coriolanus and Romeo and Juliet (288 kB, part of shoal)"
    assert SHAKESPEARE.stat().st_size < 300_000
    check_enough(prepared, config.model.seq_len, config.train.global_batch)


def test_a_users_text_overrides_the_built_in_one(tmp_path: Path, story: DataConfig) -> None:
    config = build_config("shakespeare-char", None, {"data": {"path": story.path, "cache_dir": tmp_path}})
    assert prepare(config.data).source == f"{story.path} (4.09 kB)"


def test_modulo_shards_are_refused_where_the_number_of_ranks_may_change() -> None:
    config = build_config("grammar", None, None, ["data.sharding=modulo", "train.global_batch=32"])
    with pytest.raises(ConfigError) as caught:
        check_shares(config, 1)
    assert "some samples would be used twice" in str(caught.value.why)
    assert "members.on_loss=end" in str(caught.value.fix)
    for fixed in ("members.on_loss=end", "run.launcher=torchrun"):
        fixed_ranks = build_config("grammar", None, None, ["data.sharding=modulo", "train.global_batch=32", fixed])
        check_shares(fixed_ranks, 2)
