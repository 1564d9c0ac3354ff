"""The user's text: one file, or every text file under a folder, checked before anything is made of it.

`.txt`, `.md` and `.jsonl` count as text in a folder; a single file may have any name. A `.jsonl` file gives the `text`
field of each line. Links to folders are not followed, so a loop cannot trap us, and hidden names are passed over.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from shoal.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
_JSON_LINES = ".jsonl"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_texts(path: Path) -> Iterator[str]:
    """One text a file, in a fixed order; nothing but whitespace in all of them is an error."""
    blank = True
    for file in find_texts(path):
        text = read_text_file(file)
        blank = blank and not text.strip()
        yield text
    if blank:
        raise DataError(
            f"{path} holds no text: it is empty or only whitespace",
            why="there is nothing to train on",
            fix="name another file or folder: --set data.path=my.txt",
        )


def find_texts(path: Path) -> tuple[Path, ...]:
    """The regular files to read, sorted; only the names are looked at, no content."""
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        _refuse(path, error)
    if stat.S_ISDIR(mode):
        return _texts_below(path)
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path} is neither a file nor a folder",
            why="a pipe or a device can be read once only, and waits for somebody to write",
            fix=f"save it first: cat {path} > my.txt, then --set data.path=my.txt",
        )
    return (path,)


def _texts_below(folder: Path) -> tuple[Path, ...]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=lambda error: _refuse(folder, error)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(Path(parent, name) for name in names if _looks_like_text(name))
    texts = tuple(sorted(filter(_is_regular, found)))
    if not texts:
        raise DataError(
            f"the folder {folder} holds no text files",
            why=f"only {', '.join(TEXT_SUFFIXES)} files count as text, and hidden ones do not",
            fix="name the file itself, whatever its ending: --set data.path=FOLDER/FILE",
        )
    return texts


def _is_regular(path: Path) -> bool:
    """A pipe, a socket or a dangling link among the texts is passed over; one we may not look at is not."""
    try:
        return path.is_file()
    except OSError as error:
        _refuse(path, error)


def _looks_like_text(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES


def digest_files(files: Sequence[Path]) -> str:
    """Identifies the content, whatever the files are called; read in blocks, so memory does not limit it."""
    whole = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                part = hashlib.file_digest(file, "sha256")
        except OSError as error:
            _refuse(path, error)
        whole.update(b"jsonl" if _is_json_lines(path) else b"plain")
        whole.update(part.digest())
    return whole.hexdigest()


def stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Size and time of the last change of each file: equal before and after means nobody wrote in between."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, files)]
    except OSError as error:
        _refuse(Path(str(error.filename)), error)


def read_text_file(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        _refuse(path, error)
    text = _decode(raw, path)
    return "\n".join(_json_texts(text, path)) if _is_json_lines(path) else text


def _decode(raw: bytes, path: Path) -> str:
    """UTF-8 without its byte-order mark, lines ending in `\\n` as Python's own text files do."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if raw.startswith(_UTF16_MARKS) else "ISO-8859-1"
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            why=f"it is binary, or in another encoding (perhaps {encoding})",
            fix=f"iconv -f {encoding} -t UTF-8 {path} > my.txt, then --set data.path=my.txt",
        ) from None


def _is_json_lines(path: Path) -> bool:
    return path.suffix.lower() == _JSON_LINES


def _json_texts(content: str, path: Path) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield _json_text(line, f"{path} line {number}")


def _json_text(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
        # JSON can spell half of a surrogate pair, which is no character and cannot be encoded again.
        text.encode("utf-8")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(
            f'{where} is not a JSON object with a "text" field that holds text',
            why='every line of a .jsonl file must be like {"text": "She runs."}',
            fix="correct that line, or give the file the ending .txt to read it as plain text",
        ) from None
    return str(text)


def _refuse(path: Path, error: Exception) -> NoReturn:
    if isinstance(error, FileNotFoundError):
        raise DataError(
            f"there is no text at {path}",
            why="data.path names a text file or a folder of text files",
            fix=f"check the path: ls {path.parent}",
        ) from None
    if isinstance(error, PermissionError):
        denied = error.filename or path
        raise DataError(
            f"cannot read {denied}: permission denied",
            why="the file, or a folder on the way to it, is not readable for you",
            fix=f"look at it: ls -ld {denied}, then chmod u+r, or name another text",
        ) from None
    reason = error.strerror if isinstance(error, OSError) else str(error)
    raise DataError(f"cannot read {path}: {reason}", fix=f"look at it: ls -ld {path}") from None
