"""Find out what a lab can do on this machine: as root or in a user namespace, with netem, nft and control groups.

Debian keeps tc, nft and sshd in folders that an ordinary user's PATH does not have; they are searched too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal_lab.commands import ControlGroup, ControlGroups
from shoal_lab.errors import LabError, LabUsageError
from shoal_lab.spec import LabSpec, NodeSpec

_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
_TRY_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up")
_USER_NAMESPACE = ("--user", "--map-root-user")
_TRIAL_TIMEOUT_S = 10
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "setpriv": "util-linux",
    "hostname": "hostname",
}
_SETTINGS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)


# Tools


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=search_path(_path(os.environ)))


def search_path(path: str) -> str:
    """Add the system folders behind the user's own, where a tool of the user's choice may be."""
    return os.pathsep.join((path, *_missing_folders(path)))


def with_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that calls the tools by name, as the printed commands do."""
    return {**environment, "PATH": search_path(_path(environment))}


def path_line() -> str:
    """Return the line that a printed script needs so that a shell with this PATH finds the tools; empty if it does."""
    missing = _missing_folders(_path(os.environ))
    return f'export PATH="$PATH:{os.pathsep.join(missing)}"\n' if missing else ""


def reach_tools(argv: Sequence[str]) -> list[str]:
    """Return `argv` such that it finds the tools whatever PATH it is run with."""
    line = path_line()
    return ["sh", "-c", f'{line}exec "$@"', "sh", *argv] if line else list(argv)


def _missing_folders(path: str) -> list[str]:
    """Compare real paths: on most systems one of the system folders is a link to the other."""
    named = {os.path.realpath(folder) for folder in path.split(os.pathsep)}
    return [folder for folder in dict.fromkeys(map(os.path.realpath, _SYSTEM_FOLDERS)) if folder not in named]


def _path(environment: Mapping[str, str]) -> str:
    return environment.get("PATH", os.defpath)


def need_tools(packages: Mapping[str, str]) -> None:
    missing = [tool for tool in packages if find_tool(tool) is None]
    if missing:
        wanted = " ".join(dict.fromkeys(packages[tool] for tool in missing))
        raise LabUsageError(
            f"a lab needs {', '.join(missing)}, not installed here", fix=f"for example: sudo apt-get install {wanted}"
        )


# Features


@dataclass(frozen=True)
class Features:
    rootless: bool
    netem: bool
    delay_line: bool  # a process can delay packets, where there is no netem
    nft: bool
    sshd: bool
    groups: ControlGroups

    @property
    def can_delay(self) -> bool:
        return self.netem or self.delay_line

    @property
    def can_drop(self) -> bool:
        return self.netem or self.nft

    @property
    def can_serve_ssh(self) -> bool:
        """In a user namespace an SSH server has only one user to switch to, and refuses to start."""
        return self.sshd and not self.rootless


def find_features() -> Features:
    """Try what this machine allows. Raise the reason where no lab can be built at all."""
    need_tools(_PACKAGES)
    rootless = _must_be_rootless()
    unshare = ("unshare", *(_USER_NAMESPACE if rootless else ()), "--net")
    netem = not _try(*unshare, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "limit", "1")
    packet_socket = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)"
    return Features(
        rootless,
        netem=netem,
        delay_line=not netem and not _try(*unshare, sys.executable, "-I", "-S", "-c", packet_socket),
        nft=find_tool("nft") is not None,
        sshd=find_tool("sshd") is not None and find_tool("ssh-keygen") is not None,
        groups=read_groups(),
    )


def _must_be_rootless() -> bool:
    """Try a user namespace also as root, who may lack the right to make namespaces in a container."""
    if os.geteuid() == 0 and not _try("unshare", *_TRY_NAMESPACES):
        return False
    if message := _try("unshare", *_USER_NAMESPACE, *_TRY_NAMESPACES):
        paths = {name: Path("/proc/sys") / name.replace(".", "/") for name in _SETTINGS}
        settings = {name: path.read_text(encoding="utf-8").strip() for name, path in paths.items() if path.exists()}
        why, fix = why_forbidden(settings, message, os.geteuid() == 0)
        raise LabError("no network namespaces can be made on this machine", why=why, fix=fix)
    return True


def why_forbidden(settings: Mapping[str, str], message: str, root: bool) -> tuple[str, str]:
    """Return the setting that forbids user namespaces, and the command that changes it."""
    if settings.get("user.max_user_namespaces") == "0":
        return "user.max_user_namespaces is 0", "sudo sysctl -w user.max_user_namespaces=15000, or run as root"
    if settings.get("kernel.unprivileged_userns_clone") == "0":
        return (
            "kernel.unprivileged_userns_clone is 0, so only root may make them",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1, or run as root",
        )
    if settings.get("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return (
            "kernel.apparmor_restrict_unprivileged_userns is 1: a user namespace is allowed, but no rights in it",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run as root",
        )
    if root:
        return f"{message}; a container without CAP_SYS_ADMIN", "start the container with --privileged"
    return f"{message}; a container or a security module forbids it", "run as root, or outside of the container"


def _try(*argv: str) -> str:
    """Run a command; return its error message, or an empty text when it works."""
    try:
        done = subprocess.run(
            argv,
            env=with_tools(os.environ),
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not answer"
    if done.returncode == 0:
        return ""
    return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{argv[0]} ended with {done.returncode}"


# Control groups


def read_groups() -> ControlGroups:
    """Return the controllers that are mounted here and in which this user can make groups."""
    mounted = find_groups(Path("/proc/self/mounts").read_text(encoding="utf-8"), os.geteuid())
    return ControlGroups(
        cpu=mounted.cpu if _has_controller(mounted.cpu, "cpu") and _is_usable(mounted.cpu) else None,
        freezer=mounted.freezer if _is_usable(mounted.freezer) else None,
        memory=mounted.memory if _has_controller(mounted.memory, "memory") and _is_usable(mounted.memory) else None,
    )


def find_groups(mounts: str, uid: int) -> ControlGroups:
    """Find controllers in the text of /proc/self/mounts. Version 1 goes first: a controller it holds is not in 2."""
    v1: dict[str, ControlGroup] = {}
    v2: ControlGroup | None = None
    for fields in (line.split() for line in mounts.splitlines()):
        if len(fields) > 3 and fields[2] == "cgroup":
            v1.update({name: ControlGroup(parent=Path(fields[1]), version=1) for name in fields[3].split(",")})
        elif len(fields) > 3 and fields[2] == "cgroup2":
            # systemd delegates this group to an ordinary user.
            delegated = Path() if uid == 0 else Path(f"user.slice/user-{uid}.slice/user@{uid}.service")
            v2 = ControlGroup(parent=Path(fields[1]) / delegated, version=2)
    return ControlGroups(*(v1.get(name, v2) for name in ("cpu", "freezer", "memory")))


def _is_usable(group: ControlGroup | None) -> bool:
    """Try to make a group: permissions look right also for a read-only mount, a container or a missing controller."""
    if group is None:
        return False
    probe = group.parent / f"shoal-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        probe.rmdir()
    return True


def _has_controller(group: ControlGroup | None, name: str) -> bool:
    """A version 2 place without the controller can still freeze."""
    if group is None or group.version == 1:
        return group is not None
    try:
        return name in (group.parent / "cgroup.controllers").read_text(encoding="utf-8").split()
    except OSError:
        return False


# What a spec asks for and this machine does not have


def substitutes(spec: LabSpec, features: Features) -> tuple[str, ...]:
    """Describe what was asked for and is done in another way here."""
    notes = []
    if features.delay_line and any(node.link.delay_s for node in spec.nodes):
        notes.append("delay by a process that holds packets back, late by up to 1 ms: this kernel has no netem")
    if features.nft and not features.netem and any(node.link.loss for node in spec.nodes):
        notes.append("loss by nftables: this kernel has no netem")
    return tuple(notes)


def lacks(spec: LabSpec, features: Features) -> tuple[str, ...]:
    """Describe what was asked for and is impossible here; the rest of the lab works."""
    notes = []
    if not features.can_delay and any(node.link.delay_s for node in spec.nodes):
        notes.append("no delay: this kernel has no netem (sch_netem) and allows no packet sockets")
    if not features.can_drop and any(node.link.loss for node in spec.nodes):
        notes.append("no loss: neither netem nor nft")
    limits = (
        ("CPU", "cpu", features.groups.cpu, any(node.cpu for node in spec.nodes)),
        ("memory", "memory", features.groups.memory, any(node.memory_bytes for node in spec.nodes)),
    )
    for kind, controller, group, is_wanted in limits:
        if group is None and is_wanted:
            why = f"no control group with a {controller} controller can be made here"
            why = "without root no control group can be changed; run as root for them" if features.rootless else why
            notes.append(f"no {kind} limits: {why}")
    if spec.sshd and not features.can_serve_ssh:
        notes.append("no SSH servers: they need root" if features.sshd else "no SSH servers: openssh-server is missing")
    return tuple(notes)


def possible(spec: LabSpec, features: Features) -> LabSpec:
    """Remove from the spec what is impossible here, so that no later message names a delay that does not exist."""

    def reduced(node: NodeSpec) -> NodeSpec:
        delay_s = node.link.delay_s if features.can_delay else 0.0
        loss = node.link.loss if features.can_drop else 0.0
        cpu = node.cpu if features.groups.cpu else None
        memory_bytes = node.memory_bytes if features.groups.memory else None
        return replace(node, link=replace(node.link, delay_s=delay_s, loss=loss), cpu=cpu, memory_bytes=memory_bytes)

    nodes = tuple(reduced(node) for node in spec.nodes)
    return replace(spec, nodes=nodes, sshd=spec.sshd and features.can_serve_ssh)
