"""Hosts over real SSH, with a server on each node of a lab: successful logins and all known failures.

Exercises cluster.hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.cluster.hosts.ssh import RemoteScript, run_script
from shoal.errors import HostError
from shoal_lab.lab import Lab
from tests.support.labs import running_lab, shoal
from tests.support.needs import need_tool
from tests.support.waiting import wait_until

_READY = """
import json, sys
from pathlib import Path
from shoal.cluster.hosts.setup import make_ready
from shoal.cluster.hosts.spec import read_hosts
from shoal.errors import ShoalError
files = {digest: Path(local) for digest, local in json.loads(sys.argv[3]).items()}
try:
    ready = make_ready(read_hosts(Path(sys.argv[1])), Path(sys.argv[2]) if sys.argv[2] else None, files)
except ShoalError as error:
    sys.exit(error.render())
keys = ("here", "address", "interface", "python", "pythonpath", "project", "files", "runs")
print(json.dumps([{"name": state.host.name, **{key: getattr(state, key) for key in keys}} for state in ready]))
"""


@dataclass(frozen=True)
class Site:
    """Hold a lab with SSH servers; each host has its own folder, which stands for its disk."""

    lab: Lab
    folder: Path

    def hosts_file(self, *hosts: str, config: Path | None = None, name: str = "hosts.toml") -> Path:
        file = self.folder / name
        tables = "".join(f"[[host]]\n{host}\n" for host in hosts)
        file.write_text(f'ssh_config = "{config or self.lab.folder / "ssh/config"}"\n{tables}')
        return file

    def host(self, node: str, folder: Path | None = None, python: str = sys.executable, **more: str) -> str:
        settings = {"host": node, "python": python, "folder": str(folder or self.folder / node), **more}
        return "\n".join(f'{key} = "{value}"' for key, value in settings.items())

    def config(self, text: str) -> Path:
        """Write the lab's client configuration after these lines, which come first and therefore win."""
        file = self.folder / "config"
        file.write_text(text + "\n" + (self.lab.folder / "ssh/config").read_text())
        return file

    def run(self, *argv: str, at: str = "switch", timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        words = self.lab.command(at, argv)
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, cwd=self.folder)

    def ready(self, file: Path, project: Path | str = "", at: str = "switch", **files: Path) -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = json.loads(self._ask(file, project, at, files).stdout)
        return states

    def why_not(self, file: Path) -> str:
        done = self._ask(file, "", "switch", {})
        assert done.returncode == 1, done.stdout
        return error_in(done.stderr)

    def _ask(
        self, file: Path, project: Path | str, at: str, files: dict[str, Path]
    ) -> subprocess.CompletedProcess[str]:
        wanted = json.dumps({digest: str(local) for digest, local in files.items()})
        return self.run(sys.executable, "-c", _READY, str(file), str(project), wanted, at=at)


def error_in(error_text: str) -> str:
    """Check that the text is an error with a next step and no traceback; return it."""
    assert error_text.startswith("error: "), error_text
    assert "\n  next: " in error_text
    assert "Traceback" not in error_text
    return error_text


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    need_tool("ssh")
    need_tool("sshd")
    with running_lab(2, sshd=True) as built:
        yield built


@pytest.fixture
def site(lab: Lab, tmp_path: Path) -> Site:
    return Site(lab, tmp_path)


# Scripts


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_input_after_a_script_goes_to_its_program(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sh").symlink_to(need_tool(shell))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = Host(host="localhost")
    spec = HostsSpec(path=tmp_path / "hosts.toml", hosts=(host,))
    payload = os.urandom(300_000)
    done = run_script(host, spec, "printf 'begun '\nexec cat", [payload[:10], payload[10:]])
    assert done.stdout == b"begun " + payload
    failed = run_script(host, spec, "echo oh >&2\nexit 9")
    assert (failed.returncode, failed.stdout, failed.stderr) == (9, b"", "oh\n")
    assert run_script(host, spec, "true").returncode == 0


@pytest.mark.parametrize("script", ["exec sleep 60", "sleep 60; true"])
def test_a_script_that_never_ends_is_ended(tmp_path: Path, script: str) -> None:
    host = Host(host="localhost")
    spec = HostsSpec(path=tmp_path / "hosts.toml", hosts=(host,))
    with pytest.raises(HostError, match="localhost gave no answer within 1 s"):
        run_script(host, spec, script, deadline_s=1.0)
    with RemoteScript(host, spec) as running:
        running.start(script)
    assert running.process.poll() is not None


def test_a_missing_ssh_client_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    host = Host(host="laptop-b")
    with pytest.raises(HostError, match="ssh is not installed here"):
        run_script(host, HostsSpec(path=tmp_path / "hosts.toml", hosts=(host,)), "true")


# Ready for a launch


def test_two_hosts_are_made_ready_once(site: Site) -> None:
    project, text = site.folder / "project", site.folder / "a.tokens"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    text.write_bytes(os.urandom(100_000))
    file = site.hosts_file(site.host("node1"), site.host("root@node2", folder=site.folder / "node2"))
    first, second = site.ready(file, project, abc=text)
    assert (first["name"], first["address"], first["interface"]) == ("node1", "10.77.0.1", "eth0")
    assert (second["name"], second["address"], second["here"]) == ("node2", "10.77.0.2", False)
    assert first["python"] == sys.executable
    assert (Path(first["project"]) / "train.py").read_text() == "print(1)"
    assert Path(second["files"]["abc"]).read_bytes() == text.read_bytes()
    assert Path(second["files"]["abc"]).is_relative_to(site.folder / "node2")
    assert (Path(first["pythonpath"]) / "shoal/cluster/hosts/setup.py").is_file()
    assert_runs_from(site, "node1", first["pythonpath"])
    before = changed_at(site.folder / "node2")
    assert site.ready(file, project, abc=text)[0] == first
    assert changed_at(site.folder / "node2") == before, "nothing was written the second time"


def assert_runs_from(site: Site, node: str, pythonpath: str) -> None:
    """Check that the node runs the copied code, not an installed package."""
    words = f"PYTHONPATH={pythonpath} {sys.executable} -c 'import shoal; print(shoal.__file__)'"
    done = site.run("ssh", "-F", str(site.lab.folder / "ssh/config"), node, words)
    assert done.stdout == f"{pythonpath}/shoal/__init__.py\n"


def changed_at(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_ctime_ns for path in folder.rglob("*")}


def test_this_machine_takes_part_without_ssh(site: Site) -> None:
    file = site.hosts_file(site.host("node1"), site.host("node2"))
    first, second = site.ready(file, site.folder, at="node1")
    assert (first["here"], first["address"], first["project"]) == (True, "10.77.0.1", str(site.folder))
    assert first["python"] == sys.executable
    assert not (site.folder / "node1").exists(), "the local host needs no copy"
    assert (second["here"], second["address"]) == (False, "10.77.0.2")


def test_ssh_settings_for_interactive_logins_have_no_effect(site: Site) -> None:
    """Settings of the user that would interfere: a command, a shared connection, a forwarded port."""
    config = site.config(
        "Host node1\n  RemoteCommand echo hello\n  ControlMaster auto\n  ControlPersist 60\n"
        f"  ControlPath {site.folder}/socket\n  LocalForward 7777 localhost:22\n"
    )
    (ready,) = site.ready(site.hosts_file(site.host("node1"), config=config))
    assert ready["address"] == "10.77.0.1"
    assert not (site.folder / "socket").exists(), "no ssh stays in the background"


# Bad input


def test_an_unknown_host_is_an_error(site: Site) -> None:
    error_text = site.why_not(site.hosts_file(site.host("no-such-host")))
    assert "no address is known for no-such-host" in error_text
    error_text = refused(site, site.host("no-such-host"))
    assert "no machine is known by the name no-such-host" in error_text


def refused(site: Site, *hosts: str, config: Path | None = None, at: str = "switch") -> str:
    done = site.run(*shoal("setup", "--no-project", str(site.hosts_file(*hosts, config=config))), at=at)
    assert done.returncode == 3, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    return error_in(message)


def test_a_wrong_user_is_an_error(site: Site) -> None:
    error_text = refused(site, site.host("unknown-user@node1"))
    assert "node1 does not let this user in" in error_text
    assert f"ssh-copy-id -F {site.lab.folder}/ssh/config unknown-user@node1" in error_text


def test_a_changed_host_key_is_an_error(site: Site) -> None:
    subprocess.run(
        [need_tool("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(site.folder / "key")], check=True
    )
    known = site.folder / "known"
    known.write_text(f"10.77.0.1 {(site.folder / 'key.pub').read_text()}")
    error_text = refused(site, site.host("node1"), config=site.config(f"Host *\n  UserKnownHostsFile {known}\n"))
    assert "the host key of node1 has changed" in error_text
    assert f"ssh-keygen -f {known} -R 10.77.0.1, then: ssh -F {site.folder}/config node1" in error_text


def test_an_unknown_host_key_is_an_error(site: Site) -> None:
    known = site.folder / "known"
    config = site.config(f"Host *\n  UserKnownHostsFile {known}\n  StrictHostKeyChecking ask\n")
    error_text = refused(site, site.host("node1"), config=config)
    assert "the host key of node1 is not known here" in error_text
    assert f"say yes: ssh -F {site.folder}/config node1" in error_text
    assert not known.exists(), "no key is accepted without a question"


def test_a_host_without_ssh_server_is_an_error(site: Site) -> None:
    error_text = refused(site, site.host("node1"), config=site.config("Host node1\n  Port 2299\n"))
    assert "node1 is there, but no SSH server answers" in error_text


@pytest.mark.exhaustive
def test_a_host_that_is_cut_off_is_an_error_after_10_s(site: Site) -> None:
    site.lab.node("node1").cut("node2")
    try:
        error_text = refused(site, site.host("node1"), site.host("node2"), at="node1")
    finally:
        site.lab.heal()
    assert "node2 did not answer within 10 s" in error_text


def test_a_missing_python_is_an_error(site: Site) -> None:
    error_text = refused(site, site.host("node1", python="/no/such/python3"))
    assert "there is no /no/such/python3 on node1" in error_text
    assert "there are: /" in error_text
    assert "shoal has no environment on node1" in site.why_not(
        site.hosts_file(f'host = "node1"\nfolder = "{site.folder}/fresh"')
    )


def test_a_python_that_does_not_work_is_an_error(site: Site) -> None:
    broken = site.folder / "python"
    broken.write_text("#!/bin/sh\necho no library >&2\nexit 1\n")
    broken.chmod(0o755)
    assert f"{broken} on node1 does not work" in refused(site, site.host("node1", python=str(broken)))


def test_another_torch_version_is_an_error(site: Site) -> None:
    python = bare_python(site.folder / "other", torch="2.9.0")
    error_text = site.why_not(site.hosts_file(site.host("node1", python=python)))
    assert "the Python of node1 cannot run this: it has torch 2.9.0, and here is 2." in error_text
    assert f"next: shoal setup {site.folder}/hosts.toml" in error_text


def bare_python(folder: Path, **installed: str) -> str:
    """Make a real interpreter with only the named packages, which are empty."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name, version in installed.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder / "bin/python")


def test_a_python_without_ensurepip_is_an_error(site: Site) -> None:
    python = bare_python(site.folder / "debian")
    (packages,) = (site.folder / "debian").glob("lib/python3*/site-packages")
    (packages / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'ensurepip' else find(name, *more)\n"
    )
    error_text = refused(site, site.host("node1", python=python))
    assert "cannot make environments" in error_text
    assert f"sudo apt install python3.{sys.version_info[1]}-venv" in error_text


def test_an_unknown_interface_is_an_error(site: Site) -> None:
    error_text = site.why_not(site.hosts_file(site.host("node1", interface="wlan7")))
    assert "node1 has no interface wlan7" in error_text
    assert "there are: lo, eth0" in error_text


def test_an_address_of_another_host_is_an_error(site: Site) -> None:
    error_text = site.why_not(site.hosts_file(site.host("node1", address="10.77.0.9")))
    assert "node1 does not have the address 10.77.0.9" in error_text
    assert "10.77.0.1 on eth0" in error_text


def test_one_machine_with_two_names_is_refused(site: Site) -> None:
    config = site.config("Host twin\n  HostName 10.77.0.1\n")
    error_text = site.why_not(site.hosts_file(site.host("node1"), site.host("twin"), config=config))
    assert "node1 and twin in" in error_text
    assert "are the same machine" in error_text
    done = site.run(*shoal("setup", str(site.hosts_file(site.host("node1"), site.host("root@node1")))))
    assert done.returncode == 2
    assert "lists the host node1 twice" in error_in(done.stderr)


def test_two_hosts_that_fail_are_both_named(site: Site) -> None:
    error_text = refused(site, site.host("unknown-user@node1"), site.host("node2", python="/no/such/python3"))
    assert "2 of 2 hosts cannot be used" in error_text
    assert "node1 does not let this user in" in error_text
    assert "there is no /no/such/python3 on node2" in error_text


_SLEEP = """
import sys
from pathlib import Path
from shoal.cluster.hosts.spec import read_hosts
from shoal.cluster.hosts.ssh import run_script
from shoal.errors import ShoalError
spec = read_hosts(Path(sys.argv[1]))
try:
    run_script(spec.hosts[0], spec, "touch " + sys.argv[2] + "; exec sleep 50", deadline_s=60)
except ShoalError as error:
    sys.exit(error.render())
"""


@pytest.mark.parametrize(
    "begun", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_a_host_that_is_suspended_is_an_error(site: Site, begun: bool) -> None:
    """Before its reply and during a script: ssh notices it long before shoal's deadline."""
    mark = site.folder / "begun"
    words = [sys.executable, "-c", _SLEEP, str(site.hosts_file(site.host("node2"))), str(mark)]
    freeze = site.lab.node("node2").freeze
    if not begun:
        freeze()
    with subprocess.Popen(site.lab.command("switch", words), stderr=subprocess.PIPE, text=True) as process:
        if begun:
            wait_until(mark.exists)
            freeze()
        try:
            error_text = error_in(process.communicate(timeout=40)[1])
        finally:
            site.lab.node("node2").thaw()
    assert ("the connection to node2 was lost" if begun else "node2 did not answer within 10 s") in error_text
