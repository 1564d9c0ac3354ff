"""torchft in an environment of its own, made once under the cache folder; or why there is none."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from shoal.data.prepare import cache_root

PACKAGE = "torchft-nightly"
# What its makers have published; nobody here has measured it, and none of it is seconds for one fault.
PUBLISHED = (
    "its makers report training through 1,200 to 2,000 injected failures, one every 15 s; its "
    "documentation calls the lighthouse a single point of failure"
)
_NEEDED = ("numpy", "pydantic")
_DEADLINE_S = 900


class Unavailable(Exception):
    pass


def torchft_python() -> Path:
    """Its interpreter. Torch has the version that the other rivals use."""
    folder = cache_root(None) / "bench" / "torchft"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _call([sys.executable, "-m", "venv", "--clear", str(folder)])
        torch = f"torch=={version('torch').partition('+')[0]}"
        _call([str(python), "-m", "pip", "install", "--quiet", PACKAGE, torch, *_NEEDED])
        (folder / "complete").touch()
    return python


def _call(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = " ".join(errors) or done.stderr.strip()
        place = f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"
        raise Unavailable(f"{PACKAGE} cannot be installed here ({place}): {why}")
