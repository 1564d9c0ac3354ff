"""The environment of a rank: its placement in the world, and private folders for torch's caches.

The placement variables are torchrun's, so that a script written for torchrun finds what it expects, plus a few of
shoal's own. Only this module reads and writes them.

torch executes what is in its compiler cache (it unpickles files and loads libraries), which by default is in
`/tmp/torchinductor_USER`. On a shared machine another user can create that folder first, so ranks use folders that only
this user can write to.
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

# The agent sets these two when it starts a rank: it knows which nodes share its folder, and has the other end.
KEEPS_FILES = "SHOAL_KEEPS_FILES"
AGENT_FD = "SHOAL_AGENT_FD"
# `shoal run` sets these two for a script that uses `shoal.Session`: the settings of the command line as JSON, and
# whether the training continues from its newest checkpoint.
SETTINGS = "SHOAL_SETTINGS"
# The agent's store for a session. Not `AGENT_FD`: a script may also use torch's own store, in the usual way.
SESSION_FD = "SHOAL_SESSION_FD"
RESUME = "SHOAL_RESUME"
# Set where a scheduler sends SIGTERM to all nodes of a job at once. Elsewhere a machine sends it before it is switched
# off, and the ranks of others can continue.
TERM_IS_FOR_ALL = "SHOAL_TERM_IS_FOR_ALL"
# The threads of a rank where the launcher chose their number: only then a rank may try others.
DEFAULT_THREADS = "SHOAL_DEFAULT_THREADS"

# Python never searches the current folder for modules: another user may have put a `numpy.py` there. `-P` applies to
# one process, the variable also to those it starts: torchrun's ranks, torch's compiler processes.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}

_SCRIPT_STORE = "shoal.sync.script_store"
# One rank of shoal's own training.
TRAINING = "shoal.train.worker"
# Runs a user's script and measures it.
MEASURE = "shoal.engine.measure"

# Variables by which a user sets a folder from which torch loads code.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
_INDUCTOR = CACHE_VARIABLES[0]
_MAX_LINKS = 40
_ALL_USERS = 2**32 - 1


@dataclass(frozen=True)
class Placement:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str = "local"
    node_rank: int = 0
    master_addr: str = ""  # where the ranks meet without `agent_fd`
    master_port: int = 0
    agent_fd: int | None = None  # an inherited connection to this node's agent, which serves the store
    store_is_served: bool = False  # a process other than the ranks (torchrun's agent, a parent) serves a store there
    restarts: int = 0
    launcher: str = ""
    keeps_files: bool = True  # of the ranks that share a run folder, one writes its checkpoints and its ledger
    link_mbps: int | None = None  # known where the launcher created the link

    @property
    def is_supervised(self) -> bool:
        """Whether a launcher started this rank, shoal's or torchrun's, and not a shell."""
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
            # Always set: with an inherited value every rank would wait for a store that no process serves.
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
        """Read the placement; without `RANK` and `WORLD_SIZE`, rank 0 of a world of one."""
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
        """Refuse a world that cannot form: it would become a solo run without an error."""
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


@dataclass(frozen=True)
class TorchCaches:
    variables: dict[str, str]
    # For the user: the cache is temporary, so that every run compiles again, or temporary files go elsewhere.
    note: str = ""


@cache
def torch_caches() -> TorchCaches:
    """Return the caches of this process and its children. UsageError if the user set a folder others can write to."""
    return choose_caches(os.environ)


def use_private_caches() -> None:
    """Set the cache variables in this process, before torch computes the name of its cache folder.

    shoal's agents set them for every process they start; this covers a worker that the user started with torchrun.
    """
    os.environ.update(torch_caches().variables)
    # Python caches the folder that it chose first.
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
    """Create torch's default cache folder before another user can.

    Return None if it is this user's, otherwise the danger; empty where the folder has another user's name, as after
    `su` or `sudo -E`. torch 2.13 keeps compiled headers, and more, in TMPDIR/torchinductor_USER whatever
    TORCHINDUCTOR_CACHE_DIR says.
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
    """Return the XDG cache folder; XDG says to ignore a relative path. RuntimeError without a home folder."""
    folder = env.get("XDG_CACHE_HOME", "")
    return (Path(folder) if folder.startswith("/") else Path.home() / ".cache") / "shoal"


def make_private(folder: Path) -> Path:
    """Create the folder with mode 0700, or check an existing one.

    PermissionError when it is not safe or not this user's: root with the HOME of another user must not create folders
    there.
    """
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
    # Checked above: no other user can replace it.
    folder.chmod(0o700)
    return folder


def find_danger(folder: Path, is_last: bool = True) -> str:
    """Return why a user other than this one and root could put files into the folder; empty when none can.

    Checks every folder and symbolic link on the path: a user who can rename a parent can replace its contents.
    `is_last` false: the folder is a parent of the one in question, and may be sticky as /tmp is.
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
            # In a user namespace neither the real root nor any other user outside has a number: a file is root's
            # where only root could have created it.
            is_roots = facts.st_uid == overflow and not place.parent.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP)
            trusted = {0, os.geteuid(), facts.st_uid} if is_roots else {0, os.geteuid()}
            if stat.S_ISLNK(facts.st_mode):
                target, links = place.readlink(), links + 1
                if facts.st_uid not in trusted:
                    return f"{place} is a symbolic link of user {user_name(facts.st_uid)}"
                if links > _MAX_LINKS:
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
    # A group with the owner's number is the owner's own group, which by default has no other user.
    by_group = facts.st_mode & stat.S_IWGRP and facts.st_gid != facts.st_uid
    return f"other users can write to {place}" if by_group or facts.st_mode & stat.S_IWOTH else ""


def _overflow_user() -> int | None:
    """Return the uid under which users outside this user namespace appear; None outside a namespace."""
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
    """Create a temporary folder that is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-torch-"))
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits the handler, but not the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def script_store_command(address: str, port: int, fd: int) -> tuple[str, ...]:
    """Return the command of the process that serves torch's store for a script's ranks, on the first node."""
    return (sys.executable, "-P", "-m", _SCRIPT_STORE, f"--address={address}", f"--port={port}", f"--fd={fd}")
