"""Run the shoal command in its own process."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shoal.cli.main import main
from tests.support import warm_starts
from tests.support.paths import ROOT
from tests.support.ranks import FORKSERVER

# Small enough that process start dominates the time.
TINY = ("model.layers=1", "model.heads=2", "model.width=16", "model.seq_len=16", "data.sentences=400")


def shoal_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "shoal", *map(str, arguments)]


def shoal(
    *arguments: str | Path, cwd: Path | None = None, timeout_s: float = 90.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a process forked from the server of `run_ranks`, which has imported all of shoal: that takes a
    hundredth of the time of a new interpreter. What it starts on this machine is forked too (`warm_starts`)."""
    words = [str(ROOT / "src/shoal/__main__.py"), *map(str, arguments)]
    env = {**os.environ, "PYTHONWARNINGS": "", **variables}
    pipes = [FORKSERVER.Pipe(duplex=False) for _ in ("stdout", "stderr")]
    writers = [writer for _, writer in pipes]
    process = FORKSERVER.Process(target=_run_main, args=(words, cwd or Path.cwd(), env, *writers))
    deadline = time.monotonic() + timeout_s
    try:
        process.start()
        for writer in writers:
            writer.close()
        # Until both are closed, as a shell reads them: a process that keeps one of them open is noticed.
        out, err = _read_to_end([reader for reader, _ in pipes], deadline)
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            raise subprocess.TimeoutExpired(words, timeout_s, out, err)
        return subprocess.CompletedProcess(words, process.exitcode, out.decode(), err.decode())
    finally:
        process.kill()
        process.join()
        process.close()


def _read_to_end(readers: Sequence[Connection], deadline: float) -> list[bytes]:
    texts = dict.fromkeys(readers, b"")
    is_open = list(readers)
    while is_open:
        ready = wait(is_open, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in readers:
            if reader in ready:
                block = os.read(reader.fileno(), 1 << 16)
                texts[reader] += block
                if not block:
                    is_open.remove(reader)
                    reader.close()
    return list(texts.values())


def _run_main(words: list[str], folder: Path, env: Mapping[str, str], out: Connection, err: Connection) -> None:
    """Become a process of the command line, in a fork of the server."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, out.fileno(), err.fileno())):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    sys.argv[:] = words
    warm_starts.install()
    try:
        main()
    finally:
        atexit._run_exitfuncs()


def shoal_in_new_python(
    *arguments: str | Path, cwd: Path | None = None, timeout_s: float = 90.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new interpreter: for tests of its start, of its limits, and of where it imports from."""
    return subprocess.run(
        shoal_command(*arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "", **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def train_tiny(out: Path, *arguments: str | Path, sets: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Train the smallest model; return the manifest of the run."""
    done = shoal("train", "--out", out, "--json", *arguments, *set_flags(*TINY, *sets), **options)
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = json.loads(done.stdout)
    return manifest


def set_flags(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events_of(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """Return the rank's events of a kind, also of a run that has not begun or that is writing its last line."""
    path = run / "events" / f"rank-{rank}.jsonl"
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def steps_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return events_of(run, "step", rank)
