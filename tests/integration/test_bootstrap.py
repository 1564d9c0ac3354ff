"""Run scripts/bootstrap in a copy of the project, with its own PATH and package index, so no large file is downloaded.

The index offers a torch of a few bytes that is labelled as a CUDA build, as the real one is; a second index has its CPU
build. The copy's path contains a space.

Exercises scripts/bootstrap, host.facts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shoal.host.facts import ROCM_BUILD, cuda_build, torch_install_command
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

SCRIPT = ROOT / "scripts" / "bootstrap"
TOOLS = ["cat", "cut", "flock", "grep", "id", "mkdir", "readlink", "rm", "rmdir", "sed", "sha256sum"]
REAL_PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
DEADLINE_S = 100

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "shoal"
version = "0.1.0"
"""

BACKEND = """\
import shutil
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    shutil.copy("shoal-0.1.0-py3-none-any.whl", wheel_directory)
    return "shoal-0.1.0-py3-none-any.whl"
"""


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: dev\n{needs}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def write_index(index: Path) -> str:
    for package in index.iterdir():
        links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>\n' for wheel in package.glob("*.whl"))
        (package / "index.html").write_text(links)
    return index.as_uri()


def write_program(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


class Copy:
    """A project folder with the script in it, and the PATH, home folder and package indexes that the script uses."""

    def __init__(self, base: Path) -> None:
        self.root, self.bin = base / "a clone", base / "bin"
        self.venv = self.root / ".venv"
        self.state = self.venv / "shoal-setup"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(SCRIPT, self.root / "scripts")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.python("python3", "")
        self._write_project()
        self.system = base / "system"
        self.env = {"PATH": str(self.bin), "HOME": str(base), "TMPDIR": str(base), **self._write_indexes(base)}
        self.env["SHOAL_SYSTEM_ROOT"] = str(self.system)

    def _write_project(self) -> None:
        (self.root / "pyproject.toml").write_text(PYPROJECT)
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "constraints.txt").write_text("torch==2.13.0\n")
        write_wheel(self.root, "shoal", "0.1.0", "torch>=2.9")

    def _write_indexes(self, base: Path) -> dict[str, str]:
        write_wheel(base / "pypi" / "torch", "torch", "2.13.0", 'nvidia-nccl-cu13; platform_system == "Linux"')
        write_wheel(base / "pypi" / "nvidia-nccl-cu13", "nvidia_nccl_cu13", "2.29.7")
        # A requirement whose marker is false here does not make a CUDA build.
        write_wheel(base / "cpu" / "torch", "torch", "2.13.0+cpu", 'nvidia-nccl-cu13; platform_system == "Windows"')
        return {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_RETRIES": "1",
            "PIP_INDEX_URL": write_index(base / "pypi"),
            "SHOAL_TORCH_INDEX": write_index(base / "cpu"),
        }

    def python(self, name: str, before: str) -> None:
        """Put a Python on the PATH; the code `before` runs ahead of any program given with -c."""
        program = self.bin / name
        words = f"-c 'import sys; sys._base_executable = \"{program}\"; {before}; exec(sys.argv[2])'" if before else ""
        write_program(program, f"exec '{REAL_PYTHON}' {words} \"$@\"")

    def start(self, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.root / "scripts" / "bootstrap"],
            env=self.env | env,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, **env: str) -> tuple[int, str]:
        return finish(self.start(**env))

    def installed(self) -> set[str]:
        return {info.name.removesuffix(".dist-info") for info in self.venv.glob("lib/*/site-packages/*.dist-info")}


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out + err


Made = tuple[Copy, list[tuple[int, str]]]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Create an environment with two bootstraps that start at the same time."""
    copy = Copy(tmp_path_factory.mktemp("made"))
    both = [copy.start(), copy.start()]
    return copy, [finish(process) for process in both]


OLD = "sys.version_info = (3, 9, 2)"


def test_an_old_python_is_reported_with_the_install_command(copy: Copy) -> None:
    copy.python("python3", OLD)
    code, output = copy.run()
    assert code == 1
    assert "needs Python 3.11 or newer" in output
    assert "python3 is 3.9.2" in output
    assert "apt install python3.11 python3.11-venv" in output
    assert not copy.venv.exists()


def test_a_missing_python_is_reported(copy: Copy) -> None:
    (copy.bin / "python3").unlink()
    code, output = copy.run()
    assert code == 1
    assert "no python3 on the PATH" in output


def test_a_newer_python_beside_an_old_python3_is_found(copy: Copy) -> None:
    copy.python("python3", OLD)
    copy.python("python3.12", 'sys.version_info = (3, 12, 1); sys.modules["venv"] = None')
    code, output = copy.run()
    assert code == 1
    assert "Python 3.12.1" in output


def test_the_requested_python_is_not_replaced(copy: Copy) -> None:
    copy.python("old", OLD)
    code, output = copy.run(PYTHON="old")
    assert code == 1
    assert "old is 3.9.2" in output


def test_a_missing_venv_module_is_reported_with_its_package(copy: Copy) -> None:
    copy.python("python3", 'sys.version_info = (3, 13, 5); sys.modules["ensurepip"] = None')
    code, output = copy.run()
    assert code == 1
    assert "apt install python3.13-venv" in output
    assert not copy.venv.exists()


def test_an_existing_foreign_venv_folder_is_not_changed(copy: Copy) -> None:
    copy.venv.mkdir()
    (copy.venv / "notes.txt").write_text("user data")
    code, output = copy.run()
    assert code == 1
    assert f"mv '{copy.venv}'" in output
    assert (copy.venv / "notes.txt").read_text() == "user data"


@pytest.mark.long
def test_an_unreachable_index_has_its_own_error(copy: Copy) -> None:
    code, output = copy.run(PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert code == 1
    assert "the package index cannot be reached" in output
    assert "No matching distribution found for torch==2.13.0" in output, "pip's error is not shown"
    assert copy.state.read_text().splitlines()[1] == "incomplete"


@pytest.mark.long
def test_two_concurrent_bootstraps_create_one_environment(made: Made) -> None:
    _, results = made
    assert [code for code, _ in results] == [0, 0], results
    assert sum("making .venv" in output for _, output in results) == 1
    assert sum("another bootstrap is at work" in output for _, output in results) == 1


@pytest.mark.long
def test_without_a_gpu_the_cpu_build_is_installed_and_reported(made: Made) -> None:
    copy, results = made
    output = max((output for _, output in results), key=len)
    assert "a CUDA build of about 3 GB, but there is no NVIDIA GPU here" in output
    assert copy.env["SHOAL_TORCH_INDEX"] in output
    assert "pip install" not in output
    assert {"torch-2.13.0+cpu", "shoal-0.1.0"} <= copy.installed()


def advice(copy: Copy, build: str) -> str:
    """Run the script's own functions in a shell, as after an installation of this `build` of torch."""
    functions = SCRIPT.read_text().removesuffix("\nmain\n")
    (copy.root / "scripts" / "advice").write_text(f"{functions}\nbuild={build} offered=2.13.0\nadvise_gpu_build\n")
    argv = ["/bin/sh", str(copy.root / "scripts" / "advice")]
    done = subprocess.run(argv, env=copy.env, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    return done.stdout


def test_without_a_gpu_nothing_is_advised(copy: Copy) -> None:
    assert advice(copy, "cpu") == ""


@pytest.mark.parametrize(
    ("header", "build", "expected"),
    [
        ("Driver Version: 580.95.05   CUDA Version: 13.0", "cpu", "cu130"),
        ("KMD Version: 610.43.02     CUDA UMD Version: 13.3", "cpu", "cu130"),
        ("Driver Version: 535.183.01   CUDA Version: 12.2", "cpu", "cu126"),
        ("Driver Version: 535.183.01   CUDA Version: 12.2", "cuda", "cu126"),
        ("Driver Version: 580.95.05   CUDA Version: 13.0", "cuda", None),
    ],
)
def test_the_build_for_an_nvidia_gpu_follows_its_driver(
    copy: Copy, header: str, build: str, expected: str | None
) -> None:
    write_program(copy.bin / "nvidia-smi", f"echo '| NVIDIA-SMI 1.2   {header}     |'")
    output = advice(copy, build)
    if expected is None:
        assert output == ""
        return
    command = torch_install_command(f"{copy.root}/.venv/bin/python", "2.13.0", expected)
    assert command in output
    assert cuda_build(header.split()[-1]) == expected


def test_a_driver_too_old_for_torch_is_reported(copy: Copy) -> None:
    write_program(copy.bin / "nvidia-smi", "echo '| NVIDIA-SMI 470.1  Driver Version: 470.1  CUDA Version: 11.4 |'")
    output = advice(copy, "cpu")
    assert "too old" in output
    assert "pip install" not in output


def test_an_amd_gpu_gets_the_command_for_the_rocm_build(copy: Copy) -> None:
    (copy.system / "dev").mkdir(parents=True)
    (copy.system / "dev" / "kfd").touch()
    output = advice(copy, "cpu")
    assert "does not use this machine's AMD GPU" in output
    assert torch_install_command(f"{copy.root}/.venv/bin/python", "2.13.0", ROCM_BUILD) in output


@pytest.mark.parametrize(("class_", "is_card"), [("0x030200", True), ("0x120000", True), ("0x040300", False)])
def test_a_card_without_a_driver_is_found_on_the_bus(copy: Copy, class_: str, is_card: bool) -> None:
    device = copy.system / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text(f"{class_}\n")
    assert ("no driver that works" in advice(copy, "cpu")) == is_card


@pytest.mark.long
def test_a_second_run_needs_neither_python_nor_index(made: Made) -> None:
    copy, _ = made
    before = copy.state.stat().st_mtime_ns
    (copy.bin / "python3").rename(copy.bin / "hidden")
    try:
        code, output = copy.run(PIP_INDEX_URL="file:///nowhere")
    finally:
        (copy.bin / "hidden").rename(copy.bin / "python3")
    assert (code, output) == (0, "bootstrap: .venv is up to date\n")
    assert copy.state.stat().st_mtime_ns == before


@pytest.mark.long
def test_changed_requirements_are_installed_into_the_same_venv(made: Made) -> None:
    copy, _ = made
    (copy.venv / "notes.txt").write_text("kept")
    with (copy.root / "constraints.txt").open("a") as constraints:
        constraints.write("# renewed\n")
    code, output = copy.run()
    assert code == 0, output
    assert "making .venv" not in output
    assert "installing shoal" in output
    assert (copy.venv / "notes.txt").exists()


@pytest.mark.long
def test_an_interrupted_setup_is_recreated_and_a_gpu_keeps_the_cuda_build(copy: Copy) -> None:
    write_program(copy.bin / "nvidia-smi", "echo 'GPU 0: a test'")
    first = copy.start()
    wait_until(lambda: copy.state.exists() and f"{copy.root} /" in copy.state.read_text())  # .venv exists, pip runs
    os.killpg(first.pid, signal.SIGKILL)
    assert finish(first)[0] == -signal.SIGKILL
    (copy.venv / "half").write_text("a truncated package")
    code, output = copy.run()
    assert code == 0, output
    assert "making it anew" in output
    assert "keeping it for this machine's NVIDIA GPU" in output
    assert not (copy.venv / "half").exists()
    assert {"torch-2.13.0", "nvidia_nccl_cu13-2.29.7"} <= copy.installed()
