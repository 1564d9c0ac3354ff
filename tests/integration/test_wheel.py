"""Build the wheel and the source archive, and use the wheel in an environment of its own,
where the source tree is out of sight.

Exercises pyproject.toml, scripts/dist.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from tests.support.needs import HEAVY, need_tool
from tests.support.paths import ROOT
from tests.support.programs import TINY, set_flags

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), HEAVY[1]]


def build(tree: Path) -> tuple[Path, Path]:
    """Run `scripts/dist` in a copy of the source tree; return the source archive and the wheel."""
    (tree / ".venv").symlink_to(sys.prefix)
    done = subprocess.run([tree / "scripts" / "dist"], capture_output=True, text=True, timeout=240)
    if "hatchling" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("no package index here offers hatchling, which builds the wheel")
    assert done.returncode == 0, done.stderr
    [archive, wheel] = sorted((tree / "dist").iterdir(), key=lambda path: path.suffix)
    return archive, wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tree") / "shoal"
    leave = {".git", ".venv", "runs", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.is_dir() and path.name not in leave:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, folder)
    return build(folder)


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> Path:
    return built[1]


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


def test_make_dist_builds_what_is_tested_here() -> None:
    make = need_tool("make")
    # A make above this one, as in `make test-long`, has options for it, and would have it print its folder.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run([make, "--dry-run", "dist"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "scripts/dist"


def test_the_source_archive_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    archive, wheel = built
    with tarfile.open(archive) as opened:
        names = opened.getnames()
        opened.extractall(tmp_path, filter="data")
    assert not [name for name in names if re.search(r"^[^/]+/(\.venv|runs|dist|\.git)(/|$)|__pycache__", name)]
    again_archive, again = build(tmp_path / f"shoal-{shoal.__version__}")
    assert again.name == wheel.name == f"shoal-{shoal.__version__}-py3-none-any.whl"
    assert again.read_bytes() == wheel.read_bytes()
    assert again_archive.name == archive.name


Call = Callable[..., str]


@pytest.fixture
def call(environment: Path, tmp_path: Path) -> Call:
    """Return a function that runs a program of the environment in a folder from which the source tree is not seen."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*words: object) -> str:
        argv = [str(environment / "bin" / str(words[0])), *map(str, words[1:])]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=350, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_shoal_works_from_the_wheel(call: Call, environment: Path, tmp_path: Path) -> None:
    assert Path(call("python", "-c", "import shoal; print(shoal.__file__)").strip()).is_relative_to(environment)
    assert call("shoal", "--version") == f"shoal {shoal.__version__}\n" == call("python", "-m", "shoal", "--version")
    version = "import importlib.metadata as m; print(m.version('shoal'))"
    assert call("python", "-c", version).strip() == shoal.__version__
    assert "demo" in call("shoal", "--help")
    call("shoal", "train", "--on", "local:2", "--steps", 5, "--out", "run", *set_flags(*TINY))
    assert "complete: 5 steps" in call("shoal", "verify", "run")
    call("shoal", "report", "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<title>run · finished</title>" in page
    assert f"shoal {shoal.__version__}" in page


def test_a_script_runs_from_the_wheel(call: Call, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "own_script.py", tmp_path)
    assert "step 60: loss" in call("shoal", "run", "--on", "local:2", "own_script.py")


def test_the_demo_runs_from_the_wheel(call: Call) -> None:
    assert "equal to the bit" in call("shoal", "demo", "--steps", 12, "--out", "demo", *set_flags(*TINY))


def test_a_lesson_runs_from_the_wheel(call: Call) -> None:
    assert call("shoal", "learn", 1, "--yes")
