"""Runs on a host: receive files over stdin. Standard library only.

No file gets its name before it is complete and its SHA-256 was compared. The first line is JSON: `base`, the folder;
`files`, a list of path below it, size, mode and, for a symbolic link, its target; `whole`, whether the folder shall
appear all at once; `remove`, paths to remove; `note`, the content of the project's note. Then, for each file, its bytes
and the 64 digits of its SHA-256.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

NOTE = ".shoal-project.json"
_CHUNK = 1 << 20
# A file system needs some space of its own for every file.
_PER_FILE_BYTES = 4096
_STALE_S = 24 * 3600.0
_PART = ".part-"


class CopyFailed(Exception):
    def __init__(self, text: str, **numbers: int) -> None:
        """`numbers` are `needed` and `free` bytes of a full disk."""
        super().__init__(text)
        self.numbers = numbers


def put(stream: BinaryIO) -> Path:
    order = json.loads(stream.readline())
    base = Path(order["base"]).expanduser()
    base.parent.mkdir(parents=True, exist_ok=True)
    need_room(base.parent, sum(size + _PER_FILE_BYTES for _, size, _, _ in order["files"]))
    if order["whole"]:
        _put_whole(stream, base, order["files"])
    else:
        _put_into(stream, base, order)
    return base


def _put_whole(stream: BinaryIO, base: Path, files: list[Any]) -> None:
    remove_stale_parts(base.parent)
    stage = base.with_name(f".{base.name}{_PART}{os.getpid()}")
    try:
        receive_all(stream, stage, files)
        # Another copy may have been faster; it has the same content.
        if not base.exists():
            stage.rename(base)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _put_into(stream: BinaryIO, base: Path, order: dict[str, Any]) -> None:
    """Remove from the note first what is about to change, so that an interrupted copy is repeated."""
    base.mkdir(exist_ok=True)
    remove_stale_parts(base)
    note = order["note"]
    if note is not None:
        changing = {path for path, *_ in order["files"]} | set(order["remove"])
        kept = {path: digest for path, digest in _read_note(base).items() if path not in changing}
        write_note(base, {"digest": "", "files": kept})
    for path in order["remove"]:
        remove(base, inside(base, path))
    receive_all(stream, base, order["files"])
    if note is not None:
        write_note(base, note)


def receive_all(stream: BinaryIO, base: Path, files: list[Any]) -> None:
    """Write all files beside their places, then sync them, then rename them. Syncing them together is many times faster
    than one after another."""
    parts: list[tuple[Path, Path]] = []
    try:
        for path, size, mode, link in files:
            place = inside(base, path)
            if link is not None:
                check_link(base, path, link)
            parts.append((place.with_name(f".{place.name}{_PART}{os.getpid()}"), place))
            place.parent.mkdir(parents=True, exist_ok=True)
            _receive(stream, parts[-1][0], size, mode, link)
        for part, _ in parts:
            if not part.is_symlink():
                with part.open("rb") as file:
                    os.fsync(file.fileno())
        for part, place in parts:
            part.replace(place)
    finally:
        for part, _ in parts:
            part.unlink(missing_ok=True)


def _receive(stream: BinaryIO, part: Path, size: int, mode: int, link: str | None) -> None:
    if link is not None:
        part.symlink_to(link)
        return
    digest = hashlib.sha256()
    with part.open("wb") as file:
        while size:
            chunk = stream.read(min(size, _CHUNK))
            if not chunk:
                raise CopyFailed("the connection ended in the middle of a file")
            digest.update(chunk)
            file.write(chunk)
            size -= len(chunk)
    part.chmod(mode)
    if stream.read(64).decode(errors="replace") != digest.hexdigest():
        raise CopyFailed(f"{part.name} did not arrive as it was sent: its SHA-256 differs")


def remove(base: Path, path: Path) -> None:
    """Remove a file and the folders that are empty without it."""
    path.unlink(missing_ok=True)
    for folder in path.parents:
        if folder == base or any(folder.iterdir()):
            break
        folder.rmdir()


def inside(base: Path, path: str) -> Path:
    if path.startswith("/") or ".." in path.split("/"):
        raise CopyFailed(f"{path!r} would lie outside {base}")
    return base / path


def check_link(base: Path, path: str, link: str) -> None:
    """Refuse a link to something outside the folder: what is written through it later must stay inside."""
    # By its text alone: the target may not have arrived yet.
    target = os.path.normpath(f"{Path(path).parent}/{link}")
    if link.startswith("/") or target.split("/")[0] == "..":
        raise CopyFailed(f"{path!r} is a link to {link!r}, which lies outside {base}")


def need_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CopyFailed("no room", needed=needed, free=free)


def remove_stale_parts(folder: Path) -> None:
    """Remove what a copy left whose machine lost power long ago."""
    for path in folder.glob(f".*{_PART}*"):
        if time.time() - path.lstat().st_mtime > _STALE_S:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _read_note(base: Path) -> dict[str, str]:
    try:
        files: dict[str, str] = json.loads((base / NOTE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return {}
    return files


def write_note(base: Path, note: dict[str, Any]) -> None:
    part = base / f"{NOTE}{_PART}{os.getpid()}"
    try:
        part.write_text(json.dumps(note), encoding="utf-8")
        part.replace(base / NOTE)
    finally:
        part.unlink(missing_ok=True)


def main() -> int:
    try:
        answer: dict[str, Any] = {"base": str(put(sys.stdin.buffer))}
    except CopyFailed as error:
        answer = {"error": str(error), **error.numbers}
    except OSError as error:
        answer = {"error": str(error), "full": error.errno in (errno.ENOSPC, errno.EDQUOT)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
