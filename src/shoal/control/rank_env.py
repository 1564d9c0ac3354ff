"""Placement: which rank a process is and where its world meets, as environment variables.

The names are torchrun's, so that any script written for torchrun finds what it expects, plus a few of our own. This is
the only place that reads or writes them.
"""

from __future__ import annotations

import atexit
import contextlib
import getpass
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shoal.errors import UsageError
from shoal.run_folder import user_name

# The agent decides these two when it starts a rank: it knows who shares its folder, and holds the other end.
KEEPS_FILES = "SHOAL_KEEPS_FILES"
AGENT_FD = "SHOAL_AGENT_FD"

# Modules are never searched in the current folder, where another user may have put a `numpy.py`. `-P` holds for one
# process, the variable also for those it starts: torchrun's ranks, torch's compiler processes.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}

_SCRIPT_STORE = "shoal.sync.script_store"


@dataclass(frozen=True)
class Placement:
    """One rank's place in a world.

    `agent_fd` is a connection to this node's agent, inherited from it: the store by which the ranks meet. Without one
    they meet at `master_addr`; `store_is_served` then says that somebody outside the ranks (torchrun's agent, a parent
    process) already serves a store there.
    `keeps_files`: of the ranks that share a run folder, one keeps its checkpoints and its ledger. `link_mbps` is known
    where the launcher made the link itself.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str = "local"
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    agent_fd: int | None = None
    store_is_served: bool = False
    restarts: int = 0
    launcher: str = ""
    keeps_files: bool = True
    link_mbps: int | None = None

    @property
    def is_supervised(self) -> bool:
        """Whether a launcher started us, ours or torchrun's agent, and not a person or a shell."""
        return bool(self.launcher) or self.store_is_served

    def to_env(self) -> dict[str, str]:
        env = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "SHOAL_NODE": self.node,
            "SHOAL_LAUNCHER": self.launcher,
            # Always: one that is inherited from elsewhere would have every rank wait for a store that nobody serves.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store_is_served),
            KEEPS_FILES: str(int(self.keeps_files)),
        }
        if self.link_mbps is not None:
            env["SHOAL_LINK_MBPS"] = str(self.link_mbps)
        if self.agent_fd is not None:
            env[AGENT_FD] = str(self.agent_fd)
        return env

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Placement:
        """Where the environment says we are; with no `RANK` at all, alone in a world of one."""
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1)
        local_rank = _integer(env, "LOCAL_RANK", env.get("RANK"))
        placement = cls(
            rank=_integer(env, "RANK"),
            world_size=_integer(env, "WORLD_SIZE"),
            local_rank=local_rank,
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", env.get("WORLD_SIZE")),
            node=env.get("SHOAL_NODE", "local"),
            node_rank=_integer(env, "GROUP_RANK", "0"),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=_integer(env, "MASTER_PORT", "0"),
            agent_fd=_integer(env, AGENT_FD) if AGENT_FD in env else None,
            store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_integer(env, "TORCHELASTIC_RESTART_COUNT", "0"),
            launcher=env.get("SHOAL_LAUNCHER", ""),
            keeps_files=env.get(KEEPS_FILES, "1" if local_rank == 0 else "0") == "1",
            link_mbps=_integer(env, "SHOAL_LINK_MBPS") if "SHOAL_LINK_MBPS" in env else None,
        )
        placement._check()
        return placement

    def _check(self) -> None:
        """A world that was asked for must be able to form: never a quiet solo run."""
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"RANK={self.rank} does not fit WORLD_SIZE={self.world_size}",
                why="ranks count from 0 to WORLD_SIZE - 1",
                fix="start the script with torchrun",
            )
        if self.world_size > 1 and self.agent_fd is None and not (self.master_addr and self.master_port):
            raise UsageError(
                f"WORLD_SIZE={self.world_size}, but MASTER_ADDR or MASTER_PORT is not set",
                why="without them the ranks cannot find each other, and each would train alone",
                fix="start the script with torchrun, or set both to the address of rank 0",
            )


def _integer(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"the environment variable {name} is {text!r}, not a number",
            why="a launcher sets it for every rank",
            fix="start the script with torchrun, or unset RANK and WORLD_SIZE to run alone",
        ) from None


# SECTION control/private
# Folders that only this user can write to, and torch's caches in such a folder.
#
# torch runs what it finds in its compiler cache (it unpickles files and loads libraries), and by default keeps it in
# `/tmp/torchinductor_USER`. On a shared machine another user can create that folder first.


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


def script_store_command(address: str, port: int, fd: int) -> tuple[str, ...]:
    """What the first node's agent starts beside its ranks."""
    return (sys.executable, "-P", "-m", _SCRIPT_STORE, f"--address={address}", f"--port={port}", f"--fd={fd}")
