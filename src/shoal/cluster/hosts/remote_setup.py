"""Runs on a host, from the copy of shoal there: make or update shoal's environment. Standard library only.

The request is one line of JSON on stdin, which then stays open: when it is closed, the caller has ended, and this
program ends too. Lines of JSON on stdout tell what is being done and how it ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_MOST_LOG_CHARACTERS = 4000
_CHECK = """
import importlib.metadata, sys
for requirement in sys.argv[1:]:
    name, version = requirement.split("==")
    found = importlib.metadata.version(name)
    if found.partition("+")[0] != version:
        sys.exit(f"{name} {found} is installed after pip was asked for {version}")
import torch
"""
_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV")


class SetupFailed(Exception):
    def __init__(self, kind: str, log: str = "", **numbers: int) -> None:
        """`kind` is the part that failed, `log` the output of the program that failed."""
        super().__init__(kind)
        self.answer = {"error": kind, "log": log, **numbers}


@dataclass(frozen=True)
class SetupRequest:
    folder: Path
    requirements: list[str]
    constraints: list[str]
    wheels: bool  # install only from the folder of that name
    needed_bytes: int

    @property
    def env(self) -> Path:
        return self.folder / "env"

    @property
    def python(self) -> Path:
        return self.env / "bin/python"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"


def make(request: SetupRequest) -> None:
    with _locked(request.folder), _temporary(request.temporary):
        free = shutil.disk_usage(request.folder).free
        if free < request.needed_bytes:
            raise SetupFailed("room", needed=request.needed_bytes, free=free)
        request.log.write_bytes(b"")
        if not _is_sound(request):
            _make_environment(request)
        _install(request)
        send(doing="trying torch")
        _run(request, "use", ["-c", _CHECK, *request.requirements])
        shutil.rmtree(request.folder / "wheels", ignore_errors=True)


def _is_sound(request: SetupRequest) -> bool:
    """Tell whether the environment has this Python's minor version and a pip that works."""
    question = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(OSError):
        done = subprocess.run([request.python, "-E", "-c", question], capture_output=True, text=True, check=False)
        return done.stdout.strip() == f"{sys.version_info[0]}.{sys.version_info[1]}"
    return False


def _make_environment(request: SetupRequest) -> None:
    send(doing="making the environment")
    env = request.env
    if env.exists() and not (env / "pyvenv.cfg").exists() and any(env.iterdir()):
        raise SetupFailed("in the way", log=str(env))
    shutil.rmtree(env, ignore_errors=True)
    _run(request, "venv", ["-m", "venv", str(env)], python=Path(sys.executable))


def _install(request: SetupRequest) -> None:
    files = {"requirements.txt": request.requirements, "constraints.txt": request.constraints}
    for name, lines in files.items():
        (request.temporary / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    held = ["-c", str(request.temporary / "constraints.txt")]
    torch = next(line for line in request.requirements if line.startswith("torch=="))
    if not request.wheels and _wants_cpu_build(request):
        send(doing=f"installing {torch}, the CPU build")
        _pip(request, ["--no-deps", "--index-url", CPU_INDEX, torch, *held])
    send(doing=f"installing {torch} and what else is needed")
    source = ["--no-index", "--find-links", str(request.folder / "wheels")] if request.wheels else []
    _pip(request, [*source, "-r", str(request.temporary / "requirements.txt"), *held])


def _wants_cpu_build(request: SetupRequest) -> bool:
    """pip installs a CUDA build by default: gigabytes that a machine without a GPU does not need."""
    if Path("/proc/driver/nvidia").exists():
        return False
    done = subprocess.run(
        [request.python, "-m", "pip", "config", "list"], capture_output=True, text=True, env=_variables(request)
    )
    return re.search(r"index-url|find-links|no-index", done.stdout) is None


def _pip(request: SetupRequest, words: Sequence[str]) -> None:
    _run(request, "pip", ["-m", "pip", "install", "--no-input", "--disable-pip-version-check", *words])


def _run(request: SetupRequest, kind: str, words: Sequence[str], python: Path | None = None) -> None:
    with request.log.open("ab") as log:
        began = log.tell()
        argv = [str(python or request.python), *words]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_variables(request), start_new_session=True
        )
        _children.append(process)
        code = process.wait()
    if code:
        raise SetupFailed(kind, log=request.log.read_bytes()[began:][-_MOST_LOG_CHARACTERS:].decode(errors="replace"))


def _variables(request: SetupRequest) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    if request.wheels:
        # From the wheels alone: pip's settings on the host may name other sources.
        kept = {name: value for name, value in kept.items() if not name.startswith("PIP_")}
        kept["PIP_CONFIG_FILE"] = os.devnull
    # /tmp is often small, or in memory; torch unpacks to more than a gigabyte.
    return {**kept, "TMPDIR": str(request.temporary), "LC_ALL": "C"}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one setup run at a time: two would install into each other's environment. The lock ends with the process."""
    with (folder / ".setup").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SetupFailed("busy") from None
        yield


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_children: list[subprocess.Popen[bytes]] = []


def end_with_stdin() -> None:
    """End when stdin is closed: SSH gives no other sign that the caller has ended. Not through `sys.stdin`, whose lock
    this thread would hold when the interpreter ends, which aborts it (seen)."""
    while os.read(0, 4096):
        pass
    for process in _children:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(1)


def send(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=end_with_stdin, daemon=True).start()
    try:
        make(SetupRequest(**{**request, "folder": Path(request["folder"])}))
    except SetupFailed as error:
        send(**error.answer)
        return 1
    except OSError as error:
        send(error="full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "disk", log=str(error))
        return 1
    send(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
