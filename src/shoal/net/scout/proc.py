"""Processes as /proc shows them. What is gone by now, or not ours to look at, has nothing to say."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.net.scout.reading import read

PROC = Path("/proc")
_COMMAND_CHARACTERS = 200
# Processes that adopt orphans. The kernel does not tell who asked to be one, but these are known to.
_ADOPTERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "conmon", "containerd-shim"}
_SHELLS = {"sh", "bash", "dash", "zsh", "fish", "ksh"}


def pids() -> Iterator[int]:
    """All of this machine; those of containers on it are somebody else's to look after."""
    own = _namespace(os.getpid())
    numbers = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return (pid for pid in numbers if pid != os.getpid() and _namespace(pid) == own)


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str((PROC / str(pid) / "ns/pid").readlink())
    return ""


def variables(pid: int) -> dict[str, str]:
    """Those it was started with."""
    entries = (entry.partition("=") for entry in read(PROC / str(pid) / "environ").split("\0"))
    return {name: value for name, _, value in entries if name}


def owner_of(pid: int) -> int | None:
    """The user it runs as; None for a set-user-ID program, whose environment is that of another user."""
    lines = read(PROC / str(pid) / "status").splitlines()
    numbers = next((set(line.split()[1:4]) for line in lines if line.startswith("Uid:")), set())
    program = (PROC / str(pid) / "exe").stat()
    if len(numbers) != 1 or program.st_mode & (stat.S_ISUID | stat.S_ISGID):
        return None
    return int(numbers.pop())


def describe(pid: int) -> dict[str, Any]:
    state, *_ = _stat(pid)
    return {"pid": pid, "command": command(pid), "age_s": age_s(pid), "stopped": state in "Tt"}


def command(pid: int) -> str:
    words = read(PROC / str(pid) / "cmdline").rstrip("\0").split("\0")
    text = shlex.join(words) if words != [""] else read(PROC / str(pid) / "comm")
    return text if len(text) <= _COMMAND_CHARACTERS else text[: _COMMAND_CHARACTERS - 1] + "…"


def age_s(pid: int) -> float:
    """By the kernel's own count: clocks are set, and some machines begin with a wrong one."""
    up_s = float(read(PROC / "uptime").split()[0])
    return max(0.0, up_s - int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK"))


def is_orphan(pid: int) -> bool:
    """Its parent has ended and somebody who adopts orphans has it. A parent 0 is one that cannot be seen from here."""
    parent = int(_stat(pid)[1])
    name = read(PROC / str(parent) / "comm")
    if parent == 1:
        return not (name in _SHELLS and _session(pid) == _session(1))
    return parent > 1 and name in _ADOPTERS


def _session(pid: int) -> str:
    """A container's first process may be the shell that somebody types into: what it starts shares its session."""
    return _stat(pid)[3]


def _stat(pid: int) -> list[str]:
    """From the state on: what stands before it is a name, in which anything may occur."""
    fields = read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    if len(fields) < 20:
        raise ProcessLookupError(f"process {pid} has ended")
    return fields


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
