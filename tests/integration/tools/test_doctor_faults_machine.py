"""Faults of single machines, put into a lab: doctor names each, and what it prints cures it."""

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

from shoal.cluster.lab.lab import Lab
from tests.integration.cluster.test_hosts_setup import make_wheels
from tests.integration.cluster.test_hosts_ssh import Site, bare_python
from tests.support import programs
from tests.support.labs import mounted, own_clock, own_etc, run_on, shoal, standing_lab
from tests.support.needs import need_tool

pytestmark = pytest.mark.long

PORT = 29877
# For a doctor to find what is wrong, and for anything else.
_DEADLINE_S, _PATIENCE_S = 20, 90


@dataclass(frozen=True)
class Verdict:
    code: int
    findings: list[dict[str, Any]]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        return [finding for finding in self.findings if finding["severity"] != "info"]

    def only(self, id_: str, node: str, severity: str = "warning") -> dict[str, Any]:
        """The one thing that is wrong, which makes doctor say no."""
        assert self.code == 1
        assert [(found["id"], found["node"], found["severity"]) for found in self.complaints] == [(id_, node, severity)]
        (found,) = self.complaints
        assert found["evidence"]
        assert found["meaning"]
        assert found["retest"]
        return found

    def is_clean(self) -> bool:
        return (self.code, self.complaints) == (0, [])


@dataclass(frozen=True)
class Clinic:
    """A lab of patients; `folder` is the one we are in, and so where runs would be."""

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
        """Python on the node, once it said that it is ready."""
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
    with standing_lab(3, sshd=True) as found:
        yield found


@pytest.fixture
def clinic(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clinic:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return Clinic(lab, work)


def test_a_healthy_lab(clinic: Clinic) -> None:
    found = clinic.doctor("--port", str(PORT))
    assert found.is_clean(), found.complaints
    assert {finding["node"] for finding in found.findings if finding["id"] == "speed.cores"} == {
        "node1",
        "node2",
        "node3",
    }


# Names


def test_a_host_name_on_loopback(clinic: Clinic) -> None:
    with clinic.own_etc("node2") as etc:
        (etc / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node2\n" + without(clinic, "node2"))
        found = clinic.doctor().only("names.loopback", "node2")
        assert "node2 means 127.0.1.1" in found["evidence"]
        clinic.paste("node2", found["fix"])
        assert clinic.on("node2", "getent", "ahosts", "node2").stdout.startswith("10.77.0.2 ")
        assert clinic.doctor().is_clean()


def without(clinic: Clinic, name: str) -> str:
    """The lab's own hosts file, but for the plain line of one node."""
    lines = (clinic.lab.folder / "hosts").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.endswith(f" {name}\n") or line.startswith("::"))


@pytest.mark.long
def test_a_host_name_that_nobody_knows(clinic: Clinic) -> None:
    with clinic.own_etc("node3") as etc:
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + without(clinic, "node3").replace("::ffff:10.77.0.3", "#"))
        found = clinic.doctor().only("names.loopback", "node3")
        assert "node3 means nothing at all" in found["evidence"]
        clinic.paste("node3", found["fix"])
        assert clinic.doctor().is_clean()


def test_a_dead_name_server(clinic: Clinic) -> None:
    """Peers have plain lines in /etc/hosts, as people write them, and torch still asks the name server."""
    with clinic.own_etc("node1") as etc:
        (etc / "resolv.conf").unlink()
        (etc / "resolv.conf").write_text("nameserver 10.77.0.99\n")
        plain = [f"10.77.0.{number} node{number}" for number in (1, 2, 3)]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *plain]))
        found = clinic.doctor().only("names.reverse", "node1")
        assert "10.77.0.2 took" in found["evidence"]
        clinic.paste("node1", found["fix"])
        assert clinic.doctor().is_clean()


# Leftovers

_LISTEN = f"import socket\nserver = socket.create_server(('', {PORT}))"


def test_a_strangers_process_on_the_port(clinic: Clinic) -> None:
    with clinic.program("node1", _LISTEN):
        found = clinic.doctor("--port", str(PORT)).only("port.taken", "node1", "error")
        assert found["fix"] == "", "what is not ours is not ours to end"
        assert f"port {PORT} is taken: by process " in found["evidence"]
        assert "not shoal's" in found["meaning"]


def test_a_stale_process_of_shoal_on_the_port(clinic: Clinic) -> None:
    """Its run folder is gone, so that only its number is left to name it by."""
    with clinic.program("node1", _LISTEN, SHOAL_RUN=str(clinic.folder / "gone"), SHOAL_PART="rank-0") as stale:
        found = clinic.doctor("--port", str(PORT)).only("port.taken", "node1", "error")
        assert f"of shoal's run {clinic.folder}/gone" in found["evidence"]
        clinic.paste("node1", found["fix"])
        assert stale.wait(_PATIENCE_S) == -signal.SIGTERM
    assert clinic.doctor("--port", str(PORT)).is_clean()


def orphan(clinic: Clinic, node: str, **variables: str) -> None:
    """Its parent ends at once, and the node's first process has it."""
    script = 'exec setsid --fork "$0" -c "import time; time.sleep(300)" > /dev/null 2>&1'
    clinic.on(node, "sh", "-c", script, sys.executable, **variables)


def test_an_orphaned_rank_of_another_job(clinic: Clinic) -> None:
    orphan(clinic, "node2", RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.77.0.9")
    found = clinic.doctor().only("leftover.worker", "node2")
    assert "another torch job around 10.77.0.9" in found["evidence"]
    assert found["fix"].startswith("kill ")
    clinic.paste("node2", found["fix"])
    assert clinic.doctor().is_clean()


def test_an_orphaned_rank_of_a_run_of_shoal(clinic: Clinic) -> None:
    """A run folder that is still there: the run is stopped by its name."""
    run, path = clinic.folder / "run", f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run.mkdir()
    (run / "job.json").write_text("{}")
    orphan(clinic, "node3", SHOAL_RUN=str(run), SHOAL_PART="rank-0")
    found = clinic.doctor(PATH=path).only("leftover.worker", "node3")
    assert f"shoal's run {run} has no supervisor any more" in found["evidence"]
    assert found["fix"] == f"shoal stop {run}"
    clinic.paste("node3", found["fix"], PATH=path)
    assert clinic.doctor().is_clean()


@pytest.mark.long
def test_too_few_open_files(clinic: Clinic) -> None:
    """All nodes of a lab get their limits from the shell that doctor is typed into."""
    words = " ".join(programs.shoal_command("doctor", "--on", f"lab:{clinic.lab.name}", "--json", "--no-proof"))
    few = in_shell(clinic, f"ulimit -S -n 256; {words}")
    assert few.code == 1
    assert [(found["id"], found["node"]) for found in few.complaints] == [
        ("limits.files", f"node{number}") for number in (1, 2, 3)
    ]
    assert in_shell(clinic, f"ulimit -S -n 256; {few.complaints[0]['fix']}; {words}").is_clean()


def in_shell(clinic: Clinic, script: str) -> Verdict:
    words = [need_tool("sh"), "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S)
    return Verdict(done.returncode, json.loads(done.stdout)["findings"])


# Room and power


def test_disks_that_take_no_run(clinic: Clinic) -> None:
    """The folder that runs are in: full, small and closed. No command makes room; a person has to."""
    with ExitStack() as disks:
        for node, options in {"node1": "size=1m", "node2": "size=1g", "node3": "ro"}.items():
            disks.enter_context(clinic.mounted(node, "-t", "tmpfs", "-o", options, "tmpfs", str(clinic.folder)))
        found = clinic.doctor()
        assert found.code == 1
        wrong = {(each["node"], each["id"], each["severity"]): each for each in found.complaints}
        assert wrong.keys() == {
            ("node1", "disk.free", "error"),
            ("node2", "disk.free", "warning"),
            ("node3", "disk.readonly", "error"),
        }
        assert all(f"{clinic.folder}, which is for runs" in each["evidence"] for each in wrong.values())
        assert {each["fix"] for each in wrong.values()} == {""}
    assert clinic.doctor().is_clean()


@pytest.mark.long
def test_a_machine_on_battery(clinic: Clinic) -> None:
    """The kernel's own files, as a laptop has them; it is cured by hand."""
    supplies = Path("/sys/class/power_supply")
    if not supplies.is_dir():
        pytest.skip(f"there is no {supplies} to put a battery into")
    battery = clinic.folder / "supplies/BAT0"
    battery.mkdir(parents=True)
    for name, text in {"type": "Battery", "status": "Discharging", "capacity": "17"}.items():
        (battery / name).write_text(f"{text}\n")
    with clinic.mounted("node3", "--bind", str(battery.parent), str(supplies)):
        assert clinic.doctor().only("speed.battery", "node3")["evidence"] == "it runs on battery, 17% left"
        (battery / "status").write_text("Charging\n")
        assert clinic.doctor().is_clean()


# Clocks


def test_a_clock_that_is_ahead(clinic: Clinic) -> None:
    """Whoever keeps a clock right there is played by a script under the name of the command that calls it."""
    tools = clinic.folder / "tools"
    tools.mkdir()
    (tools / "timedatectl").write_text('#!/bin/sh\n[ "$*" = "set-ntp true" ] && echo +0 > /etc/faketimerc\n')
    (tools / "timedatectl").chmod(0o755)
    with own_clock(clinic.lab, "node2", clinic.folder / "etc-node2", "+40"):
        found = clinic.doctor().only("clock.offset", "node2")
        assert found["evidence"].startswith("its clock is 40 s ahead of the others")
        clinic.paste("node2", found["fix"], PATH=f"{tools}:{os.environ['PATH']}")
        assert clinic.doctor().is_clean()


# Versions


@pytest.mark.exhaustive
def test_another_torch(clinic: Clinic) -> None:
    """Over SSH, where each machine has a Python of its own. Their pip knows wheels of the right names and versions."""
    site = Site(clinic.lab, clinic.folder.parent)
    other = bare_python(site.folder / "other", torch="9.9.9")
    file = site.hosts_file(site.host("node1"), site.host("node2", python=other))
    found = over_ssh(site, file).only("sameness.torch", "node2", "error")
    assert found["evidence"].startswith("torch 9.9.9 on node2, 2.")
    with know_wheels(clinic, make_wheels(site.folder / "wheels")):
        clinic.paste("switch", found["fix"], PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert over_ssh(site, file).is_clean()


def test_no_torch_at_all(clinic: Clinic) -> None:
    """A machine with nothing but Python can be looked at all the same."""
    site = Site(clinic.lab, clinic.folder.parent)
    bare = bare_python(site.folder / "bare")
    file = site.hosts_file(site.host("node1"), site.host("node3", python=bare))
    found = over_ssh(site, file).only("sameness.torch", "node3", "error")
    assert (found["evidence"], found["fix"]) == (f"{bare} has no torch", f"shoal setup {file}")


def over_ssh(site: Site, file: Path) -> Verdict:
    done = site.run(*shoal("doctor", "--on", str(file), "--json", "--no-proof"))
    return Verdict(done.returncode, json.loads(done.stdout)["findings"])


@contextmanager
def know_wheels(clinic: Clinic, folder: Path) -> Iterator[None]:
    """In the settings of every session there: a lab has no way to any package index."""
    config = clinic.lab.folder / "ssh/sshd_config"
    before = config.read_text()
    config.write_text(f"{before}\nSetEnv PIP_NO_INDEX=1 PIP_FIND_LINKS={folder} PIP_CONFIG_FILE=/dev/null\n")
    reload_servers(clinic.lab)
    yield
    config.write_text(before)
    reload_servers(clinic.lab)


def reload_servers(lab: Lab) -> None:
    for node in lab.nodes:
        server = (lab.folder / f"ssh/{node.name}.pid").read_text().strip()
        subprocess.run(lab.command(node.name, ["kill", "-HUP", server]), check=True)
