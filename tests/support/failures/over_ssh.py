"""Failures of SSH connections, on a lab whose nodes have SSH servers."""

from __future__ import annotations

import re
import subprocess

from shoal_lab.lab import Lab
from shoal_lab.spec import SWITCH
from tests.support.failures.bench import FIRST, Bench
from tests.support.failures.registry import on_lab
from tests.support.needs import need_tool

INVITATION = re.compile(r"10\.77\.0\.\d+:\d+#\S+")


def ssh(bench: Bench, lab: Lab, *options: str, to: str = FIRST) -> None:
    command = ["ssh", "-F", str(lab.folder / "ssh/config"), "-o", "BatchMode=yes", *options, to, "true"]
    bench.start(command, lab=lab, node=SWITCH)
    bench.wait(30)


@on_lab("ssh.denied")
def denied(bench: Bench, lab: Lab) -> None:
    ssh(bench, lab, "-o", "IdentityFile=none", "-F", "none", "-o", "StrictHostKeyChecking=no", to="root@10.77.0.1")


@on_lab("ssh.key-changed")
def key_changed(bench: Bench, lab: Lab) -> None:
    key_file = str(bench.folder / "other")
    subprocess.run([need_tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", key_file], check=True)
    key = (bench.folder / "other.pub").read_text(encoding="ascii")
    known = bench.write("known_hosts", f"10.77.0.1 {key}")
    ssh(bench, lab, "-o", f"UserKnownHostsFile={known}")


@on_lab("ssh.key-unknown")
def key_unknown(bench: Bench, lab: Lab) -> None:
    ssh(bench, lab, "-o", "UserKnownHostsFile=/dev/null")


@on_lab("ssh.refused")
def refused(bench: Bench, lab: Lab) -> None:
    ssh(bench, lab, "-p", "2222")


@on_lab("ssh.timeout")
def timed_out(bench: Bench, lab: Lab) -> None:
    lab.node(FIRST).set_firewall()
    ssh(bench, lab, "-o", "ConnectTimeout=3")


@on_lab("ssh.name")
def unknown_name(bench: Bench, lab: Lab) -> None:
    ssh(bench, lab, to="attic")
