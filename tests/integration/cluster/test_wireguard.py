"""The recipe of docs/security.md on two emulated machines: training through a WireGuard tunnel.

Exercises docs/security.md, `shoal lab`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.control.processes import find_processes
from shoal.runs.manage import end_processes
from shoal_lab.lab import Lab
from tests.support.labs import running_lab
from tests.support.needs import need_tool
from tests.support.programs import TINY, read_jsonl, set_flags, shoal_command, steps_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

PORT = 51820


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Build a lab with an interface `wg0` on its first node. The tool may exist without support in the kernel."""
    need_tool("sshd")
    with running_lab(2, sshd=True) as built:
        if not built.state.spec.sshd:
            pytest.skip("; ".join(built.state.notes))
        tried = at(built, "node1", "ip", "link", "add", "wg0", "type", "wireguard")
        if tried.returncode:
            pytest.skip(f"the kernel has no WireGuard: {tried.stderr.strip()}")
        need_tool("wg")
        yield built


def at(lab: Lab, node: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = lab.command(node, [str(word) for word in words])
    return subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)


def done(lab: Lab, node: str, *words: str | Path) -> str:
    finished = at(lab, node, *words)
    assert finished.returncode == 0, f"{node}: {words}: {finished.stderr}"
    return finished.stdout.strip()


def key_pair(private: Path) -> str:
    """Write a private key to a file with mode 0600; return the public key."""
    wg = need_tool("wg")
    private.touch(0o600)
    private.write_text(subprocess.run([wg, "genkey"], capture_output=True, text=True, check=True).stdout)
    with private.open() as file:
        return subprocess.run([wg, "pubkey"], stdin=file, capture_output=True, text=True, check=True).stdout.strip()


def open_tunnel(lab: Lab, folder: Path) -> None:
    wg = need_tool("wg")
    done(lab, "node2", "ip", "link", "add", "wg0", "type", "wireguard")
    public = {number: key_pair(folder / f"key{number}") for number in (1, 2)}
    for number, other in ((1, 2), (2, 1)):
        node, endpoint = f"node{number}", f"{lab.nodes[other - 1].address}:{PORT}"
        peer = ("peer", public[other], "allowed-ips", f"10.8.0.{other}/32", "endpoint", endpoint)
        done(lab, node, wg, "set", "wg0", "private-key", folder / f"key{number}", "listen-port", str(PORT), *peer)
        done(lab, node, "ip", "address", "add", f"10.8.0.{number}/24", "dev", "wg0")
        done(lab, node, "ip", "link", "set", "wg0", "up")


def test_two_nodes_train_through_a_wireguard_tunnel(lab: Lab, tmp_path: Path) -> None:
    open_tunnel(lab, tmp_path)
    tables = [
        f'[[host]]\nhost = "node{number}"\naddress = "10.8.0.{number}"\ninterface = "wg0"\n'
        f'python = "{shoal_command()[0]}"\nfolder = "{tmp_path}/disk{number}"\n'
        for number in (1, 2)
    ]
    hosts, run = tmp_path / "hosts.toml", tmp_path / "run"
    hosts.write_text(f'ssh_config = "{lab.folder}/ssh/config"\n' + "".join(tables))
    try:
        words = shoal_command("train", "--out", run, "--on", hosts, "--steps", "5", *set_flags(*TINY))
        done(lab, "switch", *words)
    finally:
        end_processes([process for process in find_processes() if process.run.is_relative_to(tmp_path)])
    assert len(steps_of(run)) == 5
    for node in ("node1", "node2"):
        ready = [event for event in read_jsonl(run / "agents" / f"{node}.jsonl") if event["event"] == "ready"]
        assert [event["interface"] for event in ready] == ["wg0"]
        transfer = done(lab, node, need_tool("wg"), "show", "wg0", "transfer").split()
        assert min(int(count) for count in transfer[1:3]) > 10_000, "the gradients were not sent through the tunnel"
