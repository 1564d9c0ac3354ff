"""Read /proc: processes, their environment and sockets, and the machine's memory and processors.

Functions return an empty value for a file that is missing, unreadable, or belongs to a process that has ended. Those
that need the process to exist raise `OSError`. Standard library only: the collector of `shoal doctor` runs this on
machines where nothing else is installed.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import socket
import stat
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

PROC = Path("/proc")
Address = IPv4Address | IPv6Address

_COMMAND_CHARACTERS = 200
_COMMAND_TIMEOUT_S = 3.0
# Processes that adopt orphans. The kernel does not show which process asked to be a subreaper; these are known to.
_SUBREAPERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "conmon", "containerd-shim"}
_SHELLS = {"sh", "bash", "dash", "zsh", "fish", "ksh"}
# Indices into `stat_fields`.
_STATE, _PARENT, _SESSION, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS = 0, 1, 3, 11, 12, 19
_LISTEN = 0x0A  # TCP_LISTEN


def read_text(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path | str) -> int | None:
    """Return None also for `max` and any other text that is not a number."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def read_cpu_list(path: Path | str) -> set[int]:
    """Read a set of processors."""
    return parse_cpu_list(read_text(path))


def parse_cpu_list(text: str) -> set[int]:
    """Parse `0-3,8`, the kernel's notation for a set of processors; return an empty set for any other text."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return set()
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def read_cpuinfo(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo."""
    lines = read_text(PROC / "cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def read_meminfo(proc_root: Path = PROC) -> dict[str, int]:
    """Return /proc/meminfo, in bytes."""
    lines = (line.split() for line in read_text(proc_root / "meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def interface_counters(proc_root: Path = PROC) -> Iterator[tuple[str, list[str]]]:
    """Yield every interface of this network namespace with its counters: eight about receiving (bytes, packets, errs,
    drop, …), then the same about sending.

    Does not use /sys/class/net: an emulated node has its own eth0, and /sys may show the host's.
    """
    for line in read_text(proc_root / "self/net/dev").splitlines()[2:]:
        name, _, counters = line.partition(":")
        yield name.strip(), counters.split()


def command_output(argv: Sequence[str]) -> str:
    """Return what a program of the system prints, in English; empty when it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


# Processes


def all_pids(proc_root: Path = PROC) -> Iterator[int]:
    return (int(name) for name in os.listdir(proc_root) if name.isdigit())  # noqa: PTH208 - three times as fast


def list_pids() -> Iterator[int]:
    """Yield every other process of this machine, without those of containers that run on it."""
    own = pid_namespace(os.getpid())
    return (pid for pid in all_pids() if pid != os.getpid() and pid_namespace(pid) == own)


def pid_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return str((PROC / str(pid) / "ns/pid").readlink())
    return ""


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that the process was started with."""
    entries = (entry.partition("=") for entry in read_text(PROC / str(pid) / "environ").split("\0"))
    return {name: value for name, _, value in entries if name}


def stat_fields(pid: int, proc_root: Path = PROC) -> list[str]:
    """Return the fields of /proc/PID/stat from the process state on: the name before it may contain any character."""
    fields = read_text(f"{proc_root}/{pid}/stat").rpartition(")")[2].split()
    if len(fields) <= _START_TICKS:
        raise ProcessLookupError(f"process {pid} has ended")
    return fields


def cpu_ticks(stat: list[str]) -> int:
    """Return how long the process has computed, from its `stat_fields`."""
    return int(stat[_USER_TICKS]) + int(stat[_SYSTEM_TICKS])


def parent_of(pid: int) -> int:
    return int(stat_fields(pid)[_PARENT])


def owner_of(pid: int) -> int | None:
    """Return the user of a process; None for a set-user-ID program, whose environment is another user's."""
    lines = read_text(PROC / str(pid) / "status").splitlines()
    uids = next((set(line.split()[1:4]) for line in lines if line.startswith("Uid:")), set())
    if len(uids) != 1 or is_setuid(pid):
        return None
    return int(uids.pop())


def catches_signal(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal; False also for a process that cannot be read."""
    caught = re.search(r"(?m)^SigCgt:\s*([0-9a-f]+)$", read_text(f"/proc/{pid}/status"))
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def is_setuid(pid: int) -> bool:
    """Tell whether the process runs a set-user-ID or set-group-ID program; raise `OSError` when it is gone."""
    return bool((PROC / str(pid) / "exe").stat().st_mode & (stat.S_ISUID | stat.S_ISGID))


def describe_process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "command": command_line(pid), "age_s": age_s(pid), "stopped": stat_fields(pid)[_STATE] in "Tt"}


def command_words(pid: int) -> list[str]:
    """Return the arguments of a process; none for a zombie or a kernel thread."""
    text = read_text(PROC / str(pid) / "cmdline").rstrip("\0")
    return text.split("\0") if text else []


def command_line(pid: int) -> str:
    text = shlex.join(command_words(pid)) or read_text(PROC / str(pid) / "comm")
    return text if len(text) <= _COMMAND_CHARACTERS else text[: _COMMAND_CHARACTERS - 1] + "…"


def age_s(pid: int) -> float:
    """Return the age by the kernel's uptime: wall clocks are set, and some machines boot with a wrong one."""
    uptime_s = float(read_text(PROC / "uptime").split()[0])
    return max(0.0, uptime_s - int(stat_fields(pid)[_START_TICKS]) / os.sysconf("SC_CLK_TCK"))


def is_orphan(pid: int) -> bool:
    """Tell whether the parent has ended and a subreaper adopted the process.

    A parent 0 cannot be seen from here. A container's first process may be an interactive shell: what it starts shares
    its session and is not an orphan.
    """
    parent = int(stat_fields(pid)[_PARENT])
    name = read_text(PROC / str(parent) / "comm")
    if parent == 1:
        return not (name in _SHELLS and stat_fields(pid)[_SESSION] == stat_fields(1)[_SESSION])
    return parent > 1 and name in _SUBREAPERS


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# Sockets


@dataclass(frozen=True)
class TcpSocket:
    address: Address
    port: int
    peer: Address
    peer_port: int  # 0 while it listens
    is_listening: bool
    uid: int
    inode: int  # 0 when no process holds it any more


def parse_tcp_table(text: str) -> list[TcpSocket]:
    """Parse the text of /proc/net/tcp or tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [
        TcpSocket(
            *_parse_endpoint(row[1]), *_parse_endpoint(row[2]), int(row[3], 16) == _LISTEN, int(row[7]), int(row[9])
        )
        for row in rows
        if len(row) > 9
    ]


def _parse_endpoint(text: str) -> tuple[Address, int]:
    digits, _, port = text.partition(":")
    # Every four bytes are printed as one number in the machine's byte order.
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return plain_address(socket.inet_ntop(family, packed)), int(port, 16)


def plain_address(text: str) -> Address:
    """Return an IPv4 address for an IPv4-mapped one: torch's IPv6 sockets show a peer as ::ffff:10.77.0.1."""
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def fd_targets(pid: int) -> list[str]:
    """Return what each file descriptor of a process refers to; raise `OSError` when it is gone or not readable."""
    targets = []
    for entry in (PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or of another user
            targets.append(str(entry.readlink()))
    return targets


def tcp_sockets_of(pid: int) -> list[TcpSocket]:
    """Return the TCP sockets that a process holds; raise `OSError` when it is gone or not readable.

    They are looked up in the tables of its own network namespace: psutil's `net_connections` reads others.
    """
    targets = set(fd_targets(pid))
    tables = (read_text(PROC / str(pid) / "net" / name) for name in ("tcp", "tcp6"))  # no tcp6 in a kernel without IPv6
    return [entry for table in tables for entry in parse_tcp_table(table) if f"socket:[{entry.inode}]" in targets]


def unix_sockets_of(group: int, part: str) -> set[Path]:
    """Return the paths that contain `part`, of the Unix sockets that the processes of a group hold."""
    lines = (line.split() for line in read_text(PROC / "net/unix").splitlines()[1:])
    paths = {f"socket:[{words[6]}]": Path(words[7]) for words in lines if len(words) == 8 and part in words[7]}
    held: set[str] = set()
    for pid in all_pids() if paths else ():
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if os.getpgid(pid) == group:
                held |= paths.keys() & set(fd_targets(pid))
    return {paths[target] for target in held}


def find_listeners(port: int) -> list[dict[str, Any]]:
    """Return the sockets that listen at a port on any address, since torch's store binds all of them.

    `pid` is None when the process belongs to another user.
    """
    tables = (read_text(PROC / "net" / name) for name in ("tcp", "tcp6"))
    sockets = [
        entry for table in tables for entry in parse_tcp_table(table) if entry.is_listening and entry.port == port
    ]
    holders = _find_holders({f"socket:[{entry.inode}]" for entry in sockets})
    return [
        {"address": str(entry.address), "user": user_name(entry.uid), "pid": holders.get(f"socket:[{entry.inode}]")}
        for entry in sockets
    ]


def _find_holders(targets: set[str]) -> dict[str, int]:
    """Return the process that holds each of these descriptor targets."""
    holders: dict[str, int] = {}
    for pid in list_pids() if targets else ():
        with contextlib.suppress(OSError):
            holders |= dict.fromkeys(targets.intersection(fd_targets(pid)), pid)
    return holders
