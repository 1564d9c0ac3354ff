"""Processes as /proc shows them. What is gone by now, or not ours to look at, has nothing to say."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

# SECTION net/collector/reading
# Small files of the kernel and of /etc, which may be missing or closed to us: then there is nothing to say.


def read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path | str) -> int | None:
    """None also where it says `max` or something else that is no number."""
    try:
        return int(read(path))
    except ValueError:
        return None


def read_list(path: Path | str) -> set[int]:
    """`0-3,8` as the kernel writes sets of processors."""
    found: set[int] = set()
    for part in filter(None, read(path).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


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


# SECTION net/collector/ports
# Who listens at a port of this machine.


_LISTENING = "0A"
_ORDER: Literal["little", "big"] = sys.byteorder


def listeners(port: int) -> list[dict[str, Any]]:
    """On whichever address, since torch's store takes all of them. `pid` is None when it is not ours to see."""
    entries = list(_listening(port))
    owners = _owners({inode for _, _, inode in entries})
    return [{"address": address, "user": user_name(uid), "pid": owners.get(inode)} for address, uid, inode in entries]


def _listening(port: int) -> Iterator[tuple[str, int, str]]:
    """Address, user and inode of each socket that listens there."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in read(PROC / "net" / table).splitlines()[1:]:
            fields = line.split()
            place, _, number = fields[1].partition(":")
            if fields[3] == _LISTENING and int(number, 16) == port:
                yield _address(place, family), int(fields[7]), fields[9]


def _address(digits: str, family: int) -> str:
    """The kernel prints four bytes at a time, as a number in the machine's own order."""
    words = (int(digits[start : start + 8], 16) for start in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(word.to_bytes(4, _ORDER) for word in words))


def _owners(inodes: set[str]) -> dict[str, int]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, int] = {}
    for pid in pids() if wanted else ():
        with contextlib.suppress(OSError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = wanted.get(str(link.readlink()))
                    found |= {inode: pid} if inode else {}
    return found
