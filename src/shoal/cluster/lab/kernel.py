"""What this machine lets us do: as root or in a user namespace, with or without netem, nft and control groups."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.lab.commands import ControlGroups, read_groups
from shoal.cluster.lab.spec import LabNode, LabSpec
from shoal.errors import LabError, UsageError

# SECTION cluster/lab/tools
# Where the lab's tools are: Debian keeps tc, nft and sshd in a folder that an ordinary user's PATH does not name.


_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=search_path(_path(os.environ)))


def search_path(path: str) -> str:
    """The user's own folders first: whoever puts a tool of their own there wants that one."""
    return os.pathsep.join((path, *_unnamed(path)))


def with_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that calls the tools by name, as the printed commands do."""
    return {**environment, "PATH": search_path(_path(environment))}


def path_line() -> str:
    """The line of a printed script without which a shell like ours would not find the tools; nothing where it would."""
    unnamed = _unnamed(_path(os.environ))
    return f'export PATH="$PATH:{os.pathsep.join(unnamed)}"\n' if unnamed else ""


def reach_tools(argv: Sequence[str]) -> list[str]:
    """`argv`, so that it finds the tools whoever runs it, and with whatever PATH."""
    line = path_line()
    return ["sh", "-c", f'{line}exec "$@"', "sh", *argv] if line else list(argv)


def _unnamed(path: str) -> list[str]:
    """By what they are: in most places one of the two is a link to the other."""
    named = {os.path.realpath(folder) for folder in path.split(os.pathsep)}
    return [folder for folder in dict.fromkeys(map(os.path.realpath, _SYSTEM_FOLDERS)) if folder not in named]


def _path(environment: Mapping[str, str]) -> str:
    return environment.get("PATH", os.defpath)


_TRY_NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "set", "lo", "up")
_AS_ROOT_OF_OWN = ("--user", "--map-root-user")
_DEADLINE_S = 10
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


@dataclass(frozen=True)
class Features:
    rootless: bool
    netem: bool
    # A process can delay packets where there is no netem.
    delay_line: bool
    nft: bool
    sshd: bool
    groups: ControlGroups


def observe() -> Features:
    """Raises where no lab can be built at all, and says what forbids it."""
    need_tools(_PACKAGES)
    rootless = _must_be_rootless()
    netem = _has_netem(rootless)
    return Features(
        rootless,
        netem=netem,
        delay_line=not netem and _has_packet_sockets(rootless),
        nft=find_tool("nft") is not None,
        sshd=find_tool("sshd") is not None and find_tool("ssh-keygen") is not None,
        groups=read_groups(),
    )


def need_tools(packages: Mapping[str, str]) -> None:
    missing = [tool for tool in packages if find_tool(tool) is None]
    if missing:
        wanted = " ".join(dict.fromkeys(packages[tool] for tool in missing))
        raise UsageError(
            f"a lab needs {', '.join(missing)}, not installed here", fix=f"for example: sudo apt-get install {wanted}"
        )


def _must_be_rootless() -> bool:
    """Root may lack the right too, in a container; then the other way is tried before giving up."""
    if os.geteuid() == 0 and not _complaint(("unshare", *_TRY_NAMESPACES)):
        return False
    complaint = _complaint(("unshare", *_AS_ROOT_OF_OWN, *_TRY_NAMESPACES))
    if complaint:
        why, fix = why_forbidden(read_settings(), complaint, os.geteuid() == 0)
        raise LabError("this machine lets us make no network namespaces", why=why, fix=fix)
    return True


def why_forbidden(settings: Mapping[str, str], complaint: str, root: bool) -> tuple[str, str]:
    """The setting that forbids user namespaces, and what to type."""
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
        return f"{complaint}; a container without CAP_SYS_ADMIN", "start the container with --privileged"
    return f"{complaint}; a container or a security module forbids it", "run as root, or outside of the container"


def read_settings() -> dict[str, str]:
    found = {}
    for name in _SETTINGS:
        path = Path("/proc/sys") / name.replace(".", "/")
        if path.exists():
            found[name] = path.read_text(encoding="utf-8").strip()
    return found


def _has_netem(rootless: bool) -> bool:
    user = _AS_ROOT_OF_OWN if rootless else ()
    return not _complaint(("unshare", *user, "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "limit", "1"))


def _has_packet_sockets(rootless: bool) -> bool:
    user = _AS_ROOT_OF_OWN if rootless else ()
    program = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)"
    return not _complaint(("unshare", *user, "--net", sys.executable, "-I", "-S", "-c", program))


def _complaint(argv: tuple[str, ...]) -> str:
    """What a trial says when it fails; nothing when it works."""
    try:
        done = subprocess.run(
            argv,
            env=with_tools(os.environ),
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not answer"
    if done.returncode == 0:
        return ""
    return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{argv[0]} ended with {done.returncode}"


def substitutes(spec: LabSpec, features: Features) -> tuple[str, ...]:
    """What was asked for and is done in another way here."""
    said = []
    if features.delay_line and any(node.link.delay_s for node in spec.nodes):
        said.append("delay by a process that holds packets back, late by up to 1 ms: this kernel has no netem")
    if features.nft and not features.netem and any(node.link.loss for node in spec.nodes):
        said.append("loss by nftables: this kernel has no netem")
    return tuple(said)


def lacks(spec: LabSpec, features: Features) -> tuple[str, ...]:
    """What was asked for and cannot be had here, by name; the rest of the lab works."""
    said = []
    if not (features.netem or features.delay_line) and any(node.link.delay_s for node in spec.nodes):
        said.append("no delay: this kernel has no netem (sch_netem) and allows no packet sockets")
    if not (features.netem or features.nft) and any(node.link.loss for node in spec.nodes):
        said.append("no loss: neither netem nor nft")
    if features.groups.cpu is None and any(node.cpu for node in spec.nodes):
        said.append(f"no CPU limits: {_why_no_groups(features)}")
    if spec.sshd and not _can_serve_ssh(features):
        said.append("no SSH servers: they need root" if features.sshd else "no SSH servers: openssh-server is missing")
    return tuple(said)


def _why_no_groups(features: Features) -> str:
    if features.rootless:
        return "without root no control group is ours; run as root for them"
    return "no control group with a cpu controller can be made here"


def _can_serve_ssh(features: Features) -> bool:
    """A server in a user namespace has only one user to switch to, and refuses to begin."""
    return features.sshd and not features.rootless


def possible(spec: LabSpec, features: Features) -> LabSpec:
    """What of it can be had here, so that nothing later speaks of a delay that nobody feels."""
    nodes = tuple(_possible_node(node, features) for node in spec.nodes)
    return spec.model_copy(update={"nodes": nodes, "sshd": spec.sshd and _can_serve_ssh(features)})


def _possible_node(node: LabNode, features: Features) -> LabNode:
    link = node.link.model_copy(
        update={
            "delay_s": node.link.delay_s if features.netem or features.delay_line else 0.0,
            "loss": node.link.loss if features.netem or features.nft else 0.0,
        }
    )
    return node.model_copy(update={"link": link, "cpu": node.cpu if features.groups.cpu else None})
