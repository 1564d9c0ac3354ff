"""Folders that only this user can write to, and torch's caches in such a folder.

torch runs what it finds in its compiler cache (it unpickles files and loads libraries), and by default keeps it in
`/tmp/torchinductor_USER`. On a shared machine another user can create that folder first.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shoal.errors import UsageError
from shoal.runfolder import user_name

# Variables by which a user names a folder from which torch loads code.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
_INDUCTOR = CACHE_VARIABLES[0]
_MOST_LINKS = 40
_ALL_USERS = 2**32 - 1


@dataclass(frozen=True)
class TorchCaches:
    """Where the ranks of this machine keep what torch compiles."""

    variables: dict[str, str]
    # What the user should know of it: that it is a temporary one, so that every run compiles anew, or that temporary
    # files go elsewhere; empty otherwise.
    note: str = ""


@cache
def torch_caches() -> TorchCaches:
    """Of this process and those it starts. UsageError when the user named a folder that other users can write to."""
    return choose_caches(os.environ)


def use_private_caches() -> None:
    """For a worker, however it was started: call it before torch computes the name of its cache folder.

    shoal's agents set the same variables for every process they start. This covers torchrun typed by hand.
    """
    os.environ.update(torch_caches().variables)
    # Python remembers the folder of its first look.
    tempfile.tempdir = None


def choose_caches(env: Mapping[str, str]) -> TorchCaches:
    for name in CACHE_VARIABLES:
        if env.get(name):
            _refuse_danger(name, Path(env[name]))
    try:
        root = make_private(user_cache(env) / "torch")
        variables, note = {}, ""
        if (danger := _claim_default(env)) is not None:
            variables["TMPDIR"] = str(make_private(root / "tmp"))
            note = f"temporary files of ranks go to {variables['TMPDIR']}: {danger}" if danger else ""
        if not env.get(_INDUCTOR):
            variables[_INDUCTOR] = str(make_private(root / "inductor"))
    except (OSError, RuntimeError) as error:
        note = f"torch's compiler cache is not kept after this run: {error}"
        # Triton and C++ extensions default to folders in the same home.
        root = _make_temporary()
        variables = {name: str(root / name.split("_")[0].lower()) for name in CACHE_VARIABLES if not env.get(name)}
        return TorchCaches({**variables, "TMPDIR": str(root)}, note)
    return TorchCaches(variables, note)


def _claim_default(env: Mapping[str, str]) -> str | None:
    """Creates torch's default cache folder before another user can. None: it is ours. Otherwise the danger that this
    user should know of; empty where the folder has another user's name, as after `su` or `sudo -E`.

    torch 2.13 keeps compiled headers, and more, in TMPDIR/torchinductor_USER whatever TORCHINDUCTOR_CACHE_DIR says.
    """
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):
        return ""
    folder = Path(env.get("TMPDIR") or tempfile.gettempdir()) / f"torchinductor_{user}"
    if user != user_name(os.geteuid()):
        return ""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if danger := find_danger(folder):
        return danger
    owner = folder.stat().st_uid
    return None if owner == os.geteuid() else f"{folder} belongs to user {user_name(owner)}"


def user_cache(env: Mapping[str, str]) -> Path:
    """Where the XDG rules put caches, which say to ignore a relative path. RuntimeError without a home folder."""
    named = env.get("XDG_CACHE_HOME", "")
    return (Path(named) if named.startswith("/") else Path.home() / ".cache") / "shoal"


def make_private(folder: Path) -> Path:
    """Creates the folder with mode 0700, or checks the one that is there. PermissionError when it is not safe, or not
    this user's: root with the HOME of another user must not create folders there."""
    for place in (*reversed(folder.parents), folder):
        if not os.path.lexists(place):
            if not os.access(place.parent, os.W_OK) or place.parent.stat().st_uid != os.geteuid():
                raise PermissionError(f"{place.parent} belongs to user {user_name(place.parent.stat().st_uid)}")
            place.mkdir(mode=0o700, exist_ok=True)
        elif danger := find_danger(place, is_last=place == folder):
            raise PermissionError(danger)
    if danger := find_danger(folder):
        raise PermissionError(danger)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {user_name(folder.stat().st_uid)}")
    # Checked above: no other user can replace it by now.
    folder.chmod(0o700)
    return folder


def find_danger(folder: Path, is_last: bool = True) -> str:
    """Why a user other than this one and root could put files into the folder; empty when none can.

    Looks at every folder and symbolic link on the way: who can rename a parent can replace what is in it. `is_last`
    false: the folder is itself on the way to another one, and may be sticky as /tmp is.
    """
    pending = list(reversed(folder.absolute().parts[1:]))
    place, links, overflow = Path("/"), 0, _overflow_user()
    while pending:
        part = pending.pop()
        if part == "..":
            place = place.parent
            continue
        place /= part
        try:
            facts = place.lstat()
            # In a user namespace the real root has no number, and neither has any other user: it is root's where only
            # root could have put it.
            is_roots = facts.st_uid == overflow and not place.parent.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP)
            trusted = {0, os.geteuid(), facts.st_uid} if is_roots else {0, os.geteuid()}
            if stat.S_ISLNK(facts.st_mode):
                target, links = place.readlink(), links + 1
                if facts.st_uid not in trusted:
                    return f"{place} is a symbolic link of user {user_name(facts.st_uid)}"
                if links > _MOST_LINKS:
                    return f"{folder} has too many symbolic links"
                pending.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
                place = Path("/") if target.is_absolute() else place.parent
                continue
        except OSError as error:
            return f"{place} cannot be examined: {error.strerror}"
        if danger := _danger_of(place, facts, trusted, is_last=is_last and not pending):
            return danger
    return ""


def _danger_of(place: Path, facts: os.stat_result, trusted: set[int], is_last: bool) -> str:
    if not stat.S_ISDIR(facts.st_mode):
        return f"{place} is not a folder"
    if facts.st_uid not in (trusted if not is_last else {0, os.geteuid()}):
        return f"{place} belongs to user {user_name(facts.st_uid)}"
    # In a sticky folder such as /tmp users can add entries, but not replace those of others.
    if not is_last and facts.st_mode & stat.S_ISVTX:
        return ""
    # A group with the number of the owner is the owner's own group, in which there is no one else by default.
    by_group = facts.st_mode & stat.S_IWGRP and facts.st_gid != facts.st_uid
    return f"other users can write to {place}" if by_group or facts.st_mode & stat.S_IWOTH else ""


def _overflow_user() -> int | None:
    """The number under which users outside of this user namespace appear; None outside of one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if int(Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2]) < _ALL_USERS:
            return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    return None


def _refuse_danger(name: str, folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if danger := find_danger(folder):
        raise UsageError(
            f"{name}={folder} cannot be used: {danger}",
            why="torch runs code that it finds there, so another user could run programs as you",
            fix=f"unset {name}, or set it to a folder of your own with mode 0700",
        )


def _make_temporary() -> Path:
    """Removed at this process's end."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-torch-"))
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits the handler, but not the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
