"""Copy to a host what it lacks: shoal itself, the user's project, single files. Digests tell what is there already."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shoal
import shoal_lab
from shoal.cluster.hosts.facts import HostFacts, HostQuery, program
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import run_script, variables
from shoal.errors import HostError, UsageError
from shoal.units import format_si

MOST_PROJECT_BYTES = 256_000_000
# ssh itself notices a dead connection much earlier; this only ends a copy that makes no sense any more.
_COPY_TIMEOUT_S = 3600.0
_CHUNK = 1 << 20
_SKIPPED_FOLDERS = ("runs", "__pycache__", "node_modules")


@dataclass(frozen=True)
class CopyFile:
    path: str  # below the folder on the host
    source: Path
    size: int
    mode: int
    link: str | None  # the target of a symbolic link, which has no bytes
    digest: str


@dataclass(frozen=True)
class FileBundle:
    """Files that belong together."""

    name: str  # of the folder on the host
    pieces: tuple[CopyFile, ...]
    left_out: tuple[str, ...] = ()  # links that lead outside the project

    @property
    def listing(self) -> dict[str, str]:
        return {piece.path: piece.digest for piece in self.pieces}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.listing, sort_keys=True).encode()).hexdigest()


def code_bundle() -> FileBundle:
    """Return the running packages of shoal, named by their content."""
    packages = (Path(shoal.__file__).parent, Path(shoal_lab.__file__).parent)
    pieces = tuple(
        make_piece(path, str(path.relative_to(package.parent)))
        for package in packages
        for path in sorted(package.rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    )
    return FileBundle(FileBundle("", pieces).digest[:16], pieces)


def project_bundle(folder: Path) -> FileBundle:
    """Return the files that git lists, or all that do not look like an environment, a cache or a result."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise UsageError(f"there is no project folder {folder}", fix="name one: --project FOLDER, or: --no-project")
    paths = _list_with_git(folder)
    paths = sorted(_walk(folder, folder) if paths is None else paths)
    # A link may lead to a key or a password outside the project, which must never be sent.
    outside = [path for path in paths if _leads_outside(folder / path, folder)]
    paths = [path for path in paths if path not in set(outside)]
    _refuse_too_much(folder, paths)
    # With this machine's name: another machine may have a project at the same path.
    place = hashlib.sha256(f"{socket.gethostname()}:{folder}".encode()).hexdigest()
    pieces = tuple(make_piece(folder / path, path, folder) for path in paths)
    return FileBundle(f"{folder.name}-{place[:8]}", pieces, tuple(outside))


def project_of(folder: Path) -> Path | None:
    """Return the top folder of the git project that a folder is in."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(top.removesuffix(b"\n"))) if top else None


def make_piece(source: Path, path: str, folder: Path | None = None) -> CopyFile:
    """Describe a file. A link inside `folder` stays a link; without a folder it is the file it leads to."""
    if folder is not None and _leads_outside(source, folder):
        raise UsageError(
            f"{source} leads outside {folder}",
            why="the file it leads to would be copied to every host",
            fix=f"remove the link, or put the file itself into the project: ls -l {source}",
        )
    if folder is not None and _leads_inside(source, folder):
        link = os.path.relpath(source.resolve(), source.parent.resolve())
        return CopyFile(path, source, 0, 0o777, link, f"-> {link}")
    status = source.stat()
    mode = 0o755 if status.st_mode & 0o100 else 0o644
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return CopyFile(path, source, status.st_size, mode, None, f"{digest} {mode:o}")


def lone_piece(source: Path, path: str) -> CopyFile:
    """Describe a file whose digest the caller knows, so that it is not read twice."""
    return CopyFile(path, source, source.stat().st_size, 0o644, None, "")


def stream(order: dict[str, Any], pieces: Iterable[CopyFile]) -> Iterator[bytes]:
    """Yield what `remote_copy.py` reads."""
    pieces = list(pieces)
    files = [[piece.path, piece.size, piece.mode, piece.link] for piece in pieces]
    yield json.dumps({**order, "files": files}).encode() + b"\n"
    for piece in pieces:
        if piece.link is not None:
            continue
        remaining, digest = piece.size, hashlib.sha256()
        with piece.source.open("rb") as file:
            while remaining and (chunk := file.read(min(remaining, _CHUNK))):
                digest.update(chunk)
                remaining -= len(chunk)
                yield chunk
        if remaining:
            raise UsageError(f"{piece.source} became shorter while it was copied", fix="run the same command again")
        yield digest.hexdigest().encode()


def _list_with_git(folder: Path) -> list[str] | None:
    """Return None when git does not know it. The results in runs/ are left out even where git does not ignore them."""
    tracked = _git(folder, "ls-files", "-z", "--cached")
    untracked = _git(folder, "ls-files", "-z", "--others", "--exclude-standard")
    if tracked is None or untracked is None:
        return None
    paths = []
    for name in _names(tracked) | {name for name in _names(untracked) if not name.startswith("runs/")}:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            # A submodule, or a project within the project.
            paths += [f"{name.rstrip('/')}/{inner}" for inner in _list_with_git(path) or ()]
        elif _is_content(path, folder):
            paths.append(name)
    return paths


def _walk(folder: Path, top: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if not (path.name.startswith(".") or path.name in _SKIPPED_FOLDERS or (path / "pyvenv.cfg").exists()):
                yield from _walk(path, top)
        elif _is_content(path, top):
            yield str(path.relative_to(top))


def _is_content(path: Path, folder: Path) -> bool:
    """Leave out tracked files that were deleted, sockets, and links to folders outside."""
    return path.is_file() or _leads_inside(path, folder)


def _leads_inside(path: Path, folder: Path) -> bool:
    return path.is_symlink() and path.resolve().is_relative_to(folder)


def _leads_outside(path: Path, folder: Path) -> bool:
    """Tell whether a link, or a file in a linked folder, lies outside."""
    return not path.resolve().is_relative_to(folder)


def describe_left_out(project: FileBundle) -> str:
    """Name the links that were not copied, for the user; empty for none."""
    if not project.left_out:
        return ""
    named = ", ".join(project.left_out[:5]) + (" and more" if len(project.left_out) > 5 else "")
    return f"links that lead outside the project are not copied to the hosts: {named}"


def _names(listing: bytes) -> set[str]:
    return {os.fsdecode(name) for name in listing.split(b"\0") if name}


def _git(folder: Path, *words: str) -> bytes | None:
    try:
        argv = ("git", "-C", str(folder), *words)
        done = subprocess.run(argv, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _refuse_too_much(folder: Path, paths: list[str]) -> None:
    sizes = {path: (folder / path).stat().st_size for path in paths if not _leads_inside(folder / path, folder)}
    if sum(sizes.values()) <= MOST_PROJECT_BYTES:
        return
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    named = ", ".join(f"{path} ({format_si(sizes[path], 'B')})" for path in largest)
    raise UsageError(
        f"the project {folder} has {format_si(sum(sizes.values()), 'B')}, more than "
        f"{format_si(MOST_PROJECT_BYTES, 'B')} to copy to every host",
        why=f"the largest files are {named}",
        fix="add what a run does not need to .gitignore, or leave the project out: --no-project",
    )


# Send to a host


def question(
    code: FileBundle | None = None, project: FileBundle | None = None, files: Mapping[str, Path] = {}
) -> HostQuery:
    return HostQuery(
        code=code.name if code else "-",
        project=project.name if project else "",
        project_digest=project.digest if project else "",
        files={_data_name(digest, local): local.stat().st_size for digest, local in files.items()},
    )


def ensure_code(host: Host, spec: HostsSpec, facts: HostFacts, code: FileBundle) -> str:
    """Return the PYTHONPATH with which the host runs the same shoal as here. `facts` must be about the same code."""
    if is_here(host):
        return str(Path(shoal.__file__).parent.parent)
    place = f"{facts.folder}/code/{code.name}"
    return place if facts.has_code else send(host, spec, facts, place, code.pieces, {"whole": True})


def ensure_project(host: Host, spec: HostsSpec, folder: Path, facts: HostFacts, project: FileBundle) -> str:
    """Return where the host has the project as it is here. Only files that shoal put there are replaced or removed."""
    if is_here(host):
        return str(folder.resolve())
    place = f"{facts.folder}/projects/{project.name}"
    if facts.project_digest == project.digest:
        return place
    changed = [piece for piece in project.pieces if facts.project_files.get(piece.path) != piece.digest]
    removed = [path for path in facts.project_files if path not in project.listing]
    note = {"digest": project.digest, "files": project.listing}
    return send(host, spec, facts, place, changed, {"remove": removed, "note": note})


def put_file(host: Host, spec: HostsSpec, local: Path, digest: str, facts: HostFacts) -> str:
    """Return where the host has the file. It is not sent when the host has a file of that digest and size."""
    if is_here(host):
        return str(local)
    name = _data_name(digest, local)
    if name not in facts.files:
        send(host, spec, facts, f"{facts.folder}/data", [lone_piece(local, name)])
    return f"{facts.folder}/data/{name}"


def _data_name(digest: str, local: Path) -> str:
    return f"{digest}{local.suffix}"


def send(
    host: Host, spec: HostsSpec, facts: HostFacts, base: str, pieces: Iterable[CopyFile], order: Mapping[str, Any] = {}
) -> str:
    """Write files to a folder on the host and return the folder. See `remote_copy.py` for `order`."""
    script = (
        variables(program=program("remote_copy"), python=facts.pythons[0].executable)
        + 'cd /\nexec "$python" -E -c "$program"'
    )
    order = {"base": base, "whole": False, "remove": [], "note": None, **order}
    done = run_script(host, spec, script, stream(order, pieces), deadline_s=_COPY_TIMEOUT_S)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": done.stderr.strip() or f"it ended with {done.returncode}"}
    if "error" in answer:
        raise _cannot_copy(host, base, answer)
    return str(answer["base"])


def _cannot_copy(host: Host, base: str, answer: Mapping[str, Any]) -> HostError:
    if "needed" in answer:
        return HostError(
            f"{host.name} has no room: {base} needs {format_si(answer['needed'], 'B')}, and "
            f"{format_si(answer['free'], 'B')} are free",
            fix=f"make room on that machine: df -h {base}",
        )
    if answer.get("full"):
        return HostError(
            f"the disk of {host.name} is full", why=answer["error"], fix=f"make room on that machine: df -hi {base}"
        )
    return HostError(
        f"cannot copy to {base} on {host.name}", why=answer["error"], fix=f"look at it there: ls -ld {base}"
    )
