"""Build the wheel and use it in an environment of its own, where the source tree is out of sight.

Exercises pyproject.toml.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.programs import TINY, set_flags

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--retries", "1", "--no-deps"]
    argv += ["--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    if "hatchling" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("no package index here offers hatchling, which builds the wheel")
    assert done.returncode == 0, done.stderr
    [file] = folder.glob("shoal-*.whl")
    return file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment that has shoal from the wheel, and the other packages of this one."""
    folder = tmp_path_factory.mktemp("clean") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    argv = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(argv, check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but its own .pth files are not read: the editable shoal stays out of sight.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    packages = (ROOT / "src" / "shoal", ROOT / "src" / "shoal_lab")
    paths = [path for package in packages for path in package.rglob("*") if path.is_file()]
    files = {path.relative_to(ROOT / "src").as_posix() for path in paths}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    missing = sorted(name for name in files - names if "__pycache__" not in name)
    assert not missing


def test_shoal_works_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def call(*words: object) -> str:
        argv = [str(environment / "bin" / str(words[0])), *map(str, words[1:])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(call("python", "-c", "import shoal; print(shoal.__file__)")).is_relative_to(environment)
    assert call("python", "-m", "shoal", "--version") == call("shoal", "--version")
    assert "demo" in call("shoal", "--help")
    assert "--steps" in call("shoal", "demo", "--help")
    call("shoal", "train", "--on", "local:1", "--steps", 5, "--out", "run", *set_flags(*TINY))
    assert "complete: 5 steps" in call("shoal", "verify", "run")
    call("shoal", "report", "run")
    assert "<title>run · finished</title>" in (tmp_path / "run" / "report.html").read_text()
