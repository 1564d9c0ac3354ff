"""Faults of single machines in a lab: doctor reports every fault, and its printed command fixes it.

Exercises tools.doctor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal_lab.lab import Lab
from tests.integration.cluster.test_hosts_setup import make_wheels
from tests.integration.cluster.test_hosts_ssh import Site, bare_python
from tests.support import programs
from tests.support.labs import mounted, own_clock, own_etc, run_on, running_lab, shoal
from tests.support.needs import need_tool

pytestmark = pytest.mark.long

PORT = 29877
# Deadlines of doctor and of all other commands.
_DEADLINE_S, _LONG_DEADLINE_S = 20, 90


@dataclass(frozen=True)
class Verdict:
    code: int
    findings: list[dict[str, Any]]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        return [finding for finding in self.findings if finding["severity"] != "info"]

    def only(self, id_: str, node: str, severity: str = "warning") -> dict[str, Any]:
        """Return the only complaint; doctor must have failed because of it."""
        assert self.code == 1
        assert [(item["id"], item["node"], item["severity"]) for item in self.complaints] == [(id_, node, severity)]
        (finding,) = self.complaints
        assert finding["evidence"]
        assert finding["meaning"]
        assert finding["retest"]
        return finding

    def is_clean(self) -> bool:
        return (self.code, self.complaints) == (0, [])


@dataclass(frozen=True)
class DoctorLab:
    """A lab that doctor examines; `folder` is the current folder, where runs would be."""

    lab: Lab
    folder: Path

    def doctor(self, *words: str, **variables: str) -> Verdict:
        on = ("--on", f"lab:{self.lab.name}", "--json", "--no-proof")
        done = programs.shoal("doctor", *on, *words, cwd=self.folder, timeout_s=_DEADLINE_S, **variables)
        assert done.returncode in (0, 1), done.stderr
        return Verdict(done.returncode, json.loads(done.stdout)["findings"])

    def on(self, node: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_on(self.lab, node, *argv, **variables)

    def paste(self, node: str, fix: str, **variables: str) -> None:
        assert fix
        self.on(node, "sh", "-c", fix, **variables)

    def mounted(self, node: str, *words: str) -> AbstractContextManager[None]:
        return mounted(self.lab, node, *words)

    def own_etc(self, node: str) -> AbstractContextManager[Path]:
        return own_etc(self.lab, node, self.folder / f"etc-{node}")

    @contextmanager
    def program(self, node: str, script: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """Run a Python program on the node; yield it when it is ready."""
        words = self.lab.command(node, [sys.executable, "-c", f"{script}\nprint('ready', flush=True)\n{_WAIT}"])
        pipe, env = subprocess.PIPE, {**os.environ, **variables}
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
            process.communicate()


_WAIT = "import sys\nsys.stdin.read()"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    need_tool("ssh")
    need_tool("sshd")
    with running_lab(3, sshd=True) as lab:
        yield lab


@pytest.fixture
def doctor_lab(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DoctorLab:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return DoctorLab(lab, work)


def test_a_healthy_lab_has_no_complaint(doctor_lab: DoctorLab) -> None:
    verdict = doctor_lab.doctor("--port", str(PORT))
    assert verdict.is_clean(), verdict.complaints
    assert {finding["node"] for finding in verdict.findings if finding["id"] == "speed.cores"} == {
        "node1",
        "node2",
        "node3",
    }


# Names


def test_a_host_name_on_loopback_is_fixed(doctor_lab: DoctorLab) -> None:
    with doctor_lab.own_etc("node2") as etc:
        (etc / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node2\n" + without(doctor_lab, "node2"))
        finding = doctor_lab.doctor().only("names.loopback", "node2")
        assert "node2 means 127.0.1.1" in finding["evidence"]
        doctor_lab.paste("node2", finding["fix"])
        assert doctor_lab.on("node2", "getent", "ahosts", "node2").stdout.startswith("10.77.0.2 ")
        assert doctor_lab.doctor().is_clean()


def without(doctor_lab: DoctorLab, name: str) -> str:
    """Return the lab's hosts file without the IPv4 line of one node."""
    lines = (doctor_lab.lab.folder / "hosts").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(f" {name}\n") or line.startswith("::"))


@pytest.mark.long
def test_an_unknown_host_name_is_fixed(doctor_lab: DoctorLab) -> None:
    with doctor_lab.own_etc("node3") as etc:
        (etc / "hosts").write_text(
            "127.0.0.1 localhost\n" + without(doctor_lab, "node3").replace("::ffff:10.77.0.3", "#")
        )
        finding = doctor_lab.doctor().only("names.loopback", "node3")
        assert "node3 means nothing at all" in finding["evidence"]
        doctor_lab.paste("node3", finding["fix"])
        assert doctor_lab.doctor().is_clean()


def test_a_dead_name_server_is_fixed(doctor_lab: DoctorLab) -> None:
    """Peers have plain IPv4 lines in /etc/hosts, as users write them, and torch still queries the name server."""
    with doctor_lab.own_etc("node1") as etc:
        (etc / "resolv.conf").unlink()
        (etc / "resolv.conf").write_text("nameserver 10.77.0.99\n")
        plain = [f"10.77.0.{number} node{number}" for number in (1, 2, 3)]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *plain]))
        finding = doctor_lab.doctor().only("names.reverse", "node1")
        assert "10.77.0.2 took" in finding["evidence"]
        doctor_lab.paste("node1", finding["fix"])
        assert doctor_lab.doctor().is_clean()


# Leftovers

_LISTEN = f"import socket\nserver = socket.create_server(('', {PORT}))"


def test_a_foreign_process_on_the_port_is_reported_without_a_fix(doctor_lab: DoctorLab) -> None:
    with doctor_lab.program("node1", _LISTEN):
        finding = doctor_lab.doctor("--port", str(PORT)).only("port.taken", "node1", "error")
        assert finding["fix"] == "", "doctor must not end a foreign process"
        assert f"port {PORT} is taken: by process " in finding["evidence"]
        assert "not shoal's" in finding["meaning"]


def test_a_stale_shoal_process_on_the_port_is_fixed(doctor_lab: DoctorLab) -> None:
    """Its run folder is gone, so the fix names it by its pid."""
    with doctor_lab.program("node1", _LISTEN, SHOAL_RUN=str(doctor_lab.folder / "gone"), SHOAL_PART="rank-0") as stale:
        finding = doctor_lab.doctor("--port", str(PORT)).only("port.taken", "node1", "error")
        assert f"of shoal's run {doctor_lab.folder}/gone" in finding["evidence"]
        doctor_lab.paste("node1", finding["fix"])
        assert stale.wait(_LONG_DEADLINE_S) == -signal.SIGTERM
    assert doctor_lab.doctor("--port", str(PORT)).is_clean()


def start_orphan(doctor_lab: DoctorLab, node: str, **variables: str) -> None:
    """Start a process whose parent ends at once, so that the node's first process adopts it."""
    script = 'exec setsid --fork "$0" -c "import time; time.sleep(300)" > /dev/null 2>&1'
    doctor_lab.on(node, "sh", "-c", script, sys.executable, **variables)


def test_an_orphaned_rank_of_another_job_is_fixed(doctor_lab: DoctorLab) -> None:
    start_orphan(doctor_lab, "node2", RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.77.0.9")
    finding = doctor_lab.doctor().only("leftover.worker", "node2")
    assert "another torch job around 10.77.0.9" in finding["evidence"]
    assert finding["fix"].startswith("kill ")
    doctor_lab.paste("node2", finding["fix"])
    assert doctor_lab.doctor().is_clean()


def test_an_orphaned_rank_of_a_shoal_run_is_fixed(doctor_lab: DoctorLab) -> None:
    """The run folder still exists: the fix stops the run by its folder."""
    run, path = doctor_lab.folder / "run", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run.mkdir()
    (run / "job.json").write_text("{}")
    start_orphan(doctor_lab, "node3", SHOAL_RUN=str(run), SHOAL_PART="rank-0")
    finding = doctor_lab.doctor(PATH=path).only("leftover.worker", "node3")
    assert f"shoal's run {run} has no supervisor any more" in finding["evidence"]
    assert finding["fix"] == f"shoal stop {run}"
    doctor_lab.paste("node3", finding["fix"], PATH=path)
    assert doctor_lab.doctor().is_clean()


@pytest.mark.long
def test_a_low_open_file_limit_is_fixed(doctor_lab: DoctorLab) -> None:
    """All nodes of a lab inherit their limits from the shell that runs doctor."""
    words = " ".join(programs.shoal_command("doctor", "--on", f"lab:{doctor_lab.lab.name}", "--json", "--no-proof"))
    few = doctor_in_shell(doctor_lab, f"ulimit -S -n 256; {words}")
    assert few.code == 1
    assert [(finding["id"], finding["node"]) for finding in few.complaints] == [
        ("limits.files", f"node{number}") for number in (1, 2, 3)
    ]
    assert doctor_in_shell(doctor_lab, f"ulimit -S -n 256; {few.complaints[0]['fix']}; {words}").is_clean()


def doctor_in_shell(doctor_lab: DoctorLab, script: str) -> Verdict:
    words = [need_tool("sh"), "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LONG_DEADLINE_S)
    return Verdict(done.returncode, json.loads(done.stdout)["findings"])


# Disk space and power


def test_unusable_disks_are_reported_without_a_fix(doctor_lab: DoctorLab) -> None:
    """Make the folder of runs full, small and read-only. No command can free space; the user has to."""
    with ExitStack() as disks:
        for node, options in {"node1": "size=1m", "node2": "size=1g", "node3": "ro"}.items():
            disks.enter_context(doctor_lab.mounted(node, "-t", "tmpfs", "-o", options, "tmpfs", str(doctor_lab.folder)))
        verdict = doctor_lab.doctor()
        assert verdict.code == 1
        wrong = {(item["node"], item["id"], item["severity"]): item for item in verdict.complaints}
        assert wrong.keys() == {
            ("node1", "disk.free", "error"),
            ("node2", "disk.free", "warning"),
            ("node3", "disk.readonly", "error"),
        }
        assert all(f"{doctor_lab.folder}, which is for runs" in finding["evidence"] for finding in wrong.values())
        assert {finding["fix"] for finding in wrong.values()} == {""}
    assert doctor_lab.doctor().is_clean()


@pytest.mark.long
def test_a_machine_on_battery_is_reported(doctor_lab: DoctorLab) -> None:
    """Provide the kernel's files of a laptop battery; the user connects the power."""
    supplies = Path("/sys/class/power_supply")
    if not supplies.is_dir():
        pytest.skip(f"there is no {supplies} to put a battery into")
    battery = doctor_lab.folder / "supplies/BAT0"
    battery.mkdir(parents=True)
    for name, text in {"type": "Battery", "status": "Discharging", "capacity": "17"}.items():
        (battery / name).write_text(f"{text}\n")
    with doctor_lab.mounted("node3", "--bind", str(battery.parent), str(supplies)):
        assert doctor_lab.doctor().only("speed.battery", "node3")["evidence"] == "it runs on battery, 17% left"
        (battery / "status").write_text("Charging\n")
        assert doctor_lab.doctor().is_clean()


# Clocks


def test_a_clock_that_is_ahead_is_fixed(doctor_lab: DoctorLab) -> None:
    """A script under the name of `timedatectl` stands in for the time service."""
    tools = doctor_lab.folder / "tools"
    tools.mkdir()
    (tools / "timedatectl").write_text('#!/bin/sh\n[ "$*" = "set-ntp true" ] && echo +0 > /etc/faketimerc\n')
    (tools / "timedatectl").chmod(0o755)
    with own_clock(doctor_lab.lab, "node2", doctor_lab.folder / "etc-node2", "+40"):
        finding = doctor_lab.doctor().only("clock.offset", "node2")
        assert finding["evidence"].startswith("its clock is 40 s ahead of the others")
        doctor_lab.paste("node2", finding["fix"], PATH=f"{tools}:{os.environ['PATH']}")
        assert doctor_lab.doctor().is_clean()


# Versions


@pytest.mark.exhaustive
def test_a_different_torch_version_is_fixed(doctor_lab: DoctorLab) -> None:
    """Run over SSH, where every machine has its own Python. Its pip finds wheels of the right names and versions."""
    site = Site(doctor_lab.lab, doctor_lab.folder.parent)
    other = bare_python(site.folder / "other", torch="9.9.9")
    file = site.hosts_file(site.host("node1"), site.host("node2", python=other))
    finding = over_ssh(site, file).only("sameness.torch", "node2", "error")
    assert finding["evidence"].startswith("torch 9.9.9 on node2, 2.")
    with offer_wheels(doctor_lab, make_wheels(site.folder / "wheels")):
        doctor_lab.paste("switch", finding["fix"], PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert over_ssh(site, file).is_clean()


def test_a_missing_torch_is_reported_with_setup_as_fix(doctor_lab: DoctorLab) -> None:
    """A machine that has only Python can be examined too."""
    site = Site(doctor_lab.lab, doctor_lab.folder.parent)
    bare = bare_python(site.folder / "bare")
    file = site.hosts_file(site.host("node1"), site.host("node3", python=bare))
    finding = over_ssh(site, file).only("sameness.torch", "node3", "error")
    assert (finding["evidence"], finding["fix"]) == (f"{bare} has no torch", f"shoal setup {file}")


def over_ssh(site: Site, file: Path) -> Verdict:
    done = site.run(*shoal("doctor", "--on", str(file), "--json", "--no-proof"))
    return Verdict(done.returncode, json.loads(done.stdout)["findings"])


@contextmanager
def offer_wheels(doctor_lab: DoctorLab, folder: Path) -> Iterator[None]:
    """Set pip's variables in every SSH session: a lab cannot reach a package index."""
    config = doctor_lab.lab.folder / "ssh/sshd_config"
    before = config.read_text()
    config.write_text(f"{before}\nSetEnv PIP_NO_INDEX=1 PIP_FIND_LINKS={folder} PIP_CONFIG_FILE=/dev/null\n")
    reload_servers(doctor_lab.lab)
    yield
    config.write_text(before)
    reload_servers(doctor_lab.lab)


def reload_servers(lab: Lab) -> None:
    for node in lab.nodes:
        server = (lab.folder / f"ssh/{node.name}.pid").read_text().strip()
        subprocess.run(lab.command(node.name, ["kill", "-HUP", server]), check=True)
