"""A real SSH server on each node, with keys made for this lab alone. Pure: the commands, not their effect.

shoal lab exec switch -- ssh -F FOLDER/ssh/config node1
"""

from __future__ import annotations

import shlex
from pathlib import Path

from shoal.cluster.lab.spec import LabNode, LabSpec
from shoal.cluster.lab.steps import Await, Run, Step, Write
from shoal.cluster.lab.topology import Site, server


def ssh_folder(site: Site) -> Path:
    return site.folder / "ssh"


def make_keys(spec: LabSpec, site: Site) -> list[Step]:
    """One key to log in with, one by which all nodes prove who they are."""
    folder = ssh_folder(site)
    known = f"sed 's/^/* /' {_quoted(folder / 'host.pub')} > {_quoted(folder / 'known_hosts')}"
    return [
        Run(("mkdir", "-m", "700", str(folder))),
        *(Run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))) for key in ("host", "id")),
        Run(("cp", str(folder / "id.pub"), str(folder / "authorized_keys"))),
        Run(("sh", "-c", known)),
        Write(folder / "sshd_config", server_config(folder)),
        Write(folder / "config", client_config(spec, folder)),
    ]


def start_server(node: LabNode, site: Site) -> list[Step]:
    """Its sessions get an empty /run, as on another machine; sshd wants a folder of its own there, which the host may
    not have and which we do not leave behind."""
    folder, log = _quoted(ssh_folder(site)), _quoted(ssh_folder(site) / f"{node.name}.log")
    pid_file = ssh_folder(site) / f"{node.name}.pid"
    options = f"-o PidFile={_quoted(pid_file)} -o ListenAddress={node.address}"
    script = (
        f"mount --bind {folder} /mnt",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir -p /run/sshd {folder}",
        f"mount --bind /mnt {folder}",
        "umount /mnt",
        f'exec "$(command -v sshd)" -D -f {folder}/sshd_config -E {log} {options}',
    )
    words = ["unshare", "--mount", "sh", "-ec", "; ".join(script)]
    said = site.folder / f"{node.name}-sshd.log"
    return [
        Run(("rm", "-f", str(pid_file))),
        server(node.name, site, words, said),
        Await(pid_file, said),
    ]


def server_config(folder: Path) -> str:
    return "\n".join(
        (
            f"HostKey {folder}/host",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "Subsystem sftp internal-sftp",
        )
    )


def client_config(spec: LabSpec, folder: Path) -> str:
    lines: list[str] = []
    for node in spec.nodes:
        lines += [f"Host {node.name} {node.address}", f"  HostName {node.address}"]
    common = (
        "Host *",
        "  User root",
        f"  IdentityFile {folder}/id",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {folder}/known_hosts",
        "  GlobalKnownHostsFile none",
        "  StrictHostKeyChecking yes",
    )
    return "\n".join((*lines, *common))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
