"""`shoal setup` over real SSH: environments are made, reused and refused; a killed setup leaves no process.

Exercises cluster.hosts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.hosts.facts import wanted_here
from shoal_lab.lab import Lab
from tests.integration.cluster.test_hosts_copy import git
from tests.integration.cluster.test_hosts_ssh import Site, bare_python, changed_at, error_in, refused
from tests.support.labs import running_lab, shoal
from tests.support.needs import need_tool
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def small_disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Mount small disks before the lab is built: its nodes see only the mounts of that time."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    options = {"tiny": "size=256k", "few files": "size=64m,nr_inodes=40"}
    disks = {name: tmp_path_factory.mktemp("disk") for name in options}
    for name, disk in disks.items():
        subprocess.run([need_tool("mount"), "-t", "tmpfs", "-o", options[name], "shoal-test", str(disk)], check=True)
    yield disks
    for disk in disks.values():
        subprocess.run([need_tool("umount"), str(disk)], check=True)


@pytest.fixture(scope="module")
def lab(small_disks: dict[str, Path]) -> Iterator[Lab]:
    need_tool("ssh")
    need_tool("sshd")
    with running_lab(2, sshd=True) as built:
        yield built


@pytest.fixture
def site(lab: Lab, tmp_path: Path) -> Site:
    return Site(lab, tmp_path)


def set_up(site: Site, file: Path, *words: str) -> dict[str, dict[str, Any]]:
    """Run `shoal setup`; return what was done, by host."""
    done = site.run(*shoal("setup", str(file), "--json", *words), timeout_s=110)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    hosts = {host["name"]: host for host in answer["hosts"]}
    assert answer["changed"] == any(host[part] in ("made", "updated") for host in hosts.values() for part in PARTS)
    return hosts


PARTS = ("environment", "code", "project")


def states(host: dict[str, Any]) -> tuple[str, ...]:
    return tuple(host[part] for part in PARTS)


def test_hosts_whose_python_has_all_packages_get_only_code_and_project(site: Site) -> None:
    project = site.folder / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    git(project, "init", "-q")
    file = site.hosts_file(site.host("node1"), site.host("node2"))
    words = ("--project", str(project))
    assert {states(host) for host in set_up(site, file, *words).values()} == {("present", "made", "made")}
    assert not (site.folder / "node1/env").exists()
    before = changed_at(site.folder / "node1")
    again = site.run(*shoal("setup", str(file), *words))
    assert "everything is in place; nothing was changed" in again.stdout
    assert again.stdout.endswith(f" train --on {file}\n")
    assert changed_at(site.folder / "node1") == before

    (project / "train.py").rename(project / "main.py")
    (there,) = (site.folder / "node2/projects").iterdir()
    (there / "result").write_text("made there")
    assert states(set_up(site, file, *words)["node2"]) == ("present", "present", "updated")
    assert {path.name for path in there.iterdir() if path.name[0] != "."} == {"main.py", "result"}


def test_setup_changes_nothing_on_this_machine(site: Site) -> None:
    file = site.hosts_file(f'host = "node1"\nfolder = "{site.folder}/node1"')
    done = site.run(*shoal("setup", str(file), "--json"), at="node1")
    assert json.loads(done.stdout)["hosts"][0]["environment"] == "ours"
    assert not (site.folder / "node1").exists()


# Environments, with the real pip and venv, from small wheels with the real package names


def make_wheel(folder: Path, name: str, version: str, module: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sums = {path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for path, text in files.items()}
    record = "".join(f"{path},sha256={sums[path].rstrip(b'=').decode()},{len(files[path])}\n" for path in files)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)


def make_wheels(folder: Path) -> Path:
    folder.mkdir()
    for name, version in wanted_here().packages.items():
        make_wheel(folder, name, version)
    return folder


def bare_host(site: Site) -> str:
    return site.host("node1", python=bare_python(site.folder / "bare"))


@dataclass(frozen=True)
class PreparedHost:
    """Hold a host whose environment was made from wheels."""

    site: Site
    file: Path
    wheels: Path
    done: dict[str, Any]

    @property
    def python(self) -> Path:
        return self.site.folder / "node1/env/bin/python"

    def set_up(self) -> subprocess.CompletedProcess[str]:
        words = ("--no-project", "--json", "--wheels", str(self.wheels))
        return self.site.run(*shoal("setup", str(self.file), *words), timeout_s=110)

    def with_old_torch(self) -> PreparedHost:
        make_wheel(self.wheels, "torch", "1.0.0")
        pip = (
            self.python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--find-links",
            self.wheels,
            "torch==1.0.0",
        )
        subprocess.run(pip, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
        return self


@pytest.fixture(scope="module")
def made(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> PreparedHost:
    site = Site(lab, tmp_path_factory.mktemp("made"))
    file, wheels = site.hosts_file(bare_host(site)), make_wheels(site.folder / "wheels")
    return PreparedHost(site, file, wheels, set_up(site, file, "--no-project", "--wheels", str(wheels))["node1"])


def test_an_environment_is_made_once(made: PreparedHost) -> None:
    folder = made.site.folder / "node1"
    assert (made.done["environment"], made.done["python"]) == ("made", str(made.python))
    assert made.done["why"].startswith("torch is not installed")
    assert installed(made.python) == dict(wanted_here().packages)
    assert {path.name for path in folder.iterdir()} == {"code", "env", "setup.log", ".setup"}
    assert json.loads(made.set_up().stdout)["hosts"][0]["environment"] == "present"
    assert made.site.ready(made.file)[0]["python"] == str(made.python)


def test_an_old_environment_is_named_and_updated(made: PreparedHost) -> None:
    made.with_old_torch()
    assert "it has torch 1.0.0, and here is" in made.site.why_not(made.file)
    (updated,) = json.loads(made.set_up().stdout)["hosts"]
    assert updated["environment"] == "updated"
    assert updated["why"].startswith("it has torch 1.0.0, and here is ")
    assert installed(made.python) == dict(wanted_here().packages)


def test_a_missing_wheel_is_named(made: PreparedHost) -> None:
    version = wanted_here().packages["torch"]
    made.with_old_torch()
    next(made.wheels.glob(f"torch-{version}-*")).unlink()
    done = made.set_up()
    make_wheel(made.wheels, "torch", version)
    assert done.returncode == 3
    assert f"pip on node1 finds no torch=={version}" in error_in(done.stderr[done.stderr.index("error: ") :])
    done = made.site.run(*shoal("setup", str(made.file), "--no-project", "--wheels", str(made.site.folder)))
    assert done.returncode == 2
    assert "there are no wheels in" in error_in(done.stderr)


def test_a_torch_that_cannot_be_imported_is_an_error(made: PreparedHost) -> None:
    version = wanted_here().packages["torch"]
    made.with_old_torch()
    make_wheel(made.wheels, "torch", version, "raise ImportError('libgomp is missing')")
    done = made.set_up()
    make_wheel(made.wheels, "torch", version)
    assert done.returncode == 3
    assert "cannot be used" in error_in(done.stderr[done.stderr.index("error: ") :])
    assert "libgomp is missing" in done.stderr


def installed(python: Path) -> dict[str, str]:
    names = list(wanted_here().packages)
    script = f"import importlib.metadata as m; print(*(m.version(name) for name in {names}))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def test_a_killed_setup_leaves_no_process(site: Site) -> None:
    file, wheels = site.hosts_file(bare_host(site)), make_wheels(site.folder / "wheels")
    words = site.lab.command("switch", shoal("setup", str(file), "--no-project", "--wheels", str(wheels)))
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "making the environment" in line:
                break
        assert any("hosts.remote_setup" in command for _, command in site.lab.processes("node1"))
        os.killpg(process.pid, signal.SIGKILL)

    def left() -> list[str]:
        return [command for _, command in site.lab.processes("node1") if str(site.folder) in command]

    wait_until(lambda: not left(), 40, why=left)
    # The environment itself may have been there already when the kill arrived.
    assert set_up(site, file, "--no-project", "--wheels", str(wheels))["node1"]["environment"] in {"made", "updated"}


def test_another_folder_in_the_place_of_the_environment_is_kept_and_refused(site: Site) -> None:
    (site.folder / "node1/env").mkdir(parents=True)
    (site.folder / "node1/env/precious").write_text("")
    file, wheels = site.hosts_file(bare_host(site)), make_wheels(site.folder / "wheels")
    done = site.run(*shoal("setup", str(file), "--no-project", "--wheels", str(wheels)))
    assert done.returncode == 3
    assert "is in the way" in done.stderr
    assert (site.folder / "node1/env/precious").exists()


# Full disks


def test_a_disk_without_room_is_refused(site: Site, small_disks: dict[str, Path]) -> None:
    error_text = refused(site, site.host("node1", folder=small_disks["tiny"] / "shoal"))
    assert "node1 has no room: " in error_text
    assert "are free" in error_text
    assert f"df -h {small_disks['tiny']}/shoal/code/" in error_text
    assert not any((small_disks["tiny"] / "shoal/code").iterdir())


def test_a_disk_that_fills_up_during_the_copy_is_an_error(site: Site, small_disks: dict[str, Path]) -> None:
    error_text = refused(site, site.host("node1", folder=small_disks["few files"] / "shoal"))
    assert "the disk of node1 is full" in error_text
    assert "No space left on device" in error_text
    assert not any((small_disks["few files"] / "shoal/code").iterdir())


def test_a_folder_that_cannot_be_written_is_refused(site: Site) -> None:
    (site.folder / "file").write_text("")
    error_text = refused(site, site.host("node1", folder=site.folder / "file"))
    assert "cannot copy to" in error_text
    assert sys.executable not in error_text
